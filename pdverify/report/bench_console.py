"""A bench as text."""

from __future__ import annotations

from typing import IO

from rich.text import Text

from pdverify.report import bench_tables as tables
from pdverify.report.tables import write_tables
from pdverify.report.writer import Writer, emit
from pdverify.tools.bench.records import BenchReport

SPEED_LEGEND = (
    "vs rows, vs all: times faster than the fp32 log-softmax code run a few rows at a time and on"
    " all rows at once [95 %]; of read, exp, product: times the time of that ceiling; memory: peak"
    " above inputs and results, % of the inputs; gate: worst error over its budget."
)
ACCURACY_LEGEND = (
    "bits: 24 is plain fp32; C, D: worst error over the budget of the precision; wrong: certain"
    " decisions that were taken otherwise."
)


def print_bench(report: BenchReport, stream: IO[str] | None = None) -> None:
    """Print `report` to `stream` (stdout by default)."""
    emit(stream, lambda writer: _print(writer, report))


def summary(report: BenchReport) -> str:
    """The last line: whether every backend is right, and the exit status it leads to."""
    if report.wrong:
        return f"WRONG: {', '.join(report.wrong)} (exit 1)"
    return "right: every backend that was measured (exit 0)"


def _print(writer: Writer, report: BenchReport) -> None:
    about = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    writer.line(f"{about}; level {report.level}, seed {report.seed}, {report.seconds:.0f} s")
    writer.line(", ".join(f"{name} {value}" for name, value in report.machine.items()))
    write_tables(writer, [tables.speed(x) for x in report.speed], SPEED_LEGEND)
    write_tables(writer, tables.accuracy(report), ACCURACY_LEGEND)
    others = tables.scaling(report.scaling), tables.streams(report.stream), tables.held(report)
    write_tables(writer, [x for x in others if x.rows])
    writer.line()
    style = "bold red" if report.wrong else "bold green"
    writer.console.print(Text(summary(report), style=style), soft_wrap=True)
