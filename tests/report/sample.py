"""Fabricated reports: every field has a value of its own, so that a lost one is seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pdverify.conformance.bits import Bits, wilson
from pdverify.conformance.records import (
    CertificateRecord,
    Counterexample,
    DecisionCounts,
    DirectionRecord,
    EntryRecord,
    InputRecord,
    Report,
)

RIGHT = EntryRecord(
    backend="torch-eager",
    device="cpu",
    precision="fp32",
    mask="predictive-squared-hellinger",
    view="topk",
    tail="aggregated",
    support="append",
    decisions=DecisionCounts(1201, 1102, 0, 13),
    divergence_error=0.31,
    coefficient_error=0.42,
    loss_error=0.53,
    bits=Bits(None, None, None, 21.4, 900, 0, 5),
    passed=True,
    message="",
    counterexample=None,
)

EXAMPLE = Counterexample(
    source="family: zipf",
    place=(3, 17),
    quantity="coefficient",
    expected=0.1251,
    got=float("nan"),
    error=float("inf"),
    budget=2.5e-7,
    margin=-0.0625,
    context={
        "token": np.int64(421),
        "advantage": np.float32(-1.5),
        "exact C": [0.12509, 0.12511],
        "note": "[bold] is no markup",
    },
)

WRONG = replace(
    RIGHT,
    mask="predictive-kl",
    tail="exact",
    decisions=DecisionCounts(1303, 1204, 7, 15),
    coefficient_error=float("inf"),
    bits=Bits(23.8, 22.9, 24.6, None, 900, 4, 5),
    passed=False,
    message="7 determined decisions are wrong",
    counterexample=EXAMPLE,
)

ABSENT = replace(
    RIGHT,
    backend="triton",
    device="cuda",
    decisions=DecisionCounts(),
    divergence_error=None,
    coefficient_error=None,
    loss_error=None,
    bits=None,
    unavailable="no NVIDIA GPU is present",
)


def report(*entries: EntryRecord, **changes: Any) -> Report:
    """A report of `entries` (by default a right one) that conforms if they all do."""
    entries = entries or (RIGHT,)
    made = Report(
        conforms=all(entry.passed for entry in entries),
        real_source="the recording of the package",
        inputs=[
            InputRecord("llama.cpp", "real", 24, 49152, "bf16"),
            InputRecord("zipf, V = 257, fp32", "family", 111, 257, "fp32"),
            InputRecord("zipf, V = 1000, bf16", "family", 222, 1000, "bf16"),
            InputRecord("flat, V = 257, fp32", "family", 333, 257, "fp32"),
        ],
        entries=list(entries),
        directions=[
            DirectionRecord("stale", "ratio", wilson(12, 160), 3),
            DirectionRecord("stale", "exact", wilson(0, 0), 163),
        ],
        certificates=[CertificateRecord("stale", "bracket", wilson(140, 163), wilson(0, 140))],
        seed=41,
        level="quick",
        seconds=12.3,
        versions={"pdverify": "0.1.0", "torch": "2.13.0"},
    )
    return replace(made, **changes)
