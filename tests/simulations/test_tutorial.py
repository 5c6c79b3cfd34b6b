"""The tutorial runs as it stands, from top to bottom."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.M | re.S)


def test_python_runs(tmp_path):
    code = "\n".join(text for kind, text in BLOCKS if kind == "python")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "dppo-topk-kl: dropped" in run.stdout
    assert "predictive-kl: kept" in run.stdout
    assert "full: right in sign on 100.0%" in run.stdout
    assert (tmp_path / "sharing.png").stat().st_size


@pytest.mark.parametrize(
    "line", [x for kind, text in BLOCKS if kind == "sh" for x in text.splitlines()]
)
def test_commands_run(line, tmp_path):
    words = [str(tmp_path) if word == "studies" else word for word in shlex.split(line)]
    assert words[0] == "python"
    run = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
