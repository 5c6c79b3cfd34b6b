"""Families of synthetic batches: the hard inputs of a trust-region mask, by name.

One entry of `FAMILIES` is one family.  A family is a pure function of its generator and its
size: the same state of `rng` gives the same bits.  Unless a description says otherwise, tokens
are drawn from the stored behavior policy, half of the advantages have each sign, one in eight is
exactly 0, and the shape of the two policies varies from row to row.

Notation: `z` training logits (policy `pi`), `y` behavior logits (policy `mu`), before rounding.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pdverify.batch import Batch, BoolArray, IntArray
from pdverify.cases.assemble import (
    Array,
    Rng,
    Sampler,
    Size,
    assemble,
    by_rank,
    draw,
    draw_outside,
    draw_ranks,
    log_softmax,
    padding,
)
from pdverify.formats import FORMATS
from pdverify.registry import Registry

NEAR_EQUAL_NOISE = (0.0, 2.0**-4, 2.0**-7, 2.0**-10, 2.0**-13, 2.0**-17)
"""Standard deviation (nats) of the logit noise of `near-equal`, by position modulo 6."""

DYADIC = ((2, 4, 2), (4, 2, 2), (1, 4, 1), (2, 1, 1), (4, 4, 3), (2, 2, 1), (2, 2, 2))
"""Rows of `dyadic`, by position modulo 7: tokens of mu, tokens of pi, tokens of both.

With `mu = 1/m` on m tokens, `pi = 1/n` on n, `s` of them shared:
`TV = 1 - s min(1/m, 1/n)` and squared Hellinger `= 1 - s / sqrt(m n)`.
"""

NEAR_THRESHOLD = 0.15
"""Forward KL (nats) that the rows of `near-threshold` lie close to: the paper's threshold."""

GRADED_OCTAVES = 36
"""Octaves over which `graded` spreads its logit differences."""


@dataclass(frozen=True)
class Family:
    """A named family of batches.

    Attributes:
        name: its name in `FAMILIES`.
        description: one line: what the rows look like and which fault they are after.
        make: the family itself.
        neg_inf: whether logits or stored log-probs of valid rows may be -inf.
    """

    name: str
    description: str
    make: Callable[[Rng, Size], Batch]
    neg_inf: bool = False

    def __call__(
        self,
        rng: Rng,
        *,
        sequences: int,
        length: int,
        vocab_size: int,
        top_k: int,
        dtype: str,
    ) -> Batch:
        """A batch of `[sequences, length]` positions over `vocab_size` tokens.

        `top_k` is lowered to `vocab_size - 2` where it is larger, so that a tail is left once the
        sampled token is appended; `k-one` and `k-almost-all` set K themselves.

        Raises:
            ValueError: for `vocab_size < 5` or an empty batch.
            UnknownName: for an unknown `dtype`.
        """
        return self.make(rng, Size(sequences, length, vocab_size, top_k, dtype))


FAMILIES: Registry[Family] = Registry("input family")


def build(
    name: str,
    seed: int = 0,
    *,
    sequences: int = 4,
    length: int = 8,
    vocab_size: int = 1000,
    top_k: int = 20,
    dtype: str = "fp32",
) -> Batch:
    """The batch of family `name` for `seed`; see `Family.__call__` for the rest.

    Raises:
        UnknownName: for an unknown family or format; the message lists the close names.
    """
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    return FAMILIES[name](
        rng,
        sequences=sequences,
        length=length,
        vocab_size=vocab_size,
        top_k=top_k,
        dtype=dtype,
    )


def _family(
    name: str, description: str, *, neg_inf: bool = False
) -> Callable[[Callable[[Rng, Size], Batch]], Callable[[Rng, Size], Batch]]:
    def register(make: Callable[[Rng, Size], Batch]) -> Callable[[Rng, Size], Batch]:
        FAMILIES.add(name, Family(name, description, make, neg_inf))
        return make

    return register


def _normal(rng: Rng, size: Size, scale: float = 1.0) -> Array:
    return rng.normal(scale=scale, size=(*size.shape, size.vocab_size))


