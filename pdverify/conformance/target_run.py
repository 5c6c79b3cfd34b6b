"""Judge someone else's mask: run the checks, shrink what fails, name what explains it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

import numpy as np

from pdverify.conformance.alternatives import ALTERNATIVES, Alternative, Given, explains
from pdverify.conformance.answers import Answer
from pdverify.conformance.bits import Bits, effective_bits
from pdverify.conformance.checks import CHECKS, Check, in_order
from pdverify.conformance.effective import designed_question, signs
from pdverify.conformance.judging import Fault, Judge, Judgment, Standard
from pdverify.conformance.options import Options
from pdverify.conformance.plan import Plan
from pdverify.conformance.questions import ARGUMENTS, RETURNS, Question, arguments, unit_roundoff
from pdverify.conformance.records import (
    CheckRecord,
    DecisionCounts,
    TargetCounterexample,
    TargetReport,
    VerdictKind,
)
from pdverify.conformance.shrinking import shrink
from pdverify.conformance.targets import (
    Caller,
    TargetError,
    load_target,
)
from pdverify.conformance.truth import Progress
from pdverify.conformance.versions import versions
from pdverify.formats import FORMATS, POLICY_FORMATS

SHRINK_SECONDS = 2.0
"""Time for one counterexample."""

SHRINK_TOTAL = 6.0
"""Time for all counterexamples of one run where the caller does not say."""

THRESHOLDS = ("delta", "delta_low", "delta_high", "clip_low", "clip_high")
"""Numbers that the reducer may make rounder where the target takes them."""

HEAVY = 20_000
"""Vocabulary from which on the oracle's working arrays are not kept between questions."""

SHOWN = 4096
"""Elements of an argument that a counterexample still shows."""

LOSS = (
    "loss.value",
    "loss.gradient",
    "loss.dropped",
    "loss.overflow",
    "loss.cap",
    "loss.small-ratio",
    "loss.padding",
    "loss.aggregation",
)
"""Checks without which a loss is not judged on special input."""

BASE = {
    "keep": ("mask.decisions",),
    "divergence": ("value.divergence",),
    "coefficient": ("value.coefficient",),
    "loss": LOSS,
    "gradient": LOSS,
}
"""The checks that judge a quantity on ordinary input."""


@dataclass
class _Seen:
    """One question, what was answered, and what is wrong with it."""

    question: Question
    answer: Answer
    judgment: Judgment


