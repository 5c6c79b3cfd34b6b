"""Command line: `python -m derivations check | write`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from derivations import (  # noqa: F401  (importing a module registers its statements)
    coarse,
    coefficients,
    coupled,
    limits,
    motion,
    noise,
    rounding,
    second_order,
    stable,
)
from derivations.emit import FORMULAS, ROOT, formulas_text
from derivations.pages import formulas_page
from derivations.statements import STATEMENTS, Refuted, Statement

PAGE = ROOT / "docs" / "formulas.md"


def generated() -> dict[Path, str]:
    """Every generated file with the text it must have."""
    return {FORMULAS: formulas_text(), PAGE: formulas_page()}


def stale() -> list[Path]:
    """Generated files that differ from what `write` would write."""
    return [
        path
        for path, text in generated().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def write() -> int:
    """Write the generated files, each whole or not at all."""
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(path.suffix + ".part")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def prove(chosen: Statement) -> bool:
    """Run one proof and print one line."""
    start = time.perf_counter()
    try:
        chosen.proof()
    except Exception as error:  # a proof that cannot be carried through proves nothing
        kind = "" if isinstance(error, Refuted) else f"{type(error).__name__}: "
        print(f"FAILED {chosen.name}: {kind}{error}", flush=True)
        return False
    seconds = time.perf_counter() - start
    print(
        f"proved {chosen.name}  {seconds:.2f} s\n    {chosen.title}\n    {chosen.how}", flush=True
    )
    return True


def check(only: str | None) -> int:
    """Prove the statements and compare the generated files; 0, 1, or 2 if nothing was selected."""
    chosen = [s for s in STATEMENTS.values() if only in (None, s.name, s.name.partition(".")[0])]
    if not chosen:
        print(f"no statement {only!r}; known: {', '.join(STATEMENTS)}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    failed = [s.name for s in chosen if not prove(s)]
    old = [str(path.relative_to(ROOT)) for path in stale()] if only is None else []
    for name in old:
        print(f"STALE {name}: run `python -m derivations write`")
    seconds = time.perf_counter() - start
    print(f"{len(chosen) - len(failed)} of {len(chosen)} statements proved in {seconds:.0f} s")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed or old else 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(prog="python -m derivations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    checker = commands.add_parser("check", help="prove every statement, compare generated files")
    checker.add_argument("--only", metavar="ID", help="one statement, or a group (motion, coarse)")
    commands.add_parser("write", help="write the generated files")
    options = parser.parse_args(arguments)
    return write() if options.command == "write" else check(options.only)


if __name__ == "__main__":
    sys.exit(main())
