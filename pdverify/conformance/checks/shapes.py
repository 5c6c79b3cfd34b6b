"""Checks on sizes, on the vocabulary's labels and on how tokens are batched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from pdverify.batch import Batch, FloatArray, IntArray
from pdverify.conformance.checks.entry import (
    check,
    coarse,
    every,
    infinite_allowed,
    reads_logits,
)
from pdverify.conformance.plan import Plan
from pdverify.conformance.questions import Question

LARGE = 151_936
"""A vocabulary of today's language models; ids above 2^15, 2^16 and 2^17 occur."""


def _k(plan: Plan, default: int) -> int:
    return plan.options.top_k or default


def _top_k_free(plan: Plan) -> str | None:
    return None if plan.top_k_is_free else "K is declared"


@check(
    "size.k-one",
    "K = 1",
    formula="S = {top token, sampled token}",
    bug="a squeezed dimension, or a list of one taken for no list",
    examples=("logprobs=True taken for K = 1 makes the support the sampled token alone",),
    applies=every(coarse, _top_k_free),
    gated=True,
)
def k_one(plan: Plan) -> Iterator[Question]:
    """The engine returned its best token and no other, so S has one entry or two."""
    yield from plan.ordinary("k-one", vocab_size=33)


@check(
    "size.k-most",
    "K = V - 2",
    formula="a tail of one token or two; mu_T = 1 - sum_S mu is small",
    bug="1 - sum below zero, its log NaN",
    examples=("1 - sum is negative on a fifth of random rows where K = V",),
    applies=every(coarse, _top_k_free),
    gated=True,
)
def k_most(plan: Plan) -> Iterator[Question]:
    """Almost the whole vocabulary is in the list, and one token or two are left for the tail."""
    yield from plan.ordinary("k-almost-all", vocab_size=41)


@check(
    "size.tiny-vocabulary",
    "V = 5 and 6",
    formula="the same definitions",
    bug="block sizes, sentinels or ids that need more room",
    gated=True,
)
def tiny(plan: Plan) -> Iterator[Question]:
    """The smallest vocabularies that have a sampled token, another listed one and a tail."""
    for size in (5, 6):
        if _k(plan, 2) <= size - 2:
            yield from plan.ordinary("peaked", vocab_size=size, top_k=_k(plan, 2))


@check(
    "size.large-vocabulary",
    "V = 151,936",
    formula="the same definitions",
    bug="ids in int16, int32 offsets into [T, V], ids through float16; sums that lose small terms",
    examples=("32-bit offsets wrap at row 14,134 of V = 151,936",),
    gated=True,
)
def large(plan: Plan) -> Iterator[Question]:
    """The vocabulary of a present-day model, with sampled and listed ids over the whole range.
    Budgets grow with V, so this looks for gross errors."""
    size = {"vocab_size": LARGE, "top_k": _k(plan, 20), "sequences": 2, "length": 3}
    # 151,936 is a multiple of 128
    for name, sampled, odd_one in (("as drawn", None, 0), ("sampled id V - 1", LARGE, 1)):
        size["vocab_size"] = LARGE + odd_one
        material = plan.material(
            "peaked",
            advantages="push",
            key=name,
            change=partial(renamed, sampled=sampled),
            **size,
        )
        d = plan.distance(material.batch)
        rules = [plan.rule]
        if plan.delta_is_free and np.isfinite(d).all():
            rules = [
                plan.options.rule(delta=float(f"{x:.2g}")) for x in (1.5 * d.max(), d.min() / 2)
            ]
        for rule in rules:
            yield plan.question(f"V = {LARGE + odd_one}, {name}", material, rule)


@check(
    "size.single",
    "B = 1 and L = 1",
    formula="the answer has shape [1, 1]",
    bug="squeeze() without a dimension",
    gated=True,
)
def single(plan: Plan) -> Iterator[Question]:
    """A batch of one token, as the last micro-batch of a run may be."""
    for seed in range(4):
        material = plan.material(
            "far-apart", seed=seed, sequences=1, length=1, vocab_size=33, top_k=_k(plan, 5)
        )
        yield plan.question("one token", material, plan.rule)


@check(
    "size.odd",
    "odd and uneven sizes",
    formula="the same definitions",
    bug="blocks that must divide B, L, V or K",
    examples=("kernels whose last block reads past the end of a row",),
    gated=True,
)
def odd(plan: Plan) -> Iterator[Question]:
    """B from 1 to 33, L from 1 to 1,025, V from 17 to 2,100, K of 7, 65 and 150, none of them
    multiples of the others or of powers of 2."""
    for sequences, length, vocabulary, k in (
        (3, 5, 509, 7),
        (7, 1, 67, 7),
        (1, 9, 1021, 65),
        (2, 131, 37, 7),
        (33, 35, 37, 7),
        (1, 1025, 17, 7),
        (2, 5, 257, 150),
        (2, 3, 2100, 7),
    ):
        yield from plan.ordinary(
            "far-apart",
            sequences=sequences,
            length=length,
            vocab_size=vocabulary,
            top_k=_k(plan, k),
        )


@check(
    "vocabulary.shift",
    "a common offset of the logits changes nothing",
    formula="softmax(z + c) = softmax(z)",
    bug="exp without subtracting the maximum; logits used as log-probs; z - logsumexp(z), which"
    " loses the digits of a large common offset (log_softmax keeps them)",
    examples=("float32 logits [1e8, 1e8]: the log-prob is -ln 2, not 0",),
    applies=reads_logits,
    gated=True,
)
def shift(plan: Plan) -> Iterator[Question]:
    """All logits of a row, on both sides, moved by -1,000 to 10,000: exp overflows or vanishes
    unless the maximum is taken off first. The offset rounds the logits, so the right answer is
    that of the rounded ones."""
    yield from plan.ordinary("offset", vocab_size=65, top_k=_k(plan, 6))

    def moved(batch: Batch) -> Batch:
        assert batch.logits is not None
        lowered = (batch.logits - np.float32(1000.0)).astype(np.float32)
        return replace(batch, logits=lowered)

    yield from plan.ordinary(
        "peaked", key="training logits minus 1000", change=moved, vocab_size=65, top_k=_k(plan, 6)
    )