class TargetSession:
    """One target under one set of options; checks run one at a time and share their truths.

    Raises:
        TargetError: the target cannot be judged; the message says why.
        InputError, UnknownName: an option.
    """

    def __init__(
        self,
        target: str | Callable[..., Any],
        options: Options,
        shrink_seconds: float = SHRINK_TOTAL,
    ) -> None:
        self.shrink_seconds = shrink_seconds
        self.started = time.perf_counter()
        self.options = options
        self.target = load_target(target)
        self._require_parameters()
        for name in options.accept:
            if not ALTERNATIVES[name].documented:
                raise TargetError(
                    f"--accept {name}: that is a bug, not a convention; `pdverify list` shows those"
                )
        self.caller = Caller(self.target, options.time_limit)
        self.unit = unit_roundoff(options.precision, self.target.parameters)
        self.aggregation = options.aggregation or "none"
        first = Plan(options, self.target.parameters, ("keep", "loss"))
        self._hung: str | None = None
        self._first_answer = self._try(first)
        self.outputs = tuple(n for n in RETURNS if n in self._first_answer.values)
        self.plan = Plan(options, self.target.parameters, self.outputs)
        self.ids = [
            id
            for id in in_order()
            if (not options.select or any(fnmatch(id, glob) for glob in options.select))
            and not any(fnmatch(id, glob) for glob in options.deselect)
        ]
        if not self.ids:
            raise TargetError("--select and --deselect leave no check; `pdverify list` shows them")
        self._records: dict[str, CheckRecord] = {}
        self._shrunk = 0.0
        self._explanations: list[Alternative] = []
        self._faulty: dict[str, list[_Seen]] = {}
        self._answered: list[_Seen] = []

    def _require_parameters(self) -> None:
        taken, options = set(self.target.parameters), self.options
        name, definition = self.target.name, self.options.definition
        needed = None
        if not taken & {"logits", "logprobs", "support_logprobs"}:
            needed = "logits, logprobs or support_logprobs: the training policy is unknown to it"
        elif options.partition in ("topk", "full") and not taken & {"logits", "support_logprobs"}:
            needed = f"logits or support_logprobs for the {options.partition} view"
        if needed is not None:
            raise TargetError(f"TARGET {name!r} must take {needed}")
        if definition.divergence is not None and definition.direction != "none":
            has = taken & {"delta", "delta_low", "delta_high"}
            if not has and options.delta is None:
                raise TargetError(f"TARGET {name!r} takes no delta: declare it with --delta")
        if "delta" in taken and options.delta_low != options.delta_high:
            raise TargetError(
                f"TARGET {name!r} takes one delta, but --delta-low and --delta-high differ"
            )

    def _try(self, plan: Plan) -> Answer:
        """The answer to the first plain batch: without one nothing can be judged."""
        question = next(iter(CHECKS["output.form"].questions(plan)))
        answer = self.caller.ask(question)
        if answer.failure is not None and answer.failure.kind == "raised":
            raise TargetError(
                f"TARGET {self.target.name!r} {answer.failure.message} on a plain batch (B = 2,"
                f" L = 3, V = {question.batch.vocab_size}); it was given"
                f" {', '.join(self.target.parameters)}"
            )
        if answer.failure is not None and answer.failure.kind == "time-out":
            self._hung = answer.failure.message
        loss = answer.values.get("loss")
        if loss is not None and answer.failure is None:
            answer = self.caller.ask(replace(question, judges=("loss",)))
            self._require_aggregation(answer)
        return answer

    def _require_aggregation(self, answer: Answer) -> None:
        if answer.failure is not None:
            return
        scalar = answer.values["loss"].ndim == 0
        if scalar and self.options.aggregation is None:
            raise TargetError(
                f"TARGET {self.target.name!r} returns a scalar loss: say how it is reduced with"
                " --aggregation token-mean|sequence-mean|fixed-length"
            )
        if not scalar and self.options.aggregation is not None:
            raise TargetError(
                f"TARGET {self.target.name!r} returns a loss per token: leave --aggregation out"
            )

    # ---- one check

    def run(self, id: str) -> CheckRecord:
        """The record of a check; run once."""
        if id not in self._records:
            start = time.perf_counter()
            record = self._run(CHECKS[id])
            self._records[id] = replace(record, seconds=time.perf_counter() - start)
        return self._records[id]

    def _record(self, check: Check, status: Any, message: str, **more: Any) -> CheckRecord:
        base: dict[str, Any] = {
            "kind": None, "convention": None, "cause": None, "counterexample": None,
            "decisions": DecisionCounts(), "worst": None, "seconds": 0.0,
        }  # fmt: skip
        return CheckRecord(
            id=check.id, status=status, message=message, rerun=self.rerun(check.id), **(base | more)
        )

    def _run(self, check: Check) -> CheckRecord:
        if self._hung is not None and check.id != "output.form":
            return self._record(check, "not-run", f"an earlier call {self._hung}")
        if self._hung is not None:
            return self._record(
                check,
                "failed",
                f"{self._hung} on a plain batch",
                kind="time-out",
                cause="an endless loop or a deadlock; a slow target needs a larger --time-limit",
            )
        failure = self._first_answer.failure
        if failure is not None and check.id != "output.form":
            return self._record(check, "not-run", "the answer to a plain batch has no usable form")
        why = check.applies(self.plan)
        if why is not None:
            return self._record(check, "not-applicable", why)
        questions = self.plan.questions(check)
        if not questions:
            return self._record(check, "not-applicable", "no input of this kind for this mask")
        left_out = self._wrong_already() if check.gated else set()
        judged = self._said - left_out
        asked = [replace(q, judges=tuple(x for x in q.judges if x in judged)) for q in questions]
        if check.gated and not asked[0].judges:
            names = ", ".join(sorted(left_out))
            return self._record(
                check, "not-run", f"{names} is wrong on ordinary input already: mend that first"
            )
        return self._verdict(check, self._ask(asked))

    def _wrong_already(self) -> set[str]:
        wrong = set()
        for quantity, ids in BASE.items():
            if quantity in self._said and any(self.run(id).status == "failed" for id in ids):
                wrong.add(quantity)
        return wrong

    @cached_property
    def _said(self) -> set[str]:
        """What can be judged of the target's answers."""
        said = set(self.outputs)
        if "loss" in said:
            said.add("keep")  # implied by the gradient
            if self.target.differentiates is not None:
                said.add("gradient")
        return said

    def _ask(self, questions: Sequence[Question]) -> list[_Seen]:
        seen = []
        for question in questions:
            one = self._one(question)
            seen.append(one)
            self._answered.append(one)
            if question.batch.vocab_size > HEAVY:
                question.material.truth.release()
            if one.answer.failure is not None and one.answer.failure.kind == "time-out":
                self._hung = one.answer.failure.message
                break
        return seen

    def _one(self, question: Question, unit: float | None = None) -> _Seen:
        asked = question
        if "keep" not in self.outputs and "keep" in question.judges and not question.loss:
            # decisions are read off the gradient
            asked = replace(question, judges=(*question.judges, "gradient"))
        answer = self.caller.ask(asked)
        return _Seen(question, answer, self._judge(question, answer, unit or self.unit))

    def _judge(self, question: Question, answer: Answer, unit: float) -> Judgment:
        judge = Judge(
            question,
            Standard(unit),
            self.aggregation,
            masked="response_mask" in self.target.parameters,
        )
        return judge.judge(answer, at=self.target.differentiates)

    def _verdict(self, check: Check, seen: list[_Seen]) -> CheckRecord:
        decisions = DecisionCounts()
        worst: float | None = None
        for one in seen:
            decisions = decisions + one.judgment.decisions
            if one.judgment.worst is not None:
                worst = max(worst or 0.0, one.judgment.worst)
        faulty = [one for one in seen if one.judgment.faults]
        if check.id == "mask.equality" and len(faulty) < len(seen):
            faulty = []  # rounding moves single cases; `>=` moves every one
        common = {"decisions": decisions, "worst": worst}
        if not faulty:
            return self._record(check, "passed", _summary(decisions, worst), **common)
        name = self._named(check, faulty)
        if name is not None and name.documented and name.id in self.options.accept:
            return self._record(
                check,
                "accepted",
                f"follows the accepted convention '{name.summary}'",
                convention=name.id,
                worst=worst,
                decisions=replace(decisions, wrong=0),
            )
        self._faulty[check.id] = faulty
        kind = self._kind(faulty, name)
        example, fault = self._example(faulty)
        faults = sum(len(one.judgment.faults) for one in faulty)
        return self._record(
            check,
            "failed",
            _message(fault, faults),
            kind=kind,
            convention=name.id if name is not None and name.documented else None,
            cause=_cause(check, name, kind),
            counterexample=example,
            **common,
        )

    def _named(self, check: Check, faulty: list[_Seen]) -> Alternative | None:
        """The alternative that gives every answer of the faulty questions."""
        if check.id == "mask.equality":
            return ALTERNATIVES["drops-at-equality"]
        if any(one.answer.failure is not None for one in faulty):
            return None
        accepted = [ALTERNATIVES[name] for name in self.options.accept]
        # what explained another check comes first: one difference has one name
        for alternative in (*accepted, *self._explanations, *(x for _, x in ALTERNATIVES.items())):
            if all(self._explained(alternative, one) for one in faulty) and self._fits(alternative):
                if alternative not in self._explanations:
                    self._explanations.append(alternative)
                return alternative
        return None

    def _fits(self, alternative: Alternative) -> bool:
        """Whether an alternative agrees with every right answer so far.

        A few wrong decisions could look like many a convention.
        """
        return all(
            self._explained(alternative, one) or not alternative.applies(one.question)
            for one in self._answered
            if one.question.batch.vocab_size < HEAVY and not one.judgment.faults
        )

    def _explained(self, alternative: Alternative, one: _Seen) -> bool:
        judge = Judge(one.question, Standard(self.unit), self.aggregation, masked=True)
        kept, known = judge.kept(one.answer)
        faulty = np.zeros(len(one.question.material.rows), dtype=bool)
        for fault in one.judgment.faults:
            if fault.row is not None:
                faulty[fault.row] = True
            elif fault.place is None and fault.quantity == "loss":
                faulty[:] = True
            else:  # padding: no convention lets it contribute
                return False
        given = Given(
            one.answer,
            kept,
            known,
            faulty,
            judge.verdicts.open,
            self.target.differentiates,
            self.aggregation,
            self.unit,
        )
        return explains(alternative, one.question, given)

    def _kind(self, faulty: list[_Seen], name: Alternative | None) -> VerdictKind:
        kinds = {fault.kind for one in faulty for fault in one.judgment.faults}
        for kind in ("time-out", "raised", "form", "modified"):
            if kind in kinds:
                return kind
        if any(one.answer.failure is not None for one in faulty):
            return "wrong"
        if name is not None:
            return "convention" if name.documented else "wrong"
        if "not-a-number" in kinds:
            return "not-a-number"
        return "precision" if self._coarse(faulty) else "wrong"

    def _coarse(self, faulty: list[_Seen]) -> bool:
        """Whether a coarser format than declared, and nothing else, shows in the answers.

        They lie within the budget of the coarsest format with a factor of 8 to spare; wrong
        decisions are close to the border, and wrong values are off by a rounding of themselves.
        """
        unit = max(FORMATS[name].unit_roundoff for name in POLICY_FORMATS)
        if unit <= self.unit:
            return False

        def small(fault: Fault) -> bool:
            if fault.quantity == "keep":
                return abs(fault.margin) <= 4 * unit
            if fault.quantity in ("answer", "inputs"):
                return False
            return fault.error <= 4 * unit * abs(float(fault.got))

        return all(
            all(small(fault) for fault in one.judgment.faults)
            and not self._judge(one.question, one.answer, unit / 8).faults
            for one in faulty
        )

    def _example(self, faulty: list[_Seen]) -> tuple[TargetCounterexample | None, Fault]:
        """A counterexample of the check: its clearest fault, which leaves most room to shrink."""
        clearest = [(one, max(one.judgment.faults, key=lambda f: f.ratio)) for one in faulty]
        one, fault = max(
            clearest, key=lambda x: (x[0].question.batch.vocab_size < HEAVY, x[1].ratio)
        )
        start = time.perf_counter()
        left = min(SHRINK_SECONDS, self.shrink_seconds - self._shrunk)
        question, smaller = one.question, False
        if left > 0 and fault.kind != "time-out" and not question.unanimous:
            free = frozenset(x for x in THRESHOLDS if self.plan.free(x))
            reduced = shrink(question, fault, self._same_fault(fault), left, free)
            question, fault, smaller = reduced.question, reduced.fault, reduced.smaller
        self._shrunk += time.perf_counter() - start
        return self._shown(question, fault, smaller), fault

    def _same_fault(self, fault: Fault) -> Callable[[Question], Fault | None]:
        def verdict(question: Question) -> Fault | None:
            seen = self._one(question)
            same = [
                f
                for f in seen.judgment.faults
                if (f.kind, f.quantity) == (fault.kind, fault.quantity)
            ]
            return max(same, key=lambda f: f.ratio, default=None)

        return verdict

    def _shown(self, question: Question, fault: Fault, smaller: bool) -> TargetCounterexample:
        given = arguments(question, self.target.parameters)
        dtypes = {}
        for name in given:
            kind = ARGUMENTS[name]
            long = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
            dtypes[name] = long[question.batch.dtype] if kind == "working" else kind
        inputs = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in given.items()
            if not isinstance(value, np.ndarray) or value.size <= SHOWN
        }
        return TargetCounterexample(
            quantity=fault.quantity,
            place=fault.place,
            expected=fault.expected,
            got=fault.got,
            exact=fault.exact,
            margin=fault.margin,
            error=fault.error,
            budget=fault.budget,
            inputs=inputs,
            dtypes=dtypes,
            presentation=question.presentation,
            shrunk=smaller,
        )

    # ---- the whole

    def report(self, progress: Progress | None = None) -> TargetReport:
        """Every selected check, and the effective precision."""
        checks = []
        for done, id in enumerate(self.ids, 1):
            checks.append(self.run(id))
            if progress is not None:
                progress(id, done, len(self.ids))
        if not any(c.status in ("passed", "failed", "accepted") for c in checks):
            reasons = "; ".join(f"{c.id}: {c.message}" for c in checks[:3])
            raise TargetError(f"nothing was checked: {reasons}")
        checks = self._renamed(checks)
        bits, note = self.bits
        failed = [c for c in checks if c.status == "failed"]
        named = {c.convention for c in failed}
        total = DecisionCounts()
        for c in checks:
            total = total + c.decisions
        return TargetReport(
            conforms=not failed,
            target=self.target.name,
            mask=self.options.mask,
            view=self.options.partition,
            tail=self.options.tail,
            support=self.options.support,
            precision=self.options.precision,
            options=_declared(self.options),
            outputs=self.outputs,
            parameters=self.target.parameters,
            effective_bits=bits,
            bits_note=note,
            decisions=total,
            checks=checks,
            convention=named.pop() if len(named) == 1 else None,
            seed=self.options.seed,
            level=self.options.level,
            seconds=time.perf_counter() - self.started,
            versions=versions(),
        )

    def _renamed(self, checks: list[CheckRecord]) -> list[CheckRecord]:
        """The checks with the fewest names: an alternative that explains most is named first."""
        open_ids = {c.id for c in checks if c.status == "failed" and c.cause is not None}
        open_ids &= set(self._faulty)
        if len(self._explanations) < 2:
            return checks
        names: dict[str, Alternative] = {}
        while open_ids:
            explained = {
                one.id: {
                    id for id in open_ids if all(self._explained(one, x) for x in self._faulty[id])
                }
                for one in self._explanations
            }
            best = max(self._explanations, key=lambda one: len(explained[one.id]))
            if not explained[best.id]:
                break
            names.update(dict.fromkeys(explained[best.id], best))
            open_ids -= explained[best.id]
        return [
            replace(
                c,
                kind="convention" if names[c.id].documented else "wrong",
                convention=names[c.id].id if names[c.id].documented else None,
                cause=_named_cause(names[c.id]),
            )
            if c.id in names
            else c
            for c in checks
        ]

    @cached_property
    def bits(self) -> tuple[Bits | None, str]:
        """Effective precision of the sign of C, from designed rows, or why there is none."""
        if not self.plan.predictive:
            return None, f"{self.options.mask} has no coefficient"
        if self._hung is not None or self._first_answer.failure is not None:
            return None, "the target gives no usable answer"
        if self.options.tail == "bracket":
            return None, "the bracket has two coefficients"
        if "coefficient" not in self.outputs and not (
            {"keep", "loss"} & set(self.outputs) and self.plan.delta_is_free
        ):
            return None, "the target returns no coefficient and its threshold is fixed"
        asked = designed_question(self.plan)
        answers = [self._one(question).answer for question in asked.questions]
        if any(answer.failure is not None for answer in answers):
            return None, "the target gives no usable answer to the designed rows"
        margins, wrong = signs(asked, answers, self._kept)
        return effective_bits(margins, wrong), ""

    def _kept(self, question: Question, answer: Answer) -> Any:
        judge = Judge(question, Standard(self.unit), self.aggregation, masked=True)
        return judge.kept(answer)

    def rerun(self, id: str) -> str:
        """The command line that runs one check alone."""
        words = ["pdverify", "check", self.target.name]
        for name, value in _declared(self.options).items():
            if name in ("select", "deselect"):
                continue
            flag = f"--{name.replace('_', '-')}"
            if name == "neg_inf":
                words.append("--no-neg-inf")
            elif isinstance(value, tuple):
                words += [flag, *value]
            else:
                words += [flag, str(value)]
        words += ["--seed", str(self.options.seed), "--select", id]
        return shlex.join(words)


