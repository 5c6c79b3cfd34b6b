"""Tables as rows of text, which console, page and HTML all show, and generic ways to show them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdverify.cases.recordings import replace_file
from pdverify.report.json_report import check_writable
from pdverify.report.writer import Writer

MISSED, WRONG = "missed", "WRONG"


@dataclass(frozen=True)
class Table:
    """A table under a heading: headings of columns (numeric ones end in ``>``), rows, notes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=list)


Draw = Callable[[Any], None]
"""Draws on matplotlib axes."""


@dataclass(frozen=True)
class Plot:
    """A plot: name of its file, title, and how to draw it."""

    name: str
    title: str
    draw: Draw


class PlotsUnavailable(OSError):
    """Matplotlib is missing."""


def write_tables(writer: Writer, shown: Iterable[Table], legend: str = "") -> None:
    """Tables with their headings and notes, then a legend."""
    shown = list(shown)
    for table in shown:
        writer.heading(table.title)
        if table.rows:
            columns = [(name.removesuffix(">"), name.endswith(">")) for name in table.columns]
            writer.table(columns, table.rows, (WRONG, MISSED))
        for note in table.notes:
            writer.line(note, "dim")
    if shown and legend:
        writer.line()
        writer.line(legend, "dim")


def markdown(table: Table, heading: str) -> str:
    """A table as Markdown, under a heading of its own unless it has that of its section."""
    lines = [] if table.title == heading else [f"### {table.title}", ""]
    lines.append("| " + " | ".join(name.removesuffix(">") for name in table.columns) + " |")
    lines.append("|" + "|".join("--:" if x.endswith(">") else "---" for x in table.columns) + "|")
    lines += ["| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in table.rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)])


def drawn(plots: Iterable[Plot]) -> dict[str, bytes]:
    """File name -> PNG.

    Raises:
        PlotsUnavailable: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsUnavailable(
            "plots need matplotlib, which is not installed; pip install 'pdverify[plots]'"
        ) from None
    made = {}
    for plot in plots:
        figure = Figure(figsize=(9, 4.5), dpi=90, layout="constrained")
        axes = figure.add_subplot()
        plot.draw(axes)
        axes.set_title(plot.title)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside right upper", fontsize=8)
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
        made[plot.name] = out.getvalue()
    return made


def write_page(
    path: str | os.PathLike[str], text: Callable[[str], str], files: Mapping[str, bytes]
) -> list[Path]:
    """Write `text(folder)` to `path`, and `files` into the folder named like it.

    Raises:
        OSError: a folder does not exist or cannot be written.
    """
    target = check_writable(path)
    folder = target.with_suffix("")
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        replace_file(folder / name, content)
    replace_file(target, text(folder.name).encode())
    return [*(folder / name for name in files), target]