def _log_uniform(rng: Rng, size: Size, low: float, high: float) -> Array:
    """`[B, L, 1]`, log-uniform between `low` and `high`."""
    return np.exp(rng.uniform(np.log(low), np.log(high), size=(*size.shape, 1)))


def _as_stored(logits: Array, size: Size) -> Array:
    """`logits` rounded to the batch's format, so that their ranks are those of the batch."""
    return FORMATS[size.dtype].round(logits)


def _permute(rng: Rng, size: Size, *rows: Array) -> list[Array]:
    """Each row of `rows` `[B, L, V]` with its tokens shuffled, alike in every array."""
    order = np.argsort(rng.random((*size.shape, size.vocab_size)), axis=-1)
    return [np.take_along_axis(row, order, axis=-1) for row in rows]


def _language_model(rng: Rng, size: Size) -> Array:
    """Logits like those of a language model: a few strong tokens over a heavy bulk.

    The bulk is N(0, 1.5^2), so its total is about `log V + 1.1`; between 1 and 8 strong tokens
    stand up to 8 nats above that: from near-certain rows to rows led by the bulk.
    """
    bulk = _normal(rng, size, 1.5)
    strong = np.arange(size.vocab_size) < rng.integers(1, 9, size=(*size.shape, 1))
    height = np.log(size.vocab_size) + rng.uniform(0.0, 8.0, size=(*size.shape, 1))
    spread = rng.exponential(1.5, size=bulk.shape)
    (logits,) = _permute(rng, size, np.where(strong, height - spread, bulk))
    return logits


@_family("peaked", "like a language model: a few strong logits over a heavy bulk, varied mismatch")
def peaked(rng: Rng, size: Size) -> Batch:
    """The common case; logit noise between 0.01 and 1 nat, log-uniform over rows."""
    z = _language_model(rng, size)
    return assemble(rng, size, z, z + _log_uniform(rng, size, 0.01, 1.0) * _normal(rng, size))


@_family("flat", "nearly uniform over the whole vocabulary: the tail carries most of the mass")
def flat(rng: Rng, size: Size) -> Batch:
    """Both policies `softmax(N(0, 0.3^2))`, drawn apart."""
    return assemble(rng, size, _normal(rng, size, 0.3), _normal(rng, size, 0.3))


@_family("zipf", "rank-frequency law with exponent 0.8 to 1.4: mass on every scale")
def zipf(rng: Rng, size: Size) -> Batch:
    """`z_i = -s log(rank_i)` with the ids shuffled; logit noise between 0.05 and 1 nat."""
    exponent = rng.uniform(0.8, 1.4, size=(*size.shape, 1))
    (z,) = _permute(rng, size, -exponent * np.log(np.arange(1, size.vocab_size + 1)))
    return assemble(rng, size, z, z + _log_uniform(rng, size, 0.05, 1.0) * _normal(rng, size))


