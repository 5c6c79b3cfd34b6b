"""Second derivatives along the frozen logit step."""

from __future__ import annotations

import sympy as sp

from derivations import indexed as ix
from derivations.divergences import DIVERGENCES, T
from derivations.exact import array, call
from derivations.motion import softmax, weights
from derivations.statements import require, require_zero, statement

H = sp.Symbol("h", real=True)


@statement(
    "second-order.kl",
    "Forward KL to second order along the frozen logit step",
    formula=r"D(h)=D+hC+\frac{h^2}{2}\operatorname{Var}_\pi(u)+O(h^3),\quad u=e_k-\pi,\quad "
    r"\operatorname{Var}_\pi(u)=\Bigl(\pi_k-2\pi_k^2+\sum_i\pi_i^3\Bigr)"
    r"-\Bigl(\pi_k-\sum_i\pi_i^2\Bigr)^2",
    how="indexed sums, general V; symbolic second derivative, V = 2, 3, 4",
    used="kl_second_order_variance; predicted_divergence; predictive-kl-second-order",
)
def kl() -> None:
    """D(h) = const - sum mu_j (z_j + h u_j) + A(z + h u) with A = log sum exp, since sum mu = 1.
    The second derivative of A along u is the variance of u under pi; insert u."""
    u = ix.delta(ix.N, ix.K) - ix.P[ix.N]
    square = sp.expand(u**2).subs(ix.delta(ix.N, ix.K) ** 2, ix.delta(ix.N, ix.K))
    second = ix.reduce_sums(ix.total(ix.P[ix.N] * square))
    first = ix.reduce_sums(ix.total(ix.P[ix.N] * u))
    n2, n3 = ix.total(ix.P[ix.N] ** 2), ix.total(ix.P[ix.N] ** 3)
    p_k = ix.P[ix.K]
    claim = p_k - 2 * p_k**2 + n3 - (p_k - n2) ** 2
    require_zero(sp.expand(second - first**2 - claim), "variance of the step, general V")
    for size in (2, 3, 4):
        e = weights(size)
        pi = softmax(e)
        u_ = [int(j == 0) - pi[j] for j in range(size)]
        log_sum = sp.log(sum(e[j] * sp.exp(H * u_[j]) for j in range(size)))
        derivative = sp.diff(log_sum, H, 2).subs(H, 0)
        code = call("kl_second_order_variance", pi, pi[0])
        require_zero(derivative - code, f"second derivative, V = {size}")
    d, c, v = sp.symbols("d c v", real=True)
    require_zero(call("predicted_divergence", d, c, v, H) - (d + H * c + H**2 * v / 2), "Taylor")


@statement(
    "second-order.kl-coarse",
    "Top-K forward KL to second order along the frozen logit step",
    formula=r"\frac{d^2D}{dh^2}=\operatorname{Var}_\pi(u)-\mu_T\operatorname{Var}_{\pi|T}(u),\quad "
    r"\operatorname{Var}_{\pi|T}(u)=\frac{1}{\pi_T}\sum_T\pi_i^3-\Bigl(\frac{1}{\pi_T}\sum_T\pi_i^2"
    r"\Bigr)^2",
    how="symbolic second derivative, V = 3, 4, 5 with one to three tail tokens; general V in prose",
    used="kl_coarse_second_order_variance",
)
def kl_coarse() -> None:
    """log pi_T(h) = log sum_T exp(z + h u) - A(z + h u): minus mu_T times the second derivative of
    the first term, a variance within the tail where u_i = -pi_i, is added to `second-order.kl`.
    For the aggregated and the uniform tail that variance is 0: w2 = w^2."""
    for size, retained in ((3, 2), (3, 1), (4, 2), (5, 2)):
        e = weights(size)
        pi = softmax(e)
        mu_tail = sp.Symbol("m_T", positive=True)
        u = [int(j == 0) - pi[j] for j in range(size)]
        grown = [e[j] * sp.exp(H * u[j]) for j in range(size)]
        curved = sp.log(sum(grown)) - mu_tail * sp.log(sum(grown[retained:]))
        derivative = sp.diff(curved, H, 2).subs(H, 0)
        tail = pi[retained:]
        pi_tail = sum(tail)
        w, w2 = sum(tail**2) / pi_tail, sum(tail**3) / pi_tail
        arguments = pi[:retained], pi[0], mu_tail, pi_tail, w, w2
        code = call("kl_coarse_second_order_variance", *arguments)
        require_zero(derivative - code, f"coarse second derivative, V = {size}, |S| = {retained}")


@statement(
    "second-order.general",
    "Second derivative of any smooth f-divergence along the frozen logit step",
    formula=r"\frac{d^2D}{dh^2}=\sum_j\Bigl[\frac{f''(t_j)\,v_j^2}{\mu_j}+h_j\bigl((u_j-\bar u)^2"
    r"-\operatorname{Var}_\pi(u)\bigr)\Bigr],\quad \bar u=\sum_j\pi_ju_j",
    how="symbolic, one cell with arbitrary u_j, mean and variance (hence general V), every "
    "smooth divergence of the table",
    used="documentation; only forward KL is implemented",
)
def general() -> None:
    """Along the line pi_j' = pi_j (u_j - ubar) = v_j and pi_j'' = pi_j ((u_j - ubar)^2 - Var),
    because ubar' = Var.  The second derivative of mu_j f(pi_j / mu_j) is then the summand."""
    m, u = sp.symbols("m u", positive=True)
    p = sp.Function("p", positive=True)(H)
    mean = sp.Function("mean", real=True)(H)
    variance = sp.Symbol("variance", positive=True)
    first = p * (u - mean)
    second = sp.diff(first, H).subs(sp.diff(mean, H), variance).subs(sp.diff(p, H), first)
    require(sp.expand(second - p * ((u - mean) ** 2 - variance)) == 0, "second rate of a cell")
    q, rate, acceleration = sp.symbols("q rate acceleration", positive=True)
    for row in DIVERGENCES:
        if not row.smooth:
            continue
        cell = m * row.centered.subs(T, p / m)
        found = sp.diff(cell, H, 2).subs(sp.diff(p, H, 2), acceleration)
        found = found.subs(sp.diff(p, H), rate).subs(p, q)
        curvature = sp.diff(row.centered, T, 2).subs(T, q / m)
        claim = curvature * rate**2 / m + row.slope.subs(T, q / m) * acceleration
        require(sp.simplify(found - claim) == 0, f"second derivative of a cell of {row.name}")
    pi = array(sp.symbols("p1:4", positive=True))
    u_ = array(sp.symbols("u1:4", real=True))
    grown = [pi[j] * sp.exp(H * u_[j]) for j in range(3)]
    log_sum = sp.log(sum(grown))
    centered = sum(pi * u_) / sum(pi)
    require_zero(sp.diff(log_sum, H).subs(H, 0) - centered, "mean is the slope of log sum exp")
    spread = sum(pi * u_ * u_) / sum(pi) - centered**2
    require_zero(sp.diff(log_sum, H, 2).subs(H, 0) - spread, "variance is its curvature")
