"""The page `docs/performance.md` and its plots: a pure function of a bench."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pdverify.report import bench_tables, tables
from pdverify.report.bench_json import WHAT
from pdverify.report.records_json import as_json, rounded
from pdverify.report.tables import Draw, Plot, drawn, markdown
from pdverify.tools.bench.records import AccuracyRecord, BenchReport, ScalingRecord

RUN = "run.json"
"""The bench itself, next to the plots."""

INTRODUCTION = """\
<!-- Written by `pdverify bench --page`; do not edit. -->

# Performance

How fast, lean and accurate the backends are, next to what training code does today, from one run
on one machine. Compare ratios, not times: all of a table was timed in interleaved rounds of one
process, and ratios are of medians, with 95 % bootstrap intervals.
"""

HELD = """\
Targets of the project, for two CPU cores. What this run did not measure at the size of its target
is not listed.
"""

SPEED = """\
A backend is timed only if its answers on these very inputs and on rows of eight input families
are right (`gate`: worst error over its rounding budget); otherwise its row says WRONG and shows no
figure. What is compared with is timed in any case, and said to be off where it is. bf16 inputs are
held to the same fp32 budgets: nothing between input and answer is rounded to bf16.

- **vs rows**: times faster than `by-rows`: the code of `materialized`, 8 rows at a time (256
  behind a head), so that page faults of huge temporaries do not flatter us.
- **vs all**: times faster than `materialized`: fp32 log-softmaxes of all rows, `exp`, sums.
- **of read**, **of exp**, **of product**: its time over that of reading the inputs once (with a
  gradient: twice, and writing it), of torch's `exp` of every logit in the cache, of torch's matrix
  product alone, in the dtype of the inputs. Below 1: faster than torch's own.
- **memory**, **%**: peak of one call in a fresh process, above inputs and results, and as a
  percentage of the inputs.
"""

ACCURACY = """\
Errors are taken against the oracle, in units of the rounding budget per unit roundoff, on rows of
every input family. 24 bits is plain fp32; the planted softmaxes in bf16 and fp16 and the float64
modes show what the scale means. `C`, `D`: worst error over the budget of that precision, at most
1 passes. `wrong`: certain decisions of the mask that were taken otherwise.
"""

SCALING = """\
Everything else fixed; the exponent of `time ~ size^exponent` is a least-squares fit to the
logarithms, with its 95 % interval. In cache, small sizes are cheaper than large ones. `growth`:
what the peak above the inputs grows by from the smallest to the largest V, in percent of what the
inputs grow by.
"""

STREAM = """\
A sparse bf16 file, read through a memory map: one row in 64 is written, the others are holes, which
read as zeros and take as long to compute. The written rows are held to the oracle; the mask of
every row equals that of the same row in memory. `above block`: peak resident memory above that
before the pass and above the logits of the block in work.
"""


COST, BITS = "cost", "bits"
"""How the names of plots begin."""


def page(report: BenchReport, folder: str) -> str:
    """The page as Markdown; `folder` holds the plots."""
    machine, versions = (
        ", ".join(f"{name} {value}" for name, value in x.items())
        for x in (report.machine, report.versions)
    )
    about = f"Level {report.level}, seed {report.seed}, {report.seconds:,.0f} s."
    parts = [INTRODUCTION, f"Measured on: {machine}. With: {versions}. {about}"]
    pictures = [(x.name, f"![{x.title}]({folder}/{x.name})") for x in plots(report)]
    for heading, text, shown, plotted in (
        ("What must hold", HELD, [bench_tables.held(report)], ""),
        ("Speed and memory", SPEED, [bench_tables.speed(x) for x in report.speed], ""),
        ("Accuracy", ACCURACY, bench_tables.accuracy(report), BITS),
        ("How cost grows", SCALING, [bench_tables.scaling(report.scaling)], COST),
        ("Larger than memory", STREAM, [bench_tables.streams(report.stream)], ""),
    ):
        if any(table.rows for table in shown):
            parts += [f"## {heading}", text]
            parts += [markdown(table, heading) for table in shown]
            parts += [link for name, link in pictures if plotted and name.startswith(plotted)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def plots(report: BenchReport) -> list[Plot]:
    """Every plot that the report has figures for."""
    found: list[Plot] = []
    groups: dict[tuple[str, str], list[ScalingRecord]] = {}
    for x in report.scaling:
        if x.exponent is None:
            continue
        groups.setdefault((x.workload, x.axis), []).append(x)
    for (workload, axis), records in groups.items():
        name = f"{COST}-{workload}-{axis}"
        found.append(Plot(f"{name}.png", f"{workload}: time over {axis}", _times(records)))
        peaks = [x for x in records if x.memory]
        if peaks:
            title = f"{workload}: peak memory over {axis}"
            found.append(Plot(f"{name}-memory.png", title, _memory(peaks)))
    views: dict[tuple[str, str], list[AccuracyRecord]] = {}
    for y in report.accuracy:
        if y.divergence == "kl" and y.families:
            views.setdefault((y.divergence, y.view), []).append(y)
    for (divergence, view), judged in views.items():
        title = f"bits of C by family: {divergence}, {view} view"
        found.append(Plot(f"{BITS}-{divergence}-{view}.png", title, _bits(judged)))
    return found


def _times(records: Iterable[ScalingRecord]) -> Draw:
    def draw(axes: Any) -> None:
        for x in records:
            assert x.exponent is not None
            label = f"{x.contestant} ({x.exponent.value:.2f})"
            axes.loglog(x.sizes, [1e3 * s for s in x.seconds], marker="o", label=label)
        axes.set_xlabel(x.axis)
        axes.set_ylabel("time, ms")

    return draw


def _memory(records: Iterable[ScalingRecord]) -> Draw:
    def draw(axes: Any) -> None:
        for x in records:
            mib = [max(peak, 2**14) / 2**20 for peak in x.memory]
            axes.loglog(x.sizes, mib, marker="o", label=x.contestant)
        axes.loglog(x.sizes, [n / 2**20 for n in x.inputs], "k:", label="the inputs themselves")
        axes.set_xlabel(x.axis)
        axes.set_ylabel("peak above the inputs, MiB")

    return draw


def _bits(records: Iterable[AccuracyRecord]) -> Draw:
    def draw(axes: Any) -> None:
        for x, marker in zip(records, "osv^<>DPX*+x1234" * 4, strict=False):
            known = [f for f in x.families if f.coefficient is not None]
            bits = [f.coefficient for f in known]
            label = f"{x.contestant}, {x.precision}"
            axes.plot([f.family for f in known], bits, marker, markersize=4, label=label)
        axes.tick_params(axis="x", rotation=90)
        axes.set_ylabel("bits")

    return draw


def write_page(report: BenchReport, path: str | os.PathLike[str]) -> list[Path]:
    """Write the page, its plots and the bench itself; returns what was written.

    Plots and `RUN` go into a folder named like the page.

    Raises:
        OSError: a folder does not exist or cannot be written, or matplotlib is missing.
    """
    # the page must not depend on digits that the JSON does not hold
    report = rounded(report, WHAT)
    files = {RUN: as_json(report), **drawn(plots(report))}
    return tables.write_page(path, lambda folder: page(report, folder), files)
