"""How many bits of D and C come out right, on rows of every input family.

An error is taken in units of the rounding budget of the complement form per unit roundoff.
Arithmetic of `b` bits errs by about `2^-b` of these times the budget's usual slack
(`conformance.bits.CALIBRATION`), so `bits = CALIBRATION - log2(rms error)`: 24 for plain fp32.
What is planted (softmaxes in bf16 and fp16) and the float64 mode show that the number means
something.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pdverify.batch import Batch
from pdverify.budgets import CHAIN
from pdverify.cases import FAMILIES, build
from pdverify.conformance.bits import CALIBRATION
from pdverify.conformance.truth import Progress, Truth, finite, over_budget
from pdverify.formats import FORMATS
from pdverify.tools.bench.contestants import Contestant, contestants
from pdverify.tools.bench.gate import UNIT, Array, look
from pdverify.tools.bench.records import AccuracyRecord, FamilyBits
from pdverify.tools.bench.workloads import MATERIALIZED, Size, Workload

MOST = 60.0
"""Bits that are reported at most: further the enclosures themselves do not reach."""


@dataclass
class _Seen:
    """What was seen of one contestant, in one precision, on one workload."""

    families: list[FamilyBits] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    determined: int = 0
    wrong: int = 0


def measure(
    divergences: Sequence[str],
    *,
    vocab: int,
    device: str,
    progress: Progress,
    seed: int = 0,
    backends: Sequence[str] = (),
    families: Iterable[str] = (),
    sequences: int = 2,
    length: int = 2,
) -> list[AccuracyRecord]:
    """Every backend in each of its precisions, the materialized baseline and what is planted.

    Args:
        divergences: by name; each in the full and the top-K view (exact tail).
        vocab: vocabulary size.
        progress: called as `progress(what, done, total)`.
        backends, families: by name; none: all.
        sequences, length: size of the batch of each family.
    """
    wanted = [
        Workload("", "", "mask", name, view, Size(0), 0)
        for name in divergences
        for view in ("full", "topk")
    ]
    pairs = [
        (x, precision, x.refuses(device))
        for _, x in contestants().items()
        if (x.role == "backend" and (not backends or x.name in backends))
        or x.role == "planted"
        or x.name == MATERIALIZED
        for precision in x.precisions
    ]
    seen = {(x.name, p, w): _Seen() for x, p, reason in pairs if reason is None for w in wanted}
    names = list(families or FAMILIES)
    for done, family in enumerate(names):
        progress(f"accuracy at V = {vocab:,}: {family}", done, len(names))
        batch = build(family, seed, vocab_size=vocab, sequences=sequences, length=length)
        truth = Truth(batch.rows(), CHAIN)
        for workload in wanted:
            for contestant, precision, reason in pairs:
                if reason is None:
                    values = _values(contestant, workload, batch, precision, device)
                    found = seen[contestant.name, precision, workload]
                    _look(found, contestant, precision, workload, family, truth, values)
    return [
        _record(x, p, w, vocab, device, reason, seen.get((x.name, p, w), _Seen()))
        for w in wanted
        for x, p, reason in pairs
    ]


def _values(
    contestant: Contestant, workload: Workload, batch: Batch, precision: str, device: str
) -> dict[str, Array]:
    """What a contestant says; NaN, which is wrong everywhere, where it raises."""
    assert contestant.values is not None
    try:
        return contestant.values(workload, batch, precision, device)
    except Exception:
        nothing = np.full(int(batch.response_mask.sum()), np.nan)
        return dict.fromkeys(("divergence", "coefficient", "keep"), nothing)


def _look(
    seen: _Seen,
    contestant: Contestant,
    precision: str,
    workload: Workload,
    family: str,
    truth: Truth,
    values: dict[str, Array],
) -> None:
    """Add what one family shows."""
    found = look(contestant, workload, truth, values, FORMATS[precision].unit_roundoff)
    bits = {}
    for quantity, right in found.right.items():
        end = workload.tail if quantity == "coefficient" else None
        about = quantity, workload.divergence, workload.view, end, UNIT, "complement"
        beta = truth.budget(*about) / UNIT
        counts = finite(right) & np.isfinite(beta) & (beta > 0)
        error, budget = found.errors[quantity]
        worst = float(over_budget(error, budget).max(initial=0.0))
        seen.worst[quantity] = max(seen.worst.get(quantity, 0.0), worst)
        # the largest error that the enclosure leaves possible
        got = values[quantity]
        with np.errstate(invalid="ignore"):
            error = np.maximum(np.abs(got - right.low), np.abs(got - right.high))
        bits[quantity] = _bits(np.where(np.isnan(error), np.inf, error)[counts] / beta[counts])
    seen.families.append(FamilyBits(family, bits["coefficient"], bits["divergence"]))
    seen.determined += int(found.determined.sum())
    seen.wrong += int(found.wrong.sum())


def _bits(error: Array) -> float | None:
    """Bits from errors in budgets per unit roundoff, `[T]`; None where they are all 0."""
    if not error.any():
        return None
    spread = float(np.sqrt(np.mean(error**2)))
    return float(np.clip(CALIBRATION - np.log2(spread), 0.0, MOST))


def _record(
    contestant: Contestant,
    precision: str,
    workload: Workload,
    vocab: int,
    device: str,
    unavailable: str | None,
    seen: _Seen,
) -> AccuracyRecord:
    worst = {name: x if np.isfinite(x) else None for name, x in seen.worst.items()}
    return AccuracyRecord(
        contestant=contestant.name,
        role=contestant.role,
        precision=precision,
        device=device,
        divergence=workload.divergence,
        view=workload.view,
        vocab=vocab,
        unavailable=unavailable,
        families=seen.families,
        divergence_error=worst.get("divergence"),
        coefficient_error=worst.get("coefficient"),
        determined=seen.determined,
        wrong=seen.wrong,
    )
