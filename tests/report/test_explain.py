"""`explain`: a page for every check and every convention."""

from __future__ import annotations

import pytest

from pdverify.conformance.alternatives import ALTERNATIVES
from pdverify.conformance.checks import CHECKS
from pdverify.registry import UnknownName
from pdverify.report.explain import explain
from pdverify.report.writer import WIDTH


@pytest.mark.parametrize("id", CHECKS)
def test_every_check_has_a_page(id: str) -> None:
    text, check = explain(id), CHECKS[id]
    assert text.startswith(f"{id}: {check.summary}\n")
    flat = " ".join(text.split())
    for part in (check.meaning, check.bug, check.formula, *check.examples):
        assert " ".join(part.split()) in flat
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize("id", ALTERNATIVES)
def test_every_alternative_has_a_page(id: str) -> None:
    text = explain(id)
    assert text.startswith(f"{id}: {ALTERNATIVES[id].summary}\n")
    assert (f"--accept {id}" in text) is ALTERNATIVES[id].documented


def test_an_unknown_name_lists_the_close_ones() -> None:
    with pytest.raises(UnknownName, match=r"'mask\.bondary'; did you mean mask\.boundary"):
        explain("mask.bondary")
    with pytest.raises(UnknownName, match="did you mean ratio-gradient"):
        explain("ratio-gradeint")
    with pytest.raises(UnknownName, match="`pdverify list` shows them"):
        explain("~~~~")
