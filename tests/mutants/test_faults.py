"""Each planted fault makes the judge fail the right entries, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from itertools import chain

import pytest

from pdverify.cases import FAMILIES as REGISTERED
from pdverify.conformance import builtin
from pdverify.conformance.builtin import check_builtins
from pdverify.conformance.records import Report
from tests.mutants.faults import FAULTS, Fault

ENTRIES = (
    "torch-eager/none/binary",
    "torch-eager/ppo-clip/binary",
    "torch-eager/dppo-binary-kl/binary",
    "torch-eager/dppo-topk-tv/topk",
    "torch-eager/predictive-kl/*",
    "torch-eager/predictive-reverse-kl/topk/exact",
    "torch-eager/predictive-tv/full",
    "torch-eager/predictive-jensen-shannon/topk/uniform",
    "torch-eager/predictive-kl-second-order/topk/exact",
    "numpy/predictive-kl/topk/exact",
    "numpy/predictive-tv/full",
)


@pytest.fixture(autouse=True)
def one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch per family: enough to show a fault, and quick."""
    monkeypatch.setattr(builtin, "SIZES", {"quick": ((257, "fp32"),)})


def judge(families: Sequence[str]) -> Report:
    return check_builtins({}, "none", families=families, select=ENTRIES, workers=1)


FAMILIES = sorted(set(chain.from_iterable(fault.families for fault in FAULTS)) & set(REGISTERED))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_false_alarm(family: str) -> None:
    report = judge([family])
    assert [entry.message for entry in report.entries if not entry.passed] == []
    assert report.conforms


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.plant(monkeypatch)
    report = judge(fault.families)
    failed = {entry.name for entry in report.entries if not entry.passed}
    expected = {
        entry.name
        for entry in report.entries
        if any(fnmatch(entry.name, glob) for glob in fault.fails)
    }
    assert failed == expected
    assert not report.conforms
    for entry in report.entries:
        if entry.passed:
            assert entry.counterexample is None
            continue
        assert fault.message in entry.message
        example = entry.counterexample
        if not fault.quantity:
            assert example is None
            continue
        assert example is not None
        assert example.quantity in fault.quantity
        assert example.source.startswith(f"family: {fault.families[0]}")
        assert example.expected != example.got
