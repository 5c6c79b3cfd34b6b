"""`pdverify check` without a target: every built-in backend."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdverify.cli.common import CONFORMS, FAILS, UsageError
from pdverify.cli.options import TARGET, Given

if TYPE_CHECKING:
    from pdverify.batch import Batch
    from pdverify.report.progress import Reporter

TOKENS = {"quick": 512, "full": 1024}
"""Real tokens sampled from the model where the caller does not say how many."""

ENGINE_BATCH = "llama.cpp"
"""The batch of the committed recording that the model alone cannot sample."""

DEFAULTS: dict[str, Any] = {
    "level": "quick",
    "seed": 0,
    "json": None,
    "precision": "fp32",
    "input": "auto",
    "tokens": None,
    "select": None,
    "deselect": None,
    "mask": None,
    "view": None,
    "tail": None,
    "delta": None,
}


def judge(given: Given) -> int:
    """Judge what was asked for, print the report, and return the exit status.

    Raises:
        UsageError, InputError, UnknownName, ModelUnavailable, OSError: naming the argument.
    """
    given.refuse(TARGET, "is for judging a TARGET; name one, or leave it out")
    args = argparse.Namespace(**(DEFAULTS | given.values))
    with given.blaming():
        _require_names(args)
    from pdverify.report.json_report import check_writable, write_json

    if args.json is not None:
        check_writable(args.json)
    from pdverify.conformance.builtin import NothingSelected, check_builtins, list_entries
    from pdverify.report.console import print_report
    from pdverify.report.progress import Reporter

    wanted: dict[str, Any] = {
        "precision": args.precision,
        "mask": args.mask,
        "view": args.view,
        "tail": args.tail,
        "select": args.select or (),
        "deselect": args.deselect or (),
    }
    try:
        list(list_entries(**wanted))
    except NothingSelected as error:
        raise UsageError(str(error)) from error
    with Reporter() as progress:
        real, real_source = _real_input(args, progress)
        report = check_builtins(
            real,
            real_source,
            level=args.level,
            seed=args.seed,
            delta=args.delta,
            progress=progress,
            **wanted,
        )
    judged = [entry for entry in report.entries if entry.unavailable is None]
    if not judged:
        reasons = [entry.unavailable for entry in report.entries if entry.unavailable]
        why = f"unavailable because {reasons[0]}" if reasons else "no entry is selected"
        raise UsageError(f"nothing was checked: {why}")
    try:
        if args.json is not None:
            write_json(report, args.json)
    finally:
        print_report(report)
    return CONFORMS if report.conforms else FAILS


def _require_names(args: argparse.Namespace) -> None:
    """Find what is misspelt before the long work starts.

    Raises:
        UnknownName, UsageError, InputError: naming the argument.
    """
    from pdverify.batch import check_threshold
    from pdverify.definitions.masks import MASKS, TAILS
    from pdverify.formats import policy_format

    policy_format(args.precision)
    if args.mask is not None:
        _ = MASKS[args.mask]
    if args.tail is not None and args.tail not in TAILS:
        raise UsageError(f"unknown tail {args.tail!r}; known: {', '.join(TAILS)}")
    check_threshold("delta", args.delta)


def _real_input(args: argparse.Namespace, progress: Reporter) -> tuple[dict[str, Batch], str]:
    """The real batches that `--input` asks for, and one line saying what they are."""
    from pdverify.cases.recordings import default_recording, load_recording
    from pdverify.tools.record import ModelUnavailable, real_batches

    if args.input not in ("auto", "model"):
        if args.tokens is not None:
            raise UsageError("--tokens is for tokens sampled from the model; leave it out")
        if args.input == "recording":
            return load_recording(default_recording()), "the recording of the package"
        if Path(args.input).suffix != ".safetensors":
            raise UsageError(
                f"--input {args.input!r}: known: auto, model, recording, or a .safetensors file"
            )
        return load_recording(args.input), f"the recording {args.input}"
    tokens = TOKENS[args.level] if args.tokens is None else args.tokens
    progress.say(f"sampling {tokens} real tokens from the model")
    try:
        real, source = real_batches(tokens=tokens, seed=args.seed)
    except ModelUnavailable as error:
        if args.input == "model":
            raise
        recorded = load_recording(default_recording())
        return recorded, f"the recording of the package, as the model is unavailable: {error}"
    if args.input == "auto" and ENGINE_BATCH not in real:
        recorded = load_recording(default_recording())
        real = real | {ENGINE_BATCH: recorded[ENGINE_BATCH]}
        source += f"; {ENGINE_BATCH} from the recording of the package"
    return real, source
