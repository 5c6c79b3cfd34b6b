"""Checks on the masked policy loss and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pdverify.batch import Batch
from pdverify.conformance.checks.entry import check, every
from pdverify.conformance.plan import Plan, assembled
from pdverify.conformance.questions import Question


def _returns_loss(plan: Plan) -> str | None:
    return None if "loss" in plan.outputs else "the target returns no loss"


def _differentiable(plan: Plan) -> str | None:
    if plan.takes("logits", "logprobs"):
        return None
    return "the target takes neither logits nor logprobs, so there is nothing to differentiate at"


def _scalar(plan: Plan) -> str | None:
    return None if plan.options.aggregation else "the loss is per token"


def _loss(plan: Plan, name: str, batch: Batch, judges: tuple[str, ...], **options: Any) -> Question:
    return plan.question(name, plan.wrap(batch), plan.rule, judges=judges, **options)


def _mild(plan: Plan) -> Iterator[tuple[str, Batch]]:
    """One sequence without padding, ratios below 2: no cap and no aggregation shows."""
    for family in ("peaked", "temperature", "sampled-outside"):
        batch = with_ratio(plan.sequence(family, 12), np.exp(np.linspace(-0.6, 0.6, 12)))
        # advantages of every size: a clamp on them shows
        scale = np.where(np.arange(12) % 3 == 0, 40.0, 1.0).astype(np.float32)
        yield family, replace(batch, advantages=batch.advantages * scale)


def with_ratio(batch: Batch, ratio: np.ndarray[Any, np.dtype[np.float64]]) -> Batch:
    """The batch with the sampled token's behavior logit set so that r takes the values `ratio`.

    Positions are filled in order; ratios that a policy cannot have (mu_k would exceed 1) end up
    smaller.
    """
    valid = batch.response_mask
    assert batch.logits is not None
    assert batch.behavior_logits is not None
    z = np.where(valid[..., None], batch.logits, 0.0).astype(np.float64)
    y = np.where(valid[..., None], batch.behavior_logits, 0.0).astype(np.float64)
    at = batch.tokens[..., None]
    log_pi = np.take_along_axis(z - _log_sum(z), at, axis=-1)
    wanted = np.minimum(log_pi - np.log(np.resize(ratio, batch.tokens.shape))[..., None], -1e-3)
    others = y.copy()
    np.put_along_axis(others, at, -np.inf, axis=-1)
    # mu_k = e^wanted: the logit over the others' log-sum is logit(mu_k)
    own = _log_sum(others) + wanted - np.log(-np.expm1(wanted))
    np.put_along_axis(y, at, own, axis=-1)
    return assembled(batch, z, y)


def with_rest(batch: Batch, rest: float) -> Batch:
    """The sampled token's training logit set so that all other tokens have mass `rest`."""
    assert batch.logits is not None
    z = np.where(batch.response_mask[..., None], batch.logits, 0.0).astype(np.float64)
    at = batch.tokens[..., None]
    others = z.copy()
    np.put_along_axis(others, at, -np.inf, axis=-1)
    np.put_along_axis(z, at, _log_sum(others) + np.log((1 - rest) / rest), axis=-1)
    return replace(batch, logits=z.astype(np.float32))


