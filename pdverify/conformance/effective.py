"""Rows designed to measure the effective precision of a target's direction criterion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch
from pdverify.budgets import Budgets
from pdverify.cases import designed_rows
from pdverify.conformance.answers import Answer
from pdverify.conformance.plan import Plan
from pdverify.conformance.questions import Question
from pdverify.conformance.truth import Array
from pdverify.definitions.cells import build
from pdverify.definitions.masks import coefficient
from pdverify.formats import FORMATS
from pdverify.rules import Partition, Tail

SEQUENCES, LENGTH = 12, 15


@dataclass(frozen=True)
class Designed:
    """Questions whose answers show the sign of C, and `|C|` over its budget per unit roundoff."""

    questions: tuple[Question, ...]
    sign: Array
    margin: Array


@lru_cache(maxsize=32)
def designed_batch(divergence: str, partition: Partition, tail: Tail | None, seed: int) -> Batch:
    """Rows on which `|C| / beta` covers many octaves, beta the budget of the complement form."""

    def value(batch: Batch) -> Array:
        return coefficient(build(batch.rows(), partition), divergence, tail)

    def beta(batch: Batch) -> Array:
        return _beta(batch, divergence, partition, tail)

    rng = np.random.default_rng(seed)
    return designed_rows(
        rng, value, beta, sequences=SEQUENCES, length=LENGTH, vocab_size=257, top_k=20
    )


def _beta(batch: Batch, divergence: str, partition: Partition, tail: Tail | None) -> Array:
    unit = FORMATS["fp32"].unit_roundoff
    budgets = Budgets(batch.rows(), partition, "append", unit, "complement")
    return budgets.coefficient(divergence, tail) / unit


def designed_question(plan: Plan) -> Designed:
    """What to ask: C itself, or decisions at delta = 0 for both signs of A."""
    rule = plan.rule
    assert rule.divergence is not None
    divergence, partition, tail = rule.divergence, rule.partition, rule.tail
    material = plan.cached(
        ("designed", partition, tail),
        lambda: plan.wrap(designed_batch(divergence, partition, tail, plan.options.seed)),
    )
    batch = material.batch
    right = material.truth.coefficient(rule.divergence, rule.partition, rule.tail)
    sign = np.where(right.low > 0, 1.0, np.where(right.high < 0, -1.0, 0.0))
    beta = _beta(batch, rule.divergence, rule.partition, rule.tail)
    with np.errstate(divide="ignore", invalid="ignore"):
        margin = np.where((sign != 0) & (beta > 0), np.abs(right.mid) / beta, 0.0)
    margin = np.where(np.isfinite(margin), margin, 0.0)
    if "coefficient" in plan.outputs:
        questions: tuple[Question, ...] = (
            plan.question("designed", material, rule, judges=("coefficient",)),
        )
    else:
        zero = plan.options.rule(delta=0.0)
        questions = tuple(
            plan.question(
                f"designed, A = {a:g}",
                plan.wrap(replace(batch, advantages=np.full(batch.tokens.shape, a, np.float32))),
                zero,
                judges=("keep",),
            )
            for a in (1.0, -1.0)
        )
    return Designed(questions, sign, margin)


def signs(
    asked: Designed,
    answers: list[Answer],
    kept: Callable[[Question, Answer], tuple[Any, NDArray[np.bool_]]],
) -> tuple[Array, NDArray[np.bool_]]:
    """Margins of the designed tokens, and where the target's sign of C is wrong.

    From decisions: dropped with A > 0 says C > 0, dropped with A < 0 says C < 0; a token that is
    kept, or dropped, both times says nothing right.
    """
    if len(answers) == 1:
        index = tuple(asked.questions[0].material.rows.index.T)
        said = np.sign(answers[0].values["coefficient"][index])
    else:
        up, down = (
            kept(question, answer)[0]
            for question, answer in zip(asked.questions, answers, strict=True)
        )
        said = (~up).astype(np.float64) - (~down).astype(np.float64)
    return asked.margin, said != asked.sign
