"""What a check is, and the registry they are entered in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pdverify.conformance.plan import Plan
from pdverify.conformance.questions import Question
from pdverify.registry import Registry

Questions: TypeAlias = Callable[[Plan], Iterator[Question]]
Applies: TypeAlias = Callable[[Plan], str | None]


@dataclass(frozen=True)
class Check:
    """One property of a target.

    Attributes:
        id: stable dotted id.
        summary: one line.
        meaning: one paragraph.
        formula: what must hold.
        bug: the class of bug it finds.
        examples: where such bugs have been seen in public.
        questions: what it asks, given a plan.
        applies: why it does not apply to a target, or None.
        gated: whether a quantity that is wrong on ordinary input already (``mask.decisions``,
            ``value.*``) is left out: the check is about a special input, and would repeat it.
    """

    id: str
    summary: str
    meaning: str
    formula: str
    bug: str
    examples: tuple[str, ...]
    questions: Questions
    applies: Applies
    gated: bool


CHECKS: Registry[Check] = Registry("check")

GROUPS = (
    "output",
    "mask",
    "value",
    "tail",
    "support",
    "size",
    "vocabulary",
    "batch",
    "input",
    "loss",
)
"""Groups of ids in the order in which checks run and are shown: what explains most comes first."""


def in_order() -> list[str]:
    """Ids of the checks by group, and as registered within a group."""
    return sorted(CHECKS, key=lambda id: GROUPS.index(id.partition(".")[0]))


def always(plan: Plan) -> str | None:
    """Applies to every target."""
    return None


def check(
    id: str,
    summary: str,
    *,
    formula: str,
    bug: str,
    examples: tuple[str, ...] = (),
    applies: Applies = always,
    gated: bool = False,
) -> Callable[[Questions], Questions]:
    """Enter a generator of questions as a check; its docstring is the check's meaning."""

    def register(questions: Questions) -> Questions:
        meaning = " ".join((questions.__doc__ or "").split())
        if id.partition(".")[0] not in GROUPS:
            raise ValueError(f"check {id!r}: known groups: {', '.join(GROUPS)}")
        CHECKS.add(
            id, Check(id, summary, meaning, formula, bug, examples, questions, applies, gated)
        )
        return questions

    return register


# ---- reasons, shared by many checks


def decides(plan: Plan) -> str | None:
    """The target says or implies decisions."""
    if {"keep", "loss"} & set(plan.outputs):
        return None
    return "the target returns neither keep nor a loss"


def measures(plan: Plan) -> str | None:
    """The mask has a divergence, and the target decides."""
    if not plan.measured:
        return f"{plan.options.mask} has no divergence"
    return decides(plan)


def coarse(plan: Plan) -> str | None:
    """The mask is taken on the retained support."""
    if plan.partition != "topk":
        return f"the mask is taken on the {plan.partition} cells, without a retained support"
    return None


def reads_logits(plan: Plan) -> str | None:
    """The target takes logits."""
    return None if plan.takes("logits", "behavior_logits") else "the target takes no logits"


def infinite_allowed(plan: Plan) -> str | None:
    """Inputs may hold -inf."""
    return None if plan.options.neg_inf else "--no-neg-inf"


def every(*reasons: Applies) -> Applies:
    """The first reason that speaks against it."""

    def applies(plan: Plan) -> str | None:
        for reason in reasons:
            why = reason(plan)
            if why is not None:
                return why
        return None

    return applies
