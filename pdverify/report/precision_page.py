"""A precision study as sections of text, tables and plots: the page, and one HTML file."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdverify.cases.recordings import replace_file
from pdverify.precision.records import MARGINS, Report, Row
from pdverify.precision.statistics import rate_of
from pdverify.report import precision_tables as found_in
from pdverify.report import tables
from pdverify.report.json_report import check_writable
from pdverify.report.records_json import as_json, rounded
from pdverify.report.tables import Draw, Plot, Table, drawn, markdown

RUN = "run.json"
"""The study itself, next to the plots."""

WHAT = "precision report"

TITLE = "Low precision: what must I upcast?"

ANSWER = {
    found_in.UPCAST: "**Upcast** (more than {limit} of the keep/drop decisions change)",
    found_in.OPEN: "**Not settled** by this run (`?`: the interval holds {limit})",
    found_in.SAFE: "**Leave as it is** (fewer than {limit} change)",
}

DECISIONS = """\
One format enters at one place; everything else is exact. A *flip* is a token whose decision (or
sign of C) is not that of the exact policies; half of the tokens are outside the trust region.
`bits`: median over tokens of the negative log2 of C's error over the sum of the magnitudes of its
terms, on the input where it is lowest. `real`: tokens of a language model; `other`: of synthetic
families. `sign`: flips of the sign of C. `open`: the certificate does not say that the decision is
the exact one: undecidable at this precision. `wrong`: a flip that the certificate excludes; none
may exist. Intervals are 95 % Wilson intervals.
"""

COUNTS = """\
Every token is judged twice: at the median divergence, and at a threshold of its own within twice
the bound of its computed divergence, where a wrong certificate would show. D and C are enclosed in
ball arithmetic first; a decision counts when the enclosures settle it.
"""

SIGNS = """\
The sign of C alone, whatever the divergence. In the top-K views the behavior policy is a list of
log-probs, so stages that change the list alone leave the full view as it is.
"""

DISAGREEMENT = """\
What an estimator of the tail costs next to a format: the sign of C in the top-K view, computed in
the format, against the exact full view's.
"""

TIGHTNESS = """\
Bound over observed error, lowest to highest over inputs. `input noise`: share of the bound that
stands for stored numbers and not for arithmetic. **loose**: more than half of the signs are
undecidable though fewer than {limit} flip: the bound explains nothing there.
"""

FORMS = """\
The same C by its algebraic forms, inputs taken as exact: median of the correct bits of C and their
5th percentile in brackets, by the format of the inputs, in fp32 arithmetic; `all bf16`: every
operation rounded to bf16 too, sums in fp32. Wrong signs and decisions (`flips`) are those of the
fp32 arithmetic, over the three formats of inputs. `time`: of plain torch code over that of the
plain form.
"""

ROLLOUTS = """\
The real model (SmolLM2-135M) rolls out in a format, on the same prefixes, against an fp32 trainer;
`k ~ mu`. `ratio`, `exact`, `uniform`, `aggregated`: share of tokens on which the direction of the
sampled ratio, or of a tail estimator, is not that of the full divergence. `rollout`: weights and
activations; `rollout-weights`: weights alone; `lm-head`: the last product alone; `lm-head-sums`:
that product with a bf16 accumulator. The tokens of a response are not independent: intervals are
those of independent tokens and too narrow for that.
"""


@dataclass(frozen=True)
class Section:
    """A part of the report."""

    heading: str
    text: str
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = field(default_factory=list)


def answer(report: Report) -> str:
    """What to upcast, as a list in Markdown, with the verdict's meaning."""
    limit = f"{100 * found_in.LIMIT:g} %"
    lines = []
    for verdict, by_stage in found_in.verdicts(report).items():
        text = "; ".join(f"`{stage}` in {', '.join(x)}" for stage, x in by_stage.items())
        lines.append(f"- {ANSWER[verdict].format(limit=limit)}: {text or 'nothing'}.")
    return "\n".join(lines)


