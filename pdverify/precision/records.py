"""What a precision study produces: plain records.

C is the direction coefficient, its sign the direction; a decision is a token's keep or drop.
Errors and bounds are in the unit of C.  A figure that could not be measured is None; none is NaN or
infinite.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

MARGINS = tuple(2.0 ** (i / 2) for i in range(-20, 1))
"""Lower ends of the bins of `Row.by_margin`; the first bin takes all that is below it."""

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Options:
    """What to study; the empty tuple means what the level says.

    Attributes:
        inputs: ``real`` (fresh tokens of the language model), ``recording`` (the one that ships),
            input families, or paths of recordings.
        formats: names of number formats and of scaled forms.
        stages: names of stages; ``a+b`` for stages together.
        divergences: names of divergences.
        level: ``quick`` or ``full``.
        seed: of everything random.
        tokens, vocab_size: of every synthetic input; None: what the level says.
    """

    inputs: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    divergences: tuple[str, ...] = ()
    level: str = "quick"
    seed: int = 0
    tokens: int | None = None
    vocab_size: int | None = None

    @property
    def command(self) -> str:
        """The command line that asks for this."""
        words = ["pdverify", "precision", "--level", self.level, "--seed", str(self.seed)]
        for flag, names in (
            ("--input", self.inputs),
            ("--format", self.formats),
            ("--stage", self.stages),
            ("--divergence", self.divergences),
        ):
            words += [flag, *names] if names else []
        for flag, size in (("--tokens", self.tokens), ("--vocab", self.vocab_size)):
            words += [flag, str(size)] if size is not None else []
        return shlex.join(words)


@dataclass(frozen=True)
class Rate:
    """The share `count / total` with its 95 % Wilson interval; `total` may be 0."""

    count: int
    total: int
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One input, format, stage, divergence, partition, tail and form.

    Attributes:
        input, format, stage, divergence, partition, tail, form: what was studied; `tail` is None
            in the full view.
        vocab_size, top_k, tokens: sizes.
        bits, bits_low, bits_high: effective bits of the sign of C with their 95 % interval; None
            where they cannot be measured.
        at_least: no mistake was seen: `bits` is a lower limit.
        sign_flips: the sign of C differs from the exact one.
        flips: the decision differs from the exact one.
        undecidable: the decision is not determined by its certificate.
        sign_undecidable: the sign of C is not.
        wrong: decisions that flipped outside their certificate: must be 0.
        disagreement: the exact direction by this tail estimator (in the full view: of the ratio)
            differs from the exact tail's.
        tightness: bound over observed error of C: median, and 95th percentile.
        noise_share: median share of the bound that stored values cause; arithmetic the rest.
        by_margin: `(flips of the sign, tokens)` by `|C|` over the sum of its terms' magnitudes,
            in the bins of `MARGINS`.
        errors, bounds: observed error of C and its bound, of a few tokens.
    """

    input: str
    format: str
    stage: str
    divergence: str
    partition: str
    tail: str | None
    form: str
    vocab_size: int
    top_k: int
    tokens: int
    bits: float | None
    bits_low: float | None
    bits_high: float | None
    at_least: bool
    sign_flips: Rate
    flips: Rate
    undecidable: Rate
    sign_undecidable: Rate
    wrong: int
    disagreement: Rate | None
    tightness: tuple[float, float] | None
    noise_share: float | None
    by_margin: tuple[tuple[int, int], ...]
    errors: tuple[float, ...]
    bounds: tuple[float, ...]


