"""From the stored bits of `Rows` to enclosed probabilities on the cells of a partition.

A partition's cells are every token (``full``), the retained support plus one tail cell
(``topk``), or the sampled token plus the rest (``binary``).  Cells whose probability is exactly
zero are told apart from cells whose enclosure merely touches zero: the first come from -inf or
from a retained mass certified to reach one, the second are settled by more precision.

Which stored numbers are used: the training policy comes from `logits`, or from `logprobs` where
there are none (binary only).  The behavior policy comes from `behavior_logits` in the full
partition and from `topk_logprobs` and `behavior_logprobs` in the others; a binary partition
without `behavior_logprobs` falls back on `behavior_logits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import InputError, IntArray, Rows
from pdverify.formats import FORMATS
from pdverify.oracle.balls import Ball, BoolArray, FloatArray
from pdverify.rules import Support


@dataclass(frozen=True)
class Cells:
    """Both policies on the `n` cells of a partition, for `T` rows.

    Attributes:
        mu, pi: `[T, n]`, the probabilities.  A tail is the last cell.
        gap: `[T, n]`, log pi - log mu; 0 where either is exactly zero.
        no_mu, no_pi: `[T, n]`, True where the probability is exactly zero.
        sampled: `[T]`, the cell of the sampled token.
        excess: `[T]`, sum mu - sum pi, or None where it is zero by construction.
        identical: `[T]`, True where mu = pi in every cell, exactly.
    """

    mu: Ball
    pi: Ball
    gap: Ball
    no_mu: BoolArray
    no_pi: BoolArray
    sampled: IntArray
    excess: Ball | None
    identical: BoolArray

    def at_sampled(self, x: Ball) -> Ball:
        """The sampled token's element of each row of `x`."""
        return x[np.arange(len(self.sampled)), self.sampled]

    def without_sampled(self, x: Ball) -> Ball:
        """`x` with the sampled token's element set to zero."""
        return x.put((np.arange(len(self.sampled)), self.sampled), 0.0)

    def sampled_has_no_pi(self) -> BoolArray:
        return np.asarray(self.no_pi[np.arange(len(self.sampled)), self.sampled])


@dataclass(frozen=True)
class TailMotion:
    """How the training policy's own tail moves.

    Attributes:
        rate: `[T]`, w = x / pi_T with x the collision mass of the tail; 0 for an empty tail.
        spread: `[T]`, variance of pi_i over the tail under pi given the tail; None where the
            estimator has one value of pi over the tail, so that it is zero.
    """

    rate: Ball
    spread: Ball | None


class Softmax:
    """A policy given by logits `[T, V]`: unnormalized weights exp(z - max z) and their total."""

    def __init__(self, kind: type[Ball], logits: NDArray[np.floating[Any]]) -> None:
        z = logits.astype(np.float64)
        top = z.max(axis=-1)
        self.zero = np.isneginf(z)
        self.any_zero = bool(self.zero.any())
        if self.any_zero:
            z = np.where(self.zero, top[:, None], z)
        self.shifted = kind.exact(z) - kind.exact(top)[:, None]
        weight = self.shifted.exp()
        self.weight = weight.put(self.zero, 0.0) if self.any_zero else weight
        self.total = self.weight.sum()
        self.log_total = self.total.log()

    def probabilities(self) -> Ball:
        return self.weight * self.total.reciprocal()[:, None]


@dataclass(frozen=True)
class Slots:
    """The retained support of each row, padded to `[T, n]` (`member` is False on padding).

    `logprobs` are the stored behavior log-probs (0 on padding), `place` is half their last
    place: how far the number that was stored may lie from the one that was meant.
    """

    ids: IntArray
    member: BoolArray
    logprobs: FloatArray
    place: FloatArray
    sampled: IntArray


def half_last_place(stored: NDArray[np.floating[Any]], name: str) -> FloatArray:
    """Half the last place of each stored number in the number format `name`; 0 for 0 and -inf.

    An exact 0.0 is taken as exact: a half-place of the smallest number moves nothing.
    """
    form = FORMATS[name]
    y = np.where(np.isfinite(stored), stored, 0.0).astype(np.float64)
    _, exponent = np.frexp(y)
    half = np.ldexp(0.5, exponent - form.significand_bits)
    smallest = form.min_normal * form.unit_roundoff
    return np.where(y == 0, 0.0, np.maximum(half, smallest))


