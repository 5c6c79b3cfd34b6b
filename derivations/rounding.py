"""Rounding: how far a straightforward evaluation at unit roundoff u can be from the truth.

Model: every + - * / returns the exact result times 1 + d with |d| <= u; exp, expm1 and log err by
at most (KAPPA - 1) u of their value; sums are pairwise, so that a term meets at most
ceil(log2 n) additions; nothing underflows.  Second-order terms are covered by the slack between
KAPPA - 1 and KAPPA and between ceil(log2 n) and ceil(log2 n) + 2, where

    u (c + 2)^2 <= 1,   u sum pi (|dz| + KAPPA + c)^2 <= 1,   c u (lambda_i + lambda'_i) <= 1,

which every row of the experiments satisfies (they check it).
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import sympy as sp
from flint import arb
from numpy.typing import NDArray

from derivations.budgets import budgets, compared_full, compared_top_k
from derivations.exact import call
from derivations.motion import softmax, weights
from derivations.rows import (
    RETAINED,
    Family,
    Float32,
    Float64,
    TopK,
    at,
    enclosed_log_softmax,
    families,
    log_softmax,
    top_k,
    tree_sum,
    without,
)
from derivations.statements import require, require_zero, statement
from pdverify.oracle.float_balls import FloatBall

KAPPA = 4
UNIT = 2.0**-24


def depth(size: int) -> int:
    """c: additions a term meets in a pairwise sum of `size` terms, and two operations more."""
    return math.ceil(math.log2(size)) + 2


@statement(
    "rounding.products",
    "A product of n rounding factors",
    formula=r"\Bigl|\prod_{i=1}^n(1+\delta_i)-1\Bigr|\le e^{nu}-1\quad(|\delta_i|\le u<1),\qquad "
    r"e^{x}-1\le x+x^2\ (0\le x\le 1)",
    how="prose; ball arithmetic at the extremes, n = 1 to 400, u = 2^-8, 2^-11, 2^-24, 2^-53",
    used="every rounding budget",
)
def products() -> None:
    """1 + d <= exp(d) gives the upper side.  Below, the product is at least 1 - n u (Bernoulli),
    and n u <= exp(n u) - 1.  The second inequality: the tail x^2/2 + x^3/6 + ... is at most
    x^2 (e - 2) for x <= 1."""
    for bits in (8, 11, 24, 53):
        unit = arb(2) ** -bits
        for n in range(1, 401):
            bound = (unit * n).expm1()
            require(not (1 + unit) ** n - 1 > bound, f"upper product, n = {n}")
            require(not 1 - (1 - unit) ** n > bound, f"lower product, n = {n}")
    x = sp.Symbol("x", positive=True)
    remainder = sp.series(sp.exp(x) - 1 - x, x, 0, 8).removeO()
    require(sp.Poly(remainder, x).monoms()[-1] == (2,), "the remainder starts at x^2")
    require(sp.E - 2 < 1, "e - 2 < 1")


@statement(
    "rounding.sums",
    "Pairwise sums",
    formula=r"\Bigl|\widehat{\textstyle\sum}x_i-\sum x_i\Bigr|\le"
    r"(e^{\lceil\log_2n\rceil u}-1)\sum|x_i|",
    how="prose from rounding.products; 2,000 random float32 sums against exact ones",
    used="every rounding budget",
)
def sums() -> None:
    """Each term is multiplied by the rounding factors of the additions above it, at most
    ceil(log2 n) of them."""
    rng = np.random.default_rng(1)
    for _ in range(2000):
        n = int(rng.integers(2, 3000))
        x = (rng.normal(size=n) * np.exp(3 * rng.normal(size=n))).astype(np.float32)
        bound = math.expm1(math.ceil(math.log2(n)) * UNIT) * math.fsum(np.abs(x, dtype=np.float64))
        error = abs(math.fsum([float(tree_sum(x)), *(-x.astype(np.float64))]))
        require(error <= bound, f"pairwise sum of {n} terms")


@dataclass(frozen=True)
class Policy:
    """Float64 masses and log-masses of rows `[T, V]`, and the error bounds of float32 ones.

    `reach` is lambda, u times which bounds the error of a log-prob; `relative` is rho, the
    relative error of a mass.
    """

    log: Float64
    mass: Float64
    reach: Float64
    relative: Float64


def policy(logits: NDArray[Any]) -> Policy:
    """The bounds of `rounding.policy`, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    mass = np.exp(shifted)
    total = mass.sum(axis=-1, keepdims=True)
    log_sum = np.log(total)
    mass /= total
    log = shifted - log_sum
    c = depth(logits.shape[-1])
    size = np.abs(shifted)
    normalizer = (mass * size).sum(axis=-1, keepdims=True) + KAPPA * (1 + log_sum) + c
    reach = size + np.abs(log) + normalizer
    spread = UNIT * (mass * (size + KAPPA + c) ** 2).sum(axis=-1)
    require((spread <= 1).all() and UNIT * (c + 2) ** 2 <= 1, "second order is covered")
    require((c * UNIT * 2 * reach <= 1).all(), "second order is covered, log-probs")
    return Policy(log, mass, reach, np.expm1(UNIT * (reach + KAPPA)))


