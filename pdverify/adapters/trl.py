"""TRL's GRPO loss as targets."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdverify.adapters.entries import ADAPTERS, Adapter, Framework
from pdverify.adapters.gradients import score_form
from pdverify.adapters.loading import load

if TYPE_CHECKING:
    from torch import Tensor

FRAMEWORK = Framework(
    name="trl",
    package="trl",
    version="1.16.0",
    imports="trl",
    requirements=("transformers==5.24.0", "accelerate==1.15.0", "datasets==5.1.0"),
    notes=(
        "Every decision that is certain is right in both.",
        (
            "The clipped loss takes `exp` of the log-ratio as it is. Above 88.7 it overflows in "
            "float32, and the gradient of a clipped token is 0 times infinity: NaN "
            "(`loss.overflow`; the loss itself stays finite). It takes a token that the old "
            "policy gave a log-prob 88 below the current one, as a sentinel would. CISPO "
            "detaches the ratio and is not affected."
        ),
        (
            "`cispo` caps the ratio at `epsilon_high` itself, as its documentation says, not at "
            "1 + `epsilon_high`; left at the default of the clipped loss, 0.2, an on-policy "
            "token has weight 0.2. The documentation recommends 5."
        ),
        (
            "Left out: `get_off_policy_mask` decides by sequence; the vLLM corrections "
            "(`token_mask`, `sequence_mask`, the truncations) drop or cap by a band of the "
            "ratio whatever the sign of A, inside the generation step; `sapo` and `vespo` have "
            "no mask. DPPO is no longer in this release; see 1.8.0."
        ),
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
    """``_compute_loss`` of a trainer without a model, whose log-probs come from the caller."""
    module: Any = load(FRAMEWORK, "trl.trainer.grpo_trainer")
    logprobs, behavior, advantages, response_mask = batch
    mask = response_mask.long()
    entropies = logprobs.detach() * 0
    trainer = module.GRPOTrainer.__new__(module.GRPOTrainer)
    vars(trainer).update(
        loss_type=kind,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        beta=0.0,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, entropies, None),
    )
    inputs = {
        "prompt_ids": mask[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": behavior,
        "num_items_in_batch": mask.sum(),
    }
    loss: Tensor = trainer._compute_loss(None, inputs)
    return loss


def _add(name: str, mask: str, settings: str, *options: str, gradient_only: bool = False) -> None:
    adapter = Adapter(
        FRAMEWORK,
        f"pdverify.adapters.trl:{name.replace('-', '_')}",
        "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss",
        "trl/trainer/grpo_trainer.py",
        mask,
        ("--aggregation", "token-mean", *options),
        settings,
        gradient_only,
    )
    ADAPTERS.add(f"trl/{name}", adapter)


_add(
    "grpo-clip", "ppo-clip", "loss_type dapo (the default), no two-sided clip, no vLLM correction",
    "--ratio-cap", "1e30", gradient_only=True,
)  # fmt: skip
_add("cispo", "none", "loss_type cispo; epsilon_high is the ratio cap itself, not 1 + epsilon_high")
