"""A contestant that is wrong is found out, and then its speed is not told."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pdverify.backends import BACKENDS, Backend
from pdverify.report.bench_console import print_bench
from pdverify.tools.bench import accuracy, contestants, run
from pdverify.tools.bench.baselines import Outcome, by_rows, materialized
from pdverify.tools.bench.gate import cases, judge
from pdverify.tools.bench.inputs import make_inputs
from pdverify.tools.bench.records import BenchReport, Entry, Gate, Memory
from pdverify.tools.bench.run import Options, run_bench
from pdverify.tools.bench.targets import BITS, PLANTED
from pdverify.tools.bench.workloads import BY_ROWS, HEAD, MATERIALIZED, WORKLOADS, Size, Workload

VOCAB = 300
SIZE = Size(tokens=4, vocab=VOCAB)


def _judged(name: str, workload: Workload, dtype: str = "fp32", spoil: Any = None) -> Gate:
    """A contestant's gate, everything that it says passed through `spoil`."""
    contestant = contestants.contestants()[name]
    size = replace(SIZE, hidden=33 if workload.kind == "head" else 0)
    found = cases(workload, make_inputs(workload, size, dtype, "cpu", 0), dtype, 0)
    if spoil is not None:
        prepare, values = contestant.prepare, contestant.values

        def spoiled(workload: Workload, inputs: Any) -> Any:
            return lambda: spoil(prepare(workload, inputs)())

        assert values is not None
        contestant = replace(
            contestant, prepare=spoiled, values=lambda *given: spoil(values(*given))
        )
    return judge(contestant, workload, found, "cpu")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("workload", [x for x in WORKLOADS if x != "linear-head"])
def test_a_right_backend_passes(workload: str, dtype: str) -> None:
    gate = _judged("torch-eager", WORKLOADS[workload], dtype)
    assert gate.passed, gate.message
    assert gate.rows == 10
    assert all(x is not None and x <= 1 for x in gate.worst.values())


@pytest.mark.parametrize("name", [HEAD, MATERIALIZED, BY_ROWS])
def test_behind_a_head(name: str) -> None:
    gate = _judged(name, WORKLOADS["linear-head"])
    assert gate.passed, gate.message


def test_a_product_rounded_to_bf16_is_off() -> None:
    assert not _judged(MATERIALIZED, WORKLOADS["linear-head"], "bf16").passed


def _changed(quantity: str, change: Callable[[Any], Any]) -> Any:
    return lambda said: said | {name: change(said[name]) for name in said if name == quantity}


@pytest.mark.parametrize(
    ("workload", "spoil", "message"),
    [
        ("full-kl", _changed("divergence", lambda x: x * 1.01), "divergence is off"),
        ("full-kl", _changed("divergence", lambda x: x * float("nan")), "divergence is off"),
        ("topk-kl", _changed("coefficient", lambda x: -x), "coefficient is off"),
        ("full-tv", _changed("keep", lambda x: x == 0), "a certain decision is wrong"),
        ("loss", _changed("loss", torch.neg), "loss is off"),
        ("loss", _changed("gradient", torch.neg), "gradient is off"),
        ("linear-head", _changed("log_prob", lambda x: x + 1e-2), "log_prob is off"),
        ("full-kl", lambda _: {}["nothing"], "raised KeyError"),
    ],
)
def test_each_wrong_answer_is_found(workload: str, spoil: Any, message: str) -> None:
    name = HEAD if workload == "linear-head" else "torch-eager"
    gate = _judged(name, WORKLOADS[workload], spoil=spoil)
    assert gate.wrong > 0
    assert message in gate.message


def test_baseline_is_off_where_the_vocabulary_is_padded() -> None:
    gate = _judged(MATERIALIZED, WORKLOADS["full-kl"])
    assert gate.wrong == 1
    assert gate.message.startswith("padded-vocabulary")


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_by_rows_gives_what_the_whole_gives(workload: str) -> None:
    entry = WORKLOADS[workload]
    size = replace(SIZE, tokens=19, hidden=33 if entry.kind == "head" else 0)
    inputs = make_inputs(entry, size, "fp32", "cpu", 0)
    whole, parts = materialized(entry, inputs), by_rows(entry, inputs)
    assert whole.keys() == parts.keys()
    unit = 2.0**-24
    for name, x in whole.items():
        scale = x.double().abs().max() + 1
        # sums of at most V terms of size at most 1, in another order
        assert (x.double() - parts[name].double()).abs().max() <= 4 * VOCAB * unit * scale, name


def _bench(**changes: Any) -> BenchReport:
    given: dict[str, Any] = {
        "workloads": ("full-kl",),
        "backends": ("torch-eager",),
        "dtypes": ("fp32",),
        "tokens": 4,
        "vocab": VOCAB,
        "rounds": 2,
        "memory": False,
    }
    return run_bench(Options(**(given | changes)))


