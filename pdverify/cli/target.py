"""`pdverify check TARGET`: someone's own function."""

from __future__ import annotations

from pathlib import Path

from pdverify.cli.common import CONFORMS, FAILS, UsageError
from pdverify.cli.options import OUTPUTS, Given, target_options


def judge(given: Given) -> int:
    """Judge the target, write the reports that were asked for, and return the exit status.

    Raises:
        UsageError, InputError, UnknownName, TargetError, OSError: naming the argument.
    """
    from pdverify.conformance.target_run import check_target
    from pdverify.report.emit_test import check_replaceable, write_test
    from pdverify.report.github import announce
    from pdverify.report.json_report import write_json
    from pdverify.report.junit import write_junit
    from pdverify.report.progress import Reporter
    from pdverify.report.target_console import print_target_report

    options = target_options(given)
    files = _files(given)
    if "emit_test" in files:
        check_replaceable(files["emit_test"])
    with Reporter() as progress:
        report = check_target(given.values["target"], options, progress=progress)
    if not any(check.status in ("passed", "failed", "accepted") for check in report.checks):
        reasons = [check.message for check in report.checks] or ["no check is selected"]
        raise UsageError(f"nothing was checked: {reasons[0]}")
    try:
        if "json" in files:
            write_json(report, files["json"])
        if "junit" in files:
            write_junit(report, files["junit"])
        if "emit_test" in files and not write_test(report, files["emit_test"]):
            print(f"--emit-test: nothing to show; {files['emit_test']} is not written")
        announce(report)
    finally:
        print_target_report(report)
    return CONFORMS if report.conforms else FAILS


def _files(given: Given) -> dict[str, str]:
    """The files to write, by argument; whether they can be is asked before the long work."""
    from pdverify.report.json_report import check_writable

    files: dict[str, str] = {x: given.values[x] for x in OUTPUTS if x in given.values}
    seen: dict[Path, str] = {}
    for name, path in files.items():
        first = seen.setdefault(check_writable(path), name)
        if first != name:
            raise UsageError(
                f"{given.origins[first]} and {given.origins[name]} name the same file, {path}"
            )
    return files
