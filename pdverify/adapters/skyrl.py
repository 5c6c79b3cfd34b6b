"""SkyRL's policy losses as targets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdverify.adapters.entries import ADAPTERS, Adapter, Framework
from pdverify.adapters.gradients import score_form
from pdverify.adapters.loading import load

if TYPE_CHECKING:
    from torch import Tensor

FRAMEWORK = Framework(
    name="skyrl",
    package="skyrl",
    version="0.3.0",
    imports="skyrl",
    requirements=("jaxtyping==0.3.11", "loguru==0.7.3", "omegaconf==2.4.0"),
    no_deps=True,
    placeholders=("ray", "skyrl.train.config"),
    bare=("skyrl.backends",),
    notes=(
        (
            "Inside |log r| <= 20 every decision that is certain is right in `dppo_policy_loss` "
            "at any threshold that is in use, and in `ppo_policy_loss` and `cispo`. A = 0 is "
            "kept explicitly."
        ),
        (
            "`dppo_policy_loss` and `ppo_policy_loss` differentiate through a log-ratio clamped "
            "to [-20, 20] (`safe_exp_delta`): outside it the gradient is exactly 0, which is "
            "judged as dropped. For r < 2e-9 (`mask.small-mass`, `loss.small-ratio`) what is "
            "lost is that small. For A < 0 and r above 4.9e8 (`loss.overflow`) a kept token, whose "
            "step would bring the policies together, gets no gradient; the definition has a cap "
            "there, this loss has none."
        ),
        (
            "`binary_kl` adds 1e-8 inside the logs of 1 - p, as the reference implementation "
            "does. That limits D where 1 - pi_k falls below 1e-8, which float32 does not "
            "resolve in 1 - p anyway; where it shows in a check, the threshold is above 10 "
            "nats, and the recommended one is 0.05."
        ),
        (
            "Both losses are of the form `-A r`: same gradient as the score-function form, "
            "another value."
        ),
        (
            "Version 0.3.0 is the newest for Python 3.11. The judged functions "
            "`dppo_policy_loss` and `ppo_policy_loss` read the same in 0.4.0, which needs "
            "Python 3.12. With the defaults of 0.3.0 `cispo` has the bounds [1, 6], so that "
            "tokens with r < 1 weigh 1; 0.4.0 has [0, 5]. Here the lower bound is 0."
        ),
        (
            "Left out: `gspo` decides by sequence; `sapo`, `clip_cov`, `kl_cov`, "
            "`cross_entropy` and `importance_sampling` have no mask of ours; `rollout_is` and "
            "the off-policy corrections drop by a band of the ratio whatever the sign of A."
        ),
    ),
)

Batch = tuple["Tensor", "Tensor", "Tensor", "Tensor"]


def dppo_tv(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
) -> dict[str, Tensor]:
    """``dppo_policy_loss`` with ``binary_tv``, mean over tokens."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    return _dppo(batch, "binary_tv", delta_low, delta_high)


def dppo_kl(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
) -> dict[str, Tensor]:
    """``dppo_policy_loss`` with ``binary_kl``, mean over tokens."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    return _dppo(batch, "binary_kl", delta_low, delta_high)


def ppo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """``ppo_policy_loss`` of type ``regular``, mean over tokens."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    own = {
        "policy_loss_type": "regular",
        "eps_clip_low": clip_low,
        "eps_clip_high": clip_high,
    }
    return {"loss": score_form(_loss("ppo_policy_loss", batch, own), logprobs, response_mask)}


def cispo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """``compute_policy_loss_cispo`` without a lower bound of the ratio, mean over tokens."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    clips = {"cispo_eps_clip_low": 1.0, "cispo_eps_clip_high": ratio_cap - 1.0}
    own = {"policy_loss_type": "cispo", "cispo": SimpleNamespace(**clips)}
    return {"loss": _loss("compute_policy_loss_cispo", batch, own)}


def _dppo(batch: Batch, kind: str, delta_low: float, delta_high: float) -> dict[str, Tensor]:
    own = {
        "policy_loss_type": "dppo",
        "dppo": SimpleNamespace(dppo_type=kind, delta_low=delta_low, delta_high=delta_high),
    }
    logprobs, _, _, response_mask = batch
    return {"loss": score_form(_loss("dppo_policy_loss", batch, own), logprobs, response_mask)}


def _loss(function: str, batch: Batch, own: dict[str, Any]) -> Tensor:
    losses: Any = load(FRAMEWORK, "skyrl.backends.skyrl_train.utils.ppo_utils")
    logprobs, behavior, advantages, response_mask = batch
    mask = response_mask.to(logprobs.dtype)
    # the losses sum; the trainer puts the mean into the advantages, by this function
    scaled = losses.apply_loss_reduction_to_advantages_minibatch(
        advantages,
        mask,
        loss_reduction="token_mean",
        micro_batch_size=len(advantages),
        max_seq_len=advantages.shape[-1],
    )
    loss, _ = getattr(losses, function)(
        logprobs,
        behavior,
        scaled,
        SimpleNamespace(off_policy_correction=None, **own),
        loss_mask=mask,
        # None takes the old policy as the behavior policy, and no off-policy correction on top
        rollout_logprobs=None,
    )
    tensor: Tensor = loss
    return tensor


# beyond its clamp the loss has no gradient, whatever the direction; 1e-8 is added, not a floor
_READ_AS = (("symmetric-mask", None), ("tail-floor-1e-8", "log-epsilon-1e-8"))


def _add(
    name: str, function: str, mask: str, *options: str, settings: str, gradient_only: bool = True
) -> None:
    adapter = Adapter(
        FRAMEWORK,
        f"pdverify.adapters.skyrl:{name.replace('-', '_')}",
        f"skyrl.backends.skyrl_train.utils.ppo_utils.{function}",
        "skyrl/backends/skyrl_train/utils/ppo_utils.py",
        mask,
        ("--aggregation", "token-mean", *options),
        settings,
        gradient_only,
        _READ_AS,
    )
    ADAPTERS.add(f"skyrl/{name}", adapter)


_MEAN = "loss_reduction token_mean; no off-policy correction on top"
for _name, _type in (("dppo-tv", "binary_tv"), ("dppo-kl", "binary_kl")):
    _add(
        _name, "dppo_policy_loss", f"dppo-binary-{_name[-2:]}", "--ratio-cap", "1e30",
        settings=f"dppo_type {_type}; {_MEAN}",
    )  # fmt: skip
_add(
    "ppo", "ppo_policy_loss", "ppo-clip", "--ratio-cap", "1e30",
    settings=f"policy_loss_type regular; {_MEAN}",
)  # fmt: skip
_add(
    "cispo", "compute_policy_loss_cispo", "none",
    settings="cispo_eps_clip_low 1, so that no lower bound holds (the default is 0);"
    f" 1 + cispo_eps_clip_high is the ratio cap; {_MEAN}",
    gradient_only=False,
)  # fmt: skip
