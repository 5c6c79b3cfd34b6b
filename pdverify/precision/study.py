"""The table of a precision study: every format at every stage, on every input.

A *cell* is one input x format x stage x divergence x view (with its tail estimator).  Each token
of a cell is asked twice: at the threshold `delta`, the median of the exact D of the input's
tokens, so that half of them are outside the trust region; and at a threshold of its own, drawn
within twice the certificate of the computed D, where a wrong certificate would show.  The second
answers count as decisions, and as wrong ones where they are, but not in the rates of flips.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from pdverify.batch import Batch, InputError, Rows
from pdverify.cases import FAMILIES, build
from pdverify.cases.recordings import default_recording, load_recording
from pdverify.conformance.bits import CONFIDENCE, wilson
from pdverify.conformance.truth import Progress
from pdverify.conformance.versions import versions
from pdverify.definitions.cells import build as cells_of
from pdverify.definitions.cells import tail_mean
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.formats import storage
from pdverify.oracle import Enclosure, Judge
from pdverify.precision.certify import Estimate, combine, decision, sign
from pdverify.precision.evaluate import Evaluation
from pdverify.precision.noise import reach, selection_reach
from pdverify.precision.records import Rate, Report, Row
from pdverify.precision.stages import (
    STAGES,
    Part,
    Prepared,
    Setting,
    Source,
    exact_rows,
    prepare,
    source_of,
    together,
)
from pdverify.rules import Tail

Float64: TypeAlias = NDArray[np.float64]
View: TypeAlias = tuple[Part, Tail | None]

VIEWS: tuple[View, ...] = (
    ("full", None),
    ("topk", "exact"),
    ("topk", "uniform"),
    ("topk", "aggregated"),
)

QUICK_DIVERGENCES = ("kl",)
ALL_DIVERGENCES = ("kl", "reverse-kl", "tv")

FORM = "complement"
"""How C is computed: the stable form, as this project's backends do."""

SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "quick": ((1_000, 48),),
    "full": ((256, 2_048), (1_000, 512), (32_768, 64), (151_936, 12)),
}
"""Vocabulary and tokens of every synthetic input, by level."""

FAMILY_NAMES = {"quick": ("peaked",), "full": ("peaked", "flat", "zipf")}

REAL_TOKENS = {"quick": 12, "full": 256}

POINTS = 400
"""Tokens of a cell that plots show."""

CELL_MEMORY = 2**22
"""Numbers of a policy that are worked on at a time."""


@dataclass(frozen=True)
class Options:
    """What to study; empty: what the level says.

    Attributes:
        inputs: ``real`` (the recording that ships), families of the registry, recordings by path.
        formats, stages, divergences: by name; stages may be joined by ``+``.
        level: ``quick`` or ``full``.
        seed: of inputs and thresholds.
        command: what the user typed, for reports.
    """

    inputs: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    divergences: tuple[str, ...] = ()
    level: str = "quick"
    seed: int = 0
    command: str = ""


@dataclass(frozen=True)
class Task:
    """A setting to study on a source: one format at one stage."""

    source: Source
    number_format: str
    stage: str

    @property
    def setting(self) -> Setting:
        """What the stage makes of exact policies."""
        return together(self.stage, self.number_format)


@dataclass
class Truth:
    """Exact D and C of a source, enclosed once for each divergence and view."""

    rows: Rows
    _found: dict[tuple[str, View], tuple[Enclosure, Enclosure]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.rows)

    def __call__(self, divergence: str, view: View) -> tuple[Enclosure, Enclosure]:
        """Enclosures of D and C."""
        with self._lock:
            key = divergence, view
            if key not in self._found:
                part, tail = view
                self._found[key] = (
                    self.judge.divergence(divergence, part),
                    self.judge.coefficient(divergence, part, tail),
                )
            return self._found[key]


