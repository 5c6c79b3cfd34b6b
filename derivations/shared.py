"""The formulas that all divergences share, as code; `derivations.emit` copies them verbatim.

They are proved as they stand: statements run these functions on SymPy symbols and on exact
rationals (see `derivations.exact`), so what is proved is the code and not a transcript of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any


def softmax_motion(pi: Array, pi_k: Array, is_k: Array, xp: Any = np) -> Array:
    """Rate `v_j` at which the policy-gradient step `dz = e_k - pi` moves each probability.

    v_j = pi_j (1[j = k] - pi_j - pi_k + sum_i pi_i^2), and sum_j v_j = 0.

    Shapes: pi, is_k `[..., N]` with N = V; pi_k `[...]`; result `[..., N]`.  is_k is bool.
    Unit: probability per unit of eta A r.
    Source: statement `motion.rate`; arXiv 2607.10848.
    """
    common = (xp.sum(pi * pi, axis=-1) - pi_k)[..., None] - pi
    return pi * xp.where(is_k, 1 + common, common)


def coefficient_from_moments(
    h: Array,
    pi: Array,
    h_k: Array,
    pi_k: Array,
    h_tail: Array,
    pi_tail: Array,
    w: Array,
    xp: Any = np,
) -> Array:
    """Coefficient C of any f-divergence from its moments h = pi g: the plain form.

    C = h_k - w h_T - sum_S pi_j h_j - hbar (pi_k - sum_S pi_j^2 - pi_T w),
    hbar = sum_S h_j + h_T.
    In the full view S is everything: h_tail = pi_tail = w = 0.
    With infinite moments C is their common push times infinity, NaN if they push both ways.

    Shapes: h, pi `[..., N]` over S, k included; the others and the result `[...]`.
    Unit: that of the divergence, per unit of eta A r.
    Source: statements `coefficient.general`, `coarse.affine`, `limits.infinite-moments`;
    arXiv 2607.10848.
    """
    n2 = xp.sum(pi * pi, axis=-1) + pi_tail * w
    c = plain_form(_finite(h, xp), pi, _finite(h_k, xp), pi_k, _finite(h_tail, xp), pi_tail, w, xp)
    push = _push(h, (n2 - pi_k)[..., None] - pi, xp)
    # `push` counts k like any other token: its own push is +sign(h_k), for 1 - 2 pi_k + n2 > 0.
    as_other, as_k = _push(h_k, (n2 - pi_k) - pi_k, xp), _push(h_k, 1 + 0 * pi_k, xp)
    tail = _push(h_tail, n2 - w - pi_k, xp)
    rising = _rises(push, xp) + _rise(as_k, xp) - _rise(as_other, xp) + _rise(tail, xp)
    falling = _rises(-push, xp) + _rise(-as_k, xp) - _rise(-as_other, xp) + _rise(-tail, xp)
    infinite = xp.sum(_is_infinite(h, xp), axis=-1) + _is_infinite(h_tail, xp)
    return _with_limits(c, infinite, rising, falling, xp)


def plain_form(
    h: Array,
    pi: Array,
    h_k: Array,
    pi_k: Array,
    h_tail: Array,
    pi_tail: Array,
    w: Array,
    xp: Any = np,
) -> Array:
    """The formula of `coefficient_from_moments`, for finite moments.

    Source: statement `coefficient.general`; arXiv 2607.10848.
    """
    n2 = xp.sum(pi * pi, axis=-1) + pi_tail * w
    hbar = xp.sum(h, axis=-1) + h_tail
    return h_k - w * h_tail - xp.sum(pi * h, axis=-1) - hbar * (pi_k - n2)


def complement_coefficient(
    h_others: Array,
    pi_others: Array,
    h_k: Array,
    pi_k: Array,
    h_tail: Array,
    pi_tail: Array,
    w: Array,
    xp: Any = np,
) -> Array:
    """Coefficient C of any f-divergence from its moments h = pi g: the complement form.

    C = h_k (eps^2 + q) - sum_{S without k} h_j (pi_j + pi_k eps - q) - h_T (w + pi_k eps - q),
    q = sum_{S without k} pi_j^2 + pi_T w,  eps = sum_{S without k} pi_j + pi_T.
    Equals `coefficient_from_moments` (which see), without its cancellation when pi_k is near 1.

    Shapes: h_others, pi_others `[..., N]` over S, 0 in the slot of k; the others and the result
    `[...]`.
    Unit: that of the divergence, per unit of eta A r.
    Source: statements `stable.complement-universal`, `limits.infinite-moments`;
    arXiv 2607.10848.
    """
    q = xp.sum(pi_others * pi_others, axis=-1) + pi_tail * w
    shift = pi_k * (xp.sum(pi_others, axis=-1) + pi_tail) - q
    c = complement_form(
        _finite(h_others, xp),
        pi_others,
        _finite(h_k, xp),
        pi_k,
        _finite(h_tail, xp),
        pi_tail,
        w,
        xp,
    )
    push = _push(h_others, -pi_others - shift[..., None], xp)
    own, tail = _push(h_k, 1 + 0 * pi_k, xp), _push(h_tail, -w - shift, xp)
    rising = _rises(push, xp) + _rise(own, xp) + _rise(tail, xp)
    falling = _rises(-push, xp) + _rise(-own, xp) + _rise(-tail, xp)
    infinite = xp.sum(_is_infinite(h_others, xp), axis=-1)
    infinite = infinite + _is_infinite(h_k, xp) + _is_infinite(h_tail, xp)
    return _with_limits(c, infinite, rising, falling, xp)


def complement_form(
    h_others: Array,
    pi_others: Array,
    h_k: Array,
    pi_k: Array,
    h_tail: Array,
    pi_tail: Array,
    w: Array,
    xp: Any = np,
) -> Array:
    """The formula of `complement_coefficient`, for finite moments.

    Source: statement `stable.complement-universal`.
    """
    q = xp.sum(pi_others * pi_others, axis=-1) + pi_tail * w
    eps = xp.sum(pi_others, axis=-1) + pi_tail
    shift = pi_k * eps - q
    others = xp.sum(h_others * (pi_others + shift[..., None]), axis=-1)
    return h_k * (eps * eps + q) - others - h_tail * (w + shift)


def kl_complement_coefficient(
    mu_others: Array, pi_others: Array, mu_tail: Array, pi_tail: Array, w: Array, xp: Any = np
) -> Array:
    """Coefficient C of forward KL: its complement form, which needs no cell for k.

    C = sum_{S without k} (eps + pi_j) (mu_j - pi_j) + (eps + w) (mu_T - pi_T),
    eps = sum_{S without k} pi_j + pi_T.  In the full view mu_tail = pi_tail = w = 0.

    Shapes: mu_others, pi_others `[..., N]` over S, 0 in the slot of k; the others and the result
    `[...]`.
    Unit: nats per unit of eta A r.
    Source: statement `stable.complement-kl`; arXiv 2607.10848.
    """
    eps = xp.sum(pi_others, axis=-1) + pi_tail
    others = xp.sum((eps[..., None] + pi_others) * (mu_others - pi_others), axis=-1)
    return others + (eps + w) * (mu_tail - pi_tail)


def tail_mean_aggregated(pi_tail: Array) -> Array:
    """w of the aggregated tail: one token holds the whole tail, w = pi_T.

    The upper end of what w can be.  0 for an empty tail.

    Shapes: all `[...]`.  Unit: probability.
    Source: statement `coarse.ends`; arXiv 2607.10848.
    """
    return pi_tail


def tail_mean_uniform(pi_tail: Array, cells: Array, xp: Any = np) -> Array:
    """w of the uniform tail: `cells` = V - |S| equal tokens, w = pi_T / (V - |S|).

    The lower end of what w can be.  0 for an empty tail.

    Shapes: all `[...]`.  Unit: probability.
    Source: statement `coarse.ends`; arXiv 2607.10848.
    """
    return xp.where(cells > 0, pi_tail / xp.where(cells > 0, cells, 1), 0 * pi_tail)


def tail_mean_exact(collision: Array, pi_tail: Array, xp: Any = np) -> Array:
    """w of the exact tail: w = x / pi_T, x = sum_{i not in S} pi_i^2 the tail's collision mass.

    0 for an empty tail.

    Shapes: all `[...]`.  Unit: probability.
    Source: statements `coarse.exact`, `limits.empty-tail`.
    """
    held = pi_tail > 0
    return xp.where(held, collision / xp.where(held, pi_tail, 1), 0 * pi_tail)


def kl_second_order_variance(pi: Array, pi_k: Array, xp: Any = np) -> Array:
    """Second derivative of KL(mu || pi) along the frozen logit step u = e_k - pi: Var_pi(u).

    Var_pi(u) = (pi_k - 2 pi_k^2 + sum_i pi_i^3) - (pi_k - sum_i pi_i^2)^2.

    Shapes: pi `[..., N]` with N = V; pi_k and the result `[...]`.
    Unit: nats per unit of (eta A r)^2.
    Source: statement `second-order.kl`.
    """
    mean = pi_k - xp.sum(pi * pi, axis=-1)
    return pi_k - 2 * pi_k * pi_k + xp.sum(pi * pi * pi, axis=-1) - mean * mean


def kl_coarse_second_order_variance(
    pi: Array, pi_k: Array, mu_tail: Array, pi_tail: Array, w: Array, w2: Array, xp: Any = np
) -> Array:
    """Second derivative of the top-K KL(mu || pi) along the frozen logit step u = e_k - pi.

    Var_pi(u) - mu_T Var_{pi|T}(u), with sum_T pi_i^2 = pi_T w and sum_T pi_i^3 = pi_T w2, so
    that Var_{pi|T}(u) = w2 - w^2.  w2 is w^2 for the aggregated and the uniform tail.

    Shapes: pi `[..., N]` over S, k included; the others and the result `[...]`.
    Unit: nats per unit of (eta A r)^2.
    Source: statement `second-order.kl-coarse`.
    """
    mean = pi_k - xp.sum(pi * pi, axis=-1) - pi_tail * w
    third = xp.sum(pi * pi * pi, axis=-1) + pi_tail * w2
    return pi_k - 2 * pi_k * pi_k + third - mean * mean - mu_tail * (w2 - w * w)


def predicted_divergence(d: Array, c: Array, variance: Array, h: Array) -> Array:
    """The divergence after the step, to second order: d + h c + h^2 variance / 2.

    h = eta A r is the length of the logit step h (e_k - pi).

    Shapes: all `[...]`.  Unit: nats.
    Source: statement `second-order.kl`.
    """
    return d + h * c + h * h * variance / 2


def _is_infinite(h: Array, xp: Any) -> Array:
    return xp.where(xp.abs(h) == math.inf, 1.0, 0.0)


def _finite(h: Array, xp: Any) -> Array:
    return xp.where(xp.abs(h) == math.inf, 0.0, h)


def _push(h: Array, rate: Array, xp: Any) -> Array:
    return xp.where(xp.abs(h) == math.inf, xp.sign(h) * xp.sign(rate), 0.0)


def _rise(push: Array, xp: Any) -> Array:
    return xp.where(push > 0, 1.0, 0.0)


def _rises(push: Array, xp: Any) -> Array:
    return xp.sum(_rise(push, xp), axis=-1)


def _with_limits(c: Array, infinite: Array, rising: Array, falling: Array, xp: Any) -> Array:
    one_way = xp.where(falling > 0, -math.inf, math.inf)
    disagree = (rising > 0) == (falling > 0)
    return xp.where(infinite > 0, xp.where(disagree, math.nan, one_way), c)
