"""Judge every built-in backend x mask x view x tail on real and synthetic tokens.

One batch at a time: the oracle and the budgets answer once, every entry is compared with them.
Batches are independent, so they are spread over processes; the result does not depend on how.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.backends import BACKENDS, Backend, Bound
from pdverify.batch import Batch, Rows
from pdverify.cases import FAMILIES, replace_last
from pdverify.cases import build as build_family
from pdverify.conformance.bits import Share, effective_bits, wilson
from pdverify.conformance.effective import designed_batch
from pdverify.conformance.judging import ends as ends_of
from pdverify.conformance.records import (
    CertificateRecord,
    Counterexample,
    DecisionCounts,
    DirectionRecord,
    EntryRecord,
    InputRecord,
    Report,
)
from pdverify.conformance.truth import (
    Array,
    Progress,
    Truth,
    distance,
    excused,
    finite,
    over_budget,
)
from pdverify.conformance.versions import versions
from pdverify.definitions.intervals import coefficient_interval
from pdverify.definitions.losses import AGGREGATIONS, policy_loss, weights
from pdverify.definitions.masks import MASKS, TAILS
from pdverify.formats import FORMATS
from pdverify.oracle import Enclosure
from pdverify.rules import Partition, Rule, Tail

RATIO_CAP = 2.0
"""Low enough that sampled tokens meet it: r > 20 has probability under 1/20 per token."""

SIZES: dict[str, tuple[tuple[int, str], ...]] = {
    "quick": ((257, "fp32"),),
    "full": ((257, "fp32"), (1000, "bf16"), (65, "fp16"), (5003, "fp32"), (257, "bf16")),
}
"""Vocabulary and dtype of the synthetic batches, by level; real tokens come in bf16 anyway."""


class NothingSelected(ValueError):
    """No entry is left to judge."""


@dataclass(frozen=True)
class Entry:
    """One combination to judge."""

    backend: str
    device: str
    precision: str
    mask: str
    view: Partition
    tail: Tail | None

    @property
    def name(self) -> str:
        """`backend/mask/view[/tail]`."""
        parts = [self.backend, self.mask, self.view, self.tail]
        return "/".join(part for part in parts if part)


@dataclass
class _Tally:
    """What has been seen of one entry."""

    decisions: DecisionCounts = field(default_factory=DecisionCounts)
    divergence: float | None = None
    coefficient: float | None = None
    loss: float | None = None
    margins: list[Array] = field(default_factory=list)
    mistakes: list[NDArray[np.bool_]] = field(default_factory=list)
    counterexamples: list[Counterexample] = field(default_factory=list)
    faults: int = 0
    error: str | None = None

    def merge(self, other: _Tally) -> None:
        """Add what another batch has shown."""
        self.decisions = self.decisions + other.decisions
        for name in ("divergence", "coefficient", "loss"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if theirs is not None:
                setattr(self, name, theirs if mine is None else max(mine, theirs))
        self.margins += other.margins
        self.mistakes += other.mistakes
        self.counterexamples += other.counterexamples
        self.faults += other.faults
        self.error = self.error or other.error


@dataclass(frozen=True)
class Aim:
    """What a designed batch is graded for: the coefficient whose margins spread over octaves."""

    divergence: str
    view: Partition
    tail: Tail | None


@dataclass(frozen=True)
class _Job:
    """One batch to judge; `load` makes it where it is judged."""

    name: str
    kind: str
    load: Callable[[], Batch]
    entries: tuple[Entry, ...]
    delta: float | None
    aim: Aim | None = None


@dataclass(frozen=True)
class _Count:
    """A share before its interval: which table, source and row; successes, trials, undecided."""

    table: str
    row: str
    successes: int
    trials: int
    undecided: int = 0


@dataclass(frozen=True)
class _Result:
    input: InputRecord
    tallies: dict[Entry, _Tally]
    counts: list[_Count]


def list_entries(
    *,
    precision: str = "fp32",
    mask: str | None = None,
    view: str | None = None,
    tail: str | None = None,
    select: Sequence[str] = (),
    deselect: Sequence[str] = (),
) -> list[Entry]:
    """Every combination of the registries that the filters leave.

    A backend that cannot compute in `precision` takes its usual one.

    Raises:
        UnknownName: no such mask.
        NothingSelected: nothing is left.
    """
    entries = []
    for backend_name, backend in BACKENDS.items():
        reason = backend.unavailable()
        devices = ("cpu",) if reason else backend.devices()
        usual = precision if precision in backend.precisions else backend.precisions[0]
        for device in devices:
            for mask_name in MASKS if mask is None else (mask,):
                definition = MASKS[mask_name]
                for partition in definition.views():
                    tails = TAILS if definition.needs_tail(partition) else (None,)
                    entries += [
                        Entry(backend_name, device, usual, mask_name, partition, one)
                        for one in tails
                        if view in (None, partition) and tail in (None, one)
                    ]
    chosen = [
        entry
        for entry in entries
        if (not select or any(fnmatch(entry.name, glob) for glob in select))
        and not any(fnmatch(entry.name, glob) for glob in deselect)
    ]
    if not chosen:
        raise NothingSelected("the options leave no entry to judge; `pdverify list` shows them")
    return chosen


def check_builtins(
    real: dict[str, Batch],
    real_source: str,
    *,
    level: str = "quick",
    seed: int = 0,
    precision: str = "fp32",
    mask: str | None = None,
    view: str | None = None,
    tail: str | None = None,
    select: Sequence[str] = (),
    deselect: Sequence[str] = (),
    delta: float | None = None,
    families: Iterable[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Judge the built-in backends on `real` batches and on the synthetic families.

    Args:
        real: name -> batch of real tokens; `real_source` says where they come from.
        level: ``quick`` or ``full``, see `SIZES`.
        seed: of the synthetic families.
        precision: format the backends compute in and are held to, where they have it.
        mask, view, tail, select, deselect: restrict the entries; globs match `Entry.name`.
        delta: threshold of every rule; None: chosen per batch from the divergences it holds.
        families: input families by name; None: all of them.
        workers: processes; None: one per core, at most one per batch.
        progress: called as `progress(batch, done, total)`.

    Raises:
        UnknownName: an unknown mask or family.
        NothingSelected: the options leave nothing to judge.
    """
    started = time.perf_counter()
    entries = tuple(
        list_entries(
            precision=precision,
            mask=mask,
            view=view,
            tail=tail,
            select=select,
            deselect=deselect,
        )
    )
    runnable = tuple(e for e in entries if BACKENDS[e.backend].unavailable() is None)
    jobs = [
        _Job(name, "real", partial(_given, batch), runnable, delta) for name, batch in real.items()
    ]
    if families is None:
        jobs += _designed_jobs(runnable, level, seed, delta)
    for family in FAMILIES if families is None else families:
        for size, dtype in SIZES[level]:
            make = partial(build_family, family, seed=seed, vocab_size=size, dtype=dtype)
            jobs.append(_Job(f"{family}, V = {size}, {dtype}", "family", make, runnable, delta))
    if families is None:
        make = partial(_replaced, seed)
        jobs.append(_Job("sampled-outside, replace", "family", make, runnable, delta))
    results = _run(jobs, workers, progress)
    tallies = {entry: _Tally() for entry in entries}
    for result in results:
        for entry, tally in result.tallies.items():
            tallies[entry].merge(tally)
    records = [_record(entry, tallies[entry]) for entry in entries]
    directions, certificates = _tables(results)
    return Report(
        conforms=all(record.passed for record in records)
        and all(not record.wrong.successes for record in certificates),
        real_source=real_source,
        inputs=[result.input for result in results],
        entries=records,
        directions=directions,
        certificates=certificates,
        seed=seed,
        level=level,
        seconds=time.perf_counter() - started,
        versions=versions(),
    )


