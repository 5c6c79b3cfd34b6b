"""`pdverify check`: judge a target, or every built-in backend."""

from __future__ import annotations

import argparse
from typing import Any

from pdverify.cli import builtin, target
from pdverify.cli.options import complete, options_parser


def add_to(commands: Any) -> None:
    """Add the command to the program."""
    check = commands.add_parser(
        "check",
        help="judge a function of yours, or every built-in backend: the main job",
        description="Judge TARGET, a function of yours, on synthetic tokens; without TARGET, "
        "every built-in backend on real and synthetic ones.",
        epilog="exit status: 0 conforms, 1 does not, 2 could not judge; names are those of "
        "`pdverify list`; every option can also stand in pyproject.toml, [tool.pdverify], or in "
        "the environment (PDVERIFY_MASK)",
        parents=[options_parser()],
        allow_abbrev=False,
    )
    check.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    given = complete({name: value for name, value in vars(args).items() if name != "run"})
    return target.judge(given) if "target" in given.values else builtin.judge(given)