SAMPLES = ((66, 1_000, 252), (4, 50_000, 84))
"""(rows per chunk and family, V, chunks): 99,792 tokens at V = 1,000 and 2,016 at V = 50,000."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of one quantity per row, `[T]`, nats (or probability for a mass)."""

    plain: Float64
    complement: Float64
    divergence: Float64


SECOND_ORDER = 1.01
"""Covers products of two relative errors, each below 0.005 in every row (which is checked)."""


def full_bounds(mu: Policy, pi: Policy, k: NDArray[np.int64]) -> Bounds:
    """The bounds of `rounding.plain`, `rounding.complement` and `rounding.divergence`."""
    rho, sigma, c = pi.relative, mu.relative, depth(mu.mass.shape[-1])
    require(max(rho.max(), sigma.max(), (c + 3) * UNIT) < 0.005, "second order is below 1 %")
    m, p = mu.mass, pi.mass
    rho_k, sigma_k, p_k, m_k = (at(x, k) for x in (rho, sigma, p, m))
    grown = p * m * (1 + rho) * (1 + sigma), p**2 * (1 + rho) ** 2
    plain = rho_k * p_k + sigma_k * m_k + (grown[0] - p * m + grown[1] - p**2).sum(axis=-1)
    plain += UNIT * (c + 2) * (grown[0] + grown[1]).sum(axis=-1)
    plain += (2 + UNIT) * UNIT * (p_k * (1 + rho_k) + m_k * (1 + sigma_k))
    length = np.abs(mu.log - pi.log)
    divergence = (m * sigma * length).sum(axis=-1)
    slack = UNIT * (pi.reach + mu.reach + (c + 2) * length)
    divergence += (m * (1 + sigma) * slack).sum(axis=-1)
    none = np.zeros(len(k))
    others = without(m, k), without(p, k)
    complement = complement_bound(*others, sigma, rho, c, none, none, none, none, none, none)
    return Bounds(plain, complement, divergence)


def complement_bound(
    m: Float64,
    p: Float64,
    sigma: Float64,
    rho: Float64,
    c: int,
    m_tail: Float64,
    p_tail: Float64,
    tau: Float64,
    rho_tail: Float64,
    w: Float64,
    rho_w: Float64,
) -> Float64:
    """The bound of `rounding.complement`; m, p hold 0 in the slot of k."""
    eps = p.sum(axis=-1) + p_tail
    eps_error = (p * rho).sum(axis=-1) + p_tail * rho_tail + c * UNIT * eps
    weight, gap, gap_tail = eps[:, None] + p, np.abs(m - p), np.abs(m_tail - p_tail)
    total = (weight * (m * sigma + p * rho) + gap * (p * rho + eps_error[:, None])).sum(axis=-1)
    total += (eps + w) * (tau + p_tail * rho_tail) + gap_tail * (eps_error + w * rho_w)
    total += UNIT * (c + 3) * ((weight * gap).sum(axis=-1) + (eps + w) * gap_tail)
    total *= SECOND_ORDER
    return np.asarray(total)


def float32_full(rows: Family) -> dict[str, Float32]:
    """C (both plain orders, complement form) and D in straightforward float32."""
    log_pi, log_mu = log_softmax(rows.z), log_softmax(rows.y)
    pi, mu = np.exp(log_pi), np.exp(log_mu)
    local = at(pi, rows.k) - at(mu, rows.k)
    pi_others, mu_others = without(pi, rows.k), without(mu, rows.k)
    weight = tree_sum(pi_others)[:, None] + pi_others
    return {
        "plain": local + tree_sum(pi * (mu - pi)),
        "plain, two sums": local + (tree_sum(pi * mu) - tree_sum(pi * pi)),
        "complement": tree_sum(weight * (mu_others - pi_others)),
        "divergence": tree_sum(mu * (log_mu - log_pi)),
    }


