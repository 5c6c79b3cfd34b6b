"""Checks on returned values of D and C."""

from __future__ import annotations

from collections.abc import Iterator

from pdverify.conformance.checks.decisions import ORDINARY
from pdverify.conformance.checks.entry import Applies, check, every
from pdverify.conformance.plan import Plan
from pdverify.conformance.questions import Question

CLOSE = ("near-equal", "identical", "tiny-scale", "graded")


def _returns(name: str) -> Applies:
    def applies(plan: Plan) -> str | None:
        if name == "coefficient" and not plan.predictive:
            return f"{plan.options.mask} has no coefficient"
        if not plan.measured:
            return f"{plan.options.mask} has no divergence"
        return None if name in plan.outputs else f"the target does not return {name}"

    return applies


@check(
    "value.divergence",
    "D on ordinary tokens",
    formula="|D - D_exact| <= budget, D in nats or as a probability",
    bug="a missing factor, base-2 logarithms, swapped policies, another divergence",
    examples=("|rho - 1| called total variation is twice it",),
    applies=_returns("divergence"),
)
def divergence(plan: Plan) -> Iterator[Question]:
    """The returned divergence lies within the rounding budget of the declared precision around
    the oracle's enclosure, on every ordinary token. The budget is that of the plain formula,
    1 - sum included, with sums in any order."""
    for family in ORDINARY:
        yield plan.question(family, plan.material(family), plan.rule, judges=("divergence",))


@check(
    "value.coefficient",
    "C on ordinary tokens",
    formula="|C - C_exact| <= budget; C without A, r and eta",
    bug="a missing term, or C multiplied by A r",
    applies=_returns("coefficient"),
)
def coefficient(plan: Plan) -> Iterator[Question]:
    """The returned coefficient lies within its budget around the oracle's enclosure; with the
    bracket tail, within that of either end."""
    for family in ORDINARY:
        yield plan.question(family, plan.material(family), plan.rule, judges=("coefficient",))


@check(
    "value.near-equal",
    "D and C where the policies almost agree",
    formula="as value.divergence and value.coefficient; D = 0 and C = 0 for equal policies",
    bug="NaN or large errors where numbers nearly cancel: 1 - 1, log of a rounded 0",
    examples=("1 - 1e-7 rounds to 1 in bf16: log1p(-1) = -inf, and the binary KL is NaN",),
    applies=every(
        lambda plan: (
            None
            if {"divergence", "coefficient"} & set(plan.outputs) and plan.measured
            else "the target returns neither divergence nor coefficient"
        )
    ),
    gated=True,
)
def near_equal(plan: Plan) -> Iterator[Question]:
    """Policies that differ in the last bits, by 1e-6, or not at all. Budgets are small here, and
    so are the values; equal policies have D = 0 and C = 0."""
    for family in CLOSE:
        material = plan.material(family)
        yield plan.question(family, material, plan.rule, judges=("divergence", "coefficient"))
