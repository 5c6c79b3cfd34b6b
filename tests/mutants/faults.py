"""The faults, each a small change to a backend as `plant(monkeypatch)`.

They are mistakes that real trainers have made or could make: a sign, a missing cell, a wrong
precision, a mask that leaks.  A fault changes one thing; everything else stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from pdverify.backends import cell_functions, numpy_reference, sums, torch_eager
from pdverify.backends import masks as torch_masks
from pdverify.definitions import _formulas, masks

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@dataclass(frozen=True)
class Fault:
    """A planted fault and what the judge must say about it.

    Attributes:
        name: of the test.
        plant: puts the fault in place.
        families: input families on which it shows.
        fails: globs of the entries that must fail; every other one must pass.
        quantity: what the counterexamples are about; empty: the entry's message tells, and there
            is no single token to show.
        message: part of the entry's message.
    """

    name: str
    plant: Plant
    families: tuple[str, ...]
    fails: tuple[str, ...]
    quantity: tuple[str, ...] = ()
    message: str = ""


FAULTS: list[Fault] = []


def fault(
    *families: str, fails: tuple[str, ...], quantity: tuple[str, ...] = (), message: str = ""
) -> Callable[[Plant], Plant]:
    """Register a planting function under its own name."""

    def register(plant: Plant) -> Plant:
        FAULTS.append(Fault(plant.__name__, plant, families, fails, quantity, message))
        return plant

    return register


def _wrap(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by `change(original, *args, **kwargs)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def _change_cells(patch: Patch, change: Callable[[sums.Cells], dict[str, Any]]) -> None:
    def changed(original: Any, *args: Any) -> Any:
        cells = original(*args)
        return replace(cells, **change(cells))

    _wrap(patch, sums.CoarseView, "cells", changed)


TOPK = ("torch-eager/*/topk*",)
COARSE = ("torch-eager/dppo-*", *TOPK)
PREDICTIVE = ("torch-eager/predictive-*",)
EVERYTHING = ("torch-eager/*",)


@fault("direction-conflict", fails=PREDICTIVE, quantity=("keep", "coefficient"))
def sign_of_the_global_term(patch: Patch) -> None:
    def changed(original: Any, found: Any, name: str) -> Any:
        local = _local_term(found, name)
        return local + (local - original(found, name))

    _wrap(patch, sums.Sums, "coefficient", changed)


@fault("direction-conflict", fails=PREDICTIVE, quantity=("keep", "coefficient"))
def global_term_missing(patch: Patch) -> None:
    _wrap(patch, sums.Sums, "coefficient", lambda original, found, name: _local_term(found, name))


def _local_term(found: sums.Sums, name: str) -> torch.Tensor:
    _, moment = cell_functions.cell_functions(name)
    return moment(found.mu_k, found.pi_k, found.gap_k) * (found.rest**2 + found.collision)


@fault("direction-conflict", fails=PREDICTIVE, quantity=("keep",))
def direction_by_the_ratio(patch: Patch) -> None:
    def changed(original: Any, cells: Any, rule: Any, *rest: Any) -> Any:
        return original(cells, replace(rule, direction="ratio"), *rest)

    _wrap(patch, torch_masks, "_end_keeps", changed)


@fault(
    "direction-conflict",
    fails=("torch-eager/dppo-*", "torch-eager/predictive-*"),
    quantity=("keep",),
)
def advantage_ignored_by_the_direction(patch: Patch) -> None:
    def changed(original: Any, cells: Any, rule: Any, sign: Any, advantages: Any) -> Any:
        return original(cells, rule, sign.abs(), advantages.abs())

    _wrap(patch, torch_masks, "_end_keeps", changed)


@fault(
    "near-equal",
    fails=("torch-eager/dppo-*", "torch-eager/predictive-*"),
    quantity=("keep",),
)
def proximity_missing(patch: Patch) -> None:
    def changed(original: Any, cells: Any, rule: Any, *rest: Any) -> Any:
        return original(cells, replace(rule, delta_low=-math.inf, delta_high=-math.inf), *rest)

    _wrap(patch, torch_masks, "_end_keeps", changed)


@fault("tail-conflict", fails=COARSE, quantity=("keep", "coefficient", "divergence"))
def behavior_tail_ignored(patch: Patch) -> None:
    def change(cells: Any) -> dict[str, Any]:
        none = torch.zeros_like(cells.mu_tail)
        return {"mu_tail": none, "gap_tail": torch.where(cells.pi_tail > 0, math.inf, none)}

    _change_cells(patch, change)


@fault("tail-conflict", fails=COARSE, quantity=("keep", "coefficient", "divergence"))
def training_tail_ignored(patch: Patch) -> None:
    def change(cells: Any) -> dict[str, Any]:
        none = torch.zeros_like(cells.mu_tail)
        return {"pi_tail": none, "gap_tail": torch.where(cells.mu_tail > 0, -math.inf, none)}

    _change_cells(patch, change)


@fault(
    "training-no-tail",
    fails=("torch-eager/predictive-kl*/topk/*",),
    quantity=("keep", "divergence"),
)
def log_of_tail_mass_clamped(patch: Patch) -> None:
    def change(cells: Any) -> dict[str, Any]:
        log_pi, log_mu = (x.clamp_min(1e-12).log() for x in (cells.pi_tail, cells.mu_tail))
        return {"gap_tail": log_pi - log_mu}

    _change_cells(patch, change)


@fault("zipf", fails=TOPK, quantity=("keep", "coefficient", "divergence"))
def last_listed_token_lost(patch: Patch) -> None:
    def changed(original: Any, k: Any, ids: Any, mu: Any, mu_k: Any) -> Any:
        size = max(ids.shape[-1] - 1, 1)
        return original(k, ids[..., :size], mu[..., :size], mu_k)

    _wrap(patch, sums.Retained, "of", changed)


@fault("sampled-outside", fails=TOPK, quantity=("keep", "coefficient", "divergence"))
def sampled_token_left_in_the_tail(patch: Patch) -> None:
    def note(original: Any, k: Any, ids: Any, *rest: Any) -> Any:
        nonlocal outside
        outside = (ids != k[:, None]).all(-1)
        return original(k, ids, *rest)

    outside = torch.empty(0)
    _wrap(patch, sums.Retained, "of", note)

    def changed(original: Any, view: Any, tail: Any) -> Any:
        cells = original(view, tail)
        mu_tail = torch.where(outside, cells.mu_tail + cells.mu_k, cells.mu_tail)
        pi_tail = torch.where(outside, cells.pi_tail + cells.pi_k, cells.pi_tail)
        return replace(
            cells,
            mu_k=torch.where(outside, 0.0, cells.mu_k),
            pi_k=torch.where(outside, 0.0, cells.pi_k),
            gap_k=torch.where(outside, 0.0, cells.gap_k),
            mu_tail=mu_tail,
            pi_tail=pi_tail,
            gap_tail=cell_functions.log_ratio(pi_tail.log(), mu_tail.log()),
        )

    _wrap(patch, sums.CoarseView, "cells", changed)


@fault(
    "tail-conflict",
    fails=("torch-eager/predictive-*/topk/exact",),
    quantity=("keep", "coefficient"),
)
def aggregated_where_exact_is_asked(patch: Patch) -> None:
    def changed(original: Any, view: Any, tail: Any) -> Any:
        return original(view, "aggregated" if tail == "exact" else tail)

    _wrap(patch, sums.CoarseView, "cells", changed)


@fault(
    "flat",
    fails=("torch-eager/predictive-*/topk/uniform", "torch-eager/predictive-*/topk/bracket"),
    quantity=("coefficient", "keep"),
)
def tail_counted_without_the_sampled_token(patch: Patch) -> None:
    def changed(original: Any, view: Any, tail: Any) -> Any:
        cells = original(view, tail)
        if tail != "uniform":
            return cells
        mean = cells.pi_tail / (view._size - cells.mu.shape[-1])
        return replace(cells, tail_mean=mean, tail_square=mean * mean)

    _wrap(patch, sums.CoarseView, "cells", changed)


@fault("tail-conflict", fails=("torch-eager/predictive-*/topk/bracket",), quantity=("keep",))
def bracket_drops_when_either_end_does(patch: Patch) -> None:
    def changed(original: Any, *args: Any, rule: Any, **rest: Any) -> Any:
        if rule.tail != "bracket":
            return original(*args, rule=rule, **rest)
        low, high = (
            original(*args, rule=replace(rule, tail=end), **rest)
            for end in ("aggregated", "uniform")
        )
        return low & high

    _wrap(patch, torch_eager, "keep_mask", changed)


@fault(
    "zipf",
    fails=("torch-eager/dppo-*-kl/*", "torch-eager/predictive-kl*"),
    quantity=("keep", "coefficient", "divergence"),
)
def kl_reversed(patch: Patch) -> None:
    patch.setitem(cell_functions.STABLE, "kl", cell_functions.STABLE["reverse-kl"])


def _double(patch: Patch, name: str) -> None:
    cell, moment = cell_functions.STABLE[name]
    twice = (lambda *cells: 2 * cell(*cells), lambda *cells: 2 * moment(*cells))
    patch.setitem(cell_functions.STABLE, name, twice)


@fault(
    "zipf",
    fails=("torch-eager/dppo-*-tv/*", "torch-eager/predictive-tv/*"),
    quantity=("keep", "coefficient", "divergence"),
)
def total_variation_without_the_half(patch: Patch) -> None:
    _double(patch, "tv")


@fault(
    "zipf",
    fails=("torch-eager/predictive-jensen-shannon/*",),
    quantity=("keep", "coefficient", "divergence"),
)
def jensen_shannon_without_the_half(patch: Patch) -> None:
    _double(patch, "jensen-shannon")


@fault(
    "k-almost-all",
    fails=("torch-eager/predictive-kl-second-order/*",),
    quantity=("keep",),
)
def second_order_curvature_missing(patch: Patch) -> None:
    _wrap(patch, sums.Sums, "kl_curvature", lambda original, found: 0 * original(found))


@fault("zipf", fails=EVERYTHING, quantity=("keep", "coefficient", "divergence", "loss", "gradient"))
def softmax_in_bf16(patch: Patch) -> None:
    def changed(original: Any, *args: Any) -> Any:
        return original(*args[:-1], torch.bfloat16)

    for name in ("tail", "full", "cell_sums"):
        _wrap(patch, torch_eager.TorchEager, name, changed)


DROPS = ("torch-eager/ppo-clip/*", "torch-eager/dppo-*", "torch-eager/predictive-*")


@fault("direction-conflict", fails=DROPS, quantity=("keep",))
def zero_advantage_dropped(patch: Patch) -> None:
    def changed(original: Any, logits: Any, tokens: Any, advantages: Any, **rest: Any) -> Any:
        kept = original(logits, tokens, advantages, **rest)
        return kept & ((advantages != 0) | (rest["rule"].direction == "none"))

    _wrap(patch, torch_eager, "keep_mask", changed)


@fault("far-apart", fails=DROPS, quantity=("keep",))
def zero_advantage_taken_for_negative(patch: Patch) -> None:
    def changed(original: Any, logits: Any, tokens: Any, advantages: Any, **rest: Any) -> Any:
        negative = torch.where(advantages > 0, advantages, -1 - advantages.abs())
        return original(logits, tokens, negative, **rest)

    _wrap(patch, torch_eager, "keep_mask", changed)


def _unmasked_loss(patch: Patch, loss: Callable[..., Any]) -> None:
    """`policy_loss` from `loss(log_pi, ratio, advantages, active, cap)`, nothing selected."""

    def policy_loss(
        logits: Any,
        tokens: Any,
        advantages: Any,
        behavior_logprobs: Any,
        keep: Any,
        *,
        response_mask: Any,
        ratio_cap: float,
        aggregation: Any,
        compute_dtype: Any,
    ) -> Any:
        active = keep & response_mask & (advantages != 0)
        safe = torch.where(response_mask[..., None], logits, torch.zeros_like(logits))
        log_pi = torch.log_softmax(safe.to(compute_dtype), -1)
        log_pi = log_pi.gather(-1, tokens[..., None])[..., 0]
        mu = torch.where(response_mask, behavior_logprobs, 0.0).to(compute_dtype)
        advantages = torch.where(response_mask, advantages, 0.0).to(compute_dtype)
        per_token = loss(log_pi, (log_pi - mu).exp(), advantages, active, ratio_cap)
        return torch_eager.aggregate(per_token, response_mask, aggregation)

    patch.setattr(torch_eager, "policy_loss", policy_loss)


@fault("zipf", fails=EVERYTHING, quantity=("loss", "gradient"))
def gradient_through_the_ratio(patch: Patch) -> None:
    def loss(log_pi: Any, ratio: Any, advantages: Any, active: Any, cap: float) -> Any:
        return torch.where(active, -advantages * ratio.clamp_max(cap) * log_pi, 0.0)

    _unmasked_loss(patch, loss)


@fault("training-neg-inf", fails=EVERYTHING, quantity=("loss", "gradient"))
def dropped_tokens_selected_too_late(patch: Patch) -> None:
    def loss(log_pi: Any, ratio: Any, advantages: Any, active: Any, cap: float) -> Any:
        return -advantages * ratio.detach().clamp_max(cap) * log_pi * active

    _unmasked_loss(patch, loss)


@fault("zipf", fails=EVERYTHING, quantity=("loss", "gradient"))
def dropped_tokens_contribute(patch: Patch) -> None:
    def changed(original: Any, *args: Any, **rest: Any) -> Any:
        return original(*args[:-1], rest["response_mask"], **rest)

    _wrap(patch, torch_eager, "policy_loss", changed)


@fault("k-almost-all", fails=EVERYTHING, quantity=("loss", "gradient"))
def ratio_cap_ignored(patch: Patch) -> None:
    def changed(original: Any, *args: Any, ratio_cap: float, **rest: Any) -> Any:
        return original(*args, ratio_cap=math.inf, **rest)

    _wrap(patch, torch_eager, "policy_loss", changed)


@fault("zipf", fails=EVERYTHING, quantity=("loss", "gradient"))
def ratio_missing_from_the_loss(patch: Patch) -> None:
    def loss(log_pi: Any, ratio: Any, advantages: Any, active: Any, cap: float) -> Any:
        return torch.where(active, -advantages * log_pi, 0.0)

    _unmasked_loss(patch, loss)


@fault("zipf", fails=EVERYTHING, quantity=("loss", "gradient"))
def sign_of_the_loss(patch: Patch) -> None:
    _wrap(
        patch, torch_eager, "policy_loss", lambda original, *args, **rest: -original(*args, **rest)
    )


@fault("padding", fails=EVERYTHING, message="a dropped or padded place contributes")
def loss_gradient_poisoned_by_padding(patch: Patch) -> None:
    def changed(original: Any, logits: Any, *args: Any, response_mask: Any, **rest: Any) -> Any:
        loss = original(logits, *args, response_mask=response_mask, **rest)
        late = torch.where(response_mask[..., None], logits.exp(), 0.0).sum(-1)
        return loss + 0 * late

    _wrap(patch, torch_eager, "policy_loss", changed)


@fault("padding", fails=EVERYTHING, message="a dropped or padded place contributes")
def loss_ignores_the_response_mask(patch: Patch) -> None:
    def changed(original: Any, logits: Any, *args: Any, response_mask: Any, **rest: Any) -> Any:
        return original(logits, *args, response_mask=None, **rest)

    _wrap(patch, torch_eager, "policy_loss", changed)


@fault("padding", fails=EVERYTHING, message="keeps padding")
def padding_kept(patch: Patch) -> None:
    def changed(original: Any, *args: Any, response_mask: Any, **rest: Any) -> Any:
        return original(*args, response_mask=response_mask, **rest) | ~response_mask

    _wrap(patch, torch_eager, "keep_mask", changed)


@fault(
    "direction-conflict",
    fails=("torch-eager/dppo-*", "torch-eager/predictive-*"),
    quantity=("keep",),
)
def thresholds_of_the_two_signs_swapped(patch: Patch) -> None:
    def changed(original: Any, cells: Any, rule: Any, *rest: Any) -> Any:
        swapped = replace(rule, delta_low=rule.delta_high, delta_high=rule.delta_low)
        return original(cells, swapped, *rest)

    _wrap(patch, torch_masks, "_end_keeps", changed)


@fault("zipf", fails=("torch-eager/ppo-clip/*",), quantity=("keep",))
def clip_bounds_swapped(patch: Patch) -> None:
    def changed(original: Any, *args: Any, rule: Any, **rest: Any) -> Any:
        swapped = replace(rule, clip_low=rule.clip_high, clip_high=rule.clip_low)
        return original(*args, rule=swapped, **rest)

    _wrap(patch, torch_eager, "keep_mask", changed)


@fault("zipf", fails=("torch-eager/predictive-kl-second-order/*",), quantity=("keep",))
def step_size_ignored(patch: Patch) -> None:
    def changed(original: Any, cells: Any, rule: Any, *rest: Any) -> Any:
        return original(cells, replace(rule, eta=1.0), *rest)

    _wrap(patch, torch_masks, "_end_keeps", changed)


@fault("padding", fails=EVERYTHING, message="the loss aggregated by")
def token_mean_counts_padding(patch: Patch) -> None:
    def changed(original: Any, loss: Any, valid: Any, aggregation: str) -> Any:
        return original(loss, torch.ones_like(valid), aggregation)

    _wrap(patch, torch_masks, "aggregate", changed)


NUMPY = ("numpy/predictive-*",)


@fault("direction-conflict", fails=NUMPY, quantity=("keep", "coefficient"))
def numpy_sign_of_the_coefficient(patch: Patch) -> None:
    _wrap(patch, masks, "coefficient", lambda original, *args: -original(*args))


@fault("tail-conflict", fails=("numpy/predictive-*/topk/exact",), quantity=("keep", "coefficient"))
def numpy_tail_collision_mass_missing(patch: Patch) -> None:
    def changed(original: Any, *args: Any) -> Any:
        return original(*args[:-1], np.zeros_like(args[-1]))

    _wrap(patch, _formulas, "complement_coefficient", changed)


@fault("direction-conflict", fails=("numpy/*",), quantity=("keep",))
def numpy_keeps_everything_it_should_drop(patch: Patch) -> None:
    def changed(original: Any, batch: Any, **rest: Any) -> Any:
        return ~original(batch, **rest)

    _wrap(patch, numpy_reference, "keep_mask", changed)


@fault("zipf", fails=("numpy/*",), quantity=("loss", "gradient"))
def numpy_ratio_capped_too_low(patch: Patch) -> None:
    def changed(original: Any, *args: Any, ratio_cap: float, **rest: Any) -> Any:
        return original(*args, ratio_cap=1e-3, **rest)

    _wrap(patch, numpy_reference, "policy_loss", changed)