def _run(jobs: list[_Job], workers: int | None, progress: Progress | None) -> list[_Result]:
    count = min(len(jobs), workers or os.cpu_count() or 1)

    def report(name: str, done: int) -> None:
        if progress is not None:
            progress(name, done, len(jobs))

    if count == 1:
        results = []
        for done, job in enumerate(jobs, 1):
            results.append(_judge(job))
            report(job.name, done)
        return results
    # spawn: a forked process would inherit torch's and BLAS's threads
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_one_thread) as pool:
        futures = {pool.submit(_judge, job): i for i, job in enumerate(jobs)}
        ordered: list[_Result | None] = [None] * len(jobs)
        for done, future in enumerate(as_completed(futures), 1):
            index = futures[future]
            ordered[index] = future.result()
            report(jobs[index].name, done)
    return [result for result in ordered if result is not None]


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _given(batch: Batch) -> Batch:
    return batch


def _replaced(seed: int) -> Batch:
    """Lists in which a sampled token from outside has taken the last place."""
    return replace_last(build_family("sampled-outside", seed=seed))


def _designed_jobs(
    entries: Sequence[Entry], level: str, seed: int, delta: float | None
) -> list[_Job]:
    """Batches that measure effective precision, one per coefficient that an entry computes.

    At level quick, of the tail estimators only ``exact`` has one.
    """
    aims = []
    for entry in entries:
        mask = MASKS[entry.mask]
        if mask.direction == "predictive" and entry.tail != "bracket":
            assert mask.divergence is not None
            aim = Aim(mask.divergence, entry.view, entry.tail)
            if aim not in aims and (level == "full" or entry.tail in (None, "exact")):
                aims.append(aim)
    jobs = []
    for aim in aims:
        name = f"designed, {aim.divergence}, {aim.view}" + (f", {aim.tail}" if aim.tail else "")
        # an entry with another divergence learns nothing new from these rows
        mine = tuple(e for e in entries if _aims_at(e, aim))
        jobs.append(
            _Job(
                name,
                "designed",
                partial(designed_batch, aim.divergence, aim.view, aim.tail, seed),
                mine,
                delta,
                aim,
            )
        )
    return jobs


