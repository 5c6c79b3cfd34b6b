"""`pdverify vectors`: test vectors for other languages and frameworks."""

from __future__ import annotations

import argparse
from typing import Any

from pdverify.cli.common import CONFORMS, FAILS, UsageError

FOLDER = "vectors/v1"


def add_to(commands: Any) -> None:
    """Add the command to the program."""
    vectors = commands.add_parser(
        "vectors",
        help="write versioned test vectors, or check those that are there",
        description="Write test vectors: inputs with their right answers, as JSON.",
        epilog="exit status: 0 written or as they should be, 1 --check found a difference",
        allow_abbrev=False,
    )
    vectors.add_argument(
        "folder", nargs="?", default=FOLDER, metavar="FOLDER", help=f"default: {FOLDER}"
    )
    vectors.add_argument(
        "--check",
        action="store_true",
        help="write nothing: check the form of the files and compare them with what would be"
        " written",
    )
    vectors.add_argument("--overwrite", action="store_true", help="replace existing files")
    vectors.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdverify.tools.vectors import compare_vectors, lint_vectors, write_vectors

    if not args.check:
        written = write_vectors(args.folder, overwrite=args.overwrite)
        print(f"{args.folder}: {len(written)} files written")
        return CONFORMS
    if args.overwrite:
        raise UsageError("--check writes nothing: leave out --overwrite")
    problems = [*lint_vectors(args.folder), *compare_vectors(args.folder)]
    for problem in problems:
        print(problem)
    print(f"{args.folder}: {len(problems)} problems")
    return FAILS if problems else CONFORMS
