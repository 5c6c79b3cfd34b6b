"""A precision study as text."""

from __future__ import annotations

from typing import IO

from rich.text import Text

from pdverify.precision.records import Report
from pdverify.report import precision_tables as found_in
from pdverify.report.precision_page import about, answer
from pdverify.report.tables import write_tables
from pdverify.report.writer import Writer, emit

LEGEND = (
    "flips: decisions that are not the exact policies' [95 %], on real tokens and on synthetic"
    " ones; sign: of C; bits: of C, lowest input; open: the certificate does not settle the"
    " decision; wrong: a flip that it excludes; upcast: more than 2 % flip."
)
FORMS_LEGEND = (
    "correct bits of C, by format of the inputs, in fp32 arithmetic (or all in bf16): median (5th"
    " percentile); wrong signs [95 %] and decisions (flips): in fp32; time: over the plain form's."
)


def print_precision(report: Report, stream: IO[str] | None = None) -> None:
    """Print `report` to `stream` (stdout by default)."""
    emit(stream, lambda writer: _print(writer, report))


def summary(report: Report) -> str:
    """The last line: whether every flip is explained, and the exit status it leads to."""
    if report.wrong:
        return f"WRONG: {report.wrong} decisions flipped outside their certificates (exit 1)"
    return f"none of {report.decisions:,} decisions flipped outside its certificate (exit 0)"


def _print(writer: Writer, report: Report) -> None:
    writer.line(f"{about(report)}; {report.device}; {report.seconds:.0f} s")
    writer.line(report.command, whole=True)
    for note in report.notes:
        writer.line(f"left out: {note}")
    views = {(x.divergence, x.partition, x.tail) for x in report.rows}
    divergences = dict.fromkeys(x.divergence for x in report.rows)
    shown = [
        found_in.decisions(report, name, view)
        for name in divergences
        for view in (found_in.HEADLINE, ("full", None))
        if (name, *view) in views
    ]
    write_tables(writer, shown, LEGEND)
    write_tables(writer, found_in.forms(report), FORMS_LEGEND)
    write_tables(writer, [*found_in.rollouts(report), found_in.counts(report)])
    if report.rows:
        writer.heading("What must I upcast? (forward KL, exact tail)")
        for line in answer(report).replace("**", "").replace("`", "").splitlines():
            writer.line(line)
    writer.line()
    style = "bold red" if report.wrong else "bold green"
    writer.console.print(Text(summary(report), style=style), soft_wrap=True)
