"""How a policy-gradient step moves a softmax policy."""

from __future__ import annotations

import sympy as sp

from derivations import indexed as ix
from derivations.exact import Array, array, call
from derivations.statements import require, require_zero, statement

SIZES = (2, 3, 4)


def weights(size: int, name: str = "e") -> Array:
    """Positive symbols e_j = exp(z_j)."""
    return array(sp.symbols(f"{name}1:{size + 1}", positive=True))


def softmax(e: Array) -> Array:
    """pi_j = e_j / sum e."""
    return e / sum(e)


def along_step(expression: sp.Expr, e: Array, k: int) -> sp.Expr:
    """Derivative of `expression` along the logit step e_k - pi, from d/dz_i = e_i d/de_i."""
    pi = softmax(e)
    return sum((int(i == k) - pi[i]) * e[i] * sp.diff(expression, e[i]) for i in range(len(e)))


def one_hot(size: int, k: int) -> Array:
    """Which cell holds the sampled token."""
    return array([i == k for i in range(size)]).astype(bool)


@statement(
    "motion.jacobian",
    "Jacobian of the softmax",
    formula=r"\frac{\partial\pi_j}{\partial z_i} = \pi_j\,(1[i=j]-\pi_i)",
    how="indexed sums, general V",
    used="motion.rate",
)
def jacobian() -> None:
    """SymPy differentiates exp(z_j) / sum_m exp(z_m) with an indexed sum; the Kronecker delta
    that appears in the sum picks its term i, because 0 <= i < V."""
    normalizer = ix.total(sp.exp(ix.Z[ix.M]), ix.M)
    derivative = sp.diff(sp.exp(ix.Z[ix.J]) / normalizer, ix.Z[ix.N])
    inner = sp.diff(normalizer, ix.Z[ix.N])
    s, e_i, e_j = sp.symbols("s e_i e_j", positive=True)
    reduced = derivative.subs(inner, ix.reduce_sums(inner)).subs(normalizer, s)
    reduced = reduced.subs({sp.exp(ix.Z[ix.J]): e_j, sp.exp(ix.Z[ix.N]): e_i})
    claim = e_j / s * (ix.delta(ix.N, ix.J) - e_i / s)
    require_zero((reduced - claim).expand(), "softmax Jacobian")


@statement(
    "motion.rate",
    "Motion of a softmax policy under the step dz = e_k - pi",
    formula=r"v_j = \pi_j\Bigl(1[j=k]-\pi_j-\pi_k+\sum_i\pi_i^2\Bigr)",
    how="indexed sums, general V; the code on symbols, V = 2, 3, 4",
    used="softmax_motion; every coefficient",
)
def rate() -> None:
    """v_j = sum_i (d pi_j / d z_i) (1[i = k] - pi_i) with `motion.jacobian`; the sums of
    pi_i 1[i = k] and of pi_i^2 remain.  The code is compared with the derivative of the softmax
    along the step."""
    step = ix.delta(ix.N, ix.K) - ix.P[ix.N]
    moved = ix.total(ix.P[ix.J] * (ix.delta(ix.N, ix.J) - ix.P[ix.N]) * step)
    n2 = ix.total(ix.P[ix.N] ** 2)
    claim = ix.P[ix.J] * (ix.delta(ix.J, ix.K) - ix.P[ix.J] - ix.P[ix.K] + n2)
    require_zero(ix.reduce_sums(moved) - ix.reduce_sums(claim), "rate, general V")
    for size in SIZES:
        e = weights(size)
        pi = softmax(e)
        v = call("softmax_motion", pi, pi[0], one_hot(size, 0))
        for j in range(size):
            require_zero(along_step(pi[j], e, 0) - v[j], f"softmax_motion, V = {size}, j = {j}")


@statement(
    "motion.conserved",
    "The motion conserves probability",
    formula=r"\sum_j v_j = 0",
    how="indexed sums, general V",
    used="coefficient.general: a constant added to every g_j changes no coefficient",
)
def conserved() -> None:
    """Sum the rate and use sum pi = 1."""
    n2 = ix.total(ix.P[ix.N] ** 2)
    inner = ix.delta(ix.J, ix.K) - ix.P[ix.J] - ix.P[ix.K] + n2
    require_zero(ix.reduce_sums(_product_sum(inner)), "sum of the rates")


def _product_sum(inner: sp.Expr) -> sp.Expr:
    return ix.total(sp.expand(ix.P[ix.J] * inner), ix.J)


@statement(
    "motion.sampled",
    "The sampled token always gains",
    formula=r"v_k = \pi_k(\varepsilon^2+q') \ge \pi_k(1-\pi_k)^2,\quad "
    r"\varepsilon=1-\pi_k,\ q'=\sum_{i\ne k}\pi_i^2;\qquad "
    r"v_j=-\pi_j(\pi_j+\pi_k\varepsilon-q')\ \ (j\ne k)",
    how="symbolic, general V",
    used="stable.complement-universal; binary.direction",
)
def sampled() -> None:
    """Insert sum pi^2 = pi_k^2 + q' in `motion.rate`; q' is a sum of squares."""
    p, p_j = sp.symbols("p p_j", positive=True)
    q = sp.Symbol("q", nonnegative=True)
    eps, n2 = 1 - p, p**2 + q
    require_zero(p * (1 - p - p + n2) - p * (eps**2 + q), "v_k")
    require_zero(p_j * (-p_j - p + n2) + p_j * (p_j + p * eps - q), "v_j")
    require(sp.expand(p * (eps**2 + q) - p * (1 - p) ** 2 - p * q) == 0, "v_k - bound = pi_k q'")
    require((p * q).is_nonnegative, "pi_k q' >= 0")
