"""The command line: exit statuses, one line for every bad input, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdverify import cli
from pdverify.batch import Batch
from pdverify.cases import families
from pdverify.cases.recordings import default_recording, load_recording, write_recording
from pdverify.conformance import builtin, target_run
from pdverify.conformance.options import Options
from pdverify.conformance.records import Report, TargetReport
from pdverify.conformance.targets import TargetError
from pdverify.report.explain import explain
from pdverify.report.json_report import write_json
from pdverify.tools import record, vectors
from pdverify.tools.lm import ModelUnavailable
from tests.report import sample
from tests.report.sample import RIGHT, WRONG, report
from tests.report.target_sample import ABSENT, FAILED, PASSED, target_report

Capture = pytest.CaptureFixture[str]


class Judge:
    """Stands in for `check_builtins`: remembers what it was asked and answers at once."""

    def __init__(self) -> None:
        self.answer: Report | BaseException = report()
        self.real: dict[str, Batch] = {}
        self.source = ""
        self.asked: dict[str, Any] | None = None

    def __call__(self, real: dict[str, Batch], source: str, **asked: Any) -> Report:
        self.real, self.source, self.asked = real, source, asked
        asked["progress"]("stale", 1, 2)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    made = Judge()
    monkeypatch.setattr(builtin, "check_builtins", made)
    return made


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the model: one batch, and the arguments it was sampled with."""
    asked: dict[str, Any] = {}

    def sample(**arguments: Any) -> tuple[dict[str, Batch], str]:
        asked.update(arguments)
        return {"stale": families.build("peaked")}, "a model"

    monkeypatch.setattr(record, "real_batches", sample)
    return asked


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(**_: Any) -> None:
        raise ModelUnavailable("gguf is not installed; pip install 'pdverify[lm]'")

    monkeypatch.setattr(record, "real_batches", sample)


