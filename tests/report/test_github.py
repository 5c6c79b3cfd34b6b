"""GitHub Actions: annotations on one line each, a summary in markdown, silence elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdverify.report.github import announce, github_annotations, step_summary
from pdverify.report.target_console import failure_text, summary
from tests.report.target_sample import ABSENT, CONVENTION, FAILED, PASSED, target_report


def test_one_annotation_per_failure() -> None:
    lines = github_annotations(target_report(PASSED, FAILED, CONVENTION, ABSENT))
    assert len(lines) == 2
    assert lines[0].startswith("::error title=pdverify mask.boundary::mask.boundary: expected")
    assert all("\n" not in line for line in lines)
    assert lines[0].endswith("%0A  explain:    pdverify explain mask.boundary")


def test_annotations_are_escaped() -> None:
    made = target_report(replace(FAILED, message="100%\r\nsure: a, b"), target="dir/a,b.py:keep")
    (line,) = github_annotations(made)
    assert line.startswith("::error file=dir/a%2Cb.py,title=pdverify mask.boundary::")
    assert "100%25%0D%0Asure: a, b" in line


def test_the_summary() -> None:
    made = target_report(PASSED, FAILED, ABSENT)
    text = step_summary(made)
    assert text.startswith("### pdverify: `masks:keep`\n")
    assert summary(made) in text
    assert "| `mask.boundary` | FAILED | 131 | 7 | - |" in text
    assert "| `size.k-one` | ok | 121 | 0 | 0.31 |" in text
    assert "loss.cap" not in text
    assert f"```\n{failure_text(FAILED)}\n```" in text


def test_a_fence_that_its_text_cannot_close() -> None:
    made = replace(FAILED, message="```` x")
    assert f"`````\n{failure_text(made)}\n`````" in step_summary(target_report(made))


def test_announce_only_where_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, path = target_report(FAILED), tmp_path / "summary.md"
    path.write_text("before\n")
    announce(made, {"GITHUB_STEP_SUMMARY": str(path)})
    assert capsys.readouterr().out == ""
    assert path.read_text() == "before\n"
    announce(made, {"GITHUB_ACTIONS": "true"})
    assert capsys.readouterr().out.splitlines() == github_annotations(made)
    announce(made, {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(path)})
    assert path.read_text() == "before\n" + step_summary(made)
