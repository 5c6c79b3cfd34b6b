"""Logits in a file: right masks, little memory, nothing left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdverify.tools.bench import contestants
from pdverify.tools.bench import stream as streaming
from pdverify.tools.bench.memory import WHOLE_PROCESS
from pdverify.tools.bench.stream import StreamUnavailable, stream

SIZE: dict[str, Any] = {
    "tokens": 4000,
    "vocab": 5003,
    "block": 24,
    "progress": lambda *_: None,
}


@pytest.mark.parametrize("backend", ["torch-eager", "torch-chunked"])
def test_stream_is_right_small_and_leaves_nothing(backend: str, tmp_path: Path) -> None:
    record = stream(backend, folder=str(tmp_path), **SIZE)
    assert record.gate.passed, record.gate.message
    assert record.gate.rows == streaming.DISTINCT
    assert record.file_bytes == 2 * 4000 * 5003
    assert record.stored_bytes < record.file_bytes
    assert record.block_bytes == 2 * 24 * 5003
    assert record.seconds is not None
    if record.method != WHOLE_PROCESS:
        # a block and its fp32 and fp64 temporaries, not the file
        assert record.peak < record.file_bytes / 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [0, 1, 3999], ids=["a written row", "a hole", "the last row"])
def test_a_wrong_mask_is_found(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = contestants.contestants()["torch-eager"]
    seen: list[int] = []

    def prepare(workload: Any, inputs: Any) -> Any:
        call = right.prepare(workload, inputs)
        own = place - sum(seen)
        count = inputs.tokens.shape[1]
        if count not in (SIZE["block"], 4000 % SIZE["block"]):
            return call
        # the first block is read twice: the pass itself begins anew
        seen.append(count if len(seen) else 0)

        def wrong() -> Any:
            keep = call()["keep"].clone()
            if len(seen) > 1 and 0 <= own < count:
                keep[0, own] ^= True
            return {"keep": keep}

        return wrong

    monkeypatch.setattr(
        streaming, "contestants", lambda: {"torch-eager": replace(right, prepare=prepare)}
    )
    record = stream("torch-eager", folder=str(tmp_path), **SIZE)
    assert record.gate.wrong == 1
    assert record.seconds is None
    assert record.gate.message == "masks differ between the file and the same rows in memory"


def test_a_full_disk_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(StreamUnavailable, match="10 are free"):
        stream("torch-eager", folder=str(tmp_path), **SIZE)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StreamUnavailable, match="no file of 40024000 bytes"):
        stream("torch-eager", folder=str(tmp_path / "none"), **SIZE)
