"""Emitted pytest files: they fail on the wrong target, pass on the right one, and need neither
this package nor anything but torch and pytest."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdverify.conformance.records import CheckRecord, TargetCounterexample
from pdverify.report.emit_test import LARGEST, check_replaceable, write_test
from tests.report.target_sample import ABSENT, FAILED, KEEP, PASSED, target_report

INPUTS: dict[str, Any] = {
    "logits": [[[0.5, -math.inf, 1.25], [0.75, 0.0, -2.5]], [[0.0, 1.0, 2.0], [3.0, 0.5, 0.25]]],
    "tokens": [[2, 0], [1, 0]],
    "advantages": [[1.0, -1.5], [0.0, 2.0]],
    "response_mask": [[True, True], [True, False]],
    "delta": 0.15,
}
DTYPES = {
    "logits": "bfloat16",
    "tokens": "int64",
    "advantages": "float32",
    "response_mask": "bool",
    "delta": "number",
}
TARGET = '''
"""Sums and first logits: no mask, but right answers are known. WRONG breaks all of them."""
import os

import torch

WRONG = os.environ.get("WRONG") == "1"
CALLS = []


def keep(logits, tokens, advantages, response_mask, delta):
    CALLS.append(1)
    if WRONG and bool((advantages == 7).any()):
        raise ValueError("seven")
    if WRONG and bool((advantages == 8).any()):
        tokens += 1
    if WRONG and bool((advantages == 9).any()):
        advantages = advantages + len(CALLS)
    first = logits[..., 0].float()
    off = 1.0 if WRONG else 0.0
    weight = torch.where(response_mask | WRONG, advantages, 0.0)
    loss = -(1 + off) * weight * torch.log_softmax(logits.float(), -1)[..., 0]
    loss = torch.where(weight != 0, loss, 0.0)
    return {
        "keep": (advantages > 0) ^ WRONG,
        "divergence": first + off,
        "coefficient": first * advantages + off,
        "loss": loss,
    }
'''


def _failed(id: str, **changes: Any) -> CheckRecord:
    facts = {"inputs": INPUTS, "dtypes": DTYPES, "margin": math.nan} | changes
    return replace(FAILED, id=id, counterexample=replace(KEEP, **facts))


def _on(value: float, second: float = -1.5) -> dict[str, Any]:
    return {"inputs": INPUTS | {"advantages": [[value, second], [0.0, 2.0]]}}


ANSWER = {"quantity": "answer", "place": None, "expected": "an answer", "got": "nothing"}
FAILURES = [
    _failed("mask.kept", place=(0, 0), expected="kept", got="dropped"),
    _failed("mask.dropped", place=(0, 1), expected="dropped", got="kept"),
    _failed("mask.split", place=(0, 1), expected="dropped", got="kept", presentation="split"),
    _failed("mask.strided", place=(0, 1), expected="dropped", got="kept", presentation="strided"),
    _failed(
        "value.divergence",
        quantity="divergence",
        place=(0, 1),
        expected="0.75",
        got="1.75",
        error=1.0,
        budget=1e-7,
    ),
    _failed(
        "value.interval",
        quantity="coefficient",
        place=(0, 1),
        expected="[-1.13, -1.12]",
        got="-0.125",
        error=0.995,
        budget=1e-7,
    ),
    _failed(
        "loss.value",
        quantity="loss",
        place=(0, 0),
        expected="1.13687105",
        got="2.2737421",
        error=1.13687105,
        budget=1e-3,
    ),
    _failed(
        "loss.gradient",
        quantity="gradient",
        place=(0, 0),
        expected="-0.679178703 at column 0",
        got="-1.36",
        error=0.679178703,
        budget=1e-2,
    ),
    _failed("loss.padding", quantity="loss", place=(1, 1), expected="0 on padding", got="1.5"),
    replace(_failed("call.raised", **ANSWER, **_on(7.0)), kind="raised"),
    replace(
        _failed("call.modified", quantity="inputs", place=None, expected="an answer", **_on(8.0)),
        kind="modified",
    ),
    _failed(
        "mask.equality", place=(0, 1), expected="kept", got="dropped", margin=0.0, **_on(1.0, 1.5)
    ),
    _failed("call.twice", **ANSWER, presentation="repeated", **_on(9.0)),
]


def _run(folder: Path, name: str, *, wrong: bool) -> dict[str, str]:
    """Outcome by test of the emitted file, in an interpreter that cannot import this package."""
    blocked = folder / "blocked"
    (blocked / "pdverify").mkdir(parents=True, exist_ok=True)
    (blocked / "pdverify" / "__init__.py").write_text("raise ImportError('blocked')")
    environ = os.environ | {
        "PYTHONPATH": str(blocked),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "WRONG": "1" if wrong else "0",
    }
    options = ["-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", os.devnull, name],
        cwd=folder / "blocked",
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line.split() for line in done.stdout.splitlines() if "::test_" in line]
    found = {line[1].split("::")[1]: line[0] for line in lines if line[0] in ("PASSED", "FAILED")}
    assert found, done.stdout + done.stderr
    return found


def test_every_kind_of_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "masks.py").write_text(TARGET)
    (tmp_path / "tests").mkdir()
    path = tmp_path / "tests" / "test_found.py"
    monkeypatch.chdir(tmp_path)
    outputs = "keep", "divergence", "coefficient", "loss"
    made = target_report(PASSED, *FAILURES, ABSENT, target="masks.py:keep", outputs=outputs)
    assert write_test(made, path) == len(FAILURES)
    names = [f"test_{check.id.replace('.', '_')}" for check in FAILURES]
    assert _run(tmp_path, str(path), wrong=True) == dict.fromkeys(names, "FAILED")
    assert _run(tmp_path, str(path), wrong=False) == dict.fromkeys(names, "PASSED")


def test_decisions_that_a_loss_implies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TARGET.replace('"keep": (advantages > 0) ^ WRONG,', "")
    (tmp_path / "masks.py").write_text(source.replace("def keep(", "def loss("))
    monkeypatch.chdir(tmp_path)
    dropped = _failed("mask.decisions", place=(1, 1), expected="dropped", got="kept")
    made = target_report(
        dropped, target="masks:loss", outputs=("divergence", "coefficient", "loss")
    )
    assert write_test(made, "test_found.py") == 1
    name = str(tmp_path / "test_found.py")
    assert _run(tmp_path, name, wrong=True) == {"test_mask_decisions": "FAILED"}
    assert _run(tmp_path, name, wrong=False) == {"test_mask_decisions": "PASSED"}


def test_what_stands_beside_a_test(tmp_path: Path) -> None:
    path = tmp_path / "test_found.py"
    assert write_test(target_report(FAILED), path) == 1
    text = path.read_text()
    for line in (
        "    # mask.boundary: expected drop, got keep",
        "    # exact: D = 0.447415, P in [-0.10648, -0.10646]",
        "    # got: keep",
        "    # margin: -0.0625",
        f"    # likely cause: {FAILED.cause}",
        f"    # rerun: {FAILED.rerun}",
    ):
        assert line in text.splitlines()
    assert "import pdverify" not in text
    assert max(map(len, text.splitlines())) <= 120


def _inexpressible() -> Iterator[tuple[CheckRecord, str]]:
    value = {"quantity": "loss", "place": None, "expected": "2.0"}
    yield replace(FAILED, kind="time-out"), "a call that does not return"
    yield replace(FAILED, counterexample=None), "there is no counterexample"
    rest = {name: value for name, value in KEEP.inputs.items() if name != "logits"}
    cut = replace(KEEP, inputs=rest)
    yield replace(FAILED, counterexample=cut), "its input is too large to keep (logits)"
    many = replace(KEEP, inputs=KEEP.inputs | {"logits": [0.0] * LARGEST})
    yield replace(FAILED, counterexample=many), "its input has 20005 numbers"
    yield _failed("loss.value", **value), "no finite budget"
    yield _failed("loss.value", **value, error=1e-15, budget=1e-16), "smaller than the ninth digit"
    yield _failed("loss.value", **value | {"expected": "a number"}), "'a number', no number"


@pytest.mark.parametrize(("check", "why"), list(_inexpressible()))
def test_what_no_test_can_show_is_said(tmp_path: Path, check: CheckRecord, why: str) -> None:
    path = tmp_path / "test_found.py"
    assert write_test(target_report(check), path) == 0
    text = path.read_text()
    assert f"# {check.id}: " in text
    assert f"# Not a test: {why}" in text or why in text
    assert "def test_" not in text
    compile(text, str(path), "exec")


def test_nothing_failed(tmp_path: Path) -> None:
    assert write_test(target_report(PASSED, ABSENT), tmp_path / "test_found.py") == 0
    assert os.listdir(tmp_path) == []


def test_only_its_own_files_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "test_found.py"
    path.write_text("my own tests")
    with pytest.raises(FileExistsError, match="was not written by --emit-test"):
        write_test(target_report(FAILED), path)
    with pytest.raises(FileExistsError, match="was not written by --emit-test"):
        check_replaceable(path)
    assert path.read_text() == "my own tests"
    path.unlink()
    write_test(target_report(FAILED), path)
    write_test(target_report(replace(FAILED, id="mask.equality")), path)
    assert "def test_mask_equality" in path.read_text()
    assert "def test_mask_boundary" not in path.read_text()


def test_a_target_without_a_name(tmp_path: Path) -> None:
    made = target_report(FAILED, target="tests:make.<locals>.keep")
    with pytest.raises(ValueError, match="cannot import it by that name"):
        write_test(made, tmp_path / "test_found.py")
    assert os.listdir(tmp_path) == []


def test_examples_are_complete() -> None:
    """The fabricated failures have what the judge's have."""
    for check in FAILURES:
        assert isinstance(check.counterexample, TargetCounterexample)
        assert check.counterexample.dtypes.keys() == check.counterexample.inputs.keys()
