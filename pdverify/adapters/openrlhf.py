"""OpenRLHF's policy loss as targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdverify.adapters.entries import ADAPTERS, Adapter, Framework
from pdverify.adapters.gradients import score_form
from pdverify.adapters.loading import load

if TYPE_CHECKING:
    from torch import Tensor

FRAMEWORK = Framework(
    name="openrlhf",
    package="openrlhf",
    version="0.11.2",
    imports="openrlhf",
    no_deps=True,
    placeholders=("deepspeed",),
    bare=("openrlhf.models",),
    notes=(
        (
            "`ppo`: every decision that is certain is right. Its log-ratio is clamped to [-20, "
            "20] and differentiated through, so that the gradient is 0 beyond: immaterial for r "
            "< 2e-9; for A < 0 and r above 4.9e8 PPO's clip keeps the token and this loss drops "
            "it. `dual_clip`, off by default, would drop it earlier."
        ),
        (
            "The gates `tv` and `binary_kl` of the rollout correction compare the rollout with "
            "the trainer's old policy. They are called a trust region, and are judged as the "
            "DPPO mask of the same divergence at the first step of an update, where old and "
            "current policy are one. They differ by convention: they have no direction "
            "criterion and drop tokens that move back towards the rollout policy too "
            "(`symmetric-mask`), as IcePop does. Where no single convention explains every "
            "answer there are two: probabilities are clamped to [1e-6, 1 - 1e-6] as well. That "
            "shows on near-one-hot rows at thresholds below 1e-6, and where the trainer's "
            "probability falls below 1e-6: for mu_k = 0.01 and pi_k = 1e-20 the binary KL is "
            "0.405 and the gate computes 0.082."
        ),
        "The gate's weight, rollout to old policy, has no cap.",
        (
            "Left out: `gspo` and the gates at level `seq` decide by sequence, the gate `ratio` "
            "drops by a band of the ratio."
        ),
    ),
)


def ppo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """``PolicyLoss`` of type ``ppo``, mean over tokens."""
    losses: Any = load(FRAMEWORK, "openrlhf.models.loss")
    policy_loss = losses.PolicyLoss(clip_eps_low=clip_low, clip_eps_high=clip_high)
    loss = policy_loss(logprobs, behavior_logprobs, advantages, response_mask.long())[0]
    return {"loss": score_form(loss, logprobs, response_mask)}


def gate_tv(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The rollout correction gated by ``tv``, token by token, at the first step of an update."""
    return _gate("tv", logprobs, behavior_logprobs, advantages, response_mask, delta)


def gate_kl(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The rollout correction gated by ``binary_kl``, at the first step of an update."""
    return _gate("binary_kl", logprobs, behavior_logprobs, advantages, response_mask, delta)


def _gate(
    gating: str,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    losses: Any = load(FRAMEWORK, "openrlhf.models.loss")
    policy_loss = losses.PolicyLoss(
        is_correction_level="token",
        is_correction_mode="mask",
        is_correction_gating=gating,
        is_correction_threshold=(0.0, delta),
    )
    # the gate compares the rollout with the old policy, which is the training policy at that step
    loss = policy_loss(
        logprobs,
        logprobs.detach(),
        advantages,
        response_mask.long(),
        rollout_log_probs=behavior_logprobs,
    )[0]
    return {"loss": score_form(loss, logprobs, response_mask)}


def _add(name: str, mask: str, settings: str) -> None:
    adapter = Adapter(
        FRAMEWORK,
        f"pdverify.adapters.openrlhf:{name.replace('-', '_')}",
        "openrlhf.models.loss.PolicyLoss.forward",
        "openrlhf/models/loss.py",
        mask,
        ("--aggregation", "token-mean", "--ratio-cap", "1e30"),
        settings,
        gradient_only=True,
    )
    ADAPTERS.add(f"openrlhf/{name}", adapter)


_GATE = (
    "is_correction_level token, mode mask, gating {}, threshold (0, delta); old policy = training"
    " policy, so that the PPO clip does not act"
)
_add("ppo", "ppo-clip", "policy_loss_type ppo, no dual clip, no rollout correction")
_add("gate-tv", "dppo-binary-tv", _GATE.format("tv"))
_add("gate-kl", "dppo-binary-kl", _GATE.format("binary_kl"))
