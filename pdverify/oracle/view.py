"""Divergences, coefficients and variances of one block of rows, over either arithmetic.

The coefficient is taken in its complement form, in which nothing is subtracted from 1.  With
h_j = pi_j dD/dpi_j (centered), a_j = pi_j on a token's cell and w on the tail's,
eps = sum_{j != k} pi_j and q = sum_{j != k} pi_j a_j:

    C = h_k (eps^2 + q) - sum_{j != k} h_j (a_j + pi_k eps - q)

Input noise.  Where a policy is known by stored log-probs, `noise` asks for enclosures that hold
at every point of the box in which each of them moves by half its last place.  A cell's share of
D is convex in mu and its moment monotone, so the ends of the box give their ranges; a mean-value
form, which knows that the tail absorbs what the retained cells give up, tightens the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from pdverify.batch import InputError, Rows
from pdverify.oracle.balls import Ball, BoolArray
from pdverify.oracle.cells import (
    Cells,
    Coarse,
    Slots,
    Softmax,
    TailMotion,
    coarse_logprobs,
    coarse_softmax,
    full_cells,
    join,
    need,
    remainder,
    sampled_slots,
    topk_slots,
)
from pdverify.oracle.divergences import ORACLE_DIVERGENCES
from pdverify.rules import Partition, Support, Tail

P = ParamSpec("P")
R = TypeVar("R")


def _memo(method: Callable[Concatenate[View, P], R]) -> Callable[Concatenate[View, P], R]:
    """Compute once per view and arguments."""

    @wraps(method)
    def wrapper(self: View, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (method.__name__, *args, *sorted(kwargs.items()))
        if key not in self.memory:
            self.memory[key] = method(self, *args, **kwargs)
        return self.memory[key]  # type: ignore[return-value]

    return wrapper


@dataclass(frozen=True)
class Quantity:
    """A ball per row, and where the quantity is infinite (there the ball means nothing).

    `scale` bounds the sum of the magnitudes of the terms a coefficient was summed from.
    """

    ball: Ball
    infinite: BoolArray
    scale: Ball | None = None


class View:
    """What follows from one block of rows in one arithmetic; every piece is computed once."""

    def __init__(self, kind: type[Ball], rows: Rows, support: Support, *, seek_ties: bool) -> None:
        self.kind, self.rows, self.support, self.seek_ties = kind, rows, support, seek_ties
        self.memory: dict[tuple[object, ...], object] = {}

    @cached_property
    def training(self) -> Softmax | None:
        return None if self.rows.logits is None else Softmax(self.kind, self.rows.logits)

    def behavior(self) -> Softmax:
        need(self.rows, "behavior_logits")
        assert self.rows.behavior_logits is not None
        return Softmax(self.kind, self.rows.behavior_logits)

    def noisy(self, partition: Partition) -> bool:
        """Whether any stored log-prob enters this partition."""
        stored = self.rows.behavior_logprobs is not None or self.rows.logits is None
        return partition != "full" and stored

    @_memo
    def slots(self, partition: Partition) -> Slots:
        if partition == "topk":
            need(self.rows, "logits")
            return topk_slots(self.rows, self.support)
        return sampled_slots(self.rows, self.rows.behavior_logprobs)

    @_memo
    def cells(self, partition: Partition) -> Cells:
        """Both policies for exactly the stored bits."""
        if partition == "full":
            need(self.rows, "logits", "behavior_logits")
            assert self.training is not None
            return full_cells(self.behavior(), self.training, self.rows, seek_ties=self.seek_ties)
        pi = self._training(partition, 0)
        return join(self._behavior(partition, 0), pi, self.slots(partition).sampled)

    @_memo
    def ends(self, partition: Partition) -> tuple[Cells, Cells]:
        """The ends of the box of stored log-probs: the lower one in mu first.

        In the binary partition, corners: (mu_k low, pi_k high) and (mu_k high, pi_k low).
        In the top-K partition each cell's mass at its own lower and upper end.
        """
        sampled = self.slots(partition).sampled
        low, high = (
            join(self._behavior(partition, side), self._training(partition, -side), sampled)
            for side in (-1, 1)
        )
        return low, high

    def _no_tail(self, slots: Slots) -> BoolArray:
        return np.asarray(slots.member.sum(axis=-1) == self.rows.vocab_size)

    @_memo
    def _coarse_training(self, partition: Partition) -> tuple[Coarse, TailMotion]:
        assert self.training is not None
        return coarse_softmax(self.training, self.slots(partition))

    def _training(self, partition: Partition, side: int) -> Coarse:
        if self.training is not None:
            return self._coarse_training(partition)[0]
        need(self.rows, "logprobs")
        return self._from_logprobs(sampled_slots(self.rows, self.rows.logprobs), side, "binary")

    def _behavior(self, partition: Partition, side: int) -> Coarse:
        if self.rows.behavior_logprobs is None:
            return coarse_softmax(self.behavior(), self.slots(partition))[0]
        return self._from_logprobs(self.slots(partition), side, partition)

    def _from_logprobs(self, slots: Slots, side: int, partition: Partition) -> Coarse:
        """Stored log-probs moved by `side` half last places.

        In the top-K partition the tail moves the same way, since its mass is free of each cell's.
        """
        stored, no_tail = self.kind.exact(slots.logprobs), self._no_tail(slots)
        if side == 0:
            return coarse_logprobs(slots, no_tail, stored, remainder(slots, stored))
        place = self.kind.exact(side * slots.place)
        moved = stored + place
        if partition == "binary":
            return coarse_logprobs(slots, no_tail, moved, remainder(slots, moved))
        rest = remainder(slots, stored - place)
        if side < 0:
            rest = rest.put(~rest.positive(), 0.0)
        return coarse_logprobs(slots, no_tail, moved, rest)

    @_memo
    def tail_motion(self, partition: Partition, tail: Tail | None) -> TailMotion | None:
        """The tail's rate w under an estimator (by default the true one where only the sampled
        token is retained: there it does not change the sign); None in the full partition."""
        if partition == "full":
            return None
        need(self.rows, "logits")
        coarse, true_motion = self._coarse_training(partition)
        if tail == "exact" or (tail is None and partition == "binary"):
            return true_motion
        mass = coarse.p[:, -1]
        if tail == "aggregated":
            return TailMotion(mass, None)
        if tail != "uniform":
            raise InputError("tail", None, tail, "this partition needs one tail estimator")
        count = self.rows.vocab_size - self.slots(partition).member.sum(axis=-1)
        return TailMotion(mass / self.kind.exact(np.maximum(count, 1)), None)

    @_memo
    def _rates(self, partition: Partition, tail: Tail | None) -> Ball:
        """a_j: `[T, n]`, pi_j on tokens and w on the tail."""
        pi, motion = self.cells(partition).pi, self.tail_motion(partition, tail)
        return pi if motion is None else pi[:, :-1].append(motion.rate)

    @_memo
    def _weights(self, partition: Partition, tail: Tail | None) -> Ball:
        """The coefficient is the sum of these `[T, n]` weights times the moments h."""
        cells, rates = self.cells(partition), self._rates(partition, tail)
        others = cells.without_sampled(cells.pi)
        eps = others.sum()
        q = (others * rates).sum()
        shared = cells.at_sampled(cells.pi) * eps - q
        row = np.arange(len(cells.sampled))
        return -(rates + shared[:, None]).put((row, cells.sampled), -(eps.square() + q))

    def _shares(self, name: str, partition: Partition, end: int | None) -> Quantity:
        """Each cell's share F of the divergence; `end` picks an end of the box."""
        entry, cells = ORACLE_DIVERGENCES[name], self._at(partition, end)
        share = entry.cell(cells.mu, cells.pi, cells.gap)
        share = _limits(share, cells.no_mu, entry.no_mu, cells.pi)
        share = _limits(share, cells.no_pi, entry.no_pi, cells.mu)
        return Quantity(share, _infinite(cells, entry.no_mu, entry.no_pi))

    def _moments(self, name: str, partition: Partition, end: int | None) -> Quantity:
        """Each cell's moment h."""
        entry, cells = ORACLE_DIVERGENCES[name], self._at(partition, end)
        moment = entry.moment(cells.mu, cells.pi, cells.gap)
        moment = _limits(moment, cells.no_mu, entry.no_mu, cells.pi)
        moment = _limits(moment, cells.no_pi, entry.moment_no_pi, cells.mu)
        return Quantity(moment, _infinite(cells, entry.no_mu, entry.moment_no_pi))

    def _at(self, partition: Partition, end: int | None) -> Cells:
        return self.cells(partition) if end is None else self.ends(partition)[end]

    @_memo
    def divergence(self, name: str, partition: Partition, noise: bool = False) -> Quantity:
        """D, nats or probability."""
        if noise and self.noisy(partition):
            return self._noisy_divergence(name, partition)
        return self._point_divergence(name, partition, None)

    def _point_divergence(self, name: str, partition: Partition, end: int | None) -> Quantity:
        shares, cells = self._shares(name, partition, end), self._at(partition, end)
        total = shares.ball.sum()
        centering = ORACLE_DIVERGENCES[name].centering
        if cells.excess is not None and centering:
            total = total + cells.excess * float(centering)
        return Quantity(total.put(cells.identical, 0.0), shares.infinite)

    def _noisy_divergence(self, name: str, partition: Partition) -> Quantity:
        low, high = (self._shares(name, partition, end) for end in (0, 1))
        ends = self.ends(partition)
        crossing = ~_same_side(*ends)
        exact = self._point_divergence(name, partition, None)
        zero = self.kind.exact(np.zeros(()))
        if partition == "binary":
            crossing = np.asarray(crossing.any(axis=-1))
            total = self._point_divergence(name, partition, 0).ball.hull(
                self._point_divergence(name, partition, 1).ball
            )
            total = total.put(crossing, total[crossing].hull(zero))
        else:
            share = low.ball.hull(high.ball)
            share = share.put(crossing, share[crossing].hull(zero))
            total = share.sum()
            centering = ORACLE_DIVERGENCES[name].centering
            if centering:
                assert ends[0].excess is not None
                assert ends[1].excess is not None
                total = total + ends[0].excess.hull(ends[1].excess) * float(centering)
            slope = self._mean_value(partition, ORACLE_DIVERGENCES[name].cell_slope, None)
            total = total.tighter(exact.ball + slope)
        unknown = (low.infinite | high.infinite) & ~exact.infinite
        return Quantity(total.put(unknown, np.nan), exact.infinite)

    @_memo
    def coefficient(
        self, name: str, partition: Partition, tail: Tail | None, noise: bool = False
    ) -> Quantity:
        """C, the rate of D under the softmax step e_k - pi."""
        if noise and self.noisy(partition):
            return self._noisy_coefficient(name, partition, tail)
        return self._point_coefficient(name, partition, tail, None)

    def _point_coefficient(
        self, name: str, partition: Partition, tail: Tail | None, end: int | None
    ) -> Quantity:
        moments, cells = self._moments(name, partition, end), self._at(partition, end)
        terms = moments.ball * self._weights(partition, tail)
        total = terms.sum().put(cells.identical, 0.0)
        return Quantity(total, moments.infinite, terms.abs().sum())

    def _noisy_coefficient(self, name: str, partition: Partition, tail: Tail | None) -> Quantity:
        low, high = (self._moments(name, partition, end) for end in (0, 1))
        exact = self._point_coefficient(name, partition, tail, None)
        weights = self._weights(partition, tail)
        if partition == "binary":
            total = self._point_coefficient(name, partition, tail, 0).ball.hull(
                self._point_coefficient(name, partition, tail, 1).ball
            )
        else:
            total = (low.ball.hull(high.ball) * weights).sum()
            slope = ORACLE_DIVERGENCES[name].moment_slope
            if slope is not None:
                total = total.tighter(exact.ball + self._mean_value(partition, slope, weights))
        unknown = (low.infinite | high.infinite) & ~exact.infinite
        return Quantity(total.put(unknown, np.nan), exact.infinite, exact.scale)

    def _mean_value(
        self, partition: Partition, slope: Callable[[Ball], Ball], weights: Ball | None
    ) -> Ball:
        """What a sum of functions of mu_j gains over the box, the tail absorbing the changes.

        sum_{i in S} (s_i - s_T) (mu_i - mu_i at the stored bits), s the (weighted) slopes over
        the box.  Not a number for rows where a cell's slope does not exist or the tail is clipped
        at zero anywhere in the box.
        """
        low, high = self.ends(partition)
        slopes = slope(low.gap).hull(slope(high.gap))
        if weights is not None:
            slopes = slopes * weights
        step = low.mu.hull(high.mu) - self.cells(partition).mu
        change = ((slopes - slopes[:, -1:]) * step)[:, :-1].sum()
        undefined = (low.no_mu != low.no_pi).any(axis=-1) | low.no_mu[:, -1]
        undefined |= (high.no_mu != high.no_pi).any(axis=-1) | high.no_mu[:, -1]
        return change.put(undefined, np.nan)

    @_memo
    def ratio_gap(self, partition: Partition, noise: bool = False) -> Ball:
        """log pi_k - log mu_k; 0 where pi_k is exactly zero."""
        cells = self.cells(partition)
        if noise and self.noisy(partition):
            low, high = self.ends(partition)
            return low.at_sampled(low.gap).hull(high.at_sampled(high.gap))
        return cells.at_sampled(cells.gap)

    @_memo
    def variance(self, partition: Partition, tail: Tail | None, noise: bool = False) -> Ball:
        """Variance of the step on the cells: the second-order coefficient of forward KL.

        Var_pi(u) - mu_T Var_{pi|tail}(u), u_i = 1[i = k] - pi_i, from the differences
        u_k - u_j = eps + a_j.
        """
        cells, rates = self.cells(partition), self._rates(partition, tail)
        others = cells.without_sampled(cells.pi)
        difference = rates + others.sum()[:, None]
        mean = (others * difference).sum()
        total = (others * difference.square()).sum() - mean.square()
        motion = self.tail_motion(partition, tail)
        if motion is None or motion.spread is None:
            return total
        mu = cells.mu[:, -1]
        if noise and self.noisy(partition):
            low, high = self.ends(partition)
            mu = low.mu[:, -1].hull(high.mu[:, -1])
        return total + (cells.pi[:, -1] - mu) * motion.spread


def _limits(x: Ball, absent: BoolArray, limit: Callable[[Ball], Ball] | None, other: Ball) -> Ball:
    """`x` with its limit where a probability is zero (0 where the other one is zero too)."""
    if not absent.any():
        return x
    return x.put(absent, 0.0 if limit is None else limit(other[absent]))


def _infinite(cells: Cells, no_mu: object, no_pi: object) -> BoolArray:
    """`[T]`, where a cell with exactly one zero probability has an infinite limit."""
    infinite = np.zeros(len(cells.sampled), dtype=bool)
    if no_mu is None:
        infinite |= (cells.no_mu & ~cells.no_pi).any(axis=-1)
    if no_pi is None:
        infinite |= (cells.no_pi & ~cells.no_mu).any(axis=-1)
    return infinite


def _same_side(low: Cells, high: Cells) -> BoolArray:
    """`[T, n]`, where pi - mu certainly keeps its sign over the box."""

    def above(cells: Cells) -> BoolArray:
        return cells.gap.positive() | (cells.no_mu & ~cells.no_pi)

    def below(cells: Cells) -> BoolArray:
        return (-cells.gap).positive() | (cells.no_pi & ~cells.no_mu)

    return (above(low) & above(high)) | (below(low) & below(high))
