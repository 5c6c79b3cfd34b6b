"""A folder of vectors: its files, byte for byte, and what differs from them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from pdverify.batch import InputError
from pdverify.cases.recordings import replace_file
from pdverify.tools.vectors.flags import FLAGS
from pdverify.tools.vectors.groups import groups
from pdverify.tools.vectors.inputs import LARGE_FILE, arrays_of, input_json, inputs

VERSION = "v1"
STATIC = Path(__file__).with_name("static")
STATIC_FILES = ("README.md", "read_vectors.py", "schema.json")
INPUTS_FILE = "inputs.json"


def write_vectors(folder: str | Path, *, overwrite: bool = False) -> list[Path]:
    """Write the vectors to `folder`, the reader and the schema beside them.

    A new folder appears whole or not at all; in an existing one each file is replaced at once.

    Args:
        folder: where the files go; its parent must exist.
        overwrite: replace files that are there already.

    Returns:
        The paths of the files, by name.

    Raises:
        InputError: a file is there and `overwrite` is not set, or the parent is no folder.
    """
    target = Path(folder)
    if not target.parent.is_dir():
        raise InputError("folder", None, str(target), "its parent folder does not exist")
    if target.exists() and not target.is_dir():
        raise InputError("folder", None, str(target), "is a file")
    taken = sorted(p.name for p in target.iterdir()) if target.is_dir() else []
    if taken and not overwrite:
        raise InputError("folder", None, str(target), f"holds {taken[0]}; overwrite is not set")
    content = files()
    if target.is_dir():
        for name, data in content.items():
            replace_file(target / name, data)
    else:
        _create(target, content)
    return [target / name for name in content]


def compare_vectors(folder: str | Path) -> list[str]:
    """What differs between the files in `folder` and those written now; empty if nothing."""
    target = Path(folder)
    if not target.is_dir():
        return [f"{target}: no such folder"]
    content = files()
    problems = [f"{name}: not written any more" for name in _names(target) if name not in content]
    for name, data in content.items():
        path = target / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif (found := path.read_bytes()) != data:
            problems.append(f"{name}{_first_difference(found, data)}")
    return problems


def files() -> dict[str, bytes]:
    """Every file of a folder of vectors: name -> content, always the same bytes."""
    content: dict[str, bytes] = {name: (STATIC / name).read_bytes() for name in STATIC_FILES}
    entries = list(inputs())
    header: dict[str, Any] = {"kind": "inputs", "version": VERSION}
    content[INPUTS_FILE] = _lines(
        header, "inputs", {entry.name: input_json(entry) for entry in entries}
    )
    content[LARGE_FILE] = save(
        {
            f"{entry.name}/{name}": np.ascontiguousarray(x)
            for entry in entries
            if entry.stored
            for name, x in arrays_of(entry.batch).items()
            if x.dtype.kind == "f" and x.ndim == 3
        }
    )
    for group, (description, vectors) in groups().items():
        used = sorted({flag for vector in vectors for flag in vector["flags"]})
        header = {
            "description": description,
            "flags": {flag: FLAGS[flag].note() for flag in used},
            "group": group,
            "kind": "vectors",
            "version": VERSION,
        }
        content[f"{group}.json"] = _lines(header, "vectors", vectors)
    return dict(sorted(content.items()))


def _lines(header: dict[str, Any], key: str, entries: dict[str, Any] | list[Any]) -> bytes:
    """One JSON object: the header's members, then `key` with one entry a line."""
    members = [f"{_compact(name)}: {_compact(header[name])}" for name in sorted(header)]
    if isinstance(entries, dict):
        body = [f"{_compact(name)}: {_compact(entries[name])}" for name in sorted(entries)]
        opening, closing = "{", "}"
    else:
        body = [_compact(entry) for entry in entries]
        opening, closing = "[", "]"
    members.append(f"{_compact(key)}: {opening}\n" + ",\n".join(body) + f"\n{closing}")
    return ("{\n" + ",\n".join(members) + "\n}\n").encode("ascii")


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _create(target: Path, content: dict[str, bytes]) -> None:
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        for name, data in content.items():
            (temporary / name).write_bytes(data)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


def _first_difference(found: bytes, expected: bytes) -> str:
    """Where two contents part: the line, or the byte of a binary file, and what each says."""
    if b"\0" in found[:4096] + expected[:4096]:
        pairs = zip_longest(found, expected)
        byte = next(i for i, (a, b) in enumerate(pairs) if a != b)
        return f": differs from byte {byte} on ({len(found)} and {len(expected)} bytes)"
    lines = zip_longest(found.split(b"\n"), expected.split(b"\n"))
    number, (old, new) = next((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1])
    column = (
        next(i for i, (a, b) in enumerate(zip_longest(old or b"", new or b"")) if a != b)
        if old is not None and new is not None
        else 0
    )
    start = max(0, column - 40)
    shown = [
        "(nothing)" if line is None else line[start : column + 40].decode("utf-8", "replace")
        for line in (old, new)
    ]
    return f":{number}: {shown[0]!r} is there, {shown[1]!r} is written now"
