"""Values at probability zero: every guard of the generated code is a limit."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import sympy as sp

from derivations.divergences import DIVERGENCES, MU, PI, Divergence, T
from derivations.exact import array, call, formulas
from derivations.statements import add, require, require_zero, statement

S = sp.Symbol("s", positive=True)
MASSES = (sp.Rational(1, 3), sp.Rational(3, 4))


def same(value: Any, limit: sp.Expr) -> bool:
    """Whether what the code returned is the limit.

    Exactly; but the code holds log(2) as a float, with a relative error of one unit roundoff,
    and here at most 8 such terms, each of size at most 1, are added.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return bool(limit == (sp.oo if value > 0 else -sp.oo))
    if not limit.is_finite:
        return bool(value == limit)
    difference = sp.sympify(value) - limit
    if limit.has(sp.log):
        return bool(abs(sp.N(difference, 30)) <= 8 * float(np.finfo(float).eps))
    return bool(sp.expand(sp.radsimp(difference)) == 0)


def prove_limits(row: Divergence, code: dict[str, Any] | None = None) -> None:
    """Cell, moment and generator at probability zero."""
    parts = (
        ("cell", row.cell, row.cell_without_pi, row.cell_without_mu),
        ("moment", row.moment, row.moment_without_pi, row.moment_without_mu),
    )
    for part, value, without_pi, without_mu in parts:
        name = f"{row.identifier}_{part}"
        scaled = value.subs({MU: S * MU, PI: S * PI}, simultaneous=True)
        if row.smooth:
            require_zero(scaled - S * value, f"{part} is homogeneous of degree 1")
        for mass in MASSES:
            by_pi = sp.limit(_resolved(value.subs(MU, mass), -1), PI, 0, "+")
            require(by_pi == without_pi * mass, f"{part} as pi -> 0")
            require(same(call(name, mass, sp.Integer(0), code=code), by_pi), f"{name} at pi = 0")
            by_mu = sp.limit(_resolved(value.subs(PI, mass), 1), MU, 0, "+")
            require(by_mu == without_mu * mass, f"{part} as mu -> 0")
            require(same(call(name, sp.Integer(0), mass, code=code), by_mu), f"{name} at mu = 0")
        at_zero = call(name, sp.Integer(0), sp.Integer(0), code=code)
        require(at_zero == 0, f"{name} at mu = pi = 0")
    generator = f"{row.identifier}_f"
    require(same(call(generator, sp.Integer(0), code=code), row.f_at_zero), "f at 0")
    infinity = np.array([math.inf])
    value = (code or formulas())[generator](infinity)[0]
    require(same(float(value), row.f_at_infinity), "f at infinity")


def _resolved(expression: sp.Expr, side: int) -> sp.Expr:
    """Absolute values and signs of pi - mu resolved for pi < mu (-1) or pi > mu (+1)."""
    sign = expression.replace(sp.sign, lambda _: sp.Integer(side))
    return sign.replace(sp.Abs, lambda x: x if x.subs({PI: 1, MU: 0}) * side > 0 else -x)


for _row in DIVERGENCES:
    add(
        f"limits.{_row.name}",
        f"Values at probability zero of the {_row.title}",
        partial(prove_limits, _row),
        formula=rf"\text{{cell}}:\ {sp.latex(_row.cell_without_pi)}\,\mu\ (\pi\to0),\ "
        rf"{sp.latex(_row.cell_without_mu)}\,\pi\ (\mu\to0);\qquad h:\ "
        rf"{sp.latex(_row.moment_without_pi)}\,\mu\ (\pi\to0),\ "
        rf"{sp.latex(_row.moment_without_mu)}\,\pi\ (\mu\to0);\qquad "
        rf"g=f'(t):\ {sp.latex(sp.limit(_resolved(_row.slope, -1), T, 0, '+'))}\ (t\to0)",
        how="SymPy limits; the code at exact zeros",
        sketch="Cell and moment are homogeneous of degree 1, so with one mass at zero they are a "
        "multiple of the other mass, and both tend to 0 with both masses wherever they are finite; "
        "an empty slot (both 0) is no token, and contributes 0 by definition.  What a cell adds "
        "to C is h_j times a bounded factor, so a finite limit of h is all that C needs; the "
        "derivative g of the cell itself may be infinite there.",
        used=f"the guards of {_row.identifier}_f, {_row.identifier}_cell, {_row.identifier}_moment",
    )