@check(
    "vocabulary.permutation",
    "token ids are labels",
    formula="renaming the tokens alike everywhere changes nothing",
    bug="id 0 taken for padding, or ids taken for ranks",
    examples=("padding rows with every id 0 and log-prob 0 give mu = 1 in each of K slots",),
    gated=True,
)
def permutation(plan: Plan) -> Iterator[Question]:
    """The vocabulary renamed: reversed, so that the highest ids carry the mass, and so that every
    sampled token has id 0, then id V - 1."""
    yield from plan.ordinary(
        "direction-conflict", key="ids reversed", change=lambda b: renamed(b, reverse=True),
        vocab_size=65, top_k=_k(plan, 6),
    )  # fmt: skip
    for name, target in (("sampled id 0", 0), ("sampled id V - 1", 64)):
        yield from plan.ordinary(
            "far-apart",
            key=name,
            change=lambda b, target=target: renamed(b, sampled=target),
            vocab_size=65,
            top_k=_k(plan, 6),
        )


def renamed(batch: Batch, *, reverse: bool = False, sampled: int | None = None) -> Batch:
    """The batch with its token ids renamed row by row."""
    size = batch.vocab_size
    name = np.broadcast_to(np.arange(size), (*batch.tokens.shape, size)).copy()
    if reverse:
        name = name[..., ::-1].copy()
    if sampled is not None:  # swap the sampled token with `sampled`
        at = batch.tokens[..., None]
        np.put_along_axis(name, np.full(at.shape, sampled), at, axis=-1)
        np.put_along_axis(name, at, sampled, axis=-1)

    def columns(x: FloatArray | None) -> FloatArray | None:
        if x is None:
            return None
        moved = np.empty_like(x)
        np.put_along_axis(moved, name, x, axis=-1)
        return moved

    def ids(x: IntArray) -> IntArray:
        return np.take_along_axis(name, x, axis=-1)

    assert batch.topk_ids is not None
    return replace(
        batch,
        logits=columns(batch.logits),
        behavior_logits=columns(batch.behavior_logits),
        tokens=ids(batch.tokens[..., None])[..., 0],
        topk_ids=ids(batch.topk_ids),
    )


@check(
    "vocabulary.neg-inf",
    "logits of -inf mean probability zero",
    formula="0 log(0 / 0) = 0: no contribution; V counts the columns",
    bug="-inf minus -inf is NaN, and NaN > delta keeps the token",
    examples=("padded vocabulary columns of -inf turn a naive KL into NaN",),
    applies=every(reads_logits, infinite_allowed),
    gated=True,
)
def negative_infinity(plan: Plan) -> Iterator[Question]:
    """Padded vocabulary columns of -inf on both sides, and training logits of -inf on tokens
    that the behavior policy may hold. Rows on which D or C is infinite are not judged."""
    for family in ("padded-vocabulary", "training-neg-inf"):
        yield from plan.ordinary(family, vocab_size=65, top_k=_k(plan, 6))


@check(
    "batch.order",
    "the order of sequences and positions does not matter",
    formula="mask(permuted batch) = permuted mask(batch)",
    bug="an index along the wrong dimension, off by one, or a special first or last token",
    examples=("log-probs read one slot late show up as rare, huge divergences",),
    gated=True,
)
def order(plan: Plan) -> Iterator[Question]:
    """A batch in which neighbors differ much, as it is, with sequences reversed, and with
    positions reversed."""
    for name, change in (
        ("alternating", lambda b: b),
        ("sequences reversed", lambda b: _columns(b, lambda x: x[::-1])),
        ("positions reversed", lambda b: _columns(b, lambda x: x[:, ::-1])),
    ):
        yield from plan.ordinary(
            "direction-conflict", key=name, change=change, vocab_size=65, top_k=_k(plan, 6)
        )


def _columns(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    moved: dict[str, Any] = {
        f.name: np.ascontiguousarray(change(getattr(batch, f.name)))
        for f in fields(batch)
        if isinstance(getattr(batch, f.name), np.ndarray)
    }
    return replace(batch, **moved)


@check(
    "batch.split",
    "micro-batches give the same mask",
    formula="mask(batch) = concatenation of mask(micro-batches)",
    bug="a statistic over the batch inside the mask",
    gated=True,
)
def split(plan: Plan) -> Iterator[Question]:
    """The batch is handed over one sequence at a time."""
    yield from plan.ordinary("far-apart", vocab_size=65, top_k=_k(plan, 6), presentation="split")


@check(
    "batch.padding",
    "what stands on padding is ignored",
    formula="response_mask False: the answer there does not matter, nor does it matter elsewhere",
    bug="NaN or infinity on padding that spreads through a sum, a mean or 0 * NaN",
    examples=("seq-mean losses multiply by the mask: NaN on padding makes the loss NaN",),
    gated=True,
)
def padding(plan: Plan) -> Iterator[Question]:
    """NaN logits, log-probs and advantages on padding, with holes inside responses and a sequence
    that is all padding."""
    for family in ("padding", "far-apart"):
        yield from plan.ordinary(family, vocab_size=65, top_k=_k(plan, 6), poison=True)