@_family("near-one-hot", "pi_k between 1 - 1e-2 and 1 - 1e-9: cancellation in 1 - pi_k and in C")
def near_one_hot(rng: Rng, size: Size) -> Batch:
    """One token holds all but `eps` of both policies, `eps` log-uniform.

    The sampled token is the top one; on every fifth position it is drawn from the others.
    """
    eps = _log_uniform(rng, size, 1e-9, 1e-2)
    others = np.arange(size.vocab_size) > 0
    rest = _normal(rng, size, 2.0)
    z = _one_hot(rest, others, eps)
    moved = np.clip(eps * _log_uniform(rng, size, 0.2, 5.0), 0, 0.5)
    y = _one_hot(rest + _normal(rng, size, 0.5), others, moved)

    def sampler(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
        rare = draw_ranks(1, None)(rng, logits, order, top_k)
        return np.where(size.index % 5 == 4, rare, order[..., 0])

    return assemble(rng, size, *_permute(rng, size, z, y), sampler=sampler)


def _one_hot(rest: Array, others: BoolArray, eps: Array) -> Array:
    """Logits with probability `eps` spread over `others` as `softmax(rest)`, the rest on token 0.

    The top logit is 0, so that rounding to a narrow format moves the small ones only.
    """
    shares = log_softmax(np.where(others, rest, -np.inf))
    return np.where(others, np.log(eps) - np.log1p(-eps) + shares, 0.0)


@_family(
    "near-equal", "the two policies differ by logit noise of 2^-4 to 2^-17 nats, or not at all"
)
def near_equal(rng: Rng, size: Size) -> Batch:
    """Noise by position: `NEAR_EQUAL_NOISE`.  Noise below a half-ulp of a logit leaves it equal."""
    z = _language_model(rng, size)
    noise = np.asarray(NEAR_EQUAL_NOISE)[size.index % len(NEAR_EQUAL_NOISE)]
    return assemble(rng, size, z, z + noise[..., None] * _normal(rng, size))


@_family("identical", "the same logits, bit by bit, on both sides: D = 0 and C = 0 exactly")
def identical(rng: Rng, size: Size) -> Batch:
    """What an implementation must map to 0 in the full view (a top-K view rounds `1 - sum`)."""
    z = _language_model(rng, size)
    return assemble(rng, size, z, z)


@_family("ties", "logits on a grid of five values: ties at the K-th place, on every format's grid")
def ties(rng: Rng, size: Size) -> Batch:
    """Both policies take logits from {0, 1/2, 1, 3/2, 2}; equal logits rank by rising id."""
    shape = (*size.shape, size.vocab_size)
    z, y = (rng.integers(0, 5, size=shape) / 2.0 for _ in range(2))
    return assemble(rng, size, z, y)


@_family(
    "swapped", "mu is pi with two tokens swapped: pi_j = mu_j exactly on all others (TV kinks)"
)
def swapped(rng: Rng, size: Size) -> Batch:
    """Swapping logits keeps the normalizer, so the ties of total variation are exact.

    Every other position swaps the sampled token; on the others it is one of the tied ones.
    """
    z = _language_model(rng, size)
    z[..., 1] = z[..., 0] - rng.uniform(0.5, 4.0, size=size.shape)
    y = z.copy()
    y[..., 0], y[..., 1] = z[..., 1], z[..., 0]

    def sampler(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
        tied = logits.copy()
        tied[..., :2] = -np.inf
        drawn = draw(rng, tied, order, top_k)
        return np.where(size.index % 2 == 0, size.index // 2 % 2, drawn)

    return assemble(rng, size, z, y, sampler=sampler)


@_family("training-tail", "pi puts 0.2 to 0.7 on one token that mu's top-K list does not hold")
def training_tail(rng: Rng, size: Size) -> Batch:
    """The tail is one token: an aggregated tail is nearly right, a uniform one is wrong."""
    y = _as_stored(_language_model(rng, size), size)
    z = y + 0.3 * _normal(rng, size)
    place = rng.integers(size.kept + 1, size.vocab_size, size=size.shape)[..., None]
    token = np.take_along_axis(by_rank(y), place, axis=-1)
    rest = z.copy()
    np.put_along_axis(rest, token, -np.inf, axis=-1)
    total = rest.max(axis=-1, keepdims=True) - log_softmax(rest).max(axis=-1, keepdims=True)
    share = rng.uniform(0.2, 0.7, size=token.shape)
    np.put_along_axis(z, token, total + np.log(share) - np.log1p(-share), axis=-1)
    return assemble(rng, size, z, y)


@_family("behavior-tail", "mu has more strong tokens than K: its tail holds tokens as heavy as S's")
def behavior_tail(rng: Rng, size: Size) -> Batch:
    """`K + m` strong tokens of near-equal mass in mu (m = 1 .. K, as V allows); pi keeps half."""
    extra = rng.integers(1, min(size.kept, size.vocab_size - 1 - size.kept) + 1, size=size.shape)
    strong = np.arange(size.vocab_size) < size.kept + extra[..., None]
    height = np.log(size.vocab_size) + 2.0
    y = np.where(strong, height + 0.1 * _normal(rng, size), _normal(rng, size))
    gone = strong & (rng.random(y.shape) < 0.5)
    z = np.where(gone, y - rng.uniform(0.5, 4.0, size=y.shape), y + 0.2 * _normal(rng, size))
    return assemble(rng, size, *_permute(rng, size, z, y))


@_family("training-no-tail", "pi has left mu's tail: pi_T is 1e-12 to 1e-30, mu_T is not small")
def training_no_tail(rng: Rng, size: Size) -> Batch:
    """A clamp of the tail's log-mass, or `1 - sum` in place of its own sum, changes D."""
    y = _as_stored(_language_model(rng, size), size)
    listed = np.zeros(y.shape, dtype=bool)
    np.put_along_axis(listed, by_rank(y)[..., : size.kept], True, axis=-1)
    drop = rng.uniform(28.0, 68.0, size=(*size.shape, 1))
    z = np.where(listed, y + 0.2 * _normal(rng, size), y - drop)
    return assemble(rng, size, z, y, sampler=draw_ranks(0, size.kept))


@_family("offset", "a large common offset on all logits (1e4 where the format allows)")
def offset(rng: Rng, size: Size) -> Batch:
    """Shifting logits changes no probability; `exp(z)` overflows, `lse - z` cancels.

    The offset is `0.75 * 2^p`, at most 1e4 (p significand bits), so that its last place is at
    most one nat and the rows keep their shape.
    """
    shift = min(1e4, 0.75 * 2.0 ** FORMATS[size.dtype].significand_bits)
    z = _language_model(rng, size)
    return assemble(rng, size, z + shift, z + shift + 0.5 * _normal(rng, size))


@_family("tiny-scale", "logits of size 1e-6: both policies uniform to six digits")
def tiny_scale(rng: Rng, size: Size) -> Batch:
    """D is about 1e-12 and every token's C is tiny: only rounding speaks."""
    return assemble(rng, size, _normal(rng, size, 1e-6), _normal(rng, size, 1e-6))


@_family("huge-scale", "logits up to 80 either way: probabilities underflow in fp32")
def huge_scale(rng: Rng, size: Size) -> Batch:
    """On every fourth position the sampled token is the runner-up, far below the top."""
    z = rng.uniform(-80.0, 80.0, size=(*size.shape, size.vocab_size))

    def sampler(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
        return np.where(size.index % 4 == 3, order[..., 1], draw(rng, logits, order, top_k))

    return assemble(rng, size, z, z + _normal(rng, size, 2.0), sampler=sampler)


@_family("far-apart", "policies that hardly overlap: D of several nats, large ratios either way")
def far_apart(rng: Rng, size: Size) -> Batch:
    """Each policy has its own strong tokens."""
    return assemble(rng, size, _language_model(rng, size), _language_model(rng, size))


@_family("temperature", "mu is pi at a temperature of 0.6 to 1.4: one side scaled, the other not")
def temperature(rng: Rng, size: Size) -> Batch:
    """`y = z / T`: the ratio is a smooth function of the probability."""
    z = _language_model(rng, size)
    return assemble(rng, size, z, z / rng.uniform(0.6, 1.4, size=(*size.shape, 1)))


@_family("padded-vocabulary", "-inf columns at the end on both sides: V counts them", neg_inf=True)
def padded_vocabulary(rng: Rng, size: Size) -> Batch:
    """`max(1, V // 16)` columns belong to no token: probability zero under both policies."""
    z = _language_model(rng, size)
    y = z + 0.5 * _normal(rng, size)
    columns = max(1, size.vocab_size // 16)
    z[..., -columns:] = -np.inf
    y[..., -columns:] = -np.inf
    return assemble(rng, size, z, y)


@_family(
    "top-p-behavior",
    "mu is truncated at top-p 0.8, pi is not: -inf slots in the top-K list, reverse KL infinite",
    neg_inf=True,
)
def top_p_behavior(rng: Rng, size: Size) -> Batch:
    """Identical weights on odd positions: there r is the kept mass and D is minus its log."""
    z = _language_model(rng, size)
    noise = np.where(size.index % 2 == 0, 0.3, 0.0)[..., None]
    y = z + noise * _normal(rng, size)
    return assemble(rng, size, z, np.where(_nucleus(y, 0.8), y, -np.inf))


@_family(
    "top-p-both",
    "both policies restricted to mu's top-p 0.8 support, as they should be",
    neg_inf=True,
)
def top_p_both(rng: Rng, size: Size) -> Batch:
    """Identical weights on odd positions: there r = 1 and D = 0, and nothing is dropped."""
    z = _language_model(rng, size)
    noise = np.where(size.index % 2 == 0, 0.3, 0.0)[..., None]
    y = z + noise * _normal(rng, size)
    support = _nucleus(y, 0.8)
    return assemble(rng, size, np.where(support, z, -np.inf), np.where(support, y, -np.inf))


def _nucleus(logits: Array, p: float) -> BoolArray:
    """The fewest best tokens whose mass reaches `p`."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    mass = np.take_along_axis(np.exp(log_softmax(logits)), order, axis=-1)
    before = np.cumsum(mass, axis=-1) - mass
    keep = np.zeros(logits.shape, dtype=bool)
    np.put_along_axis(keep, order, before < p, axis=-1)
    return keep


@_family(
    "training-neg-inf",
    "-inf on the training side only: pi = 0 where mu > 0, forward KL infinite",
    neg_inf=True,
)
def training_neg_inf(rng: Rng, size: Size) -> Batch:
    """By position modulo 4: the sampled token (mu's best), its second best, part of the tail, all.

    Full-view forward KL is infinite on every row; in a top-K view (K >= 2) it is on kinds 0, 1
    and, unless the stored masses round to 1, 3.
    """
    y = _as_stored(_language_model(rng, size), size)
    z = y + 0.3 * _normal(rng, size)
    kind = (size.index % 4)[..., None]
    rank = np.argsort(by_rank(y), axis=-1)
    last = size.vocab_size - 1
    part = (rank > size.kept) & ((rng.random(y.shape) < 0.3) | (rank == last))
    removed = np.select([kind == 0, kind == 1, kind == 2], [rank == 0, rank == 1, part], False)
    removed |= (kind == 3) & (rank >= size.kept)
    return assemble(rng, size, np.where(removed, -np.inf, z), y, sampler=draw_ranks(0, 1))


@_family("k-one", "K = 1 whatever the caller asks: S is the top token and the sampled one")
def k_one(rng: Rng, size: Size) -> Batch:
    """The smallest list an engine can return."""
    z = _language_model(rng, size)
    return assemble(rng, size, z, z + 0.7 * _normal(rng, size), top_k=1)


@_family("k-almost-all", "K = V - 2 whatever the caller asks: the tail is one token or two")
def k_almost_all(rng: Rng, size: Size) -> Batch:
    """`1 - sum` is all rounding.  Every other sampled token is one of the two not listed."""
    z = _language_model(rng, size)

    def sampler(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
        drawn = draw(rng, logits, order, top_k)
        outside = draw_outside(rng, logits, order, top_k)
        return np.where(size.index % 2 == 0, drawn, outside)

    y = z + 0.7 * _normal(rng, size)
    return assemble(rng, size, z, y, sampler=sampler, top_k=size.vocab_size - 2)


def _with_sampler(rng: Rng, size: Size, sampler: Sampler) -> Batch:
    z = _language_model(rng, size)
    return assemble(rng, size, z, z + 0.7 * _normal(rng, size), sampler=sampler)


@_family("sampled-outside", "the sampled token is never in the top-K list: it is a cell of its own")
def sampled_outside(rng: Rng, size: Size) -> Batch:
    """Drawn from the behavior policy restricted to ranks K and beyond."""
    return _with_sampler(rng, size, draw_outside)


@_family("sampled-inside", "the sampled token is always in the top-K list: |S| = K")
def sampled_inside(rng: Rng, size: Size) -> Batch:
    """Drawn from the behavior policy restricted to the top K."""
    return _with_sampler(rng, size, draw_ranks(0, size.kept))


@_family("sampled-last", "the sampled token is the K-th of the list, or the first one not in it")
def sampled_last(rng: Rng, size: Size) -> Batch:
    """Even positions take rank K - 1, odd ones rank K (from 0): off-by-one in the support."""

    def sampler(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
        return np.where(size.index % 2 == 0, order[..., top_k - 1], order[..., top_k])

    return _with_sampler(rng, size, sampler)


@_family(
    "dyadic",
    "uniform on 1, 2 or 4 tokens, -inf elsewhere: total variation is 1/4, 1/2 or 3/4 exactly",
    neg_inf=True,
)
def dyadic(rng: Rng, size: Size) -> Batch:
    """Rows of `DYADIC`: with equal logits the probabilities are exact in every format.

    So `D = delta` can be met exactly, in the full view (stored log-probs of 1/2 are rounded).
    The sampled token is one of the shared ones.  Forward KL is infinite where pi is zero on a
    token of mu, reverse KL the other way round; squared Hellinger is finite everywhere.
    """
    mu, pi, shared = (np.asarray(DYADIC)[size.index % len(DYADIC), i, None] for i in range(3))
    place = np.arange(size.vocab_size)
    y = np.where(place < mu, 0.0, -np.inf)
    z = np.where((place >= mu - shared) & (place < mu - shared + pi), 0.0, -np.inf)

    def sampler(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
        both = np.where(np.isneginf(z), -np.inf, logits)
        return draw(rng, both, order, top_k)

    return assemble(rng, size, z, y, sampler=sampler)


@_family("direction-conflict", "far outside the trust region, and the ratio points the wrong way")
def direction_conflict(rng: Rng, size: Size) -> Batch:
    """Even positions: pi_k a little above mu_k, but another token has run away, so C < 0.

    Odd positions: pi_k a little below mu_k, the other token has fallen behind, so C > 0.
    """
    up = (size.index % 2 == 0)[..., None]
    own = rng.uniform(0.1, 0.15, size=up.shape)
    gap = rng.uniform(0.005, 0.02, size=up.shape)
    high, low = rng.uniform(0.6, 0.7, size=up.shape), rng.uniform(0.15, 0.25, size=up.shape)
    z = _three_parts(rng, size, np.where(up, own + gap, own - gap), np.where(up, high, 0.4))
    y = _three_parts(rng, size, own, np.where(up, low, high + 0.05))
    return assemble(rng, size, z, y, sampler=lambda *_: np.zeros(size.shape, dtype=np.int64))


def _three_parts(rng: Rng, size: Size, first: Array, second: Array) -> Array:
    """Log-probs: `first` on token 0, `second` on token 1, the rest spread over all others."""
    place = np.arange(size.vocab_size)
    rest = log_softmax(np.where(place < 2, -np.inf, _normal(rng, size, 0.5)))
    spread = np.log1p(-(first + second)) + rest
    return np.where(place == 0, np.log(first), np.where(place == 1, np.log(second), spread))


@_family("tail-conflict", "a flat heavy tail: the aggregated estimator has the wrong sign (V >> K)")
def tail_conflict(rng: Rng, size: Size) -> Batch:
    """Local term and tail term pull apart: `|mu_T - pi_T| = 0.3`, `|pi_k - mu_k|` about 0.05.

    With `x = pi_T^2` the tail term wins, with the true `x` (about `pi_T^2 / V`) the local one.
    Needs a few listed tokens and many others; small sizes get rows of the same build.
    """
    place = np.arange(size.vocab_size)
    up = (size.index % 2 == 0)[..., None]
    low, high = rng.uniform(0.35, 0.4, size=up.shape), rng.uniform(0.65, 0.7, size=up.shape)
    own = rng.uniform(0.03, 0.05, size=up.shape)
    gap = rng.uniform(0.04, 0.06, size=up.shape)
    head = (place > 0) & (place < max(2, size.kept))
    tail = place >= max(2, size.kept)

    def policy(own_mass: Array, tail_mass: Array) -> Array:
        noise = _normal(rng, size, 0.1)
        listed = np.log1p(-own_mass - tail_mass) + log_softmax(np.where(head, noise, -np.inf))
        others = np.log(tail_mass) + log_softmax(np.where(tail, noise, -np.inf))
        return np.where(place == 0, np.log(own_mass), np.where(head, listed, others))

    z = policy(np.where(up, own, own + gap), np.where(up, low, high))
    y = policy(np.where(up, own + gap, own), np.where(up, high, low))
    return assemble(rng, size, z, y, sampler=lambda *_: np.zeros(size.shape, dtype=np.int64))


@_family("near-threshold", "forward KL within 1e-1 to 1e-4 of 0.15, above and below")
def near_threshold(rng: Rng, size: Size) -> Batch:
    """`z = y + t n` with `t` found by bisection: full-view KL on even positions, top-K on odd.

    The top-K cells are the list and the tail (the sampled token is drawn from the list).  Rounding
    the logits to a narrow format moves D off its mark.
    """
    y = _as_stored(_language_model(rng, size), size)
    noise = _normal(rng, size)
    gap = _log_uniform(rng, size, 1e-4, 1e-1) * np.where(rng.random((*size.shape, 1)) < 0.5, -1, 1)
    goal = NEAR_THRESHOLD * (1.0 + gap)
    order = by_rank(y)[..., : size.kept]
    full = (size.index % 2 == 0)[..., None]

    def divergence(t: Array) -> Array:
        log_mu, log_pi = log_softmax(y), log_softmax(y + t * noise)
        whole = (np.exp(log_mu) * (log_mu - log_pi)).sum(axis=-1, keepdims=True)
        m, p = (np.exp(np.take_along_axis(row, order, -1)) for row in (log_mu, log_pi))
        tails = [
            np.exp(row).sum(-1, keepdims=True) - c.sum(-1, keepdims=True)
            for row, c in ((log_mu, m), (log_pi, p))
        ]
        m, p = np.concatenate([m, tails[0]], axis=-1), np.concatenate([p, tails[1]], axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            cells = np.where(m > 0, m * np.log(m / p), 0.0).sum(axis=-1, keepdims=True)
        result: Array = np.where(full, whole, cells)
        return result

    low, high = np.zeros((*size.shape, 1)), np.full((*size.shape, 1), 64.0)
    for _ in range(48):
        middle = (low + high) / 2
        above = divergence(middle) > goal
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return assemble(rng, size, y + low * noise, y, sampler=draw_ranks(0, size.kept))


@_family("graded", "near-equal policies, logit differences 2^-s with s spread over 36 octaves")
def graded(rng: Rng, size: Size) -> Batch:
    """C is proportional to the difference, so its sign can be resolved down to a known precision.

    A difference below the last place of a logit cannot be stored, so it is put where logits are
    exactly 0: a third of the tokens have behavior logit 0 and training logit `2^-s n`, n normal
    (exact down to the smallest normal number of the format: 2^-126 in fp32 and bf16, but 2^-14 in
    fp16, where the finest octaves flush to C = 0).  The other tokens have the same logits, on a
    grid of halves, on both sides.  The sampled token is one of the zero ones.
    """
    place = np.arange(size.vocab_size)
    zero = place < max(2, size.vocab_size // 3)
    grid = rng.integers(-4, 3, size=(*size.shape, size.vocab_size)) / 2.0
    total = size.index.size
    octave = (rng.permutation(total) + rng.random(total)) * (GRADED_OCTAVES / total)
    scale = np.exp2(-octave).reshape((*size.shape, 1))
    z = np.where(zero, scale * _normal(rng, size), grid)
    y = np.where(zero, 0.0, grid)

    def sampler(rng: Rng, logits: Array, order: IntArray, top_k: int) -> IntArray:
        return draw(rng, np.where(zero, logits, -np.inf), order, top_k)

    return assemble(rng, size, z, y, sampler=sampler)


@_family("padding", "mostly padding: an empty sequence, holes inside responses, NaN on all of it")
def mostly_padding(rng: Rng, size: Size) -> Batch:
    """The last of several sequences is empty; a third of the other positions are masked out."""
    mask = padding(rng, size) & (rng.random(size.shape) < 0.67)
    if size.sequences > 1:
        mask[-1] = False
    mask[0, 0] = True
    z = _language_model(rng, size)
    return assemble(rng, size, z, z + 0.5 * _normal(rng, size), mask=mask)