def enclosed_full(rows: Family) -> tuple[FloatBall, FloatBall, FloatBall, FloatBall]:
    """Balls around C, D, and both log-softmaxes."""
    log_pi, log_mu = enclosed_log_softmax(rows.z), enclosed_log_softmax(rows.y)
    pi, mu = log_pi.exp(), log_mu.exp()
    place = (np.arange(len(rows.k)), rows.k)
    others_pi, others_mu = pi.put(place, 0.0), mu.put(place, 0.0)
    c = enclosed_complement(others_mu, others_pi, others_pi.sum())
    return c, (mu * (log_mu - log_pi)).sum(), log_pi, log_mu


def enclosed_complement(mu: FloatBall, pi: FloatBall, eps: FloatBall) -> FloatBall:
    """sum (eps + pi) (mu - pi) over the cells other than k."""
    column = FloatBall(eps.mid[:, None], eps.rad[:, None])
    return ((column + pi) * (mu - pi)).sum()


def tail_mass(y: Float32, used: NDArray[np.bool_]) -> Float32:
    """mu_T = -expm1(y_max) - sum of the others, in float32, not below 0."""
    filled = np.where(used, y, -np.inf).astype(np.float32)
    top = filled.argmax(axis=-1)
    rest = tree_sum(without(np.exp(filled), top))
    return np.asarray(np.maximum(-np.expm1(at(filled, top)) - rest, np.float32(0)))


def float32_top_k(rows: Family, view: TopK) -> dict[str, Float32]:
    """mu_T, C (plain and complement, exact tail) and D of the top-K view in float32."""
    log_pi = log_softmax(rows.z)
    pi = np.exp(log_pi)
    tail = pi.copy()
    np.put_along_axis(tail, view.ids, 0, axis=-1)
    pi_tail = tree_sum(tail)
    w = tree_sum(tail * tail) / pi_tail
    mu_tail = tail_mass(view.y, view.used)
    own = np.take_along_axis(log_pi, view.ids, axis=-1)
    p = np.where(view.used, np.exp(own), np.float32(0))
    m = np.where(view.used, np.exp(view.y), np.float32(0))
    p_others, m_others = without(p, view.own), without(m, view.own)
    eps = tree_sum(p_others) + pi_tail
    rest = tree_sum((eps[:, None] + p_others) * (m_others - p_others))
    local = at(p, view.own) - at(m, view.own)
    gap = np.where(view.used, view.y - own, np.float32(0))
    ratio = np.log(np.where(mu_tail > 0, mu_tail, np.float32(1))) - np.log(pi_tail)
    one = np.float32(1)
    return {
        "mu_T": mu_tail,
        "1 - sum mu": one - tree_sum(m),
        "1 - sum pi": one - tree_sum(p),
        "plain": local + (tree_sum(p * (m - p)) + w * (mu_tail - pi_tail)),
        "complement": rest + (eps + w) * (mu_tail - pi_tail),
        "divergence": tree_sum(m * gap) + mu_tail * ratio,
    }


def enclosed_top_k(rows: Family, view: TopK, log_pi: FloatBall) -> dict[str, FloatBall]:
    """Balls around the same, for the very float32 log-probs."""
    pi = log_pi.exp()
    row = np.arange(len(rows.k))[:, None]
    tail = pi.put((row, view.ids), 0.0)
    pi_tail = tail.sum()
    w = (tail * tail).sum() / pi_tail
    y = FloatBall.exact(view.y)
    unused = ~view.used
    m, p = y.exp().put(unused, 0.0), pi[row, view.ids].put(unused, 0.0)
    top = np.where(view.used, view.y, -np.inf).argmax(axis=-1)
    first = (np.arange(len(top)), top)
    mu_tail = (-(y[first].expm1()) - m.put(first, 0.0).sum()).nonnegative_part()
    own = (np.arange(len(top)), view.own)
    p_others, m_others = p.put(own, 0.0), m.put(own, 0.0)
    eps = p_others.sum() + pi_tail
    c = enclosed_complement(m_others, p_others, eps) + (eps + w) * (mu_tail - pi_tail)
    gap = (y - log_pi[row, view.ids]).put(unused, 0.0)
    empty = mu_tail.mid <= mu_tail.rad
    ratio = mu_tail.put(empty, 1.0).log() - pi_tail.log()
    d = (m * gap).sum() + (mu_tail * ratio).put(empty, 0.0)
    unclamped = -(y[first].expm1()) - m.put(first, 0.0).sum()
    masses = {"mu_T": mu_tail, "1 - sum mu": unclamped, "1 - sum pi": pi_tail}
    return {**masses, "complement": c, "plain": c, "divergence": d}


