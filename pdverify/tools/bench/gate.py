"""Whether a contestant's answers are right, before anyone is told how fast they come.

D and C are held to the oracle's enclosures widened by the rounding budget, certain decisions to
the oracle's, log-prob, loss and gradient to the float64 definitions within the same budgets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch
from pdverify.budgets import SLACK, chain
from pdverify.cases import build
from pdverify.conformance.truth import Truth, distance, excused, finite, over_budget
from pdverify.definitions.cells import log_softmax
from pdverify.definitions.losses import policy_loss
from pdverify.formats import FORMATS
from pdverify.oracle import Enclosure
from pdverify.rules import Tail
from pdverify.tools.bench.baselines import RATIO_CAP
from pdverify.tools.bench.contestants import Contestant
from pdverify.tools.bench.inputs import Inputs, as_batch, from_batch
from pdverify.tools.bench.records import Gate
from pdverify.tools.bench.workloads import Workload

Array = NDArray[np.float64]

FAMILIES = (
    "peaked",
    "flat",
    "near-one-hot",
    "offset",
    "padded-vocabulary",
    "far-apart",
    "direction-conflict",
    "sampled-outside",
)
"""One row of each is judged, besides the first rows of what is timed."""

TIMED_ROWS = 2

UNIT = FORMATS["fp32"].unit_roundoff


class Case:
    """Rows with their right answers; `head` holds the inputs behind a head, or is None."""

    def __init__(self, name: str, batch: Batch, head: Inputs | None = None) -> None:
        self.name, self.batch, self.head = name, batch, head
        self.truth = cache(self._truth)

    def _truth(self, longest: int) -> Truth:
        """Oracle and budgets, with sums of at most `longest` additions in a chain."""
        return Truth(self.batch.rows(), longest)

    @property
    def reach(self) -> Array | float:
        """How far fp32 may be off in any logit behind a head, `[T]` nats; 0 without one.

        A sum of `d` products errs by `u chain(d) sum |h_i w_i|`.
        """
        if self.head is None:
            return 0.0
        hidden, head = (x.double().abs() for x in (self.head.hidden[0], self.head.head))
        size = (hidden @ head.T).amax(-1).cpu().numpy()
        return np.asarray(SLACK * UNIT * chain(hidden.shape[-1]) * size)


def cases(workload: Workload, inputs: Inputs, dtype: str, seed: int) -> list[Case]:
    """The first rows of what is timed and, unless behind a head, one of each family."""
    first = inputs.rows(slice(0, TIMED_ROWS))
    head = first if workload.kind == "head" else None
    found = [Case("the timed inputs", as_batch(first, dtype), head)]
    if head is None:
        vocab = inputs.logits.shape[-1]
        about: dict[str, Any] = {"sequences": 1, "length": 1, "vocab_size": vocab, "dtype": dtype}
        found += [Case(name, build(name, seed, **about)) for name in FAMILIES]
    return found


@dataclass(frozen=True)
class Look:
    """D, C and decisions on one set of rows, `[T]` each: errors, their budgets, wrong decisions."""

    right: dict[str, Enclosure]
    errors: dict[str, tuple[Array, Array]]
    determined: NDArray[np.bool_]
    wrong: NDArray[np.bool_]


def look(
    contestant: Contestant, workload: Workload, truth: Truth, values: dict[str, Any], unit: float
) -> Look:
    """Hold the D, C and decisions that `values` has to the oracle's and to budgets at `unit`."""
    tail: Tail | None = contestant.tail if workload.view == "topk" else None
    name, view, form = workload.divergence, workload.view, contestant.form
    distances = truth.divergence(name, view)
    # below 0 only where stored masses sum past 1; 0 is as right there
    distances = Enclosure(distances.low, np.maximum(distances.high, 0.0))
    changes = truth.coefficient(name, view, tail)
    right, errors = {"divergence": distances, "coefficient": changes}, {}
    for quantity, end in (("divergence", None), ("coefficient", tail)):
        budget = truth.budget(quantity, name, view, end, unit, form)
        known = finite(right[quantity])
        error = np.where(known, distance(values[quantity], right[quantity]), 0.0)
        errors[quantity] = error, budget
    rule = workload.rule(tail)
    decisions = truth.decide(rule)
    wrong = decisions.determined & (values["keep"] != decisions.keep)
    if wrong.any():
        allowance = truth.allowance(rule, tail, unit, form)
        wrong &= ~excused(rule, decisions, [allowance], [changes], truth.rows.advantages)
    return Look(right, errors, decisions.determined, wrong)


