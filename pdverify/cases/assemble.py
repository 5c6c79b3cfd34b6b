"""From a pair of logit arrays to a `Batch` as a trainer and a rollout engine would hand it over.

The behavior logits are rounded to the batch's format first; the stored log-probs, the top-K list
and the sampled tokens all come from those STORED logits, as in an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, BoolArray, FloatArray, IntArray, View
from pdverify.formats import FORMATS

Rng: TypeAlias = np.random.Generator
Array: TypeAlias = NDArray[np.float64]
Sampler: TypeAlias = Callable[[Rng, Array, IntArray, int], IntArray]
"""(rng, stored behavior logits [B, L, V], ids by falling logit [B, L, V], K) -> tokens [B, L]."""


@dataclass(frozen=True)
class Size:
    """How large a batch is: `B` sequences of `L` positions over `V` tokens, top-`K` lists.

    `dtype` names the format of the logits.  `vocab_size` is at least 5 (the smallest in which
    every family has a sampled token, another retained one and a tail).

    Raises:
        ValueError: for a size that no family can fill.
    """

    sequences: int
    length: int
    vocab_size: int
    top_k: int
    dtype: str

    def __post_init__(self) -> None:
        for name, least in (("sequences", 1), ("length", 1), ("vocab_size", 5), ("top_k", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: at least {least}")

    @property
    def shape(self) -> tuple[int, int]:
        """`(B, L)`."""
        return (self.sequences, self.length)

    @property
    def kept(self) -> int:
        """`K`, lowered to `V - 2` so that a tail is left once the sampled token is appended."""
        return min(self.top_k, self.vocab_size - 2)

    @property
    def index(self) -> IntArray:
        """`[B, L]`: the running number of each position, for families that cycle over kinds."""
        return np.arange(self.sequences * self.length, dtype=np.int64).reshape(self.shape)


def log_softmax(logits: Array) -> Array:
    """Log-probs (nats) of `logits` `[..., V]` in float64.

    `log p_i = (z_i - z_max) - log1p(sum of exp(z_j - z_max) over the others)`: the largest term
    is left out of the sum, so that `log p` keeps its relative precision where `p` is near 1.
    """
    top = np.argmax(logits, axis=-1, keepdims=True)
    shifted = logits - np.take_along_axis(logits, top, axis=-1)
    others = np.exp(shifted)
    np.put_along_axis(others, top, 0.0, axis=-1)
    result: Array = shifted - np.log1p(others.sum(axis=-1, keepdims=True))
    return result


def round_logits(logits: Array, dtype: str) -> FloatArray:
    """`logits` rounded to the format `dtype`, in the smallest array dtype that holds them."""
    rounded = FORMATS[dtype].round(logits)
    return rounded if FORMATS[dtype].significand_bits > 24 else rounded.astype(np.float32)


def by_rank(logits: FloatArray) -> IntArray:
    """Ids `[..., V]` by falling logit; equal logits by rising id, so the order is unique."""
    return np.asarray(np.argsort(-logits, axis=-1, kind="stable"), dtype=np.int64)


def draw(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
    """Tokens drawn from `softmax(logits)` by the Gumbel-max rule."""
    return np.asarray(np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1), dtype=np.int64)


def draw_ranks(first: int, last: int | None) -> Sampler:
    """A sampler that draws from the behavior policy restricted to ranks `first .. last - 1`.

    Ranks count from 0; None for `last` stands for `V`.
    """

    def sampler(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
        ids = order[..., first:last]
        best = draw(rng, np.take_along_axis(logits, ids, axis=-1), ids, top_k)
        return np.take_along_axis(ids, best[..., None], axis=-1)[..., 0]

    return sampler


def draw_outside(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
    """Tokens drawn from the behavior policy restricted to what the top-K list leaves out."""
    return draw_ranks(top_k, None)(rng, logits, order, top_k)


def padding(rng: Rng, size: Size) -> BoolArray:
    """`[B, L]` response mask: sequences of different lengths, the last one never full.

    Every sequence keeps at least one token; with a single position nothing is padded.
    """
    lengths = rng.integers(1, size.length + 1, size=size.sequences)
    lengths[0] = size.length
    lengths[-1] = max(1, min(int(lengths[-1]), size.length - 1))
    return np.asarray(np.arange(size.length) < lengths[:, None])


def mixed_advantages(rng: Rng, mask: BoolArray) -> FloatArray:
    """`[B, L]` float32 advantages: half of each sign, one in eight exactly 0 (if more than one)."""
    total = mask.sum()
    values = np.abs(rng.normal(size=total)) + 2.0**-6
    values[rng.permutation(total)[: total // 2]] *= -1
    if total > 1:
        values[rng.permutation(total)[: -(-total // 8)]] = 0.0
    advantages = np.full(mask.shape, np.nan, dtype=np.float32)
    advantages[mask] = values
    return advantages


def assemble(
    rng: Rng,
    size: Size,
    training: Array,
    behavior: Array,
    *,
    sampler: Sampler = draw,
    top_k: int | None = None,
    mask: BoolArray | None = None,
) -> Batch:
    """A `Batch` of two policies given by their logits `[B, L, V]` before rounding.

    The batch carries the full view and the top-K view side by side (see `as_view`).  Every float
    on padding is NaN; ids there are 0, as engines leave them.
    """
    k = size.kept if top_k is None else top_k
    valid = padding(rng, size) if mask is None else mask
    z, y = round_logits(training, size.dtype), round_logits(behavior, size.dtype)
    exact = y.astype(np.float64)
    order = by_rank(y)
    tokens = sampler(rng, exact, order, k)
    ids = order[..., :k]
    stored = log_softmax(exact)
    sampled = np.take_along_axis(stored, tokens[..., None], axis=-1)[..., 0].astype(np.float32)
    listed = np.take_along_axis(stored, ids, axis=-1).astype(np.float32)
    return Batch(
        tokens=np.where(valid, tokens, 0),
        advantages=mixed_advantages(rng, valid),
        response_mask=valid,
        vocab_size=size.vocab_size,
        logits=_poison(z, valid),
        behavior_logits=_poison(y, valid),
        behavior_logprobs=_poison(sampled, valid),
        topk_ids=np.where(valid[..., None], ids, 0),
        topk_logprobs=_poison(listed, valid),
        dtype=size.dtype,
    )


def _poison(x: FloatArray, valid: BoolArray) -> FloatArray:
    x[~valid] = np.nan
    return x


def as_view(
    batch: Batch, view: View, *, training: Literal["logits", "logprobs"] = "logits"
) -> Batch:
    """`batch` reduced to what one view carries of the behavior policy.

    ``full`` keeps everything; ``topk`` drops the behavior logits; ``sampled`` the top-K list as
    well.  With ``training="logprobs"`` the training logits are replaced by the stored log-prob of
    the sampled token (float64 log-softmax of the stored logits, rounded to float32).

    Raises:
        InputError: if the batch does not hold that view.
    """
    reduced = batch
    if training == "logprobs" and batch.logits is not None:
        logits = np.where(batch.response_mask[..., None], batch.logits, 0.0).astype(np.float64)
        own = np.take_along_axis(log_softmax(logits), batch.tokens[..., None], axis=-1)[..., 0]
        own = own.astype(np.float32)
        own[~batch.response_mask] = np.nan
        reduced = replace(reduced, logits=None, logprobs=own)
    if view in ("topk", "sampled"):
        reduced = replace(reduced, behavior_logits=None)
    if view == "sampled":
        reduced = replace(reduced, topk_ids=None, topk_logprobs=None)
    return reduced


def replace_last(batch: Batch) -> Batch:
    """`batch` with a missing sampled token put in place of the last top-K entry.

    The support then has exactly `K` cells (`Rule.support` ``replace``).  The last entry of a list
    is its worst one, as `assemble` and engines order it.

    Raises:
        ValueError: if the batch has no top-K list.
    """
    if batch.topk_ids is None or batch.topk_logprobs is None or batch.behavior_logprobs is None:
        raise ValueError("the batch has no top-K list")
    ids, stored = batch.topk_ids.copy(), batch.topk_logprobs.copy()
    absent = batch.response_mask & ~(ids == batch.tokens[..., None]).any(axis=-1)
    ids[absent, -1] = batch.tokens[absent]
    stored[absent, -1] = batch.behavior_logprobs[absent]
    return replace(batch, topk_ids=ids, topk_logprobs=stored)
