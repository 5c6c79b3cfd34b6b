"""The experimental DPPO trainer of TRL, in its last release, as targets."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pdverify.adapters.entries import ADAPTERS, Adapter, Framework
from pdverify.adapters.loading import load

if TYPE_CHECKING:
    from torch import Tensor

FRAMEWORK = Framework(
    name="trl-dppo",
    package="trl",
    version="1.8.0",
    imports="trl",
    requirements=(
        "transformers==5.13.0",
        "accelerate==1.15.0",
        "datasets==5.1.0",
        "requests==2.34.2",
    ),
    notes=(
        (
            "The last release with `trl.experimental.dppo` (1.9.0 has removed it). The mask and "
            "the loss it is used in are judged on a trainer without a model. Its import needs "
            "`requests`, which nothing it declares brings with these versions."
        ),
        (
            "One finding matters: `topk_kl` with an entry of behavior probability 0 in the "
            "list. `0 * (-inf - log pi)` is NaN, NaN exceeds no threshold, and the token is "
            "kept whatever D is (`support.neg-inf`). By reading, the trainer asks vLLM for "
            "`processed_logprobs`, in which tokens cut by top-p, top-k or min-p are -inf, so "
            "that a list of K longer than the nucleus holds such entries. At the defaults "
            "(`top_p` 1, `top_k` 0) it does not. This was not run with vLLM. `topk_tv` stays "
            "finite on the same rows and differs by convention: the entry is a cell of its own "
            "instead of joining the tail (`neg-inf-own-cell`)."
        ),
        (
            "A = 0 takes the rule for A < 0 (`mask.zero-advantage`). The loss is 0 either way; "
            "the mask counts in `mask_ratio/overall_mean`."
        ),
        (
            "The support has K entries, the sampled token in the place of the K-th where it is "
            "missing; it is judged as `--support replace`, as documented. Tail masses are at "
            "least 1e-12, below what float32 resolves in 1 - sum."
        ),
    ),
)


def binary_tv(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """``divergence_type="binary_tv"``: the mask, and the loss it is used in."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    return _answer("binary_tv", batch, (delta_low, delta_high, ratio_cap))


def binary_kl(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """``divergence_type="binary_kl"``: the mask, and the loss it is used in."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    return _answer("binary_kl", batch, (delta_low, delta_high, ratio_cap))


def topk_tv(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    support_logprobs: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """``divergence_type="topk_tv"``: the mask, and the loss it is used in."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    lists = (support_logprobs, behavior_support_logprobs)
    return _answer("topk_tv", batch, (delta_low, delta_high, ratio_cap), lists)


def topk_kl(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    support_logprobs: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta_low: float,
    delta_high: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """``divergence_type="topk_kl"``: the mask, and the loss it is used in."""
    batch = (logprobs, behavior_logprobs, advantages, response_mask)
    lists = (support_logprobs, behavior_support_logprobs)
    return _answer("topk_kl", batch, (delta_low, delta_high, ratio_cap), lists)


def _answer(
    kind: str,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    numbers: tuple[float, float, float],
    lists: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    module: Any = load(FRAMEWORK, "trl.experimental.dppo.dppo_trainer")
    logprobs, behavior, advantages, response_mask = batch
    mask = response_mask.long()
    trainer = _trainer(module, kind, batch, numbers, lists)
    keep = trainer._compute_divergence_mask(
        logprobs, behavior, advantages, mask, *(lists or (None, None))
    )
    inputs: dict[str, Any] = {
        "prompt_ids": mask[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages,
        "sampling_per_token_logps": behavior,
        "num_items_in_batch": mask.sum(),
    }
    if lists is not None:
        inputs["sampling_topk_logps"] = lists[1]
        inputs["sampling_topk_token_ids"] = lists[1]
    return {"keep": keep != 0, "loss": trainer._compute_loss(None, inputs)}


def _trainer(
    module: Any,
    kind: str,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    numbers: tuple[float, float, float],
    lists: tuple[Tensor, Tensor] | None,
) -> Any:
    """A trainer without a model: log-probs come from the caller, the rest is the released class."""
    delta_low, delta_high, ratio_cap = numbers
    logprobs = batch[0]
    entropies = logprobs.detach() * 0
    current = None if lists is None else lists[0]
    trainer = module.DPPOTrainer.__new__(module.DPPOTrainer)
    vars(trainer).update(
        divergence_type=kind,
        epsilon_low=delta_low,
        epsilon_high=delta_high,
        clip_ratio_c=ratio_cap,
        beta=0.0,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, entropies, None),
        _get_per_token_logps_with_topk=lambda *a, **k: (logprobs, entropies, current),
    )
    return trainer


def _add(name: str, mask: str, *options: str) -> None:
    adapter = Adapter(
        FRAMEWORK,
        f"pdverify.adapters.trl_dppo:{name.replace('-', '_')}",
        "trl.experimental.dppo.dppo_trainer.DPPOTrainer._compute_divergence_mask",
        "trl/experimental/dppo/dppo_trainer.py",
        mask,
        ("--aggregation", "token-mean", *options),
        "epsilon_low and epsilon_high are the thresholds, clip_ratio_c the ratio cap; the loss is"
        " that of `_compute_loss` on a trainer without a model",
        # it halves the sum; an entry of probability 0 is a cell of its own
        read_as=(("l1-distance", "neg-inf-own-cell"),),
    )
    ADAPTERS.add(f"trl-dppo/{name}", adapter)


_add("binary-tv", "dppo-binary-tv")
_add("binary-kl", "dppo-binary-kl")
_add("topk-tv", "dppo-topk-tv", "--support", "replace")
_add("topk-kl", "dppo-topk-kl", "--support", "replace")
