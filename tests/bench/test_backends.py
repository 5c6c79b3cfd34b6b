"""Every backend under pytest-benchmark, on sizes that say little about speed.

``pytest tests/bench/test_backends.py --benchmark-compare`` shows a change between two commits;
`pdverify bench` has the real sizes.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdverify.tools.bench.contestants import contestants
from pdverify.tools.bench.inputs import make_inputs
from pdverify.tools.bench.workloads import BY_ROWS, WORKLOADS, Size

SIZES = {
    "full-kl": Size(16, 2003),
    "topk-kl": Size(16, 2003),
    "loss": Size(16, 2003),
    "linear-head": Size(64, 2003, hidden=64),
}

COMPILED = ("torch-compiled",)
"""Backends that take seconds to compile for each workload: they do one."""

PAIRS = [
    (name, workload)
    for name, x in contestants().items()
    for workload in SIZES
    if (x.role == "backend" or name == BY_ROWS)
    and x.does(WORKLOADS[workload])
    and (name not in COMPILED or workload == "topk-kl")
]


@pytest.mark.parametrize(("name", "workload"), PAIRS)
def test_speed(benchmark: Any, name: str, workload: str) -> None:
    contestant, entry = contestants()[name], WORKLOADS[workload]
    reason = contestant.refuses("cpu")
    if reason is not None:
        pytest.skip(f"unavailable because {reason}")
    call = contestant.prepare(entry, make_inputs(entry, SIZES[workload], "fp32", "cpu", 0))
    benchmark.group = workload
    assert benchmark.pedantic(call, rounds=3, warmup_rounds=1)
