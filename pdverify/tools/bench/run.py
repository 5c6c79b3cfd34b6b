"""Runs the sections of a bench and returns their records."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from pdverify.backends import BACKENDS
from pdverify.backends.bound_torch import DTYPES
from pdverify.batch import InputError
from pdverify.conformance.truth import Progress
from pdverify.conformance.versions import versions
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.tools.bench import accuracy, scaling
from pdverify.tools.bench.contestants import (
    Contestant,
    chosen,
)
from pdverify.tools.bench.gate import cases, judge
from pdverify.tools.bench.inputs import make_inputs
from pdverify.tools.bench.memory import measure as measure_memory
from pdverify.tools.bench.records import BenchReport, Entry, Gate, Memory, SpeedRecord
from pdverify.tools.bench.stream import stream
from pdverify.tools.bench.timing import interleaved, median, ratio
from pdverify.tools.bench.workloads import (
    BY_ROWS,
    EXPONENTIALS,
    MATERIALIZED,
    PRODUCT,
    READ,
    VOCAB,
    WORKLOADS,
    Size,
    Workload,
)

Section: TypeAlias = Literal["speed", "accuracy", "scaling", "stream"]

QUICK = ("full-kl", "topk-kl", "linear-head")
"""Workloads of level quick, if none is named."""

ROUNDS = {"quick": 7, "full": 15}

STREAM_TOKENS, STREAM_BLOCK = 65_536, 64

COMPARED = (BY_ROWS, MATERIALIZED, READ, EXPONENTIALS, PRODUCT)
"""What every time is shown as a ratio to, where it runs on the workload."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        sections: parts of the report.
        level: ``quick`` or ``full``: which workloads, how many tokens and rounds.
        workloads, backends: by name; empty: those of the level, and all.
        device, dtypes: where, and the format of the logits (or hidden states and head).
        tokens, vocab: sizes of speed and stream; None: those of the workload.
        rounds: of every timing; None: those of the level.
        seed: of inputs and of the order of calls.
        memory: whether peak memory is measured, in a process for each contestant.
        folder: where the file of the stream is made.
    """

    sections: tuple[Section, ...] = ("speed",)
    level: str = "quick"
    workloads: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    tokens: int | None = None
    vocab: int | None = None
    rounds: int | None = None
    seed: int = 0
    memory: bool = True
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in self.workloads:
            _ = WORKLOADS[name]
        for name in self.backends:
            _ = BACKENDS[name]
        for name in self.dtypes:
            if name not in DTYPES:
                raise InputError("dtype", None, name, f"known: {', '.join(DTYPES)}")
        if self.device not in ("cpu", "cuda"):
            raise InputError("device", None, self.device, "known: cpu, cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("device", None, self.device, "torch sees no GPU here")
        if self.vocab is not None and self.vocab < 100:
            raise InputError("vocab", None, self.vocab, "at least 100")

    @property
    def timed_rounds(self) -> int:
        """Rounds of every timing."""
        return self.rounds or ROUNDS[self.level]

    @property
    def speed_workloads(self) -> list[Workload]:
        """The workloads of the section speed."""
        names = self.workloads or (tuple(WORKLOADS) if self.level == "full" else QUICK)
        return [WORKLOADS[name] for name in names]

    @property
    def synchronize(self) -> Callable[[], None]:
        """Waits for the device."""
        return torch.cuda.synchronize if self.device == "cuda" else lambda: None


def run_bench(options: Options, progress: Progress = lambda *_: None) -> BenchReport:
    """Measure what `options` ask for.

    Args:
        progress: called as `progress(what, done, total)`.

    Raises:
        StreamUnavailable: the file of the stream cannot be made.
    """
    started = time.perf_counter()
    report = BenchReport(
        options.level, options.seed, 0.0, versions(), machine(options.device), [], [], [], []
    )
    if "speed" in options.sections:
        for workload in options.speed_workloads:
            for dtype in options.dtypes:
                report.speed.append(_speed(workload, dtype, options, progress))
    if "accuracy" in options.sections:
        report.accuracy.extend(
            accuracy.measure(
                list(DIVERGENCES) if options.level == "full" else ["kl"],
                vocab=options.vocab or VOCAB,
                device=options.device,
                progress=progress,
                seed=options.seed,
                backends=options.backends,
            )
        )
    if "scaling" in options.sections:
        for axis in scaling.AXES:
            report.scaling.extend(
                scaling.run_axis(
                    axis,
                    device=options.device,
                    dtype=options.dtypes[0],
                    seed=options.seed,
                    rounds=options.timed_rounds,
                    backends=options.backends,
                    memory=options.memory,
                    synchronize=options.synchronize,
                    progress=progress,
                )
            )
    if "stream" in options.sections:
        for contestant in chosen(WORKLOADS["topk-kl"], options.backends):
            if contestant.role == "backend" and contestant.refuses("cpu") is None:
                report.stream.append(
                    stream(
                        contestant.name,
                        tokens=options.tokens or STREAM_TOKENS,
                        vocab=options.vocab or VOCAB,
                        block=STREAM_BLOCK,
                        progress=progress,
                        folder=options.folder,
                        seed=options.seed,
                    )
                )
    return BenchReport(**vars(report) | {"seconds": time.perf_counter() - started})


def _speed(workload: Workload, dtype: str, options: Options, say: Progress) -> SpeedRecord:
    """Gate, then time, then memory, of everything that does the workload."""
    size = workload.sized(options.level, options.tokens, options.vocab)
    device, seed, title = options.device, options.seed, f"{workload.name}, {dtype}"
    say(f"{title}: making inputs", 0, 1)
    inputs = make_inputs(workload, size, dtype, device, seed)
    judged = cases(workload, inputs, dtype, seed)
    found = chosen(workload, options.backends)
    refusals = {x.name: x.refuses(device) for x in found}
    gates: dict[str, Gate] = {}
    timed: list[Contestant] = []
    for done, x in enumerate(found):
        if refusals[x.name] is not None:
            continue
        if x.role != "ceiling":
            say(f"{title}: judging {x.name}", done, len(found))
            gates[x.name] = judge(x, workload, judged, device)
        if x.role != "backend" or gates[x.name].passed:
            timed.append(x)
    times = interleaved(
        {x.name: x.prepare(workload, inputs) for x in timed},
        rounds=options.timed_rounds,
        seed=seed,
        synchronize=options.synchronize,
        progress=lambda done, total: say(f"{title}: timing", done, total),
    )
    read = sum(x.nbytes for x in inputs.read(workload))
    del inputs
    memory: dict[str, Memory] = {}
    for done, x in enumerate(timed):
        if options.memory and x.role != "ceiling":
            say(f"{title}: memory of {x.name}", done, len(timed))
            memory[x.name] = _memory(workload, x.name, size, dtype, options, read)
    return SpeedRecord(
        workload=workload.name,
        summary=workload.summary,
        device=device,
        dtype=dtype,
        **vars(size),
        rounds=options.timed_rounds,
        entries=[
            Entry(
                x.name,
                x.role,
                refusals[x.name],
                gates.get(x.name),
                median(times[x.name], seed) if x.name in times else None,
                {
                    other: ratio(times[other], times[x.name], seed)
                    for other in COMPARED
                    if {other, x.name} <= times.keys()
                },
                memory.get(x.name),
            )
            for x in found
        ],
    )


def _memory(
    workload: Workload, name: str, size: Size, dtype: str, options: Options, read: int
) -> Memory:
    try:
        return measure_memory(workload.name, name, size, dtype, options.device, options.seed)
    except RuntimeError as error:  # a process that ran out of memory must not end the bench
        return Memory(None, read, f"not measured: {error}")


def machine(device: str) -> dict[str, str]:
    """What the figures were measured on; with a load of more than about 0.5, times say little."""
    found = {
        "cpu": _cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or "unknown"])[0]
