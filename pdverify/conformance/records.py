"""What judging produces: plain records, turned into text by `pdverify.report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdverify.conformance.bits import Bits, Share

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DecisionCounts:
    """Keep/drop decisions of one entry.

    Attributes:
        total: valid tokens judged.
        determined: those whose right decision is certain, storage noise included.
        wrong: determined ones decided otherwise, outside the rounding budget: bugs.
        rounding: determined ones decided otherwise, inside the budget.
    """

    total: int = 0
    determined: int = 0
    wrong: int = 0
    rounding: int = 0

    def __add__(self, other: DecisionCounts) -> DecisionCounts:
        return DecisionCounts(
            self.total + other.total,
            self.determined + other.determined,
            self.wrong + other.wrong,
            self.rounding + other.rounding,
        )


@dataclass(frozen=True)
class Counterexample:
    """One wrong answer, with everything needed to look at it.

    Attributes:
        source: the input it came from (``real: stale``, ``family: zipf``).
        place: (sequence, position) in that batch.
        quantity: ``keep``, ``divergence``, ``coefficient``, ``loss`` or ``gradient``.
        expected, got: the right value and the entry's.
        error: distance of `got` from the oracle's enclosure (0 for ``keep``).
        budget: what rounding at the declared precision may cost.
        margin: for ``keep``, the oracle's signed margin (see `pdverify.oracle`).
        context: sampled token, advantage, threshold, D and C as the oracle encloses them.
    """

    source: str
    place: tuple[int, int]
    quantity: str
    expected: float | bool
    got: float | bool
    error: float
    budget: float
    margin: float
    context: dict[str, Any]


@dataclass(frozen=True)
class EntryRecord:
    """The verdict on one backend x mask x view x tail.

    `divergence_error` and `coefficient_error` are the worst error over its budget (at most 1
    passes); None where the mask has none.  `bits` is the effective precision of the sign of C.
    `unavailable` is the reason where the entry cannot run here.
    """

    backend: str
    device: str
    precision: str
    mask: str
    view: str
    tail: str | None
    support: str
    decisions: DecisionCounts
    divergence_error: float | None
    coefficient_error: float | None
    loss_error: float | None
    bits: Bits | None
    passed: bool
    message: str
    counterexample: Counterexample | None
    unavailable: str | None = None

    @property
    def name(self) -> str:
        """`backend/mask/view[/tail][/support]`, the id that --select matches."""
        parts = [self.backend, self.mask, self.view, self.tail]
        if self.support != "append":
            parts.append(self.support)
        return "/".join(part for part in parts if part)


@dataclass(frozen=True)
class DirectionRecord:
    """How often a direction estimator disagrees in sign with the exact full-vocabulary one.

    `estimator`: ``ratio``, ``aggregated``, ``uniform`` or ``exact``; forward KL.  `tokens` where
    both signs are certain are judged; the others are in `undecided`.
    """

    source: str
    estimator: str
    disagree: Share
    undecided: int


@dataclass(frozen=True)
class CertificateRecord:
    """How often a certificate could be given, and how often it was wrong.

    `certificate`: ``bracket`` (sign of the top-K coefficient) or ``interval`` (sign of the full
    coefficient, from the top-K view).
    """

    source: str
    certificate: str
    certified: Share
    wrong: Share


@dataclass(frozen=True)
class InputRecord:
    """One batch that was judged: `kind` is ``real``, ``family`` or ``designed``."""

    name: str
    kind: str
    tokens: int
    vocab_size: int
    dtype: str


@dataclass(frozen=True)
class Report:
    """The outcome of `pdverify check` without a target."""

    conforms: bool
    real_source: str
    inputs: list[InputRecord]
    entries: list[EntryRecord]
    directions: list[DirectionRecord]
    certificates: list[CertificateRecord]
    seed: int
    level: str
    seconds: float
    versions: dict[str, str]
    schema_version: int = SCHEMA_VERSION
