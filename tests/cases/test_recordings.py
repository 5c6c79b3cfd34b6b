"""Reading and writing recordings: exact round trips, and a clear complaint for every bad file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pdverify.batch import Batch, InputError
from pdverify.cases import recordings
from pdverify.cases.recordings import (
    default_recording,
    load_provenance,
    load_recording,
    write_recording,
)

V = 11


def make_batch(dtype: str = "bf16", *, full: bool = True, seed: int = 0) -> Batch:
    """`[2, 3]` with one padded position, which is poisoned with NaN."""
    rng = np.random.default_rng(seed)
    mask = np.array([[True, True, True], [True, True, False]])
    logits = np.round(4 * rng.standard_normal((2, 2, 3, V))) / 4
    logits[:, ~mask] = np.nan
    if full:
        logits[1, 0, 0, 7] = -np.inf
    behavior = logits[1].astype(np.float64)
    logprobs = behavior - np.log(np.exp(behavior).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1)[..., :4].astype(np.int64)
    tokens = np.array([[0, 1, 2], [3, 4, 0]])
    values = logprobs.astype(np.float32)
    return Batch(
        tokens=tokens,
        advantages=np.where(mask, rng.standard_normal((2, 3)), 0).astype(np.float32),
        response_mask=mask,
        vocab_size=V,
        logits=logits[0].astype(np.float32),
        behavior_logits=logits[1].astype(np.float32) if full else None,
        behavior_logprobs=np.take_along_axis(values, tokens[..., None], -1)[..., 0],
        topk_ids=ids,
        topk_logprobs=np.take_along_axis(values, ids, -1),
        dtype=dtype,
    )


def same_rows(a: Batch, b: Batch) -> None:
    for name, value in vars(a.rows()).items():
        other = getattr(b.rows(), name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype, name
            np.testing.assert_array_equal(value, other, err_msg=name)
        else:
            assert value == other, name


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_round_trip_is_exact(tmp_path: Path, dtype: str) -> None:
    written = {"stale+fp8": make_batch(dtype), "llama.cpp": make_batch(dtype, full=False, seed=1)}
    path = tmp_path / "r.safetensors"
    write_recording(path, written, {"seed": 3, "model": {"name": "toy"}})
    read = load_recording(path)
    assert list(read) == list(written)
    for name, batch in written.items():
        same_rows(batch, read[name])
        assert read[name].view == batch.view
        assert (read[name].response_mask == batch.response_mask).all()
    assert load_provenance(path) == {"seed": 3, "model": {"name": "toy"}}


def test_logits_stay_in_their_format_and_padding_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    write_recording(path, {"a": make_batch("bf16")}, {})
    with recordings.safe_open(str(path), framework="np") as file:
        assert file.get_slice("a/logits").get_dtype() == "BF16"
        assert file.get_slice("a/logits").get_shape() == [5, V]


def test_sampled_view_round_trip(tmp_path: Path) -> None:
    tokens = np.array([[1, 2]])
    batch = Batch(
        tokens=tokens,
        advantages=np.ones((1, 2), np.float32),
        response_mask=np.ones((1, 2), bool),
        vocab_size=7,
        logprobs=np.array([[-1.5, -0.25]], np.float32),
        behavior_logprobs=np.array([[-1.25, -0.5]], np.float32),
    )
    write_recording(tmp_path / "r", {"a": batch}, {})
    same_rows(batch, load_recording(tmp_path / "r")["a"])


def test_writing_refuses_an_existing_file_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(InputError, match="exists"):
        write_recording(path, {"a": make_batch()}, {})
    assert path.read_bytes() == b"precious"
    write_recording(path, {"a": make_batch()}, {}, overwrite=True)
    assert list(load_recording(path)) == ["a"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(recordings.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_recording(tmp_path / "r.safetensors", {"a": make_batch()}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("batches", "provenance", "match"),
    [
        ({}, {}, "nothing to record"),
        ({"no/slash": make_batch()}, {}, "no/slash"),
        ({"Upper": make_batch()}, {}, "Upper"),
    ],
)
def test_writing_rejects(
    tmp_path: Path, batches: dict[str, Batch], provenance: dict[str, Any], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        write_recording(tmp_path / "r", batches, provenance)
    assert list(tmp_path.iterdir()) == []


def test_writing_rejects_logits_that_the_format_cannot_hold(tmp_path: Path) -> None:
    batch = make_batch("bf16")
    assert batch.logits is not None
    batch.logits[0, 1, 2] = 1 + 2.0**-9
    with pytest.raises(InputError, match=r"a/logits\[1, 2\] = 1.00195312: not representable"):
        write_recording(tmp_path / "r", {"a": batch}, {})


def test_writing_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder does not exist"):
        write_recording(tmp_path / "no" / "r", {"a": make_batch()}, {})


Tensors = dict[str, np.ndarray]
Header = dict[str, str]


def parts(**changes: object) -> tuple[Tensors, Header]:
    batch = make_batch()
    mask = batch.response_mask
    assert batch.logits is not None
    assert batch.behavior_logits is not None
    tensors: Tensors = {
        "a/tokens": batch.tokens,
        "a/advantages": batch.advantages,
        "a/response_mask": mask,
        "a/logits": batch.logits[mask].astype(ml_dtypes.bfloat16),
        "a/behavior_logits": batch.behavior_logits[mask].astype(ml_dtypes.bfloat16),
        "a/behavior_logprobs": batch.behavior_logprobs,
        "a/topk_ids": batch.topk_ids,
        "a/topk_logprobs": batch.topk_logprobs,
    }
    header = {
        "schema_version": "1",
        "batches": json.dumps({"a": {"vocab_size": V}}),
        "provenance": "{}",
    }
    return tensors, header


def put(name: str, value: object) -> Callable[[Tensors, Header], None]:
    def change(tensors: Tensors, header: Header) -> None:
        table: dict[str, Any] = tensors if "/" in name else header
        if value is None:
            del table[name]
        else:
            table[name] = value(table[name]) if callable(value) else value

    return change


def poke(name: str, place: tuple[int, ...], value: object) -> Callable[[Tensors, Header], None]:
    def change(tensors: Tensors, header: Header) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][place] = value

    return change


BAD = {
    "unknown schema": (put("schema_version", "2"), "schema_version = 2: known: 1"),
    "no schema": (put("schema_version", None), "schema_version = None: known: 1"),
    "no batches": (put("batches", "{}"), "batches = 0: the file holds no batch"),
    "batches not JSON": (put("batches", "{"), "batches = '{': this header entry"),
    "batches a list": (put("batches", "[1]"), "this header entry is a JSON object"),
    "batches missing": (put("batches", None), "batches = missing"),
    "batches too deep": (put("batches", "[" * 100_000), "this header entry is a JSON object"),
    "name": (put("batches", json.dumps({"a": {"vocab_size": V}, "../b": {}})), "batch name"),
    "vocab_size float": (put("batches", '{"a": {"vocab_size": 11.0}}'), "a/vocab_size = 11"),
    "vocab_size bool": (put("batches", '{"a": {"vocab_size": true}}'), "a/vocab_size = True"),
    "vocab_size huge": (put("batches", '{"a": {"vocab_size": 1e99}}'), "a/vocab_size"),
    "vocab_size missing": (put("batches", '{"a": 3}'), "a/vocab_size = None"),
    "wrong vocab_size": (put("batches", '{"a": {"vocab_size": 12}}'), r"a/\w+.shape = \(5, 11\)"),
    "stray batch": (put("b/tokens", np.zeros((1, 1), np.int64)), "tensor = b/tokens: belongs"),
    "stray field": (put("a/pickle", np.zeros(3, np.uint8)), "tensor = a/pickle: known fields"),
    "no tokens": (put("a/tokens", None), "a/tokens = missing"),
    "no mask": (put("a/response_mask", None), "a/response_mask = missing"),
    "no logits": (put("a/logits", None), "a/logits = None: the training policy is unknown"),
    "tokens int32": (put("a/tokens", lambda x: x.astype(np.int32)), "a/tokens.dtype = I32"),
    "mask uint8": (put("a/response_mask", lambda x: x.astype(np.uint8)), "mask.dtype = U8"),
    "logits int": (put("a/logits", lambda x: x.astype(np.int16)), "a/logits.dtype = I16"),
    "two formats": (
        put("a/logits", lambda x: x.astype(np.float32)),
        r"behavior_logits.dtype = BF16: logits has F32",
    ),
    "logits too few": (put("a/logits", lambda x: x[:4]), r"a/logits.shape = \(4, 11\)"),
    "logits [B, L, V]": (put("a/logits", lambda x: x[None]), r"a/logits.shape = \(1, 5, 11\)"),
    "advantages short": (put("a/advantages", lambda x: x[:1]), r"a/advantages.shape = \(1, 3\)"),
    "topk without values": (put("a/topk_logprobs", None), "topk_ids and topk_logprobs come"),
    "nothing valid": (
        put("a/response_mask", lambda x: np.zeros_like(x)),
        r"shape = \(5, 11\): response_mask has 0 valid tokens",
    ),
    "NaN logit": (poke("a/logits", (3, 2), np.nan), r"a/logits\[1, 0, 2\] = nan: not a logit"),
    "inf logit": (poke("a/behavior_logits", (0, 5), np.inf), r"a/behavior_logits\[0, 0, 5\] = inf"),
    "token range": (poke("a/tokens", (1, 1), V), r"a/tokens\[1, 1\] = 11: token ids lie in"),
    "token negative": (poke("a/tokens", (0, 0), -1), r"a/tokens\[0, 0\] = -1"),
    "positive log-prob": (
        poke("a/behavior_logprobs", (0, 1), 0.5),
        r"a/behavior_logprobs\[0, 1\] = 0.5: a log-prob is <= 0",
    ),
    "id twice": (
        put("a/topk_ids", lambda x: np.repeat(x[..., :1], 4, axis=-1)),
        r"a/topk_ids\[0, 0, \d\] = \d+: the id is listed twice",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_rejected_by_name(tmp_path: Path, case: str) -> None:
    change, match = BAD[case]
    tensors, header = parts()
    change(tensors, header)
    path = tmp_path / "bad.safetensors"
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path, header)
    with pytest.raises(InputError, match=match) as caught:
        load_recording(path)
    assert str(path) in str(caught.value)


def test_the_parts_are_good_when_left_alone(tmp_path: Path) -> None:
    tensors, header = parts()
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / "r", header)
    same_rows(make_batch(), load_recording(tmp_path / "r")["a"])


def test_expansion_is_bounded_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2**30
    mask = np.zeros((40, 50), bool)
    tensors = {
        "a/tokens": np.zeros((40, 50), np.int64),
        "a/advantages": np.zeros((40, 50), np.float32),
        "a/response_mask": mask,
        "a/logits": np.zeros((0, size), np.float32),
    }
    header = {"schema_version": "1", "batches": json.dumps({"a": {"vocab_size": size}})}
    save_file(tensors, tmp_path / "bomb", header)
    monkeypatch.setattr(recordings._Reader, "load", lambda *_: pytest.fail("loaded a tensor"))
    with pytest.raises(InputError, match="expands to 8589934592000 bytes"):
        load_recording(tmp_path / "bomb")


def test_oversized_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recording(tmp_path / "r", {"a": make_batch()}, {})
    monkeypatch.setattr(recordings, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="at most 100 bytes"):
        load_recording(tmp_path / "r")


@pytest.mark.parametrize("read", [load_recording, load_provenance])
def test_every_truncation_is_an_input_error(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "r"
    write_recording(path, {"a": make_batch()}, {})
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(InputError) as caught:
            read(path)
        assert str(path) in str(caught.value)


def test_flipped_header_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write_recording(path, {"a": make_batch()}, {})
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)
    for place in rng.integers(0, header, 400):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):
            load_recording(path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04", b"\xff" * 64])
def test_other_kinds_of_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(InputError, match="not a whole safetensors file"):
        load_recording(tmp_path / "r")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="no such file"):
            load_recording(path)


@pytest.fixture(scope="module")
def batches() -> dict[str, Batch]:
    return load_recording(default_recording())


class TestDefaultRecording:
    """The recording that ships: real tokens for those who have no model."""

    def test_size(self) -> None:
        assert default_recording().stat().st_size <= 4_000_000

    def test_content(self, batches: dict[str, Batch]) -> None:
        full = {name: batch for name, batch in batches.items() if batch.view == "full"}
        assert sum(int(b.response_mask.sum()) for b in full.values()) >= 16
        assert len(full) >= 4
        assert batches["llama.cpp"].view == "topk"
        assert batches["llama.cpp"].response_mask.sum() >= 7
        for batch in batches.values():
            assert (batch.vocab_size, batch.dtype) == (49_152, "bf16")
        assert any(not b.response_mask.all() for b in batches.values())

    def test_hard_tokens_are_there(self, batches: dict[str, Batch]) -> None:
        outside = [(b.rows().topk_ids == b.rows().tokens[:, None]).any(1) for b in batches.values()]
        assert sum(int((~x).sum()) for x in outside) >= 5
        signs = np.concatenate([np.sign(b.rows().advantages) for b in batches.values()])
        assert {-1.0, 1.0} <= set(signs)
        top_p = batches["top-p"].rows()
        assert np.isneginf(top_p.behavior_logits).any()

    def test_stored_logprobs_are_the_log_softmax_of_the_stored_logits(
        self, batches: dict[str, Batch]
    ) -> None:
        for batch in batches.values():
            rows = batch.rows()
            if rows.behavior_logits is None:
                continue
            z = rows.behavior_logits.astype(np.longdouble)
            z = z - z.max(axis=1, keepdims=True)
            logprobs = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
            want = np.take_along_axis(logprobs, rows.topk_ids, axis=1)
            stored = rows.topk_logprobs
            finite = np.isfinite(stored)
            assert (np.isneginf(want) == ~finite).all()
            assert (np.abs(stored - want)[finite] <= np.spacing(np.abs(stored[finite]))).all()
            own = np.take_along_axis(logprobs, rows.tokens[:, None], axis=1)[:, 0]
            assert (
                np.abs(rows.behavior_logprobs - own) <= np.spacing(np.abs(own.astype("f4")))
            ).all()

    def test_lists_are_the_k_best_by_value_then_lowest_id(self, batches: dict[str, Batch]) -> None:
        for batch in batches.values():
            rows = batch.rows()
            if rows.behavior_logits is None:
                continue
            for z, ids in zip(rows.behavior_logits, rows.topk_ids, strict=True):
                best = sorted(range(len(z)), key=lambda i, z=z: (-z[i], i))[: len(ids)]
                assert list(ids) == best

    def test_provenance_says_where_every_token_is_from(self, batches: dict[str, Batch]) -> None:
        origin = load_provenance(default_recording())
        assert len(origin["model"]["sha256"]) == 64
        assert origin["versions"]["torch"]
        assert "largest divergence" in origin["selection"]
        for name, batch in batches.items():
            entry = origin["batches"][name]
            assert entry["mismatch"]
            assert len(entry["tokens"]) == batch.response_mask.sum()
        assert "/" + "work" not in json.dumps(origin)
