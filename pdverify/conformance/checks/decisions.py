"""Checks on keep/drop decisions: which criterion, which sign, which threshold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pdverify.batch import Batch
from pdverify.conformance.checks.entry import check, decides, every, measures
from pdverify.conformance.checks.losses import both_rare, with_ratio
from pdverify.conformance.effective import designed_batch
from pdverify.conformance.plan import Plan, assembled
from pdverify.conformance.questions import Question

ORDINARY = ("peaked", "flat", "zipf", "far-apart", "temperature", "near-one-hot")


@check(
    "mask.decisions",
    "keep and drop on ordinary tokens",
    formula="dropped iff D > delta and A C > 0 (A (pi_k - mu_k) > 0 for a ratio direction)",
    bug="wrong formula, sign, divergence or threshold",
    applies=decides,
)
def ordinary(plan: Plan) -> Iterator[Question]:
    """Every decision on tokens like those of a language model, of uniform and of power-law rows,
    near-certain ones and policies far apart, at two thresholds. A decision counts where the
    oracle is certain of it for every value that the stored log-probs may stand for; a difference
    that rounding at the declared precision can cause is counted as rounding."""
    for family in ORDINARY:
        yield from plan.ordinary(family, judges=("keep",))


@check(
    "mask.direction",
    "the direction is that of the divergence",
    formula="A C > 0 with C of the same divergence; a ratio direction takes A (pi_k - mu_k) > 0",
    bug="the sampled token's ratio stands in for the divergence's change, or the reverse",
    examples=("DPPO keeps the ratio direction (arXiv 2602.04879); 2607.10848 replaces it",),
    applies=measures,
)
def direction(plan: Plan) -> Iterator[Question]:
    """Tokens far outside the trust region on which the ratio and the divergence point opposite
    ways: pi_k is above mu_k, yet another token has run away so that the step brings the policies
    together (and the mirror image). A mask that uses the other direction is wrong on each."""
    for family in ("direction-conflict", "swapped"):
        yield from plan.ordinary(family, judges=("keep",))
    yield from plan.ordinary(
        "sampled-inside", key="the two strongest exchanged", change=_exchanged, judges=("keep",)
    )


def _exchanged(batch: Batch) -> Batch:
    """mu is pi with the two strongest tokens exchanged; one of them is sampled."""
    assert batch.logits is not None
    z = np.where(batch.response_mask[..., None], batch.logits, 0.0).astype(np.float64)
    first, second = (np.argsort(-z, axis=-1, kind="stable")[..., i, None] for i in (0, 1))
    top, next_top = (np.take_along_axis(z, at, axis=-1) for at in (first, second))
    # at least a nat apart, so that the exchange moves mass
    np.put_along_axis(z, first, np.maximum(top, next_top + 1), axis=-1)
    y = z.copy()
    np.put_along_axis(y, first, next_top, axis=-1)
    np.put_along_axis(y, second, np.maximum(top, next_top + 1), axis=-1)
    even = np.arange(batch.tokens.size).reshape(batch.tokens.shape) % 2 == 0
    tokens = np.where(even, first[..., 0], second[..., 0])
    return assembled(batch, z, y, tokens)


@check(
    "mask.near-zero",
    "the sign of C close to 0",
    formula="A C > 0 with |C| from 2^-4 down to 2^-40 of its terms' rounding scale, D large",
    bug="C in a coarser format than D, a deadband around C = 0",
    applies=every(
        measures,
        lambda plan: (
            None
            if plan.rule.direction == "predictive" and plan.options.tail != "bracket"
            else "the direction is not the sign of one coefficient"
        ),
    ),
    gated=True,
)
def near_zero(plan: Plan) -> Iterator[Question]:
    """Tokens far outside the trust region whose C was brought close to zero by cancellation, over
    36 octaves, with advantages of either sign. What the declared precision cannot tell is
    rounding; effective bits are read off the same rows."""
    rule = plan.rule
    assert rule.divergence is not None
    batch = designed_batch(rule.divergence, rule.partition, rule.tail, plan.options.seed)
    for name, turned in (("designed", batch.advantages), ("designed, A -> -A", -batch.advantages)):
        material = plan.wrap(replace(batch, advantages=turned.astype(np.float32)))
        yield plan.question(name, material, rule, judges=("keep",))


@check(
    "mask.boundary",
    "thresholds two budgets either side of D",
    formula="D > delta decides at delta = D -/+ 2.5 budgets (r > 1 + clip_high likewise)",
    bug="a threshold that is scaled, shifted or compared in the wrong unit by a little",
    examples=("bf16 probabilities shift a TV of 0.1515 to the other side of 0.15",),
    applies=decides,
)
def boundary(plan: Plan) -> Iterator[Question]:
    """One token at a time is put just inside and just outside the trust region, as close as the
    declared precision can tell, with the advantage that pushes outward. Where the target has no
    threshold parameter the policies are moved to the declared one instead."""
    yield from plan.near()
    if plan.rule.direction == "second-order":
        yield from plan.near("training-tail")


@check(
    "mask.equality",
    "a token exactly at the threshold is kept",
    formula="D = delta keeps (strict >); r = 1 + clip_high keeps",
    bug=">= in place of >",
    examples=("an open interval on the ratio in DIS drops at equality",),
    applies=lambda plan: _equality(plan),
)
def equality(plan: Plan) -> Iterator[Question]:
    """Policies whose D every honest implementation computes exactly (total variation of uniform
    against one-hot rows, forward KL likewise in the full view; equal stored log-probs for a clip
    range of width 0), with the threshold at that number. Rounding may still move single cases, so
    the check fails only if every one of them is dropped."""
    if plan.rule.direction == "clip":
        material = plan.material("peaked", sequences=2, length=6)
        batch = material.batch
        assert batch.logits is not None
        same = replace(batch, behavior_logits=batch.logits)
        z = np.where(batch.response_mask[..., None], batch.logits, 0.0).astype(np.float64)
        same = assembled(same, z, z)
        for a in (1.0, -1.0):
            one_sign = replace(same, advantages=np.full(same.tokens.shape, a, dtype=np.float32))
            rule = plan.options.rule(clip_low=0.0, clip_high=0.0)
            yield plan.question(
                f"r = 1, A = {a:g}", plan.wrap(one_sign), rule, judges=("keep",), unanimous=True
            )
        return
    for count in (2, 4, 8, 16):
        batch = _one_hot_against_uniform(plan, count)
        d = 1 - 1 / count if plan.rule.divergence == "tv" else float(np.log(count))
        yield plan.question(
            f"uniform on {count} tokens against one of them",
            plan.wrap(batch),
            plan.options.rule(delta=d),
            judges=("keep",),
            unanimous=True,
        )


def _equality(plan: Plan) -> str | None:
    rule = plan.rule
    if rule.direction == "clip":
        if plan.sampled_only and plan.free("clip_low", "clip_high"):
            return decides(plan)
        return "r = 1 + clip_high exactly needs stored log-probs and a free clip range"
    exact = rule.divergence == "tv" or (rule.divergence == "kl" and rule.partition == "full")
    if not exact or rule.direction == "second-order":
        return "no D that every honest implementation computes exactly"
    if not plan.delta_is_free:
        return "the threshold is fixed"
    if plan.sampled_only:
        return "stored log-probs are rounded"
    return decides(plan)


def _one_hot_against_uniform(plan: Plan, count: int) -> Batch:
    """mu on one token, pi uniform on `count` that include it; the rest 200 nats below."""
    batch = plan.material("sampled-inside", vocab_size=33, top_k=4, sequences=2, length=3).batch
    place = np.arange(33)
    shape = (*batch.tokens.shape, 33)
    z = np.broadcast_to(np.where(place < count, 0.0, -200.0), shape)
    y = np.broadcast_to(np.where(place == 0, 0.0, -200.0), shape)
    tokens = np.zeros(batch.tokens.shape, dtype=np.int64)
    made = assembled(batch, z.copy(), y.copy(), tokens)
    # pi_k < mu_k: only A < 0 pushes outward
    return replace(made, advantages=np.full(tokens.shape, -1.0, dtype=np.float32))


@check(
    "mask.zero-advantage",
    "A = 0 is never dropped",
    formula="A = 0 keeps, whatever D and C are",
    bug="a branch A <= 0 that sends A = 0 down the negative rule",
    examples=("verl, Stable-RL, prime-rl and TRL's experimental DPPO use torch.where(A > 0, ...)",),
    applies=lambda plan: (
        decides(plan)
        if "keep" in plan.outputs
        else "a loss does not show what happens to A = 0: it is 0 either way"
    ),
)
def zero_advantage(plan: Plan) -> Iterator[Question]:
    """Three tokens in four have an advantage of exactly 0, far outside the trust region. Such a
    token has no update, so dropping it changes no gradient; but it is counted as clipped, and the
    mask says something false."""
    for family in ("far-apart", "direction-conflict"):
        yield from plan.ordinary(family, advantages="zero", judges=("keep",))


@check(
    "mask.advantage-sign",
    "A -> -A turns the direction around and nothing else",
    formula="drop(A) iff D > delta and C > 0; drop(-A) iff D > delta and C < 0, for A > 0",
    bug="a rule that looks at the batch's advantages, or treats one sign by another formula",
    applies=decides,
)
def advantage_sign(plan: Plan) -> Iterator[Question]:
    """One batch, first with every advantage positive, then with every one negative; and all of them
    equal, as with one reward for a group."""
    for family in ("far-apart", "direction-conflict"):
        batch = plan.material(family).batch
        for sign in (1.0, -1.0):
            for size in (np.abs(batch.advantages), np.ones(batch.tokens.shape)):
                a = (sign * size).astype(np.float32)
                material = plan.wrap(replace(batch, advantages=a))
                name = f"{family}, all A {'>' if sign > 0 else '<'} 0"
                yield plan.question(name, material, plan.rule, judges=("keep",))


@check(
    "mask.advantage-scale",
    "only the sign of A matters",
    formula="drop(s A) = drop(A) for every s > 0",
    bug="a deadband around A = 0, or A C underflowing in a narrow format",
    examples=("a product A C below the smallest float compares as 0 and keeps the token",),
    applies=lambda plan: (
        "the step size makes A matter" if plan.rule.direction == "second-order" else decides(plan)
    ),
)
def advantage_scale(plan: Plan) -> Iterator[Question]:
    """The advantages of an ordinary batch scaled by 2^-60 and by 2^40."""
    batch = plan.material("far-apart", advantages="push").batch
    for power in (-60, 40):
        a = (batch.advantages * 2.0**power).astype(np.float32)
        material = plan.wrap(replace(batch, advantages=a))
        yield plan.question(f"far-apart, A times 2^{power}", material, plan.rule, judges=("keep",))


@check(
    "mask.thresholds",
    "two thresholds, one for each sign of A",
    formula="delta_high (clip_high) for A > 0, delta_low (clip_low) for A < 0",
    bug="the two are swapped, or one of them is used for both",
    applies=lambda plan: _two_thresholds(plan),
)
def thresholds(plan: Plan) -> Iterator[Question]:
    """Uneven thresholds, each way round, on tokens whose distance lies between them; and one of
    them 0, which is not the same as not given."""
    if plan.rule.direction == "clip":
        material = plan.material("peaked", advantages="push")
        d = np.sort(np.abs(np.expm1(plan.distance(material.batch))))
        low, high = (float(f"{d[len(d) * i // 4]:.3g}") for i in (1, 3))
        for a, b in ((min(low, 0.9), high), (min(high, 0.9), low), (0.0, 1000.0), (1000.0, 0.0)):
            rule = plan.options.rule(clip_low=a, clip_high=b)
            yield plan.question("peaked", material, rule, judges=("keep",))
        return
    # the second family has likelier tokens under pi, so that A > 0 pushes outward too
    for family in ("far-apart", "sampled-outside"):
        material = plan.material(family, advantages="push")
        d = np.sort(plan.distance(material.batch))
        low, high = (float(f"{d[len(d) * i // 4]:.3g}") for i in (1, 3))
        for a, b in ((low, high), (high, low), (0.0, 1000.0), (1000.0, 0.0)):
            rule = plan.options.rule(delta_low=a, delta_high=b)
            yield plan.question(family, material, rule, judges=("keep",))


def _two_thresholds(plan: Plan) -> str | None:
    names = ("clip_low", "clip_high") if plan.rule.direction == "clip" else (
        "delta_low",
        "delta_high",
    )  # fmt: skip
    if plan.rule.direction == "none":
        return "the mask has no threshold"
    if not plan.free(*names) or (plan.measured and plan.options.delta is not None):
        return f"the target does not take both {names[0]} and {names[1]}, or they are declared"
    return decides(plan)


@check(
    "mask.small-mass",
    "small probabilities have no floor",
    formula="log(mu_j / pi_j) with pi_j down to e^-60; no clamp, no epsilon",
    bug="probabilities clamped at 1e-6 or 1e-8, an epsilon inside a log, a clamped log-ratio",
    examples=(
        "one DPPO branch clamps probabilities to [1e-6, 1 - 1e-6]",
        "1e-8 added inside the logs of 1 - p",
    ),
    applies=lambda plan: (
        f"{plan.options.mask} has no criterion" if plan.rule.direction == "none" else decides(plan)
    ),
    gated=True,
)
def small_mass(plan: Plan) -> Iterator[Question]:
    """Logits up to 80 either way, and policies that differ because the training policy has all
    but given up the sampled token, or other likely ones: probabilities far below 1e-8 that carry
    the divergence. Log-probs hold them to full precision, so a floor shows."""
    yield from plan.ordinary("huge-scale")
    for name, own in (("the sampled token given up", True), ("other tokens given up", False)):
        yield from plan.ordinary(
            "sampled-inside",
            key=name,
            change=lambda batch, own=own: _given_up(batch, own),
            vocab_size=65,
            top_k=plan.options.top_k or 6,
        )
    if plan.rule.direction == "clip":
        batch = plan.sequence("sampled-outside", 12)
        far = with_ratio(batch, np.exp(np.linspace(20.0, 92.0, 12)))
        yield plan.question("log r from 20 to 92", plan.wrap(far), plan.rule)
        rare = both_rare(plan.sequence("peaked", 12))
        yield plan.question("both probabilities about e^-110", plan.wrap(rare), plan.rule)


def _given_up(batch: Batch, own: bool) -> Batch:
    """Training logits lowered by 12 to 60 nats: the sampled token's, or half of the others'."""
    assert batch.logits is not None
    z = np.where(batch.response_mask[..., None], batch.logits, 0.0).astype(np.float64)
    chosen = np.zeros(z.shape, dtype=bool)
    np.put_along_axis(chosen, batch.tokens[..., None], True, axis=-1)
    if not own:
        chosen = ~chosen & (np.arange(z.shape[-1]) % 2 == 0)
    depth = np.linspace(12.0, 60.0, batch.tokens.size).reshape(batch.tokens.shape)[..., None]
    return replace(batch, logits=np.where(chosen, z - depth, z).astype(np.float32))


@check(
    "mask.extreme-thresholds",
    "thresholds of 0, and beyond every distance",
    formula="delta = 0 drops whatever pushes out; a delta above every D keeps everything",
    bug="`delta or default`: a zero taken for not given; a threshold that is clamped",
    applies=every(
        decides,
        lambda plan: (
            None
            if plan.delta_is_free or plan.free("clip_low", "clip_high")
            else "the threshold is fixed, or there is none"
        ),
    ),
)
def extreme_thresholds(plan: Plan) -> Iterator[Question]:
    """Policies near and far apart, advantages that push outward: at a threshold of 0 every token
    is dropped, at one of 1,000 none; at 1.5 some, just above the largest D none."""
    for family in ("peaked", "far-apart"):
        material = plan.material(family, advantages="push")
        for width in (0.0, 1000.0):
            if plan.rule.direction == "clip":
                rule = plan.options.rule(clip_low=width, clip_high=width)
            else:
                rule = plan.options.rule(delta=width)
            yield plan.question(family, material, rule, judges=("keep",))
    material = plan.material("huge-scale", advantages="push")
    if plan.delta_is_free:
        largest = plan.distance(material.batch)
        largest = largest[np.isfinite(largest)]
        for width in (1.5, float(f"{1.1 * largest.max(initial=30.0):.2g}")):
            yield plan.question(
                "huge-scale", material, plan.options.rule(delta=width), judges=("keep",)
            )


@check(
    "mask.step-size",
    "the step size enters linearly and squared",
    formula="D + h C + h^2 Var / 2 > delta with h = eta A r",
    bug="eta missing in one of the terms",
    applies=every(
        lambda plan: (
            None if plan.rule.direction == "second-order" else "the mask takes no step size"
        ),
        lambda plan: (
            None if plan.free("eta") else "the target does not take eta, or it is declared"
        ),
        decides,
    ),
)
def step_size(plan: Plan) -> Iterator[Question]:
    """The second-order mask at step sizes 1/8 and 4, also where the tail is one strong token."""
    for family in ("peaked", "far-apart", "training-tail", "behavior-tail"):
        material = plan.material(family)
        for rule in plan.rules(material):
            for eta in (0.125, 4.0):
                yield plan.question(
                    f"{family}, eta = {eta:g}", material, replace(rule, eta=eta), judges=("keep",)
                )