def _cannot_judge(capsys: Capture, *argv: str) -> str:
    """The single line on stderr of a run that could not judge."""
    status = cli.main(argv)
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith(("[", "sampling", "loading"))]
    assert len(lines) == 1, err
    assert lines[0].startswith("pdverify: error: ")
    return lines[0]


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_start_up_is_light(argument: str) -> None:
    code = (
        "import sys; from pdverify.cli import main\n"
        f"status = main([{argument!r}])\n"
        "heavy = {'torch', 'numpy', 'scipy', 'rich', 'flint'} & set(sys.modules)\n"
        "sys.exit(status or (f'imports {heavy}' if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pdverify" in done.stdout


def test_python_m() -> None:
    command = [sys.executable, "-m", "pdverify", "--bad"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("pdverify: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("entries", "status"), [((RIGHT,), 0), ((RIGHT, sample.ABSENT), 0), ((RIGHT, WRONG), 1)]
)
def test_exit_status_and_json(
    judge: Judge, tmp_path: Path, capsys: Capture, entries: tuple[Any, ...], status: int
) -> None:
    judge.answer = report(*entries)
    path = tmp_path / "report.json"
    assert cli.main(["check", "--input", "recording", "--json", str(path)]) == status
    assert json.loads(path.read_text())["conforms"] is (status == 0)
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith(f"conforms: {'no' if status else 'yes'}, ")
    assert "[1/2] stale" in err


def test_options_reach_the_judge(judge: Judge) -> None:
    options = "--level full --seed 7 --precision fp64 --mask predictive-kl --view topk --tail exact"
    globs = "--delta 0.25 --select a* *t* --select torch* --deselect numpy*"
    assert cli.main(["check", "--input", "recording", *options.split(), *globs.split()]) == 0
    asked = judge.asked or {}
    asked.pop("progress")
    assert asked == {
        "level": "full",
        "seed": 7,
        "precision": "fp64",
        "mask": "predictive-kl",
        "view": "topk",
        "tail": "exact",
        "delta": 0.25,
        "select": ["a*", "*t*", "torch*"],
        "deselect": ["numpy*"],
    }


def test_auto_takes_the_model_and_the_recorded_engine(judge: Judge, model: dict[str, Any]) -> None:
    assert cli.main(["check", "--level", "full", "--seed", "3"]) == 0
    assert model == {"tokens": 1024, "seed": 3}
    assert list(judge.real) == ["stale", "llama.cpp"]
    assert judge.source == "a model; llama.cpp from the recording of the package"


def test_model_alone(judge: Judge, model: dict[str, Any]) -> None:
    assert cli.main(["check", "--input", "model", "--tokens", "12"]) == 0
    assert model["tokens"] == 12
    assert list(judge.real) == ["stale"]


@pytest.mark.usefixtures("no_model")
def test_auto_falls_back_and_says_why(judge: Judge) -> None:
    assert cli.main(["check"]) == 0
    assert list(judge.real) == list(load_recording(default_recording()))
    assert "gguf is not installed" in judge.source
    assert judge.source.startswith("the recording of the package")


@pytest.mark.usefixtures("no_model")
def test_model_is_a_must_when_asked_for(judge: Judge, capsys: Capture) -> None:
    assert "gguf is not installed" in _cannot_judge(capsys, "check", "--input", "model")
    assert judge.asked is None


def test_a_recording_of_ones_own(judge: Judge, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    write_recording(path, {"mine": families.build("peaked")}, {})
    assert cli.main(["check", "--input", str(path)]) == 0
    assert list(judge.real) == ["mine"]
    assert judge.source == f"the recording {path}"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("", "COMMAND"),
        ("chekc", "invalid choice: 'chekc'"),
        ("check my:mask", "TARGET needs --mask"),
        ("check my:mask --mask none --input recording", "--input is for the built-in backends"),
        ("check my:mask --mask none --tokens 5", "--tokens is for the built-in backends"),
        ("check my:mask --mask nome", "did you mean none"),
        ("check my:mask --mask predictive-kl", "predictive-kl on the topk view needs --tail"),
        ("check my:mask --mask none --support both", "known: append, replace"),
        ("check my:mask --mask none --aggregation sum", "known: token-mean"),
        ("check my:mask --mask none --top-k 0", "'0' is not an integer >= 1"),
        ("check my:mask --mask none --time-limit 0", "seconds > 0"),
        ("check my:mask --mask none --junit out.json", "--json and --junit name the same file"),
        ("check my:mask --mask none --junit .", "not a regular file"),
        ("check my:mask --mask none --emit-test missing/t.py", "its folder does not exist"),
        ("check my:mask --mask none --emit-test broken.safetensors", "not written by --emit-test"),
        ("check my:mask --mask none", "does not import"),
        ("check my:mask other:mask", "unrecognized arguments: other:mask"),
        ("check --accept ratio-gradient", "--accept is for judging a TARGET"),
        ("check --no-neg-inf", "--no-neg-inf is for judging a TARGET"),
        ("check --junit out.xml", "--junit is for judging a TARGET"),
        ("explain", "ID"),
        ("explain mask.bondary", "did you mean mask.boundary"),
        ("compare old.json", "NEW"),
        ("compare old.json new.json", "No such file"),
        ("compare broken.safetensors broken.safetensors", "broken.safetensors: not JSON"),
        ("vectors missing --check --overwrite", "--check writes nothing"),
        ("check --colour", "unrecognized arguments: --colour"),
        ("check --level slow", "invalid choice: 'slow'"),
        ("check --seed -1", "'-1' is not an integer >= 0"),
        ("check --tokens 0", "'0' is not an integer >= 1"),
        ("check --tokens many", "'many' is not an integer >= 1"),
        ("check --precision fp33", "did you mean fp32"),
        ("check --mask predictive-lk", "did you mean predictive-kl"),
        ("check --tail exakt", "unknown tail 'exakt'; known: aggregated"),
        ("check --view sampled", "invalid choice: 'sampled'"),
        ("check --delta -0.5", "delta = -0.5: a threshold"),
        ("check --delta nan", "delta = nan: a threshold"),
        ("check --delta x", "invalid float value: 'x'"),
        ("check --select no-such-*", "no entry to judge"),
        ("check --input recordings", "known: auto, model, recording, or a .safetensors file"),
        ("check --input missing.safetensors", "no such file"),
        ("check --input broken.safetensors", "not a whole safetensors file"),
        ("check --input recording --tokens 5", "--tokens is for tokens sampled from the model"),
        ("check --json missing/report.json", "its folder does not exist"),
        ("check --json .", "not a regular file"),
        ("record", "FILE"),
        ("record new --mismatch stael", "did you mean stale"),
        ("record new --dtype fp16", "invalid choice: 'fp16'"),
        ("record new --top-k 0", "'0' is not an integer >= 1"),
        ("record new --tokens 1 --mismatch stale top-p", "at least one for each of 2"),
        ("record broken.safetensors", "the file exists"),
        ("record missing/new", "its folder does not exist"),
        ("list masks", "unrecognized arguments: masks"),
    ],
)
def test_bad_input(
    judge: Judge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    argv: str,
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.safetensors").write_bytes(default_recording().read_bytes()[:5000])
    options = ["--json", "out.json"] if argv.startswith("check") and "--json" not in argv else []
    assert part in _cannot_judge(capsys, *argv.split(), *options)
    assert judge.asked is None
    assert os.listdir() == ["broken.safetensors"]


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (
            report(sample.ABSENT),
            "nothing was checked: unavailable because no NVIDIA GPU is present",
        ),
        (report(RIGHT, entries=[]), "nothing was checked: no entry is selected"),
        (KeyError("x"), "internal error: KeyError: 'x' (PDVERIFY_TRACEBACK=1 shows where)"),
        (RuntimeError("one\ntwo"), "internal error: RuntimeError: one two"),
        (ValueError("odd"), "internal error: ValueError: odd"),
    ],
)
def test_no_verdict(
    judge: Judge, tmp_path: Path, capsys: Capture, answer: Report | Exception, part: str
) -> None:
    judge.answer = answer
    path = tmp_path / "report.json"
    argv = ("check", "--input", "recording", "--json", str(path))
    assert part in _cannot_judge(capsys, *argv)
    assert os.listdir(tmp_path) == []


