"""Two reports: what got worse decides, what differs between the runs is said."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdverify.conformance.bits import Bits, wilson
from pdverify.conformance.compare import Change, Comparison, compare_reports, read_report
from pdverify.conformance.records import CertificateRecord
from pdverify.report.compare import print_comparison
from pdverify.report.json_report import to_json, write_json
from tests.report import sample
from tests.report.sample import RIGHT, WRONG, report
from tests.report.target_sample import (
    ABSENT,
    ACCEPTED,
    FAILED,
    PASSED,
    STOPPED,
    target_report,
)

MENDED = replace(PASSED, id=FAILED.id)


def _compare(old: Any, new: Any) -> Comparison:
    return compare_reports(to_json(old), to_json(new))


def test_nothing_changed() -> None:
    for made in (target_report(PASSED, FAILED, ABSENT), report(RIGHT, WRONG, sample.ABSENT)):
        assert _compare(made, made) == Comparison([], [], [], [], [])
        assert not _compare(made, made).regressed


@pytest.mark.parametrize("before", [(MENDED,), (replace(ABSENT, id=FAILED.id),), ()])
def test_a_new_failure(before: tuple[Any, ...]) -> None:
    found = _compare(target_report(PASSED, *before), target_report(PASSED, FAILED))
    (change,) = found.new_failures
    assert (change.name, change.new) == ("mask.boundary", "expected drop, got keep")
    assert change.old == (
        {"passed": "right"}.get(before[0].status, "not judged") if before else "not there"
    )
    assert found.regressed


def test_a_mended_check_is_no_regression() -> None:
    found = _compare(target_report(FAILED), target_report(MENDED))
    assert found.mended == [Change("mask.boundary", "expected drop, got keep", "right")]
    assert not found.regressed


def test_a_failure_that_is_merely_accepted() -> None:
    accepted = replace(ACCEPTED, id=FAILED.id)
    found = _compare(target_report(FAILED), target_report(accepted))
    assert found.environment == [Change("mask.boundary", "wrong", "accepted")]
    assert not found.mended
    assert not found.regressed
    found = _compare(target_report(accepted), target_report(FAILED))
    assert [change.name for change in found.new_failures] == ["mask.boundary"]


@pytest.mark.parametrize(
    ("after", "now"),
    [
        ((), "missing"),
        ((replace(ABSENT, id=PASSED.id),), "the target returns no loss"),
        ((replace(STOPPED, id=PASSED.id),), "stopped after a time-out"),
    ],
)
def test_a_check_that_is_no_longer_judged(after: tuple[Any, ...], now: str) -> None:
    found = _compare(target_report(FAILED, PASSED), target_report(FAILED, *after))
    assert found.vanished == [Change("size.k-one", "right", now)]
    assert found.regressed


def test_a_check_that_never_applied_may_go() -> None:
    assert not _compare(target_report(PASSED, ABSENT), target_report(PASSED)).regressed


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ((22.9, 24.6), (20.1, 22.8), True),
        ((22.9, 24.6), (20.1, 22.9), False),
        ((20.1, 22.8), (22.9, 24.6), False),
        ((22.9, None), (20.1, 22.8), True),
        ((22.9, None), (21.0, None), False),
        ((22.9, 24.6), (21.0, None), False),
    ],
)
def test_effective_bits(
    old: tuple[float, float | None], new: tuple[float, float | None], lost: bool
) -> None:
    def bits(low: float, high: float | None) -> Bits:
        if high is None:
            return Bits(None, None, None, low, 900, 0, 5)
        return Bits((low + high) / 2, low, high, None, 900, 4, 5)

    before, after = (target_report(effective_bits=bits(*x)) for x in (old, new))
    found = _compare(before, after)
    assert bool(found.precision_lost) is found.regressed is lost
    entries = (report(replace(RIGHT, bits=bits(*x))) for x in (old, new))
    assert bool(_compare(*entries).precision_lost) is lost


def test_bits_that_are_no_longer_measured() -> None:
    found = _compare(target_report(), target_report(effective_bits=None))
    assert found.vanished == [Change("target: effective bits", "[22.9, 24.6]", "not measured")]


def test_errors_that_outgrow_their_budget() -> None:
    old, new = target_report(PASSED), target_report(replace(PASSED, worst=1.5))
    lost = [Change("size.k-one: error over budget", "0.31", "1.5")]
    assert _compare(old, new).precision_lost == lost
    assert not _compare(old, target_report(replace(PASSED, worst=0.99))).regressed
    assert not _compare(new, target_report(replace(PASSED, worst=2.5))).precision_lost
    found = _compare(report(RIGHT), report(replace(RIGHT, coefficient_error=float("inf"))))
    assert [change.name for change in found.precision_lost] == [f"{RIGHT.name} (cpu): coefficient"]


def test_entries_of_the_built_ins() -> None:
    right = replace(WRONG, passed=True, message="")
    found = _compare(report(RIGHT, right), report(RIGHT, WRONG))
    assert found.new_failures == [Change(f"{WRONG.name} (cpu)", "right", WRONG.message)]
    assert _compare(report(RIGHT, WRONG), report(RIGHT, right)).mended
    gone = replace(RIGHT, unavailable="no torch")
    assert _compare(report(RIGHT), report(gone)).vanished == [
        Change(f"{RIGHT.name} (cpu)", "right", "no torch")
    ]


def test_a_certificate_that_turns_wrong() -> None:
    wrong = CertificateRecord("stale", "bracket", wilson(9, 9), wilson(2, 9))
    found = _compare(report(), report(certificates=[wrong], conforms=False))
    assert found.new_failures == [
        Change("certificate bracket, stale", "right", "contradicted on 2 of 9")
    ]


def test_differences_of_the_runs() -> None:
    old = target_report()
    new = target_report(
        seed=42,
        level="full",
        options={"mask": "predictive-kl", "tail": "uniform", "delta": 0.2, "top_k": 5},
        tail="uniform",
        versions={"pdverify": "0.1.0", "torch": "2.14.0", "numpy": "2"},
    )
    assert _compare(old, new).environment == [
        Change("tail", "exact", "uniform"),
        Change("level", "quick", "full"),
        Change("seed", "41", "42"),
        Change("options: delta", "0.15", "0.2"),
        Change("versions: torch", "2.13.0", "2.14.0"),
        Change("versions: numpy", "none", "2"),
    ]
    assert not _compare(old, new).regressed
    half = report(replace(RIGHT, precision="bf16"))
    assert _compare(report(), half).environment == [
        Change("precision of the entries", "fp32", "bf16")
    ]


def test_reports_of_two_kinds() -> None:
    with pytest.raises(ValueError, match="on built-in backends, the new one on a target"):
        _compare(report(), target_report())


def test_reading_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for made in (target_report(PASSED, FAILED), report(RIGHT, WRONG)):
        write_json(made, path)
        assert read_report(path) == to_json(made)


def _changed(**fields: Any) -> str:
    return json.dumps(to_json(target_report()) | fields)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ('{"conforms": tr', "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[]", "not a report"),
        ("{}", "not a report"),
        (_changed(schema_version=2), "schema_version 2; this release reads 1"),
        (_changed(checks={}), "checks or entries: {} is no list"),
        (_changed(checks=[1]), "record 0: 1 is no dict"),
        (
            _changed(checks=[{"id": "x", "status": "fine"}]),
            "record 0: status 'fine'; known: passed",
        ),
        (_changed(checks=[{"id": "x", "status": ["passed"]}]), "record 0: status"),
        (_changed(checks=[{"id": 1, "status": "passed"}]), "record 0: id: 1 is no str"),
        (_changed(checks=[{"id": "x", "status": "passed"}] * 2), "record 1: 'x' is there twice"),
        (_changed(effective_bits={"at_least": "many"}), "effective_bits: 'many' is no number"),
        (_changed(versions=[1]), "versions: [1] is no dict"),
        ('{"conforms": true, "schema_version": 1}', "without `checks` and without `entries`"),
        (
            json.dumps(to_json(report()) | {"entries": [{"name": "x", "conforms": "yes"}]}),
            "record 0: conforms: 'yes' is no bool",
        ),
    ],
)
def test_what_is_no_report_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"old\.json: ") as caught:
        read_report(path)
    assert why in str(caught.value)


def test_the_comparison_as_text() -> None:
    out = io.StringIO()
    found = _compare(
        target_report(PASSED, FAILED, ACCEPTED),
        target_report(MENDED, replace(FAILED, id="mask.equality"), ACCEPTED, seed=42),
    )
    print_comparison(found, out)
    assert out.getvalue().splitlines() == [
        "Differences between the runs",
        "  seed: 41 -> 42",
        "",
        "New failures",
        "  mask.equality: not there -> expected drop, got keep",
        "",
        "No longer judged",
        "  size.k-one: right -> missing",
        "",
        "Mended",
        "  mask.boundary: expected drop, got keep -> right",
        "",
        "worse: 1 new failures, 0 losses of precision, 1 no longer judged, 1 mended (exit 1)",
    ]
    out = io.StringIO()
    print_comparison(_compare(target_report(), target_report()), out)
    assert out.getvalue() == (
        "not worse: 0 new failures, 0 losses of precision, 0 no longer judged, 0 mended (exit 0)\n"
    )
