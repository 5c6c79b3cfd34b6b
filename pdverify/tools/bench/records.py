"""What a bench produces: plain records.

Times are seconds, memory is bytes.  No field is NaN or infinite: what is not known is None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

SCHEMA_VERSION = 1

Role: TypeAlias = Literal["backend", "baseline", "ceiling", "planted"]


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Gate:
    """Whether answers are right: within their budgets, and every certain decision as it must be.

    Attributes:
        rows, wrong: rows judged, and those with a wrong answer.
        worst: quantity -> largest error over its budget (None: infinite, or NaN).
        error: quantity -> largest error, in its own unit (None: infinite, or NaN).
        message: what is wrong first, or "".
    """

    rows: int
    wrong: int
    worst: dict[str, float | None]
    error: dict[str, float | None]
    message: str

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.wrong == 0


@dataclass(frozen=True)
class Memory:
    """Peak memory of one call above inputs and results, or None, and how it was seen or why not.

    `inputs` are the bytes of the inputs that the workload reads.
    """

    peak: int | None
    inputs: int
    method: str


@dataclass(frozen=True)
class Entry:
    """One contestant on one workload.

    Attributes:
        contestant, role: its name, and what it stands for.
        unavailable: why it does not run here, or None.
        gate: None where there is nothing to judge (a ceiling, or something that does not run).
        seconds: median time of a call with the interval of that median; None for a backend
            whose gate is red.
        ratios: other contestant -> its time over this one's: how many times faster this one is.
        memory: None where it was not asked for.
    """

    contestant: str
    role: Role
    unavailable: str | None = None
    gate: Gate | None = None
    seconds: Interval | None = None
    ratios: dict[str, Interval] | None = None
    memory: Memory | None = None

    @property
    def wrong(self) -> bool:
        """Whether this is a backend that gives wrong answers."""
        return self.role == "backend" and self.gate is not None and not self.gate.passed


@dataclass(frozen=True)
class SpeedRecord:
    """All contestants on one workload, timed in interleaved rounds of one process."""

    workload: str
    summary: str
    device: str
    dtype: str
    tokens: int
    vocab: int
    top_k: int
    hidden: int
    rounds: int
    entries: list[Entry]


@dataclass(frozen=True)
class FamilyBits:
    """Effective bits of C and D on the rows of one input family (None: exact on all of them)."""

    family: str
    coefficient: float | None
    divergence: float | None


@dataclass(frozen=True)
class AccuracyRecord:
    """One contestant, in one arithmetic, on rows of all families.

    Attributes:
        contestant, role, precision, device: who, and in what arithmetic.
        divergence, view: what was computed (top-K views take the exact tail).
        vocab: vocabulary size.
        unavailable: why it does not run here, or None.
        families: bits by input family.
        divergence_error, coefficient_error: worst error over the budget of the precision (None:
            infinite, or NaN).
        determined: decisions that are certain whatever the arithmetic.
        wrong: those of them decided otherwise, outside the budget.
    """

    contestant: str
    role: Role
    precision: str
    device: str
    divergence: str
    view: str
    vocab: int
    unavailable: str | None
    families: list[FamilyBits]
    divergence_error: float | None
    coefficient_error: float | None
    determined: int
    wrong: int

    @property
    def worst(self) -> FamilyBits | None:
        """The family with the fewest bits of C; None if C is exact on all of them."""
        known = [x for x in self.families if x.coefficient is not None]
        return min(known, key=lambda x: x.coefficient or 0.0, default=None)

    def median(self, quantity: Literal["coefficient", "divergence"]) -> float | None:
        """The middle family's bits, None counting as more than any number."""
        bits: list[float | None] = [getattr(x, quantity) for x in self.families]
        ordered = sorted(bits, key=lambda x: math.inf if x is None else x)
        return ordered[len(ordered) // 2] if ordered else None


@dataclass(frozen=True)
class ScalingRecord:
    """Cost of one contestant along one axis, everything else fixed.

    `exponent` is fitted to the times (`time ~ size^exponent`), None with no times where the gate
    (at the first size) is red; `memory` holds the peak above inputs and results at each size, and
    `inputs` their bytes, or both are empty.
    """

    workload: str
    contestant: str
    role: Role
    device: str
    dtype: str
    axis: str
    fixed: dict[str, int]
    sizes: list[int]
    seconds: list[float]
    exponent: Interval | None
    gate: Gate
    memory: list[int]
    inputs: list[int]


@dataclass(frozen=True)
class StreamRecord:
    """A file of bf16 logits read through a memory map, `block` rows at a time.

    Attributes:
        contestant, tokens, vocab, block: what was read.
        file_bytes: size of the file; `stored_bytes` of them are not holes.
        seconds: time of the pass; None where the gate is red.
        peak: peak memory above that before the pass, pages of the file included; None without
            a pass: the gate was red before.
        method: as in `Memory`.
        gate: the rows that are not holes against the oracle, the mask of every row of the pass
            against that of the same row in memory.
    """

    contestant: str
    tokens: int
    vocab: int
    block: int
    file_bytes: int
    stored_bytes: int
    seconds: float | None
    peak: int | None
    method: str
    gate: Gate

    @property
    def block_bytes(self) -> int:
        """Size of the logits of a block."""
        return self.file_bytes // self.tokens * min(self.block, self.tokens)


@dataclass(frozen=True)
class BenchReport:
    """One run of the bench."""

    level: str
    seed: int
    seconds: float
    versions: dict[str, str]
    machine: dict[str, str]
    speed: list[SpeedRecord]
    accuracy: list[AccuracyRecord]
    scaling: list[ScalingRecord]
    stream: list[StreamRecord]
    schema_version: int = SCHEMA_VERSION

    @property
    def wrong(self) -> list[str]:
        """Backends that gave a wrong answer anywhere."""
        found = {x.contestant for record in self.speed for x in record.entries if x.wrong}
        found |= {x.contestant for x in self.accuracy if x.role == "backend" and x.wrong}
        found |= {x.contestant for x in self.scaling if x.role == "backend" and x.gate.wrong}
        return sorted(found | {x.contestant for x in self.stream if x.gate.wrong})
