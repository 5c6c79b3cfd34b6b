"""The layers hold, and the project refers to nothing outside itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"(?<![\w.:/])/(?:home|root|work|Users)\b|\bshared[/]|[.]library\b")
"""Absolute paths of somebody's machine, and folders that are not in the repository."""

BINARY = {".safetensors", ".png", ".parquet"}
"""Suffixes of files that are not text."""


def _sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: the project's own files cannot be listed")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix not in BINARY]


def test_imports_go_down_only() -> None:
    script = Path(sys.executable).with_name("lint-imports")
    if not script.is_file():
        pytest.skip("lint-imports is not installed (the `dev` extra)")
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = [m for row in layers["contracts"][0]["layers"] for m in re.findall(r"\w+", row)]
    missing = [
        name
        for name in names
        if not any((ROOT / "pdverify" / end).exists() for end in (name, f"{name}.py"))
    ]
    if missing:
        pytest.skip(f"layers without a module yet: {', '.join(missing)}")
    run = subprocess.run(
        [script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_torch_is_not_imported_at_start_up() -> None:
    code = "import sys, pdverify.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("text", ["see /" + "home/me/x", "in " + "shared" + "/math.md", "=/root"])
def test_outside_paths_are_recognized(text: str) -> None:
    assert OUTSIDE.search(text)


def test_nothing_outside_the_repository_is_named() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    # this file's own samples are assembled from pieces, save for "=/root"
    found = [line for line in found if '"=/root"' not in line]
    assert found == []