def top_k_bounds(pi: Policy, view: TopK, truth: dict[str, FloatBall]) -> dict[str, Float64]:
    """The bounds of `rounding.top-k`, stored log-probs taken as exact numbers."""
    size = pi.mass.shape[-1]
    c, c_k = depth(size), depth(RETAINED + 1)
    m = np.where(view.used, np.exp(view.y.astype(np.float64)), 0.0)
    rho_all = pi.relative
    p, rho, log = (np.take_along_axis(x, view.ids, axis=-1) for x in (pi.mass, rho_all, pi.log))
    reach = np.take_along_axis(pi.reach, view.ids, axis=-1)
    p = np.where(view.used, p, 0.0)
    sigma = UNIT * KAPPA
    others = m.sum(axis=-1) - m.max(axis=-1)
    tau = SECOND_ORDER * UNIT * ((KAPPA + c_k + 2) * others + (KAPPA + 2) * -np.expm1(max_of(view)))
    tail, tail_rho = pi.mass.copy(), rho_all
    np.put_along_axis(tail, view.ids, 0.0, axis=-1)
    p_tail, x = tail.sum(axis=-1), (tail**2).sum(axis=-1)
    w = x / p_tail
    rho_tail = (tail * tail_rho).sum(axis=-1) / p_tail + c * UNIT
    rho_w = 2 * (tail**2 * tail_rho).sum(axis=-1) / x + rho_tail + (c + 2) * UNIT
    m_tail = truth["mu_T"].mid
    require(max(rho_tail.max(), rho_w.max()) < 0.005, "second order is below 1 %, tail")
    own = view.own
    complement = complement_bound(
        without(m, own), without(p, own), np.full_like(m, sigma), rho, c,
        m_tail, p_tail, tau, rho_tail, w, rho_w,
    )  # fmt: skip
    gap_tail = np.abs(m_tail - p_tail)
    plain = at(rho * p, own) + sigma * at(m, own)
    plain += (p * m * (rho + sigma) + 2 * p**2 * rho).sum(axis=-1)
    plain += UNIT * (c_k + 3) * (p * (m + p)).sum(axis=-1)
    plain += 3 * UNIT * (at(p, own) + at(m, own))
    plain += w * (tau + p_tail * rho_tail) + gap_tail * w * rho_w
    plain += 4 * UNIT * w * gap_tail
    length = np.where(view.used, np.abs(view.y - log), 0.0)
    divergence = (m * (sigma * length + UNIT * (reach + (c_k + 3) * length))).sum(axis=-1)
    low, high = np.maximum(m_tail - tau, 0.0), m_tail + tau
    ends = [tail_term(x, p_tail) for x in (low, high, np.clip(p_tail / math.e, low, high))]
    here = tail_term(m_tail, p_tail)
    divergence += np.max([np.abs(end - here) for end in ends], axis=0)
    logs = np.abs(np.log(np.where(high > 0, high, 1.0))) + np.abs(np.log(p_tail))
    divergence += high * (rho_tail + (KAPPA + 4) * UNIT * logs)
    # The last addition rounds the sum, which is at most the sum of both magnitudes.
    divergence += 2 * UNIT * ((m * length).sum(axis=-1) + high * logs)
    retained = (m * (sigma + c_k * UNIT)).sum(axis=-1), (p * (rho + c_k * UNIT)).sum(axis=-1)
    return {
        "mu_T": tau,
        "1 - sum mu": SECOND_ORDER * (retained[0] + UNIT * np.abs(truth["1 - sum mu"].mid)),
        "1 - sum pi": SECOND_ORDER * (retained[1] + UNIT * p_tail),
        "plain": SECOND_ORDER * plain,
        "complement": complement,
        "divergence": SECOND_ORDER * divergence,
    }


def max_of(view: TopK) -> Float64:
    """The largest stored log-prob."""
    return np.asarray(np.where(view.used, view.y, -np.inf).max(axis=-1), dtype=np.float64)


def tail_term(m: Float64, p_tail: Float64) -> Float64:
    """m log(m / pi_T), 0 at m = 0."""
    return np.where(m > 0, m * np.log(np.where(m > 0, m, 1.0) / p_tail), 0.0)


