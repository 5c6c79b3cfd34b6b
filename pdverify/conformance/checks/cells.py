"""Checks on the retained support and its tail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from pdverify.batch import Batch
from pdverify.conformance.checks.entry import check, coarse, every, infinite_allowed, measures
from pdverify.conformance.checks.losses import with_rest
from pdverify.conformance.plan import Plan, assembled
from pdverify.conformance.questions import Question
from pdverify.conformance.truth import Array
from pdverify.definitions.cells import Cells
from pdverify.definitions.masks import coefficient

MASK = ("keep", "divergence", "coefficient")
"""What a wrong tail shows in, whatever the loss is."""


def _predictive(plan: Plan) -> str | None:
    return None if plan.predictive else "the mask's direction does not depend on the tail"


@check(
    "tail.motion",
    "the tail moves as its estimator says",
    formula="C = ... + w (mu_T - pi_T); w = pi_T, pi_T / (V - |S|) or sum_tail pi^2 / pi_T",
    bug="no tail term, or another estimator than declared",
    examples=("on flat rows the aggregated tail has the wrong sign for 4 tokens in 10",),
    applies=every(coarse, _predictive),
)
def motion(plan: Plan) -> Iterator[Question]:
    """Heavy tails on which the aggregated, uniform and exact estimators, and no tail at all, give
    opposite signs of C; and policies that hold much of their mass outside the other's list."""
    for family in ("tail-conflict", "training-tail", "behavior-tail"):
        yield from plan.ordinary(family, judges=MASK)
    divergence = plan.rule.divergence
    assert divergence is not None
    for family in ("peaked", "behavior-tail"):
        batch = plan.material(family, vocab_size=33, top_k=plan.options.top_k or 5).batch
        for one, other in combinations(("aggregated", "uniform", "exact"), 2):
            some = plan.between(batch, _estimated(divergence, one), _estimated(divergence, other))
            if some is not None:
                yield plan.question(
                    f"{family}, {one} against {other}",
                    plan.wrap(some),
                    plan.outside(some),
                    judges=MASK,
                )


def _estimated(divergence: str, tail: Any) -> Callable[[Cells], Array]:
    return lambda cells: coefficient(cells, divergence, tail)


@check(
    "tail.count",
    "the tail holds V - |S| tokens",
    formula="|S| = K if the sampled token is listed, K + 1 if not; uniform w = pi_T / (V - |S|)",
    bug="V - K or V - K - 1 for every token, or V",
    applies=every(
        coarse,
        _predictive,
        lambda plan: (
            None
            if plan.options.tail in ("uniform", "bracket")
            else f"the {plan.options.tail} tail does not count its tokens"
        ),
    ),
    gated=True,
)
def count(plan: Plan) -> Iterator[Question]:
    """Small tails of two to four tokens, so that counting one too many or too few shows, with the
    sampled token in the list and outside."""
    k = plan.options.top_k or 5
    for family in ("sampled-inside", "sampled-outside", "k-almost-all"):
        for vocabulary in (k + 3, k + 4):
            if family != "k-almost-all" or plan.top_k_is_free:
                yield from plan.ordinary(family, vocab_size=max(vocabulary, 5), top_k=k)
    yield from _by_count(plan, k)


def _by_count(plan: Plan, k: int) -> Iterator[Question]:
    """Tokens whose direction depends on the number of tokens in the tail."""
    for family, spare in (("sampled-inside", 4), ("sampled-outside", 4), ("sampled-last", 2)):
        batch = plan.material(
            family, sequences=4, length=12, vocab_size=max(k + spare, 5), top_k=k
        ).batch
        for name, count in COUNTS.items():
            some = plan.between(batch, _coefficient(plan, RIGHT), _coefficient(plan, count))
            if some is not None:
                yield plan.question(
                    f"{family}, C depends on {name}", plan.wrap(some), plan.outside(some)
                )


def _coefficient(plan: Plan, count: Count) -> Callable[[Cells], Array]:
    divergence = plan.rule.divergence
    assert divergence is not None
    return lambda cells: coefficient(
        replace(cells, tail_cells=count(cells.tail_cells)), divergence, "uniform"
    )


Count = Callable[[Any], Any]

RIGHT: Count = lambda n: n  # noqa: E731
COUNTS: dict[str, Count] = {
    "one tail token less": lambda n: np.maximum(n - 1, 1),
    "one tail token more": lambda n: n + 1,
    "at least two tail tokens": lambda n: np.maximum(n, 2),
    "no tail at all": lambda n: n * 1e9,
}


