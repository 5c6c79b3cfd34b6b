"""The plugin: free until asked for, then one item per check."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from pdverify.conformance import target_run
from tests.test_testing import FAKE

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]

ROOT = Path(__file__).parents[1]
MODULE = "pdverify.pytest_plugin"
ARGS = "--pdverify-args=--mask predictive-kl --tail exact"


@pytest.fixture
def run(
    pytester: pytest.Pytester,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., pytest.RunResult]:
    """Runs pytest with this plugin alone, on a folder with a test of its own.

    The folder's plugin `fake` replaces the session.
    """
    monkeypatch.setattr(target_run, "TargetSession", target_run.TargetSession)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.syspathinsert(request.config.rootpath)
    pytester.makepyfile(fake=FAKE, test_own="def test_own(): pass")
    pytester.syspathinsert()
    options = "-p", MODULE, "-p", "no:cacheprovider"
    return lambda *more: pytester.runpytest_inprocess(*options, *more)


def test_it_is_registered() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"pdverify": MODULE}


def test_it_imports_nothing_until_used(tmp_path: Path) -> None:
    """Measured where it counts: at the end of a run that does not use it."""
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_sessionfinish():\n"
        "    tops = {name.partition('.')[0] for name in sys.modules}\n"
        "    heavy = {'torch', 'numpy', 'scipy', 'flint', 'rich'} & tops\n"
        "    own = {name for name in sys.modules if name.partition('.')[0] == 'pdverify'}\n"
        "    print('\\nHEAVY', sorted(heavy), 'OWN', sorted(own))\n"
    )
    environ = {x: y for x, y in os.environ.items() if not x.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", MODULE, "--collect-only", "-s"],
        cwd=tmp_path,
        env=environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "HEAVY [] OWN ['pdverify', 'pdverify.pytest_plugin']" in done.stdout


def test_importing_it_takes_less_time_than_pytest_itself(tmp_path: Path) -> None:
    code = (
        "import time; start = time.perf_counter(); import pytest\n"
        "between = time.perf_counter(); import pdverify.pytest_plugin\n"
        "own = time.perf_counter() - between\n"
        "raise SystemExit(own > 0.5 * (between - start))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert done.returncode == 0


def test_one_item_per_check(run: Run) -> None:
    done = run("-p", "fake", "--pdverify", "masks:keep", ARGS, "-rA")
    done.assert_outcomes(passed=1, failed=2, skipped=2)
    lines = done.outlines
    for line in (
        "collected 5 items",
        "PASSED pdverify::masks:keep::size.k-one",
        "mask.boundary: expected drop, got keep",
        "  expected:   drop",
    ):
        assert line in lines
    text = done.stdout.str()
    assert "FAILED pdverify::masks:keep::mask.boundary - mask.boundary: expected drop" in text
    assert "does not apply: the target returns no loss" in text
    assert "test_own" not in text
    assert "AssertionError" not in text
    assert "Traceback" not in text
    assert not [line for line in lines if line.startswith(("E ", ">"))]


def test_beside_a_folder_and_among_the_selected(run: Run) -> None:
    options = "-p", "fake", "--pdverify", "masks:keep", ARGS, "--collect-only", "-q"
    node = "pdverify::masks:keep::mask.boundary"
    beside = run(*options, ".").outlines
    assert {node, "test_own.py::test_own"} <= set(beside)
    left = run(*options, "--deselect", node).outlines
    assert node not in left
    assert "pdverify::masks:keep::size.k-one" in left
    picked = run(*options, "-k", "boundary").outlines
    assert [line for line in picked if "::" in line] == [node]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--pdverify", "masks:keep"], "TARGET needs --mask"),
        (["--pdverify", "masks:keep", "--pdverify-args=--maks x"], "unrecognized arguments"),
        (["--pdverify", "masks:keep", "--pdverify-args=--mask 'x"], "No closing quotation"),
        (["--pdverify", "masks:keep", "--pdverify-args=--mask nome"], "did you mean none"),
        (["--pdverify", "masks:keep", "--pdverify-args=--json x"], "--json belongs to"),
        (["--pdverify", "masks:keep", "--pdverify-args=more:keep"], "'more:keep' is no option"),
        (["--pdverify", "no_such_module:keep", ARGS], "does not import"),
    ],
)
def test_a_target_that_cannot_be_judged(run: Run, options: list[str], why: str) -> None:
    done = run(*options)
    assert done.ret == pytest.ExitCode.INTERRUPTED
    (line,) = [x for x in done.outlines if x.startswith("--pdverify")]
    assert line.startswith(f"--pdverify {options[1]}: ")
    assert why in line
    assert "Traceback" not in done.stdout.str()
