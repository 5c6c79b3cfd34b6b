"""Lines and tables at most 100 columns wide, plain where the stream is no terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdverify.conformance.bits import Bits

WIDTH = 100


class Writer:
    """Writes to `stream` what `target` can show."""

    def __init__(self, stream: IO[str], target: IO[str]) -> None:
        terminal = target.isatty()
        self.box = box.SIMPLE_HEAD if terminal else None
        self.console = Console(
            file=stream,
            width=None if terminal else WIDTH,
            markup=False,
            highlight=False,
            emoji=False,
        )
        if self.console.width > WIDTH:
            self.console.width = WIDTH
        encoding = getattr(target, "encoding", None) or "utf-8"
        self.at_least = "≥" if encoding.lower().startswith("utf") else ">="

    def line(self, text: str = "", style: str = "", *, whole: bool = False) -> None:
        """One line; `whole`: never broken, however long (it is there to be copied)."""
        self.console.print(Text(text, style=style), soft_wrap=whole)

    def heading(self, text: str) -> None:
        """A line of its own above a section."""
        self.line()
        self.line(text, "bold")

    def table(
        self,
        columns: Iterable[tuple[str, bool]],
        rows: Iterable[Sequence[str]],
        red: Collection[str] = ("WRONG",),
    ) -> None:
        """`columns`: (heading, whether it holds numbers, aligned to the right).

        A row with a cell that is one of `red` is shown in that color.
        """
        table = Table(box=self.box, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        for name, numeric in columns:
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            style = "red" if any(cell in red for cell in row) else ""
            table.add_row(*(Text(cell) for cell in row), style=style)
        self.console.print(table)

    def bits(self, bits: Bits | None) -> str:
        """Effective bits with their interval, or their lower bound, or ``-``."""
        if bits is None:
            return "-"
        if bits.estimate is not None:
            interval = "" if bits.low is None else f" [{bits.low:.1f}, {bits.high:.1f}]"
            return f"{bits.estimate:.1f}{interval}"
        if bits.at_least is not None:
            return f"{self.at_least} {int(bits.at_least)}"
        return "-"


def emit(stream: IO[str] | None, write: Callable[[Writer], None]) -> None:
    """Run `write` on a `Writer` for `stream` (stdout by default)."""
    out = sys.stdout if stream is None else stream
    if out.isatty():
        write(Writer(out, out))
        return
    text = io.StringIO()
    write(Writer(text, out))
    # rich fills every line of a table with spaces
    out.writelines(line.rstrip() + "\n" for line in text.getvalue().splitlines())


def ratio(x: float | None) -> str:
    """An error over its budget; 1.004 fails and does not read as 1.00, which passes."""
    if x is None:
        return "-"
    if 0 < x < 0.005:
        return "<0.01"
    shown = f"{x:.2f}" if x < 99.995 else f"{x:.0e}"
    return ">1" if x > 1 and float(shown) <= 1 else shown
