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
    explain.add_argument("id", metavar="ID", help="as `pdverify list` shows it: mask.boundary")
    explain.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdverify.report.explain import explain

    print(explain(args.id))
    return CONFORMS