def _aims_at(entry: Entry, aim: Aim) -> bool:
    mask = MASKS[entry.mask]
    return (
        mask.direction in ("predictive", "second-order")
        and (mask.divergence, entry.view) == (aim.divergence, aim.view)
        and aim.tail in ends_of(entry.tail)
    )


def _judge(job: _Job) -> _Result:
    batch = job.load()
    rows = batch.rows()
    truth = Truth(rows)
    tallies: dict[Entry, _Tally] = {}
    bound: dict[tuple[str, str, str], Bound] = {}
    losses: dict[tuple[str, str, str], _Tally] = {}
    for entry in job.entries:
        if entry.view == "full" and rows.behavior_logits is None:
            continue
        if entry.view == "topk" and rows.topk_ids is None:
            continue
        key = (entry.backend, entry.precision, entry.device)
        try:
            if key not in bound:
                bound[key] = BACKENDS[entry.backend].bind(batch, entry.precision, entry.device)
            tallies[entry] = _judge_entry(job, entry, truth, bound[key])
            if job.kind == "family" or MASKS[entry.mask].direction == "none":
                if key not in losses:
                    losses[key] = _loss(job, batch, entry, truth, bound[key])
                tallies[entry].merge(losses[key])
        except Exception as error:  # an entry that raises is judged, not propagated
            tallies[entry] = _Tally(faults=1, error=f"raised on {job.name}: {error!r}")
    given = InputRecord(job.name, job.kind, len(rows), batch.vocab_size, batch.dtype)
    return _Result(given, tallies, _counts(truth) if job.kind == "real" else [])