class _Verdict:
    """Collects errors over budgets."""

    def __init__(self) -> None:
        self.rows = 0
        self.wrong: set[tuple[str, int]] = set()
        self.worst: dict[str, float] = {}
        self.error: dict[str, float] = {}
        self.message = ""

    def values(self, case: str, quantity: str, error: Array, budget: Array) -> None:
        """Errors `[T]` of a quantity and their budgets."""
        error = np.where(np.isnan(error), np.inf, error)
        share = over_budget(error, budget)
        for known, x in ((self.worst, share), (self.error, error)):
            known[quantity] = max(known.get(quantity, 0.0), float(x.max(initial=0.0)))
        t = int(np.argmax(share))
        self.found(case, share > 1, f"{quantity} is off by {error[t]:.3g}, allowed {budget[t]:.3g}")

    def found(self, case: str, bad: NDArray[np.bool_], message: str) -> None:
        """Rows that are wrong."""
        rows = {(case, int(t)) for t in np.flatnonzero(bad)}
        self.wrong |= rows
        if rows and not self.message:
            self.message = f"{case}: {message}"

    def gate(self) -> Gate:
        """What was collected."""
        worst, error = (
            {name: x if np.isfinite(x) else None for name, x in known.items()}
            for known in (self.worst, self.error)
        )
        return Gate(self.rows, len(self.wrong), worst, error, self.message)


def judge(contestant: Contestant, workload: Workload, found: Iterable[Case], device: str) -> Gate:
    """Judge the very call that is timed, and D and C, on some cases; what raises is wrong."""
    verdict = _Verdict()
    for case in found:
        count = int(case.batch.response_mask.sum())
        verdict.rows += count
        try:
            answers = _answers(contestant, workload, case, device)
        except Exception as failure:  # an answer that is not given is a wrong one
            first = (str(failure).splitlines() or [""])[0]
            message = f"raised {type(failure).__name__}: {first}"
            verdict.found(case.name, np.ones(count, dtype=bool), message)
            continue
        truth = case.truth(contestant.longest)
        if workload.kind == "mask":
            seen = look(contestant, workload, truth, answers, UNIT)
            for quantity, (error, budget) in seen.errors.items():
                verdict.values(case.name, quantity, error, budget)
            verdict.found(case.name, seen.wrong, "a certain decision is wrong")
            continue
        gap = truth.budget("log_ratio", None, "binary", None, UNIT, contestant.form)
        gap = gap + 2 * case.reach
        if workload.kind == "head":
            assert truth.rows.logits is not None
            right = log_softmax(truth.rows.logits)[np.arange(count), truth.rows.tokens]
            verdict.values(case.name, "log_prob", np.abs(answers["log_prob"] - right), gap)
        else:
            _judge_loss(verdict, contestant, workload, case, answers, gap)
    return verdict.gate()


def _answers(
    contestant: Contestant, workload: Workload, case: Case, device: str
) -> dict[str, Array]:
    inputs = from_batch(case.batch, device) if case.head is None else case.head
    outcome = contestant.prepare(workload, inputs)()
    answers = {name: x.double().cpu().numpy()[0] for name, x in outcome.items()}
    if workload.kind == "mask" and "divergence" not in answers:
        assert contestant.values is not None
        answers = contestant.values(workload, case.batch, "fp32", device) | answers
    return answers


def _judge_loss(
    verdict: _Verdict,
    contestant: Contestant,
    workload: Workload,
    case: Case,
    answers: dict[str, Array],
    gap: Array,
) -> None:
    """Where the decision is certain whatever the arithmetic, the loss and its gradient.

    `gap` is the budget of log-probs.  The gradient is `A (pi - e_k)` times the ratio: each factor
    is off by what log-probs are.
    """
    truth, rule = case.truth(contestant.longest), workload.rule()
    decisions, advantages = truth.decide(rule), truth.rows.advantages
    allowance = truth.allowance(rule, rule.tail, UNIT, contestant.form)
    direction = truth.coefficient(workload.divergence, workload.view, rule.tail)
    known = decisions.determined
    known = known & ~excused(rule, decisions, [allowance], [direction], advantages)
    keep = np.zeros(case.batch.tokens.shape, dtype=bool)
    index = tuple(truth.rows.index.T)
    keep[index] = decisions.keep
    want, slope = (x[index] for x in policy_loss(case.batch, keep, ratio_cap=RATIO_CAP))
    weight = np.where(decisions.keep, np.abs(advantages) * RATIO_CAP, 0.0)
    allowed = 2 * np.abs(want) * (np.expm1(gap) + 8 * UNIT) + weight * gap
    error = np.abs(answers["loss"] - want)
    verdict.values(case.name, "loss", np.where(known, error, 0.0), allowed)
    form = FORMATS[case.batch.dtype]
    relative = 2 * np.expm1(gap) + 8 * UNIT + form.unit_roundoff
    allowed = (np.abs(slope).max(-1) + np.abs(advantages)) * relative + form.min_normal
    error = np.abs(answers["gradient"] - slope).max(-1)
    verdict.values(case.name, "gradient", np.where(known, error, 0.0), allowed)
