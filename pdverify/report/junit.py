"""A report on a target as JUnit XML, one test case per check."""

from __future__ import annotations

import os
import re
from xml.etree import ElementTree

from pdverify.cases.recordings import replace_file
from pdverify.conformance.records import CheckRecord, TargetReport
from pdverify.report.json_report import check_writable
from pdverify.report.target_console import failure_text, skip_reason

_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even escaped."""


def write_junit(report: TargetReport, path: str | os.PathLike[str]) -> None:
    """Write `report` to `path`, whole or not at all; an existing file is replaced.

    Failed checks are failures; those that do not apply, did not run or are accepted conventions
    are skipped with the reason.

    Raises:
        OSError: as `check_writable`, or when the disk is full.
    """
    replace_file(check_writable(path), to_junit(report))


def to_junit(report: TargetReport) -> bytes:
    """The XML document, UTF-8."""
    skipped = sum(check.status not in ("passed", "failed") for check in report.checks)
    suite = ElementTree.Element(
        "testsuite",
        name=_text(f"pdverify {report.target}"),
        tests=str(len(report.checks)),
        failures=str(len(report.failed)),
        errors="0",
        skipped=str(skipped),
        time=f"{report.seconds:.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    about = {"mask": report.mask, "precision": report.precision, "seed": report.seed}
    for name, value in (about | report.versions).items():
        ElementTree.SubElement(properties, "property", name=_text(name), value=_text(value))
    for check in report.checks:
        _case(suite, report.target, check)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _case(suite: ElementTree.Element, target: str, check: CheckRecord) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_text(target),
        name=_text(check.id),
        time=f"{check.seconds:.3f}",
    )
    if check.status == "failed":
        failure = ElementTree.SubElement(
            case, "failure", type=check.kind or "wrong", message=_text(check.message)
        )
        failure.text = _text(failure_text(check))
        return
    reason = skip_reason(check)
    if reason is not None:
        ElementTree.SubElement(case, "skipped", message=_text(reason))


def _text(x: object) -> str:
    return _NO_XML.sub(lambda found: ascii(found[0])[1:-1], str(x))
