"""Every wrong implementation is rejected by the right checks, every right one accepted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdverify.conformance.checks import CHECKS
from pdverify.conformance.options import Options
from pdverify.conformance.records import TargetReport
from pdverify.conformance.target_run import check_target
from tests.mutants.catalog import RIGHT, WRONG, Subject, Wrong, in_order

ROOT = Path(__file__).parents[2]

PROCESS_SECONDS = 20.0
"""What one verdict may take as a process of its own on two idle cores, torch import included."""

BUSY = 3.0
"""How much longer the same may take here: other tests run on the same cores."""

FAMILIES = {
    "ppo-clip": {"mask": "ppo-clip"},
    "dppo-binary": {"mask": ("dppo-binary-tv", "dppo-binary-kl")},
    "dppo-topk": {"mask": ("dppo-topk-tv", "dppo-topk-kl")},
    "predictive, aggregated": {"tail": "aggregated"},
    "predictive, uniform": {"tail": "uniform"},
    "predictive, exact": {"tail": "exact"},
    "predictive, bracket": {"tail": "bracket"},
    "predictive, full": {"view": "full"},
    "second order": {"mask": "predictive-kl-second-order"},
}


@pytest.fixture(scope="module")
def clock(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Seconds by kind, printed at the end."""
    seconds: Counter[str] = Counter()
    yield seconds
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        spent = ", ".join(f"{kind} {total:.0f} s" for kind, total in seconds.items())
        reporter.write_line(f"\nverdicts on targets: {spent}")


# in one list, so that those judged under the same options follow each other and share the truths
@pytest.mark.parametrize("subject", in_order([*WRONG, *RIGHT]), ids=lambda subject: subject.name)
def test_verdict(subject: Subject, clock: Counter[str]) -> None:
    begin = time.perf_counter()
    report = check_target(subject.target, Options(**subject.options), shrink_seconds=0.0)
    clock[subject.room] += time.perf_counter() - begin
    if isinstance(subject, Wrong):
        _rejected(subject, report)
    else:
        _accepted(report)


def _rejected(wrong: Wrong, report: TargetReport) -> None:
    failed = {check.id for check in report.failed}
    assert not report.conforms
    assert set(wrong.killed_by) <= failed
    if wrong.only is not None:
        assert failed == {wrong.only}
    # a wrong answer is shown; only an answer as a whole (its form, an exception) cannot be
    assert all(check.message for check in report.failed)
    assert any(check.counterexample is not None for check in report.failed)


def _accepted(report: TargetReport) -> None:
    assert [f"{check.id}: {check.message}" for check in report.failed] == []
    assert report.conforms
    assert report.decisions.wrong == 0
    assert report.decisions.determined > 0


def test_every_check_has_a_mutant_that_only_it_kills() -> None:
    covered = {wrong.only for wrong in WRONG if wrong.only is not None}
    assert covered == set(CHECKS)


def test_killers_exist() -> None:
    assert {check for wrong in WRONG for check in wrong.killed_by} <= set(CHECKS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_five(family: str) -> None:
    wanted = FAMILIES[family]
    members = [
        wrong
        for wrong in WRONG
        if all(
            wrong.options.get(key) in (value if isinstance(value, tuple) else (value,))
            for key, value in wanted.items()
        )
    ]
    assert len(members) >= 5


def test_enough_of_both() -> None:
    losses = [wrong for wrong in WRONG if wrong.place.startswith("loss:")]
    assert len(losses) >= 5
    assert len(WRONG) >= 60
    assert len(RIGHT) >= 25
    everyone: Sequence[Subject] = [*WRONG, *RIGHT]
    assert len({subject.target for subject in everyone}) == len(everyone)
    assert all(subject.summary for subject in everyone)


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("predictive-topk/ratio-direction", 1),
        ("predictive-full/chi2-other-denominator", 1),
        ("topk/predictive-log-softmax", 0),
    ],
)
def test_a_verdict_as_a_process(name: str, status: int, tmp_path: Path) -> None:
    everyone: Sequence[Subject] = [*WRONG, *RIGHT]
    subject = next(one for one in everyone if one.name == name)
    flags = [
        part
        for key, value in subject.options.items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "pdverify", "check", subject.target, *flags, "--json", file]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    assert done.returncode == status, done.stdout + done.stderr
    assert json.loads(file.read_text())["conforms"] is (status == 0)
    assert seconds < BUSY * PROCESS_SECONDS
