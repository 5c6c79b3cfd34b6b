"""`pdverify list`: every registered name."""

from __future__ import annotations

import argparse
from typing import Any

from pdverify.cli.common import CONFORMS


def add_to(commands: Any) -> None:
    """Add the command to the program."""
    names = commands.add_parser(
        "list",
        help="show every mask, divergence, tail, backend, format, stage, family, mismatch, check,"
        " convention and likely cause",
        allow_abbrev=False,
    )
    names.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from pdverify.backends import BACKENDS
    from pdverify.cases.families import FAMILIES
    from pdverify.conformance.alternatives import ALTERNATIVES
    from pdverify.conformance.checks import CHECKS, in_order
    from pdverify.definitions.divergences import DIVERGENCES
    from pdverify.definitions.masks import MASKS, TAILS
    from pdverify.formats import FORMATS, SCALED
    from pdverify.precision.stages import STAGES
    from pdverify.tools.mismatches import MISMATCHES

    lines = [
        *(("mask", name, mask.summary) for name, mask in MASKS.items()),
        *(("divergence", name, f"{x.title} ({x.unit})") for name, x in DIVERGENCES.items()),
        *(("tail", name, "") for name in TAILS),
        *(("backend", name, _backend(x)) for name, x in BACKENDS.items()),
        *(
            ("format", name, f"{x.significand_bits} significand bits")
            for name, x in FORMATS.items()
        ),
        *(("format", name, x.summary) for name, x in SCALED.items()),
        *(("stage", name, stage.summary) for name, stage in STAGES.items()),
        *(("family", name, family.description) for name, family in FAMILIES.items()),
        *(("mismatch", name, mismatch.summary) for name, mismatch in MISMATCHES.items()),
        *(("check", name, CHECKS[name].summary) for name in in_order()),
        *(
            ("convention" if x.documented else "cause", name, x.summary)
            for name, x in ALTERNATIVES.items()
        ),
    ]
    width = max(len(name) for _, name, _ in lines)
    for kind, name, text in lines:
        print(f"{kind:<10}  {name:<{width}}  {text}".rstrip())
    return CONFORMS


def _backend(entry: Any) -> str:
    reason = entry.unavailable()
    return f"{entry.summary} (unavailable because {reason})" if reason else str(entry.summary)
