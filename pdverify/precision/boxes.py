"""Both policies over a box: enclosures that hold at every policy within radii of stored numbers.

A policy is looked at through its cells: tokens, and in a top-K view the tail as one more, whose
logit is the log-sum-exp of its tokens'.  Ends of ranges are float64 results of a few operations
on sums of positive terms; they are widened by `WIDEN`, which covers their rounding many times
over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import InputError, Rows
from pdverify.definitions.cells import retained_support
from pdverify.oracle.float_balls import TINY, FloatBall
from pdverify.rules import Partition, Tail

Float64: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

WIDEN = 1 + 2.0**-40
"""Pairwise sums of 2^40 terms and a few functions err by less than 2^-45 of their value."""

FAR = 700.0
"""Radii (nats) of which nothing is said."""

NOWHERE = -1e3
"""Stands for the log-prob of cells without probability, of which nothing is used."""


@dataclass(frozen=True, eq=False)
class Radii:
    """How far the exact numbers may be from the stored ones; None: not at all.

    Attributes:
        logits, behavior_logits: `[T, V]`, of the full view; `logits` of the top-K view too.
        logprobs: `[T, K]`, of `topk_logprobs`.
        sampled: `[T]`, of `behavior_logprobs`.
    """

    logits: Float64 | None = None
    behavior_logits: Float64 | None = None
    logprobs: Float64 | None = None
    sampled: Float64 | None = None

    def take(self, rows: slice) -> Radii:
        """Those of some rows."""
        return Radii(*(None if x is None else x[rows] for x in vars(self).values()))

    def check(self, rows: Rows) -> None:
        """Raise `InputError` unless every radius has its number's shape and is at least 0."""
        numbers = {
            "logits": rows.logits,
            "behavior_logits": rows.behavior_logits,
            "logprobs": rows.topk_logprobs,
            "sampled": rows.behavior_logprobs,
        }
        for name, stored in numbers.items():
            radius = getattr(self, name)
            if radius is None or stored is None:
                continue
            if radius.shape != stored.shape:
                raise InputError(
                    f"radii.{name}.shape", None, radius.shape, f"expected {stored.shape}"
                )
            bad = ~(radius >= 0)
            if bad.any():
                place = tuple(int(i) for i in np.argwhere(bad)[0])
                raise InputError(f"radii.{name}", place, float(radius[place]), "a radius is >= 0")


@dataclass(frozen=True, eq=False)
class Policy:
    """A policy over its box, on `N` cells: balls of masses, of `1 - mass`, and of log-probs.

    `at` are the masses of the stored numbers, `[T, N]`, up to float64 rounding.
    """

    mass: FloatBall
    rest: FloatBall
    log: FloatBall
    at: Float64


