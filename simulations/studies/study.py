"""What a study is: a question, cells, and what its results are boiled down to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import pandas as pd
import torch
from torch import Tensor

from pdverify.report.tables import Plot, Table

Level: TypeAlias = Literal["quick", "full"]
Cell: TypeAlias = dict[str, Any]
"""The factors of one cell by name, str, int or float; what is run and stored at a time."""

BATCH = 2**22
"""Logits of a batch of seeds: what a cell holds in memory at a time is a few tensors of these."""


@dataclass(frozen=True)
class Summary:
    """What a study found.

    Attributes:
        finding: a few sentences, whichever way it came out.
        tables, plots: what they rest on.
    """

    finding: str
    tables: Sequence[Table]
    plots: Sequence[Plot] = field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: as on the command line.
        title, question, design: of its page; the design in Markdown.
        cells: its cells, by level.
        run: results of a cell for consecutive seeds, rows with a column ``seed``.
        summarize: from the results of all cells, with the cells' factors as columns.
        violations: what theory guarantees and the results contradict, one line each.
        seeds: how many, by level.
    """

    name: str
    title: str
    question: str
    design: str
    cells: Callable[[Level], list[Cell]]
    run: Callable[[Cell, range], pd.DataFrame]
    summarize: Callable[[pd.DataFrame], Summary]
    violations: Callable[[pd.DataFrame], list[str]]
    seeds: Mapping[Level, int]


def in_batches(seeds: range, logits_of_one: int) -> Iterator[range]:
    """Batches of seeds that fit `BATCH`, for cells of `logits_of_one` numbers a seed."""
    step = max(1, BATCH // logits_of_one)
    for start in range(seeds.start, seeds.stop, step):
        yield range(start, min(start + step, seeds.stop))


def per_seed(seeds: range, **columns: Any) -> pd.DataFrame:
    """A frame with a row for each seed, of tensors `[S]` and constants."""
    made = {k: v.numpy() if isinstance(v, Tensor) else v for k, v in columns.items()}
    return pd.DataFrame({"seed": list(seeds), **made})


def varied(base: Cell, *factors: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """`base`, and every combination of each group of factors, without repetition."""
    found = [dict(base)]
    for group in factors:
        combined = [dict(base)]
        for name, values in group.items():
            combined = [cell | {name: value} for cell in combined for value in values]
        found += [cell for cell in combined if cell not in found]
    return list(found)


def matching(frame: pd.DataFrame, **factors: Any) -> pd.DataFrame:
    """The rows in which the factors have these values."""
    chosen = torch.ones(len(frame), dtype=torch.bool).numpy()
    for name, value in factors.items():
        chosen &= (frame[name] == value).to_numpy()
    return frame[chosen]
