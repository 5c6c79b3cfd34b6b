"""AReaL's PPO loss as a target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdverify.adapters.entries import ADAPTERS, Adapter, Framework
from pdverify.adapters.gradients import score_form
from pdverify.adapters.loading import load

if TYPE_CHECKING:
    from torch import Tensor

FRAMEWORK = Framework(
    name="areal",
    package="areal",
    version="1.0.4",
    imports="areal",
    no_deps=True,
    placeholders=("areal.api", "areal.utils.data"),
    bare=("areal", "areal.utils", "areal.utils.functional"),
    notes=(
        "Every decision that is certain is right.",
        (
            "`exp` of the log-ratio is taken as it is: above 88.7 it overflows in float32, and "
            "the gradient of a clipped token is 0 times infinity: NaN (`loss.overflow`; the "
            "loss itself stays finite). It takes a token that the proximal policy gave a "
            "log-prob 88 below the current one."
        ),
        (
            "Padding is left out by selection after `exp`, so that a NaN there leaves the loss "
            "right and reaches the gradient."
        ),
        (
            "Left out: the rejection sampling drops by a band of the ratio, or of a KL estimate "
            "of one sample, whatever the sign of A; `sapo` has no mask; importance sampling by "
            "sequence."
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
    """``ppo_actor_loss_fn``, mean over tokens; behavior and proximal policy are the same."""
    module: Any = load(FRAMEWORK, "areal.utils.functional.functional")
    loss, _ = module.ppo_actor_loss_fn(
        logprobs=logprobs,
        proximal_logprobs=behavior_logprobs,
        old_logprobs=behavior_logprobs,
        advantages=advantages,
        eps_clip=clip_low,
        eps_clip_higher=clip_high,
        loss_mask=response_mask,
    )
    return {"loss": score_form(loss, logprobs, response_mask)}


ADAPTERS.add(
    "areal/ppo",
    Adapter(
        FRAMEWORK,
        "pdverify.adapters.areal:ppo",
        "areal.utils.functional.functional.ppo_actor_loss_fn",
        "areal/utils/functional/functional.py",
        "ppo-clip",
        ("--aggregation", "token-mean", "--ratio-cap", "1e30"),
        "no dual clip, no rejection sampling; proximal policy = behavior policy",
        gradient_only=True,
    ),
)
