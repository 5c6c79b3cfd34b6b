"""`pdverify bench`: how fast, lean and accurate the backends are."""

from __future__ import annotations

import argparse
from typing import Any

from pdverify.cli.common import CONFORMS, FAILS, UsageError, natural, positive

SECTIONS = {
    "speed": "time and peak memory of each workload, next to what people write and to the"
    " device's ceilings",
    "accuracy": "bits of D and C that come out right, on rows of every input family",
    "scaling": "how time and memory grow with T, V, K and d",
    "stream": "logits in a file of 20 GB, read through a memory map",
}


def add_to(commands: Any) -> None:
    """Add the command to the program."""
    bench = commands.add_parser(
        "bench",
        help="measure speed, memory and accuracy of the built-in backends",
        description="Measure the built-in backends side by side with what training code does"
        " today.  Without a section: speed at level quick, everything at level full.",
        epilog="exit status: 0 every backend that was measured is right, 1 one is not, 2 could"
        " not measure",
        allow_abbrev=False,
    )
    sections = bench.add_argument_group("sections")
    for name, text in SECTIONS.items():
        sections.add_argument(f"--{name}", action="store_true", help=text)
    names: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "NAME"}
    bench.add_argument("--workload", **names, help="of the section speed; default: by level")
    bench.add_argument("--backend", **names, help="default: all")
    bench.add_argument("--device", default="cpu", metavar="cpu|cuda", help="default: cpu")
    bench.add_argument("--dtype", **names, help="of logits, or of hidden states and head")
    bench.add_argument("--tokens", type=positive, metavar="T", help="of speed and stream")
    bench.add_argument("--vocab", type=positive, metavar="V", help="of all sections but scaling")
    bench.add_argument("--level", choices=("quick", "full"), default="quick")
    bench.add_argument("--seed", type=natural, default=0, metavar="N", help="default: 0")
    bench.add_argument("--rounds", type=positive, metavar="N", help="of every timing")
    bench.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    bench.add_argument("--temp-dir", metavar="FOLDER", help="where the stream's file is made")
    bench.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    bench.add_argument("--page", metavar="FILE.md", help="also write them as a page with plots")
    bench.add_argument(
        "--from", dest="source", metavar="FILE", help="take the figures from FILE; measure nothing"
    )
    bench.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdverify.report.bench_console import print_bench
    from pdverify.report.bench_json import read_bench, write_bench
    from pdverify.report.bench_page import write_page
    from pdverify.report.json_report import check_writable

    if args.page is not None and not args.page.endswith(".md"):
        raise UsageError(f"--page {args.page!r}: the name of a page ends in .md")
    if args.source is not None and any(getattr(args, name) for name in SECTIONS):
        raise UsageError("--from measures nothing: leave out the sections")
    for path in (args.json, args.page):
        if path is not None:
            check_writable(path)
    report = _measure(args) if args.source is None else read_bench(args.source)
    try:
        if args.json is not None:
            write_bench(report, args.json)
        if args.page is not None:
            write_page(report, args.page)
    finally:
        print_bench(report)
    return FAILS if report.wrong else CONFORMS


def _measure(args: argparse.Namespace) -> Any:
    from pdverify.report.progress import Reporter
    from pdverify.tools.bench.run import Options, run_bench

    sections = tuple(name for name in SECTIONS if getattr(args, name))
    usual = ("speed",) if args.level == "quick" else tuple(SECTIONS)
    options = Options(
        sections=sections or usual,  # type: ignore[arg-type]
        level=args.level,
        workloads=tuple(args.workload or ()),
        backends=tuple(args.backend or ()),
        device=args.device,
        dtypes=tuple(args.dtype or ("fp32", "bf16")),
        tokens=args.tokens,
        vocab=args.vocab,
        rounds=args.rounds,
        seed=args.seed,
        memory=not args.no_memory,
        folder=args.temp_dir,
    )
    with Reporter() as progress:
        return run_bench(options, progress)
