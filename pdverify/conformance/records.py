"""What judging produces: plain records, turned into text by `pdverify.report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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


VerdictKind: TypeAlias = Literal[
    "wrong", "convention", "precision", "raised", "time-out", "form", "not-a-number", "modified"
]
"""Why a check failed.

``wrong``: a decision, value or gradient outside its budget.  ``convention``: the same, and a
documented convention explains every answer.  ``precision``: outside the budget of the declared
precision, inside that of a coarser one.  ``raised``, ``time-out``: no answer.  ``form``: an answer
of the wrong shape or dtype.  ``not-a-number``: NaN where the right value is finite.  ``modified``:
the target changed its inputs.
"""

CheckStatus: TypeAlias = Literal["passed", "failed", "accepted", "not-applicable", "not-run"]


@dataclass(frozen=True)
class TargetCounterexample:
    """The smallest input found on which a target is wrong, with the right answer.

    Attributes:
        quantity: ``keep``, ``divergence``, ``coefficient``, ``loss``, ``gradient``, ``inputs`` or
            ``answer`` (nothing usable came back).
        place: (sequence, position) of the token, or None where the whole answer is at fault.
        expected, got: the right answer and the target's, as text a person can read.
        exact: the oracle's enclosure of the quantity as text (``[low, high]`` where it is not
            one decimal); for ``keep`` those of D and of the direction quantity.
        margin: for ``keep``, the oracle's signed margin; NaN elsewhere.
        error, budget: distance from the truth, and what rounding may cost; NaN where the answer
            is no number.
        inputs: the target's arguments by name, as nested lists and numbers (``-inf`` and ``nan``
            as Python floats); complete, so that calling the target with them shows the fault.
        dtypes: argument name -> dtype name (``float32``, ``bfloat16``, ``int64``, ``bool``).
        presentation: how the arguments are laid out, in words (``contiguous``, ``strided`` ...).
        shrunk: whether the reducer made the input smaller, and what it still is.
    """

    quantity: str
    place: tuple[int, int] | None
    expected: str
    got: str
    exact: str
    margin: float
    error: float
    budget: float
    inputs: dict[str, Any]
    dtypes: dict[str, str]
    presentation: str
    shrunk: bool


@dataclass(frozen=True)
class CheckRecord:
    """The outcome of one check on a target.

    Attributes:
        id: stable dotted id; `pdverify explain ID` says what it means.
        status: see `CheckStatus`; ``accepted`` is a convention that the caller accepts.
        kind: why it failed, else None.
        convention: id of the documented convention that explains the answers, else None.
        message: one line: what was expected, what came, or why it does not apply.
        cause: the likely cause in one line, or None.
        counterexample: the smallest failing input, or None.
        decisions: the decisions this check judged.
        worst: worst error over its budget among values, or None (at most 1 passes).
        rerun: the command line that runs this check alone.
        seconds: time it took.
    """

    id: str
    status: CheckStatus
    kind: VerdictKind | None
    convention: str | None
    message: str
    cause: str | None
    counterexample: TargetCounterexample | None
    decisions: DecisionCounts
    worst: float | None
    rerun: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether this check speaks against the target: only ``failed`` does."""
        return self.status != "failed"


@dataclass(frozen=True)
class TargetReport:
    """The outcome of `pdverify check TARGET`.

    Attributes:
        conforms: no check failed.
        target: as the caller named it (``module:function``).
        mask, view, tail, support, precision: what it was judged as; `tail` None without one.
        options: every other option that was set, by flag name.
        outputs: what the target returns, of ``keep``, ``divergence``, ``coefficient``, ``loss``.
        parameters: the inputs it takes, by name.
        effective_bits: precision of the sign of C, or None where the mask has none.
        bits_note: one line saying why `effective_bits` is None, else "".
        decisions: over all checks.
        checks: in the order of the registry, those that do not apply included.
        convention: id of the one convention that explains every failed check, else None.
    """

    conforms: bool
    target: str
    mask: str
    view: str
    tail: str | None
    support: str
    precision: str
    options: dict[str, Any]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    effective_bits: Bits | None
    bits_note: str
    decisions: DecisionCounts
    checks: list[CheckRecord]
    convention: str | None
    seed: int
    level: str
    seconds: float
    versions: dict[str, str]
    schema_version: int = SCHEMA_VERSION

    @property
    def failed(self) -> list[CheckRecord]:
        """The checks that failed, in order."""
        return [check for check in self.checks if check.status == "failed"]


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
