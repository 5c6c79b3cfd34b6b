"""The instruments of the bench: clocks, fits, memory probes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdverify.tools.bench import memory, scaling
from pdverify.tools.bench.memory import measure, peak_above
from pdverify.tools.bench.scaling import Axis, run_axis
from pdverify.tools.bench.timing import exponent, interleaved, median, ratio
from pdverify.tools.bench.workloads import Size

MIB = 2**20

GRAIN = MIB
"""The kernel counts pages in batches per core, so its marks are exact to some hundred KiB."""


def test_every_round_runs_every_call_once() -> None:
    seen: list[str] = []
    calls = {name: lambda name=name: seen.append(name) for name in "abc"}
    times = interleaved(calls, rounds=5, seed=1)
    assert {name: len(x) for name, x in times.items()} == {"a": 5, "b": 5, "c": 5}
    rounds = [seen[i : i + 3] for i in range(0, len(seen), 3)]
    assert len(rounds) == 6
    assert all(sorted(x) == ["a", "b", "c"] for x in rounds)
    assert len({tuple(x) for x in rounds}) > 1, "the order must change between rounds"


def test_the_device_is_waited_for_on_both_sides() -> None:
    seen: list[str] = []
    interleaved(
        {"a": lambda: seen.append("call")},
        rounds=1,
        synchronize=lambda: seen.append("wait"),
    )
    assert seen == 2 * ["wait", "call", "wait"]


def test_a_time_is_that_of_its_call() -> None:
    times = interleaved({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, rounds=3)
    assert (times["slow"] >= 0.02).all()
    assert median(times["fast"]).value < 0.02


def test_ratio_is_blind_to_what_slows_a_whole_round() -> None:
    drift = np.exp(np.random.default_rng(0).normal(size=9))
    found = ratio(3 * drift, drift)
    assert found.value == pytest.approx(3, rel=4 * 2.0**-53)
    assert found.low == pytest.approx(found.high, rel=4 * 2.0**-53)


def test_interval_holds_the_ratio_and_shrinks_with_rounds() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for count in (11, 1001):
        slow, fast = (x * np.exp(rng.normal(scale=0.1, size=count)) for x in (2.0, 1.0))
        found = ratio(slow, fast)
        assert found.low < 2 < found.high
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 3


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_fit_recovers_a_known_exponent(power: float) -> None:
    sizes = [8192, 16_384, 65_536, 151_936]
    noise = np.exp(np.random.default_rng(3).normal(scale=0.02, size=len(sizes)))
    found = exponent(sizes, 3e-7 * np.asarray(sizes, dtype=float) ** power * noise)
    assert found.low < power < found.high
    assert found.high - found.low < 0.2


def test_fit_is_exact_without_noise_and_unsure_where_no_power_law_fits() -> None:
    sizes = [1, 2, 4, 8]
    exact = exponent(sizes, [x**1.5 for x in sizes])
    # a few operations on logs of size 1
    assert exact.value == pytest.approx(1.5, abs=64 * 2.0**-53)
    bent = exponent(sizes, [1.0, 1.0, 1.0, 8.0])
    assert bent.high - bent.low > 1


@pytest.mark.parametrize(
    ("sizes", "costs"),
    [([1, 2], [1.0, 2.0]), ([4, 4, 4], [1.0, 1.0, 1.0]), ([1, 2, 3], [1.0, 0.0, 2.0])],
)
def test_fit_refuses(sizes: list[float], costs: list[float]) -> None:
    with pytest.raises(ValueError, match="a fit needs"):
        exponent(sizes, costs)


def test_probe_sees_a_known_allocation() -> None:
    # freed before the call returns: only a high-water mark can tell
    def call() -> float:
        return float(torch.ones(24 * MIB // 4).sum())

    peak, method = peak_above(call)
    if method == memory.WHOLE_PROCESS:
        pytest.skip("the high-water mark cannot be set back here, and a lower peak is hidden")
    assert 24 * MIB - GRAIN <= peak <= 28 * MIB


def test_probe_is_not_fooled_by_memory_from_before() -> None:
    torch.ones(64 * MIB // 4)
    peak, method = peak_above(lambda: torch.ones(8 * MIB // 4))
    if method == memory.WHOLE_PROCESS:
        pytest.skip("the high-water mark cannot be set back here, and a lower peak is hidden")
    assert 8 * MIB - GRAIN <= peak <= 12 * MIB


def test_where_the_mark_cannot_be_set_back_the_method_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "none" / "clear_refs")
    _, method = peak_above(lambda: None)
    assert method == memory.WHOLE_PROCESS


def test_memory_of_one_call_in_a_process_of_its_own() -> None:
    size = Size(tokens=32, vocab=40_000)
    found = measure("full-kl", "materialized", size, "fp32", "cpu", 0)
    one = size.tokens * size.vocab * 4
    assert found.inputs == 2 * one
    # both log-softmaxes and both exponentials are alive at the end
    assert found.peak is not None
    assert 4 * one <= found.peak <= 8 * one


def test_failure_in_the_other_process_is_one_line() -> None:
    with pytest.raises(RuntimeError, match="unknown workload 'nothing'"):
        measure("nothing", "materialized", Size(1, 100), "fp32", "cpu", 0)


AXIS = Axis("topk-kl", "vocab", "V", (500, 1000, 2000, 4000), {"tokens": 8}, memory=True)


def _scaled() -> Any:
    return run_axis(
        AXIS,
        device="cpu",
        dtype="fp32",
        seed=0,
        rounds=2,
        backends=["torch-eager"],
        memory=True,
        synchronize=lambda: None,
        progress=lambda *_: None,
    )


def test_every_size_of_an_axis_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def measured(workload: str, contestant: str, size: Size, *_: Any) -> Any:
        seen.append(size.vocab)
        return memory.Memory(size.vocab, 100 * size.vocab, "")

    monkeypatch.setattr(scaling, "measure", measured)
    own, baseline = _scaled()
    assert (own.contestant, baseline.contestant) == ("torch-eager", "by-rows")
    assert own.memory == list(AXIS.sizes)
    assert seen == 2 * list(AXIS.sizes)
    assert len(own.seconds) == 4
    assert own.exponent == exponent(AXIS.sizes, own.seconds)


def test_growth_of_a_wrong_backend_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = scaling.judge

    def judge(contestant: Any, *given: Any) -> Any:
        gate = judged(contestant, *given)
        return replace(gate, wrong=1) if contestant.role == "backend" else gate

    monkeypatch.setattr(scaling, "judge", judge)
    monkeypatch.setattr(scaling, "measure", lambda *_: memory.Memory(1, 1, ""))
    own, baseline = _scaled()
    assert (own.seconds, own.exponent, own.memory) == ([], None, [])
    assert len(baseline.seconds) == 4
