"""``python -m pdverify.tools.bench.memory TASK``: the peak memory of one call, as JSON.

On Linux the peak is that of the resident set: the kernel's high-water mark (``VmHWM``) is set
back once the inputs exist and a small call has loaded code and started threads, and freed heap is
given back first, so that memory from before cannot be used again unseen.  Where the mark cannot
be set back, the peak is that of the whole process, which hides what is smaller than the making of
the inputs.  On a GPU it is the allocator's own peak.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pdverify.tools.bench.records import Memory
from pdverify.tools.bench.workloads import WORKLOADS, Size

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What the kernel takes for "set the high-water mark back" (`man 5 proc`)."""

HIGH_WATER, WHOLE_PROCESS, ALLOCATOR = "VmHWM, set back", "ru_maxrss", "CUDA allocator"

WARM_UP_TOKENS = 9
"""More than one block of `baselines.ROWS`, so that every path is loaded."""

TIMEOUT = 900.0
"""Seconds that a process may take."""


def _resident(field: str) -> int | None:
    """A field of the process's status in bytes; None where there is none."""
    try:
        text = STATUS.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _set_back() -> int | None:
    """Set the high-water mark back to what is resident; None where that is not allowed."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        return None
    peak, now = _resident("VmHWM"), _resident("VmRSS")
    return now if peak is not None and now is not None and peak <= now + 2**20 else None


def _give_back() -> None:
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def _maximum() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def peak_above(call: Callable[[], object], device: str = "cpu") -> tuple[int, str]:
    """Bytes that `call` needed at its peak above what was there before, and how it was seen."""
    _give_back()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, ALLOCATOR
    now = _set_back()
    before = _maximum() if now is None else now
    _result = call()
    if now is None:
        return _maximum() - before, WHOLE_PROCESS
    return max(0, (_resident("VmHWM") or now) - now), HIGH_WATER


def measure(
    workload: str, contestant: str, size: Size, dtype: str, device: str, seed: int
) -> Memory:
    """Peak memory of a contestant's call on a workload, in a fresh process.

    Raises:
        RuntimeError: the call fails there, or takes too long; the message is its last line.
    """
    task = json.dumps([workload, contestant, asdict(size), dtype, device, seed])
    command = [sys.executable, "-m", __name__, task]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer after {TIMEOUT:g} s") from None
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        raise RuntimeError(lines[-1])
    return Memory(**json.loads(run.stdout.splitlines()[-1]))


def _one_call(
    name: str, contestant: str, size: dict[str, Any], dtype: str, device: str, seed: int
) -> Memory:
    from pdverify.tools.bench.contestants import contestants
    from pdverify.tools.bench.inputs import make_inputs

    workload, whole = WORKLOADS[name], Size(**size)
    prepare = contestants()[contestant].prepare
    small = replace(whole, tokens=min(whole.tokens, WARM_UP_TOKENS))
    prepare(workload, make_inputs(workload, small, dtype, device, seed))()
    inputs = make_inputs(workload, whole, dtype, device, seed)
    read = sum(x.nbytes for x in inputs.read(workload))
    peak, method = peak_above(prepare(workload, inputs), device)
    # a gradient at the logits is a result, as large as they are
    return Memory(max(0, peak - read) if workload.kind == "loss" else peak, read, method)


if __name__ == "__main__":
    print(json.dumps(asdict(_one_call(*json.loads(sys.argv[1])))))
