"""The wheel, the version ranges, and that every registered name is documented."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import pdverify
from pdverify.backends import BACKENDS
from pdverify.cases import BAD_INPUTS, EDGE_CASES, FAMILIES
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS, TAILS
from pdverify.formats import FORMATS, SCALED
from pdverify.precision.stages import STAGES
from pdverify.report.explain import explain_all
from pdverify.tools.mismatches import MISMATCHES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
REQUIREMENTS: list[str] = [*PROJECT["dependencies"], *(r for rows in EXTRAS.values() for r in rows)]
NAMES: dict[str, Iterable[str]] = {
    "mask": MASKS,
    "tail": TAILS,
    "divergence": DIVERGENCES,
    "backend": BACKENDS,
    "number format": (*FORMATS, *SCALED),
    "input family": FAMILIES,
    "edge case": EDGE_CASES,
    "bad input": BAD_INPUTS,
    "mismatch": MISMATCHES,
    "precision stage": STAGES,
}


def _split(requirement: str) -> tuple[str, str]:
    match = re.fullmatch(r"([A-Za-z0-9_-]+)(.*)", requirement)
    assert match, requirement
    return match[1].lower().replace("_", "-"), match[2]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


PINS = {
    name.lower().replace("_", "-"): version
    for name, version in (
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed (the `dev` extra)")
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", out]
    command = [sys.executable, "-m", "pip", "wheel", *options, ROOT]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"pdverify", f"pdverify-{pdverify.__version__}.dist-info"}


def test_wheel_ships_every_module_and_the_data(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"pdverify/py.typed", "pdverify/cases/data/smollm2.safetensors"} <= names
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "pdverify").rglob("*.py")}
    assert sources <= names
    recording = ROOT / "pdverify/cases/data/smollm2.safetensors"
    assert wheel.read("pdverify/cases/data/smollm2.safetensors") == recording.read_bytes()


def test_wheel_declares_the_command(wheel: zipfile.ZipFile) -> None:
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "pdverify = pdverify.cli:main" in wheel.read(entry).decode()


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_range_has_a_floor_and_the_tested_version_lies_in_it(requirement: str) -> None:
    name, bounds = _split(requirement)
    floor = re.search(r">=([\d.]+)", bounds)
    assert floor, f"{requirement}: no lower bound"
    if name not in PINS:
        assert requirement in EXTRAS["engine"], f"{name} is not in constraints.txt"
        return
    tested = _version(PINS[name])
    assert tested >= _version(floor[1]), f"{name}: tested with {PINS[name]}"
    ceiling = re.search(r"<([\d.]+)", bounds)
    assert ceiling is None or tested < _version(ceiling[1]), f"{name}: tested with {PINS[name]}"


def test_torch_range_and_python_floor() -> None:
    assert dict(map(_split, PROJECT["dependencies"]))["torch"] == ">=2.11,<2.14"
    assert PROJECT["requires-python"] == ">=3.11"


def test_changelog_has_the_version() -> None:
    assert f"## {pdverify.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_page_of_checks_is_what_the_program_writes() -> None:
    assert (ROOT / "docs/checks.md").read_text() == explain_all()


@pytest.mark.parametrize("kind", NAMES)
def test_every_registered_name_is_documented(kind: str) -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("masks.md", "inputs.md"))
    rows = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.M))
    missing = [name for name in NAMES[kind] if name not in rows]
    assert not missing, f"{kind} without a row in docs/masks.md or docs/inputs.md: {missing}"