def _judge_entry(job: _Job, entry: Entry, truth: Truth, bound: Bound) -> _Tally:
    tally = _Tally()
    rows = truth.rows
    unit = FORMATS[entry.precision].unit_roundoff
    form = BACKENDS[entry.backend].form
    index = tuple(rows.index.T)
    mask = MASKS[entry.mask]
    ends = ends_of(entry.tail)
    if mask.divergence is not None and mask.direction != "none":
        name = mask.divergence
        got = bound.divergence(name, entry.view)[index]
        right = truth.divergence(name, entry.view)
        # below 0 only where stored masses sum past 1; 0 is as right there
        right = Enclosure(right.low, np.maximum(right.high, 0.0))
        budget = truth.budget("divergence", name, entry.view, None, unit, form)
        tally.divergence = _compare(tally, job, truth, "divergence", got, right, budget)
        if mask.direction in ("predictive", "second-order"):
            for end in ends:
                got = bound.coefficient(name, entry.view, end)[index]
                right = truth.coefficient(name, entry.view, end)
                budget = truth.budget("coefficient", name, entry.view, end, unit, form)
                worst = _compare(tally, job, truth, "coefficient", got, right, budget)
                tally.coefficient = max(worst, tally.coefficient or 0.0)
                if job.aim == Aim(name, entry.view, end):
                    _signs(tally, got, right, budget / unit)
    for rule in _rules(job, entry, truth):
        _decisions(tally, job, rule, truth, bound, unit, form, ends)
    return tally


