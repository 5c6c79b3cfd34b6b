"""`pdverify precision`: which decisions survive a number format, and where."""

from __future__ import annotations

import argparse
from typing import Any

from pdverify.cli.common import CONFORMS, FAILS, UsageError, natural, positive


def add_to(commands: Any) -> None:
    """Add the command to the program."""
    precision = commands.add_parser(
        "precision",
        help="tell which decisions survive bf16, fp16 and fp8, and what to upcast",
        description="Let a number format enter at one place after the other, and count the"
        " keep/drop decisions that change, that cannot be certified, and that no certificate"
        " explains."
        " `pdverify list` has the names of formats, stages, divergences and input families.",
        epilog="exit status: 0 every flip is explained by its certificate, 1 one is not, 2 could"
        " not judge",
        allow_abbrev=False,
    )
    names: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "NAME"}
    precision.add_argument("--format", **names, help="default: all that make sense at a stage")
    precision.add_argument("--stage", **names, help="a+b: both at once; default: all")
    precision.add_argument("--divergence", **names, help="default: kl (level full: all)")
    precision.add_argument(
        "--input",
        **names,
        help="real (fresh tokens of a language model), recording (the one that ships), input"
        " families, or recordings by path; default: by level",
    )
    precision.add_argument("--level", choices=("quick", "full"), default="quick")
    precision.add_argument("--tokens", type=positive, metavar="T", help="of every synthetic input")
    precision.add_argument("--vocab", type=_vocabulary, metavar="V", help="of synthetic inputs")
    precision.add_argument("--seed", type=natural, default=0, metavar="N", help="default: 0")
    precision.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    precision.add_argument("--html", metavar="FILE", help="also write a self-contained HTML file")
    precision.add_argument("--page", metavar="FILE.md", help="also write a page with plots")
    precision.add_argument(
        "--from",
        dest="source",
        nargs="+",
        metavar="FILE",
        help="take the figures from FILE (runs on different inputs: as one); measure nothing",
    )
    precision.set_defaults(run=_run)


def _vocabulary(text: str) -> int:
    value = positive(text)
    if value < 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 3")
    return value


def _run(args: argparse.Namespace) -> int:
    from pdverify.precision.records import Report, merged
    from pdverify.report.json_report import check_writable
    from pdverify.report.precision_console import print_precision
    from pdverify.report.precision_page import WHAT, write_html, write_page
    from pdverify.report.records_json import read_record, write_record

    if args.page is not None and not args.page.endswith(".md"):
        raise UsageError(f"--page {args.page!r}: the name of a page ends in .md")
    for path in (args.json, args.html, args.page):
        if path is not None:
            check_writable(path)
    if args.source is None:
        report = _measure(args)
    else:
        try:
            report = merged([read_record(Report, path, WHAT) for path in args.source])
        except ValueError as error:
            raise UsageError(f"--from: {error}") from error
    try:
        if args.json is not None:
            write_record(report, args.json)
        if args.html is not None:
            write_html(report, args.html)
        if args.page is not None:
            write_page(report, args.page)
    finally:
        print_precision(report)
    return FAILS if report.wrong else CONFORMS


def _measure(args: argparse.Namespace) -> Any:
    from pdverify.precision.records import Options
    from pdverify.report.progress import Reporter
    from pdverify.tools.low_precision import run

    options = Options(
        inputs=tuple(args.input or ()),
        formats=tuple(args.format or ()),
        stages=tuple(args.stage or ()),
        divergences=tuple(args.divergence or ()),
        level=args.level,
        seed=args.seed,
        tokens=args.tokens,
        vocab_size=args.vocab,
    )
    with Reporter() as progress:
        return run(options, progress)