@check(
    "tail.mass",
    "tail masses have no floor",
    formula="mu_T = max(0, 1 - sum_S mu), pi_T = sum of what is not retained, however small",
    bug="a clamp at 1e-12, 1e-8 or 1e-6, or an epsilon inside a log, that replaces a small mass",
    examples=(
        "a floor of 1e-12 turns D = 0.117 into 0.220 where pi_T = 3e-8 rounds to 0",
        "log of the smallest float instead: 0.817",
    ),
    applies=lambda plan: (
        measures(plan)
        if plan.partition != "full"
        else "the mask is taken on the full cells, without a tail"
    ),
)
def mass(plan: Plan) -> Iterator[Question]:
    """The training policy has left the behavior policy's tail (pi_T from 1e-5 down to 1e-12),
    or the behavior policy has next to none. The mass must come from the tail's own logits:
    1 - sum rounds to 0. What the declared precision cannot resolve is not held against anyone."""
    if plan.partition == "binary":
        for exponent in (-3, -4, -5, -6, -9, -13):
            key = f"pi_k = 1 - 1e{exponent}"
            yield from plan.ordinary(
                "sampled-inside",
                key=key,
                change=partial(with_rest, rest=10.0**exponent),
                vocab_size=65,
                top_k=8,
                judges=MASK,
            )
            yield from plan.ordinary(
                "sampled-inside",
                key=key.replace("pi_k", "mu_k"),
                change=partial(_certain_behavior, rest=10.0**exponent),
                vocab_size=65,
                top_k=8,
                judges=MASK,
            )
        return
    yield from plan.ordinary("training-no-tail", judges=MASK)
    for exponent in (-3, -4, -5):
        key = f"training tail of 1e{exponent}"
        material = plan.material(
            "peaked", key=key, change=_with_tail(10.0**exponent), vocab_size=65, top_k=8
        )
        for rule in plan.rules(material):
            yield plan.question(key, material, rule, judges=MASK)


def _certain_behavior(batch: Batch, rest: float) -> Batch:
    """The behavior policy is the training policy with the sampled token at mass `1 - rest`."""
    sure = with_rest(batch, rest)
    assert sure.logits is not None
    assert batch.logits is not None
    valid = batch.response_mask[..., None]
    z, y = (np.where(valid, x, 0.0).astype(np.float64) for x in (batch.logits, sure.logits))
    return assembled(batch, z, y)


def _with_tail(mass: float) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        """The training logits outside the list lowered to a total mass of about `mass`."""
        assert batch.logits is not None
        assert batch.topk_ids is not None
        valid = batch.response_mask
        z = np.where(valid[..., None], batch.logits, 0.0).astype(np.float64)
        listed = np.zeros(z.shape, dtype=bool)
        np.put_along_axis(listed, batch.topk_ids, True, axis=-1)
        np.put_along_axis(listed, batch.tokens[..., None], True, axis=-1)
        weight = np.exp(z - z.max(-1, keepdims=True))
        inside = np.where(listed, weight, 0.0).sum(-1, keepdims=True)
        outside = np.where(listed, 0.0, weight).sum(-1, keepdims=True)
        lowered = np.where(listed, z, z + np.log(mass * inside / outside))
        lowered = np.where(valid[..., None], lowered, np.nan).astype(np.float32)
        return replace(batch, logits=lowered)

    return change


@check(
    "support.outside",
    "a sampled token outside the top-K list is a cell of its own",
    formula="S = TopK(mu, K) with k added; mu_T = 1 - sum over S, k included",
    bug="k left in the tail, or its local term kept while its mass stays in the tail",
    examples=("K-slot implementations give KL = 0 where TopK with k added gives 0.529",),
    applies=coarse,
    gated=True,
)
def outside(plan: Plan) -> Iterator[Question]:
    """Every sampled token is missing from the list: the behavior policy drew it from its tail."""
    yield from plan.ordinary("sampled-outside", vocab_size=65, top_k=plan.options.top_k or 6)


@check(
    "support.inside",
    "a sampled token in the list counts once",
    formula="|S| = K: the last support slot repeats a listed token and is masked",
    bug="the token counted twice, in the sums or in the tail",
    examples=("a duplicated sampled token turns KL 0.0231 into 0.1325",),
    applies=coarse,
    gated=True,
)
def inside(plan: Plan) -> Iterator[Question]:
    """Every sampled token is in the list already."""
    yield from plan.ordinary("sampled-inside", vocab_size=65, top_k=plan.options.top_k or 6)


