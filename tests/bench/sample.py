"""A bench written by hand, with every kind of record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdverify.tools.bench.records import (
    AccuracyRecord,
    BenchReport,
    Entry,
    FamilyBits,
    Gate,
    Interval,
    Memory,
    ScalingRecord,
    SpeedRecord,
    StreamRecord,
)

GREEN = Gate(10, 0, {"divergence": 0.25, "coefficient": 0.125}, {"divergence": 1e-6}, "")
RED = Gate(10, 3, {"divergence": None}, {"divergence": None}, "flat: divergence is off")
TWICE = Interval(2.0, 1.9, 2.2)

ACCURACY = AccuracyRecord(
    "torch-eager",
    "backend",
    "fp32",
    "cpu",
    "kl",
    "full",
    151_936,
    None,
    [FamilyBits("flat", 23.5, 22.0), FamilyBits("identical", None, None)],
    0.01,
    0.02,
    6,
    0,
)
SCALING = ScalingRecord(
    "full-kl",
    "torch-eager",
    "backend",
    "cpu",
    "fp32",
    "V",
    {"tokens": 64},
    [8192, 32_768, 151_936],
    [0.001, 0.004, 0.02],
    Interval(1.02, 0.95, 1.09),
    GREEN,
    [2**20, 2**20, 2**20],
    [2**22, 2**24, 2**26],
)
STREAM = StreamRecord(
    "torch-eager", 65_536, 151_936, 64, 65_536 * 151_936 * 2, 2**28, 20.0, 2**27, "VmHWM", GREEN
)


def entry(name: str = "torch-eager", gate: Gate | None = GREEN, **changes: Any) -> Entry:
    """A backend that is right, unless `changes` say otherwise."""
    given: dict[str, Any] = {
        "role": "backend",
        "seconds": Interval(0.0123, 0.012, 0.013),
        "ratios": {"by-rows": TWICE, "materialized": TWICE, "read-bandwidth": TWICE},
        "memory": Memory(2**20, 2**27, "VmHWM, set back"),
    }
    return Entry(name, gate=gate, **(given | changes))


def report(*entries: Entry, workload: str = "full-kl", dtype: str = "fp32") -> BenchReport:
    """A bench whose only speed table has `entries`."""
    size = (2048, 32_768, 20, 1024) if workload == "linear-head" else (64, 151_936, 20, 0)
    speed = SpeedRecord(workload, "D, C and mask", "cpu", dtype, *size, 7, list(entries))
    absent = replace(ACCURACY, contestant="native", unavailable="no compiler", families=[])
    return BenchReport(
        "quick",
        0,
        12.0,
        {"python": "3.11", "torch": "2.13.0"},
        {"cpu": "a processor", "cores": "2"},
        [speed],
        [ACCURACY, absent],
        [SCALING],
        [STREAM],
    )