def sections(report: Report) -> list[Section]:
    """Everything there is to show, in order; sections without a row are left out."""
    divergences = dict.fromkeys(x.divergence for x in report.rows)
    by_view = [
        found_in.decisions(report, name, view) for name in divergences for view in found_in.VIEWS
    ]
    first, *others = sorted(by_view, key=lambda x: not x.title.startswith("kl, exact"))
    limit = f"{100 * found_in.LIMIT:g} %"
    made = [
        Section("By stage and format", DECISIONS, [first], _plots(report)),
        Section("What was judged", COUNTS, [found_in.counts(report)]),
        Section("Forms side by side", FORMS, found_in.forms(report)),
        Section("Rollouts in low precision", ROLLOUTS, found_in.rollouts(report)),
        Section("What every mask drops", "", found_in.drops(report)),
        Section("Signs of C by tail estimator", SIGNS, [found_in.signs(report)]),
        Section("Estimators against formats", DISAGREEMENT, [found_in.disagreements(report)]),
        Section(
            "How tight the certificates are",
            TIGHTNESS.format(limit=limit),
            [found_in.tightness(report)],
        ),
        Section("Other divergences and views", "", others),
    ]
    return [x for x in made if any(table.rows for table in x.tables)]


def page(report: Report, folder: str) -> str:
    """The page as Markdown; `folder` holds the plots."""
    parts = [
        "<!-- Written by `pdverify precision --page`; do not edit. -->",
        f"# {TITLE}",
        answer(report),
        f"Forward KL, top-K list with the exact tail; {report.decisions:,} decisions of forward"
        f" KL and other divergences were judged in all, {report.wrong} of them flipped outside"
        f" their certificate. Command: `{report.command}` ({report.seconds:,.0f} s on"
        f" {report.device}). With: {about(report)}.",
        *(f"Left out: {note}." for note in report.notes),
    ]
    for section in sections(report):
        parts += [f"## {section.heading}", section.text]
        parts += [markdown(table, section.heading) for table in section.tables if table.rows]
        parts += [f"![{plot.title}]({folder}/{plot.name})" for plot in section.plots]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def about(report: Report) -> str:
    """Versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())


def page_html(report: Report) -> str:
    """The same in one HTML file that refers to nothing outside it.

    Raises:
        PlotsUnavailable: matplotlib is not installed.
    """
    answered = (line.removeprefix("- ") for line in answer(report).splitlines())
    parts = [
        f"<h1>{TITLE}</h1>",
        "<ul>" + "".join(f"<li>{_inline(line)}</li>" for line in answered) + "</ul>",
        f"<p>{_inline(f'`{report.command}`')}: {report.decisions:,} decisions,"
        f" {report.wrong} flipped outside their certificate. {_inline(about(report))}.</p>",
        *(f"<p>Left out: {_inline(note)}.</p>" for note in report.notes),
    ]
    for section in sections(report):
        parts += [f"<h2>{_inline(section.heading)}</h2>", f"<p>{_inline(section.text)}</p>"]
        parts += [_html_table(table) for table in section.tables if table.rows]
        pictures = drawn(section.plots) if section.plots else {}
        for plot in section.plots:
            data = base64.b64encode(pictures[plot.name]).decode()
            parts.append(
                f'<img alt="{html.escape(plot.title)}" src="data:image/png;base64,{data}">'
            )
    style = (
        "body{font:15px/1.5 sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse;font-size:13px}td,th{padding:2px 8px;text-align:left;"
        "border-bottom:1px solid #ddd}.n{text-align:right}img{max-width:100%}"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        f"<style>{style}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _inline(text: str) -> str:
    """Markdown's code and bold marks as HTML; all else is escaped."""
    for mark, tag in (("**", "b"), ("`", "code")):
        pieces = (html.escape(text) if mark == "**" else text).split(mark)
        text = "".join(f"<{tag}>{x}</{tag}>" if i % 2 else x for i, x in enumerate(pieces))
    return text


