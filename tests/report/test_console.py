"""The report as text: every field shows, wrong entries are named, plain and narrow in a pipe."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from pdverify.conformance.bits import wilson
from pdverify.conformance.records import CertificateRecord, Report
from pdverify.report.console import print_report, summary
from pdverify.report.writer import WIDTH
from tests.report.sample import ABSENT, RIGHT, WRONG, report


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Ascii(io.StringIO):
    encoding = "ascii"


def _text(made: Report) -> str:
    out = io.StringIO()
    print_report(made, out)
    return out.getvalue()


def _row(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_header_and_inputs() -> None:
    text = _text(report())
    first = text.splitlines()[0]
    for part in ("pdverify 0.1.0", "torch 2.13.0", "level quick", "seed 41", "12.3 s"):
        assert part in first
    assert "real tokens: the recording of the package" in text
    assert _row(text, "llama.cpp") == ["llama.cpp", "real", "24", "49152", "bf16"]
    assert _row(text, "2 families")[:5] == ["2", "families", "family", "666", "257-1000"]
    assert "zipf" not in text


def test_a_row_has_every_figure() -> None:
    text = _text(report(RIGHT, WRONG, ABSENT))
    right = ["1201", "1102", "0", "13", "0.31", "0.42", "0.53", "≥", "21", "ok"]
    assert _row(text, "  topk aggregated")[2:] == right
    wrong = ["1303", "1204", "7", "15", "0.31", "inf", "0.53", "23.8", "[22.9,", "24.6]", "WRONG"]
    assert _row(text, "predictive-kl topk exact")[3:] == wrong
    assert "torch-eager, cpu, fp32" in text
    assert "triton, cuda, fp32" in text
    assert "unavailable because no NVIDIA GPU is present: all 1 entries" in text


def test_an_entry_missing_from_a_backend_that_runs() -> None:
    text = _text(report(RIGHT, replace(ABSENT, backend="torch-eager", device="cpu", tail="exact")))
    assert _row(text, "  topk exact")[-1] == "n/a"
    assert "present: predictive-squared-hellinger topk exact" in text


@pytest.mark.parametrize(
    ("error", "shown"),
    [(1.0, "1.00"), (1.004, ">1"), (1.5, "1.50"), (1e-9, "<0.01"), (0.0, "0.00"), (2e9, "2e+09")],
)
def test_an_error_over_budget_never_reads_as_one_that_passes(error: float, shown: str) -> None:
    text = _text(report(replace(RIGHT, divergence_error=error)))
    assert _row(text, "  topk aggregated")[6] == shown


def test_directions_and_certificates() -> None:
    text = _text(report())
    share = wilson(12, 160)
    assert f"7.5% [{100 * share.low:.3g}, {100 * share.high:.3g}]" in text
    assert "12/160, 3 undecided" in text
    assert "163 undecided" in text
    row = _row(text, "stale  bracket")
    assert row[:3] == ["stale", "bracket", "85.9%"]
    assert row[-1] == "0/140"


def test_a_failure_explains_itself() -> None:
    text = _text(report(RIGHT, WRONG))
    block = text[text.index(f"WRONG {WRONG.name} (cpu, fp32)") :]
    for part in (
        "7 determined decisions are wrong",
        "family: zipf, sequence 3, position 17",
        "coefficient",
        "0.12509999999999999",
        "nan",
        "2.4999999999999999e-07",
        "-0.0625",
        "421",
        "exact C:",
        "[bold] is no markup",
    ):
        assert part in block
    assert f"WRONG {RIGHT.name}" not in text


def test_the_last_line() -> None:
    good = report(RIGHT, ABSENT)
    assert summary(good) == (
        "conforms: yes, 1 entries, 1201 decisions (1102 determined), 0 wrong (exit 0)"
    )
    assert _text(good).splitlines()[-1] == summary(good)
    assert summary(report(RIGHT, WRONG)) == (
        "conforms: no, 2 entries, 2504 decisions (2306 determined), 7 wrong, 1 failing (exit 1)"
    )


def test_a_contradicted_certificate_is_named() -> None:
    record = CertificateRecord("stale", "interval", wilson(9, 9), wilson(2, 9))
    text = _text(report(conforms=False, certificates=[record]))
    assert "WRONG certificate interval, stale" in text
    assert "contradicted on 2 of 9" in text
    assert text.splitlines()[-1].endswith("0 failing, a certificate is wrong (exit 1)")


def test_plain_and_narrow_in_a_pipe() -> None:
    longest = replace(RIGHT, bits=WRONG.bits, decisions=replace(WRONG.decisions, total=1234567))
    text = _text(report(longest, WRONG, replace(longest, view="full", tail=None)))
    assert "\x1b" not in text
    assert not set(text) & set("─│┃━┏┓")
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "23.8 [22.9, 24.6]" in text


def test_color_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "200")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    print_report(report(RIGHT, WRONG), out)
    assert "\x1b[" in out.getvalue()


def test_ascii_streams_get_ascii() -> None:
    out = Ascii()
    print_report(report(RIGHT, WRONG), out)
    assert ">= 21" in out.getvalue()
    out.getvalue().encode("ascii")
