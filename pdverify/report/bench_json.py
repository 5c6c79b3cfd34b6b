"""A bench as JSON: written whole or not at all, and read back."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pdverify.cases.recordings import replace_file
from pdverify.report.json_report import check_writable
from pdverify.tools.bench.records import BenchReport, from_plain, plain


def write_bench(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Write `report` as strict JSON, numbers to six significant digits; a file is replaced.

    Raises:
        OSError: as `json_report.check_writable`, or when the disk is full.
    """
    text = json.dumps(plain(report), allow_nan=False, indent=1, ensure_ascii=False) + "\n"
    replace_file(check_writable(path), text.encode())


def read_bench(path: str | os.PathLike[str]) -> BenchReport:
    """The bench that `write_bench` wrote.

    Raises:
        OSError: no such file, or not a bench of this schema version.
    """
    try:
        return from_plain(BenchReport, json.loads(Path(path).read_text()))
    except ValueError as error:
        raise OSError(f"{path}: {error}") from error
