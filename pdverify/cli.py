"""The `pdverify` program.

Exit status: 0 conforms, 1 does not, 2 could not judge (one line on stderr says why), 130
interrupted.  `PDVERIFY_TRACEBACK=1` shows where an error was raised.  Nothing heavy is imported
before a command runs, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pdverify

if TYPE_CHECKING:
    from pdverify.batch import Batch
    from pdverify.report.progress import Reporter

CONFORMS, FAILS, CANNOT_JUDGE, INTERRUPTED = 0, 1, 2, 130
TOKENS = {"quick": 512, "full": 1024}
"""Real tokens sampled from the model where the caller does not say how many."""

ENGINE_BATCH = "llama.cpp"
"""The batch of the committed recording that the model alone cannot sample."""


class UsageError(ValueError):
    """The command line asks for something that cannot be done; the message says how to mend it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv` (the process's arguments by default) and return its status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # an ASCII terminal must not lose the report
        sys.stdout.reconfigure(errors="backslashreplace")
    # the bars of the library that loads the model would break up our own progress lines
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        args = _parser().parse_args(argv)
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # the reader of stdout has gone; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _say("error: stdout was closed before the report was complete", CANNOT_JUDGE)
    except Exception as error:
        if os.environ.get("PDVERIFY_TRACEBACK") == "1":
            import traceback

            traceback.print_exc()
        return _say(f"error: {_explain(error)}", CANNOT_JUDGE)


def _say(message: str, status: int) -> int:
    print(f"pdverify: {' '.join(message.split())}", file=sys.stderr)
    return status


def _explain(error: Exception) -> str:
    from pdverify.batch import InputError
    from pdverify.registry import UnknownName
    from pdverify.tools.lm import ModelUnavailable

    expected = UsageError, InputError, UnknownName, ModelUnavailable, OSError
    if isinstance(error, expected):
        return str(error)
    hint = "PDVERIFY_TRACEBACK=1 shows where"
    return f"internal error: {type(error).__name__}: {error} ({hint})"


def _parser() -> _Parser:
    parser = _Parser(
        prog="pdverify",
        description="Tells whether trust-region masks for policy optimization are right.",
        epilog="exit status: 0 conforms, 1 does not, 2 could not judge",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pdverify {pdverify.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_check(commands)
    _add_record(commands)
    names = commands.add_parser(
        "list", help="show every mask, divergence, tail, backend, format, family and mismatch"
    )
    names.set_defaults(run=_list)
    return parser


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="judge every built-in backend: the main job",
        description="Judge every built-in backend on real and synthetic tokens.",
        epilog="exit status: 0 conforms, 1 does not, 2 could not judge; "
        "names are those of `pdverify list`",
        allow_abbrev=False,
    )
    check.add_argument("target", nargs="?", metavar="TARGET", help="reserved; not accepted yet")
    check.add_argument("--level", choices=tuple(TOKENS), default="quick", help="default: quick")
    check.add_argument("--seed", type=_natural, default=0, metavar="N", help="default: 0")
    check.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    check.add_argument("--precision", default="fp32", metavar="FORMAT", help="default: fp32")
    check.add_argument(
        "--input",
        default="auto",
        metavar="auto|model|recording|FILE.safetensors",
        help="real tokens: sampled from the model, the recording that ships with the package, "
        "or a recording of yours; auto takes the model if it is installed",
    )
    check.add_argument(
        "--tokens", type=_positive, metavar="N", help="real tokens to sample from the model"
    )
    for option, verb in (("--select", "judge only"), ("--deselect", "leave out")):
        check.add_argument(
            option,
            nargs="+",
            action="extend",
            metavar="GLOB",
            help=f"{verb} entries backend/mask/view[/tail] that match",
        )
    check.add_argument("--mask", metavar="NAME", help="only this mask")
    check.add_argument("--view", choices=("full", "topk"), help="only this view")
    check.add_argument("--tail", metavar="NAME", help="only this tail estimator")
    check.add_argument("--delta", type=float, metavar="X", help="threshold of D; default: varied")
    check.set_defaults(run=_check)


def _add_record(commands: Any) -> None:
    record = commands.add_parser(
        "record",
        help="record real batches from the model to a .safetensors file",
        description="Sample real tokens from the model, one batch for each mismatch between "
        "rollout and training, and write them to a file.",
        allow_abbrev=False,
    )
    record.add_argument("file", metavar="FILE", help="appears whole or not at all")
    record.add_argument("--tokens", type=_positive, default=500, metavar="N", help="default: 500")
    record.add_argument(
        "--mismatch",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="default: all that can run here",
    )
    record.add_argument("--top-k", type=_positive, default=20, metavar="K", help="default: 20")
    record.add_argument("--seed", type=_natural, default=0, metavar="N", help="default: 0")
    record.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="default: bf16")
    record.add_argument("--overwrite", action="store_true", help="replace an existing file")
    record.set_defaults(run=_record)


def _natural(text: str) -> int:
    return _integer(text, 0)


def _positive(text: str) -> int:
    return _integer(text, 1)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
    return value


def _check(args: argparse.Namespace) -> int:
    if args.target is not None:
        raise UsageError(
            f"TARGET {args.target!r}: this release judges the built-in backends only;"
            " leave TARGET out"
        )
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
    from pdverify.formats import FORMATS

    _ = FORMATS[args.precision]
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


def _record(args: argparse.Namespace) -> int:
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


def _list(args: argparse.Namespace) -> int:
    from pdverify.backends import BACKENDS
    from pdverify.cases.families import FAMILIES
    from pdverify.definitions.divergences import DIVERGENCES
    from pdverify.definitions.masks import MASKS, TAILS
    from pdverify.formats import FORMATS
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
        *(("family", name, family.description) for name, family in FAMILIES.items()),
        *(("mismatch", name, mismatch.summary) for name, mismatch in MISMATCHES.items()),
    ]
    width = max(len(name) for _, name, _ in lines)
    for kind, name, text in lines:
        print(f"{kind:<10}  {name:<{width}}  {text}".rstrip())
    return CONFORMS


def _backend(entry: Any) -> str:
    reason = entry.unavailable()
    return f"{entry.summary} (unavailable because {reason})" if reason else str(entry.summary)
