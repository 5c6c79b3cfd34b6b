"""Alternatives: the unchanged one is the definition, and every pair differs on some input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from pdverify.conformance.alternatives import (
    ALTERNATIVES,
    UNCHANGED,
    Expectation,
    expect,
)
from pdverify.conformance.checks import CHECKS
from pdverify.conformance.options import Options
from pdverify.conformance.plan import Plan
from pdverify.conformance.questions import ARGUMENTS, RETURNS, Question
from pdverify.definitions import masks
from pdverify.definitions.cells import build
from pdverify.definitions.losses import policy_loss

MASKS = (
    Options(mask="none"),
    Options(mask="ppo-clip"),
    Options(mask="dppo-binary-tv"),
    Options(mask="dppo-binary-kl"),
    Options(mask="dppo-topk-tv"),
    Options(mask="dppo-topk-kl"),
    Options(mask="predictive-kl", tail="aggregated"),
    Options(mask="predictive-kl", tail="uniform"),
    Options(mask="predictive-kl", tail="exact"),
    Options(mask="predictive-kl", view="full"),
    Options(mask="predictive-reverse-kl", view="full"),
)

SAME_HERE = {
    # equal to the cap that is declared or the default
    frozenset({"unchanged", "ratio-cap-20"}),
}
"""Pairs that mean the same under the default options."""


def plan(options: Options) -> Plan:
    return Plan(options, tuple(ARGUMENTS), RETURNS)


def questions(options: Options) -> Iterator[Question]:
    for _, check in CHECKS.items():
        # large vocabularies add no kind of difference, only time
        if check.id == "size.large-vocabulary" or check.applies(plan(options)) is not None:
            continue
        yield from plan(options).questions(check)


@cache
def expected(options: Options, number: int, name: str) -> Expectation:
    alternative = UNCHANGED if name == "unchanged" else ALTERNATIVES[name]
    return expect(asked(options)[number], alternative)


@cache
def asked(options: Options) -> list[Question]:
    return list(questions(options))


def applicable(options: Options) -> list[str]:
    """Conventions that mean something for this mask, and the definition itself."""
    question = next(questions(options))
    names = [
        id
        for id, one in ALTERNATIVES.items()
        if one.documented and one.applies(question) and id != "drops-at-equality"
    ]
    if options.mask == "none":  # nothing is ever dropped: only the losses differ
        names = [id for id in names if ALTERNATIVES[id].loss is not None]
    return ["unchanged", *names]


def differ(a: Expectation, b: Expectation, question: Question) -> bool:
    """Whether a determined decision, a value or the loss's gradient tells them apart."""
    determined = question.material.truth.decide(question.rule).determined
    if ((a.keep != b.keep) & a.sure & b.sure & determined).any():
        return True
    for x, y in ((a.divergence, b.divergence), (a.coefficient, b.coefficient)):
        if (x is None) != (y is None):
            return True
        if x is not None and y is not None and _apart(x, y):
            return True
    return _apart(a.loss, b.loss) or _apart(a.slope, b.slope)


def _apart(x: np.ndarray, y: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        gap = np.abs(x - y) > 0.008 * np.maximum(np.abs(x), np.abs(y))
    return bool((gap & np.isfinite(x) & np.isfinite(y)).any())


@pytest.mark.parametrize("options", MASKS, ids=lambda o: f"{o.mask}-{o.tail or o.view}")
def test_every_pair_of_conventions_differs_on_some_input(options: Options) -> None:
    names = applicable(options)
    missing = []
    for a, b in combinations(names, 2):
        if frozenset({a, b}) in SAME_HERE:
            continue
        if not any(
            differ(expected(options, i, a), expected(options, i, b), question)
            for i, question in enumerate(asked(options))
        ):
            missing.append((a, b))
    assert missing == []


@pytest.mark.parametrize("options", MASKS, ids=lambda o: f"{o.mask}-{o.tail or o.view}")
def test_the_unchanged_alternative_is_the_definition(options: Options) -> None:
    for i, question in enumerate(asked(options)):
        got = expected(options, i, "unchanged")
        rows, rule = question.material.rows, question.rule
        keep = masks.keep(rows, rule)
        assert (got.keep == keep)[got.sure].all()
        if rule.divergence is not None and rule.direction != "none":
            cells = build(rows, rule.partition)
            assert got.divergence is not None
            np.testing.assert_array_equal(got.divergence, masks.divergence(cells, rule.divergence))
        if rows.logits is None:
            continue
        full_keep = np.ones(question.batch.tokens.shape, dtype=bool)
        full_keep[tuple(rows.index.T)] = got.keep
        loss, _ = policy_loss(question.batch, full_keep, ratio_cap=question.ratio_cap)
        np.testing.assert_allclose(got.loss, loss[tuple(rows.index.T)], rtol=2.0**-40)