@statement(
    "limits.empty-tail",
    "An empty tail has w = 0",
    formula=r"0\le w=x/\pi_T\le\pi_T\to0,\qquad w\,(\mu_T-\pi_T)\to0",
    how="symbolic, from coarse.ends; the code at exact zeros",
    used="tail_mean_exact, tail_mean_uniform, tail_mean_aggregated",
)
def empty_tail() -> None:
    """x <= pi_T^2 (`coarse.ends`) bounds w by pi_T.  So the tail leaves forward KL's C, which is
    finite even where mu_T > 0 = pi_T and D is infinite."""
    mass, share = sp.symbols("mass share", positive=True)
    require(sp.limit(mass**2 * share / mass, mass, 0, "+") == 0, "w -> 0, x = share pi_T^2")
    zero = sp.Integer(0)
    require(call("tail_mean_exact", zero, zero) == 0, "exact tail")
    require(call("tail_mean_uniform", zero, zero) == 0, "uniform tail, no cells")
    require(call("tail_mean_uniform", zero, sp.Integer(5)) == 0, "uniform tail, no mass")
    require(call("tail_mean_aggregated", zero) == 0, "aggregated tail")
    third, half = sp.Rational(1, 3), sp.Rational(1, 2)
    mu, pi = array([half, third]), array([third, 2 * third])
    rest = sp.Rational(1, 6), zero, zero
    finite = call("kl_coarse_coefficient", mu, pi, mu[0], pi[0], *rest)
    require_zero(finite - call("kl_coefficient", mu, pi, mu[0], pi[0]), "forward KL, empty pi_T")


@statement(
    "limits.infinite-moments",
    "Coefficients where moments are infinite",
    formula=r"C\to\operatorname{sign}(h_j)\,\operatorname{sign}\Bigl(1[j=k]-\pi_j-\pi_k+n_2\Bigr)"
    r"\cdot\infty",
    how="SymPy limits of the code as one mass goes to 0 from exact rational policies, every "
    "divergence; prose for several masses",
    used="coefficient_from_moments, complement_coefficient",
)
def infinite_moments() -> None:
    """A cell adds h_j (1[j = k] - pi_j - pi_k + n2) to C, so an infinite moment takes C to infinity
    with the sign of that product.  Several that agree in sign do so together; where they disagree
    the limit depends on how their masses vanish, and the code returns NaN; so it does where the
    product is infinity times 0."""
    sixth, fifth, third, half = (sp.Rational(1, n) for n in (6, 5, 3, 2))
    fixed, vanishing = [sixth, third, half], [3 * fifth - S, 2 * fifth, S]
    for row in DIVERGENCES:
        for k in (0, 1):
            _one_mass_vanishes(row, fixed, vanishing, k)
            _one_mass_vanishes(row, vanishing, fixed, k)
    require(_disagreeing(), "infinite moments that disagree give NaN")


def _one_mass_vanishes(row: Divergence, mu: list[sp.Expr], pi: list[sp.Expr], k: int) -> None:
    h = [row.moment.subs({MU: m, PI: p}, simultaneous=True) for m, p in zip(mu, pi, strict=True)]
    n2 = sum(x**2 for x in pi)
    terms = [h[j] * (int(j == k) - pi[j] - pi[k] + n2) for j in range(3)]
    expected = sp.simplify(sum(sp.limit(_near(term), S, 0, "+") for term in terms))
    mu, pi = ([x.subs(S, 0) for x in policy] for policy in (mu, pi))
    plain = call(f"{row.identifier}_coefficient", array(mu), array(pi), mu[k], pi[k])
    require(same(plain, expected), f"C of {row.name} as a mass vanishes: {plain}, not {expected}")
    h = [call(f"{row.identifier}_moment", m, p) for m, p in zip(mu, pi, strict=True)]
    rest = [j for j in range(3) if j != k]
    others = array(h[j] for j in rest), array(pi[j] for j in rest)
    complement = call("complement_coefficient", *others, h[k], pi[k], 0, 0, 0)
    require(same(complement, expected), f"complement C of {row.name} as a mass vanishes")


def _near(term: sp.Expr) -> sp.Expr:
    """`term` with the signs it has for small s."""
    return term.replace(sp.sign, lambda x: sp.sign(x.subs(S, sp.Rational(1, 10**9))))


def _disagreeing() -> bool:
    """Two cells of reverse KL with mu = 0, one pushed up and one pushed down."""
    tenth = sp.Rational(1, 10)
    mu = array([sp.Integer(1), sp.Integer(0), sp.Integer(0)])
    pi = array([2 * tenth, 7 * tenth, tenth])
    h = [call("reverse_kl_moment", m, p) for m, p in zip(mu, pi, strict=True)]
    n2 = sum(pi * pi)
    pushes = {sp.sign(n2 - pi[j] - pi[0]) for j in (1, 2)}
    value = call("reverse_kl_coefficient", mu, pi, mu[0], pi[0])
    complement = call("complement_coefficient", array(h[1:]), pi[1:], h[0], pi[0], 0, 0, 0)
    return pushes == {-1, 1} and math.isnan(value) and math.isnan(complement)
