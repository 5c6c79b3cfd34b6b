"""The bench as text, JSON and a page."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdverify.report.bench_console import print_bench
from pdverify.report.bench_json import read_bench, write_bench
from pdverify.report.bench_page import RUN, page, plots, write_page
from pdverify.report.bench_tables import duration, size
from pdverify.report.records_json import plain
from pdverify.report.tables import PlotsUnavailable
from pdverify.tools.bench.records import BenchReport, FamilyBits, Interval, Memory
from pdverify.tools.bench.targets import targets
from tests.bench.sample import ACCURACY, GREEN, RED, SCALING, STREAM, entry, report

ABSENT = entry("native", None, unavailable="there is no compiler", seconds=None, ratios={})
BASELINE = entry("materialized", RED, role="baseline", memory=None)
WRONG = entry("torch-chunked", RED)


def _text(bench: BenchReport) -> str:
    out = io.StringIO()
    print_bench(bench, out)
    return out.getvalue()


def _row(text: str, start: str) -> str:
    """The first line that starts so: that of the table of speeds."""
    return next(x for x in text.splitlines() if x.startswith(start))


def test_console_shows_ratios_memory_and_reasons() -> None:
    text = _text(report(entry(), ABSENT, BASELINE))
    line = _row(text, "torch-eager ")
    assert "12.3 ms" in line
    assert "2.00 [1.9, 2.2]" in line
    assert line.split()[-3:] == ["MiB", "0.781", "0.25"]
    assert "native: unavailable because there is no compiler" in text
    assert "materialized: 3 of 10 rows wrong" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_ceiling_is_shown_as_a_multiple_of_its_time() -> None:
    fast = entry(ratios={"read-bandwidth": Interval(0.25, 0.2, 0.3)})
    line = _row(_text(report(fast)), "torch-eager ")
    assert " 4.00 " in line


def test_a_wrong_backend_shows_no_figure_even_if_it_has_one() -> None:
    for text in (_text(report(WRONG)), page(report(WRONG), "performance")):
        (line,) = (
            x
            for x in text.splitlines()
            if "torch-chunked" in x and "WRONG" in x and "exit" not in x
        )
        assert "ms" not in line
        assert "MiB" not in line
    assert "WRONG: torch-chunked (exit 1)" in _text(report(WRONG))
    assert report(WRONG).wrong == ["torch-chunked"]
    assert not any("times faster" in x.what for x in targets(report(WRONG)))


def test_a_baseline_that_is_off_does_not_fail_the_run() -> None:
    assert report(entry(), BASELINE, ABSENT).wrong == []


def test_json_round_trip(tmp_path: Path) -> None:
    bench = report(entry(), ABSENT, WRONG)
    write_bench(bench, tmp_path / "bench.json")
    assert read_bench(tmp_path / "bench.json") == bench


def test_json_has_six_digits_and_no_infinities() -> None:
    assert plain(1.23456789) == 1.23457
    with pytest.raises(ValueError, match="inf in a record"):
        plain(replace(report(), seconds=float("inf")))


@pytest.mark.parametrize(
    "change", [{"schema_version": 2}, {"speed": [{"workload": 1}]}, {"stream": None}]
)
def test_another_shape_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(plain(report(entry())) | change))
    with pytest.raises(OSError, match="not a bench report"):
        read_bench(path)


def test_page_is_a_function_of_the_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the `plots` extra is not installed")
    bench = replace(report(entry(), ABSENT, BASELINE), seconds=12.3456789)
    written = write_page(bench, tmp_path / "performance.md")
    first = {path.name: path.read_bytes() for path in written}
    assert first.keys() == {
        *("performance.md", RUN, "bits-kl-full.png"),
        *("cost-full-kl-V.png", "cost-full-kl-V-memory.png"),
    }
    again = read_bench(tmp_path / "performance" / RUN)
    for path in written:
        path.unlink()
    assert {path.name: path.read_bytes() for path in write_page(again, written[-1])} == first


def test_page_names_every_plot_and_table() -> None:
    pytest.importorskip("matplotlib", reason="the `plots` extra is not installed")
    bench = report(entry(), ABSENT, BASELINE)
    text = page(bench, "performance")
    assert all(f"(performance/{plot.name})" in text for plot in plots(bench))
    for title in ("full-kl: D, C and mask", "How cost grows", "Larger than memory"):
        assert title in text
    assert "1.02 [0.95, 1.09]" in text
    assert "23.5 (flat)" in text


def _held(bench: BenchReport, what: str) -> tuple[str, str, bool]:
    (found,) = (x for x in targets(bench) if x.what.startswith(what))
    return found.wanted, found.measured, found.met


def _of(*entries: Any, **changes: Any) -> BenchReport:
    empty: dict[str, Any] = {"accuracy": [], "scaling": [], "stream": []}
    workload, dtype = changes.pop("workload", "full-kl"), changes.pop("dtype", "fp32")
    return replace(report(*entries, workload=workload, dtype=dtype), **(empty | changes))


@pytest.mark.parametrize(
    ("name", "needed"),
    [("torch-chunked", 1.6), ("torch-compiled", 3.5), ("fastest backend (other)", 7)],
)
def test_times_faster_than_by_rows(name: str, needed: float) -> None:
    for factor, met in ((0.99, False), (1.0, True)):
        x = needed * factor
        ratios = {"by-rows": Interval(x, x / 2, x * 2)}
        own = entry("other" if "other" in name else name, ratios=ratios)
        slow = entry("slow", seconds=Interval(9.0, 9.0, 9.0))
        wanted, measured, found = _held(_of(own, slow), f"times faster than by-rows: {name}")
        assert (wanted, found) == (f">= {needed:g}", met)
        assert measured == f"{x:.3g} [{x / 2:.3g}, {x * 2:.3g}]"


def test_memory_reading_and_product_have_targets() -> None:
    lean = entry("torch-chunked", memory=Memory(2 * 2**20, 100 * 2**20, ""))
    assert _held(_of(lean), "memory over the inputs: torch-chunked") == ("<= 2 %", "2 %", True)
    ratios = {"read-bandwidth": Interval(0.1, 0.09, 0.2), "matrix-product": TENTHS}
    read = _of(entry(ratios=ratios), workload="topk-kl")
    assert _held(read, "time over reading") == ("<= 8", "10 [5, 11.1]", False)
    gate = replace(GREEN, error={"log_prob": 2e-6})
    memory = Memory(2**20, 2**27, "")
    own = entry("linear-head", gate, ratios={"matrix-product": TENTHS}, memory=memory)
    whole = entry("materialized", role="baseline", memory=Memory(20 * 2**20, 2**27, ""))
    for dtype, wanted, met in (("fp32", "<= 1.15", False), ("bf16", "<= 1.5", True)):
        head = _of(own, whole, workload="linear-head", dtype=dtype)
        measured = "1.25 [1.25, 1.25]"
        assert _held(head, "time over the matrix product") == (wanted, measured, met)
        assert _held(head, "memory over the materialized") == ("<= 10 %", "5 %", True)
    head = _of(own, whole, workload="linear-head")
    assert _held(head, "error of log pi") == ("<= 1e-05 nats", "2e-06 nats", True)


TENTHS = Interval(0.8, 0.8, 0.8)


def test_growth_and_stream_have_targets() -> None:
    for low, high, met in ((1.05, 1.09, True), (1.11, 1.2, False), (0.5, 0.89, False)):
        bench = _of(scaling=[replace(SCALING, exponent=Interval(1.0, low, high))])
        assert _held(bench, "exponent of time over V")[2] is met
    assert _held(_of(scaling=[SCALING]), "memory growth") == ("<= 2 %", "0 %", True)
    leak = replace(SCALING, memory=[0, 0, 2**25])
    assert _held(_of(scaling=[leak]), "memory growth") == ("<= 2 %", "53.3 %", False)
    for more, met in ((0, True), (2**30, False)):
        bench = _of(stream=[replace(STREAM, peak=STREAM.block_bytes + 2**20 + more)])
        assert _held(bench, "memory above the block in work")[2] is met


def test_accuracy_has_targets() -> None:
    for bits, wrong, met in ((20.0, 0, True), (19.9, 1, False)):
        record = replace(ACCURACY, families=[FamilyBits("flat", bits, 9.0)], wrong=wrong)
        bench = _of(accuracy=[record])
        assert _held(bench, "bits of C, worst family") == (">= 20", f"{bits:.3g}", met)
        assert _held(bench, "wrong certain decisions") == ("0", f"{wrong} of 6", met)
    for bits, met in ((9.9, True), (10.1, False)):
        families = [FamilyBits(str(i), x, None) for i, x in enumerate((0.0, bits, None))]
        planted = replace(
            ACCURACY, contestant="planted-bf16-softmax", role="planted", families=families
        )
        assert _held(_of(accuracy=[planted]), "bits of C, middle family")[2] is met


def test_missed_targets_are_said_on_console_and_page() -> None:
    slow = entry("torch-chunked", ratios={"by-rows": Interval(1.0, 0.9, 1.1)})
    bench = _of(slow)
    assert "missed" in _row(_text(bench), "times faster than by-rows: torch-chunked")
    assert ">= 1.6 | 1 [0.9, 1.1] | missed |" in page(bench, "performance")


def test_without_matplotlib_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PlotsUnavailable, match=r"pip install 'pdverify\[plots\]'"):
        write_page(report(entry()), tmp_path / "performance.md")
    assert list(tmp_path.iterdir()) == []


def test_units() -> None:
    times = [duration(x) for x in (2.0, 0.9999, 0.0123, 4.56e-5)]
    assert times == ["2 s", "1 s", "12.3 ms", "45.6 µs"]
    sizes = [size(x) for x in (12, 2048, 3 * 2**20, 20 * 2**30)]
    assert sizes == ["12 B", "2 KiB", "3 MiB", "20 GiB"]