def test_traceback_on_request(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    judge.answer = RuntimeError("boom")
    monkeypatch.setenv("PDVERIFY_TRACEBACK", "1")
    assert cli.main(["check", "--input", "recording"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_interrupt(judge: Judge, tmp_path: Path, capsys: Capture) -> None:
    judge.answer = KeyboardInterrupt()
    path = tmp_path / "report.json"
    assert cli.main(["check", "--input", "recording", "--json", str(path)]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "pdverify: interrupted"
    assert os.listdir(tmp_path) == []


def test_the_report_is_shown_where_the_json_cannot_be_written(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    argv = ["check", "--input", "recording", "--json", str(tmp_path / "report.json")]
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert "conforms: yes" in out
    assert "No space left" in err.splitlines()[-1]
    assert os.listdir(tmp_path) == []


def test_a_closed_pipe() -> None:
    code = "import sys; from pdverify.cli import main; sys.exit(main(['list']))"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "pdverify: error: stdout was closed before the report was complete\n"


def test_list_shows_every_registry(capsys: Capture) -> None:
    from pdverify.backends import BACKENDS
    from pdverify.cases.families import FAMILIES
    from pdverify.conformance.alternatives import ALTERNATIVES
    from pdverify.conformance.checks import CHECKS, in_order
    from pdverify.definitions.divergences import DIVERGENCES
    from pdverify.definitions.masks import MASKS, TAILS
    from pdverify.formats import FORMATS, SCALED
    from pdverify.precision.stages import STAGES
    from pdverify.tools.mismatches import MISMATCHES

    assert cli.main(["list"]) == 0
    shown = [tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()]
    expected = {
        "mask": MASKS,
        "divergence": DIVERGENCES,
        "tail": TAILS,
        "backend": BACKENDS,
        "format": (*FORMATS, *SCALED),
        "stage": STAGES,
        "family": FAMILIES,
        "mismatch": MISMATCHES,
    }
    registered = [(kind, name) for kind, names in expected.items() for name in names]
    registered += [("check", id) for id in in_order()]
    registered += [
        ("convention" if x.documented else "cause", name) for name, x in ALTERNATIVES.items()
    ]
    assert shown == registered
    assert len(in_order()) == len(CHECKS)


def test_record_passes_its_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    asked: dict[str, Any] = {}

    def fake(path: str, **arguments: Any) -> dict[str, Batch]:
        asked.update(arguments, path=path)
        arguments["progress"]("stale", 1, 1)
        return {"stale": families.build("peaked", sequences=2, length=3)}

    monkeypatch.setattr(record, "record", fake)
    path = str(tmp_path / "new.safetensors")
    options = "--tokens 40 --mismatch stale top-p --top-k 5 --seed 2 --dtype fp32 --overwrite"
    assert cli.main(["record", path, *options.split()]) == 0
    asked.pop("progress")
    assert asked == {
        "path": path,
        "tokens": 40,
        "mismatches": ["stale", "top-p"],
        "top_k": 5,
        "seed": 2,
        "dtype": "fp32",
        "overwrite": True,
    }
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: stale ")
    assert "[1/1] stale" in err


class TargetJudge:
    """Stands in for `check_target`: remembers what it was asked and answers at once."""

    def __init__(self) -> None:
        self.answer: TargetReport | BaseException = target_report()
        self.target: Any = None
        self.options: Options | None = None

    def __call__(self, target: Any, options: Options, *, progress: Any) -> TargetReport:
        self.target, self.options = target, options
        progress("mask.boundary", 1, 2)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def target_judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TargetJudge:
    made = TargetJudge()
    monkeypatch.setattr(target_run, "check_target", made)
    monkeypatch.chdir(tmp_path)
    for name in [x for x in os.environ if x.startswith(("PDVERIFY_", "GITHUB_"))]:
        monkeypatch.delenv(name)
    return made


TARGET = ["check", "masks:keep", "--mask", "predictive-kl", "--tail", "exact"]


def test_every_option_reaches_the_judge_of_targets(target_judge: TargetJudge) -> None:
    options = (
        "--view topk --support replace --top-k 5 --delta 0.25 --delta-low 0.125 --delta-high 0.5"
        " --clip-low 0.75 --clip-high 0.375 --ratio-cap 3 --eta 0.0625 --aggregation token-mean"
        " --precision bf16 --no-neg-inf --time-limit 2.5 --select mask.* size.* --select tail.*"
        " --deselect size.odd --accept ratio-gradient --level full --seed 7"
    )
    assert cli.main([*TARGET, *options.split()]) == 0
    assert target_judge.target == "masks:keep"
    assert target_judge.options == Options(
        mask="predictive-kl",
        view="topk",
        tail="exact",
        support="replace",
        top_k=5,
        delta=0.25,
        delta_low=0.125,
        delta_high=0.5,
        clip_low=0.75,
        clip_high=0.375,
        ratio_cap=3.0,
        eta=0.0625,
        aggregation="token-mean",
        precision="bf16",
        neg_inf=False,
        time_limit=2.5,
        select=("mask.*", "size.*", "tail.*"),
        deselect=("size.odd",),
        accept=("ratio-gradient",),
        level="full",
        seed=7,
    )


def test_what_is_not_given_is_left_to_the_options(target_judge: TargetJudge) -> None:
    assert cli.main(TARGET) == 0
    assert target_judge.options == Options(mask="predictive-kl", tail="exact")


def test_the_files_of_a_target(target_judge: TargetJudge, capsys: Capture) -> None:
    target_judge.answer = target_report(PASSED, FAILED)
    files = ["--json", "out.json", "--junit", "out.xml", "--emit-test", "test_out.py"]
    assert cli.main([*TARGET, *files]) == 1
    assert json.loads(Path("out.json").read_text())["conforms"] is False
    assert "mask.boundary" in Path("out.xml").read_text()
    assert "def test_mask_boundary" in Path("test_out.py").read_text()
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].endswith("start with mask.boundary (exit 1)")
    assert "::error" not in out
    assert "[1/2] mask.boundary" in err


def test_nothing_to_emit(target_judge: TargetJudge, capsys: Capture) -> None:
    assert cli.main([*TARGET, "--emit-test", "test_out.py"]) == 0
    assert os.listdir() == []
    assert "test_out.py is not written" in capsys.readouterr().out


def test_in_github_actions(
    target_judge: TargetJudge, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    target_judge.answer = target_report(PASSED, FAILED)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    assert cli.main(TARGET) == 1
    assert "::error title=pdverify mask.boundary::" in capsys.readouterr().out
    assert "| `mask.boundary` | FAILED |" in Path("summary.md").read_text()


def test_the_report_on_a_target_is_shown_where_a_file_cannot_be_written(
    target_judge: TargetJudge, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cli.main([*TARGET, "--junit", "out.xml"]) == 2
    out, err = capsys.readouterr()
    assert "conforms: yes" in out
    assert "No space left" in err.splitlines()[-1]
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (TargetError("TARGET 'masks:keep': raised"), "error: TARGET 'masks:keep': raised"),
        (target_report(ABSENT), "nothing was checked: the target returns no loss"),
        (target_report(checks=[]), "nothing was checked: no check is selected"),
        (KeyError("x"), "internal error: KeyError: 'x'"),
    ],
)
def test_no_verdict_on_a_target(
    target_judge: TargetJudge, capsys: Capture, answer: Any, part: str
) -> None:
    target_judge.answer = answer
    assert part in _cannot_judge(capsys, *TARGET, "--json", "out.json")
    assert os.listdir() == []


def test_flags_win_over_the_environment_over_the_file(
    target_judge: TargetJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = """
        [tool.pdverify]
        target = "masks:keep"
        mask = "predictive-tv"
        tail = "uniform"
        delta = 0.5
        select = ["mask.*", "tail.*"]
        no-neg-inf = true
    """
    Path("pyproject.toml").write_text(table)
    assert cli.main(["check"]) == 0
    assert target_judge.target == "masks:keep"
    wanted = Options(
        "predictive-tv", tail="uniform", delta=0.5, select=("mask.*", "tail.*"), neg_inf=False
    )
    assert target_judge.options == wanted
    monkeypatch.setenv("PDVERIFY_TAIL", "exact")
    monkeypatch.setenv("PDVERIFY_SELECT", "size.* batch.*")
    assert cli.main(["check", "other:keep", "--select", "value.*", "--delta", "0.25"]) == 0
    assert target_judge.target == "other:keep"
    wanted = replace(wanted, tail="exact", select=("value.*",), delta=0.25)
    assert target_judge.options == wanted


@pytest.mark.parametrize(
    ("table", "environ", "argv", "parts"),
    [
        ("maks = 1", {}, "check", ["pyproject.toml: [tool.pdverify] maks", "did you mean mask"]),
        ("delta = 'x'", {}, "check", ["[tool.pdverify] delta: ", "invalid float value: 'x'"]),
        (
            "delta = -1",
            {},
            "check my:f --mask none",
            ["error: delta = -1: ", "] delta)"],
        ),
        ("", {"PDVERIFY_MASK": "nome"}, "check", ["did you mean none", "also set: PDVERIFY_MASK"]),
        ("", {"PDVERIFY_LEVEL": "slow"}, "check", ["PDVERIFY_LEVEL: ", "invalid choice: 'slow'"]),
        ("", {"PDVERIFY_MAKS": "x"}, "check", ["PDVERIFY_MAKS: unknown option"]),
        ("accept = 'x'", {}, "check", ["] accept is for judging a TARGET"]),
        ("", {"PDVERIFY_INPUT": "model"}, "check my:f --mask none", ["PDVERIFY_INPUT is for the"]),
    ],
)
def test_settings_that_mean_nothing_name_their_origin(
    target_judge: TargetJudge,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    table: str,
    environ: dict[str, str],
    argv: str,
    parts: list[str],
) -> None:
    Path("pyproject.toml").write_text(f"[tool.pdverify]\n{table}\n")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    line = _cannot_judge(capsys, *argv.split())
    for part in parts:
        assert part in line
    assert target_judge.options is None


def test_the_built_ins_take_settings_too(judge: Judge, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("[tool.pdverify]\ninput = 'recording'\nseed = 3\n")
    monkeypatch.setenv("PDVERIFY_SEED", "4")
    assert cli.main(["check"]) == 0
    assert judge.source == "the recording of the package"
    assert (judge.asked or {})["seed"] == 4


def test_explain(capsys: Capture) -> None:
    assert cli.main(["explain", "mask.boundary"]) == 0
    assert capsys.readouterr().out == explain("mask.boundary") + "\n"


def test_compare(tmp_path: Path, capsys: Capture) -> None:
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    write_json(target_report(PASSED), old)
    write_json(target_report(PASSED, FAILED), new)
    assert cli.main(["compare", old, old]) == 0
    assert cli.main(["compare", old, new]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("worse: 1 new failures")
    assert cli.main(["compare", new, old]) == 1  # the failed check is no longer there
    capsys.readouterr()
    write_json(report(), new)
    assert "the new one on built-in backends" in _cannot_judge(capsys, "compare", old, new)


def test_vectors(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked: list[Any] = []
    problems: list[str] = []

    def write(folder: str, *, overwrite: bool) -> list[Path]:
        asked.append((folder, overwrite))
        return [Path("a"), Path("b")]

    monkeypatch.setattr(vectors, "write_vectors", write)
    monkeypatch.setattr(vectors, "lint_vectors", lambda folder: [f"lint {folder}", *problems][1:])
    monkeypatch.setattr(vectors, "compare_vectors", lambda folder: problems)
    assert cli.main(["vectors"]) == 0
    assert cli.main(["vectors", "out", "--overwrite"]) == 0
    assert asked == [("vectors/v1", False), ("out", True)]
    assert cli.main(["vectors", "out", "--check"]) == 0
    problems.append("out/kl.json differs")
    assert cli.main(["vectors", "out", "--check"]) == 1
    out = capsys.readouterr().out
    assert "out: 2 files written" in out
    assert "out/kl.json differs\n" in out
    assert len(asked) == 2
