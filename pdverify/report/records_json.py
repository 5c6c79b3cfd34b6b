"""Records as JSON: strict, numbers to six significant digits, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pdverify.cases.recordings import replace_file
from pdverify.report.json_report import check_writable

Record = TypeVar("Record")


def plain(x: Any) -> Any:
    """A record in the types of JSON, numbers rounded to six significant digits.

    Raises:
        ValueError: a number that is NaN or infinite.
    """
    if is_dataclass(x) and not isinstance(x, type):
        return {field.name: plain(getattr(x, field.name)) for field in fields(x)}
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    if isinstance(x, float):
        if not math.isfinite(x):
            raise ValueError(f"{x} in a record")
        return float(f"{x:.6g}")
    return x


def from_plain(kind: type[Record], x: Any, what: str) -> Record:
    """The record of class `kind`, called `what` in errors, that `plain` turned into `x`.

    Raises:
        ValueError: `x` has another shape, or another schema version than the class.
    """
    version = next(f.default for f in fields(kind) if f.name == "schema_version")  # type: ignore[arg-type]
    if not isinstance(x, dict) or x.get("schema_version") != version:
        raise ValueError(f"not a {what} of schema version {version}")
    try:
        record: Record = _read(kind, x)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {what}: {error!r}") from error
    return record


def _read(kind: Any, x: Any) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(
            **{field.name: _read(hints[field.name], x[field.name]) for field in fields(kind)}
        )
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        return [_read(arguments[0], value) for value in x]
    if origin is tuple:
        kinds = [arguments[0]] * len(x) if arguments[-1] is ... else arguments
        return tuple(_read(kind, value) for kind, value in zip(kinds, x, strict=True))
    if origin is dict:
        return {key: _read(arguments[1], value) for key, value in x.items()}
    if origin is types.UnionType:
        return None if x is None else _read(arguments[0], x)
    return float(x) if kind is float else x


def rounded(report: Record, what: str) -> Record:
    """A record with no more digits than its JSON holds."""
    return from_plain(type(report), plain(report), what)


def as_json(report: Any, indent: int | None = 1) -> bytes:
    """The bytes of a file."""
    text = json.dumps(plain(report), allow_nan=False, indent=indent, ensure_ascii=False)
    return f"{text}\n".encode()


def write_record(report: Any, path: str | os.PathLike[str]) -> None:
    """Write `report`; a file is replaced.

    Raises:
        OSError: as `json_report.check_writable`, or when the disk is full.
    """
    replace_file(check_writable(path), as_json(report))


def read_record(kind: type[Record], path: str | os.PathLike[str], what: str) -> Record:
    """The record that `write_record` wrote.

    Raises:
        OSError: no such file, or not a record of this class and schema version.
    """
    try:
        return from_plain(kind, json.loads(Path(path).read_text()), what)
    except ValueError as error:
        raise OSError(f"{path}: {error}") from error
