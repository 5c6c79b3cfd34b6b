"""The decorator: one test per check, strict expectations, readable failures."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from pdverify.testing import parametrize_checks

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]
"""Runs a test file made of the decorator's arguments."""

FAKE = '''
"""A session that knows its answers: what the decorator makes of them is under test."""

import pytest
from pdverify.conformance import target_run
from tests.report import target_sample as sample

RECORDS = {
    x.id: x
    for x in (sample.PASSED, sample.FAILED, sample.CONVENTION, sample.ACCEPTED, sample.ABSENT)
}


class Session:
    def __init__(self, target, options):
        self.ids = list(RECORDS)
        print(target, options.mask, options.tail, options.select)

    def run(self, id):
        return RECORDS[id]


target_run.TargetSession = Session
'''


@pytest.fixture
def run(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> Run:
    pytester.syspathinsert(request.config.rootpath)

    def decorated(arguments: str, *options: str) -> pytest.RunResult:
        test = f"""
            from pdverify.testing import parametrize_checks

            @parametrize_checks("masks:keep", "predictive-kl", tail="exact", {arguments})
            def test_keep(check):
                assert check.id
                check()
        """
        pytester.makepyfile(FAKE + textwrap.dedent(test))
        return pytester.runpytest_inprocess("-rA", "-p", "no:cacheprovider", *options)

    return decorated


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdverify.conformance import target_run

    monkeypatch.setattr(target_run, "TargetSession", target_run.TargetSession)


EXPECTED = '"mask.boundary": "known, see the tracker", "loss.gradient": "on purpose"'


def test_one_test_per_check(run: Run) -> None:
    done = run("")
    done.assert_outcomes(passed=1, failed=2, skipped=2)
    done.stdout.fnmatch_lines(
        [
            "*mask.boundary: expected drop, got keep",
            "*rerun: * --select mask.boundary",
        ]
    )
    text = done.stdout.str()
    assert "PASSED test_one_test_per_check.py::test_keep[[]size.k-one]".replace("[[]", "[") in text
    assert "does not apply: the target returns no loss" in text
    assert "accepted: follows the convention" in text
    assert "testing.py" not in "".join(x for x in text.splitlines() if x.startswith("FAILED"))
    assert "record.status ==" not in text


def test_expected_failures(run: Run) -> None:
    done = run(f"expected_failures={{{EXPECTED}}}")
    done.assert_outcomes(passed=1, xfailed=2, skipped=2)
    assert "known, see the tracker" in done.stdout.str()


def test_an_expected_failure_that_passes_fails(run: Run) -> None:
    done = run(f'expected_failures={{{EXPECTED}, "size.k-one": "old"}}')
    done.assert_outcomes(failed=1, xfailed=2, skipped=2)
    assert "[XPASS(strict)] old" in done.stdout.str()


@pytest.mark.parametrize("id", ["loss.cap", "loss.value"])
def test_an_expected_failure_that_is_skipped_fails(run: Run, id: str) -> None:
    done = run(f'expected_failures={{{EXPECTED}, "{id}": "old"}}')
    done.assert_outcomes(passed=1, failed=1, xfailed=2, skipped=1)
    assert "it no longer belongs to expected_failures" in done.stdout.str()


@pytest.mark.parametrize(
    ("expected", "why"),
    [
        ('"mask.bondary": "x"', "'mask.bondary' is no check of this target; did you mean mask.b"),
        ('"mask.boundary": " "', "'mask.boundary' needs a reason"),
    ],
)
def test_expectations_that_mean_nothing(run: Run, expected: str, why: str) -> None:
    done = run(f"expected_failures={{{expected}}}")
    done.assert_outcomes(errors=1)
    assert why in done.stdout.str()


def test_options_reach_the_session(run: Run) -> None:
    done = run("select='mask.*'", "-s")
    assert "masks:keep predictive-kl exact ('mask.*',)" in done.stdout.str()


def test_what_is_no_option() -> None:
    with pytest.raises(TypeError, match="detla"):
        parametrize_checks("masks:keep", "none", detla=0.1)


def test_an_unknown_mask() -> None:
    options: dict[str, Any] = {"tail": "exact"}
    with pytest.raises(LookupError, match="did you mean predictive-kl"):
        parametrize_checks("masks:keep", "predictive-lk", **options)
