"""The tables of a precision study, as rows of text: console, page and HTML show the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdverify.precision.records import FormRow, Rate, Report, RolloutRow, Row
from pdverify.precision.statistics import pooled
from pdverify.report.tables import WRONG, Table

LIMIT = 0.02
"""Share of changed decisions that calls for an upcast."""

VIEWS = {
    ("full", None): "full view",
    ("topk", "exact"): "exact tail",
    ("topk", "uniform"): "uniform tail",
    ("topk", "aggregated"): "aggregated tail",
}

HEADLINE = "topk", "exact"
"""The view of the first table: the list that an engine returns, and the trainer's own tail."""

UPCAST, SAFE, OPEN = "yes", "no", "?"

LARGE = 32_768
"""Vocabulary from which an input is listed on its own."""


def is_real(row: Row) -> bool:
    """Whether the tokens are a language model's."""
    return row.input.startswith(("real", "recording")) or ".safetensors" in row.input


def cells(rows: Iterable[Row], divergence: str, view: tuple[str, str | None]) -> list[Row]:
    """Rows of one divergence and view."""
    return [x for x in rows if x.divergence == divergence and (x.partition, x.tail) == view]


def places(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by stage and format."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.stage, row.format), []).append(row)
    return found


def share(x: Rate) -> str:
    """A rate in percent with its interval, ``-`` without a trial."""
    if not x.total:
        return "-"
    return f"{_percent(x.count / x.total)} [{_percent(x.low)}, {_percent(x.high)}]"


def _percent(x: float) -> str:
    """Two digits, three above 10; not 0 or 100 unless it is."""
    if x in (0.0, 1.0):
        return f"{100 * x:.0f}"
    shown = f"{100 * x:.1f}" if x >= 0.095 else f"{100 * x:.2g}"
    return f"{99.9}" if shown == "100.0" else shown


def plain_share(x: Rate) -> str:
    """The same without its interval."""
    return _percent(x.count / x.total) if x.total else "-"


def verdict(rows: Sequence[Row]) -> str:
    """Whether a format at a stage changes more than `LIMIT` of the decisions, on any input."""
    groups = [pooled(x.flips for x in rows if is_real(x) is real) for real in (True, False)]
    known = [x for x in groups if x.total]
    if any(x.low > LIMIT for x in known):
        return UPCAST
    return SAFE if known and all(x.high < LIMIT for x in known) else OPEN


def verdicts(report: Report, divergence: str = "kl") -> dict[str, dict[str, list[str]]]:
    """Verdict -> stage -> formats; stages that change the full view alone are judged there."""
    found: dict[str, dict[str, list[str]]] = {UPCAST: {}, OPEN: {}, SAFE: {}}
    for (stage, name), rows in places(cells(report.rows, divergence, HEADLINE)).items():
        found[verdict(rows)].setdefault(stage, []).append(name)
    return found


def decisions(report: Report, divergence: str, view: tuple[str, str | None]) -> Table:
    """What every format does at every stage, pooled over inputs."""
    rows = []
    for (stage, name), found in places(cells(report.rows, divergence, view)).items():
        bits = min((x for x in found if x.bits is not None), key=_bits_of, default=None)
        real = pooled(x.flips for x in found if is_real(x))
        other = pooled(x.flips for x in found if not is_real(x))
        rows.append(
            (
                stage,
                name,
                "-" if bits is None else _bits(bits),
                share(real),
                share(other),
                plain_share(pooled(x.sign_flips for x in found)),
                plain_share(pooled(x.undecidable for x in found)),
                str(sum(x.wrong for x in found)),
                verdict(found),
            )
        )
    columns = (
        *("stage", "format", "bits>", "flips, real %>", "flips, other %>"),
        *("sign %>", "open %>", "wrong>", "upcast?"),
    )
    return Table(f"{divergence}, {VIEWS[view]}: decisions by stage and format", columns, rows)


def _bits_of(row: Row) -> float:
    return row.bits or 0.0


def _bits(row: Row) -> str:
    return f"{'≥ ' if row.at_least else ''}{row.bits:.1f}"


def signs(report: Report) -> Table:
    """Sign flips of C by tail estimator, on real tokens and large synthetic vocabularies."""
    groups: dict[tuple[str, str, str], dict[tuple[str, str | None], list[Row]]] = {}
    for row in report.rows:
        if row.divergence != "kl" or not (is_real(row) or row.vocab_size >= LARGE):
            continue
        name = "real" if is_real(row) else f"{row.input}, V = {row.vocab_size:,}"
        of_place = groups.setdefault((name, row.stage, row.format), {})
        of_place.setdefault((row.partition, row.tail), []).append(row)
    rows = []
    for (name, stage, number_format), found in groups.items():
        rates = [pooled(x.sign_flips for x in found.get(view, [])) for view in VIEWS]
        rows.append((name, stage, number_format, *(share(x) for x in rates)))
    columns = "input", "stage", "format", *(f"{x} %>" for x in VIEWS.values())
    return Table("Flips of the sign of C, in percent", columns, rows)


def disagreements(report: Report) -> Table:
    """How often the sign of a tail estimator's C is not that of the full C, by format."""
    rows = []
    for (stage, number_format), found in places(
        x for x in report.rows if x.divergence == "kl" and x.partition == "topk"
    ).items():
        rates = [
            pooled(x.disagreement for x in found if x.tail == tail and x.disagreement is not None)
            for tail in ("exact", "uniform", "aggregated")
        ]
        rows.append((stage, number_format, *(share(x) for x in rates)))
    columns = "stage", "format", "exact tail %>", "uniform %>", "aggregated %>"
    return Table("Direction of the top-K view against that of the exact full view", columns, rows)


def tightness(report: Report, divergence: str = "kl") -> Table:
    """How far above the observed error the certificates are, and where they explain nothing."""
    rows = []
    for (stage, name), found in places(cells(report.rows, divergence, HEADLINE)).items():
        known = [x.tightness for x in found if x.tightness is not None]
        noise = [x.noise_share for x in found if x.noise_share is not None]
        undecidable = pooled(x.sign_undecidable for x in found)
        flips = pooled(x.sign_flips for x in found)
        rows.append(
            (
                stage,
                name,
                "-" if not known else f"{_spread([x[0] for x in known])}",
                "-" if not known else f"{_spread([x[1] for x in known])}",
                "-" if not noise else f"{100 * max(noise):.0f}",
                plain_share(undecidable),
                plain_share(flips),
                LOOSE if is_loose(undecidable, flips) else "",
            )
        )
    columns = (
        *("stage", "format", "median>", "95th percentile>", "input noise %>"),
        *("undecidable %>", "flipped %>", ""),
    )
    return Table(f"{divergence}, {VIEWS[HEADLINE]}: bound of C over its error", columns, rows)


LOOSE = "loose"


def is_loose(undecidable: Rate, flips: Rate) -> bool:
    """Whether the bounds explain nothing: most are undecidable, though hardly any flip."""
    if not flips.total:
        return False
    return 2 * undecidable.count > undecidable.total and flips.count < LIMIT * flips.total


def _spread(x: Sequence[float]) -> str:
    low, high = min(x), max(x)
    return _factor(low) if high < 1.1 * low else f"{_factor(low)} to {_factor(high)}"


def _factor(x: float) -> str:
    return f"{x:.2g}" if x < 100 else f"{x:,.0f}" if x < 1e5 else f"{x:.0e}"


def forms(report: Report) -> list[Table]:
    """The forms of C side by side, one table for each divergence."""
    groups: dict[str, dict[tuple[str, str], list[FormRow]]] = {}
    for row in report.forms:
        of_form = groups.setdefault(row.divergence, {})
        of_form.setdefault((row.peakedness, row.form), []).append(row)
    return [_forms(name, found) for name, found in groups.items()]


def _forms(name: str, found: dict[tuple[str, str], list[FormRow]]) -> Table:
    heads: dict[str, None] = {}
    rows = []
    for (kind, form), of_form in found.items():
        bits = {_computed(x): f"{x.bits:.1f} ({x.worst_bits:.1f})" for x in of_form}
        heads.update(dict.fromkeys(bits))
        upcast = [x for x in of_form if x.arithmetic == "fp32"]
        seconds = next((x.seconds_ratio for x in of_form if x.seconds_ratio is not None), None)
        rows.append(
            (
                kind,
                form,
                *bits.values(),
                share(pooled(x.wrong_signs for x in upcast)),
                plain_share(pooled(x.wrong_decisions for x in upcast)),
                "-" if seconds is None else f"{seconds:.1f}",
            )
        )
    sizes = sorted({x.vocab_size for of_form in found.values() for x in of_form})
    where = ", ".join(f"{size:,}" for size in sizes)
    columns = (
        *("rows", "form", *(f"{x}>" for x in heads)),
        *("wrong signs %>", "flips %>", "time>"),
    )
    peaks = {kind: f"{kind} {of_form[0].peak:.2g}" for (kind, _), of_form in found.items()}
    notes = [f"median mass of the likeliest token: {', '.join(peaks.values())}"]
    return Table(f"{name}, V = {where}: correct bits of C by form", columns, rows, notes)


def _computed(row: FormRow) -> str:
    return row.inputs if row.arithmetic == "fp32" else f"all {row.arithmetic}"


def rollouts(report: Report) -> list[Table]:
    """Divergence of every rollout and what the top-K estimators make of it."""
    by_training: dict[str, list[RolloutRow]] = {}
    for row in report.rollouts:
        by_training.setdefault(row.training, []).append(row)
    tables = []
    for training, found in by_training.items():
        names = [x.mask for x in found[0].disagreements]
        rows = [
            (
                x.recipe,
                f"{x.median:.3g} [{x.median_low:.2g}, {x.median_high:.2g}]",
                f"{x.high:.2g}",
                share(x.outside),
                *(plain_share(y.rate) for y in x.disagreements),
            )
            for x in found
        ]
        first = found[0]
        title = (
            f"Trainer in fp32 with {training}: forward KL (nats), {first.tokens} tokens,"
            f" V = {first.vocab_size:,}, K = {first.top_k}"
        )
        columns = (
            *("rollout", "median>", "95th>", f"outside {first.delta:g} %>"),
            *(f"{x} %>" for x in names),
        )
        tables.append(Table(title, columns, rows))
    return tables


def drops(report: Report) -> list[Table]:
    """Drop rate of every mask where the whole rollout ran in a format."""
    tables = []
    for training in dict.fromkeys(x.training for x in report.rollouts):
        found = [
            x
            for x in report.rollouts
            if x.training == training and x.recipe.partition(" ")[0] in ("fp32", "rollout")
        ]
        if not found:
            continue
        rows = [
            (drop.mask, *(plain_share(x.drops[i].rate) for x in found))
            for i, drop in enumerate(found[0].drops)
        ]
        heads = (f"{x.recipe.removeprefix('rollout ')}>" for x in found)
        title = f"Drop rates in percent, trainer with {training}"
        tables.append(Table(title, ("mask", *heads), rows))
    return tables


def counts(report: Report) -> Table:
    """How many decisions were judged, and how many were wrong."""
    rows = [(f"V = {int(size):,}", f"{n:,}", "", "") for size, n in report.by_vocab.items()]
    bad = WRONG if report.wrong else "0"
    close = f"{report.close:,} ({100 * report.close / max(1, report.decisions):.0f} %)"
    rows.append(("all", f"{report.decisions:,}", close, bad))
    columns = "", "decisions>", "within twice the bound>", "flipped outside it>"
    return Table("Decisions that were judged", columns, rows)
