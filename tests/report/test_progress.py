"""Progress: lines at intervals in a pipe, a bar on a terminal."""

from __future__ import annotations

import io

import pytest

from pdverify.report.progress import Reporter
from tests.report.test_console import Terminal


def test_a_pipe_gets_lines_at_intervals() -> None:
    out = io.StringIO()
    with Reporter(out, interval=3600.0) as report:
        report.say("loading")
        report("stale", 1, 3)
        report("zipf", 2, 3)
    assert out.getvalue() == "loading\n[1/3] stale\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Reporter(out) as report:
        report("stale [x]", 1, 3)
    assert "stale [x]" in out.getvalue()
    assert "1/3" in out.getvalue()