@dataclass(frozen=True, eq=False)
class Box:
    """Both policies over the box, on `N` cells.

    What is nearly 1 is never subtracted from 1: the sampled token's mass enters through the
    `rest` of it, and what holds of k is put apart.

    Attributes:
        training, behavior: the policies.
        l: ball of log pi - log mu, `[T, N]`; 0 where both masses are.
        pi_radius: `[T, N]`, of the cells' logits, or None.
        mu_radius: `[T, N]`, of the behavior logits or log-probs, 0 on the tail, or None.
        kappa: `[T, N]`, ball: `x / pi_T^2` on the tail, x its collision mass; 1 on tokens.
        kappa_radius: `[T]`, how far the tail's is from that of the stored numbers.
        is_k: `[T, N]`.
        lone: `[T]`, a cell has mass in one policy alone.
        normalized: the behavior policy is a softmax (full view), else its tail absorbs changes.
        loose: `[T]`, the behavior tail may have no mass, so that retained masses may exceed 1.
    """

    training: Policy
    behavior: Policy
    l: FloatBall  # noqa: E741
    pi_radius: Float64 | None
    mu_radius: Float64 | None
    kappa: FloatBall
    kappa_radius: Float64
    is_k: Bools
    lone: Bools
    normalized: bool
    loose: Bools

    @property
    def pi(self) -> FloatBall:
        return self.training.mass

    @property
    def mu(self) -> FloatBall:
        return self.behavior.mass

    def k(self, x: FloatBall) -> FloatBall:
        """The sampled token's, `[T, 1]`."""
        slot = self.is_k.argmax(axis=-1)
        return x[np.arange(len(slot)), slot][:, None]

    def at_k(self, x: FloatBall, value: FloatBall) -> FloatBall:
        """`x` with `value` `[T, 1]` at the sampled token."""
        return FloatBall(
            np.where(self.is_k, value.mid, x.mid), np.where(self.is_k, value.rad, x.rad)
        )

    def total(self, x: FloatBall) -> FloatBall:
        """Sum over the cells but k's, `[T, 1]`."""
        return where(~self.is_k, x).sum()[:, None]

    @cached_property
    def eps(self) -> FloatBall:
        """`1 - pi_k`, `[T, 1]`."""
        return self.k(self.training.rest)

    @cached_property
    def weighted(self) -> FloatBall:
        """`kappa pi`, `[T, N]`."""
        return self.kappa * self.pi

    @cached_property
    def s(self) -> FloatBall:
        """`eps^2 + n2'` at k, `n2' - pi_k eps - kappa pi` elsewhere, n2' without k."""
        squares = self.total(self.weighted * self.pi)
        return self.at_k(
            squares - self.k(self.pi) * self.eps - self.weighted, self.eps * self.eps + squares
        )

    @cached_property
    def difference(self) -> FloatBall:
        """`pi - mu`, at k from the rests."""
        return self.at_k(self.pi - self.mu, self.k(self.behavior.rest) - self.eps)

    @cached_property
    def above(self) -> FloatBall:
        """`sum mu - 1`, `[T, 1]`: 0 but where the behavior policy is loose."""
        return where(self.loose[:, None], (self.mu.sum() + -1.0)[:, None])

    @cached_property
    def sign(self) -> tuple[Float64, Bools]:
        """Signs of pi - mu for the stored numbers, and whether they may differ in the box."""
        difference = self.difference
        stored = np.sign(self.training.at - self.behavior.at)
        sure = np.abs(difference.mid) > difference.rad
        sure |= (difference.mid == 0) & (difference.rad <= 2.0**-900)
        return np.where(sure, np.sign(difference.mid), stored), ~sure

    def around_mean(self, g: FloatBall) -> FloatBall:
        """`g_i - sum pi g`, `[T, N]`."""
        return self._around(g, self.training)

    def around_behavior_mean(self, g: FloatBall) -> FloatBall:
        """`g_i - sum mu g`, `[T, N]`."""
        return self._around(g, self.behavior)

    def _around(self, g: FloatBall, policy: Policy) -> FloatBall:
        g_k, mean = self.k(g), self.total(policy.mass * g)
        return self.at_k(g - (self.k(policy.mass) * g_k + mean), g_k * self.k(policy.rest) - mean)

    def still(self) -> bool:
        """Whether nothing can move."""
        return self.pi_radius is None and self.mu_radius is None

    def moved(self, by_pi: FloatBall, by_mu: FloatBall) -> Float64:
        """Bound of the movement, from slopes at every cell's logits and log-masses."""
        total = np.zeros(len(self.is_k))
        for slopes, radius in ((by_pi, self.pi_radius), (by_mu, self.mu_radius)):
            if radius is not None:
                total += np.where(radius <= 0, 0.0, size(slopes) * radius).sum(axis=-1)
        return total * WIDEN


def size(x: FloatBall) -> Float64:
    """Upper bound of `|x|`."""
    return (np.abs(x.mid) + x.rad) * WIDEN


def where(keep: Bools, x: FloatBall) -> FloatBall:
    """`x`, 0 elsewhere."""
    return FloatBall(np.where(keep, x.mid, 0.0), np.where(keep, x.rad, 0.0))


def column(x: FloatBall) -> FloatBall:
    """`[T, 1]` from `[T]`."""
    return x[:, None]


def between(low: Float64, high: Float64) -> FloatBall:
    """The ball of a range."""
    middle = low + (high - low) / 2
    # TINY: masses that underflow
    return FloatBall(middle, (high - low) / 2 * WIDEN + np.abs(middle) * 2.0**-50 + TINY)


def others(x: Float64) -> Float64:
    """Sum over the last axis without each element itself, without cancellation; `x >= 0`."""
    best = x.argmax(axis=-1)[..., None]
    without = x.copy()
    np.put_along_axis(without, best, 0.0, axis=-1)
    around = without.sum(axis=-1, keepdims=True)
    result = np.take_along_axis(x, best, axis=-1) + around - x
    np.put_along_axis(result, best, around, axis=-1)
    return np.asarray(result)


def box(rows: Rows, radii: Radii, partition: Partition, tail: Tail | None) -> Box:
    """Both policies within `radii` of the stored numbers of `rows`.

    Raises:
        InputError: the rows lack what the partition needs, or it is neither ``full`` nor ``topk``.
    """
    if rows.logits is None:
        raise InputError("logits", None, None, "noise needs the training logits")
    if partition == "full":
        return _full(rows, radii)
    if partition != "topk":
        raise InputError("partition", None, partition, "noise knows full and topk")
    if tail not in ("exact", "aggregated", "uniform"):
        raise InputError("tail", None, tail, "the topk view needs one tail estimator")
    return _coarse(rows, radii, tail)


