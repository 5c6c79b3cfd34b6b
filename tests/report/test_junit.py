"""JUnit XML: one case per check, whatever the text holds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pdverify.report.junit import to_junit, write_junit
from pdverify.report.target_console import convention_text, failure_text
from tests.report.target_sample import (
    ABSENT,
    ACCEPTED,
    CONVENTION,
    FAILED,
    PASSED,
    STOPPED,
    target_report,
)


def test_one_case_per_check(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    write_junit(target_report(PASSED, FAILED, CONVENTION, ACCEPTED, ABSENT, STOPPED), path)
    (suite,) = ElementTree.parse(path).getroot()
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")}
    assert counts == {
        "tests": "6",
        "failures": "2",
        "errors": "0",
        "skipped": "3",
        "time": "12.300",
    }
    cases = suite.findall("testcase")
    assert [(case.get("classname"), case.get("name")) for case in cases] == [
        ("masks:keep", check.id)
        for check in (PASSED, FAILED, CONVENTION, ACCEPTED, ABSENT, STOPPED)
    ]
    assert [case.get("time") for case in cases[:2]] == ["0.250", "0.500"]
    assert list(cases[0]) == []
    failure = cases[1].find("failure")
    assert failure is not None
    assert (failure.get("type"), failure.get("message")) == ("wrong", FAILED.message)
    assert failure.text == failure_text(FAILED)
    reasons = [case.find("skipped") for case in cases[3:]]
    assert [reason.get("message") for reason in reasons if reason is not None] == [
        f"accepted: {convention_text(ACCEPTED)}",
        "does not apply: the target returns no loss",
        "not run: stopped after a time-out",
    ]
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert properties["torch"] == "2.13.0"
    assert properties["seed"] == "41"
    assert os.listdir(tmp_path) == ["junit.xml"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("<a> & \"b\" 'c'", "<a> & \"b\" 'c'"),
        ("bell \x07, nul \0", r"bell \x07, nul \x00"),
        ("half a pair \ud800", r"half a pair \ud800"),
        ("π ≥ 0 \U0001f600", "π ≥ 0 \U0001f600"),
    ],
)
def test_text_that_xml_cannot_hold(text: str, read: str) -> None:
    root = ElementTree.fromstring(to_junit(target_report(replace(FAILED, message=text))))
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.get("message") == read
    assert read in (failure.text or "")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "junit.xml"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_junit(target_report(), path)
    assert path.read_text() == "old"
