"""A planted fault, seen by whoever runs the program: exit status 1 and the entry's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdverify import cli
from pdverify.cases import build
from pdverify.cases.recordings import write_recording
from pdverify.conformance import builtin
from tests.mutants import faults

Capture = pytest.CaptureFixture[str]
Plant = Callable[[pytest.MonkeyPatch], None]

SELECTED = "*/predictive-kl/topk/exact", "*/predictive-kl/topk/uniform", "torch-eager/ppo-clip/*"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """The program on a recording and two families, in this process: a worker has no fault."""
    monkeypatch.setattr(builtin, "FAMILIES", ("direction-conflict", "tail-conflict"))
    monkeypatch.setattr(builtin.os, "cpu_count", lambda: 1)
    path = tmp_path / "mine.safetensors"
    write_recording(path, {"mine": build("direction-conflict", seed=1)}, {})
    return lambda: cli.main(["check", "--input", str(path), "--select", *SELECTED])


def test_without_a_fault(program: Callable[[], int], capsys: Capture) -> None:
    assert program() == 0
    assert "conforms: yes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plant", "named", "others"),
    [
        (
            faults.direction_by_the_ratio,
            ["torch-eager/predictive-kl/topk/exact", "torch-eager/predictive-kl/topk/uniform"],
            ["numpy/predictive-kl/topk/exact", "torch-eager/ppo-clip/binary"],
        ),
        (
            faults.aggregated_where_exact_is_asked,
            ["torch-eager/predictive-kl/topk/exact"],
            ["torch-eager/predictive-kl/topk/uniform", "numpy/predictive-kl/topk/exact"],
        ),
        (
            faults.numpy_sign_of_the_coefficient,
            ["numpy/predictive-kl/topk/exact", "numpy/predictive-kl/topk/uniform"],
            ["torch-eager/predictive-kl/topk/exact"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_with_a_fault(
    program: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    plant: Plant,
    named: list[str],
    others: list[str],
) -> None:
    plant(monkeypatch)
    assert program() == 1
    out = capsys.readouterr().out
    assert "conforms: no" in out
    for name in named:
        assert f"WRONG {name} " in out
    for name in others:
        assert name not in out
