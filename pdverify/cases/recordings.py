"""Recordings: batches of a real model's tokens in one `.safetensors` file.

A file holds one or more named batches.  With `T` the number of valid tokens of a batch, its
tensors are named `NAME/FIELD`:

======================  ============  ================================================
field                   shape         dtype
======================  ============  ================================================
`tokens`                `[B, L]`      int64
`advantages`            `[B, L]`      float32
`response_mask`         `[B, L]`      bool
`logits`                `[T, V]`      the format the logits were stored in (bf16, ...)
`behavior_logits`       `[T, V]`      the same format; full view only
`logprobs`              `[B, L]`      float32, or absent
`behavior_logprobs`     `[B, L]`      float32, or absent
`topk_ids`              `[B, L, K]`   int64, or absent
`topk_logprobs`         `[B, L, K]`   float32, or absent
======================  ============  ================================================

Logits are kept for valid tokens only, in the order of `Batch.rows`; reading puts zeros on the
padding.  bf16 and fp16 logits are expanded to float32, which is exact.  The header's metadata has
three entries: `schema_version`, `batches` (JSON: name -> `{"vocab_size": V}`) and `provenance`
(JSON, free: the model, its hash, versions, seed, how tokens were selected).

A file is checked before it is believed: the container by `safetensors` (which holds no code and
is never unpickled), names, dtypes and shapes here before any tensor is loaded, values by `Batch`.
Every complaint is an `InputError` that names the file, the tensor, the place and the value.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pdverify.batch import Batch, InputError
from pdverify.formats import FORMATS

SCHEMA_VERSION = "1"

MAX_BYTES = 2**33
"""Largest size of a file, and of the logits it expands to, that is believed (8 GiB)."""

_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_STORED_FORMAT = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_LOGITS = ("logits", "behavior_logits")
_REQUIRED = ("tokens", "advantages", "response_mask")
_KIND = {
    "tokens": ("I64", "[B, L]"),
    "advantages": ("F32", "[B, L]"),
    "response_mask": ("BOOL", "[B, L]"),
    "logprobs": ("F32", "[B, L]"),
    "behavior_logprobs": ("F32", "[B, L]"),
    "topk_ids": ("I64", "[B, L, K]"),
    "topk_logprobs": ("F32", "[B, L, K]"),
}


def default_recording() -> Path:
    """Path of the recording that ships with the package: SmolLM2-135M, V = 49,152."""
    return Path(__file__).with_name("data") / "smollm2.safetensors"


def load_recording(path: str | os.PathLike[str]) -> dict[str, Batch]:
    """The named batches of a recording, in the file's order.

    Args:
        path: a `.safetensors` file in the layout of this module.

    Raises:
        InputError: the file is missing, truncated, not a recording, of an unknown schema version,
            or holds something that is no batch.  The message names the file, the tensor, the
            place and the value.
    """
    try:
        with _open(path) as file:
            return _read(_Reader(Path(path), file))
    except SafetensorError as error:
        raise _unreadable(path, error) from error


def load_provenance(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Where a recording came from: the `provenance` entry of its header.

    Raises:
        InputError: as `load_recording`.
    """
    try:
        with _open(path) as file:
            return _Reader(Path(path), file).metadata("provenance")
    except SafetensorError as error:
        raise _unreadable(path, error) from error


