"""Every step of docs/ci.md does what the page says, in a folder made of its blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - pytester forgets what a test imports, and torch imports only once
import yaml

import pdverify
from pdverify import cli
from pdverify.conformance.targets import load_target
from tests.test_pytest_plugin import MODULE

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)
WHEEL = f"wheels/pdverify-{pdverify.__version__}-py3-none-any.whl"


def _blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


LINES = [line for text in _blocks("sh") for line in text.splitlines() if line]
(RECIPE,) = _blocks("yaml")
STEPS = [
    step["run"]
    for job in yaml.safe_load(RECIPE)["jobs"].values()
    for step in job["steps"]
    if "run" in step
]
(TABLE,) = _blocks("toml")
TARGET, TEST = _blocks("python")


def _line(lines: list[str], start: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(start)]
    return shlex.split(line)[1:]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The maintainer's repository, before the table is in pyproject.toml."""
    for name in ("GITHUB_ACTIONS", "PDVERIFY_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.syspathinsert()
    files = {"mypkg/__init__.py": "", "mypkg/masks.py": TARGET, "tests/test_masks.py": TEST}
    for name, text in files.items():
        path = pytester.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return pytester.path


def test_by_hand_it_fails_by_the_convention(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = _line(LINES, "pdverify check")
    assert cli.main(argv) == 1
    out = capsys.readouterr().out
    assert re.findall(r"^FAILED (\S+)", out, flags=re.M) == ["mask.zero-advantage"]
    assert "--accept zero-advantage-negative-rule" in out


def test_the_job_passes_with_the_table(project: Path) -> None:
    (project / "pyproject.toml").write_text(TABLE)
    assert cli.main(_line(STEPS, "pdverify check")) == 0
    assert (project / "masks.json").stat().st_size
    assert (project / "masks.xml").stat().st_size


def test_both_pytest_doors(project: Path, pytester: pytest.Pytester) -> None:
    (project / "pyproject.toml").write_text(TABLE)
    options = "-p", "no:cacheprovider"
    decorated = pytester.runpytest_inprocess(*options, *_line(STEPS, "pytest "))
    outcomes = decorated.parseoutcomes()
    assert decorated.ret == 0
    assert outcomes["xfailed"] == 1
    assert outcomes["passed"] >= 10
    plugin = pytester.runpytest_inprocess(*options, "-p", MODULE, *_line(LINES, "pytest "))
    assert plugin.ret == 0
    assert plugin.parseoutcomes()["passed"] == outcomes["passed"]


def test_the_page_names_what_there_is() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "sh", "toml", "yaml"}
    pip = [line for line in (*LINES, *STEPS) if line.startswith("pip install")]
    assert sum(WHEEL in line for line in pip) == 2
    wanted = re.search(r'"(torch[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert wanted
    assert sum(wanted[1] in line for line in pip) == 2
    first = [step.split()[0] for step in STEPS]
    assert first == ["pip", "pip", "pdverify", "pytest"]


def test_the_target_has_the_name_the_page_gives_it(project: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(project)
    assert load_target(_line(LINES, "pdverify check")[1]).parameters == (
        "logprobs",
        "behavior_logprobs",
        "advantages",
        "delta",
    )
