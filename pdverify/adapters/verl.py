"""verl's policy losses as targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdverify.adapters.entries import ADAPTERS, Adapter, Framework
from pdverify.adapters.gradients import score_form
from pdverify.adapters.loading import load

if TYPE_CHECKING:
    from torch import Tensor

FRAMEWORK = Framework(
    name="verl",
    package="verl",
    version="0.9.1",
    imports="verl",
    requirements=(
        "tensordict==0.10.0",
        "transformers==5.10.2",
        "omegaconf==2.4.0",
        "codetiming==1.4.0",
        "orjson==3.13.0",
        "psutil==7.2.2",
    ),
    no_deps=True,
    placeholders=("ray",),
    notes=(
        (
            "At any threshold that is in use every decision that is certain is right, in "
            "`dppo_tv`, `dppo_kl`, the PPO clip of `vanilla` and `cispo`. What differs lies "
            "outside anything ordinary training reaches. `dppo_kl` adds 1e-8 inside the logs of "
            "1 - p, which limits D where 1 - pi_k falls below 1e-8, less than float32 resolves "
            "in 1 - p; where it shows in a check, the threshold is above 10 nats."
        ),
        (
            "All of them clamp the log-ratio to [-20, 20] before `exp`. In `dppo_*` and `cispo` "
            "the weight of a kept token therefore stays above 2e-9, which changes nothing. "
            "`vanilla` differentiates through the clamp: beyond it the gradient is 0, also for "
            "A < 0 and r above 4.9e8, where PPO's clip keeps the token. Its dual clip, 3 by "
            "default and out of reach here, drops such tokens much earlier."
        ),
        (
            "The DPPO and CISPO losses multiply by what stands on padding. With `token-mean` a "
            "NaN there leaves the loss itself right and reaches the gradient; with the "
            "`seq-mean-*` reductions the loss is NaN as well. `vanilla` shields its gradient."
        ),
        (
            "Settings to know, not judged here: `clip_ratio_c`, the cap of the ratio, reads as "
            "20 in the loss and is 3 in `ActorConfig`, which wins; the thresholds are "
            "`clip_ratio_low` and `clip_ratio_high`, 0.2 unless set; `cispo` has a lower bound "
            "1 - `clip_ratio_low` that CISPO as published does not have; `pg_clipfrac` counts "
            "tokens with A = 0 by the rule for A < 0, which the loss does not see."
        ),
        (
            "Left out: `gspo` and `geo_mean` weigh by sequence, `sapo`, `clip_cov`, `kl_cov`, "
            "`gpg` and `dro` have no mask of ours, and the rollout corrections drop by a band "
            "of the ratio whatever the sign of A."
        ),
    ),
)

NO_DUAL_CLIP = 1e30
"""A dual clip that no float32 ratio reaches."""


def dppo_tv(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Policy loss ``dppo_tv``, mean over tokens."""
    config = {"clip_ratio_low": delta_low, "clip_ratio_high": delta_high, "clip_ratio_c": ratio_cap}
    batch = (behavior_logprobs, logprobs, advantages, response_mask)
    return {"loss": _loss("compute_policy_loss_dppo_tv", batch, config)}


def dppo_tv_sequence_mean(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Policy loss ``dppo_tv``, mean over the tokens of a sequence, then over sequences."""
    config = {"clip_ratio_low": delta_low, "clip_ratio_high": delta_high, "clip_ratio_c": ratio_cap}
    batch = (behavior_logprobs, logprobs, advantages, response_mask)
    return {"loss": _loss("compute_policy_loss_dppo_tv", batch, config, "seq-mean-token-mean")}


def dppo_kl(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Policy loss ``dppo_kl``, mean over tokens."""
    config = {"clip_ratio_low": delta_low, "clip_ratio_high": delta_high, "clip_ratio_c": ratio_cap}
    batch = (behavior_logprobs, logprobs, advantages, response_mask)
    return {"loss": _loss("compute_policy_loss_dppo_kl", batch, config)}


def vanilla(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """Policy loss ``vanilla`` (PPO clip) without its dual clip, mean over tokens."""
    config = {
        "clip_ratio_low": clip_low,
        "clip_ratio_high": clip_high,
        "clip_ratio_c": NO_DUAL_CLIP,
    }
    batch = (behavior_logprobs, logprobs, advantages, response_mask)
    loss = _loss("compute_policy_loss_vanilla", batch, config)
    return {"loss": score_form(loss, logprobs, response_mask)}


def cispo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Policy loss ``cispo`` without a lower bound of the ratio, mean over tokens."""
    config = {"clip_ratio_low": 1.0, "clip_ratio_high": ratio_cap - 1.0}
    batch = (behavior_logprobs, logprobs, advantages, response_mask)
    return {"loss": _loss("compute_policy_loss_cispo", batch, config)}


def _loss(
    function: str,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    config: dict[str, float],
    aggregation: str = "token-mean",
) -> Tensor:
    core: Any = load(FRAMEWORK, "verl.trainer.ppo.core_algos")
    behavior, logprobs, advantages, response_mask = batch
    # three fields that it refuses to be without and no policy loss reads
    unread = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    loss, _ = getattr(core, function)(
        old_log_prob=behavior,
        log_prob=logprobs,
        advantages=advantages,
        response_mask=response_mask.long(),
        loss_agg_mode=aggregation,
        config=core.ActorConfig(**unread, **config),
    )
    tensor: Tensor = loss
    return tensor


def _add(
    name: str,
    target: str,
    function: str,
    mask: str,
    *options: str,
    settings: str = "",
    **more: bool,
) -> None:
    adapter = Adapter(
        FRAMEWORK,
        f"pdverify.adapters.verl:{target}",
        f"verl.trainer.ppo.core_algos.{function}",
        "verl/trainer/ppo/core_algos.py",
        mask,
        options,
        settings,
        # 1e-8 is added inside the logs, it is no floor
        read_as=(("tail-floor-1e-8", "log-epsilon-1e-8"),),
        **more,
    )
    ADAPTERS.add(f"verl/{name}", adapter)


_THRESHOLDS = "clip_ratio_low and clip_ratio_high are the thresholds, clip_ratio_c the ratio cap"
_add(
    "dppo-tv", "dppo_tv", "compute_policy_loss_dppo_tv", "dppo-binary-tv",
    "--aggregation", "token-mean", settings=f"{_THRESHOLDS}; loss_agg_mode token-mean",
)  # fmt: skip
_add(
    "dppo-tv-sequence-mean", "dppo_tv_sequence_mean", "compute_policy_loss_dppo_tv",
    "dppo-binary-tv", "--aggregation", "sequence-mean",
    settings=f"{_THRESHOLDS}; loss_agg_mode seq-mean-token-mean",
)  # fmt: skip
_add(
    "dppo-kl", "dppo_kl", "compute_policy_loss_dppo_kl", "dppo-binary-kl",
    "--aggregation", "token-mean", settings=f"{_THRESHOLDS}; loss_agg_mode token-mean",
)  # fmt: skip
_add(
    "vanilla", "vanilla", "compute_policy_loss_vanilla", "ppo-clip",
    "--aggregation", "token-mean", "--ratio-cap", "1e30",
    settings="dual clip out of reach (the default is 3); loss_agg_mode token-mean",
    gradient_only=True,
)  # fmt: skip
_add(
    "cispo", "cispo", "compute_policy_loss_cispo", "none", "--aggregation", "token-mean",
    settings="clip_ratio_low 1, so that no lower bound holds (the default is 0.2);"
    " 1 + clip_ratio_high is the ratio cap; loss_agg_mode token-mean",
)  # fmt: skip