def _log_sum(x: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    top = x.max(axis=-1, keepdims=True)
    total: np.ndarray[Any, np.dtype[np.float64]] = top + np.log(
        np.exp(x - top).sum(axis=-1, keepdims=True)
    )
    return total


@check(
    "loss.value",
    "the loss of kept tokens",
    formula="loss = -A sg(min(r, cap)) log pi_k",
    bug="a wrong sign, a missing ratio, another objective",
    examples=("-A r M, differentiated through r, has the same gradient but another value",),
    applies=_returns_loss,
)
def value(plan: Plan) -> Iterator[Question]:
    """Kept tokens of one unpadded sequence with importance ratios between 0.5 and 2, so that
    neither the cap nor the aggregation shows. sg(.) takes no gradient: the score-function form.
    Frameworks that write -A r instead follow the convention 'gradient through the ratio'."""
    for name, batch in _mild(plan):
        yield _loss(plan, name, batch, ("loss",), tokens="kept")


@check(
    "loss.gradient",
    "the gradient of kept tokens",
    formula="d loss / d z = -A min(r, cap) (e_k - pi); at log pi_k: -A min(r, cap)",
    bug="a ratio or mask that is not detached, a gradient cut too early",
    examples=("-A r log pi_k without a detach has the gradient -A r (1 + log pi_k)",),
    applies=every(_returns_loss, _differentiable),
)
def gradient(plan: Plan) -> Iterator[Question]:
    """The same tokens as loss.value: importance ratio and mask are constants of the step."""
    for name, batch in _mild(plan):
        yield _loss(plan, name, batch, ("gradient",), tokens="kept")


@check(
    "loss.dropped",
    "dropped tokens contribute exactly 0",
    formula="dropped: loss = 0 and gradient = 0, exactly",
    bug="a mask that is applied to the value but not to the gradient, or only nearly",
    examples=("clipped surrogates leave a constant in the loss at a dropped token",),
    applies=_returns_loss,
)
def dropped(plan: Plan) -> Iterator[Question]:
    """Tokens outside the trust region whose advantage pushes outward, one unpadded sequence; and
    tokens with A = 0, which are kept and contribute 0 all the same."""
    for family in ("far-apart", "direction-conflict"):
        batch = plan.sequence(family, 16, advantages="push")
        yield _loss(plan, family, batch, ("loss", "gradient"), tokens="dropped")
    still = plan.sequence("peaked", 16)
    a = np.where(np.arange(16) % 2 == 0, 0.0, still.advantages).astype(np.float32)
    still = replace(still, advantages=a)
    yield _loss(plan, "A = 0", still, ("loss", "gradient"), tokens="dropped")


@check(
    "loss.overflow",
    "loss and gradient stay finite where exp(log r) overflows",
    formula="dropped: 0; kept: -A cap log pi_k",
    bug="inf * 0 = NaN: a filter by multiplication, or where() after exp()",
    examples=(
        "a log-ratio of 89 overflows in float32: NaN gradient in one public PPO loss,"
        " though the token is clipped",
    ),
    applies=_returns_loss,
)
def overflow(plan: Plan) -> Iterator[Question]:
    """Tokens that the behavior policy all but excluded: log r is about 90, beyond exp in float32.
    With A > 0 they are dropped, with A < 0 kept at the capped ratio. And tokens whose probability
    underflows under both policies, so that a quotient of probabilities is 0 / 0."""
    batch = with_rest(plan.sequence("sampled-outside", 12), 0.5)
    far = with_ratio(batch, np.exp(np.linspace(89.5, 92.0, 12)))
    a = np.where(np.arange(12) % 2 == 0, 1.5, -0.75).astype(np.float32)
    far = replace(far, advantages=np.resize(a, far.tokens.shape))
    yield _loss(plan, "log r about 90", far, ("loss", "gradient"))
    rare = both_rare(plan.sequence("peaked", 12))
    yield _loss(plan, "both probabilities about e^-110", rare, ("loss", "gradient"))


def both_rare(batch: Batch) -> Batch:
    """Both policies all but exclude the sampled token, in about the same measure."""
    assert batch.logits is not None
    assert batch.behavior_logits is not None
    z, y = batch.logits.astype(np.float64), batch.behavior_logits.astype(np.float64)
    at = batch.tokens[..., None]
    gap = np.linspace(-0.5, 0.5, batch.tokens.size).reshape(at.shape)
    np.put_along_axis(z, at, _log_sum(z) - 110.0, axis=-1)
    np.put_along_axis(y, at, _log_sum(y) - 110.0 - gap, axis=-1)
    return assembled(batch, z, y)


@check(
    "loss.cap",
    "the importance ratio is capped",
    formula="min(r, ratio_cap), 20 where nothing is declared",
    bug="no cap, or a cap that is fixed somewhere else in the configuration",
    examples=("a cap of 20 in the code that a configured default turns into 3",),
    applies=_returns_loss,
)
def cap(plan: Plan) -> Iterator[Question]:
    """Kept tokens (A < 0, the step brings the policies together) with ratios of 2 to 100, on both
    sides of the caps that frameworks use: 3, 5, 10 and 20. A target that takes ratio_cap is asked
    at 0.1, 2.5 and 50 too."""
    batch = with_rest(plan.sequence("sampled-outside", 12), 0.5)
    wide = with_ratio(batch, np.exp(np.linspace(np.log(2.0), np.log(100.0), 12)))
    wide = replace(wide, advantages=np.full(wide.tokens.shape, -0.5, dtype=np.float32))
    caps = [plan.loss_cap, 2.5, 0.1, 50.0] if plan.free("ratio_cap") else [plan.loss_cap]
    for one in caps:
        yield _loss(
            plan,
            f"r from 2 to 100, ratio_cap = {one:g}",
            wide,
            ("loss", "gradient"),
            ratio_cap=one,
            tokens="kept",
        )
    wide_open = None
    if plan.delta_is_free:
        wide_open = plan.options.rule(delta=1000.0)
    elif plan.free("clip_low", "clip_high"):
        wide_open = plan.options.rule(clip_high=1000.0)
    if wide_open is not None:
        outward = replace(wide, advantages=np.abs(wide.advantages))
        yield plan.question(
            "A > 0 inside a wide trust region",
            plan.wrap(outward),
            wide_open,
            judges=("loss", "gradient"),
            tokens="kept",
        )


@check(
    "loss.small-ratio",
    "small importance ratios have no floor",
    formula="-A r log pi_k with r down to e^-110",
    bug="a log-ratio clamped from below, a floor on the weight",
    examples=("a clamp of the log-ratio at -20; two-sided CISPO holds the weight above 0.8",),
    applies=_returns_loss,
)
def small_ratio(plan: Plan) -> Iterator[Question]:
    """Kept tokens (A > 0) whose training probability has fallen far below the behavior one."""
    batch = plan.sequence("sampled-inside", 12)
    valid = batch.response_mask
    assert batch.logits is not None
    assert batch.behavior_logits is not None
    z = np.where(valid[..., None], batch.logits, 0.0).astype(np.float64)
    y = np.where(valid[..., None], batch.behavior_logits, 0.0).astype(np.float64)
    at = batch.tokens[..., None]
    depth = np.linspace(2.0, 110.0, batch.tokens.size).reshape(batch.tokens.shape)[..., None]
    top = z.max(axis=-1, keepdims=True)
    np.put_along_axis(z, at, top - depth, axis=-1)
    low = assembled(batch, z, y)
    low = replace(low, advantages=np.full(low.tokens.shape, 0.5, dtype=np.float32))
    yield _loss(plan, "r down to e^-110", low, ("loss", "gradient"), tokens="kept")


@check(
    "loss.padding",
    "padding contributes exactly 0",
    formula="response_mask False: loss = 0 and gradient = 0, whatever stands there",
    bug="NaN * 0 on padding; a loss that ignores the response mask",
    examples=("sum(x * mask) turns one NaN on padding into a NaN loss",),
    applies=every(
        _returns_loss,
        lambda plan: (
            None
            if plan.takes("response_mask")
            else "the target does not take response_mask, so it cannot know what is padding"
        ),
    ),
)
def padding(plan: Plan) -> Iterator[Question]:
    """NaN, then infinite logits, log-probs and advantages on padding, holes inside responses. Where
    the gradient is taken a large number stands instead."""
    material = plan.material("padding", vocab_size=65, top_k=plan.options.top_k or 6)
    yield plan.question(
        "NaN on padding",
        material,
        plan.rule,
        judges=("loss", "gradient"),
        tokens="padding",
        poison=True,
    )
    yield plan.question(
        "infinity on padding",
        material,
        plan.rule,
        judges=("loss", "gradient"),
        tokens="padding",
        poison=True,
        infinite=True,
    )


@check(
    "loss.aggregation",
    "the loss is reduced as declared",
    formula="token-mean: over valid tokens; sequence-mean: of their means; fixed-length: over B L",
    bug="another denominator: sequences for tokens, padding counted",
    applies=every(_returns_loss, _scalar),
)
def aggregation(plan: Plan) -> Iterator[Question]:
    """Sequences of different lengths, one of them empty, kept and dropped tokens, harmless numbers
    on padding."""
    for family in ("peaked", "far-apart"):
        batch = plan.material(
            family, sequences=4, length=8, vocab_size=65, top_k=plan.options.top_k or 6
        ).batch
        even = with_ratio(batch, np.exp(np.linspace(-0.5, 0.5, 32)))
        # a sequence and single tokens without an advantage count all the same
        a = np.where(np.arange(32).reshape(4, 8) % 5 == 0, 0.0, even.advantages)
        a[2] = 0.0
        even = replace(even, advantages=a.astype(np.float32))
        yield _loss(plan, f"{family}, uneven lengths", even, ("loss", "gradient"))
    short = even.response_mask.copy()
    short[1] = short[:, -1] = False
    name = "none at full length, one of padding alone"
    yield _loss(plan, name, replace(even, response_mask=short), ("loss", "gradient"))