OTHERS_EVERY = 8
"""One chunk in so many is compared in reverse KL and total variation too."""


def ratios(rows: Family, others: bool = True) -> dict[str, float]:
    """Largest error, the ball's radius included, in units of its bound: by quantity."""
    pi, mu = policy(rows.z), policy(rows.y)
    c, d, log_pi, log_mu = enclosed_full(rows)
    bounds = full_bounds(mu, pi, rows.k)
    found = float32_full(rows)
    log, behavior_log = log_softmax(rows.z), log_softmax(rows.y)
    pairs = [
        ("policy", log, log_pi, UNIT * pi.reach),
        ("policy", np.exp(log), log_pi.exp(), pi.relative * pi.mass),
        ("policy", behavior_log, log_mu, UNIT * mu.reach),
        ("plain", found["plain"], c, bounds.plain),
        ("plain", found["plain, two sums"], c, bounds.plain),
        ("complement", found["complement"], c, bounds.complement),
        ("divergence", found["divergence"], d, bounds.divergence),
    ]
    distance = np.abs(pi.mass - mu.mass)
    margin = pi.relative * pi.mass + mu.relative * mu.mass
    computed = np.sign(np.exp(log) - np.exp(behavior_log))
    flipped = computed != np.sign(pi.mass - mu.mass)
    pairs.append(("signs", np.where(flipped, distance, 0.0), FloatBall.exact(0 * margin), margin))
    view = top_k(rows, mu.log)
    found_top_k, truth = float32_top_k(rows, view), enclosed_top_k(rows, view, log_pi)
    bounds_top_k = top_k_bounds(pi, view, truth)
    for name, value in found_top_k.items():
        pairs.append((f"top-k {name}", value, truth[name], bounds_top_k[name]))
    derived = {
        "kl plain C": bounds.plain,
        "kl D": bounds.divergence,
        "top-k kl plain C": bounds_top_k["plain"],
        "top-k kl plain D": bounds_top_k["divergence"],
        "top-k kl complement D": bounds_top_k["divergence"],
    }
    resolved = 2 * bounds_top_k["1 - sum pi"] < truth["1 - sum pi"].mid
    full, coarse = budgets(rows, view)
    judged = [
        *compared_full(rows, full, c, d, log_pi, log_mu, others),
        *compared_top_k(rows, view, coarse, log_pi, truth, resolved),
    ]
    for x in judged:
        pairs.append((f"budget of {x.name}", x.value, x.truth, x.budget))
        if x.name in derived:
            zero = FloatBall.exact(np.zeros(len(rows.k)))
            pairs.append((f"derived bound of {x.name}", derived[x.name], zero, x.budget))
    result: dict[str, float] = {}
    for name, value, ball, bound in pairs:
        error = np.abs(value.astype(np.float64) - ball.mid) + ball.rad
        require(np.isfinite(error).all(), f"{name} is finite")
        result[name] = max(result.get(name, 0.0), float((error / bound).max()))
    return result


def chunk_ratios(rows: int, size: int, seed: int) -> dict[str, float]:
    """`ratios` over one chunk of every family."""
    result: dict[str, float] = {}
    for _, family in families(rows, size, seed):
        for name, value in ratios(family, others=seed % OTHERS_EVERY == 0).items():
            result[name] = max(result.get(name, 0.0), value)
    return result


@cache
def experiment() -> dict[str, float]:
    """`ratios` over all rows of `SAMPLES`."""
    chunks = [(rows, size, 1000 * size + i) for rows, size, n in SAMPLES for i in range(n)]
    result: dict[str, float] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(chunk_ratios, *zip(*chunks, strict=True), chunksize=8):
            for name, value in found.items():
                result[name] = max(result.get(name, 0.0), value)
    return result


def require_within(*names: str) -> None:
    """No error of the experiment exceeds its bound."""
    for name in names:
        worst = experiment()[name]
        require(worst <= 1, f"{name}: an error is {worst:.3g} times its bound")


EXPERIMENT = (
    "prose, under the model of this section; no violation in balls on 101,808 random tokens in "
    "NumPy float32 (flat, Zipf and peaked rows, logits stored in fp32 and in bf16; 99,792 at "
    "V = 1,000, 2,016 at V = 50,000)"
)


