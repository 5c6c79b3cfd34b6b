"""Run a study: `python -m simulations NAME`."""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

DEFAULT_OUT = {"quick": "build/studies", "full": "docs/studies"}


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m simulations",
        description="Run a study of trust-region masks in softmax bandits, and write its results"
        " (Parquet), plots and page.",
        epilog="exit status: 0 done, 1 a result contradicts what theory guarantees, 2 could not"
        " run, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="a study, `all`, or `list`")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cells, few seeds")
    parser.add_argument("--seeds", type=_positive, metavar="N", help="default: by study and level")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: {DEFAULT_OUT['full']};"
                        f" with --quick {DEFAULT_OUT['quick']}")  # fmt: skip
    parser.add_argument("--engine", default="local", metavar="local|ray",
                        help="processes of this machine, or a Ray cluster")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on where a run stopped")
    parser.add_argument(
        "--page-only", action="store_true", help="write the page again from the results in DIR"
    )
    args = parser.parse_args(arguments)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on", file=sys.stderr)
        return 130
    except (LookupError, ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        print("error: internal; results so far are kept, --resume goes on", file=sys.stderr)
        return 2


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _run(args: argparse.Namespace) -> int:
    _need("pandas", "pyarrow", "joblib", "matplotlib", *(["ray"] if args.engine == "ray" else []))
    from pdverify.report.progress import Reporter
    from simulations.pages import write
    from simulations.runner import ENGINES, Job, described, execute, read
    from simulations.studies import STUDIES
    from simulations.studies.study import Level

    if args.engine not in ENGINES:
        raise ValueError(f"--engine {args.engine}: known: {', '.join(ENGINES)}")
    if args.name == "list":
        for name, study in STUDIES.items():
            print(f"{name:16} {study.question}")
        return 0
    names = list(STUDIES) if args.name == "all" else [args.name]
    level: Level = "quick" if args.quick else "full"
    out = args.out or Path(DEFAULT_OUT[level])
    contradicted = False
    for name in names:
        study = STUDIES[name]
        job = Job(name, level, args.seeds or study.seeds[level], out, args.engine, args.resume)
        results = job.folder / "results.parquet"
        if args.page_only:
            frame = read(results, {"study": name})
        else:
            out.mkdir(parents=True, exist_ok=True)
            with Reporter() as progress:
                frame = execute(job, progress)
        written = write(study, frame, described(results), out)
        print(f"{name}: {study.summarize(frame).finding}\n  {written[-1]}")
        for line in study.violations(frame):
            contradicted = True
            print(f"CONTRADICTS THEORY: {name}: {line}", file=sys.stderr)
    return 1 if contradicted else 0


def _need(*names: str) -> None:
    import importlib.util

    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        extra = "ray" if missing == ["ray"] else "studies"
        raise ModuleNotFoundError(
            f"{', '.join(missing)} not installed; pip install -e '.[{extra}]' in the checkout"
        )


if __name__ == "__main__":
    sys.exit(main())