def need(rows: Rows, *names: str) -> None:
    """Raise `InputError` unless `rows` carries the named columns."""
    for name in names:
        if getattr(rows, name) is None:
            raise InputError(name, None, None, "this partition or rule needs it")


def topk_slots(rows: Rows, support: Support) -> Slots:
    """The top-K list plus the sampled token; -inf entries leave for the tail.

    Raises:
        InputError: ``replace`` and a sampled token that is not in the list.
    """
    need(rows, "topk_ids", "topk_logprobs", "behavior_logprobs")
    assert rows.topk_ids is not None
    assert rows.topk_logprobs is not None
    assert rows.behavior_logprobs is not None
    ids, y = rows.topk_ids, rows.topk_logprobs.astype(np.float64)
    own = ids == rows.tokens[:, None]
    listed = own.any(axis=-1)
    sampled = np.where(listed, own.argmax(axis=-1), ids.shape[-1])
    member = np.isfinite(y)
    if support == "append":
        ids = np.concatenate([ids, rows.tokens[:, None]], axis=-1)
        y = np.concatenate([y, rows.behavior_logprobs.astype(np.float64)[:, None]], axis=-1)
        member = np.concatenate([member, ~listed[:, None]], axis=-1)
    elif not listed.all():
        row = int(np.argmin(listed))
        raise InputError(
            "topk_ids", (row,), int(rows.tokens[row]), "the sampled token is not in the list"
        )
    y = np.where(member, y, 0.0)
    return Slots(ids, member, y, half_last_place(y, rows.logprob_dtype), sampled)


def sampled_slots(rows: Rows, stored: NDArray[np.floating[Any]] | None) -> Slots:
    """The sampled token as the only retained one (the binary partition), with its log-prob."""
    y = np.zeros(len(rows)) if stored is None else stored.astype(np.float64)
    return Slots(
        ids=rows.tokens[:, None],
        member=np.ones((len(rows), 1), dtype=bool),
        logprobs=y[:, None],
        place=half_last_place(y[:, None], rows.logprob_dtype),
        sampled=np.zeros(len(rows), dtype=np.int64),
    )


@dataclass(frozen=True)
class Coarse:
    """One policy on retained cells and the tail.

    `p`, `log_p` and `zero` are `[T, n + 1]`, the tail last (`log_p` means nothing where `zero`
    is True); `excess` is `[T]`, sum p - 1, or None where it is zero by construction.
    """

    p: Ball
    log_p: Ball
    zero: BoolArray
    excess: Ball | None


def coarse_softmax(policy: Softmax, slots: Slots) -> tuple[Coarse, TailMotion]:
    """A policy given by logits on retained cells and the tail; its tail's true motion.

    The tail's mass is summed over the tokens in it, never taken as 1 - sum.
    """
    row = np.arange(len(slots.sampled))
    scale = policy.total.reciprocal()
    pick = (row[:, None], slots.ids)
    gone = policy.zero[pick] | ~slots.member
    p = (policy.weight[pick] * scale[:, None]).put(gone, 0.0)
    log_p = (policy.shifted[pick] - policy.log_total[:, None]).put(gone, 0.0)
    inside = np.nonzero(slots.member)
    rest = policy.weight.put((inside[0], slots.ids[inside]), 0.0)
    empty = (~policy.zero).sum(axis=-1) == (slots.member & ~policy.zero[pick]).sum(axis=-1)
    mass = rest.sum()
    squares = rest.square()
    safe = mass.put(empty, 1.0)
    rate = (squares.sum() / safe * scale).put(empty, 0.0)
    cubes = ((squares * rest).sum() / safe * scale.square()).put(empty, 0.0)
    tail = (mass * scale).put(empty, 0.0)
    log_tail = (safe.log() - policy.log_total).put(empty, 0.0)
    zero = np.concatenate([gone, empty[:, None]], axis=-1)
    motion = TailMotion(rate, (cubes - rate.square()).nonnegative_part())
    return Coarse(p.append(tail), log_p.append(log_tail), zero, None), motion


