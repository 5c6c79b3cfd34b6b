"""`pdverify compare`: two reports, before and after."""

from __future__ import annotations

import argparse
from typing import Any

from pdverify.cli.common import CONFORMS, FAILS, UsageError


def add_to(commands: Any) -> None:
    """Add the command to the program."""
    compare = commands.add_parser(
        "compare",
        help="compare two JSON reports: new failures, precision lost, differences of the runs",
        description="Compare two reports of `pdverify check --json`.",
        epilog="exit status: 0 not worse, 1 new failures, precision lost or something no longer"
        " judged, 2 a file is no report",
        allow_abbrev=False,
    )
    compare.add_argument("old", metavar="OLD", help="the report from before")
    compare.add_argument("new", metavar="NEW", help="the report to compare with it")
    compare.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdverify.conformance.compare import compare_reports, read_report
    from pdverify.report.compare import print_comparison

    try:
        comparison = compare_reports(read_report(args.old), read_report(args.new))
    except ValueError as error:
        raise UsageError(str(error)) from error
    print_comparison(comparison)
    return FAILS if comparison.regressed else CONFORMS
