"""The table of a precision study: every format at every stage, on every input.

A *cell* is one input x format x stage x divergence x view (with its tail estimator).  Each token
of a cell is asked twice: at the threshold `delta`, the median of the exact D of the input's
tokens, so that half of them are outside the trust region; and at a threshold of its own, drawn
within twice the certificate of the computed D, where a wrong certificate would show.  The second
answers count as decisions, and as wrong ones where they are, but not in the rates of flips.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, InputError, Rows
from pdverify.cases import FAMILIES, build
from pdverify.cases.recordings import default_recording, load_recording
from pdverify.conformance.truth import Progress
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.formats import storage
from pdverify.oracle import Enclosure, Judge
from pdverify.precision.certify import Estimate, combine, decision, sign
from pdverify.precision.evaluate import Evaluation
from pdverify.precision.noise import reach, selection_reach
from pdverify.precision.records import Options, Rate, Row
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
from pdverify.precision.statistics import binned, bits_of, rate, scale_of
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

SIZES: dict[str, dict[str, tuple[tuple[int, int], ...]]] = {
    "quick": {"peaked": ((1_000, 48),), "others": ((1_000, 48),)},
    "full": {
        "peaked": ((256, 22_528), (1_000, 512), (32_768, 160), (151_936, 16)),
        "flat": ((256, 512), (32_768, 16)),
        "zipf": ((256, 512), (32_768, 16)),
        "others": ((256, 512),),
    },
}
"""Vocabulary and tokens of every synthetic input, by level and family."""

FAMILY_NAMES = ("peaked", "flat", "zipf")

INPUTS = {"quick": ("recording", "peaked"), "full": ("real", *FAMILY_NAMES)}
"""What is studied where the user does not say."""

POINTS = 12
"""Tokens of a cell of forward KL whose errors are kept for plots."""

CELL_MEMORY = 2**22
"""Numbers of a policy that are worked on at a time."""


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


@dataclass(frozen=True)
class Found:
    """A row, how many decisions were judged for it, and how many of them near their bounds."""

    row: Row
    decisions: int
    close: int


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


def check(options: Options) -> None:
    """Raise for names that no registry has.

    Raises:
        UnknownName: a format, stage, divergence or input family.
        InputError: stages that do not go together.
    """
    for name in options.formats:
        storage(name)
    for names in options.stages:
        for name in names.split("+"):
            _ = STAGES[name]
        together(names, "bf16")
    for name in options.divergences:
        _ = DIVERGENCES[name]


def source_from(name: str, options: Options) -> Iterator[Source]:
    """The sources of one input: a family at every size of the level, or a recording's batches.

    Raises:
        InputError: a recording that cannot be read, or without behavior logits.
        UnknownName: no such family.
    """
    if name == "recording" or Path(name).suffix == ".safetensors":
        path = default_recording() if name == "recording" else Path(name)
        yield from _recorded(load_recording(path), name)
        return
    _ = FAMILIES[name]
    for usual, tokens in SIZES[options.level].get(name, SIZES[options.level]["others"]):
        size, count = options.vocab_size or usual, options.tokens or tokens
        length = min(count, 16)
        batch = build(
            name,
            options.seed,
            sequences=-(-count // length),
            length=length,
            vocab_size=size,
            top_k=min(20, size - 2),
            dtype="fp32",
        )
        yield source_of(name, batch).take(slice(0, count))
        if options.vocab_size is not None:
            return


def _recorded(batches: dict[str, Batch], name: str) -> Iterator[Source]:
    """The batches of a recording that have both policies."""
    full = {key: batch for key, batch in batches.items() if batch.behavior_logits is not None}
    if not full:
        raise InputError("--input", None, name, "no batch has behavior logits")
    for key, batch in full.items():
        yield source_of(f"{name} {key}", batch)


def tasks(source: Source, options: Options) -> list[Task]:
    """Every stage and format that fit a source."""
    found = []
    for names in options.stages or tuple(STAGES):
        parts = [STAGES[name] for name in names.split("+")]
        formats = [f for f in parts[0].formats if all(f in stage.formats for stage in parts)]
        places = [name for name in names.split("+") if STAGES[name].model]
        formats = [f for f in formats if all((place, f) in source.rollouts for place in places)]
        found += [
            Task(source, name, names)
            for name in formats
            if not options.formats or name in options.formats
        ]
    return found


def study(source: Source, options: Options, progress: Progress) -> list[Found]:
    """Rows of one source."""
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

    def work(task: Task) -> list[Found]:
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
) -> Found:
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
    error, scale = c.error(true_c), _scale(truths, divergence, view)
    bits, low, high, at_least = bits_of(error, (true_c.high - true_c.low) / 2, scale)
    known = (true_c.high - true_c.low) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error > known, c.bound / error, np.nan)
        share = c.noise / (c.noise + c.rounding)
        margin = np.abs(true_c.mid) / scale
    shown = of_sign.judged & np.isfinite(error) & np.isfinite(c.bound) & (error > 0)
    step = max(1, int(shown.sum()) // POINTS)
    picked = np.flatnonzero(shown)[::step][: POINTS if divergence == "kl" else 0]
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
        sign_flips=rate(of_sign.flipped, of_sign.judged),
        flips=rate(usual.flipped, usual.judged),
        undecidable=rate(usual.judged & ~usual.determined, usual.judged),
        sign_undecidable=rate(of_sign.judged & ~of_sign.determined, of_sign.judged),
        wrong=int(wrong.sum()),
        disagreement=_disagreement(c, whole) if part == "topk" else None,
        tightness=_quantiles(usable),
        noise_share=float(np.nanmedian(share)) if np.isfinite(share).any() else None,
        by_margin=binned(of_sign.flipped, margin, of_sign.judged & np.isfinite(margin)),
        errors=tuple(error[picked].tolist()),
        bounds=tuple(c.bound[picked].tolist()),
    )
    count = int(usual.judged.sum() + close.judged.sum())
    near = int((usual.judged & usual.close).sum() + (close.judged & close.close).sum())
    return Found(row, count, near)


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


def _scale(truths: Sequence[Truth], divergence: str, view: View) -> Float64:
    return np.concatenate([scale_of(truth.rows, divergence, *view) for truth in truths])


def _median(x: Float64) -> float:
    finite = x[np.isfinite(x)]
    return float(np.median(finite)) if finite.size else 0.0


def _quantiles(ratio: Float64) -> tuple[float, float] | None:
    if not ratio.size:
        return None
    middle, high = np.quantile(ratio, (0.5, 0.95))
    return float(middle), float(high)


def _disagreement(c: Estimate, whole: Enclosure) -> Rate:
    """How often the sign of a top-K estimate is not that of the full divergence's C."""
    right = np.where(whole.low > 0, 1.0, np.where(whole.high < 0, -1.0, 0.0))
    return rate((right != 0) & (np.sign(c.value) != right), right != 0)
