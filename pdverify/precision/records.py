"""What a precision study produces: plain records.

C is the direction coefficient, its sign the direction; a decision is a token's keep or drop.
Errors and bounds are in the unit of C.  A figure that could not be measured is None; samples may
hold infinities and NaN, where a computation overflowed.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What to study; the empty tuple means all that fit.

    Attributes:
        formats: names of number formats and of scaled forms.
        stages: names of stages; ``a+b`` for stages together.
        divergences: names of divergences.
        inputs: ``real``, names of input families, or paths of recordings.
        level: ``quick`` or ``full``.
        seed: of everything random.
    """

    formats: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    divergences: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    level: str = "quick"
    seed: int = 0

    @property
    def command(self) -> str:
        """The command line that asks for this."""
        words = ["pdverify", "precision", "--level", self.level, "--seed", str(self.seed)]
        for flag, names in (
            ("--format", self.formats),
            ("--stage", self.stages),
            ("--divergence", self.divergences),
            ("--input", self.inputs),
        ):
            words += [flag, *names] if names else []
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
        margins: `|C|` over its scale, of sampled tokens.
        errors, bounds, flipped: of the same tokens: observed error of C, its bound, and whether
            the sign flipped.
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
    margins: tuple[float, ...]
    errors: tuple[float, ...]
    bounds: tuple[float, ...]
    flipped: tuple[bool, ...]


@dataclass(frozen=True)
class FormRow:
    """One form of C on one kind of rows, in the same arithmetic as the others.

    Attributes:
        divergence, form, partition, input, peakedness, vocab_size, tokens: what was computed.
        bits_of_c: median of the correct bits of C.
        worst_bits: their 5th percentile.
        wrong_signs, wrong_decisions: signs of C, and decisions, that differ from the exact ones.
        seconds_ratio: time over that of the plain form; None where it was not taken.
    """

    divergence: str
    form: str
    partition: str
    input: str
    peakedness: str
    vocab_size: int
    tokens: int
    bits_of_c: float
    worst_bits: float
    wrong_signs: Rate
    wrong_decisions: Rate
    seconds_ratio: float | None


@dataclass(frozen=True)
class Report:
    """One run of the study; `wrong` of its `decisions` flipped outside their certificate."""

    rows: tuple[Row, ...]
    forms: tuple[FormRow, ...]
    decisions: int
    wrong: int
    seed: int
    level: str
    command: str
    versions: dict[str, str]
    device: str
    seconds: float