def _shifted(logits: NDArray[np.floating]) -> Float64:
    """Logits less their maximum; contiguous, so that sums are pairwise."""
    z = np.ascontiguousarray(logits, dtype=np.float64)
    return np.asarray(z - z.max(axis=-1, keepdims=True))


def _softmax(z: Float64, radius: Float64 | None) -> Policy:
    """Softmax over the box of `z +- radius`.

    The most that a token can have: its own logit up, all others down.
    """
    dead = np.isneginf(z)
    r = np.zeros_like(z) if radius is None else np.where(dead, 0.0, radius)
    z = _shifted(z)
    e, up, down = np.exp(z), np.exp(z + r), np.exp(z - r)
    up = np.where(r > FAR, np.inf, up)
    others_up, others_down = others(up) * WIDEN, others(down) / WIDEN
    low, high = down / (down + others_up), up / (up + others_down)
    rest_low, rest_high = others_down / (others_down + up), others_up / (others_up + down)
    likely = low > 0.5
    log_low = np.where(
        likely, np.log1p(-np.where(likely, rest_high, 0.0)), z - r - np.log(down + others_up)
    )
    log_high = np.where(
        likely, np.log1p(-np.where(likely, rest_low, 0.0)), z + r - np.log(up + others_down)
    )
    log_low, log_high = (np.where(dead, NOWHERE, x) for x in (log_low, log_high))
    return Policy(
        between(low / WIDEN, high * WIDEN),
        between(rest_low / WIDEN, rest_high * WIDEN),
        between(log_low * WIDEN, log_high / WIDEN),
        e / e.sum(axis=-1, keepdims=True),
    )


def _full(rows: Rows, radii: Radii) -> Box:
    if rows.behavior_logits is None:
        raise InputError("behavior_logits", None, None, "the full view needs it")
    assert rows.logits is not None
    z, y = _shifted(rows.logits), _shifted(rows.behavior_logits)
    pi, mu = _softmax(z, radii.logits), _softmax(y, radii.behavior_logits)
    dead_z, dead_y = np.isneginf(z), np.isneginf(y)
    none = np.zeros(len(rows))
    return Box(
        pi,
        mu,
        where(~(dead_z & dead_y), pi.log - mu.log),
        None if radii.logits is None else np.where(dead_z, 0.0, radii.logits),
        None if radii.behavior_logits is None else np.where(dead_y, 0.0, radii.behavior_logits),
        FloatBall.exact(np.ones_like(z)),
        none,
        np.arange(rows.vocab_size) == rows.tokens[:, None],
        (dead_z != dead_y).any(axis=-1),
        True,
        none.astype(bool),
    )


def _coarse(rows: Rows, radii: Radii, tail: Tail) -> Box:
    assert rows.logits is not None
    z = _shifted(rows.logits)
    ids, y = retained_support(rows)
    used = ~np.isneginf(y)
    outside = np.ones(z.shape, dtype=bool)
    row = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    outside[row[used], ids[used]] = False
    count = outside.sum(axis=-1)
    rest = np.where(outside, z, -np.inf)
    top = np.where(count > 0, rest.max(axis=-1), 0.0)
    top = np.where(np.isneginf(top), 0.0, top)
    e = np.exp(rest - top[:, None])
    total = e.sum(axis=-1)
    share = e / np.where(total > 0, total, 1.0)[:, None]
    alive = total > 0
    kappa, kappa_radius = (share * share).sum(axis=-1), np.zeros(len(rows))
    retained = np.where(used, np.take_along_axis(z, ids, axis=-1), -np.inf)
    cells = np.concatenate([retained, (top + np.log(total))[:, None]], axis=-1)
    radius: Float64 | None = None
    if radii.logits is not None:
        r = np.where(outside & ~np.isneginf(z), radii.logits, 0.0)
        r = np.where(r > FAR, np.inf, r)
        # the tail's logit moves by log sum share e^d; downward by less than upward (Jensen)
        most = r.max(axis=-1, keepdims=True)
        common = most[:, 0] + np.log((share * np.exp(r - most)).sum(axis=-1))
        common = np.where(alive, np.maximum(common, 0.0) * WIDEN + 2.0**-44, 0.0)
        own = np.where(used, np.take_along_axis(radii.logits, ids, axis=-1), 0.0)
        radius = np.concatenate([own, common[:, None]], axis=-1)
        kappa_radius = np.where(alive, _tail_spread(share, kappa, r, common[:, None]), 0.0)
    if tail == "aggregated":
        kappa = np.ones(len(rows))
    elif tail == "uniform":
        kappa = 1.0 / np.maximum(count, 1)
    if tail != "exact":
        kappa_radius = np.zeros(len(rows))
    pi = _softmax(cells, radius)
    mu, mu_radius, loose = _listed(y, used, count, radii)
    alive_pi, alive_mu = ~np.isneginf(cells), mu.at > 0
    alive_mu[:, :-1] = used
    has = np.concatenate([used, (count > 0)[:, None]], axis=-1)
    lone = (alive_pi != alive_mu) & has
    lone[:, -1] &= ~loose
    whole = FloatBall(np.ones_like(cells), np.zeros_like(cells))
    whole.mid[:, -1], whole.rad[:, -1] = kappa, kappa_radius + kappa * 2.0**-44
    is_k = (ids == rows.tokens[:, None]) & used
    return Box(
        pi,
        mu,
        where(has & alive_pi, pi.log - mu.log),
        radius,
        mu_radius,
        whole,
        kappa_radius,
        np.concatenate([is_k, np.zeros((len(ids), 1), dtype=bool)], axis=-1),
        lone.any(axis=-1),
        False,
        loose,
    )


