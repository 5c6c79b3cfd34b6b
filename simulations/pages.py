"""The page of a study, from its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from pdverify.report.tables import drawn, markdown, write_page
from simulations.studies.study import Study, Summary


def page(study: Study, summary: Summary, said: dict[str, Any], cells: int, folder: str) -> str:
    """Markdown of a study's page; `said` is what its results say of themselves."""
    plots = [f"![{plot.title}]({folder}/{plot.name})" for plot in summary.plots]
    tables = [markdown(table, "") for table in summary.tables]
    used = ", ".join(f"{name} {number}" for name, number in sorted(said["versions"].items()))
    return (
        "\n\n".join(
            [
                f"# {study.title}",
                "<!-- Written by the command below: do not edit. -->",
                f"**Question.** {study.question}",
                f"**Found.** {summary.finding}",
                f"**Design.** {study.design}",
                f"Brackets are 95 % bootstrap intervals over {said['seeds']} seeds; {cells} cells."
                " Every number here is that of",
                f"    {said['command']}",
                f"(made with {used}; raw results per seed: `{folder}/results.parquet`).",
                *plots,
                *tables,
            ]
        )
        + "\n"
    )


def write(study: Study, frame: pd.DataFrame, said: dict[str, Any], out: Path) -> list[Path]:
    """Write the page `out/NAME.md` and its plots; returns what was written."""
    summary = study.summarize(frame)
    cells = int(frame.groupby(factors(study, said), sort=False).ngroups)
    return write_page(
        out / f"{study.name}.md",
        lambda folder: page(study, summary, said, cells, folder),
        drawn(summary.plots),
    )


def factors(study: Study, said: dict[str, Any]) -> list[str]:
    """The columns that make a cell."""
    return list(study.cells(said["level"])[0])
