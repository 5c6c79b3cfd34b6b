"""A report as text: tables at most 100 columns wide, plain where the stream is no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from itertools import groupby
from typing import IO, Any

from rich.text import Text

from pdverify.conformance.bits import Share
from pdverify.conformance.records import (
    CertificateRecord,
    Counterexample,
    DecisionCounts,
    DirectionRecord,
    EntryRecord,
    InputRecord,
    Report,
)
from pdverify.report.writer import Writer, emit, ratio

MASK_WIDTH = 28
"""Width of the first column of the main table; a longer label gets a line of its own."""


def print_report(report: Report, stream: IO[str] | None = None) -> None:
    """Print `report` to `stream` (stdout by default)."""
    emit(stream, lambda writer: _Printer(writer).report(report))


def summary(report: Report) -> str:
    """The last line: the verdict, what was counted, and the exit status it leads to."""
    judged = [entry for entry in report.entries if entry.unavailable is None]
    total = sum((entry.decisions for entry in judged), DecisionCounts())
    counts = (
        f"{len(judged)} entries, {total.total} decisions ({total.determined} determined),"
        f" {total.wrong} wrong"
    )
    if report.conforms:
        return f"conforms: yes, {counts} (exit 0)"
    failed = sum(not entry.passed for entry in judged)
    also = ", a certificate is wrong" if _contradicted(report.certificates) else ""
    return f"conforms: no, {counts}, {failed} failing{also} (exit 1)"


def _contradicted(records: Iterable[CertificateRecord]) -> list[CertificateRecord]:
    return [record for record in records if record.wrong.successes]


class _Printer:
    """The sections of a report on built-in backends, written through `Writer`."""

    def __init__(self, writer: Writer) -> None:
        self.line = writer.line
        self.heading = writer.heading
        self.table = writer.table
        self.bits = writer.bits
        self.console = writer.console

    def report(self, report: Report) -> None:
        self.header(report)
        self.inputs(report.inputs)
        self.entries(report.entries)
        self.directions(report.directions)
        self.certificates(report.certificates)
        for entry in report.entries:
            if entry.unavailable is None and not entry.passed:
                self.failure(entry)
        for record in _contradicted(report.certificates):
            self.line()
            self.line(f"WRONG certificate {record.certificate}, {record.source}", "bold red")
            self.line(f"  contradicted on {record.wrong.successes} of {record.wrong.trials}")
        self.line()
        verdict = "bold green" if report.conforms else "bold red"
        self.console.print(Text(summary(report), style=verdict), soft_wrap=True)

    def header(self, report: Report) -> None:
        versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        self.line(f"{versions}; level {report.level}, seed {report.seed}, {report.seconds:.1f} s")
        self.line(f"real tokens: {report.real_source}")

    def inputs(self, inputs: Sequence[InputRecord]) -> None:
        rows = [
            (x.name, x.kind, str(x.tokens), str(x.vocab_size), x.dtype)
            for x in inputs
            if x.kind != "family"
        ]
        families = [x for x in inputs if x.kind == "family"]
        if families:
            names = {x.name.split(",")[0] for x in families}
            rows.append(
                (
                    f"{len(names)} families",
                    "family",
                    str(sum(x.tokens for x in families)),
                    _span([x.vocab_size for x in families]),
                    ", ".join(dict.fromkeys(x.dtype for x in families)),
                )
            )
        self.heading("Inputs")
        headings = ("input", False), ("kind", False), ("tokens", True), ("V", True)
        self.table((*headings, ("dtype", False)), rows)

    def entries(self, entries: Sequence[EntryRecord]) -> None:
        by_group: dict[tuple[str, str, str], list[EntryRecord]] = {}
        for entry in entries:
            group = (entry.backend, entry.device, entry.precision)
            by_group.setdefault(group, []).append(entry)
        for (backend, device, precision), group_entries in by_group.items():
            self.heading(f"{backend}, {device}, {precision}")
            if any(entry.unavailable is None for entry in group_entries):
                self.group(group_entries)
            for reason in dict.fromkeys(e.unavailable for e in group_entries if e.unavailable):
                missing = [e for e in group_entries if e.unavailable == reason]
                self.line(f"unavailable because {reason}: {_named(missing, len(group_entries))}")
        if any(entry.unavailable is None for entry in entries):
            self.line()
            self.line(
                "determined: certain whatever the stored log-probs' last place; wrong: determined "
                "and decided otherwise beyond rounding; D, C, loss: worst error over its budget, "
                "at most 1 passes.",
                "dim",
            )

    def group(self, entries: Sequence[EntryRecord]) -> None:
        columns = (
            ("mask, view and tail", False),
            ("total", True),
            ("deter-\nmined", True),
            ("wrong", True),
            ("round-\ning", True),
            ("D", True),
            ("C", True),
            ("loss", True),
            ("effective bits", True),
            ("verdict", False),
        )
        rows: list[tuple[str, ...]] = []
        for mask, same in groupby(entries, lambda entry: entry.mask):
            members = list(same)
            alone = f"{mask} {_cells(members[0])}"
            if len(members) == 1 and len(alone) <= MASK_WIDTH:
                rows.append((alone, *self.figures(members[0])))
                continue
            rows.append((mask, *[""] * (len(columns) - 1)))
            rows.extend((f"  {_cells(entry)}", *self.figures(entry)) for entry in members)
        self.table(columns, rows)

    def figures(self, entry: EntryRecord) -> tuple[str, ...]:
        if entry.unavailable is not None:
            return (*["-"] * 8, "n/a")
        counts = entry.decisions
        return (
            str(counts.total),
            str(counts.determined),
            str(counts.wrong),
            str(counts.rounding),
            ratio(entry.divergence_error),
            ratio(entry.coefficient_error),
            ratio(entry.loss_error),
            self.bits(entry.bits),
            "ok" if entry.passed else "WRONG",
        )

    def directions(self, records: Sequence[DirectionRecord]) -> None:
        if not records:
            return
        self.heading("Sign disagrees with the full-vocabulary forward-KL direction (95 % Wilson)")
        estimators = list(dict.fromkeys(record.estimator for record in records))
        cells = {(record.source, record.estimator): record for record in records}
        rows = [
            (source, *(_direction(cells.get((source, name))) for name in estimators))
            for source in dict.fromkeys(record.source for record in records)
        ]
        self.table([("source", False), *((name, True) for name in estimators)], rows)

    def certificates(self, records: Sequence[CertificateRecord]) -> None:
        if not records:
            return
        self.heading("Certificates of the direction's sign (95 % Wilson)")
        columns = ("source", False), ("certificate", False), ("given", True), ("wrong", True)
        rows = [(x.source, x.certificate, _share(x.certified), _share(x.wrong)) for x in records]
        self.table(columns, rows)

    def failure(self, entry: EntryRecord) -> None:
        self.line()
        self.line(f"WRONG {entry.name} ({entry.device}, {entry.precision})", "bold red")
        if entry.message:
            self.line(f"  {entry.message}")
        if entry.counterexample is not None:
            for name, value in _facts(entry.counterexample):
                self.line(f"  {name + ':':<12} {value}")


def _cells(entry: EntryRecord) -> str:
    parts = [entry.view, entry.tail, None if entry.support == "append" else entry.support]
    return " ".join(part for part in parts if part)


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _named(missing: Sequence[EntryRecord], of: int) -> str:
    if len(missing) == of:
        return f"all {of} entries"
    return ", ".join(f"{entry.mask} {_cells(entry)}" for entry in missing)


def _percent(x: float) -> str:
    return f"{100 * x:.3g}"


def _share(share: Share) -> str:
    if not share.trials:
        return "none judged"
    interval = f"[{_percent(share.low)}, {_percent(share.high)}]"
    return f"{_percent(share.share)}% {interval} {share.successes}/{share.trials}"


def _direction(record: DirectionRecord | None) -> str:
    if record is None:
        return "-"
    share = record.disagree
    shown, _, counts = _share(share).rpartition(" ") if share.trials else ("none judged", "", "")
    left = f"{record.undecided} undecided" if record.undecided else ""
    second = ", ".join(part for part in (counts, left) if part)
    return f"{shown}\n{second}" if second else shown


def _facts(example: Counterexample) -> list[tuple[str, str]]:
    sequence, position = example.place
    return [
        ("where", f"{example.source}, sequence {sequence}, position {position}"),
        ("quantity", example.quantity),
        ("expected", _value(example.expected)),
        ("got", _value(example.got)),
        ("error", _value(example.error)),
        ("budget", _value(example.budget)),
        ("margin", _value(example.margin)),
        *((str(name), _value(value)) for name, value in example.context.items()),
    ]


def _value(x: Any) -> str:
    if isinstance(x, float):
        return f"{float(x):.17g}"
    if isinstance(x, list | tuple):
        return "[" + ", ".join(_value(item) for item in x) + "]"
    if is_dataclass(x) and not isinstance(x, type):
        return ", ".join(f"{name} {_value(value)}" for name, value in vars(x).items())
    return str(x)
