"""How far D and C can move when stored numbers stand for others: certificates of input noise.

Whoever holds bf16 logits or bf16 log-probs knows the policies to within a box.  By the mean value
theorem a quantity moves over it by at most `sum_i r_i sup |slope_i|`, `r_i` the radii and the
slopes enclosed over the whole box, in balls.

With `zeta` the cells' logits (`pdverify.precision.boxes`), `kappa = x / pi_T^2` on the tail and 1
on a token, `n2 = sum kappa pi^2`, `h = pi f'(pi / mu)`, `hbar = sum h`,
`s_c = 1[c = k] - kappa_c pi_c - pi_k + n2` and `v = pi s` (so `C = sum h s`, `sum v = 0`), every
divergence has

    dC/dzeta_i = q_i - pi_i Q + h_i (s_i - kappa_i pi_i) - pi_i (C - G) + hbar b_i,
    b_i = 2 pi_i (kappa_i pi_i - n2) - pi_k (1[i = k] - pi_i),
    q = f''(t) t v, Q = sum q, G = sum h kappa pi,      dC/dkappa_T = pi_T (pi_T hbar - h_T),

and `dC/dlog mu_i = -q_i + mu_i Q` in the full view, `-q_i + mu_i q_T / mu_T` on a list whose tail
takes what its masses leave.  Forward KL has `q = mu s` and, as Q + C = 0,
`dC/dzeta_i = pi_i (s_i - kappa_i h_i + G) + hbar b_i`; reverse KL has `q = v`, Q = 0.  Total
variation has q = 0 and in addition the signs that may change: at most `|v_j|` each.

A KL divergence is known better than by its slopes, which are small where the policies are near
each other: see `_three_points`.

Source: statements `noise.*` of `docs/formulas.md`.
"""

from __future__ import annotations

import numpy as np

from pdverify.batch import InputError, Rows
from pdverify.oracle.float_balls import FloatBall
from pdverify.precision.boxes import (
    WIDEN,
    Box,
    Float64,
    Policy,
    box,
    column,
    size,
    where,
)
from pdverify.precision.boxes import Radii as Radii
from pdverify.precision.boxes import others as others
from pdverify.precision.selection import selection_reach as selection_reach
from pdverify.rules import Partition, Tail

BLOCK = 2**15
"""Cells of a block of rows: few enough that their arrays stay in the cache."""

DIVERGENCES = ("kl", "reverse-kl", "tv")