def run(options: Options, progress: Progress) -> Report:
    """The study.

    Raises:
        InputError: an input that cannot be read or has one policy only.
        UnknownName: a format, stage, divergence or family that is in no registry.
    """
    started = time.perf_counter()
    _check(options)
    rows: list[Row] = []
    decisions = 0
    for source in sources(options):
        found = study(source, options, progress)
        rows += [row for row, _ in found]
        decisions += sum(count for _, count in found)
    return Report(
        rows=tuple(rows),
        forms=(),
        decisions=decisions,
        wrong=sum(row.wrong for row in rows),
        seed=options.seed,
        level=options.level,
        command=options.command,
        versions=versions(),
        device="cpu",
        seconds=time.perf_counter() - started,
    )


def _check(options: Options) -> None:
    for name in options.formats:
        storage(name)
    for names in options.stages:
        for name in names.split("+"):
            _ = STAGES[name]
    for name in options.divergences:
        _ = DIVERGENCES[name]


def sources(options: Options) -> Iterator[Source]:
    """The inputs of a study, one after the other."""
    names = options.inputs or ("real", *FAMILY_NAMES[options.level])
    for name in names:
        if name == "real" or Path(name).suffix == ".safetensors":
            path = default_recording() if name == "real" else Path(name)
            yield from _recorded(load_recording(path), name, REAL_TOKENS[options.level])
            continue
        _ = FAMILIES[name]
        for size, tokens in SIZES[options.level]:
            batch = build(
                name,
                options.seed,
                sequences=max(1, tokens // 16),
                length=min(tokens, 16),
                vocab_size=size,
                top_k=20,
                dtype="fp32",
            )
            yield source_of(name, batch)


def _recorded(batches: dict[str, Batch], name: str, tokens: int) -> Iterator[Source]:
    """The batches of a recording that have both policies, `tokens` in all."""
    full = {key: batch for key, batch in batches.items() if batch.behavior_logits is not None}
    if not full:
        raise InputError("--input", None, name, "no batch has behavior logits")
    share = max(1, tokens // len(full))
    for key, batch in full.items():
        source = source_of(f"{name} {key}", batch)
        yield source.take(slice(0, share))


def tasks(source: Source, options: Options) -> list[Task]:
    """Every stage and format that fit a source."""
    found = []
    for names in options.stages or tuple(STAGES):
        parts = [STAGES[name] for name in names.split("+")]
        formats = [f for f in parts[0].formats if all(f in stage.formats for stage in parts)]
        if "rollout" in names.split("+"):
            formats = [f for f in formats if f in source.rollouts]
        found += [
            Task(source, name, names)
            for name in formats
            if not options.formats or name in options.formats
        ]
    return found


def study(source: Source, options: Options, progress: Progress) -> list[tuple[Row, int]]:
    """Rows of one source, each with the number of decisions that were judged."""
    step = max(1, CELL_MEMORY // source.vocab_size)
    blocks = [source.take(slice(i, i + step)) for i in range(0, len(source), step)]
    divergences = options.divergences or (
        QUICK_DIVERGENCES if options.level == "quick" else ALL_DIVERGENCES
    )
    todo = tasks(source, options)
    truths = {
        t: [Truth(exact_rows(block, Setting(temperature=t))) for block in blocks]
        for t in {task.setting.temperature for task in todo}
    }
    done = 0

    def work(task: Task) -> list[tuple[Row, int]]:
        truth = truths[task.setting.temperature]
        prepared = [prepare(block, task.setting) for block in blocks]
        evaluations = [Evaluation(x.rows, task.setting.arithmetic) for x in prepared]
        found = [
            _cell(task, prepared, evaluations, truth, divergence, view, options.seed)
            for divergence in divergences
            for view in VIEWS
            if view[0] in _partitions(task.stage)
        ]
        nonlocal done
        done += 1
        progress(f"{source.name}, V = {source.vocab_size:,}", done, len(todo))
        return found

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [row for rows in pool.map(work, todo) for row in rows]


def _partitions(names: str) -> set[Part]:
    return {part for name in names.split("+") for part in STAGES[name].partitions}


def _joined(parts: Sequence[Enclosure]) -> Enclosure:
    return Enclosure(
        np.concatenate([x.low for x in parts]), np.concatenate([x.high for x in parts])
    )


def _cell(
    task: Task,
    prepared: Sequence[Prepared],
    evaluations: Sequence[Evaluation],
    truths: Sequence[Truth],
    divergence: str,
    view: View,
    seed: int,
) -> tuple[Row, int]:
    source = task.source
    part, tail = view
    found = [
        estimates(one, evaluation, divergence, view)
        for one, evaluation in zip(prepared, evaluations, strict=True)
    ]
    d, c = (_concatenated([pair[i] for pair in found]) for i in (0, 1))
    exact = [truth(divergence, view) for truth in truths]
    true_d, true_c = (_joined([pair[i] for pair in exact]) for i in (0, 1))
    whole = _joined([truth(divergence, ("full", None))[1] for truth in truths])
    delta = np.full(len(source), _median(true_d.mid))
    rng = np.random.default_rng([seed, len(source), source.vocab_size])
    with np.errstate(invalid="ignore"):
        own = d.value + rng.uniform(-2, 2, len(source)) * d.bound
    own = np.where(np.isfinite(own), np.maximum(own, 0.0), delta)
    of_sign = sign(c, true_c)
    usual, close = (decision(d, c, true_d, true_c, source.advantages, x) for x in (delta, own))
    beyond = d.beyond(true_d) | c.beyond(true_c)
    wrong = of_sign.wrong | usual.wrong | close.wrong | beyond
    error, scale = c.error(true_c), _joined_scale(truths, divergence, view)
    bits, low, high, at_least = bits_of(error, (true_c.high - true_c.low) / 2, scale)
    known = (true_c.high - true_c.low) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error > known, c.bound / error, np.nan)
        share = c.noise / (c.noise + c.rounding)
        margin = np.abs(true_c.mid) / scale
    shown = of_sign.judged & np.isfinite(margin) & np.isfinite(error) & np.isfinite(c.bound)
    picked = np.flatnonzero(shown)[:: max(1, int(shown.sum()) // POINTS)][:POINTS]
    usable = ratio[np.isfinite(ratio)]
    row = Row(
        input=source.name,
        format=task.number_format,
        stage=task.stage,
        divergence=divergence,
        partition=part,
        tail=tail,
        form=FORM,
        vocab_size=source.vocab_size,
        top_k=source.top_k,
        tokens=len(source),
        bits=bits,
        bits_low=low,
        bits_high=high,
        at_least=at_least,
        sign_flips=_rate(of_sign.flipped, of_sign.judged),
        flips=_rate(usual.flipped, usual.judged),
        undecidable=_rate(usual.judged & ~usual.determined, usual.judged),
        sign_undecidable=_rate(of_sign.judged & ~of_sign.determined, of_sign.judged),
        wrong=int(wrong.sum()),
        disagreement=_disagreement(c, whole) if part == "topk" else None,
        tightness=_quantiles(usable),
        noise_share=float(np.nanmedian(share)) if np.isfinite(share).any() else None,
        margins=tuple(margin[picked].tolist()),
        errors=tuple(error[picked].tolist()),
        bounds=tuple(c.bound[picked].tolist()),
        flipped=tuple(of_sign.flipped[picked].tolist()),
    )
    return row, int(usual.judged.sum() + close.judged.sum())


def estimates(
    one: Prepared, evaluation: Evaluation, divergence: str, view: View
) -> tuple[Estimate, Estimate]:
    """D and C as the setting computes them, with their certificates."""
    part, tail = view
    d = evaluation.divergence(divergence, part)
    c = evaluation.coefficient(divergence, part, tail, FORM)
    noise = reach(one.rows, one.radii, divergence=divergence, partition=part, tail=tail)
    if one.band is not None and part == "topk":
        chosen = selection_reach(
            one.rows, one.band, divergence=divergence, partition=part, tail=tail
        )
        noise = _both(noise[0], chosen[0]), _both(noise[1], chosen[1])
    return Estimate(d.value, noise[0], d.bound), Estimate(c.value, noise[1], c.bound)


def _both(moved: Float64, chosen: Float64) -> Float64:
    """Nothing is said of a list of moved numbers that was itself chosen among them."""
    return np.where((moved > 0) & (chosen > 0), np.inf, combine(moved, chosen))


def _concatenated(parts: Sequence[Estimate]) -> Estimate:
    return Estimate(*(np.concatenate([getattr(x, name) for x in parts]) for name in vars(parts[0])))


def _joined_scale(truths: Sequence[Truth], divergence: str, view: View) -> Float64:
    return np.concatenate([scale_of(truth.rows, divergence, view) for truth in truths])


def scale_of(rows: Rows, divergence: str, view: View) -> Float64:
    """Sum of the magnitudes of the terms of C in its complement form, `[T]`."""
    part, tail = view
    cells = cells_of(rows, part)
    moment: Callable[..., Float64] = DIVERGENCES[divergence].moment
    ids = np.arange(rows.vocab_size)[None] if cells.ids is None else cells.ids
    others = ids != rows.tokens[:, None]
    pi = np.where(others, cells.pi, 0.0)
    with np.errstate(all="ignore"):
        h = np.where(others, moment(cells.mu, cells.pi), 0.0)
        h_k, h_tail = moment(cells.mu_k, cells.pi_k), moment(cells.mu_tail, cells.pi_tail)
    w = tail_mean(cells, tail) if part == "topk" else np.zeros(len(rows))
    eps = pi.sum(-1) + cells.pi_tail
    q = (pi * pi).sum(-1) + cells.pi_tail * w
    base = cells.pi_k * eps - q
    terms = np.abs(h * (pi + base[:, None])).sum(-1) + np.abs(h_k) * (eps * eps + q)
    if part == "topk":
        terms = terms + np.abs(h_tail * (w + base))
    return np.asarray(terms)


def bits_of(
    error: Float64, known: Float64, scale: Float64
) -> tuple[float | None, float | None, float | None, bool]:
    """Median over tokens of `-log2(error / scale)`, its 95 % interval, whether it is a lower limit.

    The interval is that of order statistics: it holds for any distribution of errors.  An error
    below what is known of the truth counts as that; the result is then a lower limit.
    """
    usable = np.isfinite(error) & np.isfinite(scale) & (scale > 0)
    if not usable.any():
        return None, None, None, False
    seen = np.maximum(error[usable], np.maximum(known[usable], scale[usable] * 2.0**-60))
    bits = np.sort(-np.log2(seen / scale[usable]))
    count = len(bits)
    first = int(binom.ppf((1 - CONFIDENCE) / 2, count, 0.5))
    last = min(count - 1, count - 1 - first)
    middle = float(np.median(bits))
    limited = float(np.mean(error[usable] <= known[usable])) >= 0.5
    return middle, float(bits[max(first - 1, 0)]), float(bits[min(last + 1, count - 1)]), limited


def _median(x: Float64) -> float:
    finite = x[np.isfinite(x)]
    return float(np.median(finite)) if finite.size else 0.0


def _quantiles(ratio: Float64) -> tuple[float, float] | None:
    if not ratio.size:
        return None
    middle, high = np.quantile(ratio, (0.5, 0.95))
    return float(middle), float(high)


def _rate(hit: NDArray[np.bool_], of: NDArray[np.bool_]) -> Rate:
    share = wilson(int(hit.sum()), int(of.sum()))
    return Rate(share.successes, share.trials, share.low, share.high)


def _disagreement(c: Estimate, whole: Enclosure) -> Rate:
    """How often the sign of a top-K estimate is not that of the full divergence's C."""
    right = np.where(whole.low > 0, 1.0, np.where(whole.high < 0, -1.0, 0.0))
    return _rate((right != 0) & (np.sign(c.value) != right), right != 0)


def total(rows: Sequence[Row]) -> Rate:
    """Decision flips of rows together."""
    count, of = sum(x.flips.count for x in rows), sum(x.flips.total for x in rows)
    share = wilson(count, of)
    return Rate(count, of, share.low, share.high)


def correct_bits(value: Float64, truth: Enclosure) -> Float64:
    """Correct bits of each C relative to itself, `[T]`, between 0 and 53."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -np.log2(np.abs(value - truth.mid) / np.abs(truth.mid))
    return np.clip(np.where(np.isnan(bits), 0.0, bits), 0.0, 53.0)
