"""What a check means, and what a convention is: the text of `pdverify explain ID`."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

from pdverify.conformance.alternatives import ALTERNATIVES, Alternative
from pdverify.conformance.checks import CHECKS, Check, in_order
from pdverify.registry import UnknownName
from pdverify.report.writer import WIDTH


def explain(id: str) -> str:
    """The page of the check or the alternative called `id`, lines at most 100 columns wide.

    Raises:
        UnknownName: listing the close names.
    """
    pages = []
    if id in CHECKS:
        pages.append(_check(CHECKS[id]))
    if id in ALTERNATIVES:
        pages.append(_alternative(ALTERNATIVES[id]))
    if not pages:
        known = [*CHECKS, *ALTERNATIVES]
        close = difflib.get_close_matches(id, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}" if close else "`pdverify list` shows them"
        raise UnknownName(f"unknown check or convention {id!r}; {hint}")
    return "\n\n".join(pages)


def explain_all() -> str:
    """Every check and every alternative as one markdown page: `docs/checks.md`."""
    lines = [
        "# Checks and conventions",
        "",
        "Written by `pdverify explain --all`; a test compares it.",
        "",
        "| check | looks at |",
        "|---|---|",
        *(
            f"| [`{id}`](#{id.replace('.', '')}) | {_in_table(CHECKS[id].summary)} |"
            for id in in_order()
        ),
    ]
    for id in in_order():
        check = CHECKS[id]
        lines += [
            "",
            f"## {id}",
            "",
            _fill(check.meaning),
            "",
            f"- must hold: `{check.formula}`",
            f"- finds: {check.bug}",
            *(f"- seen in public: {example}" for example in check.examples),
        ]
    for title, documented, text in (
        ("Conventions", True, "`--accept ID` accepts one; the report names it where it fits."),
        ("Likely causes", False, "Bugs that the report recognizes by their answers."),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            text,
            "",
            "| id | what is different | seen in |",
            "|---|---|---|",
        ]
        lines += [
            f"| `{id}` | {_in_table(one.summary)} | {_in_table(one.source)} |"
            for id, one in ALTERNATIVES.items()
            if one.documented == documented
        ]
    return "\n".join(lines) + "\n"


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


def _check(check: Check) -> str:
    parts = [
        f"{check.id}: {check.summary}",
        _fill(check.meaning),
        _section("formula", textwrap.dedent(check.formula).strip().splitlines()),
        _section("finds", _fill(check.bug, WIDTH - 2).splitlines()),
    ]
    if check.examples:
        parts.append(_section("seen in public", map(_item, check.examples)))
    return "\n\n".join(parts)


def _alternative(alternative: Alternative) -> str:
    use = (
        f"A documented convention: `pdverify check TARGET --accept {alternative.id}` accepts it."
        if alternative.documented
        else "No convention: where it explains a failure, it is the likely cause of a bug."
    )
    parts = [f"{alternative.id}: {alternative.summary}", _fill(use)]
    if alternative.source:
        parts.append(_fill(alternative.source))
    return "\n\n".join(parts)


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines)])


def _item(text: str) -> str:
    return textwrap.fill(
        text,
        width=WIDTH - 2,
        initial_indent="- ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fill(text: str, width: int = WIDTH) -> str:
    flat = " ".join(text.split())
    return textwrap.fill(flat, width=width, break_long_words=False, break_on_hyphens=False)