def remainder(slots: Slots, logprobs: Ball) -> Ball:
    """1 - sum exp(log-probs) over the retained cells, without subtracting the largest from 1."""
    row = np.arange(len(slots.sampled))
    top = np.where(slots.member, slots.logprobs, -np.inf).argmax(axis=-1)
    others = logprobs.exp().put(~slots.member, 0.0).put((row, top), 0.0)
    return -logprobs[row, top].expm1() - others.sum()


def coarse_logprobs(slots: Slots, no_tail: BoolArray, logprobs: Ball, rest: Ball) -> Coarse:
    """A policy given by log-probs `[T, n]` whose tail cell holds the positive part of `rest`.

    `rest` is `remainder(slots, logprobs)`, or, for one end of a box of log-probs, what its other
    end leaves.  A tail without tokens (`no_tail`) has no mass.
    """
    p = logprobs.exp().put(~slots.member, 0.0)
    own = remainder(slots, logprobs)
    zero_tail = rest.nonpositive() | no_tail
    tail = rest.nonnegative_part().put(zero_tail, 0.0)
    log_tail = tail.put(zero_tail, 1.0).log()
    excess = (-own).nonnegative_part().put(no_tail, -own[no_tail])
    zero = np.concatenate([~slots.member, zero_tail[:, None]], axis=-1)
    return Coarse(p.append(tail), logprobs.append(log_tail), zero, excess)


def join(mu: Coarse, pi: Coarse, sampled: IntArray) -> Cells:
    """Two policies on the same cells."""
    absent = mu.zero | pi.zero
    excess = mu.excess
    if pi.excess is not None:
        excess = -pi.excess if excess is None else excess - pi.excess
    return Cells(
        mu=mu.p,
        pi=pi.p,
        gap=(pi.log_p - mu.log_p).put(absent, 0.0),
        no_mu=mu.zero,
        no_pi=pi.zero,
        sampled=sampled,
        excess=excess,
        identical=np.zeros(len(sampled), dtype=bool),
    )


def full_cells(mu: Softmax, pi: Softmax, rows: Rows, *, seek_ties: bool) -> Cells:
    """Every token a cell, both policies from logits.

    Policies whose logits differ by one exact constant are identical.  With `seek_ties`, policies
    whose SORTED logits do have equal normalizers, so that tokens with equal logits tie exactly.
    """
    assert rows.logits is not None
    assert rows.behavior_logits is not None
    offset = pi.log_total - mu.log_total
    identical = _constant_shift(rows.logits, rows.behavior_logits)
    equal = identical
    if seek_ties:
        equal = equal | _constant_shift(
            np.sort(rows.logits, axis=-1), np.sort(rows.behavior_logits, axis=-1)
        )
    gap = pi.shifted - mu.shifted - offset.put(equal, 0.0)[:, None]
    if pi.any_zero or mu.any_zero:
        gap = gap.put(mu.zero | pi.zero, 0.0)
    if identical.any():
        gap = gap.put(identical, 0.0)
    return Cells(
        mu=mu.probabilities(),
        pi=pi.probabilities(),
        gap=gap,
        no_mu=mu.zero,
        no_pi=pi.zero,
        sampled=rows.tokens,
        excess=None,
        identical=identical,
    )


def _constant_shift(
    a: NDArray[np.floating[Any]], b: NDArray[np.floating[Any]], prefix: int = 16
) -> BoolArray:
    """`[T]`, True where a - b is one constant in exact arithmetic (-inf at the same places)."""
    if a.shape[-1] > prefix:
        result = _constant_shift(a[:, :prefix], b[:, :prefix], prefix)
        rows = np.nonzero(result)[0]
        result[rows] = _constant_shift(a[rows], b[rows], a.shape[-1])
        return result
    x, y = a.astype(np.float64), b.astype(np.float64)
    absent = np.isneginf(x)
    same_support = (absent == np.isneginf(y)).all(axis=-1)
    some = ~absent & ~np.isneginf(y)
    x, y = np.where(some, x, 0.0), np.where(some, y, 0.0)
    difference = x - y
    part = x - difference
    error = (x - (difference + part)) + (part - y)
    first = np.take_along_axis(difference, some.argmax(axis=-1)[:, None], axis=-1)
    constant = (difference == first) & (error == 0)
    return np.asarray(same_support & (constant | ~some).all(axis=-1))
