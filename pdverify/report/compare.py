"""The comparison of two reports as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from pdverify.conformance.compare import Change, Comparison
from pdverify.report.writer import Writer, emit


def print_comparison(comparison: Comparison, file: IO[str] | None = None) -> None:
    """Print `comparison` to `file` (stdout by default); the last line is the verdict."""
    emit(file, lambda writer: _print(writer, comparison))


def _print(writer: Writer, comparison: Comparison) -> None:
    sections = (
        ("Differences between the runs", comparison.environment, ""),
        ("New failures", comparison.new_failures, "bold red"),
        ("Precision lost", comparison.precision_lost, "bold red"),
        ("No longer judged", comparison.vanished, "bold red"),
        ("Mended", comparison.mended, "bold green"),
    )
    for title, changes, style in sections:
        _section(writer, title, changes, style)
    counts = ", ".join(
        f"{len(changes)} {word}"
        for word, changes in (
            ("new failures", comparison.new_failures),
            ("losses of precision", comparison.precision_lost),
            ("no longer judged", comparison.vanished),
            ("mended", comparison.mended),
        )
    )
    verdict, status = ("worse", 1) if comparison.regressed else ("not worse", 0)
    writer.line(f"{verdict}: {counts} (exit {status})", "bold", whole=True)


def _section(writer: Writer, title: str, changes: Sequence[Change], style: str) -> None:
    if not changes:
        return
    writer.line(title, style or "bold")
    for change in changes:
        writer.line(f"  {change.name}: {change.old} -> {change.new}")
    writer.line()
