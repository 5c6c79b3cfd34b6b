"""Logits that do not fit into memory: read through a memory map, a block of rows at a time.

The file is sparse, so that it costs no disk: one row in `EVERY` is written, the others are holes,
which read as zeros (a flat policy), and take as long to compute.  The mask of every row is
compared with that of the same row in memory, the written rows are held to the oracle.  The map's
pages are dropped after each block; until then they count as memory.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdverify.conformance.truth import Progress
from pdverify.tools.bench.contestants import Contestant, contestants
from pdverify.tools.bench.gate import Case, judge
from pdverify.tools.bench.inputs import Inputs, as_batch, make_inputs
from pdverify.tools.bench.memory import peak_above
from pdverify.tools.bench.records import StreamRecord
from pdverify.tools.bench.workloads import WORKLOADS, Size, Workload

WIDTH = 2
"""Bytes of a bf16 logit."""

DISTINCT = 15
"""Different rows; token t has the tokens and top-K list of row `t % DISTINCT`."""

EVERY = 64
"""One row in so many is written."""


class StreamUnavailable(OSError):
    """The file cannot be made; the message says why."""


def stream(
    backend: str,
    *,
    tokens: int,
    vocab: int,
    block: int,
    progress: Progress,
    folder: str | None = None,
    seed: int = 0,
) -> StreamRecord:
    """Masks of a bf16 top-K view of `[tokens, vocab]` logits in a file, `block` rows at a time.

    Args:
        folder: where the file is made (and removed); None: the system's temporary folder.

    Raises:
        StreamUnavailable: not enough space, or the folder cannot be written.
    """
    workload, contestant = WORKLOADS["topk-kl"], contestants()[backend]
    inputs = make_inputs(workload, Size(DISTINCT, vocab), "bf16", "cpu", seed)
    row, size = vocab * WIDTH, tokens * vocab * WIDTH
    kept: list[Tensor] = []
    gate = judge(contestant, workload, [Case("written rows", as_batch(inputs, "bf16"))], "cpu")
    if not gate.passed:
        return StreamRecord(backend, tokens, vocab, block, size, 0, None, None, "", gate)
    with _file(folder, size, -(-tokens // EVERY) * row) as path:
        with path.open("r+b") as file:
            for t in range(0, tokens, EVERY):
                file.seek(t * row)
                file.write(inputs.logits[0, t % DISTINCT].view(torch.int16).numpy().tobytes())
        stored = path.stat().st_blocks * 512
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:

            def read(count: int, say: Callable[[int], None]) -> None:
                kept.clear()
                for start in range(0, count, block):
                    rows = slice(start, min(start + block, count))
                    kept.append(_mask(mapped, contestant, workload, inputs, rows))
                    say(rows.stop)

            read(min(tokens, block), lambda _: None)
            started = time.perf_counter()
            peak, method = peak_above(
                lambda: read(tokens, lambda done: progress(f"stream: {backend}", done, tokens))
            )
            seconds = time.perf_counter() - started
    holes = replace(inputs, logits=torch.zeros_like(inputs.logits))
    written, flat = (contestant.prepare(workload, x)()["keep"][0] for x in (inputs, holes))
    places = torch.arange(tokens)
    own = places % DISTINCT
    want = torch.where(places % EVERY == 0, written[own], flat[own])
    differ = int((torch.cat(kept) != want).sum())
    if differ:
        message = "masks differ between the file and the same rows in memory"
        gate = replace(gate, wrong=gate.wrong + differ, message=message)
    return StreamRecord(
        contestant=backend,
        tokens=tokens,
        vocab=vocab,
        block=block,
        file_bytes=size,
        stored_bytes=stored,
        seconds=seconds if gate.passed else None,
        peak=peak,
        method=method,
        gate=gate,
    )


@contextmanager
def _file(folder: str | None, size: int, stored: int) -> Iterator[Path]:
    """A sparse file of `size` bytes that is gone afterwards."""
    where = folder or tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="pdverify-") as made:
            free = shutil.disk_usage(made).free
            if free < stored:
                raise StreamUnavailable(f"{where}: {stored} bytes are needed, {free} are free")
            path = Path(made) / "logits"
            path.touch()
            os.truncate(path, size)
            yield path
    except StreamUnavailable:
        raise
    except OSError as error:
        message = f"{where}: no file of {size} bytes ({error.strerror})"
        raise StreamUnavailable(message) from error


def _mask(
    mapped: mmap.mmap, contestant: Contestant, workload: Workload, listed: Inputs, rows: slice
) -> Tensor:
    """Keep mask of some rows of the file, whose pages are dropped."""
    vocab = listed.logits.shape[-1]
    start, count = rows.start * vocab * WIDTH, (rows.stop - rows.start) * vocab
    logits = torch.frombuffer(mapped, dtype=torch.bfloat16, count=count, offset=start)
    given = replace(
        listed.rows(torch.arange(rows.start, rows.stop) % DISTINCT),
        logits=logits.view(1, -1, vocab),
    )
    keep: Any = contestant.prepare(workload, given)()["keep"][0]
    del logits, given
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, first, start + count * WIDTH - first)
    return torch.as_tensor(keep)