@dataclass(frozen=True)
class FormRow:
    """One form of C on one kind of rows, its inputs taken as exact.

    Attributes:
        divergence, form, inputs: what was computed, in fp32 from logits of that format.
        arithmetic: format of every operation but sums, which are fp32.
        peakedness: name of the kind of rows; `peak` is the median mass of their likeliest token.
        vocab_size, tokens: sizes.
        bits: median of the correct bits of C (0 to 53), with the 95 % interval of that median.
        worst_bits: their 5th percentile.
        wrong_signs, wrong_decisions: signs of C, and decisions, that differ from the exact ones.
        seconds_ratio: time over that of the plain form, both in fp32 NumPy; None where it was not
            taken.
    """

    divergence: str
    form: str
    inputs: str
    arithmetic: str
    peakedness: str
    peak: float
    vocab_size: int
    tokens: int
    bits: float
    bits_low: float
    bits_high: float
    worst_bits: float
    wrong_signs: Rate
    wrong_decisions: Rate
    seconds_ratio: float | None


@dataclass(frozen=True)
class DropRate:
    """Share of tokens that a mask drops."""

    mask: str
    rate: Rate


@dataclass(frozen=True)
class RolloutRow:
    """A rollout in low precision against an fp32 trainer, on real prefixes, `k ~ mu`.

    Attributes:
        training: which fp32 model trains.
        recipe: how the rollout ran.
        tokens, vocab_size, top_k: sizes.
        median, high: of the forward KL (nats): median with its 95 % interval, 95th percentile.
        outside: share of tokens with a larger divergence than `delta`.
        delta: threshold of the trust region (nats).
        drops: drop rate of every mask, its tail joined to its name by a colon.
        disagreements: share of tokens on which the direction of a tail estimator of the top-K
            view (or the ratio's) is not that of the full divergence.
    """

    training: str
    recipe: str
    tokens: int
    vocab_size: int
    top_k: int
    median: float
    median_low: float
    median_high: float
    high: float
    outside: Rate
    delta: float
    drops: tuple[DropRate, ...]
    disagreements: tuple[DropRate, ...]


@dataclass(frozen=True)
class Report:
    """One run of the study; `wrong` of its `decisions` flipped outside their certificate.

    `close` of the decisions had a threshold or a sign within twice its bound; `by_vocab` counts
    decisions by vocabulary size; `notes` says what was left out, and why.
    """

    rows: tuple[Row, ...]
    forms: tuple[FormRow, ...]
    rollouts: tuple[RolloutRow, ...]
    decisions: int
    close: int
    by_vocab: dict[str, int]
    wrong: int
    seed: int
    level: str
    command: str
    versions: dict[str, str]
    device: str
    seconds: float
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


def merged(reports: Sequence[Report]) -> Report:
    """Runs on different inputs as one; forms of C are those of the first run that has any.

    Raises:
        ValueError: none, an input in two of them, or runs of different levels, seeds or versions.
    """
    if not reports:
        raise ValueError("no runs to merge")
    first = reports[0]
    seen: set[tuple[str, int]] = set()
    for report in reports:
        for name in ("level", "seed", "versions"):
            if getattr(report, name) != getattr(first, name):
                raise ValueError(
                    f"runs of different {name}: {getattr(first, name)} and {getattr(report, name)}"
                )
        inputs = {(row.input, row.vocab_size) for row in report.rows}
        if seen & inputs:
            raise ValueError(f"input {min(seen & inputs)[0]} is in two runs")
        seen |= inputs
    if len(reports) == 1:
        return first
    sizes = sorted({int(size) for report in reports for size in report.by_vocab})
    rollouts = tuple(row for report in reports for row in report.rollouts)
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    if rollouts:  # a run without the model says that these are missing
        notes = dict.fromkeys(note for note in notes if "only with input real" not in note)
    return replace(
        first,
        rows=tuple(row for report in reports for row in report.rows),
        forms=next((report.forms for report in reports if report.forms), ()),
        rollouts=rollouts,
        decisions=sum(report.decisions for report in reports),
        close=sum(report.close for report in reports),
        by_vocab={
            str(size): sum(report.by_vocab.get(str(size), 0) for report in reports)
            for size in sizes
        },
        wrong=sum(report.wrong for report in reports),
        command=" && ".join(report.command for report in reports),
        seconds=sum(report.seconds for report in reports),
        notes=tuple(notes),
    )
