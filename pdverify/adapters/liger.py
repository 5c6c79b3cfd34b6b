"""Liger-Kernel's GRPO loss as targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdverify.adapters.entries import ADAPTERS, Adapter, Framework
from pdverify.adapters.gradients import score_form
from pdverify.adapters.loading import load

if TYPE_CHECKING:
    from torch import Tensor

FRAMEWORK = Framework(
    name="liger",
    package="liger-kernel",
    version="0.8.5",
    imports="liger_kernel",
    no_deps=True,
    notes=(
        (
            "Every decision that is certain is right in both. The loss is judged at "
            "`ppo_loss_fn`, the part of the fused linear loss that holds the mask; the Triton "
            "version of it needs a GPU and was not judged."
        ),
        (
            "The clipped loss takes `exp` of the log-ratio as it is: above 88.7 the gradient of "
            "a clipped token is NaN (`loss.overflow`), as in TRL, which it follows. CISPO is "
            "not affected."
        ),
        (
            "`cispo` caps the ratio at `epsilon_high` itself; the default of 0.2 gives an "
            "on-policy token the weight 0.2, and its documentation suggests 5."
        ),
        "Left out: importance sampling by sequence, `sapo`, `vespo`.",
    ),
)


def grpo_clip(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> dict[str, Tensor]:
    """``loss_type="dapo"``, the default: the clipped surrogate, mean over tokens."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    loss = _loss("dapo", batch, clip_low, clip_high)
    return {"loss": score_form(loss, logprobs, response_mask)}


def cispo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """``loss_type="cispo"``, mean over tokens; ``epsilon_high`` is the cap itself."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    return {"loss": _loss("cispo", batch, 0.0, ratio_cap)}


def _loss(
    kind: str, batch: tuple[Tensor, Tensor, Tensor, Tensor], epsilon_low: float, epsilon_high: float
) -> Tensor:
    module: Any = load(FRAMEWORK, "liger_kernel.chunked_loss.grpo_loss")
    logprobs, behavior, advantages, response_mask = batch
    # it takes one advantage per sequence: every token is a sequence of length 1
    mask = response_mask.reshape(-1, 1).to(logprobs.dtype)
    loss, _ = module.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logprobs.reshape(-1, 1),
        mask,
        advantages.reshape(-1),
        mask,
        old_per_token_logps=behavior.reshape(-1, 1),
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        beta=0.0,
        loss_type=kind,
    )
    tensor: Tensor = loss
    return tensor


def _add(name: str, mask: str, settings: str, *options: str, gradient_only: bool = False) -> None:
    adapter = Adapter(
        FRAMEWORK,
        f"pdverify.adapters.liger:{name.replace('-', '_')}",
        "liger_kernel.chunked_loss.grpo_loss.LigerFusedLinearGRPOFunction.ppo_loss_fn",
        "liger_kernel/chunked_loss/grpo_loss.py",
        mask,
        ("--aggregation", "token-mean", *options),
        settings,
        gradient_only,
    )
    ADAPTERS.add(f"liger/{name}", adapter)


_ROWS = "every token a sequence of its own, since it takes one advantage per sequence"
_add(
    "grpo-clip", "ppo-clip", f"loss_type dapo (the default), beta 0, no two-sided clip; {_ROWS}",
    "--ratio-cap", "1e30", gradient_only=True,
)  # fmt: skip
_add(
    "cispo", "none",
    f"loss_type cispo, beta 0; epsilon_high is the ratio cap itself, not 1 + epsilon_high; {_ROWS}",
)  # fmt: skip
