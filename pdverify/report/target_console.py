"""A report on a target as text: what failed, on which input, and what to do next."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import IO

from rich.text import Text

from pdverify.conformance.alternatives import ALTERNATIVES
from pdverify.conformance.records import CheckRecord, TargetCounterexample, TargetReport
from pdverify.formats import FORMATS
from pdverify.report.literals import beginning, cells, literal, place_text, shape
from pdverify.report.writer import WIDTH, Writer, emit, ratio

SHOWN_CELLS = 128
"""Numbers of one argument that are printed in full; of a longer one, the beginning."""

STATUS = {
    "passed": "ok",
    "failed": "FAILED",
    "accepted": "accepted",
    "not-applicable": "n/a",
    "not-run": "not run",
}


STATUS_WORDS = {"not-applicable": "does not apply", "not-run": "not run"}


def print_target_report(report: TargetReport, file: IO[str] | None = None) -> None:
    """Print `report` to `file` (stdout by default)."""
    emit(file, lambda writer: _report(writer, report))


def summary(report: TargetReport) -> str:
    """The last line: the verdict, what was counted, what to do next, and the exit status."""
    judged = [check for check in report.checks if check.status in ("passed", "failed", "accepted")]
    accepted = [check for check in judged if check.status == "accepted"]
    agreed = sum(check.decisions.wrong for check in accepted)
    stopped = sum(check.status == "not-run" for check in report.checks)
    counts = report.decisions
    said = [
        f"{_count(len(judged), 'check')}, {counts.total} decisions"
        f" ({counts.determined} determined), {counts.wrong - agreed} wrong"
    ]
    if accepted:
        said.append(f"{len(accepted)} accepted ({_count(agreed, 'decision')})")
    if stopped:
        said.append(f"{stopped} not run")
    if report.conforms:
        return f"conforms: yes, {', '.join(said)} (exit 0)"
    said.append(f"{len(report.failed)} failed")
    return f"conforms: no, {', '.join(said)}; {_advice(report)} (exit 1)"


def failure_text(check: CheckRecord) -> str:
    """One failed check as plain text: message, counterexample, cause, how to rerun."""
    lines = [f"{check.id}: {check.message}", *_facts(check)]
    return "\n".join([*lines, *_inputs(check.counterexample), *_next(check)])


def convention_text(check: CheckRecord) -> str | None:
    """That a documented convention explains a failed check, or None."""
    if check.convention is None:
        return None
    known = ALTERNATIVES[check.convention].summary
    return f"follows the convention '{known}'; accept it with --accept {check.convention}"


def skip_reason(check: CheckRecord) -> str | None:
    """Why a check is neither passed nor failed, or None."""
    if check.status == "accepted":
        return f"accepted: {convention_text(check) or check.message}"
    if check.status in ("not-applicable", "not-run"):
        return f"{STATUS_WORDS[check.status]}: {check.message}"
    return None


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _advice(report: TargetReport) -> str:
    if report.convention is not None:
        return (
            f"the convention {report.convention} explains every failure: "
            f"--accept {report.convention}, or change the target"
        )
    return f"start with {report.failed[0].id}"


def _report(writer: Writer, report: TargetReport) -> None:
    _header(writer, report)
    _checks(writer, report.checks)
    for check in report.failed:
        writer.line()
        writer.line(f"FAILED {check.id} ({check.kind})", "bold red")
        example = check.counterexample
        facts = _wrap(check.message, "  ", 2), *_facts(check)
        for text in (*facts, *_inputs(example), *_next(check)):
            writer.line(text, whole=True)
    writer.line()
    verdict = "bold green" if report.conforms else "bold red"
    writer.console.print(Text(summary(report), style=verdict), soft_wrap=True)


def _header(writer: Writer, report: TargetReport) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    run = f"level {report.level}, seed {report.seed}, {report.seconds:.1f} s"
    tail = "" if report.tail is None else f", tail {report.tail}"
    options = "".join(
        f", {name} {value}" for name, value in report.options.items() if not hasattr(report, name)
    )
    for text in (
        f"{versions}; {run}",
        f"target {report.target}",
        f"judged as {report.mask}, view {report.view}{tail}, support {report.support},"
        f" precision {report.precision}{options}",
        f"returns {', '.join(report.outputs)}; takes {', '.join(report.parameters)}",
    ):
        writer.line(_wrap(text, "", 2))
    if report.effective_bits is None:
        note = f": {report.bits_note}" if report.bits_note else ""
        writer.line(f"effective bits of the direction: none{note}")
    else:
        has = FORMATS[report.precision].significand_bits
        shown = writer.bits(report.effective_bits)
        writer.line(f"effective bits of the direction: {shown} ({report.precision} has {has})")


def _checks(writer: Writer, checks: Sequence[CheckRecord]) -> None:
    columns = (
        ("check", False),
        ("status", False),
        ("decisions", True),
        ("determined", True),
        ("wrong", True),
        ("rounding", True),
        ("error/budget", True),
    )
    judged = [check for check in checks if check.status in ("passed", "failed", "accepted")]
    writer.heading("Checks")
    if judged:
        writer.table(columns, [_row(check) for check in judged], red=("FAILED",))
    for status, words in STATUS_WORDS.items():
        left = [check for check in checks if check.status == status]
        for reason in dict.fromkeys(check.message for check in left):
            names = ", ".join(check.id for check in left if check.message == reason)
            writer.line(_wrap(f"{words} ({reason}): {names}", "", 2))


def _row(check: CheckRecord) -> tuple[str, ...]:
    counts = check.decisions
    figures = (counts.total, counts.determined, counts.wrong, counts.rounding)
    shown = ("-",) * 4 if counts.total == 0 else tuple(map(str, figures))
    return (check.id, STATUS[check.status], *shown, ratio(check.worst))


def _facts(check: CheckRecord) -> list[str]:
    """What was expected and what came, one fact per line."""
    example = check.counterexample
    facts: list[tuple[str, str | None]] = []
    if example is not None:
        facts = [
            ("where", f"{example.quantity} at {place_text(example.place)}"),
            ("expected", example.expected),
            ("got", example.got),
            ("exact", example.exact or None),
            ("margin", _number(example.margin)),
            ("error", _number(example.error)),
            ("budget", _number(example.budget)),
        ]
    facts.append(("cause", check.cause))
    facts.append(("convention", convention_text(check)))
    return [_wrap(value, f"  {name + ':':<12}", 14) for name, value in facts if value]


def _wrap(text: str, start: str, indent: int) -> str:
    """`text` after `start`; numbers and names stay whole, so that they can be copied."""
    return textwrap.fill(
        text,
        width=WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _number(x: float) -> str | None:
    return None if math.isnan(x) else f"{x:.6g}"


def _inputs(example: TargetCounterexample | None) -> list[str]:
    """The arguments as Python literals, each on a line of its own; long ones abbreviated."""
    if example is None:
        return []
    how = "shrunk" if example.shrunk else "as found"
    lines = [f"  inputs ({how}, {example.presentation}):"]
    for name, value in example.inputs.items():
        dtype = example.dtypes.get(name)
        note = "" if dtype in (None, "number") else f"  # {dtype}"
        if cells(value) > SHOWN_CELLS:
            sizes = " x ".join(map(str, shape(value)))
            lines.append(f"    {name} = {beginning(value)}{note or '  #'} {sizes}, abbreviated")
            continue
        start = f"    {name} = "
        first, *more = literal(value, dtype, WIDTH - len(start) - len(note)).splitlines()
        lines += [start + first, *(" " * len(start) + line for line in more)]
        lines[-1] += note
    left_out = [name for name in example.dtypes if name not in example.inputs]
    if left_out:
        lines.append(f"    too large to keep: {', '.join(left_out)}; the rerun makes them again")
    return lines


def _next(check: CheckRecord) -> list[str]:
    return [f"  {'rerun:':<12}{check.rerun}", f"  {'explain:':<12}pdverify explain {check.id}"]
