"""`pdverify bench` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdverify import cli
from pdverify.report.bench_json import read_bench, write_bench
from pdverify.tools.bench import run
from tests.bench.sample import RED, entry, report

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for `run_bench`: remembers the options and answers at once."""
    seen: list[Any] = []

    def run_bench(options: Any, progress: Any = None) -> Any:
        seen.append(options)
        return report(entry())

    monkeypatch.setattr(run, "run_bench", run_bench)
    return seen


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workload", "full-lk"], "unknown workload 'full-lk'"),
        (["--backend", "torch-eagre"], "unknown backend 'torch-eagre'"),
        (["--dtype", "fp12"], "dtype = fp12"),
        (["--device", "tpu"], "device = tpu"),
        (["--tokens", "0"], "'0' is not an integer >= 1"),
        (["--vocab", "5"], "vocab = 5"),
        (["--page", "page.html"], "ends in .md"),
        (["--json", "nowhere/bench.json"], "its folder does not exist"),
        (["--from", "nowhere.json"], "nowhere.json"),
        (["--from", "x.json", "--accuracy"], "leave out the sections"),
        (["--stream", "--temp-dir", "nowhere"], "no file of"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pdverify: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_help_names_every_section(capsys: Capture) -> None:
    assert cli.main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{name}" in out for name in ("speed", "accuracy", "scaling", "stream"))


def test_sections_by_level(asked: list[Any]) -> None:
    for argv in ([], ["--level", "full"], ["--level", "full", "--accuracy"]):
        assert cli.main(["bench", *argv]) == 0
    assert [x.sections for x in asked] == [
        ("speed",),
        ("speed", "accuracy", "scaling", "stream"),
        ("accuracy",),
    ]


def test_options_reach_the_bench(asked: list[Any]) -> None:
    words = "--workload full-kl topk-kl --backend torch-eager --dtype bf16 --tokens 8 --vocab 500"
    assert cli.main(["bench", *words.split(), "--rounds", "3", "--seed", "7", "--no-memory"]) == 0
    (given,) = asked
    assert given == run.Options(
        workloads=("full-kl", "topk-kl"),
        backends=("torch-eager",),
        dtypes=("bf16",),
        tokens=8,
        vocab=500,
        rounds=3,
        seed=7,
        memory=False,
    )


def test_figures_from_a_file_and_exit_status(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "bench.json"
    write_bench(report(entry()), path)
    assert cli.main(["bench", "--from", str(path)]) == 0
    assert "torch-eager" in capsys.readouterr().out
    write_bench(report(entry(gate=RED)), path)
    assert cli.main(["bench", "--from", str(path)]) == 1
    assert "WRONG: torch-eager (exit 1)" in capsys.readouterr().out


def test_a_small_run_writes_json_and_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the `plots` extra is not installed")
    path, page = tmp_path / "bench.json", tmp_path / "performance.md"
    words = "--workload topk-kl --backend torch-eager --dtype fp32 --tokens 4 --vocab 300"
    options = [*words.split(), "--rounds", "2", "--no-memory"]
    assert cli.main(["bench", *options, "--json", str(path), "--page", str(page)]) == 0
    (record,) = read_bench(path).speed
    assert (record.workload, record.tokens, record.vocab) == ("topk-kl", 4, 300)
    assert "topk-kl" in page.read_text()
    assert (tmp_path / "performance" / "run.json").read_bytes() == path.read_bytes()
