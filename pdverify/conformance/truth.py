"""What is right, and what rounding may cost: the oracle and the budgets on one set of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Rows
from pdverify.budgets import CHAIN, Budgets, Form
from pdverify.definitions.cells import Cells, build
from pdverify.oracle import Decisions, Enclosure, Judge
from pdverify.rules import Partition, Rule, Tail

Array = NDArray[np.float64]

CHUNK = 2**18
"""Vocabulary entries held by the oracle and the budgets at a time: their arrays stay cheap."""


def distance(value: Array, truth: Enclosure) -> Array:
    """How far `value` lies outside the enclosure, `[T]`; NaN values are infinitely far."""
    with np.errstate(invalid="ignore"):
        gap = np.maximum(np.maximum(truth.low - value, value - truth.high), 0.0)
    return np.where(np.isnan(value), np.inf, gap)


def over_budget(error: Array, budget: Array) -> Array:
    """`error / budget`, 0 where there is no error and where the budget excuses everything."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = error / budget
    return np.where((error == 0) | np.isinf(budget), 0.0, ratio)


def finite(truth: Enclosure) -> NDArray[np.bool_]:
    """Rows where the oracle encloses a finite value."""
    return np.isfinite(truth.low) & np.isfinite(truth.high)


@dataclass(frozen=True)
class Allowance:
    """Budgets of a rule's two tests, `[T]`: of `D - delta`, and of the direction quantity."""

    proximity: Array
    direction: Array


