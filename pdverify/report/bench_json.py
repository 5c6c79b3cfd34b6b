"""A bench as JSON."""

from __future__ import annotations

import os

from pdverify.report.records_json import read_record, write_record
from pdverify.tools.bench.records import BenchReport

WHAT = "bench report"


def write_bench(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Write `report`, see `records_json.write_record`."""
    write_record(report, path)


def read_bench(path: str | os.PathLike[str]) -> BenchReport:
    """The bench that `write_bench` wrote, see `records_json.read_record`."""
    return read_record(BenchReport, path, WHAT)