def reach(
    rows: Rows, radii: Radii, *, divergence: str, partition: Partition, tail: Tail | None
) -> tuple[Float64, Float64]:
    """Bounds of how far D and C of `rows` are from those of any policies within `radii`.

    Args:
        rows: `T` tokens with logits, and behavior logits (full view) or a top-K list.
        radii: of the numbers that the view uses.
        divergence: ``kl``, ``reverse-kl`` or ``tv``.
        partition: ``full`` or ``topk``, with the retained support appended.
        tail: ``exact``, ``uniform`` or ``aggregated``; None in the full view.

    Returns:
        Two float64 `[T]`; infinite where nothing can be said: a token with probability in one
        policy alone, a reverse KL whose behavior tail may have no mass, infinite radii.

    Raises:
        InputError: another divergence or partition, rows that lack what the partition needs, or
            radii of another shape or below 0.
    """
    _known(divergence)
    radii.check(rows)
    step = max(1, BLOCK // rows.vocab_size)
    parts = []
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        some, reached = rows.take(part), radii.take(part)
        with np.errstate(all="ignore"):
            here = box(some, reached, partition, tail)
            d, c = _divergence(divergence, here), _coefficient(divergence, here)
            if divergence == "kl" or (divergence == "reverse-kl" and here.normalized):
                point = box(some, Radii(), partition, tail)
                d = np.fmin(d, _three_points(divergence, here, point))
            parts.append((d, c))
    d, c = (np.concatenate([pair[i] for pair in parts]) for i in (0, 1))
    return _sound(d), _sound(c)


def _known(divergence: str) -> None:
    if divergence not in DIVERGENCES:
        raise InputError("divergence", None, divergence, f"noise knows {', '.join(DIVERGENCES)}")


def _sound(bound: Float64) -> Float64:
    return np.asarray(np.where(np.isnan(bound), np.inf, bound))


def _absorbed(own: FloatBall, tail_rate: FloatBall, box: Box) -> FloatBall:
    """Slopes at a retained log-mass: its own, and the tail's that it takes from.

    `own` is `mu_i dQ/dmu_i`, `tail_rate` is `dQ/dmu_T` `[T]`.  Where the tail may be at 0, it gives
    anything from nothing to all of it.
    """
    taken = box.mu * column(tail_rate)
    any_part = taken.hull(FloatBall.exact(np.zeros_like(taken.mid)))
    loose = box.loose[:, None]
    return own - FloatBall(
        np.where(loose, any_part.mid, taken.mid), np.where(loose, any_part.rad, taken.rad)
    )


def _divergence(name: str, box: Box) -> Float64:
    if box.still():
        return np.zeros(len(box.is_k))
    pi, mu, ratio = box.pi, box.mu, box.l
    unknown = box.lone
    if name == "tv":
        g = _half_signs(box)
        by_pi = pi * box.around_mean(g)
        if box.normalized:
            by_mu = -(mu * box.around_behavior_mean(g))
        else:
            by_mu = _absorbed(-(mu * g), -(g[:, -1]), box)
        return box.moved(by_pi, by_mu)
    if name == "reverse-kl":
        by_pi = pi * box.around_mean(ratio)
        by_mu = -box.difference if box.normalized else _absorbed(-pi, -_over_tail(box, pi), box)
        unknown = unknown | box.loose
    else:
        by_pi = box.difference + pi * box.above
        if box.normalized:
            by_mu = -(mu * box.around_behavior_mean(ratio))
        else:
            by_mu = _absorbed(-(mu * ratio), -ratio[:, -1], box)
    found = box.moved(by_pi, by_mu)
    if name == "kl" and box.loose.any():
        found = np.where(box.loose, _tail_apart(box), found)
    return np.where(unknown, np.inf, found)


def _tail_apart(box: Box) -> Float64:
    """Movement of forward KL where the behavior tail may be empty.

    The slope at mu_T is infinite there: the tail's share `m log(m / p) - m + p`, convex and
    nonnegative, is taken over its whole range, the other cells' shares by their slopes, and what
    is left, `sum mu - 1 >= 0`, grows no faster than the retained masses.
    """
    pi, mu = box.pi, box.mu
    kept = np.ones(box.is_k.shape, dtype=bool)
    kept[:, -1] = False
    difference = where(kept, box.difference)
    by_pi = difference - pi * column(difference.sum())
    by_mu = -where(kept, mu * box.l)
    low, high = (np.maximum(x, 0.0) for x in mu[:, -1].bounds())
    p_low, p_high = (np.maximum(x, 0.0) for x in pi[:, -1].bounds())

    def share(m: Float64, p: Float64) -> Float64:
        return np.where(m > 0, m * np.log(m / p), 0.0) - m + p

    corners = [share(m, p) for m in (low, high) for p in (p_low, p_high)]
    found = box.moved(by_pi, by_mu) + np.max(corners, axis=0) * WIDEN
    if box.mu_radius is not None:
        found = found + (size(mu) * box.mu_radius).sum(axis=-1) * WIDEN
    return np.asarray(found)


def _three_points(name: str, box: Box, point: Box) -> Float64:
    """Movement of a KL divergence from what is known at the stored numbers, `point`, alone.

    For `P' ~ P e^a` and `Q' ~ Q e^b`, `|a| <= s`, `|b| <= r` (`P` the policy that the divergence
    is averaged over, `Q` the other one),

        KL(P'|Q') - KL(P|Q) = (Q - P) b + [log sum Q e^b - Q b] + (P - P') b
                              + KL(P'|P) + sum (P' - P) log(P / Q).

    Constants added to a or b change nothing, so all but the first term is bounded twice: as it
    is, and with a and b taken relative to P's likeliest token, which then does not move.  Not a
    number where retained masses may exceed 1.
    """
    none = np.zeros_like(point.training.at)
    r = none if box.pi_radius is None else box.pi_radius
    s = none if box.mu_radius is None else box.mu_radius
    first, second = point.behavior, point.training
    if name == "reverse-kl":
        first, second, r, s = second, first, s, r
    mass = size(first.mass)
    direct = (size(point.difference) * r).sum(axis=-1)
    relative_r, relative_s = (_relative(x, first.at) for x in (r, s))
    normalizer = np.minimum(*((size(second.mass) * _bend(b)).sum(axis=-1) for b in (r, relative_r)))
    if box.normalized:
        slopes = mass * size(point.l - column((first.mass * point.l).sum()))
        ways = [_softmax_moved(first, slopes, b, a) for b, a in ((r, s), (relative_r, relative_s))]
        rest = np.minimum(ways[0][0], ways[1][0]) + np.minimum(ways[0][1], ways[1][1])
    else:
        moved, slopes = mass * np.expm1(s), size(point.l - column(point.l[:, -1]))
        taken, tail = moved.sum(axis=-1), first.mass[:, -1].bounds()[0]
        rest = (moved * (slopes + r) + mass * _bend(s)).sum(axis=-1)
        rest = rest + taken * (r[:, -1] + taken / tail)
    total = (direct + normalizer + rest) * WIDEN
    return np.asarray(np.where(box.loose | box.lone, np.nan, total))


def _relative(radius: Float64, mass: Float64) -> Float64:
    """Radii of the differences to the likeliest cell's."""
    best = mass.argmax(axis=-1)[:, None]
    away = radius + np.take_along_axis(radius, best, axis=-1)
    return np.where(np.arange(radius.shape[-1]) == best, 0.0, away)


def _bend(x: Float64) -> Float64:
    """`x^2 e^x / 2`, above `e^d - 1 - d` and `d e^d - e^d + 1` for all `|d| <= x`."""
    return np.asarray(x * x * np.exp(x) / 2 * WIDEN)


def _softmax_moved(
    first: Policy, slopes: Float64, r: Float64, s: Float64
) -> tuple[Float64, Float64]:
    """Bounds of `KL(P'|P) + sum (P' - P) log(P / Q)` and of `sum (P' - P) b`.

    With `Z = sum P e^a`, `sum (P' - P) x = sum P (e^a - 1) (x - P x) / Z` for any x; `slopes` are
    those of `x = log(P / Q)`, the other sum is bounded by Cauchy and Schwarz.  `KL(P'|P)` is at
    most half of the largest second moment of a on the way to P'.
    """
    mass, grown = size(first.mass), np.expm1(s)
    low = np.maximum(first.mass.bounds()[0], 0.0)
    scale = 1 / (low * np.exp(-s)).sum(axis=-1) * WIDEN
    own = (slopes * grown + mass * _bend(s)).sum(axis=-1)
    squares = (mass * grown * grown).sum(axis=-1) * (mass * r * r).sum(axis=-1)
    return own * scale, np.sqrt(squares) * scale


def _half_signs(box: Box) -> FloatBall:
    sign, open_ = box.sign
    return FloatBall(np.where(open_, 0.0, sign / 2), np.where(open_, 0.5, 0.0))


def _coefficient(name: str, box: Box) -> Float64:
    if box.still():
        return np.zeros(len(box.is_k))
    pi, mu, s = box.pi, box.mu, box.s
    v = pi * s
    jumps = np.zeros(len(box.is_k))
    unknown = box.lone
    if name == "kl":
        h, mean = box.difference, -box.above
        h_k, g = box.k(h), box.total(h * box.weighted)
        by_pi = pi * box.at_k(
            s - box.kappa * h + (h_k * box.k(pi) + g), box.k(s) - h_k * box.eps + g
        )
        if box.normalized:
            by_mu = -(mu * box.around_behavior_mean(s))
        else:
            by_mu = _absorbed(-(mu * s), -s[:, -1], box)
    else:
        if name == "tv":
            rate = FloatBall.exact(box.sign[0] / 2)
            jumps = _jumps(box, v)
            by_mu = FloatBall.exact(np.zeros_like(pi.mid))
            unknown = np.zeros_like(unknown)
        else:
            rate, unknown = box.l, unknown | box.loose
            by_mu = -v if box.normalized else _absorbed(-v, -_over_tail(box, v), box)
        # a constant added to every f' changes nothing: center them
        center = (pi.mid * rate.mid).sum(axis=-1, keepdims=True)
        h = pi * (rate - FloatBall.exact(center))
        mean = column(h.sum())
        h_k, g, c = box.k(h), box.total(h * box.weighted), column((h * s).sum())
        by_pi = box.at_k(
            h * (s - box.weighted) - pi * (c - h_k * box.k(pi) - g),
            h_k * box.k(s) + box.k(pi) * (g - h_k * box.eps - c),
        )
        by_pi = by_pi + v if name == "reverse-kl" else by_pi
    by_pi = by_pi + mean * _base(box)
    tail = pi[:, -1] * (pi[:, -1] * mean[:, 0] - h[:, -1])
    by_kappa = np.where(box.kappa_radius > 0, size(tail) * box.kappa_radius, 0.0)
    found = box.moved(by_pi, by_mu) + jumps + by_kappa * WIDEN
    return np.where(unknown, np.inf, found)


def _jumps(box: Box, v: FloatBall) -> Float64:
    """What signs that may change add to C of the total variation, at most, up or down.

    A sign that leaves s = 1 or -1 moves C by up to |v|, in the direction of -s v alone.
    """
    sign, open_ = box.sign
    p, m = box.training.at, box.behavior.at
    low, high = v.bounds()
    up, down = np.maximum(high, 0.0), np.maximum(-low, 0.0)
    falls, rises = np.where(sign < 0, up, down), np.where(sign < 0, down, up)
    # a stored sign that float64 does not settle may be wrong as well
    doubtful = np.abs(p - m) <= 2.0**-44 * (p + m)
    both = size(v) * np.where(p == m, 1.0, 2.0)
    raised = np.where(open_, np.where(doubtful, both, falls), 0.0).sum(axis=-1)
    lowered = np.where(open_, np.where(doubtful, both, rises), 0.0).sum(axis=-1)
    return np.asarray(np.maximum(raised, lowered) * WIDEN)


def _over_tail(box: Box, x: FloatBall) -> FloatBall:
    """`x_T / mu_T`, `[T]`: how a reverse-KL sum answers to the behavior tail's mass."""
    return x[:, -1] * box.mu[:, -1].reciprocal()


def _base(box: Box) -> FloatBall:
    """`b_i` of the module: at k, `2 pi_k (eps pi_k - n2') - pi_k eps`."""
    pi, pi_k, eps = box.pi, box.k(box.pi), box.eps
    squares = box.total(box.weighted * pi)
    spread = pi * (box.weighted - (squares + pi_k * pi_k))
    at_k = pi_k * (eps * pi_k - squares)
    return box.at_k(spread + spread + pi_k * pi, at_k + at_k - pi_k * eps)
