"""The vectors: one group (one file) for each divergence, each mask, the loss and known values.

A vector's id is made of names only (group, input, quantity, variant), so it stays when others
come.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

import numpy as np

from pdverify.batch import Rows
from pdverify.budgets import SLACK, Budgets
from pdverify.cases import EDGE_CASES
from pdverify.definitions.cells import build
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS
from pdverify.oracle import Judge
from pdverify.rules import Partition, Rule, Support, Tail
from pdverify.tools.vectors.decisions import (
    UNIT,
    Bool,
    Float64,
    Judged,
    carries,
    decide,
    parameters,
    rules,
)
from pdverify.tools.vectors.digits import ExactRows, Value, decimal_text
from pdverify.tools.vectors.inputs import CORE_FAMILIES, Input, float_text, inputs

Vector = dict[str, Any]

ESTIMATORS: tuple[Tail, ...] = ("aggregated", "uniform", "exact")
BINARY = sorted(
    {
        mask.divergence
        for _, mask in MASKS.items()
        if mask.partition == "binary" and mask.divergence is not None
    }
)
"""Divergences that some mask takes on {k, rest}."""

RATIO_CAPS: tuple[float | None, ...] = (None, 3.0, 20.0)
LOSS_INPUTS = frozenset(
    {
        "edge/huge-log-ratio",
        "edge/poisoned-padding",
        "edge/ratio-overflow",
        "edge/sampled-impossible-in-training",
        "edge/zero-advantage",
        "family/direction-conflict",
        "family/huge-scale",
        "family/peaked",
    }
)
EDGE_MASKS = frozenset(
    {"ppo-clip", "predictive-kl", "predictive-tv"} | {m for m in MASKS if m.startswith("dppo-")}
)
"""Masks that are decided on every edge case; the others on the families only."""

_UP = Context(prec=3, rounding=ROUND_CEILING)


def groups() -> dict[str, tuple[str, list[Vector]]]:
    """Name -> (description, vectors in the order of their ids)."""
    found: dict[str, tuple[str, list[Vector]]] = {}
    for name, divergence in DIVERGENCES.items():
        title = f"D and C of the {divergence.title}, {divergence.unit}"
        found[f"divergence-{name}"] = (title, [])
    for name, mask in MASKS.items():
        found[f"mask-{name}"] = (f"keep decisions: {mask.summary}", [])
    found["large"] = ("every quantity above on an input that is stored as tensors", [])
    found["loss"] = ("masked policy loss of each token, mask `none`", [])
    found["known-values"] = ("quantities of the edge cases that no other group has", [])
    found["known-decisions"] = ("decisions that the edge cases are known for", [])
    for entry in inputs():
        for vector in _vectors(entry):
            if entry.stored:
                # readers that take no tensors leave this group out
                group, rest = vector["id"].split(f"/{entry.name}/")
                vector["id"] = f"{entry.name}/{group}/{rest}"
            found[vector["id"].split("/", 1)[0]][1].append(vector)
    for _, vectors in found.values():
        vectors.sort(key=lambda vector: str(vector["id"]))
    return found


def _vectors(entry: Input) -> Iterator[Vector]:
    rows = entry.batch.rows()
    support: Support = "replace" if entry.replaced else "append"
    exact = ExactRows(rows, support)
    yield from _divergences(entry, exact)
    if entry.replaced:
        return
    yield from _decisions(entry, Judge(rows))
    if entry.name in LOSS_INPUTS:
        for cap in RATIO_CAPS:
            yield _loss(entry, exact, cap)
    if entry.name.startswith("edge/"):
        yield from _known(entry, Judge(rows))


def _divergences(entry: Input, exact: ExactRows) -> Iterator[Vector]:
    partitions: list[Partition] = ["topk"] if entry.replaced else ["full", "topk", "binary"]
    for partition in partitions:
        if not carries(entry.batch, partition):
            continue
        budgets = Budgets(exact.rows, partition, exact.support, UNIT)
        for name in BINARY if partition == "binary" else DIVERGENCES:
            if not entry.tries(name):
                continue
            group = f"divergence-{name}"
            yield _values(
                entry,
                exact,
                group,
                "divergence",
                partition,
                None,
                exact.divergence(name, partition),
                budgets.divergence(name),
            )
            tails: tuple[Tail | None, ...] = ESTIMATORS if partition == "topk" else (None,)
            for tail in () if partition == "binary" else tails:
                yield _values(
                    entry,
                    exact,
                    group,
                    "coefficient",
                    partition,
                    tail,
                    exact.coefficient(name, partition, tail),
                    budgets.coefficient(name, tail),
                )


def _values(
    entry: Input,
    exact: ExactRows,
    group: str,
    quantity: str,
    partition: Partition,
    tail: Tail | None,
    values: list[Value],
    budget: Float64,
) -> Vector:
    options: dict[str, Any] = {"divergence": group.removeprefix("divergence-")}
    if partition == "topk":
        options["support"] = exact.support
    if tail is not None:
        options["tail"] = tail
    flags = entry.flags_of(exact.rows) | _view_flags(exact.rows, partition, exact.support)
    convention = _chosen(tail, exact.support)
    flags |= convention
    why = _informative(values, budget)
    why = _by_bits(why, exact.rows, partition, exact.support)
    return {
        "budget_per_unit": [_per_unit(x) for x in budget],
        "comment": entry.comment,
        "exceptions": _exceptions(why),
        "expected": [value.decimal for value in values],
        "flags": sorted(flags or {"Basic"}),
        "id": "/".join([group, entry.name, quantity, _variant(partition, tail)]),
        "input": entry.name,
        "nearest": [None if v.nearest is None else float_text(v.nearest) for v in values],
        "parameters": options,
        "quantity": quantity,
        "result": "convention" if convention else "required",
        "view": partition,
    }


def _decisions(entry: Input, judge: Judge) -> Iterator[Vector]:
    for thresholds, rule in rules(entry.batch):
        edge = entry.name.startswith("edge/")
        if edge and (rule.mask not in EDGE_MASKS or thresholds != "default"):
            continue
        second_order = rule.direction == "second-order" and entry.name not in CORE_FAMILIES
        if second_order or not entry.tries(rule.divergence):
            continue
        place = "/".join([f"mask-{rule.mask}", entry.name, "keep"])
        variant = f"{_variant(rule.partition, rule.tail)}/{thresholds}"
        yield _keep(entry, judge.rows, f"{place}/{variant}", rule, decide(judge, rule))


def _keep(entry: Input, rows: Rows, name: str, rule: Rule, judged: Judged) -> Vector:
    partition: Partition = "binary" if rule.direction == "clip" else rule.partition
    flags = entry.flags_of(rows) | _view_flags(rows, partition, rule.support)
    convention = _chosen(rule.tail, rule.support)
    flags |= convention
    why: list[Why] = [(reason, "informative") if reason else None for reason in judged.why]
    if rule.direction != "none":
        why = _conventions(why, rows.advantages == 0, "zero-advantage")
        if (rows.advantages == 0).any():
            flags.add("ZeroAdvantage")
        why = _by_bits(why, rows, partition, rule.support)
    if "StrictThreshold" in flags:
        at = [keep is not None and w is not None for keep, w in zip(judged.keep, why, strict=True)]
        why = [("at-threshold", "convention") if a else w for a, w in zip(at, why, strict=True)]
    return {
        "comment": entry.comment,
        "exceptions": _exceptions(why),
        "expected": judged.keep,
        "flags": sorted(flags or {"Basic"}),
        "id": name,
        "input": entry.name,
        "parameters": parameters(rule),
        "quantity": "keep",
        "result": "convention" if convention else "required",
        "view": partition,
    }


def _loss(entry: Input, exact: ExactRows, cap: float | None) -> Vector:
    rows = exact.rows
    values = exact.loss(cap)
    gap = Judge(rows).ratio_gap("binary")
    assert rows.behavior_logprobs is not None
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.minimum(np.exp(gap.high), np.inf if cap is None else cap)
        log_pi = np.abs(gap.mid + rows.behavior_logprobs)
        error = Budgets(rows, "binary", "append", UNIT).log_ratio()
        relative = np.expm1(error) + 4 * UNIT
        budget = SLACK * np.abs(rows.advantages) * ratio
        budget = budget * ((log_pi + error) * relative + error)
    why = _informative(values, budget)
    flags = entry.flags_of(rows) | (set() if cap is None else {"RatioCap"})
    return {
        "budget_per_unit": [_per_unit(x) for x in budget],
        "comment": entry.comment,
        "exceptions": _exceptions(why),
        "expected": [value.decimal for value in values],
        "flags": sorted(flags or {"Basic"}),
        "id": f"loss/{entry.name}/loss/" + ("uncapped" if cap is None else f"cap-{cap:g}"),
        "input": entry.name,
        "nearest": [None if v.nearest is None else float_text(v.nearest) for v in values],
        "parameters": {"ratio_cap": None if cap is None else float_text(cap)},
        "quantity": "loss",
        "result": "required" if cap is None else "convention",
        "view": "binary",
    }


def _known(entry: Input, judge: Judge) -> Iterator[Vector]:
    case = EDGE_CASES[entry.name.removeprefix("edge/")]
    for right in case.right:
        if right.quantity in ("divergence", "coefficient"):
            continue
        flags = entry.flags_of(judge.rows) | _view_flags(judge.rows, right.partition, "append")
        tie = right.quantity == "topk-ids"
        values = [decimal_text(Decimal(value)) for value in right.values]
        options: dict[str, Any] = {"formula": right.expression}
        options |= {} if right.divergence is None else {"divergence": right.divergence}
        options |= {} if right.tail is None else {"tail": right.tail}
        variant = _variant(right.partition, right.tail)
        yield {
            "budget_per_unit": None,
            "comment": entry.comment,
            "exceptions": [],
            "expected": [int(value) for value in right.values] if tie else values,
            "flags": sorted(flags or {"Basic"}),
            "id": "/".join(["known-values", entry.name, right.quantity, variant]),
            "input": entry.name,
            "nearest": None if tie else [float_text(float(value)) for value in right.values],
            "parameters": options,
            "quantity": right.quantity,
            "result": "convention" if tie else "required",
            "view": right.partition,
        }
    for decision in case.decisions:
        rule = decision.rule
        limits = f"{rule.delta_high:g}" if rule.direction != "clip" else f"{rule.clip_high:g}"
        variant = f"{rule.mask}/{_variant(rule.partition, rule.tail)}/{limits}"
        name = "/".join(["known-decisions", entry.name, "keep", variant])
        judged = decide(judge, rule, decision.keep)
        yield _keep(entry, judge.rows, name, rule, judged)


def _variant(partition: Partition, tail: Tail | None) -> str:
    return partition if tail is None else f"{partition}-{tail}"


def _chosen(tail: Tail | None, support: Support) -> set[str]:
    """The conventions that the parameters choose."""
    flags = {"TailEstimator"} if tail in ("aggregated", "uniform", "bracket") else set()
    return flags | ({"ReplaceSupport"} if support == "replace" else set())


def _slots(rows: Rows, partition: Partition) -> Bool:
    """`[T]`, where the top-K list holds a token of mass zero."""
    if partition != "topk" or rows.topk_logprobs is None:
        return np.zeros(len(rows), dtype=bool)
    return np.asarray(np.isneginf(rows.topk_logprobs).any(axis=-1))


def _not_one(rows: Rows, partition: Partition, support: Support) -> Bool:
    """`[T]`, where retained masses exceed one, or hold everything and are not one."""
    if partition != "topk":
        return np.zeros(len(rows), dtype=bool)
    cells = build(rows, partition, support)
    total = cells.mu.sum(axis=-1)
    return np.asarray((total > 1) | ((cells.tail_cells == 0) & (total != 1)))


def _view_flags(rows: Rows, partition: Partition, support: Support) -> set[str]:
    flags = {"NegInfSlot"} if _slots(rows, partition).any() else set()
    flags |= {"MassNotOne"} if _not_one(rows, partition, support).any() else set()
    if partition == "topk" and rows.topk_ids is not None:
        listed = (rows.topk_ids == rows.tokens[:, None]).any(axis=-1)
        flags |= set() if listed.all() else {"SampledOutsideList"}
    return flags


Why = tuple[str, str] | None
"""(reason, result) of one token that is not judged as its vector is."""


def _informative(values: list[Value], budget: Float64) -> list[Why]:
    """Values that bind nobody: infinite, not certified, or with any error allowed."""
    return [
        (value.why or "any-error", "informative") if value.why or not np.isfinite(limit) else None
        for value, limit in zip(values, budget, strict=True)
    ]


def _by_bits(why: list[Why], rows: Rows, partition: Partition, support: Support) -> list[Why]:
    """Rows whose stored log-probs leave the cells to a convention."""
    why = _conventions(why, _slots(rows, partition), "neg-inf-slot")
    return _conventions(why, _not_one(rows, partition, support), "mass-not-one")


def _conventions(why: list[Why], where: Bool, reason: str) -> list[Why]:
    return [
        (reason, "convention") if here and old is None else old
        for old, here in zip(why, where, strict=True)
    ]


def _exceptions(why: list[Why]) -> list[dict[str, Any]]:
    reasons = sorted({entry for entry in why if entry is not None})
    return [
        {
            "result": result,
            "tokens": [t for t, entry in enumerate(why) if entry == (reason, result)],
            "why": reason,
        }
        for reason, result in reasons
    ]


def _per_unit(budget: float) -> float | None:
    """The budget in unit roundoffs of float32, rounded up to three digits; None: unbounded."""
    if not np.isfinite(budget):
        return None
    return float(_UP.plus(Decimal(float(budget / UNIT))))