@statement(
    "rounding.policy",
    "Error of a log-prob and of a probability from logits",
    formula=r"\begin{gathered}|\widehat{\log\pi_i}-\log\pi_i|\le u\lambda_i,\quad "
    r"|\hat\pi_i-\pi_i|\le\rho_i\pi_i,\quad \rho_i=\operatorname{expm1}(u(\lambda_i+\kappa)),\\ "
    r"\lambda_i=|dz_i|+|dz_i-L|+E,\quad E=\sum_j\pi_j|dz_j|+\kappa(1+L)+c,\quad "
    r"dz=z-\max z,\ L=\log\sum e^{dz},\ c=\lceil\log_2V\rceil+2\end{gathered}",
    how=EXPERIMENT,
    used="every rounding budget; invariant under shifts of the logits, as dz is",
)
def policy_errors() -> None:
    """Rounding dz_i shifts the exponent by at most u |dz_i|, exp errs by (kappa - 1) u, and the sum
    multiplies each term by at most ceil(log2 V) factors (`rounding.sums`).  So the computed sum is
    sum e^dz_j exp(b_j), |b_j| <= u (|dz_j| + kappa - 1 + ceil(log2 V)), and its logarithm moves by
    at most sum pi_j expm1(|b_j|) <= sum pi_j (|b_j| + b_j^2) (`rounding.products`; below by
    Jensen).  The log adds (kappa - 1) u L, the subtraction dz_i - L at most u |dz_i - L| and a
    second-order term.  All second-order terms together are below the slack u + 2 u under the
    conditions of this section.  exp of the log-prob adds kappa u; dividing by the sum instead of
    subtracting L errs by less."""
    require_within("policy")


@statement(
    "rounding.plain",
    "Budget of the plain forward-KL coefficient",
    formula=r"\begin{gathered}\rho_k\pi_k+\sigma_k\mu_k+\sum\pi\mu\,[(1+\rho)(1+\sigma)-1]"
    r"+\sum\pi^2[(1+\rho)^2-1]\\ +u(c+2)\sum[\pi\mu(1+\rho)(1+\sigma)+\pi^2(1+\rho)^2]"
    r"+(2u+u^2)[\pi_k(1+\rho_k)+\mu_k(1+\sigma_k)]\end{gathered}",
    how=EXPERIMENT,
    used="the budget that any honest implementation is judged by",
)
def plain_budget() -> None:
    """sigma is to mu what rho is to pi (`rounding.policy`).  The first line is the effect of the
    errors of pi and mu on each product.  Then every product meets at most ceil(log2 V) + 3
    roundings, whichever way mu - pi is taken (difference of products or product of the
    difference, one sum or two), and expm1((c + 1) u) <= u (c + 2) as u (c + 1)^2 <= 1; the local
    term meets 2."""
    require_within("plain")


@statement(
    "rounding.complement",
    "Budget of the complement form",
    formula=r"\begin{gathered}1.01\Bigl\{\sum_{i\ne k}W_i(\mu_i\sigma_i+\pi_i\rho_i)"
    r"+\sum_{i\ne k}|\mu_i-\pi_i|\Bigl(\pi_i\rho_i+\sum_{j\ne k}\pi_j\rho_j+cu\varepsilon\Bigr)"
    r"+u(c+3)\sum_{i\ne k}W_i|\mu_i-\pi_i|\Bigr\},\\ W_i=\varepsilon+\pi_i\end{gathered}",
    how=EXPERIMENT,
    used="`rounding.top-k`; the backends take the form of the moments instead (`rounding.budgets`)",
)
def complement_budget() -> None:
    """The difference of a product: W (error of mu - pi) + |mu - pi| (error of W) + rounding.  The
    error of W is that of pi_i and of eps, a sum of c - 2 levels; the two differences, the sum, the
    product and the sum over i are c + 3 roundings at most.  Products of two relative errors, each
    below 0.005 (checked), are below 1 %."""
    require_within("complement")


@statement(
    "rounding.divergence",
    "Budget of forward KL",
    formula=r"\sum\mu\sigma|l|+\sum\mu(1+\sigma)\,[u(\lambda+\lambda')+u(c+2)|l|]"
    r"\quad(\text{and } u(\delta+D) \text{ for the comparison})",
    how=EXPERIMENT,
    used="the proximity test",
)
def divergence_budget() -> None:
    """l = log pi - log mu errs by u (lambda + lambda') (`rounding.policy`) and the rounding of its
    subtraction; mu by sigma; the product and the sum add c - 1 roundings.  delta, stored in the
    working format, errs by u delta, the subtraction or comparison by at most u D more."""
    require_within("divergence")