def _html_table(table: Table) -> str:
    kinds = [' class="n"' if name.endswith(">") else "" for name in table.columns]

    def row(tag: str, cells: Iterable[str]) -> str:
        shown = (
            f"<{tag}{kind}>{html.escape(x)}</{tag}>" for kind, x in zip(kinds, cells, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    head = row("th", (name.removesuffix(">") for name in table.columns))
    body = "\n".join(row("td", cells) for cells in table.rows)
    return f"<h3>{html.escape(table.title)}</h3>\n<table>\n{head}\n{body}\n</table>"


def write_page(report: Report, path: str | os.PathLike[str]) -> list[Path]:
    """Write the page, its plots and the study itself; returns what was written.

    Raises:
        OSError: a folder does not exist or cannot be written, or matplotlib is missing.
    """
    # the page must not depend on digits that the JSON does not hold
    report = rounded(report, WHAT)
    files = {RUN: as_json(report, indent=None), **drawn(_plots(report))}
    return tables.write_page(path, lambda folder: page(report, folder), files)


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the HTML file.

    Raises:
        OSError: it cannot be written, or matplotlib is missing.
    """
    replace_file(check_writable(path), page_html(rounded(report, WHAT)).encode())


SHOWN = ("stored-logits", "softmax", "sum-naive", "rollout")
"""Stages with curves of their own."""


def _plots(report: Report) -> list[Plot]:
    rows = found_in.cells(report.rows, "kl", found_in.HEADLINE)
    by_place = found_in.places(x for x in rows if x.stage in SHOWN)
    flipping = {k: v for k, v in by_place.items() if any(x.sign_flips.count for x in v)}
    plots = []
    if flipping:
        title = "sign flips of C by margin: forward KL, exact tail"
        plots.append(Plot("flips.png", title, _flips(flipping)))
    if any(x.errors for found in by_place.values() for x in found):
        title = "bound of C over its observed error: forward KL, exact tail"
        plots.append(Plot("bounds.png", title, _bounds(by_place)))
    sizes = {x.vocab_size for x in rows if not found_in.is_real(x)}
    if len(sizes) > 1:
        title = "effective bits over V: peaked rows, forward KL, exact tail"
        plots.append(Plot("bits.png", title, _bits(by_place)))
    return plots


Places = dict[tuple[str, str], list[Row]]


def _flips(by_place: Places) -> Draw:
    def draw(axes: Any) -> None:
        for (stage, name), found in by_place.items():
            counts = [
                tuple(sum(x.by_margin[i][j] for x in found) for j in (0, 1))
                for i in range(len(MARGINS))
            ]
            known = [(m, rate_of(*c)) for m, c in zip(MARGINS, counts, strict=True) if c[1] >= 10]
            if known:
                x = [m * 2**0.25 for m, _ in known]
                y = [r.count / r.total for _, r in known]
                low = [max(0.0, v - r.low) for v, (_, r) in zip(y, known, strict=True)]
                high = [max(0.0, r.high - v) for v, (_, r) in zip(y, known, strict=True)]
                label = f"{stage}, {name}"
                axes.errorbar(x, y, (low, high), marker="o", markersize=3, lw=1, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("|C| over the sum of the magnitudes of its terms")
        axes.set_ylabel("share of signs that flip")

    return draw


def _bounds(by_place: Places) -> Draw:
    def draw(axes: Any) -> None:
        for (stage, name), found in by_place.items():
            errors = [e for x in found for e in x.errors]
            bounds = [b for x in found for b in x.bounds]
            if errors:
                axes.loglog(errors, bounds, ".", markersize=3, label=f"{stage}, {name}")
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], "k:", lw=1, label="bound = error")
        axes.set_xlabel("observed error of C")
        axes.set_ylabel("bound")

    return draw


def _bits(by_place: Places) -> Draw:
    def draw(axes: Any) -> None:
        for (stage, name), found in by_place.items():
            known = sorted(
                (x.vocab_size, x.bits) for x in found if x.input == "peaked" and x.bits is not None
            )
            if len(known) > 1:
                sizes, bits = zip(*known, strict=True)
                axes.semilogx(sizes, bits, marker="o", markersize=4, label=f"{stage}, {name}")
        axes.set_xlabel("V")
        axes.set_ylabel("bits")

    return draw
