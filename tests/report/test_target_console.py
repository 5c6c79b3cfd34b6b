"""The report on a target as text: every fact shows, and it reads well in a log."""

from __future__ import annotations

import ast
import io
import math
from dataclasses import replace

import numpy as np
import pytest

from pdverify.conformance.alternatives import ALTERNATIVES
from pdverify.conformance.bits import Bits
from pdverify.conformance.records import TargetReport
from pdverify.report.target_console import SHOWN_CELLS, failure_text, print_target_report, summary
from pdverify.report.writer import WIDTH
from tests.report.target_sample import (
    ABSENT,
    ACCEPTED,
    CONVENTION,
    FAILED,
    KEEP,
    PASSED,
    STOPPED,
    target_report,
)
from tests.report.test_console import Ascii, Terminal


def _text(made: TargetReport) -> str:
    out = io.StringIO()
    print_target_report(made, out)
    return out.getvalue()


def _row(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(start)).split()


def test_header() -> None:
    lines = _text(target_report()).splitlines()
    assert lines[:5] == [
        "pdverify 0.1.0, torch 2.13.0; level quick, seed 41, 12.3 s",
        "target masks:keep",
        "judged as predictive-kl, view topk, tail exact, support append, precision fp32,"
        " delta 0.15, top_k 5",
        "returns keep, loss; takes logits, tokens, delta",
        "effective bits of the direction: 23.8 [22.9, 24.6] (fp32 has 24)",
    ]


def test_bits_that_are_bounded_or_absent() -> None:
    bounded = Bits(None, None, None, 21.4, 900, 0, 5)
    assert "direction: ≥ 21 (fp32" in _text(target_report(effective_bits=bounded))
    absent = target_report(effective_bits=None, bits_note="the mask has no direction", tail=None)
    assert "direction: none: the mask has no direction" in _text(absent)
    assert "view topk, support append" in _text(absent)


def test_the_table() -> None:
    text = _text(target_report(FAILED, PASSED, ACCEPTED, ABSENT, STOPPED))
    assert _row(text, "mask.boundary") == ["mask.boundary", "FAILED", "131", "124", "7", "5", "-"]
    assert _row(text, "size.k-one") == ["size.k-one", "ok", "121", "112", "0", "3", "0.31"]
    assert _row(text, "loss.value") == ["loss.value", "accepted", "-", "-", "-", "-", "inf"]
    assert "does not apply (the target returns no loss): loss.cap\n" in text
    assert "not run (stopped after a time-out): size.odd\n" in text


def test_a_failure_explains_itself() -> None:
    text = _text(target_report(PASSED, FAILED))
    block = text[text.index("FAILED mask.boundary (wrong)") :]
    for line in (
        "  expected drop, got keep",
        "  where:      keep at sequence 0, position 1",
        "  expected:   drop",
        "  got:        keep",
        "  exact:      D = 0.447415, P in [-0.10648, -0.10646]",
        "  margin:     -0.0625",
        f"  cause:      {FAILED.cause}",
        "  inputs (shrunk, contiguous):",
        "    logits = [[[0.5, -inf, 1.25], [0.75, 0.0, -2.5]]]  # float32",
        "    delta = 0.15",
        f"  rerun:      {FAILED.rerun}",
        "  explain:    pdverify explain mask.boundary",
    ):
        assert line in block.splitlines()
    assert "error:" not in block
    assert "convention:" not in block


def test_a_convention_is_named_with_how_to_accept_it() -> None:
    text = failure_text(CONVENTION)
    said = f"follows the convention '{ALTERNATIVES['ratio-gradient'].summary}'; accept it with"
    assert said in " ".join(text.split())
    assert "--accept ratio-gradient" in " ".join(text.split())
    assert "budget:     2.5e-07" in text


def test_small_inputs_are_literals() -> None:
    row = [i + 1 / 8 for i in range(SHOWN_CELLS)]
    text = failure_text(replace(FAILED, counterexample=replace(KEEP, inputs={"logits": row})))
    start = text.index("logits = ") + len("logits = ")
    found = text[start : text.index("# float32")]
    assert ast.literal_eval(found.strip()) == row
    assert max(map(len, text.splitlines())) <= WIDTH


def test_float32_inputs_have_the_fewest_digits_that_do() -> None:
    inputs = {"advantages": [float(np.float32(0.1)), -math.inf, float(np.float32(1 / 3))]}
    example = replace(KEEP, inputs=inputs, dtypes={"advantages": "float32"})
    text = failure_text(replace(FAILED, counterexample=example))
    assert "    advantages = [0.1, -inf, 0.33333334]  # float32" in text.splitlines()
    as_fp64 = replace(example, dtypes={"advantages": "float64"})
    assert "0.10000000149011612" in failure_text(replace(FAILED, counterexample=as_fp64))


def test_big_inputs_are_abbreviated() -> None:
    rows = [[float(i) for i in range(SHOWN_CELLS)]] * 2
    text = failure_text(replace(FAILED, counterexample=replace(KEEP, inputs={"logits": rows})))
    line = next(line for line in text.splitlines() if "logits" in line)
    assert line == (
        "    logits = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, ...]  # float32 2 x 128, abbreviated"
    )


def test_inputs_that_are_not_kept_are_named() -> None:
    rest = {name: value for name, value in KEEP.inputs.items() if name != "logits"}
    text = failure_text(replace(FAILED, counterexample=replace(KEEP, inputs=rest)))
    assert "    too large to keep: logits; the rerun makes them again" in text.splitlines()


def test_a_failure_without_a_counterexample() -> None:
    text = failure_text(replace(FAILED, counterexample=None, cause=None))
    assert text.splitlines() == [
        "mask.boundary: expected drop, got keep",
        f"  rerun:      {FAILED.rerun}",
        "  explain:    pdverify explain mask.boundary",
    ]


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            target_report(),
            "conforms: yes, 1 check, 121 decisions (112 determined), 0 wrong (exit 0)",
        ),
        (
            target_report(PASSED, replace(ACCEPTED, decisions=FAILED.decisions), ABSENT, STOPPED),
            "conforms: yes, 2 checks, 252 decisions (236 determined), 0 wrong, 1 accepted"
            " (7 decisions), 1 not run (exit 0)",
        ),
        (
            target_report(PASSED, FAILED, CONVENTION),
            "conforms: no, 3 checks, 252 decisions (236 determined), 7 wrong, 2 failed;"
            " start with mask.boundary (exit 1)",
        ),
        (
            target_report(CONVENTION, convention="ratio-gradient"),
            "conforms: no, 1 check, 0 decisions (0 determined), 0 wrong, 1 failed; the convention"
            " ratio-gradient explains every failure: --accept ratio-gradient, or change the target"
            " (exit 1)",
        ),
    ],
)
def test_the_last_line(made: TargetReport, line: str) -> None:
    assert summary(made) == line
    assert _text(made).splitlines()[-1] == line


def test_plain_in_a_pipe_and_colored_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = target_report(FAILED, PASSED, CONVENTION, ABSENT)
    text = _text(made)
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert max(map(len, text.splitlines()[:-1])) <= WIDTH
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    print_target_report(made, out)
    assert "\x1b[" in out.getvalue()


def test_ascii_streams_get_ascii() -> None:
    out = Ascii()
    print_target_report(target_report(effective_bits=Bits(None, None, None, 21.4, 9, 0, 5)), out)
    assert ">= 21" in out.getvalue()