def write_recording(
    path: str | os.PathLike[str],
    batches: Mapping[str, Batch],
    provenance: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write named batches to `path`, whole or not at all.

    Logits are stored in each batch's own `dtype`, without loss.

    Args:
        path: the file; an existing one is refused unless `overwrite`.
        batches: name -> batch; names are lower-case letters, digits, `.`, `+` and `-`.
        provenance: anything JSON can hold.
        overwrite: replace an existing file.

    Raises:
        InputError: a bad name, no batch, logits that `dtype` cannot represent, log-probs that are
            not float32, or a file that is there already.
    """
    target = check_target(path, overwrite=overwrite)
    if not batches:
        raise InputError("batches", None, 0, "nothing to record")
    tensors: dict[str, NDArray[Any]] = {}
    for name, batch in batches.items():
        if not _NAME.fullmatch(name):
            raise InputError("batches", None, name, f"a batch name matches {_NAME.pattern}")
        for field, x in _pack(name, batch).items():
            tensors[f"{name}/{field}"] = x
    sizes = {name: {"vocab_size": batch.vocab_size} for name, batch in batches.items()}
    content = save(
        tensors,
        metadata={
            "schema_version": SCHEMA_VERSION,
            "batches": json.dumps(sizes),
            "provenance": json.dumps(dict(provenance), allow_nan=False),
        },
    )
    replace_file(target, content)


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """`path`, if a recording may be written there; worth asking before a long run.

    Raises:
        InputError: the file exists and `overwrite` is not set, or its folder does not exist.
    """
    target = Path(path)
    if target.is_dir() or (target.exists() and not overwrite):
        why = "is a folder" if target.is_dir() else "the file exists and overwrite is not set"
        raise InputError("path", None, str(target), why)
    if not target.parent.is_dir():
        raise InputError("path", None, str(target), "its folder does not exist")
    return target


def replace_file(target: Path, content: bytes) -> None:
    """Write `content` to `target`, whole or not at all; an existing file is replaced.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _pack(name: str, batch: Batch) -> dict[str, NDArray[Any]]:
    fields: dict[str, NDArray[Any]] = {
        "tokens": batch.tokens.astype(np.int64),
        "advantages": batch.advantages.astype(np.float32),
        "response_mask": batch.response_mask,
    }
    kind = FORMATS[batch.dtype].dtype
    for field in _LOGITS:
        logits = getattr(batch, field)
        if logits is not None:
            packed = logits[batch.response_mask]
            fields[field] = packed.astype(kind)
            _require_exact(f"{name}/{field}", packed, fields[field], batch.dtype)
    for field in ("logprobs", "behavior_logprobs", "topk_ids", "topk_logprobs"):
        x = getattr(batch, field)
        if x is not None:
            fields[field] = x.astype(np.int64 if field == "topk_ids" else np.float32)
            valid = batch.response_mask
            _require_exact(f"{name}/{field}", x[valid], fields[field][valid], "fp32")
    return {field: np.ascontiguousarray(x) for field, x in fields.items()}


def _require_exact(argument: str, given: NDArray[Any], stored: NDArray[Any], dtype: str) -> None:
    changed = given.astype(np.float64) != stored.astype(np.float64)
    if changed.any():
        place = tuple(int(i) for i in np.argwhere(changed)[0])
        raise InputError(argument, place, float(given[place]), f"not representable in {dtype}")


def _unreadable(path: str | os.PathLike[str], error: Exception) -> InputError:
    return InputError("recording", None, str(path), f"not a whole safetensors file: {error}")


def _open(path: str | os.PathLike[str]) -> Any:
    file = Path(path)
    if not file.is_file():
        raise InputError("recording", None, str(path), "no such file")
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise InputError(f"{path}.size", None, size, f"a recording has at most {MAX_BYTES} bytes")
    try:
        return safe_open(os.fspath(file), framework="np")
    except OSError as error:
        raise InputError("recording", None, str(path), f"unreadable: {error}") from error


class _Reader:
    """A recording being read: every access is checked, every complaint names the file."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path = path
        self.file = file
        self.names = list(file.keys())
        self.header: Mapping[str, str] = file.metadata() or {}
        version = self.header.get("schema_version")
        if version != SCHEMA_VERSION:
            raise self.error("schema_version", version, f"known: {SCHEMA_VERSION}")

    def error(self, place: str, value: object, why: str) -> InputError:
        return InputError(f"{self.path}: {place}", None, value, why)

    def metadata(self, key: str) -> dict[str, Any]:
        text = self.header.get(key)
        try:
            value = json.loads(text or "")
        except (ValueError, RecursionError):
            raise self.error(key, _short(text), "this header entry is a JSON object") from None
        if not isinstance(value, dict):
            raise self.error(key, _short(text), "this header entry is a JSON object")
        return value

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape of a tensor, without loading it."""
        view = self.file.get_slice(name)
        return str(view.get_dtype()), tuple(view.get_shape())

    def load(self, name: str) -> NDArray[Any]:
        return np.asarray(self.file.get_tensor(name))


def _short(text: str | None) -> str:
    return "missing" if text is None else repr(text[:60])


def _read(reader: _Reader) -> dict[str, Batch]:
    sizes = reader.metadata("batches")
    if not sizes:
        raise reader.error("batches", 0, "the file holds no batch")
    stray = [n for n in reader.names if n.rpartition("/")[0] not in sizes]
    if stray:
        raise reader.error("tensor", stray[0], "belongs to no batch of this file")
    return {name: _read_batch(reader, name, entry) for name, entry in sizes.items()}


def _read_batch(reader: _Reader, name: str, entry: object) -> Batch:
    if not _NAME.fullmatch(name):
        raise reader.error("batches", repr(name[:60]), f"a batch name matches {_NAME.pattern}")
    size = entry.get("vocab_size") if isinstance(entry, dict) else None
    if type(size) is not int or not 2 <= size < 2**31:
        raise reader.error(f"{name}/vocab_size", size, "an integer in [2, 2**31)")
    fields = [n.rpartition("/")[2] for n in reader.names if n.rpartition("/")[0] == name]
    dtype = _check_layout(reader, name, size, fields)
    raw: dict[str, Any] = {field: reader.load(f"{name}/{field}") for field in fields}
    mask = raw["response_mask"]
    for field in _LOGITS:
        if field in raw:
            raw[field] = _expand(reader, f"{name}/{field}", raw[field], mask)
    try:
        return Batch(vocab_size=size, dtype=dtype, **raw)
    except InputError as error:
        why = str(error).partition(": ")[2]
        argument = f"{reader.path}: {name}/{error.argument}"
        raise InputError(argument, error.place, error.value, why) from error


def _check_layout(reader: _Reader, name: str, size: int, fields: list[str]) -> str:
    """Check names, dtypes, ranks and sizes from the header alone; return the logits' format."""
    for field in _REQUIRED:
        if field not in fields:
            raise reader.error(f"{name}/{field}", "missing", "every batch has this tensor")
    stored_as = {f: reader.describe(f"{name}/{f}")[0] for f in _LOGITS if f in fields}
    for field, stored in stored_as.items():
        if stored not in _STORED_FORMAT:
            known = ", ".join(_STORED_FORMAT)
            raise reader.error(f"{name}/{field}.dtype", stored, f"logits are one of {known}")
        if stored != stored_as.get("logits", stored):
            why = f"logits has {stored_as['logits']}"
            raise reader.error(f"{name}/{field}.dtype", stored, why)
    lead = reader.describe(f"{name}/tokens")[1]
    for field in fields:
        where = f"{name}/{field}"
        stored, shape = reader.describe(where)
        if field in _LOGITS:
            if len(shape) != 2 or shape[1] != size:
                raise reader.error(f"{where}.shape", shape, f"expected (T, {size})")
            expanded = math.prod(lead) * size * (8 if stored == "F64" else 4)
            if expanded > MAX_BYTES:
                raise reader.error(
                    f"{where}.shape", shape, f"expands to {expanded} bytes over {lead} positions"
                )
        elif field in _KIND:
            kind, expected = _KIND[field]
            if stored != kind:
                raise reader.error(f"{where}.dtype", stored, f"expected {kind}")
            if len(shape) != expected.count(",") + 1 or shape[:2] != lead:
                raise reader.error(
                    f"{where}.shape", shape, f"expected {expected} with [B, L] = {list(lead)}"
                )
        else:
            raise reader.error("tensor", where, f"known fields: {', '.join((*_KIND, *_LOGITS))}")
    return next((_STORED_FORMAT[stored] for stored in stored_as.values()), "fp32")


def _expand(
    reader: _Reader, where: str, packed: NDArray[Any], mask: NDArray[np.bool_]
) -> NDArray[Any]:
    valid = int(mask.sum())
    if packed.shape[0] != valid:
        raise reader.error(
            f"{where}.shape", packed.shape, f"response_mask has {valid} valid tokens"
        )
    wide = np.float64 if packed.dtype == np.float64 else np.float32
    full = np.zeros((*mask.shape, packed.shape[1]), dtype=wide)
    full[mask] = packed.astype(wide)
    return full