def _tail_spread(share: Float64, kappa: Float64, r: Float64, common: Float64) -> Float64:
    """How far `kappa = sum share^2` of a tail moves: the smaller of two bounds.

    From its ends, squares up and normalizer down or the other way round; and from its slopes
    `2 share_i (share_i - kappa)` at the logits, whose sum is zero.
    """
    up, down = share * np.exp(r), share * np.exp(-r)
    high = np.minimum((up * up).sum(axis=-1) / down.sum(axis=-1) ** 2 * WIDEN, 1.0)
    low = (down * down).sum(axis=-1) / up.sum(axis=-1) ** 2 / WIDEN
    ends = np.maximum(high - kappa, kappa - low)
    grown = np.exp(common)
    most, least = up * grown * WIDEN, down / grown / WIDEN
    away = np.maximum(most - low[:, None], high[:, None] - least)
    slopes = 2 * (np.minimum(most, 1.0) * np.maximum(away, 0.0) * r).sum(axis=-1)
    return np.asarray(np.minimum(ends, slopes) * WIDEN)


def _listed(
    y: Float64, used: Bools, count: NDArray[np.int64], radii: Radii
) -> tuple[Policy, Float64 | None, Bools]:
    """Retained cells of stored log-probs and the tail that takes what they leave.

    Log-probs of policies do not exceed 0 (nor the stored one, where that is above 0).
    """
    r = np.zeros_like(y)
    if radii.logprobs is not None:
        r[:, : radii.logprobs.shape[-1]] = radii.logprobs
    if radii.sampled is not None:
        r[:, -1] = radii.sampled
    r = np.where(used, r, 0.0)
    log_low = np.where(used, y - r, NOWHERE)
    log_high = np.where(used, np.minimum(y + r, np.maximum(y, 0.0)), NOWHERE)
    slack = 2.0**-44 * np.abs(log_low)
    m, up, down = (np.where(used, np.exp(x), 0.0) for x in (y, log_high, log_low))
    up, down = up * WIDEN, down / WIDEN
    # 1 - sum: the likeliest by expm1
    best = np.arange(y.shape[-1]) == y.argmax(axis=-1)[:, None]

    def left(exponents: Float64, masses: Float64, slack: float) -> Float64:
        first = -np.expm1(exponents[best])
        loss = np.where(best, 0.0, masses).sum(axis=-1)
        remainder = first - loss + slack * (np.abs(first) + loss)
        return np.where(count > 0, np.maximum(remainder, 0.0), 0.0)

    stored = left(y, m, 0.0)
    low, high = left(log_high, up, -(2.0**-44)), left(log_low, down, 2.0**-44)
    # 1 - mass of the likeliest; of others the difference has no digits to lose
    rest_low = np.where(best, -np.expm1(log_high), 1 - up)
    rest_high = np.where(best, -np.expm1(log_low), 1 - down)

    def whole(x: Float64, tail: Float64) -> Float64:
        return np.concatenate([x, tail[:, None]], axis=-1)

    tail_low, tail_high = (np.log(np.maximum(x, 2.0**-1000)) for x in (low, high))
    policy = Policy(
        between(whole(down, low), whole(up, high)),
        between(
            whole(rest_low - np.abs(rest_low) * 2.0**-40, 1 - high),
            whole(rest_high + np.abs(rest_high) * 2.0**-40, 1 - low),
        ),
        between(
            whole(log_low - slack, tail_low - 2.0**-44 * np.abs(tail_low)),
            whole(log_high + slack, tail_high + 2.0**-44 * np.abs(tail_high)),
        ),
        whole(m, stored),
    )
    still = radii.logprobs is None and radii.sampled is None
    return policy, None if still else whole(r, np.zeros(len(y))), low <= 0
