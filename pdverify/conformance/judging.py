"""A target's answer against the oracle: decisions, values, the loss and its gradient.

A determined decision that differs is wrong unless the budget of the declared precision can flip
it; a value is wrong where it is farther from its enclosure than its budget; a dropped or padded
token's loss and gradient are exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdverify.budgets import Form
from pdverify.conformance.answers import Answer
from pdverify.conformance.questions import Question
from pdverify.conformance.records import DecisionCounts, VerdictKind
from pdverify.conformance.truth import (
    Array,
    Truth,
    distance,
    excused,
    finite,
    over_budget,
)
from pdverify.definitions.cells import log_softmax, sampled_logprob
from pdverify.definitions.losses import weights
from pdverify.formats import FORMATS
from pdverify.oracle import Decisions, Enclosure
from pdverify.rules import Rule, Tail

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Standard:
    """What an answer is held to: the declared precision's unit roundoff, and a form of C."""

    unit: float
    form: Form = "plain"


@dataclass(frozen=True)
class Fault:
    """One wrong answer.

    Attributes:
        kind: why.
        quantity: as in `TargetCounterexample`.
        row: index of the token among the valid ones, or None where the answer as a whole is.
        place: (sequence, position), or None.
        expected, got, exact: text.
        margin, error, budget: numbers, NaN where they mean nothing.
        ratio: how bad it is, for ordering: error over budget, or the size of the margin.
    """

    kind: VerdictKind
    quantity: str
    row: int | None
    place: tuple[int, int] | None
    expected: str
    got: str
    exact: str = ""
    margin: float = float("nan")
    error: float = float("nan")
    budget: float = float("nan")
    ratio: float = 0.0


@dataclass
class Judgment:
    """What was seen of one answer."""

    faults: list[Fault] = field(default_factory=list)
    decisions: DecisionCounts = field(default_factory=DecisionCounts)
    worst: float | None = None

    def saw(self, share: float) -> None:
        """Remember an error over its budget."""
        self.worst = share if self.worst is None else max(self.worst, share)


def ends(tail: Tail | None) -> tuple[Tail | None, ...]:
    """The tail estimators that a rule's direction is taken with."""
    return ("aggregated", "uniform") if tail == "bracket" else (tail,)


@dataclass(frozen=True)
class Verdicts:
    """The right decisions of a question, `[T]`, and what may pass for them.

    Attributes:
        decisions: the oracle's.
        open: either decision passes: undetermined, or within the budget.
        rounding: those of `open` that are determined.
    """

    decisions: Decisions
    open: BoolArray
    rounding: BoolArray


def right_decisions(question: Question, standard: Standard) -> Verdicts:
    """The oracle's decisions, and where rounding may flip them."""
    return question.material.once(
        (question.rule, standard), lambda: _right_decisions(question, standard)
    )


def _right_decisions(question: Question, standard: Standard) -> Verdicts:
    truth, rule = question.material.truth, question.rule
    right = truth.decide(rule)
    near = np.zeros(len(right.keep), dtype=bool)
    if rule.direction != "none":
        tails = ends(rule.tail)
        allowances = [truth.allowance(rule, end, standard.unit, standard.form) for end in tails]
        directions = [_direction(truth, rule, right, end) for end in tails]
        near = excused(rule, right, allowances, directions, truth.rows.advantages)
    open_rows = near | ~right.determined
    if rule.divergence is not None and rule.direction != "none":
        # rows where D or C is infinite are informative only
        open_rows |= ~finite(truth.divergence(rule.divergence, rule.partition))
    return Verdicts(right, open_rows, near & right.determined)


def _direction(truth: Truth, rule: Rule, right: Decisions, end: Tail | None) -> Enclosure:
    if rule.direction in ("ratio", "clip"):
        return right.direction
    assert rule.divergence is not None
    return truth.coefficient(rule.divergence, rule.partition, end)