def _entries(report: BenchReport) -> dict[str, Entry]:
    return {x.contestant: x for x in report.speed[0].entries}


def test_a_red_gate_prints_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = contestants.contestants()["torch-eager"]
    assert wrong.values is not None
    right, timed, measured = wrong.values, [], []

    def values(*given: Any) -> Any:
        return right(*given) | {"coefficient": np.zeros(1)}

    def prepare(workload: Workload, inputs: Any) -> Callable[[], Outcome]:
        timed.append(inputs.logits.shape[1])
        return lambda: {"keep": torch.ones(inputs.tokens.shape, dtype=torch.bool)}

    def memory(workload: str, contestant: str, *_: Any) -> Memory:
        measured.append(contestant)
        return Memory(1, 1, "")

    monkeypatch.setattr(
        contestants, "_backend", lambda entry: replace(wrong, values=values, prepare=prepare)
    )
    monkeypatch.setattr(contestants, "BACKENDS", {"torch-eager": BACKENDS["torch-eager"]})
    monkeypatch.setattr(run, "measure_memory", memory)
    report = _bench(memory=True)
    own = _entries(report)["torch-eager"]
    assert own.gate is not None
    assert not own.gate.passed
    assert (own.seconds, own.memory) == (None, None)
    assert SIZE.tokens not in timed, "it was judged, not timed"
    assert measured == [MATERIALIZED, BY_ROWS]
    text = io.StringIO()
    print_bench(report, text)
    (line,) = (x for x in text.getvalue().splitlines() if x.startswith("torch-eager "))
    assert line.split() == ["torch-eager", *["-"] * 7, "WRONG"]
    assert report.wrong == ["torch-eager"]


def test_a_green_gate_does() -> None:
    report = _bench()
    entries = _entries(report)
    own, whole = entries["torch-eager"], entries[MATERIALIZED]
    assert own.seconds is not None
    assert own.ratios is not None
    assert whole.seconds is not None
    assert {MATERIALIZED, BY_ROWS, "read-bandwidth", "exponentials"} <= own.ratios.keys()
    product = own.ratios[MATERIALIZED].value * own.seconds.value
    assert product == pytest.approx(whole.seconds.value, rel=8 * 2.0**-53)
    assert report.wrong == []


def test_a_new_backend_is_measured_and_a_broken_one_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An entry of the registry is enough; a module that cannot be imported stops nothing."""

    def broken() -> None:
        raise ModuleNotFoundError("No module named 'nothing'")

    known = BACKENDS["torch-eager"]
    added: dict[str, Backend] = {
        "new": replace(known, name="new"),
        "broken": replace(known, name="broken", unavailable=broken),
        "absent": replace(known, name="absent", unavailable=lambda: "there is no compiler"),
    }
    monkeypatch.setattr(contestants, "BACKENDS", added)
    entries = _entries(_bench(backends=()))
    assert entries["new"].seconds is not None
    assert entries["absent"].unavailable == "there is no compiler"
    assert entries["broken"].unavailable == "it cannot be imported: No module named 'nothing'"
    assert entries["broken"].seconds is None


def test_liger_and_cut_cross_entropy_run_or_say_why() -> None:
    entries = _entries(_bench(workloads=("linear-head",), backends=("linear-head",)))
    for name in ("liger-kernel", "cut-cross-entropy"):
        reason = entries[name].unavailable
        assert reason is None or "does not run on cpu" in reason or "pip install" in reason
        assert (entries[name].seconds is None) is (reason is not None)


def test_bits_tell_formats_apart() -> None:
    records = accuracy.measure(
        ["kl"],
        vocab=1000,
        device="cpu",
        progress=lambda *_: None,
        backends=["torch-eager"],
        families=["peaked", "flat", "near-one-hot", "far-apart", "temperature"],
    )
    found = {(x.contestant, x.precision, x.view): x for x in records}
    for view in ("full", "topk"):
        for precision, least in BITS.items():
            record = found["torch-eager", precision, view]
            assert record.worst is not None
            assert record.worst.coefficient is not None
            assert least <= record.worst.coefficient <= 60
            assert record.wrong == 0
        for planted, most in PLANTED.items():
            middle = found[planted, "fp32", view].median("coefficient")
            assert middle is not None
            assert middle <= most


def test_accuracy_of_what_raises_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any) -> Any:
        raise RuntimeError("no answer")

    broken = replace(BACKENDS["torch-eager"], bind=raises)
    monkeypatch.setattr(contestants, "BACKENDS", {"torch-eager": broken})
    record, *_ = accuracy.measure(
        ["kl"], vocab=VOCAB, device="cpu", progress=lambda *_: None, families=["peaked"]
    )
    assert record.coefficient_error is None
    assert record.worst is not None
    assert record.worst.coefficient == 0
    assert record.wrong == record.determined > 0


def test_every_backend_is_a_contestant() -> None:
    known = contestants.contestants()
    assert all(name in known and known[name].role == "backend" for name in BACKENDS)
