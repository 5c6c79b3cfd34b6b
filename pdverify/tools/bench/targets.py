"""What must hold, beside what a run measured; only what the run measured at its size is listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdverify.tools.bench.records import BenchReport, Entry, ScalingRecord, SpeedRecord
from pdverify.tools.bench.workloads import BY_ROWS, HEAD, MATERIALIZED, PRODUCT, READ, VOCAB

FASTER, FASTEST = {"torch-chunked": 1.6, "torch-compiled": 3.5}, 7.0
"""Times faster than the code run a few rows at a time, full view, forward and reverse KL."""

MEMORY = 2.0
"""Peak above the inputs in percent of them, of the same."""

FLOOR = 8.0
"""Time of the fastest backend over that of reading the logits, top-K view."""

PRODUCT_RATIO = {"fp32": 1.15, "bf16": 1.5}
"""Time of linear-head over the matrix product alone."""

HEAD_SIZE = (2048, 32_768, 1024)
"""T, V and d of these."""

HEAD_MEMORY = 10.0
"""Memory of linear-head in percent of what the materialized code needs."""

LOG_PI = 1e-5
"""Error of log pi behind a head in fp32, nats."""

EXPONENT = (0.9, 1.1)
"""What the interval of a fitted exponent over T and V must meet."""

BITS = {"fp32": 20.0, "fp64": 40.0}
"""Bits of C in the worst family, at least."""

PLANTED = {"planted-bf16-softmax": 10.0, "planted-fp16-softmax": 13.0}
"""Bits of C in the middle family, at most: some families are exact in any arithmetic."""

STREAM = (65_536, 2.0**30)
"""T of the stream, and bytes of memory above the block in work, less than."""


@dataclass(frozen=True)
class Target:
    """One thing that must hold: what, where, as wanted, as measured, and whether it holds."""

    what: str
    where: str
    wanted: str
    measured: str
    met: bool


def targets(report: BenchReport) -> list[Target]:
    """Everything that must hold and that `report` measured, on a CPU."""
    found = [x for record in report.speed if record.device == "cpu" for x in _speed(record)]
    return [*found, *_scaling(report), *_stream(report), *_accuracy(report)]


def _most(what: str, where: str, wanted: float, measured: float, unit: str = "") -> Target:
    met = measured <= wanted
    return Target(what, where, f"<= {wanted:g}{unit}", f"{measured:.3g}{unit}", met)


def _speed(record: SpeedRecord) -> Iterator[Target]:
    where = f"{record.workload}, {record.dtype}"
    timed = {x.contestant: x for x in record.entries if x.seconds is not None and not x.wrong}
    seconds = {x.seconds.value: x for x in timed.values() if x.role == "backend" and x.seconds}
    if not seconds:
        return
    fastest = seconds[min(seconds)]
    if record.workload in ("full-kl", "full-reverse-kl") and record.vocab == VOCAB:
        held = [(x, timed[x], wanted) for x, wanted in FASTER.items() if x in timed]
        held.append((f"fastest backend ({fastest.contestant})", fastest, FASTEST))
        for label, entry, wanted in held:
            yield from _ratio(
                f"times faster than {BY_ROWS}: {label}", where, entry, BY_ROWS, wanted
            )
            if entry.memory is not None and entry.memory.peak is not None:
                share = 100 * entry.memory.peak / entry.memory.inputs
                yield _most(f"memory over the inputs: {label}", where, MEMORY, share, " %")
    if record.workload == "topk-kl" and record.vocab == VOCAB:
        label = f"time over reading: fastest backend ({fastest.contestant})"
        yield from _ratio(label, where, fastest, READ, FLOOR)
    if (record.tokens, record.vocab, record.hidden) == HEAD_SIZE and HEAD in timed:
        yield from _head(record.dtype, where, timed)


def _head(dtype: str, where: str, timed: dict[str, Entry]) -> Iterator[Target]:
    entry = timed[HEAD]
    whole = timed[MATERIALIZED].memory if MATERIALIZED in timed else None
    if dtype in PRODUCT_RATIO:
        label = "time over the matrix product"
        yield from _ratio(label, where, entry, PRODUCT, PRODUCT_RATIO[dtype])
    if entry.memory is not None and entry.memory.peak is not None and whole and whole.peak:
        share = 100 * entry.memory.peak / whole.peak
        yield _most("memory over the materialized code's", where, HEAD_MEMORY, share, " %")
    error = entry.gate.error.get("log_prob") if entry.gate is not None else None
    if dtype == "fp32" and error is not None:
        yield _most("error of log pi", where, LOG_PI, error, " nats")


def _ratio(what: str, where: str, entry: Entry, other: str, wanted: float) -> Iterator[Target]:
    """Times faster than a baseline at least; of a ceiling, its time at most."""
    found = (entry.ratios or {}).get(other)
    if found is None:
        return
    value, low, high = found.value, found.low, found.high
    sign, met = ">=", value >= wanted
    if other != BY_ROWS:
        value, low, high = 1 / value, 1 / high, 1 / low
        sign, met = "<=", value <= wanted
    measured = f"{value:.3g} [{low:.3g}, {high:.3g}]"
    yield Target(what, where, f"{sign} {wanted:g}", measured, met)


def _scaling(report: BenchReport) -> Iterator[Target]:
    low, high = EXPONENT
    for x in report.scaling:
        if x.role != "backend" or x.axis not in ("T", "V"):
            continue
        where, fit = f"{x.workload}, {x.contestant}", x.exponent
        if fit is not None:
            what, wanted = f"exponent of time over {x.axis}", f"meets [{low}, {high}]"
            measured = f"{fit.value:.2f} [{fit.low:.2f}, {fit.high:.2f}]"
            yield Target(what, where, wanted, measured, fit.low <= high and fit.high >= low)
        if x.axis == "V" and x.memory:
            yield _most("memory growth over the inputs'", where, MEMORY, growth(x), " %")


def growth(x: ScalingRecord) -> float:
    """Growth of the peak above the inputs from the first size to the last, in % of theirs."""
    return max(0.0, 100 * (x.memory[-1] - x.memory[0]) / (x.inputs[-1] - x.inputs[0]))


def _stream(report: BenchReport) -> Iterator[Target]:
    tokens, most = STREAM
    for x in report.stream:
        if (x.tokens, x.vocab) == (tokens, VOCAB) and x.peak is not None:
            above = (x.peak - x.block_bytes) / most
            label = "memory above the block in work"
            yield Target(label, f"stream, {x.contestant}", "< 1 GiB", f"{above:.3f} GiB", above < 1)


def _accuracy(report: BenchReport) -> Iterator[Target]:
    """Over all divergences and views of a contestant."""
    judged = [x for x in report.accuracy if x.unavailable is None and x.vocab == VOCAB]
    for name, precision in dict.fromkeys((x.contestant, x.precision) for x in judged):
        own = [x for x in judged if (x.contestant, x.precision) == (name, precision)]
        if own[0].role == "backend":
            worst = [(y.coefficient or 0.0, x, y) for x in own if (y := x.worst) is not None]
            if worst:
                least, x, y = min(worst, key=lambda found: found[0])
                where = f"{name}, {precision} ({x.divergence}, {x.view}: {y.family})"
                wanted = BITS[precision]
                label, met = "bits of C, worst family", least >= wanted
                yield Target(label, where, f">= {wanted:g}", f"{least:.3g}", met)
            wrong = sum(x.wrong for x in own)
            determined = sum(x.determined for x in own)
            where = f"{name}, {precision}"
            measured = f"{wrong} of {determined}"
            yield Target("wrong certain decisions", where, "0", measured, wrong == 0)
        elif name in PLANTED:
            middle = [bits for x in own if (bits := x.median("coefficient")) is not None]
            if middle:
                yield _most("bits of C, middle family", name, PLANTED[name], max(middle))
