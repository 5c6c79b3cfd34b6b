"""`pdverify record`: real batches from the model, to a file."""

from __future__ import annotations

import argparse
from typing import Any

from pdverify.cli.common import CONFORMS, UsageError, natural, positive


def add_to(commands: Any) -> None:
    """Add the command to the program."""
    record = commands.add_parser(
        "record",
        help="record real batches from the model to a .safetensors file",
        description="Sample real tokens from the model, one batch for each mismatch between "
        "rollout and training, and write them to a file.",
        allow_abbrev=False,
    )
    record.add_argument("file", metavar="FILE", help="appears whole or not at all")
    record.add_argument("--tokens", type=positive, default=500, metavar="N", help="default: 500")
    record.add_argument(
        "--mismatch",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="default: all that can run here",
    )
    record.add_argument("--top-k", type=positive, default=20, metavar="K", help="default: 20")
    record.add_argument("--seed", type=natural, default=0, metavar="N", help="default: 0")
    record.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    record.add_argument("--overwrite", action="store_true", help="replace an existing file")
    record.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdverify.cases.recordings import check_target
    from pdverify.report.json_report import check_writable
    from pdverify.report.progress import Reporter
    from pdverify.tools.record import MISMATCHES, record

    check_target(args.file, overwrite=args.overwrite)
    check_writable(args.file)
    for name in args.mismatch or ():
        _ = MISMATCHES[name]
    with Reporter(interval=0.0) as progress:
        progress.say("loading the model")
        try:
            batches = record(
                args.file,
                tokens=args.tokens,
                mismatches=args.mismatch,
                top_k=args.top_k,
                seed=args.seed,
                dtype=args.dtype,
                overwrite=args.overwrite,
                progress=progress,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
    sizes = ", ".join(f"{name} {int(x.response_mask.sum())}" for name, x in batches.items())
    print(f"{args.file}: {sizes} tokens")
    return CONFORMS
