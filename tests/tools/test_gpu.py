"""The script for a GPU: what it does without one, and how its steps end."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from pdverify.tools import gpu


def test_without_a_gpu_it_says_so_and_exits_0(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    assert gpu.main(["--out", str(out)]) == 0
    assert capsys.readouterr().out == "no GPU: torch sees none here; nothing was run\n"
    assert not out.exists()


@pytest.mark.parametrize(("code", "status"), [("print(7)", 0), ("raise SystemExit(3)", 1)])
def test_a_step_keeps_what_it_prints(code, status, capsys, tmp_path):
    command = (sys.executable, "-c", code)
    assert gpu._step("tests", command, time.monotonic() + 60, tmp_path) == status
    assert "tests: exit" in capsys.readouterr().out
    assert (tmp_path / "tests.txt").read_text() == ("" if status else "7\n")


def test_a_step_ends_with_the_time(capsys, tmp_path):
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    assert gpu._step("bench", command, time.monotonic(), tmp_path) == 1
    assert "bench: stopped" in capsys.readouterr().out