def _rules(job: _Job, entry: Entry, truth: Truth) -> list[Rule]:
    """The mask at several thresholds: the paper's, and two budgets either side of a token's D.

    Besides, uneven thresholds for the two signs of A.  Real batches take their median D alone.
    """
    mask = MASKS[entry.mask]

    def rule(delta: float, **options: Any) -> Rule:
        view = "topk" if entry.view == "binary" else entry.view
        return mask.rule(view=view, tail=entry.tail, delta=delta, **options)

    if mask.direction == "none":
        return [rule(0.15)]
    if mask.divergence is None:
        return [rule(0.15), rule(0.15, clip_low=0.1, clip_high=0.5)]
    if job.delta is not None:
        return [rule(job.delta)]
    right = truth.divergence(mask.divergence, entry.view)
    known = np.flatnonzero(finite(right) & (right.low > 0))
    if not len(known):
        return [rule(0.15)]
    order = known[np.argsort(right.mid[known])]
    middle = order[len(order) // 2]
    median = float(right.mid[middle])
    if job.kind == "real":
        return [rule(median)]
    unit = FORMATS["fp32"].unit_roundoff
    budget = truth.budget("divergence", mask.divergence, entry.view, None, unit, "complement")
    step = 2 * (float(budget[middle]) + unit * median)
    near = [median + step, max(median - step, 0.0)] if np.isfinite(step) else [median]
    # the two signs of A, and the step, must not be taken for each other or for 1
    low, high = (float(right.mid[order[len(order) * i // 4]]) for i in (1, 3))
    uneven = [
        rule(median, delta_low=a, delta_high=b, eta=0.5) for a, b in ((low, high), (high, low))
    ]
    return [rule(delta) for delta in (0.15, *near)] + uneven


def _compare(
    tally: _Tally,
    job: _Job,
    truth: Truth,
    quantity: str,
    got: Array,
    right: Enclosure,
    budget: Array,
) -> float:
    """Worst error over budget; a value outside its budget is a fault."""
    known = finite(right)
    error = np.where(known, distance(got, right), 0.0)
    ratio = over_budget(error, budget)
    bad = np.flatnonzero(ratio > 1)
    tally.faults += len(bad)
    if len(bad):
        t = int(bad[np.argmax(ratio[bad])])
        tally.counterexamples.append(
            _counterexample(
                job,
                truth.rows,
                t,
                quantity,
                float(right.mid[t]),
                float(got[t]),
                error=float(error[t]),
                budget=float(budget[t]),
            )
        )
    return float(ratio.max(initial=0.0))


def _signs(tally: _Tally, got: Array, right: Enclosure, per_unit: Array) -> None:
    signed = (right.low > 0) | (right.high < 0)
    usable = signed & np.isfinite(per_unit) & (per_unit > 0)
    mid = right.mid[usable]
    tally.margins.append(np.abs(mid) / per_unit[usable])
    tally.mistakes.append(np.sign(got[usable]) != np.sign(mid))


def _decisions(
    tally: _Tally,
    job: _Job,
    rule: Rule,
    truth: Truth,
    bound: Bound,
    unit: float,
    form: Any,
    ends: tuple[Tail | None, ...],
) -> None:
    rows = truth.rows
    right = truth.decide(rule)
    kept = bound.keep(rule)
    got = kept[tuple(rows.index.T)]
    padding = np.ones(kept.shape, dtype=bool)
    padding[tuple(rows.index.T)] = False
    if kept[padding].any():
        tally.faults += 1
        tally.error = f"keeps padding on {job.name}"
    other = right.determined & (got != right.keep)
    wrong = other
    if other.any():
        allowances = [truth.allowance(rule, end, unit, form) for end in ends]
        directions = [
            right.direction
            if rule.direction in ("ratio", "clip")
            else truth.coefficient(str(rule.divergence), rule.partition, end)
            for end in ends
        ]
        wrong = other & ~excused(rule, right, allowances, directions, rows.advantages)
    tally.decisions = tally.decisions + DecisionCounts(
        total=len(rows),
        determined=int(right.determined.sum()),
        wrong=int(wrong.sum()),
        rounding=int((other & ~wrong).sum()),
    )
    tally.faults += int(wrong.sum())
    if wrong.any():
        t = int(np.flatnonzero(wrong)[np.argmax(np.abs(right.margin[wrong]))])
        context = {
            "delta": rule.delta_high if rows.advantages[t] > 0 else rule.delta_low,
            "divergence": [float(right.divergence.low[t]), float(right.divergence.high[t])],
            "direction": [float(right.direction.low[t]), float(right.direction.high[t])],
        }
        tally.counterexamples.append(
            _counterexample(
                job,
                rows,
                t,
                "keep",
                bool(right.keep[t]),
                bool(got[t]),
                margin=float(right.margin[t]),
                context=context,
            )
        )


def _loss(job: _Job, batch: Batch, entry: Entry, truth: Truth, bound: Bound) -> _Tally:
    """The loss and its gradient, with a third of the tokens dropped; one for every mask.

    `keep` is true on padding too: it is the response mask that must silence it.
    """
    tally = _Tally()
    rows = truth.rows
    unit = FORMATS[entry.precision].unit_roundoff
    index = tuple(rows.index.T)
    keep = ~batch.response_mask | (batch.tokens % 3 != 0)
    want, slope = policy_loss(batch, keep, ratio_cap=RATIO_CAP)
    loss, gradient = bound.loss(keep, RATIO_CAP, "none")
    gap = truth.budget("log_ratio", None, "binary", None, unit, "plain")
    ratio = np.expm1(gap) + 8 * unit
    cells = truth.cells("binary")
    r = np.minimum(np.exp(np.concatenate([c.log_gap for c in cells])), RATIO_CAP)
    scale = np.abs(rows.advantages) * r * keep[index]
    # A r enters value and gradient; log pi_k is off by less than the log-ratio is
    value_budget = np.abs(want[index]) * ratio * 2 + scale * gap * (1 + ratio)
    stored = FORMATS[batch.dtype].unit_roundoff
    slope_budget = (np.abs(slope[index]).max(-1) + scale) * (2 * ratio + stored)
    tiny = FORMATS[batch.dtype].min_normal
    value_error = np.abs(loss[index] - want[index])
    slope_error = np.abs(gradient[index] - slope[index]).max(-1)
    silent = ~(keep & batch.response_mask)
    leak = float(np.abs(loss[silent]).max(initial=0.0))
    # np.maximum, since max(0.0, nan) is 0.0
    leak = float(np.maximum(leak, np.abs(gradient[silent]).max(initial=0.0)))
    worst = 0.0 if leak == 0 else float("inf")
    for quantity, error, budget, expected, got in (
        ("loss", value_error, value_budget, want[index], loss[index]),
        (
            "gradient",
            slope_error,
            slope_budget + tiny,
            np.abs(slope[index]).max(-1),
            np.abs(gradient[index]).max(-1),
        ),
    ):
        share = over_budget(np.where(np.isnan(error), np.inf, error), budget)
        share = np.where(np.isneginf(want[index]) | np.isposinf(want[index]), 0.0, share)
        bad = np.flatnonzero(share > 1)
        tally.faults += len(bad)
        if len(bad):
            t = int(bad[np.argmax(share[bad])])
            tally.counterexamples.append(
                _counterexample(
                    job,
                    rows,
                    t,
                    quantity,
                    float(expected[t]),
                    float(got[t]),
                    error=float(error[t]),
                    budget=float(budget[t]),
                )
            )
        worst = max(worst, float(share.max(initial=0.0)))
    for aggregation in AGGREGATIONS:
        weight = weights(batch.response_mask, aggregation)[index]
        total, total_gradient = bound.loss(keep, RATIO_CAP, aggregation)
        expected = weight * want[index]
        allowed = (weight * value_budget + len(rows) * unit * np.abs(expected)).sum()
        moved = np.abs(total_gradient[index] - weight[:, None] * gradient[index]).max(-1)
        # two roundings of each element to the stored format, and the weight's own
        bound_moved = 3 * (stored + 4 * unit) * weight * np.abs(gradient[index]).max(-1) + tiny
        # `not (x <= y)`: a NaN that only the aggregation makes is wrong
        off = np.isfinite(expected.sum()) and not (
            abs(float(np.sum(total)) - expected.sum()) <= allowed
        )
        if off or not (moved <= bound_moved).all():
            tally.faults += 1
            tally.error = f"the loss aggregated by {aggregation} is wrong on {job.name}"
    if leak != 0:
        tally.faults += 1
        tally.error = f"a dropped or padded place contributes to the loss on {job.name}"
    tally.loss = worst
    return tally


def _counterexample(
    job: _Job,
    rows: Rows,
    t: int,
    quantity: str,
    expected: float | bool,
    got: float | bool,
    *,
    error: float = 0.0,
    budget: float = 0.0,
    margin: float = float("nan"),
    context: dict[str, Any] | None = None,
) -> Counterexample:
    b, position = (int(i) for i in rows.index[t])
    return Counterexample(
        source=f"{job.kind}: {job.name}",
        place=(b, position),
        quantity=quantity,
        expected=expected,
        got=got,
        error=error,
        budget=budget,
        margin=margin,
        context={
            "token": int(rows.tokens[t]),
            "advantage": float(rows.advantages[t]),
            **(context or {}),
        },
    )


def _record(entry: Entry, tally: _Tally) -> EntryRecord:
    backend: Backend = BACKENDS[entry.backend]
    reason = backend.unavailable()
    judged = tally.decisions.total > 0
    passed = reason is not None or (judged and tally.faults == 0)
    order = {"keep": 0, "coefficient": 1, "divergence": 2}
    worst = min(tally.counterexamples, key=lambda c: order.get(c.quantity, 3), default=None)
    if reason is not None:
        message = f"unavailable because {reason}"
    elif tally.error is not None:
        message = tally.error
    elif not judged:
        message = "no input carries what this entry needs"
    elif passed:
        message = "conforms"
    else:
        message = (
            f"{tally.decisions.wrong} wrong decisions, "
            f"{tally.faults - tally.decisions.wrong} values outside their budget"
        )
    bits = None
    if tally.margins:
        bits = effective_bits(np.concatenate(tally.margins), np.concatenate(tally.mistakes))
    return EntryRecord(
        backend=entry.backend,
        device=entry.device,
        precision=entry.precision,
        mask=entry.mask,
        view=entry.view,
        tail=entry.tail,
        support="append",
        decisions=tally.decisions,
        divergence_error=tally.divergence,
        coefficient_error=tally.coefficient,
        loss_error=tally.loss,
        bits=bits,
        passed=passed,
        message=message,
        counterexample=worst,
        unavailable=reason,
    )


def _sign(truth: Enclosure) -> NDArray[np.int8]:
    """1, -1, or 0 where the enclosure holds zero or nothing is known."""
    positive, negative = truth.low > 0, truth.high < 0
    return positive.astype(np.int8) - negative.astype(np.int8)


def _counts(truth: Truth) -> list[_Count]:
    """Direction disagreements and certificates of one real batch, forward KL."""
    rows = truth.rows
    if rows.topk_ids is None:
        return []
    counts = []
    ends = [_sign(truth.coefficient("kl", "topk", end)) for end in ("aggregated", "uniform")]
    exact = _sign(truth.coefficient("kl", "topk", "exact"))
    known = exact != 0
    certified = (ends[0] == ends[1]) & (ends[0] != 0)
    counts.append(_Count("certified", "bracket", int(certified.sum()), len(rows)))
    counts.append(
        _Count(
            "wrong",
            "bracket",
            int((certified & known & (ends[0] != exact)).sum()),
            int(certified.sum()),
        )
    )
    if rows.behavior_logits is None:
        return counts
    full = _sign(truth.coefficient("kl", "full", None))
    estimators = {
        "ratio": _sign(truth.ratio_gap()),
        "aggregated": ends[0],
        "uniform": ends[1],
        "exact": exact,
    }
    for name, sign in estimators.items():
        both = (sign != 0) & (full != 0)
        counts.append(
            _Count(
                "disagree",
                name,
                int((both & (sign != full)).sum()),
                int(both.sum()),
                int((~both).sum()),
            )
        )
    low, high = _interval(truth)
    certified = (low > 0) | (high < 0)
    wrong = certified & (full != 0) & (np.where(low > 0, 1, -1) != full)
    counts.append(_Count("certified", "interval", int(certified.sum()), len(rows)))
    counts.append(_Count("wrong", "interval", int(wrong.sum()), int(certified.sum())))
    return counts


def _interval(truth: Truth) -> tuple[Array, Array]:
    """The rearrangement interval, widened by its float64 rounding and by the stored rounding."""
    unit = FORMATS["fp64"].unit_roundoff
    slack = truth.budget("coefficient", "kl", "topk", "exact", unit, "plain")
    lows, highs, noises = [], [], []
    for rows, cells in zip(truth.chunks, truth.cells("topk"), strict=True):
        low, high = coefficient_interval(rows, cells)
        lows.append(low)
        highs.append(high)
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.where(cells.mu > 0, np.abs(np.log(cells.mu)), 0.0)
        moved = cells.mu * y * FORMATS[rows.logprob_dtype].unit_roundoff
        # |dC/dmu_i| <= 1 for k, pi_i + max_tail pi <= 1 otherwise
        noises.append(moved.sum(-1))
    noise = np.concatenate(noises) + slack
    return np.concatenate(lows) - noise, np.concatenate(highs) + noise


def _tables(
    results: list[_Result],
) -> tuple[list[DirectionRecord], list[CertificateRecord]]:
    directions, certificates = [], []
    sources = [(r.input.name, [r]) for r in results if r.counts]
    sources.append(("all real tokens", [r for r in results if r.counts]))

    def total(group: list[_Result], table: str, row: str) -> tuple[Share, int] | None:
        found = [c for r in group for c in r.counts if (c.table, c.row) == (table, row)]
        if not found:
            return None
        share = wilson(sum(c.successes for c in found), sum(c.trials for c in found))
        return share, sum(c.undecided for c in found)

    for source, group in sources:
        for estimator in ("ratio", "aggregated", "uniform", "exact"):
            found = total(group, "disagree", estimator)
            if found is not None:
                directions.append(DirectionRecord(source, estimator, *found))
        for certificate in ("bracket", "interval"):
            given, wrong = (total(group, table, certificate) for table in ("certified", "wrong"))
            if given is not None and wrong is not None:
                certificates.append(CertificateRecord(source, certificate, given[0], wrong[0]))
    return directions, certificates


__all__ = ["Entry", "NothingSelected", "check_builtins", "list_entries"]