class Judge:
    """Judges the answers to one question.

    `aggregation` is how the loss is reduced (``none``: per token); `masked` says whether the target
    takes the response mask, so that it is answerable for padding.
    """

    def __init__(
        self, question: Question, standard: Standard, aggregation: str, *, masked: bool
    ) -> None:
        self.question, self.standard, self.aggregation = question, standard, aggregation
        self.masked = masked

    @cached_property
    def verdicts(self) -> Verdicts:
        """The right decisions."""
        return right_decisions(self.question, self.standard)

    def judge(self, answer: Answer, *, at: str | None) -> Judgment:
        """Everything the answer says that the question asks for.

        `at` names the input at which the gradient was taken.
        """
        seen = Judgment()
        if answer.failure is not None:
            failure = answer.failure
            seen.faults.append(
                Fault(
                    failure.kind, _subject(failure.kind), None, None, "an answer", failure.message
                )
            )
            return seen
        judges = self.question.judges
        kept, known = self.kept(answer)
        if kept is not None and "keep" in judges:
            self._keep(seen, kept, known)
        for quantity in ("divergence", "coefficient"):
            if quantity in answer.values and quantity in judges:
                self._value(seen, quantity, answer.values[quantity])
        if self.question.loss and "loss" in answer.values:
            self._loss(seen, answer, at)
        return seen

    def kept(self, answer: Answer) -> tuple[BoolArray | None, BoolArray]:
        """The decisions `[T]` an answer says or implies, and where it says any.

        A loss says them by its gradient, except where A = 0 or the gradient may underflow.
        """
        rows = self.question.material.rows
        index = tuple(rows.index.T)
        if "keep" in answer.values:
            return answer.values["keep"][index], np.ones(len(rows), dtype=bool)
        if answer.gradient is None:
            return None, np.zeros(len(rows), dtype=bool)
        moves = answer.gradient[index]
        moves = np.abs(moves).max(-1) if moves.ndim == 2 else np.abs(moves)
        visible = self._weight * (1 - np.exp(self._log_pi_k)) > 1e-30
        if answer.gradient.ndim == 2:  # taken at the log-probs
            visible = self._weight > 1e-30
        return ~(moves == 0), visible & ~np.isnan(moves)

    @cached_property
    def _log_pi_k(self) -> Array:
        rows = self.question.material.rows
        if rows.logits is None:
            assert rows.logprobs is not None
            return rows.logprobs.astype(np.float64)
        return np.asarray(log_softmax(rows.logits)[np.arange(len(rows)), rows.tokens])

    @cached_property
    def _weight(self) -> Array:
        """`|A| min(r, cap)` times the weight of the aggregation, `[T]`."""
        rows = self.question.material.rows
        gap = self._log_pi_k - sampled_logprob(rows)
        r = np.minimum(np.exp(np.minimum(gap, 700.0)), self.question.ratio_cap)
        weight = weights(self.question.batch.response_mask, self.aggregation)
        return np.asarray(np.abs(rows.advantages) * r * weight[tuple(rows.index.T)])

    def _place(self, t: int) -> tuple[int, int]:
        b, position = self.question.material.rows.index[t]
        return int(b), int(position)

    def _keep(self, seen: Judgment, got: BoolArray, known: BoolArray) -> None:
        right, verdicts = self.verdicts.decisions, self.verdicts
        if self.question.unanimous:
            self._equality(seen, got, known)
            return
        other = known & (got != right.keep) & right.determined
        wrong = other & ~verdicts.open
        seen.decisions += DecisionCounts(
            total=int(known.sum()),
            determined=int((known & right.determined).sum()),
            wrong=int(wrong.sum()),
            rounding=int((other & ~wrong).sum()),
        )
        for t in np.flatnonzero(wrong):
            margin = float(right.margin[t])
            seen.faults.append(
                Fault(
                    "wrong",
                    "keep",
                    int(t),
                    self._place(int(t)),
                    _decision(right.keep[t]),
                    _decision(got[t]),
                    self._why(int(t)),
                    margin=margin,
                    ratio=abs(margin) if np.isfinite(margin) else 1.0,
                )
            )

    def _why(self, t: int) -> str:
        """The quantities both criteria look at, as the oracle encloses them."""
        right, rule = self.verdicts.decisions, self.question.rule
        a = float(self.question.material.rows.advantages[t])
        parts = [f"A = {a:.9g}"]
        if rule.divergence is not None:
            delta = rule.delta_high if a > 0 else rule.delta_low
            parts.append(f"D = {enclosed(right.divergence, t)}, delta = {delta:.9g}")
        if rule.direction != "none":
            name = "log r" if rule.direction in ("ratio", "clip") else "C"
            parts.append(f"{name} = {enclosed(right.direction, t)}")
        return "; ".join(parts)

    def _equality(self, seen: Judgment, got: BoolArray, known: BoolArray) -> None:
        """Tokens exactly at the threshold are kept; rounding may drop some, not every one."""
        moved = known & (self.question.material.rows.advantages != 0)
        seen.decisions += DecisionCounts(total=int(moved.sum()), rounding=int((moved & ~got).sum()))
        if moved.any() and not got[moved].any():
            t = int(np.flatnonzero(moved)[0])
            seen.faults.append(
                Fault(
                    "wrong", "keep", t, self._place(t), "kept", "dropped", self._why(t), margin=0.0
                )
            )

    def _value(self, seen: Judgment, quantity: str, given: Array) -> None:
        rule, truth = self.question.rule, self.question.material.truth
        if rule.divergence is None or rule.direction == "none":
            return
        if quantity == "coefficient" and rule.direction == "ratio":
            return
        got = given[tuple(truth.rows.index.T)]
        unit, form = self.standard.unit, self.standard.form
        name, partition = rule.divergence, rule.partition
        errors, budgets, rights = [], [], []
        for end in ends(rule.tail) if quantity == "coefficient" else (None,):
            if quantity == "divergence":
                right = truth.divergence(name, partition)
                # below 0 only where stored masses sum past 1; 0 is as right there
                right = Enclosure(right.low, np.maximum(right.high, 0.0))
            else:
                right = truth.coefficient(name, partition, end)
            rights.append(right)
            known = finite(right) & finite(truth.divergence(name, partition))
            errors.append(np.where(known, distance(got, right), 0.0))
            budgets.append(truth.budget(quantity, name, partition, end, unit, form))
        shares = np.stack([over_budget(e, b) for e, b in zip(errors, budgets, strict=True)])
        best = shares.argmin(axis=0)  # a bracket's C may be that of either end
        self._report(
            seen,
            quantity,
            got,
            shares.min(axis=0),
            [enclosed(rights[e], t) for t, e in enumerate(best)],
            np.stack(errors)[best, np.arange(len(got))],
            np.stack(budgets)[best, np.arange(len(got))],
        )

    def _report(
        self,
        seen: Judgment,
        quantity: str,
        got: Array,
        share: Array,
        exact: list[str],
        error: Array,
        budget: Array,
    ) -> None:
        seen.saw(float(share.max(initial=0.0)))
        for t in np.flatnonzero(share > 1):
            kind: VerdictKind = "not-a-number" if np.isnan(got[t]) else "wrong"
            seen.faults.append(
                Fault(
                    kind,
                    quantity,
                    int(t),
                    self._place(int(t)),
                    exact[t],
                    f"{float(got[t]):.9g}",
                    exact[t],
                    error=float(error[t]),
                    budget=float(budget[t]),
                    ratio=float(share[t]),
                )
            )

    def _loss(self, seen: Judgment, answer: Answer, at: str | None) -> None:
        """Value and gradient, token by token: that of a kept token, or exactly 0."""
        rows, question = self.question.material.rows, self.question
        index = tuple(rows.index.T)
        unit = self.standard.unit
        gap = question.material.truth.budget("log_ratio", None, "binary", None, unit, "plain")
        relative = np.expm1(gap) + 8 * unit
        # a token of weight 0 may have log pi_k = -inf: it contributes 0, the limit of r log pi_k
        log_pi_k = np.where(self._weight > 0, self._log_pi_k, 0.0)
        value = -np.sign(rows.advantages) * self._weight * log_pi_k
        allowed = np.abs(value) * relative * 2 + self._weight * gap * (1 + relative)
        # a weight below the normal numbers has few digits, or none
        allowed += FORMATS["fp32"].min_normal * np.abs(log_pi_k)
        loss = answer.values["loss"]
        if "loss" in question.judges:
            if loss.ndim:
                self._either(seen, "loss", loss[index], value, allowed)
                self._padding(seen, "loss", loss)
            elif question.tokens == "padding":
                self._scalar(seen, float(loss), float("nan"), 0.0)
            elif question.tokens in ("kept", "all"):
                kept = np.where(self._keeps, value, 0.0)
                slack = np.where(self._open, np.abs(value), 0.0)
                slack += np.where(self._keeps, allowed, 0.0)
                total = (slack + len(rows) * unit * np.abs(value)).sum()
                self._scalar(seen, float(loss), float(kept.sum()), float(total))
        if answer.gradient is not None and at is not None and "gradient" in question.judges:
            self._gradient(seen, answer.gradient, at, relative)
            self._padding(seen, "gradient", answer.gradient)

    @cached_property
    def _keeps(self) -> BoolArray:
        """Tokens that contribute to the loss: kept, with an advantage; `[T]`."""
        moves = self.question.material.rows.advantages != 0
        return np.asarray(self.verdicts.decisions.keep & moves)

    @cached_property
    def _open(self) -> BoolArray:
        """Tokens that may contribute or not; `[T]`."""
        return np.asarray(self.verdicts.open & (self.question.material.rows.advantages != 0))

    def _shares(self, as_kept: Array, as_dropped: Array) -> Array:
        """Error over budget given it as a kept and as a dropped token; 0 where it is not asked."""
        share = np.where(self._keeps, as_kept, as_dropped)
        share = np.where(self._open, np.minimum(as_kept, as_dropped), share)
        tokens = self.question.tokens
        if tokens in ("padding", "all"):
            return share
        asked = (self._keeps if tokens == "kept" else ~self._keeps) & ~self._open
        return np.where(asked, share, 0.0)

    def _either(
        self, seen: Judgment, quantity: str, got: Array, kept: Array, budget: Array
    ) -> None:
        """`got` is `kept` where the token is kept and exactly 0 where it is dropped."""
        lost = np.isnan(got)
        as_kept = over_budget(np.where(lost, np.inf, np.abs(got - kept)), budget)
        share = self._shares(as_kept, np.where(got == 0, 0.0, np.inf))
        if self.question.tokens == "padding":
            share = np.where(lost, np.inf, 0.0)
        wanted = np.where(self._keeps, kept, 0.0)
        self._report(
            seen,
            quantity,
            got,
            share,
            [f"{x:.9g}" for x in wanted],
            np.where(lost, np.inf, np.abs(got - wanted)),
            np.where(self._keeps, budget, 0.0),
        )

    def _scalar(self, seen: Judgment, got: float, wanted: float, budget: float) -> None:
        """`got` is `wanted`, or where that is NaN, any number."""
        error = np.inf if np.isnan(got) else 0.0 if np.isnan(wanted) else abs(got - wanted)
        right = "a number" if np.isnan(wanted) else f"{wanted:.9g}"
        share = float(over_budget(np.array([error]), np.array([budget]))[0])
        seen.saw(share)
        if share > 1:
            kind: VerdictKind = "not-a-number" if np.isnan(got) else "wrong"
            fault = Fault(
                kind, "loss", None, None, right, f"{got:.9g}", right,
                error=error, budget=budget, ratio=share,
            )  # fmt: skip
            seen.faults.append(fault)

    def _gradient(self, seen: Judgment, gradient: Array, at: str, relative: Array) -> None:
        rows = self.question.material.rows
        scale = np.sign(rows.advantages) * self._weight
        got = gradient[tuple(rows.index.T)]
        if at == "logprobs":
            kept = -scale[:, None]
            got = got[:, None]
            form = FORMATS["fp32"]
        else:
            assert rows.logits is not None
            kept = np.exp(log_softmax(rows.logits)) * scale[:, None]
            kept[np.arange(len(rows)), rows.tokens] -= scale
            form = FORMATS[self.question.batch.dtype]
        size = np.abs(kept).max(-1)
        budget = (size + self._weight) * (2 * relative + form.unit_roundoff) + form.min_normal
        # the entry that is farthest off stands for the row
        off = np.where(np.isnan(got), np.inf, np.abs(got - kept))
        worst = off.argmax(-1)
        at_worst = (np.arange(len(rows)), worst)
        lost = np.isnan(got).any(-1)
        as_kept = over_budget(off.max(-1), budget)
        share = self._shares(as_kept, np.where((got == 0).all(-1), 0.0, np.inf))
        if self.question.tokens == "padding":
            share = np.where(lost, np.inf, 0.0)
        wanted = np.where(self._keeps, kept[at_worst], 0.0)
        where = [""] * len(rows) if at == "logprobs" else [f" at column {j}" for j in worst]
        self._report(
            seen,
            "gradient",
            got[at_worst],
            share,
            [f"{x:.9g}{place}" for x, place in zip(wanted, where, strict=True)],
            np.where(lost, np.inf, np.abs(got[at_worst] - wanted)),
            np.where(self._keeps, budget, 0.0),
        )

    def _padding(self, seen: Judgment, quantity: str, given: Array) -> None:
        """Padding contributes exactly 0, where the target can know it and the question asks."""
        if not self.masked or self.question.tokens not in ("padding", "all"):
            return
        valid = self.question.batch.response_mask
        leaks = ~(given.reshape(*valid.shape, -1) == 0).all(-1) & ~valid
        if leaks.any():
            b, position = (int(i) for i in np.argwhere(leaks)[0])
            here = given[b, position].ravel()
            leak = float(here[np.flatnonzero(~(here == 0))[0]])
            kind: VerdictKind = "not-a-number" if np.isnan(leak) else "wrong"
            seen.saw(float("inf"))
            seen.faults.append(
                Fault(
                    kind,
                    quantity,
                    None,
                    (b, position),
                    "0 on padding",
                    f"{leak:.9g}",
                    ratio=float("inf"),
                )
            )


def enclosed(truth: Enclosure, t: int) -> str:
    """The oracle's value of row `t` as text: one decimal where the enclosure is narrow."""
    low, high = float(truth.low[t]), float(truth.high[t])
    if low == high or abs(high - low) <= 1e-9 * max(abs(low), abs(high)):
        return f"{(low + high) / 2:.9g}"
    return f"[{low:.9g}, {high:.9g}]"


def _decision(keep: object) -> str:
    return "kept" if keep else "dropped"


def _subject(kind: VerdictKind) -> str:
    return "inputs" if kind == "modified" else "answer"
