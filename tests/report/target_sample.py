"""Fabricated reports on a target: every field has a value of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pdverify.conformance.bits import Bits
from pdverify.conformance.records import (
    CheckRecord,
    DecisionCounts,
    TargetCounterexample,
    TargetReport,
)

KEEP = TargetCounterexample(
    quantity="keep",
    place=(0, 1),
    expected="drop",
    got="keep",
    exact="D = 0.447415, P in [-0.10648, -0.10646]",
    margin=-0.0625,
    error=math.nan,
    budget=math.nan,
    inputs={
        "logits": [[[0.5, -math.inf, 1.25], [0.75, 0.0, -2.5]]],
        "tokens": [[2, 0]],
        "response_mask": [[True, True]],
        "delta": 0.15,
    },
    dtypes={
        "logits": "float32",
        "tokens": "int64",
        "response_mask": "bool",
        "delta": "number",
    },
    presentation="contiguous",
    shrunk=True,
)

PASSED = CheckRecord(
    id="size.k-one",
    status="passed",
    kind=None,
    convention=None,
    message="12 decisions are right",
    cause=None,
    counterexample=None,
    decisions=DecisionCounts(121, 112, 0, 3),
    worst=0.31,
    rerun="pdverify check masks:keep --mask predictive-kl --tail exact --select size.k-one",
    seconds=0.25,
)

FAILED = replace(
    PASSED,
    id="mask.boundary",
    status="failed",
    kind="wrong",
    message="expected drop, got keep",
    cause="non-strict comparison: D >= delta where the rule is D > delta",
    counterexample=KEEP,
    decisions=DecisionCounts(131, 124, 7, 5),
    worst=None,
    rerun="pdverify check masks:keep --mask predictive-kl --tail exact --select mask.boundary",
    seconds=0.5,
)

CONVENTION = replace(
    FAILED,
    id="loss.gradient",
    kind="convention",
    convention="ratio-gradient",
    message="the gradient is 1.5 where 0.5 is right",
    cause="gradient through the ratio",
    decisions=DecisionCounts(),
    worst=math.inf,
    counterexample=replace(
        KEEP,
        quantity="gradient",
        expected="0.5",
        got="1.5",
        exact="[0.49, 0.51]",
        error=1.0,
        budget=2.5e-7,
        margin=math.nan,
    ),
)

ACCEPTED = replace(CONVENTION, id="loss.value", status="accepted")

ABSENT = replace(
    PASSED,
    id="loss.cap",
    status="not-applicable",
    message="the target returns no loss",
    decisions=DecisionCounts(),
    worst=None,
    seconds=0.0,
)

STOPPED = replace(ABSENT, id="size.odd", status="not-run", message="stopped after a time-out")


def target_report(*checks: CheckRecord, **changes: Any) -> TargetReport:
    """A report of `checks` (by default one that passed) that conforms if none failed."""
    checks = checks or (PASSED,)
    made = TargetReport(
        conforms=all(check.passed for check in checks),
        target="masks:keep",
        mask="predictive-kl",
        view="topk",
        tail="exact",
        support="append",
        precision="fp32",
        options={"mask": "predictive-kl", "tail": "exact", "delta": 0.15, "top_k": 5},
        outputs=("keep", "loss"),
        parameters=("logits", "tokens", "delta"),
        effective_bits=Bits(23.8, 22.9, 24.6, None, 900, 4, 5),
        bits_note="",
        decisions=sum((check.decisions for check in checks), DecisionCounts()),
        checks=list(checks),
        convention=None,
        seed=41,
        level="quick",
        seconds=12.3,
        versions={"pdverify": "0.1.0", "torch": "2.13.0"},
    )
    return replace(made, **changes)