class Truth:
    """The oracle's answers and the budgets of one set of rows, computed chunk by chunk, once.

    `longest` bounds the chains of additions that the budgets allow for (`pdverify.budgets`).
    """

    def __init__(self, rows: Rows, longest: int = CHAIN) -> None:
        self.rows, self._longest = rows, longest
        step = max(1, CHUNK // rows.vocab_size)
        self._chunks = [rows.take(slice(i, i + step)) for i in range(0, len(rows), step)]
        self._judges = [Judge(chunk) for chunk in self._chunks]
        self.decide = cache(self._decide)
        self.divergence = cache(self._divergence)
        self.coefficient = cache(self._coefficient)
        self.budget = cache(self._budget)
        self._cells = cache(self._build_cells)
        self._budgets = cache(self._build_budgets)

    def release(self) -> None:
        """Forget what can be computed again: the oracle's and the budgets' working arrays."""
        self._judges = [Judge(chunk) for chunk in self._chunks]
        self._cells.cache_clear()
        self._budgets.cache_clear()

    def _decide(self, rule: Rule) -> Decisions:
        parts = [judge.decide(rule) for judge in self._judges]
        return Decisions(
            **{
                name: _join([getattr(part, name) for part in parts])
                for name in Decisions.__dataclass_fields__
            }
        )

    def ratio_gap(self) -> Enclosure:
        """Enclosure of `log pi_k - log mu_k`."""
        return _join([judge.ratio_gap() for judge in self._judges])  # type: ignore[no-any-return]

    def cells(self, partition: Partition) -> list[Cells]:
        """The definitions' cells, chunk by chunk."""
        return [self._cells(i, partition) for i in range(len(self._chunks))]

    @property
    def chunks(self) -> list[Rows]:
        """The rows, chunk by chunk."""
        return self._chunks

    def allowance(self, rule: Rule, tail: Tail | None, unit: float, form: Form) -> Allowance:
        """Budgets of both tests of `rule` (with one tail estimator)."""
        if rule.direction == "clip":
            gap = self.budget("log_ratio", None, "binary", None, unit, form)
            return Allowance(np.zeros(len(gap)), gap + 2 * unit)
        assert rule.divergence is not None
        delta = np.where(self.rows.advantages > 0, rule.delta_high, rule.delta_low)
        near = self.budget("divergence", rule.divergence, rule.partition, None, unit, form)
        near = near + 1.01 * unit * delta
        if rule.direction == "ratio":
            gap = self.budget("log_ratio", None, rule.partition, None, unit, form)
            return Allowance(near, gap)
        change = self.budget("coefficient", rule.divergence, rule.partition, tail, unit, form)
        if rule.direction == "second-order":
            near = near + self._step_budget(rule, tail, unit, form, change)
        return Allowance(near, change)

    def _step_budget(
        self, rule: Rule, tail: Tail | None, unit: float, form: Form, change: Array
    ) -> Array:
        """Budget of `h C + h^2 Var / 2` with `h = eta A r`."""
        gap = self.ratio_gap()
        step = np.abs(rule.eta * self.rows.advantages) * np.exp(np.maximum(gap.high, -700.0))
        relative = np.expm1(self.budget("log_ratio", None, rule.partition, None, unit, form))
        relative = relative + 4 * unit
        value = self.coefficient("kl", rule.partition, tail)
        size = np.maximum(np.abs(value.low), np.abs(value.high))
        variance = np.concatenate(
            [judge.variance(rule.partition, tail).high for judge in self._judges]
        )
        curvature = self.budget("curvature", None, rule.partition, tail, unit, form)
        linear = step * (1 + relative) * change + step * size * relative
        square = step**2 * (curvature / 2 * (1 + relative) ** 2 + variance * relative)
        total = linear + square + 4 * unit * (step * size + step**2 * variance)
        return np.where(np.isnan(total), np.inf, total)

    def _divergence(self, name: str, partition: Partition) -> Enclosure:
        return _join([judge.divergence(name, partition) for judge in self._judges])  # type: ignore[no-any-return]

    def _coefficient(self, name: str, partition: Partition, tail: Tail | None) -> Enclosure:
        return _join([judge.coefficient(name, partition, tail) for judge in self._judges])  # type: ignore[no-any-return]

    def _build_cells(self, i: int, partition: Partition) -> Cells:
        return build(self._chunks[i], partition, "append")

    def _build_budgets(self, i: int, partition: Partition, unit: float, form: Form) -> Budgets:
        cells = self._cells(i, partition)
        return Budgets(self._chunks[i], partition, "append", unit, form, cells, self._longest)

    def _budget(
        self,
        quantity: str,
        name: str | None,
        partition: Partition,
        tail: Tail | None,
        unit: float,
        form: Form,
    ) -> Array:
        def of(budgets: Budgets) -> Array:
            if quantity == "divergence":
                assert name is not None
                return budgets.divergence(name)
            if quantity == "coefficient":
                assert name is not None
                return budgets.coefficient(name, tail)
            if quantity == "curvature":
                return budgets.curvature(tail)
            return budgets.log_ratio()

        return np.concatenate(
            [of(self._budgets(i, partition, unit, form)) for i in range(len(self._chunks))]
        )


def _join(parts: list[Any]) -> Any:
    if isinstance(parts[0], Enclosure):
        return Enclosure(
            np.concatenate([part.low for part in parts]),
            np.concatenate([part.high for part in parts]),
        )
    return np.concatenate(parts)


def excused(
    rule: Rule,
    right: Decisions,
    allowances: list[Allowance],
    directions: list[Enclosure],
    advantages: Array,
) -> NDArray[np.bool_]:
    """Whether rounding within the budgets can flip each decision, `[T]`.

    A right drop flips as soon as one test of one end lies within its budget; a right keep flips
    only if, at every end, each test that keeps does.
    """
    delta = np.where(advantages > 0, rule.delta_high, rule.delta_low)
    sign = np.sign(advantages)
    some = np.zeros(len(sign), dtype=bool)
    every = np.ones(len(sign), dtype=bool)
    for allowance, direction in zip(allowances, directions, strict=True):
        if rule.direction == "clip":
            low = np.log(1 - rule.clip_low) if rule.clip_low < 1 else -np.inf
            bound = np.where(sign > 0, np.log1p(rule.clip_high), low)
            outside = np.ones(len(sign), dtype=bool)
            near_d = np.zeros(len(sign), dtype=bool)
        else:
            bound = np.zeros(len(sign))
            distance_d = np.maximum(
                np.maximum(right.divergence.low - delta, delta - right.divergence.high), 0.0
            )
            outside = right.divergence.low > delta
            near_d = ~(distance_d > allowance.proximity)
        distance_c = np.maximum(np.maximum(direction.low - bound, bound - direction.high), 0.0)
        pushes = np.where(sign > 0, direction.low > bound, direction.high < bound)
        near_c = ~(distance_c > allowance.direction)
        some |= near_d | near_c
        every &= (outside | near_d) & (pushes | near_c)
    return np.asarray(np.where(right.keep, every, some) & (sign != 0))


Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`."""
