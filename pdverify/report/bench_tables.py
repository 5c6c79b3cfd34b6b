"""The tables of a bench, as rows of text: the console and the page show the same ones."""

from __future__ import annotations

from collections.abc import Iterable

from pdverify.report.tables import MISSED, WRONG, Table
from pdverify.report.writer import ratio
from pdverify.tools.bench.records import (
    AccuracyRecord,
    BenchReport,
    Entry,
    Gate,
    Interval,
    ScalingRecord,
    SpeedRecord,
    StreamRecord,
)
from pdverify.tools.bench.targets import growth, targets

COMPARED = {
    "by-rows": "vs rows",
    "materialized": "vs all",
    "read-bandwidth": "of read",
    "exponentials": "of exp",
    "matrix-product": "of product",
}
"""Contestants that others are compared with, and the headings of these columns."""

FASTER = ("by-rows", "materialized")
"""Those of which a ratio says how many times faster; of the others, how many times their time."""


def speed(record: SpeedRecord) -> Table:
    """All contestants of a workload; a backend whose gate is red shows no figure but that."""
    present = [x for x in COMPARED if any(x in (entry.ratios or {}) for entry in record.entries)]
    columns = ["contestant", "time>", *(f"{COMPARED[x]}>" for x in present)]
    rows, notes = [], []
    for entry in record.entries:
        gate = entry.gate
        if entry.unavailable is not None:
            notes.append(f"{entry.contestant}: unavailable because {entry.unavailable}")
            continue
        if gate is not None and not gate.passed:
            wrong = f"{gate.wrong} of {gate.rows} rows wrong"
            notes.append(f"{entry.contestant}: {wrong} ({gate.message})")
        figures = ["-"] * (len(present) + 3)
        if entry.seconds is not None and not entry.wrong:
            compared = [_compared(entry, x) for x in present]
            figures = [duration(entry.seconds.value), *compared, *_memory(entry)]
        rows.append((entry.contestant, *figures, verdict(gate, entry.role)))
    sizes = {"T": record.tokens, "V": record.vocab, "d": record.hidden}
    about = [record.device, record.dtype, *(f"{x} = {n:,}" for x, n in sizes.items() if n)]
    title = f"{record.workload}: {record.summary} ({', '.join(about)})"
    return Table(title, [*columns, "memory>", "%>", "gate>"], rows, notes)


def _compared(entry: Entry, name: str) -> str:
    found = (entry.ratios or {}).get(name)
    if found is None or name == entry.contestant:
        return "-"
    if name in FASTER:
        return f"{_number(found.value)} [{found.low:.2g}, {found.high:.2g}]"
    return _number(1 / found.value)


def _memory(entry: Entry) -> tuple[str, str]:
    memory = entry.memory
    if memory is None or memory.peak is None:
        return "-", "-"
    return size(memory.peak), f"{100 * memory.peak / memory.inputs:.3g}"


def verdict(gate: Gate | None, role: str) -> str:
    """The worst error over its budget, or WRONG (a baseline is only said to be off)."""
    if gate is None:
        return "-"
    if not gate.passed:
        return WRONG if role == "backend" else f"off on {gate.wrong}/{gate.rows}"
    known = [x for x in gate.worst.values() if x is not None]
    return ratio(max(known, default=0.0))


def accuracy(report: BenchReport) -> list[Table]:
    """Effective bits by contestant, one table for each divergence and view."""
    groups: dict[str, list[AccuracyRecord]] = {}
    for x in report.accuracy:
        title = f"Accuracy: {x.divergence}, {x.view} view, V = {x.vocab:,}"
        groups.setdefault(title, []).append(x)
    return [_accuracy(title, records) for title, records in groups.items()]


def _accuracy(title: str, records: Iterable[AccuracyRecord]) -> Table:
    rows, notes = [], []
    for x in records:
        name = f"{x.contestant}, {x.precision}"
        if x.unavailable is not None:
            notes.append(f"{x.contestant}: unavailable because {x.unavailable}")
            continue
        worst = x.worst
        rows.append(
            (
                name,
                "exact" if worst is None else f"{_bits(worst.coefficient)} ({worst.family})",
                _bits(x.median("coefficient")),
                _bits(min((y.divergence for y in x.families if y.divergence), default=None)),
                *("inf" if e is None else ratio(e) for e in _errors(x)),
                f"{x.wrong}/{x.determined}",
            )
        )
    columns = "contestant", "bits of C, worst family>", "median>", "of D>", "C>", "D>", "wrong>"
    return Table(title, columns, rows, list(dict.fromkeys(notes)))


def _errors(x: AccuracyRecord) -> tuple[float | None, float | None]:
    return x.coefficient_error, x.divergence_error


def _bits(bits: float | None) -> str:
    return "exact" if bits is None else f"{bits:.1f}"


def scaling(records: Iterable[ScalingRecord]) -> Table:
    """Fitted exponents, and what the peak above the inputs grows by, over V."""
    columns = "workload", "contestant", "over", "sizes", "exponent of time>", "memory>", "growth>"
    rows = [
        (
            x.workload,
            x.contestant,
            x.axis,
            f"{x.sizes[0]:,} to {x.sizes[-1]:,}",
            WRONG if x.exponent is None else interval(x.exponent),
            f"{size(x.memory[0])} to {size(x.memory[-1])}" if x.memory else "-",
            f"{growth(x):.2g} %" if x.memory else "-",
        )
        for x in records
    ]
    return Table("How cost grows", columns, rows)


def streams(records: Iterable[StreamRecord]) -> Table:
    """Files read through a memory map."""
    columns = "backend", "T>", "V>", "file>", "block>", "time>", "read>", "above block>", "gate>"
    rows = [
        (
            x.contestant,
            f"{x.tokens:,}",
            f"{x.vocab:,}",
            size(x.file_bytes),
            f"{x.block} rows",
            "-" if x.seconds is None else duration(x.seconds),
            "-" if x.seconds is None else f"{size(int(x.file_bytes / x.seconds))}/s",
            "-" if x.peak is None else size(max(0, x.peak - x.block_bytes)),
            verdict(x.gate, "backend"),
        )
        for x in records
    ]
    return Table("Larger than memory", columns, rows)


def held(report: BenchReport) -> Table:
    """What must hold, as wanted and as measured."""
    rows = [
        (x.what, x.where, x.wanted, x.measured, "met" if x.met else MISSED) for x in targets(report)
    ]
    return Table("What must hold", ("what", "where", "target>", "measured>", ""), rows)


def interval(x: Interval) -> str:
    """A value with its interval."""
    return f"{x.value:.2f} [{x.low:.2f}, {x.high:.2f}]"


def _number(x: float) -> str:
    return f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:,.0f}"


def duration(seconds: float) -> str:
    """A time with three significant digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale * 0.9995:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def size(count: int) -> str:
    """Bytes with three significant digits."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.3g} {unit}"