@check(
    "support.last",
    "a sampled token at the last place of the list",
    formula="as support.inside, with k the K-th entry",
    bug="off by one at the end of the list",
    applies=coarse,
    gated=True,
)
def last(plan: Plan) -> Iterator[Question]:
    """The sampled token is the K-th of the list, or the first that is not in it."""
    yield from plan.ordinary("sampled-last", vocab_size=65, top_k=plan.options.top_k or 6)


@check(
    "support.order",
    "the order of the list does not matter",
    formula="any permutation of topk_ids with topk_logprobs gives the same answer",
    bug="code that expects the best token first, or the list sorted by id",
    examples=("engines sort by rank, by id, or put the sampled token first",),
    applies=coarse,
    gated=True,
)
def order(plan: Plan) -> Iterator[Question]:
    """The list in reverse, by id, and shuffled row by row."""

    def shuffled(batch: Batch, how: str) -> Batch:
        assert batch.topk_ids is not None
        assert batch.topk_logprobs is not None
        rng = np.random.default_rng(plan.options.seed)
        key = {
            "worst first": -np.broadcast_to(
                np.arange(batch.topk_ids.shape[-1]), batch.topk_ids.shape
            ),
            "by id": batch.topk_ids,
            "shuffled": rng.random(batch.topk_ids.shape),
        }[how]
        chosen = np.argsort(key, axis=-1, kind="stable")
        return replace(
            batch,
            topk_ids=np.take_along_axis(batch.topk_ids, chosen, axis=-1),
            topk_logprobs=np.take_along_axis(batch.topk_logprobs, chosen, axis=-1),
        )

    for how in ("worst first", "by id", "shuffled"):
        yield from plan.ordinary(
            "peaked",
            key=f"list {how}",
            change=lambda batch, how=how: shuffled(plan.wrap(batch).batch, how),
            vocab_size=65,
            top_k=plan.options.top_k or 6,
        )


@check(
    "support.unused-slot",
    "what stands in an unused support slot is ignored",
    formula="support_mask False: the slot is no cell",
    bug="arithmetic on the slot before it is masked: NaN * 0 = NaN",
    applies=every(
        coarse,
        lambda plan: (
            None
            if plan.takes("support_logprobs", "behavior_support_logprobs")
            else "the target takes no support_logprobs"
        ),
        lambda plan: (
            None if plan.options.support == "append" else "with --support replace no slot is unused"
        ),
    ),
    gated=True,
)
def unused_slot(plan: Plan) -> Iterator[Question]:
    """Log-probs in unused slots, and on padding, are NaN."""
    yield from plan.ordinary(
        "sampled-inside", vocab_size=65, top_k=plan.options.top_k or 6, poison=True
    )


@check(
    "support.neg-inf",
    "a listed token of probability zero joins the tail",
    formula="mu_j = 0 leaves S for the tail, unless j = k",
    bug="0 * log 0 = NaN, which compares as False and keeps every token",
    examples=(
        "nucleus-filtered lists hold -inf: KL is NaN in two public implementations,"
        " and the token is kept",
    ),
    applies=every(coarse, infinite_allowed),
    gated=True,
)
def negative_infinity(plan: Plan) -> Iterator[Question]:
    """Lists of a behavior policy that was truncated by top-p: the entries it cut are -inf; and
    lists that end in -inf although a tail is left."""
    size = {"vocab_size": 65, "top_k": plan.options.top_k or 8}
    for family in ("top-p-behavior", "top-p-both"):
        yield from plan.ordinary(family, **size)
    yield from plan.ordinary("tail-conflict", key="last entries -inf", change=_cut_last, **size)


def _cut_last(batch: Batch) -> Batch:
    """The last quarter of each list cut to -inf, the sampled token excepted; a tail is left."""
    assert batch.topk_ids is not None
    assert batch.topk_logprobs is not None
    place = np.arange(batch.topk_ids.shape[-1])
    cut = (place >= len(place) - len(place) // 4) & (batch.topk_ids != batch.tokens[..., None])
    stored = np.where(cut, -np.inf, batch.topk_logprobs).astype(np.float32)
    return replace(batch, topk_logprobs=stored)
