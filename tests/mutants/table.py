"""Write `docs/mutants.md` from a run: `python -m tests.mutants.table [FILE]`."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from pdverify.cases.recordings import replace_file
from pdverify.conformance.checks import CHECKS
from pdverify.conformance.options import Options
from pdverify.conformance.records import CheckRecord, TargetCounterexample, TargetReport
from pdverify.conformance.target_run import check_target
from tests.mutants.catalog import RIGHT, WRONG, Subject, Wrong, in_order

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"

HEAD = """# What the checks find

Written by `python -m tests.mutants.table` from a run of every implementation in `tests/mutants/`,
at level quick with seed 0; do not edit. Each function is wrong in one way, or right in another
style than ours. "Killed by" names the checks that failed, a check in **bold** where no other may.
The counterexample is that of the first one, as small as it could be made.
"""


def options_as_flags(options: dict[str, Any]) -> str:
    """Options as on the command line."""
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())


def shown(example: TargetCounterexample | None, message: str) -> str:
    """A counterexample in one cell: its size, the token, right and given answer."""
    if example is None:
        return message
    rows = next(value for value in example.inputs.values() if isinstance(value, list))
    size = f"B = {len(rows)}, L = {len(rows[0])}"
    if "vocab_size" in example.inputs:
        size += f", V = {example.inputs['vocab_size']}"
    elif "logits" in example.inputs:
        size += f", V = {len(example.inputs['logits'][0][0])}"
    place = "" if example.place is None else f" at {list(example.place)}"
    said = f"{example.quantity}{place}: {example.expected}, got {example.got}"
    exact = f" ({example.exact})" if example.exact and example.exact != example.expected else ""
    return f"{size}; {said}{exact}"


def escaped(text: str) -> str:
    """Text for a table cell."""
    return " ".join(text.replace("|", "\\|").split())


def wrong_row(subject: Wrong, report: TargetReport) -> str:
    """One line of the table of wrong implementations."""
    first: CheckRecord = next(
        (check for check in report.failed if check.counterexample is not None), report.failed[0]
    )
    killers = ", ".join(
        f"**{check.id}**" if check.id == subject.only else check.id for check in report.failed
    )
    cells = (
        f"`{subject.name}`",
        subject.summary,
        subject.source,
        killers,
        shown(first.counterexample, first.message),
    )
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


def page() -> str:
    """The whole page.

    Raises:
        SystemExit: a wrong one was accepted or a right one rejected.
    """
    groups: defaultdict[str, list[Subject]] = defaultdict(list)
    reports = {}
    for subject in in_order([*WRONG, *RIGHT]):
        report = check_target(subject.target, Options(**subject.options))
        if report.conforms is isinstance(subject, Wrong):
            raise SystemExit(f"{subject.target}: conforms is {report.conforms}")
        reports[subject.target] = report
    for wrong in WRONG:
        groups[wrong.place.split(":")[0]].append(wrong)
    lines = [HEAD, f"{len(WRONG)} wrong, {len(RIGHT)} right implementations; {len(CHECKS)} checks."]
    for module, members in groups.items():
        lines += ["", f"## {module.replace('_', ' ')}", ""]
        lines += ["| mutant | what is wrong | how one gets there | killed by | counterexample |"]
        lines += ["|---|---|---|---|---|"]
        for member in members:
            assert isinstance(member, Wrong)
            lines.append(wrong_row(member, reports[member.target]))
    lines += ["", "## Right in another style", "", "| implementation | style | judged as |"]
    lines += ["|---|---|---|"]
    for right in RIGHT:
        judged = options_as_flags(right.options)
        lines.append(f"| `{right.name}` | {escaped(right.summary)} | `{judged}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, whole or not at all."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    replace_file(path, page().encode())


if __name__ == "__main__":
    main()