@statement(
    "rounding.top-k",
    "Budgets in a top-K view of stored log-probs",
    formula=r"\begin{gathered}\tau=1.01\,u\Bigl[(\kappa+c_K+2)\sum_{S\setminus\max}\mu"
    r"+(\kappa+2)(1-\mu_{\max})\Bigr],\quad c_K=\lceil\log_2(K+1)\rceil+2,\\ "
    r"\text{complement: } +(\varepsilon+w)(\tau+\pi_T\rho_T)+|\mu_T-\pi_T|(\Delta_\varepsilon"
    r"+w\rho_w),\quad \text{plain: } +w(\tau+\pi_T\rho_T)+|\mu_T-\pi_T|w\rho_w+4uw|\mu_T-\pi_T|,"
    r"\\ \rho_T=\frac{1}{\pi_T}\sum_T\pi\rho+cu,\quad \rho_w=\frac2x\sum_T\pi^2\rho+\rho_T"
    r"+(c+2)u\end{gathered}",
    how=EXPERIMENT,
    used="budgets of top-K masks",
)
def top_k_budget() -> None:
    """Stored log-probs are exact numbers here, so sigma = kappa u; how far storage moved them is
    input noise, reported apart.  mu_T = -expm1(y_max) - sum of the others (`stable.tail-mass`):
    expm1 errs by kappa u of 1 - mu_max, the others by kappa u each and the roundings of their sum,
    the subtraction by u.  rho_T and rho_w are the relative errors of pi_T and w = x / pi_T as
    sums over the tail.  For D the tail term m log(m / pi_T) takes its whole range over
    [mu_T - tau, mu_T + tau], since its slope is infinite at 0; the minimum at m = pi_T / e counts
    where it is inside."""
    require_within("top-k mu_T", "top-k plain", "top-k complement", "top-k divergence")


@statement(
    "rounding.one-minus-sum",
    "Error of a tail mass taken as 1 - sum",
    formula=r"|\widehat{\mu_T}-\mu_T|\le1.01\Bigl[\sum_S\mu(\sigma+c_Ku)+u\mu_T\Bigr],\qquad "
    r"|\widehat{\pi_T}-\pi_T|\le1.01\Bigl[\sum_S\pi(\rho+c_Ku)+u\pi_T\Bigr]",
    how=EXPERIMENT,
    used="the plain budget in a top-K view, which covers implementations that take 1 - sum",
)
def one_minus_sum() -> None:
    """The retained masses err by sigma or rho each and by the roundings of their sum, the
    subtraction by u of its result.  The bound does not shrink with the tail: nothing holds of a
    tail mass below it, nor of its logarithm or of x / pi_T."""
    require_within("top-k 1 - sum mu", "top-k 1 - sum pi")


@statement(
    "rounding.tv-ties",
    "Signs that rounding can flip in total variation",
    formula=r"|\hat C-C|\le\sum_{j:\,|\pi_j-\mu_j|\le\rho_j\pi_j+\sigma_j\mu_j}|v_j|"
    r"\quad(\text{effect of the signs alone})",
    how=EXPERIMENT + "; here: no sign differs outside the margin",
    used="the total-variation budget",
)
def tv_signs() -> None:
    """C = sum s_j v_j / 2.  The sign of pi_j - mu_j is computed right where the difference exceeds
    both errors (a float subtraction never has the wrong sign); elsewhere s_j is off by at most 2,
    also for the tie convention s_j = 0."""
    require_within("signs")


