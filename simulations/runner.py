"""Runs the cells of a study, keeps each as soon as it is done, and goes on where it stopped.

Files of a study in its folder `DIR/NAME/`: `cells/*.parquet` while it runs, then `results.parquet`
and plots, and the page `DIR/NAME.md`.  A file appears whole or not at all, and says in its metadata
what it holds; one that says something else is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from pdverify.cases.recordings import replace_file
from pdverify.conformance.versions import versions
from simulations.studies import STUDIES
from simulations.studies.study import Cell, Level

ROOT = Path(__file__).parents[1]
SCHEMA_VERSION = 1
KEY = b"pdverify-study"

Progress = Callable[[str, int, int], None]
Run = Callable[[list[Cell]], Generator[tuple[int, pd.DataFrame]]]


class ResultsError(ValueError):
    """A results file that is damaged, or holds something else than what was asked for."""


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        study: name of the study.
        level: ``quick`` or ``full``.
        seeds: how many, from 0 on.
        out: folder of pages and results.
        engine: ``local`` (processes of this machine) or ``ray``.
        resume: use the cells that are there.
    """

    study: str
    level: Level
    seeds: int
    out: Path
    engine: str = "local"
    resume: bool = False

    @property
    def folder(self) -> Path:
        """Where results and plots go."""
        return self.out / self.study

    @property
    def command(self) -> str:
        """The command that makes these results."""
        quick = " --quick" if self.level == "quick" else ""
        return f"python -m simulations {self.study}{quick} --seeds {self.seeds}"


def source_digest() -> str:
    """Digest of the code that results depend on."""
    digest = hashlib.sha256()
    for room in ("simulations", "pdverify/backends", "pdverify/definitions"):
        for path in sorted((ROOT / room).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def execute(job: Job, progress: Progress) -> pd.DataFrame:
    """Run the study, keep its results in `results.parquet` of its folder, and return them.

    Raises:
        ResultsError: with `resume`, a file of a cell that cannot be used.
        ModuleNotFoundError: the engine's package is missing.
    """
    study, kept = STUDIES[job.study], job.folder / "cells"
    if kept.exists() and not job.resume:
        shutil.rmtree(kept)
    kept.mkdir(parents=True, exist_ok=True)
    cells = study.cells(job.level)
    said = {"source": source_digest(), **_described(job)}
    paths = [kept / f"{_name(cell)}.parquet" for cell in cells]
    for path, cell in zip(paths, cells, strict=True):
        if path.exists():
            read(path, said | {"cell": dict(cell)})
    todo = [i for i, path in enumerate(paths) if not path.exists()]
    clock = _Clock(len(cells) - len(todo), len(cells))
    progress(f"{job.study}: {clock}", clock.done, clock.total)
    run = ENGINES[job.engine](study.name, range(job.seeds))
    with contextlib.closing(run([cells[i] for i in todo])) as results:
        for place, frame in results:
            i = todo[place]
            for name, value in reversed(list(cells[i].items())):
                frame.insert(0, name, value)
            replace_file(paths[i], _as_parquet(frame, said | {"cell": dict(cells[i])}))
            clock.done += 1
            progress(f"{job.study}: {clock}", clock.done, clock.total)
    frame = pd.concat([read(path) for path in paths], ignore_index=True)
    replace_file(job.folder / "results.parquet", _as_parquet(frame, _described(job)))
    shutil.rmtree(kept)
    return frame


def _described(job: Job) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "study": job.study,
        "level": job.level,
        "seeds": job.seeds,
        "command": job.command,
        "versions": versions(),
    }


def described(path: Path) -> dict[str, Any]:
    """What a results file says of itself.

    Raises:
        ResultsError: it is damaged, or no results file.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
        found: dict[str, Any] = json.loads(metadata[KEY])
    except (OSError, ValueError, KeyError, pa.ArrowInvalid) as error:
        raise ResultsError(f"{path}: damaged, or not results of a study ({error})") from None
    return found


def read(path: Path, expected: dict[str, Any] | None = None) -> pd.DataFrame:
    """Results in a file; `expected` is what its metadata must say.

    Raises:
        ResultsError: it is damaged, or says something else.
    """
    said = described(path)
    for name, value in (expected or {}).items():
        if said.get(name) != value:
            raise ResultsError(
                f"{path}: {name} = {said.get(name)!r}, expected {value!r};"
                " other results are in this folder: choose another --out, or run without --resume"
            )
    try:
        frame: pd.DataFrame = pq.read_table(path).to_pandas()
    except (OSError, pa.ArrowInvalid) as error:
        raise ResultsError(f"{path}: damaged ({error})") from None
    return frame


def _as_parquet(frame: pd.DataFrame, said: dict[str, Any]) -> bytes:
    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({KEY: json.dumps(said, sort_keys=True).encode()})
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd", compression_level=15)
    return out.getvalue()


def _name(cell: Cell) -> str:
    return hashlib.sha256(json.dumps(dict(cell), sort_keys=True).encode()).hexdigest()[:24]


@dataclass
class _Clock:
    """Estimate of the time left, from the cells of this run."""

    done: int
    total: int

    def __post_init__(self) -> None:
        self.before, self.start = self.done, time.monotonic()

    def __str__(self) -> str:
        fresh = self.done - self.before
        if not fresh:
            return "starting"
        left = (time.monotonic() - self.start) / fresh * (self.total - self.done)
        return f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"


def run_cell(study: str, cell: Cell, seeds: range) -> pd.DataFrame:
    """Results of one cell, on one thread: the same on every engine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return STUDIES[study].run(cell, seeds)
    finally:
        torch.set_num_threads(before)


def _local(study: str, seeds: range) -> Run:
    def run(cells: list[Cell]) -> Generator[tuple[int, pd.DataFrame]]:
        from joblib import Parallel, delayed

        def one(place: int) -> tuple[int, pd.DataFrame]:
            return place, run_cell(study, cells[place], seeds)

        parallel = Parallel(n_jobs=-1, return_as="generator_unordered", batch_size=1)
        with warnings.catch_warnings():
            # workers that grew are replaced, and cells in work are given up when interrupted
            warnings.filterwarnings("ignore", "A worker stopped|.* have been cancelled")
            yield from parallel(delayed(one)(place) for place in range(len(cells)))

    return run


def _ray(study: str, seeds: range) -> Run:
    def run(cells: list[Cell]) -> Generator[tuple[int, pd.DataFrame]]:
        import ray

        mine = not ray.is_initialized()
        if mine:
            # RAY_ADDRESS names a cluster; without it one is started on this machine
            excluded = [".venv", ".git", "docs", "vectors", "build"]
            ray.init(
                log_to_driver=False,
                include_dashboard=False,
                runtime_env={"working_dir": str(ROOT), "excludes": excluded},
            )
        try:
            remote = ray.remote(num_cpus=1)(run_cell)
            waiting = {remote.remote(study, dict(cell), seeds): i for i, cell in enumerate(cells)}
            while waiting:
                (first,), _ = ray.wait(list(waiting), num_returns=1)
                yield waiting.pop(first), ray.get(first)
        finally:
            if mine:
                ray.shutdown()

    return run


ENGINES: dict[str, Callable[[str, range], Run]] = {"local": _local, "ray": _ray}
"""Where cells run: `(study, seeds) -> run`, which yields `(place, results)` as they come."""