def check_target(
    target: str | Callable[..., Any],
    options: Options,
    *,
    progress: Progress | None = None,
    shrink_seconds: float = SHRINK_TOTAL,
) -> TargetReport:
    """Judge a target; see `TargetSession`.

    `shrink_seconds` bounds the time spent on making counterexamples smaller.

    Raises:
        TargetError: it cannot be judged, or nothing was checked.
        InputError, UnknownName: an option.
    """
    return TargetSession(target, options, shrink_seconds).report(progress)


def applicable_checks(target: str | Callable[..., Any], options: Options) -> list[str]:
    """Ids of the checks that apply to a target; it is called on plain batches alone."""
    session = TargetSession(target, options)
    return [id for id in session.ids if CHECKS[id].applies(session.plan) is None]


def _declared(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults, by field name, and the mask."""
    declared: dict[str, Any] = {}
    for f in fields(options):
        value = getattr(options, f.name)
        if f.name == "mask" or (value != f.default and f.name != "seed"):
            declared[f.name] = value
    return declared


def _summary(decisions: DecisionCounts, worst: float | None) -> str:
    parts = []
    if decisions.total:
        parts.append(f"{decisions.determined} determined decisions right")
        if decisions.rounding:
            parts.append(f"{decisions.rounding} differ by rounding")
    if worst is not None:
        parts.append(f"worst error {worst:.3g} of its budget")
    return ", ".join(parts) or "as it should be"


def _message(fault: Fault, count: int) -> str:
    if fault.quantity in ("answer", "inputs"):
        return fault.got
    where = "" if fault.place is None else f" at {list(fault.place)}"
    more = f" ({count} faults)" if count > 1 else ""
    return f"{fault.quantity}{where}: expected {fault.expected}, got {fault.got}{more}"


def _cause(check: Check, name: Alternative | None, kind: VerdictKind) -> str:
    if name is not None:
        return _named_cause(name)
    if kind == "precision":
        return "arithmetic in a coarser format than declared: an upcast is missing"
    if kind == "raised":
        return f"an exception on a valid input of this kind: {check.bug}"
    return check.bug


def _named_cause(name: Alternative) -> str:
    return f"{name.summary} ({name.source})" if name.source else name.summary