@statement(
    "rounding.budgets",
    "The budgets that the judge uses",
    formula=r"\begin{gathered}|\hat h-h|\le(1+\rho)\max_\pm|\pi f'(te^{\pm g})-h|"
    r"+(\rho+u(\kappa+4))|h|+\pi\rho+\mu\sigma,\qquad "
    r"g=\ln(1+\rho)+\ln(1+\sigma)+u(|\ln t|+1),\\ "
    r"\text{tail: }\mu_T\in[\max(\mu_T-\tau,0),\mu_T+\tau],\qquad "
    r"\text{retained mass above 1: }+(\textstyle\sum_S\mu-1)^+\ (D),\ "
    r"+2(\sum_S\mu-1)^+\ (C)\end{gathered}",
    how="prose to first order, second-order terms by the factor 1.01; no violation in balls on the "
    "101,808 tokens of this section for NumPy float32 with NumPy's own sums: forward KL (full "
    "view; top-20 view with exact tail, tails by 1 - sum and as the backends take them) and the "
    "log-ratio on all of them, reverse KL and total variation (full view) on one chunk in 8, "
    "12,936 tokens; on all, no budget of plain C and of D is below the bound of `rounding.plain`, "
    "`rounding.divergence` or `rounding.top-k`",
    used="the judge (`pdverify.budgets`)",
)
def judged_budgets() -> None:
    """Assumed, not proved: exp, log, expm1 and log1p of NumPy and torch are within 4 ulp, and
    KAPPA u = 4 u relative is enough for them (an ulp is 1 u to 2 u, so 4 u is 2 ulp at the low end
    of a binade); CHAIN = 84 bounds the additions a term meets in NumPy's pairwise and torch's
    cascade sum of up to 2^21 terms (above ceil(log2 n), hence wider than the bounds above).
    SLACK = 1.01 is for second-order terms and needs relative errors below 0.005.  Box: the
    computed t = pi / mu is within the factors e^-g and e^g of the true one.  f convex makes f'
    monotone: on the box f' is between its values at the two ends, so pi f' moves at most as far as
    at the worse end; rho and the roundings of the function and the product account for the factor
    in front.  The cell of D (the uncentered one differs by a term linear in mu and pi, whose error
    is at most pi rho + mu sigma) is convex in pi: its maximum over the box is at an end.  Its
    minimum may be inside, but convexity gives f(t) - f(t - s) <= f(t + s) - f(t): it falls at most
    as far as it rises at the reflected point.  The reflection of t e^-x is in the box, since
    2 - e^-x <= e^x; that of t e^x may pass the lower end, where the chord costs a factor
    s / s_0 <= e^g, s_0 = t (1 - e^-g), which the 1.01 holds.  So the worse end bounds both signs.
    For a tail of mass below tau the lower end is cut at 0, and the minimum of m log(m / pi_T), at
    m = pi_T / e, is covered by the added tau: with x = pi_T / e >= m the fall is
    x - m (1 + log(x / m)) <= x - m <= tau where x is in the box.
    Ties of total variation: f' = sign(t - 1) / 2, anything in [-1/2, 1/2] at t = 1, is monotone as
    well; where the box holds t = 1 the end beyond has the other sign and the whole jump is counted,
    elsewhere none.  Tail: mu_T is known to an absolute tau, so mu_T + tau and max(mu_T - tau, 0)
    are the ends.  A rounded list may retain more than mass 1: then mu_T = 0 and forms that agree
    for sum mu = 1 part by the excess, in D once, in C times pi_k + n_2 <= 2.  Not covered, and not
    compared here: forward KL as sum (eps + pi) (mu - pi) (`rounding.complement`), which errs on
    flat rows by far more than the complement form of the moments, the one that the judge's
    backends use; and D with pi_T = 1 - sum where twice the bound of `rounding.one-minus-sum`
    reaches pi_T: such a pi_T may come out as 0, and D as infinity."""
    names = [x for x in experiment() if x.startswith(("budget of", "derived bound of"))]
    require(any("tv" in x for x in names) and any("top-k" in x for x in names), "all are compared")
    require_within(*names)


@statement(
    "rounding.input-noise",
    "What a change of the behavior logits does to C near mu = pi",
    formula=r"C=\sum_ia_i\epsilon_i+O(\epsilon^2),\quad y=z+\epsilon,\quad "
    r"a_i=\pi_i^2+\pi_i\Bigl(\pi_k-\sum_j\pi_j^2\Bigr)-\pi_k1[i=k]",
    how="symbolic derivative of the code at mu = pi, V = 2, 3, 4; general V by the same sums",
    used="input noise of stored logits, reported apart from rounding",
)
def input_noise() -> None:
    """mu_i = pi_i (1 + eps_i - sum pi eps) to first order; insert it in `coefficient.kl`."""
    for size in (2, 3, 4):
        e, f = weights(size), weights(size, "f")
        pi, mu = softmax(e), softmax(f)
        c = call("kl_coefficient", mu, pi, mu[0], pi[0])
        same = dict(zip(f, e, strict=True))
        n2 = sum(pi * pi)
        for i in range(size):
            slope = (f[i] * sp.diff(c, f[i])).subs(same)
            claim = pi[i] ** 2 + pi[i] * (pi[0] - n2) - int(i == 0) * pi[0]
            require_zero(slope - claim, f"noise coefficient, V = {size}, i = {i}")
