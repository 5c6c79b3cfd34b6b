"""How time and memory grow with T, V, K and d."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdverify.conformance.truth import Progress
from pdverify.tools.bench.contestants import Contestant, chosen
from pdverify.tools.bench.gate import cases, judge
from pdverify.tools.bench.inputs import make_inputs
from pdverify.tools.bench.memory import measure
from pdverify.tools.bench.records import Gate, Memory, ScalingRecord
from pdverify.tools.bench.timing import Call, exponent, interleaved
from pdverify.tools.bench.workloads import BY_ROWS, VOCAB, WORKLOADS

TOKENS = (64, 128, 256, 512)
VOCABS = (8192, 16_384, 32_768, 65_536, VOCAB)


@dataclass(frozen=True)
class Axis:
    """One size that varies on a workload: a field of `Size`, its values, and the others fixed."""

    workload: str
    name: str
    symbol: str
    sizes: tuple[int, ...]
    fixed: dict[str, int]
    memory: bool = False


AXES = (
    Axis("full-kl", "tokens", "T", TOKENS, {"vocab": VOCAB}),
    Axis("full-kl", "vocab", "V", VOCABS, {"tokens": 256}, memory=True),
    Axis("topk-kl", "tokens", "T", TOKENS, {"vocab": VOCAB}),
    Axis("topk-kl", "vocab", "V", VOCABS, {"tokens": 256}, memory=True),
    Axis("topk-kl", "top_k", "K", (1, 5, 20, 80, 320), {"tokens": 128, "vocab": VOCAB}),
    Axis("linear-head", "tokens", "T", (256, 512, 1024, 2048), {"vocab": 32_768, "hidden": 512}),
    Axis(
        "linear-head",
        *("vocab", "V", (8192, 16_384, 32_768, 65_536), {"tokens": 512, "hidden": 512}),
        memory=True,
    ),
    Axis("linear-head", "hidden", "d", (256, 512, 1024, 2048), {"tokens": 1024, "vocab": 32_768}),
)


def run_axis(
    axis: Axis,
    *,
    device: str,
    dtype: str,
    seed: int,
    rounds: int,
    backends: Sequence[str],
    memory: bool,
    synchronize: Call,
    progress: Progress,
) -> list[ScalingRecord]:
    """Judge every backend, then time it and the baseline by rows at each size, interleaved.

    Raises:
        RuntimeError: a call fails in the process in which its memory is measured.
    """
    workload = WORKLOADS[axis.workload]
    title = f"scaling: {axis.workload} over {axis.symbol}"
    sizes = [replace(workload.size, **axis.fixed, **{axis.name: size}) for size in axis.sizes]
    judged = cases(workload, make_inputs(workload, sizes[0], dtype, device, seed), dtype, seed)
    gates: list[tuple[Contestant, Gate]] = []
    for x in chosen(workload, backends):
        if (x.role == "backend" or x.name == BY_ROWS) and x.refuses(device) is None:
            progress(f"{title}: judging {x.name}", 0, 1)
            gates.append((x, judge(x, workload, judged, device)))
    found = [x for x, gate in gates if gate.passed or x.role != "backend"]
    calls: dict[str, Call] = {}
    for i, size in enumerate(sizes):
        inputs = make_inputs(workload, size, dtype, device, seed)
        for x in found:
            calls[f"{x.name} {i}"] = x.prepare(workload, inputs)
    times = interleaved(
        calls,
        rounds=rounds,
        seed=seed,
        synchronize=synchronize,
        progress=lambda done, total: progress(title, done, total),
    )
    del calls, inputs
    records = []
    for done, (x, gate) in enumerate(gates):
        medians = [
            float(np.median(times[f"{x.name} {i}"])) for i in range(len(sizes)) if x in found
        ]
        seen: list[Memory] = []
        if memory and axis.memory and x in found:
            progress(f"{title}: memory of {x.name}", done, len(gates))
            seen = [measure(workload.name, x.name, size, dtype, device, seed) for size in sizes]
        records.append(
            ScalingRecord(
                workload=axis.workload,
                contestant=x.name,
                role=x.role,
                device=device,
                dtype=dtype,
                axis=axis.symbol,
                fixed=dict(axis.fixed),
                sizes=list(axis.sizes),
                seconds=medians,
                exponent=exponent(axis.sizes, medians) if medians else None,
                gate=gate,
                memory=[y.peak for y in seen if y.peak is not None],
                inputs=[y.inputs for y in seen],
            )
        )
    return records
