"""Every command and snippet of README.md runs, and every link leads somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)


def _blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


LINES = [line for text in _blocks("sh") for line in text.splitlines() if line]
MAKE = [line for line in LINES if line.startswith("make ")]
PDVERIFY = [line for line in LINES if line.startswith("pdverify ")]
MASK, TEST, TRAINING = _blocks("python")


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {kind for kind, _ in BLOCKS} == {"sh", "python"}
    assert set(LINES) == {*MAKE, *PDVERIFY}


def test_both_commands_come_first() -> None:
    assert LINES[:2] == ["make verify", "make test"]


@pytest.mark.parametrize(
    ("line", "runs"), [("make verify", "pdverify check"), ("make test", "-m pytest")]
)
def test_make_target_runs_what_it_says(line: str, runs: str) -> None:
    assert line in MAKE
    # `make test` runs this very test, and a nested make announces its directory
    dry = [*shlex.split(line), "-n", "--no-print-directory"]
    made = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert runs in made.stdout.rstrip().splitlines()[-1]


@pytest.mark.parametrize("line", PDVERIFY)
def test_command_runs(line: str, tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("pdverify")
    assert script.is_file(), "pdverify is not installed: run `make install`"
    arguments = shlex.split(line)[1:]
    (tmp_path / "mymasks.py").write_text(MASK)
    run = subprocess.run(
        [script, *arguments],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.strip()
    if "--json" in arguments:
        assert (tmp_path / arguments[arguments.index("--json") + 1]).stat().st_size


def test_the_mask_passes_in_pytest(tmp_path: Path) -> None:
    (tmp_path / "mymasks.py").write_text(MASK)
    (tmp_path / "test_mymasks.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def test_training_snippet_runs() -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        scope: dict[str, Any] = {"__name__": "readme"}
        exec(compile(TRAINING, "README.md", "exec"), scope)
    keep, gradient = scope["keep"], scope["logits"].grad
    assert keep.dtype == torch.bool
    assert keep.shape == scope["tokens"].shape
    dropped = ~keep
    assert dropped.any()
    assert keep.any()
    assert not gradient[dropped].any()
    assert gradient[keep].abs().sum(-1).gt(0).all()


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        assert "://" in target or (path.parent / target).is_file(), f"{page}: {target}"
