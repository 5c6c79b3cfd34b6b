"""Studies run, stop, go on, and refuse what is not theirs."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from simulations import runner
from simulations.__main__ import main
from simulations.runner import ENGINES, Job, ResultsError, described, execute, read
from simulations.studies import STUDIES

ROOT = Path(__file__).parents[2]
STUDY = "gradient-bias"


def _quiet(what, done, total):
    pass


def _run(out, *more):
    return main([STUDY, "--quick", "--seeds", "2", "--out", str(out), *more])


def _digests(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    assert _run(out) == 0
    return out


def test_results_say_what_they_are(whole):
    path = whole / STUDY / "results.parquet"
    said = described(path)
    assert said["command"] == "python -m simulations gradient-bias --quick --seeds 2"
    assert said["seeds"] == 2
    assert {"torch", "numpy", "pdverify", "python"} <= set(said["versions"])
    frame = read(path)
    assert set(frame["seed"]) == {0, 1}
    page = (whole / f"{STUDY}.md").read_text()
    assert said["command"] in page
    assert STUDIES[STUDY].question in page
    assert not (whole / STUDY / "cells").exists()


def test_the_page_is_written_again_from_its_results(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / f"{STUDY}.md").unlink()
    assert main([STUDY, "--page-only", "--out", str(tmp_path)]) == 0
    assert _digests(tmp_path) == _digests(whole)
    assert main(["direction", "--page-only", "--out", str(tmp_path)]) == 2
    assert "direction/results.parquet: damaged" in capsys.readouterr().err


def test_a_run_that_stopped_goes_on_to_the_same_bytes(whole, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    done = []

    def stopping(study, seeds):
        def run(cells):
            for found in ENGINES["local"](study, seeds)(cells):
                yield found
                done.append(found[0])
                if len(done) == 5:
                    raise KeyboardInterrupt

        return run

    monkeypatch.setitem(ENGINES, "stopping", stopping)
    assert _run(tmp_path, "--engine", "stopping") == 130
    kept = list((tmp_path / STUDY / "cells").glob("*.parquet"))
    assert len(kept) == 5
    seen = []

    def counting(study, seeds):
        def run(cells):
            seen.append(len(cells))
            yield from ENGINES["local"](study, seeds)(cells)

        return run

    monkeypatch.setitem(ENGINES, "counting", counting)
    assert _run(tmp_path, "--engine", "counting", "--resume") == 0
    assert seen == [len(STUDIES[STUDY].cells("quick")) - 5]
    assert _digests(tmp_path) == _digests(whole)


def test_a_killed_process_loses_the_cells_in_work(whole, tmp_path):
    command = [sys.executable, "-m", "simulations", STUDY, "--quick", "--seeds", "2"]
    command += ["--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    cells = tmp_path / STUDY / "cells"
    try:
        for _ in range(600):
            if cells.exists() and len(list(cells.glob("*.parquet"))) >= 2:
                break
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert _digests(tmp_path) == _digests(whole)


def _one_cell(tmp_path):
    """A finished cell of an unfinished run."""
    job = Job(STUDY, "quick", 2, tmp_path)
    study = STUDIES[STUDY]
    cell = study.cells("quick")[0]
    folder = job.folder / "cells"
    folder.mkdir(parents=True)
    path = folder / f"{runner._name(cell)}.parquet"
    said = {"source": runner.source_digest(), **runner._described(job), "cell": dict(cell)}
    return path, study.run(cell, range(2)), said


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"not parquet at all" * 100])
def test_a_damaged_cell_is_refused(tmp_path, capsys, damage):
    path, frame, said = _one_cell(tmp_path)
    whole = runner._as_parquet(frame, said)
    path.write_bytes(damage if damage != b"PAR1" else whole[: len(whole) // 2])
    assert _run(tmp_path, "--resume") == 2
    assert f"{path}: damaged" in capsys.readouterr().err
    assert path.exists()


@pytest.mark.parametrize(
    "change",
    [{"seeds": 3}, {"source": "other"}, {"study": "direction"}, {"level": "full"}, {"schema": 0}],
)
def test_a_foreign_cell_is_refused(tmp_path, capsys, change):
    path, frame, said = _one_cell(tmp_path)
    path.write_bytes(runner._as_parquet(frame, said | change))
    assert _run(tmp_path, "--resume") == 2
    error = capsys.readouterr().err
    assert next(iter(change)) in error
    assert "without --resume" in error


def test_without_resume_a_run_starts_over(tmp_path, whole):
    path, _, _ = _one_cell(tmp_path)
    path.write_bytes(b"damaged")
    assert _run(tmp_path) == 0
    assert _digests(tmp_path) == _digests(whole)


def test_a_parquet_file_of_something_else_is_no_result(tmp_path):
    path = tmp_path / "x.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(ResultsError, match="not results of a study"):
        read(path)


def test_ray_gives_the_same_bytes(whole, tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        import ray

        ray.init(address=cluster.address, log_to_driver=False)
        try:
            assert len(ray.nodes()) == 2
            assert _run(tmp_path, "--engine", "ray") == 0
        finally:
            ray.shutdown()
    finally:
        cluster.shutdown()
    assert _digests(tmp_path) == _digests(whole)


def test_errors_say_what_to_do(capsys, monkeypatch, tmp_path):
    assert main(["direktion"]) == 2
    assert "did you mean direction" in capsys.readouterr().err
    assert main(["direction", "--engine", "slurm"]) == 2
    assert "known: local, ray" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["direction", "--seeds", "0"])
    assert stopped.value.code == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else name)
    assert main(["direction", "--engine", "ray"]) == 2
    assert "'.[ray]'" in capsys.readouterr().err


def test_an_internal_error_is_no_verdict(tmp_path, monkeypatch, capsys):
    def broken(study, seeds):
        def run(cells):
            raise RuntimeError("broken")
            yield

        return run

    monkeypatch.setitem(ENGINES, "broken", broken)
    assert _run(tmp_path, "--engine", "broken") == 2
    assert "--resume goes on" in capsys.readouterr().err


def test_contradicting_theory_is_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        STUDIES._entries, STUDY, STUDIES[STUDY].__class__(
            **{**vars(STUDIES[STUDY]), "violations": lambda frame: ["nonsense"]}
        ),
    )  # fmt: skip
    assert _run(tmp_path) == 1
    assert "CONTRADICTS THEORY: gradient-bias: nonsense" in capsys.readouterr().err


def test_the_list_has_every_study(capsys):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown and study.question in shown for name, study in STUDIES.items())


def test_execute_returns_what_it_keeps(tmp_path):
    job = Job(STUDY, "quick", 1, tmp_path)
    frame = execute(job, _quiet)
    kept = pq.read_table(job.folder / "results.parquet").to_pandas()
    pd.testing.assert_frame_equal(frame, kept)
