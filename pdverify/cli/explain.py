"""`pdverify explain`: what a check means."""

from __future__ import annotations

import argparse
from typing import Any

from pdverify.cli.common import CONFORMS


def add_to(commands: Any) -> None:
    """Add the command to the program."""
    explain = commands.add_parser(
        "explain",
        help="what a check or a convention means",
        description="What a check means, its formula, the bugs it finds; what a convention is.",
        allow_abbrev=False,
    )
    which = explain.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "id", metavar="ID", nargs="?", help="as `pdverify list` shows it: mask.boundary"
    )
    which.add_argument("--all", action="store_true", help="every one, as a markdown page")
    explain.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdverify.report.explain import explain, explain_all

    print(explain_all() if args.all else explain(args.id), end="" if args.all else "\n")
    return CONFORMS
