"""A report as strict JSON: every number finite, every key a string, the file whole or absent.

NaN (nothing was counted) becomes null; infinities become the strings ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from pdverify.cases.recordings import replace_file
from pdverify.conformance.bits import Bits
from pdverify.conformance.records import CheckRecord, EntryRecord, Report, TargetReport


def to_json(report: Report | TargetReport) -> dict[str, Any]:
    """`report` as strict JSON holds it: `builtin_json` or `target_json`."""
    return target_json(report) if isinstance(report, TargetReport) else builtin_json(report)


def builtin_json(report: Report) -> dict[str, Any]:
    """A `Report` as plain dicts, lists, strings, finite numbers, booleans and None.

    Top level: `schema_version`, `conforms`, `level`, `seed`, `versions`, `seconds`,
    `real_source`, `inputs`, `decisions` (summed over the entries), `entries`, `directions`,
    `certificates`.  Every entry is a record of its own, with `target` (also `name`), `conforms`
    (null where the entry cannot run here), `mask`, `effective_bits`, `decisions`, `message`,
    `counterexample`, `seed` and `versions`.
    """
    shared = {"seed": report.seed, "versions": report.versions}
    entries = [_entry(entry) | shared for entry in report.entries]
    plain: dict[str, Any] = _plain(
        {
            "schema_version": report.schema_version,
            "conforms": report.conforms,
            "level": report.level,
            **shared,
            "seconds": report.seconds,
            "real_source": report.real_source,
            "inputs": report.inputs,
            "decisions": {
                field: sum(getattr(entry.decisions, field) for entry in report.entries)
                for field in ("total", "determined", "wrong", "rounding")
            },
            "entries": entries,
            "directions": report.directions,
            "certificates": report.certificates,
        }
    )
    return plain


def target_json(report: TargetReport) -> dict[str, Any]:
    """A `TargetReport` as plain dicts, lists, strings, finite numbers, booleans and None.

    The fields of the record by name, and in `checks` those of `CheckRecord` with `passed`: False
    only where the check speaks against the target.  The inputs of a counterexample are nested
    lists, in which -inf is the string ``"-inf"`` and NaN null.
    """
    plain: dict[str, Any] = _plain(
        {"schema_version": report.schema_version}
        | {field.name: getattr(report, field.name) for field in fields(report)}
        | {"checks": [_check(check) for check in report.checks]}
    )
    return plain


def _check(check: CheckRecord) -> dict[str, Any]:
    return {"id": check.id, "passed": check.passed} | vars(check)


def _entry(entry: EntryRecord) -> dict[str, Any]:
    judged = entry.unavailable is None
    return {
        "target": entry.name,
        "name": entry.name,
        "conforms": entry.passed if judged else None,
        "unavailable": entry.unavailable,
        "backend": entry.backend,
        "device": entry.device,
        "precision": entry.precision,
        "mask": entry.mask,
        "view": entry.view,
        "tail": entry.tail,
        "support": entry.support,
        "decisions": entry.decisions,
        "effective_bits": _bits(entry.bits),
        "error_over_budget": {
            "divergence": entry.divergence_error,
            "coefficient": entry.coefficient_error,
            "loss": entry.loss_error,
        },
        "message": entry.message,
        "counterexample": entry.counterexample,
    }


def _bits(bits: Bits | None) -> dict[str, Any] | None:
    return None if bits is None else asdict(bits)


def _plain(x: Any) -> Any:
    """`x` in the types of JSON; what has no counterpart there becomes its `str`."""
    if x is None or isinstance(x, bool):
        return x
    if isinstance(x, int | str):
        return int(x) if isinstance(x, int) else str(x)
    if isinstance(x, float):
        if math.isnan(x):
            return None
        return float(x) if math.isfinite(x) else ("inf" if x > 0 else "-inf")
    if is_dataclass(x) and not isinstance(x, type):
        return {name: _plain(value) for name, value in vars(x).items()}
    if isinstance(x, dict):
        return {str(key): _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    if hasattr(x, "tolist"):
        return _plain(x.tolist())
    return str(x)


def check_writable(path: str | os.PathLike[str]) -> Path:
    """The file that `path` comes down to, if it can be written; worth asking before a long run.

    Raises:
        OSError: its folder does not exist or admits no new file, or it is a folder or a device.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is not a regular file")
    if not target.parent.is_dir():
        raise OSError(f"{path}: its folder does not exist")
    try:
        handle, probe = tempfile.mkstemp(dir=target.parent, prefix=".pdverify-")
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        raise OSError(f"{path}: its folder is not writable ({error.strerror})") from error
    return target


def write_json(report: Report | TargetReport, path: str | os.PathLike[str]) -> None:
    """Write `to_json(report)` to `path`, whole or not at all; an existing file is replaced.

    Raises:
        OSError: as `check_writable`, or when the disk is full.
    """
    target = check_writable(path)
    text = json.dumps(to_json(report), allow_nan=False, indent=1, ensure_ascii=False) + "\n"
    # a lone surrogate, as an exception's text may hold, becomes its JSON escape
    replace_file(target, text.encode(errors="backslashreplace"))
