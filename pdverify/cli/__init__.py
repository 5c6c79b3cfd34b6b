"""The `pdverify` program, one module per command.

Exit status: 0 conforms, 1 does not, 2 could not judge (one line on stderr says why), 130
interrupted.  `PDVERIFY_TRACEBACK=1` shows where an error was raised.  Nothing heavy is imported
before a command runs, so `--help` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import pdverify
from pdverify.cli import bench, check, compare, explain, names, precision, record, vectors
from pdverify.cli.common import CANNOT_JUDGE, INTERRUPTED, Parser, UsageError


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
    from pdverify.config import ConfigError
    from pdverify.conformance.targets import TargetError
    from pdverify.registry import UnknownName
    from pdverify.tools.lm import ModelUnavailable

    expected = (
        UsageError,
        ConfigError,
        InputError,
        TargetError,
        UnknownName,
        ModelUnavailable,
        OSError,
    )
    if isinstance(error, expected):
        return str(error)
    hint = "PDVERIFY_TRACEBACK=1 shows where"
    return f"internal error: {type(error).__name__}: {error} ({hint})"


def _parser() -> Parser:
    parser = Parser(
        prog="pdverify",
        description="Tells whether trust-region masks for policy optimization are right.",
        epilog="exit status: 0 conforms, 1 does not, 2 could not judge",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pdverify {pdverify.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (check, explain, compare, precision, bench, record, vectors, names):
        command.add_to(commands)
    return parser
