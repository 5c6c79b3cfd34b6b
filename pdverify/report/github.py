"""A report on a target in GitHub Actions: annotations in the log, a summary of the step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pdverify.conformance.records import CheckRecord, TargetReport
from pdverify.report.target_console import STATUS, failure_text, summary
from pdverify.report.writer import ratio


def github_annotations(report: TargetReport) -> list[str]:
    """One ``::error`` line per failed check; it names the file where the target is one."""
    path, colon, _ = report.target.rpartition(":")
    file = f"file={_property(path)}," if colon and path.endswith(".py") else ""
    return [
        f"::error {file}title={_property(f'pdverify {check.id}')}::{_message(failure_text(check))}"
        for check in report.failed
    ]


def step_summary(report: TargetReport) -> str:
    """Markdown: the verdict, a table of the checks that ran, the failures in full."""
    lines = [
        f"### pdverify: {_inline(report.target)}",
        "",
        summary(report),
        "",
        "| check | status | decisions | wrong | error/budget |",
        "|---|---|---:|---:|---:|",
    ]
    for check in report.checks:
        if check.status != "not-applicable":
            counts = check.decisions
            cells = STATUS[check.status], counts.total, counts.wrong, ratio(check.worst)
            lines.append(f"| `{check.id}` | {' | '.join(map(str, cells))} |")
    for check in report.failed:
        lines += ["", *_details(check)]
    return "\n".join(lines) + "\n"


def announce(report: TargetReport, environ: Mapping[str, str] = os.environ) -> None:
    """In GitHub Actions, print the annotations and append to the step's summary; else nothing.

    Raises:
        OSError: the summary file cannot be written.
    """
    if environ.get("GITHUB_ACTIONS") != "true":
        return
    for line in github_annotations(report):
        print(line)
    path = environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as out:
            out.write(step_summary(report))


def _details(check: CheckRecord) -> list[str]:
    text = failure_text(check)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    title = f"<details><summary><code>{check.id}</code></summary>"
    return [title, "", fence, text, fence, "", "</details>"]


def _inline(text: str) -> str:
    return f"`{text.replace('`', '')}`"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
