"""Keep decisions of every mask, and how far each can be held against an implementation.

A decision is required where the oracle determines it and rounding in float32, in the plain form
of the formulas (`1 - sum` included), provably cannot flip it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch
from pdverify.budgets import SLACK, Budgets
from pdverify.definitions.masks import MASKS, TAILS
from pdverify.formats import FORMATS
from pdverify.oracle import Decisions, Enclosure, Judge
from pdverify.rules import Partition, Rule, Tail
from pdverify.tools.vectors.inputs import float_text

UNIT = FORMATS["fp32"].unit_roundoff
WITHIN_ROUNDING = "within-rounding"

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

THRESHOLDS: dict[str, dict[str, float]] = {
    "default": {"delta": 0.15, "clip_low": 0.2, "clip_high": 0.2},
    "uneven": {"delta_low": 0.02, "delta_high": 0.05, "clip_low": 0.2, "clip_high": 0.28},
}
"""Name of a set of thresholds, as in the ids -> options of `Mask.rule`."""


def carries(batch: Batch, partition: Partition) -> bool:
    """Whether `batch` holds what a partition needs."""
    if partition == "full":
        return batch.logits is not None and batch.behavior_logits is not None
    if partition == "topk":
        return batch.logits is not None and batch.topk_ids is not None
    return batch.behavior_logprobs is not None


def rules(batch: Batch) -> Iterator[tuple[str, Rule]]:
    """(name of the thresholds, rule) for each mask, view and tail that `batch` carries."""
    for mask in MASKS:
        for view in MASKS[mask].views():
            if not carries(batch, view):
                continue
            tails: tuple[Tail | None, ...] = TAILS if MASKS[mask].needs_tail(view) else (None,)
            for tail in tails:
                for name, options in THRESHOLDS.items():
                    yield name, MASKS[mask].rule(view=view, tail=tail, **options)  # type: ignore[arg-type]


def parameters(rule: Rule) -> dict[str, Any]:
    """What of a rule bears on its decisions; numbers exactly, in hexadecimal."""
    result: dict[str, Any] = {"direction": rule.direction, "mask": rule.mask}
    if rule.direction == "clip":
        return result | {
            "clip_high": float_text(rule.clip_high),
            "clip_low": float_text(rule.clip_low),
        }
    if rule.direction == "none":
        return result
    result |= {
        "delta_high": float_text(rule.delta_high),
        "delta_low": float_text(rule.delta_low),
        "divergence": rule.divergence,
    }
    if rule.direction == "second-order":
        result["eta"] = float_text(rule.eta)
    if rule.partition == "topk":
        result["support"] = rule.support
    if rule.tail is not None:
        result["tail"] = rule.tail
    return result


@dataclass(frozen=True)
class Judged:
    """Decisions on one set of rows: `keep` `[T]`, None where unknown, and `why` not required."""

    keep: list[bool | None]
    why: list[str | None]


def decide(judge: Judge, rule: Rule, known: tuple[bool, ...] | None = None) -> Judged:
    """The decisions of `rule`.

    `known` are the right decisions by other means; they stand where the oracle is undecided.

    Raises:
        RuntimeError: a determined decision is not the known one.
    """
    right = judge.decide(rule)
    if known is not None and (right.determined & (right.keep != np.asarray(known))).any():
        raise RuntimeError(f"{rule.mask}: the oracle contradicts a known decision, {known}")
    certain = safe(judge, rule, right)
    keep: list[bool | None] = []
    why: list[str | None] = []
    for t, status in enumerate(right.status):
        if right.determined[t]:
            keep.append(bool(right.keep[t]))
            why.append(None if certain[t] else WITHIN_ROUNDING)
        else:
            keep.append(None if known is None else known[t])
            why.append(str(status))
    return Judged(keep, why)


def safe(judge: Judge, rule: Rule, right: Decisions) -> Bool:
    """`[T]`, True where no honest float32 implementation can decide otherwise.

    It drops for certain if both tests exceed their budgets at every end of the tail, and keeps
    for certain if at some end one test falls short by its budget.
    """
    rows = judge.rows
    if rule.direction == "none":
        return np.ones(len(rows), dtype=bool)
    partition: Partition = "binary" if rule.direction == "clip" else rule.partition
    budgets = Budgets(rows, partition, rule.support, UNIT)
    ends: tuple[Tail | None, ...] = (rule.tail,)
    if rule.tail == "bracket":
        ends = ("aggregated", "uniform")
    drops = np.ones(len(rows), dtype=bool)
    keeps = np.zeros(len(rows), dtype=bool)
    with np.errstate(invalid="ignore", over="ignore"):
        for tail in ends:
            tests = _tests(judge, budgets, replace(rule, tail=tail), right)
            drops &= np.all([low > budget for low, _, budget in tests], axis=0)
            keeps |= np.any([high <= -budget for _, high, budget in tests], axis=0)
    return np.asarray((rows.advantages == 0) | np.where(right.keep, keeps, drops))


_Test = tuple[Float64, Float64, Float64]
"""Bounds of a quantity that is positive where its test says drop, and its rounding budget."""


def _tests(judge: Judge, budgets: Budgets, rule: Rule, right: Decisions) -> list[_Test]:
    advantages = judge.rows.advantages
    sign = np.sign(advantages)
    if rule.direction == "clip":
        high, low = float(np.log1p(rule.clip_high)), float(np.log1p(-rule.clip_low))
        bound = np.where(sign > 0, high, low)
        gap = judge.ratio_gap("binary")
        return [_signed(gap, bound, sign, budgets.log_ratio() + 2 * UNIT)]
    assert rule.divergence is not None
    delta = np.where(sign > 0, rule.delta_high, rule.delta_low)
    near = budgets.divergence(rule.divergence, delta)
    if rule.direction == "ratio":
        direction, budget = judge.ratio_gap(rule.partition), budgets.log_ratio()
    else:
        direction = judge.coefficient(rule.divergence, rule.partition, rule.tail)
        budget = budgets.coefficient(rule.divergence, rule.tail)
    if rule.direction == "second-order":
        near = near + _step_budget(judge, budgets, rule, direction, budget)
    proximity = (right.divergence.low - delta, right.divergence.high - delta, near)
    return [proximity, _signed(direction, np.zeros(len(sign)), sign, budget)]


def _signed(value: Enclosure, bound: Float64, sign: Float64, budget: Float64) -> _Test:
    low, high = sign * (value.low - bound), sign * (value.high - bound)
    return np.minimum(low, high), np.maximum(low, high), budget


def _step_budget(
    judge: Judge, budgets: Budgets, rule: Rule, slope: Enclosure, budget: Float64
) -> Float64:
    """Budget of `h C + h^2 Var / 2`, `h = eta A r` off by the factor `1 +- e`."""
    gap = judge.ratio_gap(rule.partition)
    h = np.abs(rule.eta * judge.rows.advantages) * np.exp(gap.high)
    e = np.expm1(budgets.log_ratio()) + 4 * UNIT
    c = np.maximum(np.abs(slope.low), np.abs(slope.high))
    variance = judge.variance(rule.partition, rule.tail).high
    linear = h * ((1 + e) * budget + c * e)
    square = h * h / 2 * ((1 + e) ** 2 * budgets.curvature(rule.tail) + variance * (2 * e + e * e))
    return np.asarray(SLACK * (linear + square + 4 * UNIT * (h * c + h * h * variance)))
