"""The table of divergences: the only place where one is added.

A row is an f-divergence D(mu, pi) = sum_j mu_j f(pi_j / mu_j), given by f and by the forms in
which its two ingredients are to be written:

* `cell`, what one vocabulary entry adds to D, and
* `moment`, h = pi g with g = f'(pi / mu), f centered so that f'(1) = 0.

That these forms follow from f is the statement ``definition.<name>``; every coefficient then
follows from ``coefficient.general``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import sympy as sp

T = sp.Symbol("t", positive=True)
MU, PI = sp.symbols("mu pi", positive=True)
HALF = sp.Rational(1, 2)


@dataclass(frozen=True)
class Divergence:
    """One row of the table.

    Attributes:
        name: as on the command line, hyphenated.
        title: as in a sentence.
        unit: of D and of C.
        f: the classical generator, a function of `T` = pi / mu.
        cell: mu f(pi / mu), a function of `MU` and `PI`.
        moment: pi f'(pi / mu) of the centered generator.
    """

    name: str
    title: str
    unit: str
    f: sp.Expr
    cell: sp.Expr
    moment: sp.Expr

    @property
    def identifier(self) -> str:
        """The name as a Python identifier."""
        return self.name.replace("-", "_")

    @property
    def smooth(self) -> bool:
        """Whether f is differentiable at every t > 0."""
        return not self.f.has(sp.Abs)

    @cached_property
    def centered(self) -> sp.Expr:
        """f - f'(1) (t - 1): the same divergence, with a stationary point at t = 1."""
        return self.f - sp.diff(self.f, T).subs(T, 1) * (T - 1)

    @cached_property
    def slope(self) -> sp.Expr:
        """g = f', of the centered generator."""
        return sp.diff(self.centered, T)

    @cached_property
    def f_at_zero(self) -> sp.Expr:
        """The centered f(0+)."""
        return sp.limit(self.centered, T, 0, "+")

    @cached_property
    def f_at_infinity(self) -> sp.Expr:
        """The limit of the centered f."""
        return sp.limit(_without_abs(self.centered), T, sp.oo)

    @cached_property
    def cell_without_pi(self) -> sp.Expr:
        """The cell at pi = 0, per unit of mu: f(0+), of the classical f."""
        return sp.limit(self.f, T, 0, "+")

    @cached_property
    def cell_without_mu(self) -> sp.Expr:
        """The cell at mu = 0, per unit of pi: the limit of f(t) / t, of the classical f."""
        return sp.limit(sp.expand(_without_abs(self.f) / T), T, sp.oo)

    @cached_property
    def moment_without_pi(self) -> sp.Expr:
        """h at pi = 0, per unit of mu: the limit of t g(t) at 0."""
        return sp.limit(sp.expand(T * _without_sign(self.slope, -1)), T, 0, "+")

    @cached_property
    def moment_without_mu(self) -> sp.Expr:
        """h at mu = 0, per unit of pi: the limit of g(t) at infinity."""
        return sp.limit(_without_sign(self.slope, 1), T, sp.oo)

    @cached_property
    def mean_moment(self) -> tuple[sp.Expr, sp.Expr] | None:
        """(c, b) with h = c cell + b (pi - mu), hence sum h = c D; None where there is none.

        The two numbers are solved for at two points; that they hold everywhere is part of the
        statement ``definition.<name>``.
        """
        c, b = sp.symbols("c b")
        residual = self.moment - c * self.cell - b * (PI - MU)
        points = ({MU: 1, PI: 4}, {MU: 4, PI: 1}, {MU: 1, PI: 9})
        first = sp.linsolve([residual.subs(p) for p in points], [c, b])
        for solution in first:
            found = residual.subs({c: solution[0], b: solution[1]})
            if solution.free_symbols or not vanishes(found):
                return None
            return sp.nsimplify(sp.simplify(solution[0])), sp.nsimplify(sp.simplify(solution[1]))
        return None


def vanishes(expression: sp.Expr) -> bool:
    """Whether SymPy reduces `expression` to zero."""
    return bool(sp.simplify(sp.expand_log(sp.expand(expression), force=True)) == 0)


def _without_abs(expression: sp.Expr) -> sp.Expr:
    return expression.replace(sp.Abs, lambda x: x)


def _without_sign(expression: sp.Expr, value: int) -> sp.Expr:
    return expression.replace(sp.sign, lambda _: sp.Integer(value))


DIVERGENCES: tuple[Divergence, ...] = (
    Divergence(
        "kl",
        "forward KL divergence KL(mu || pi)",
        "nats",
        f=-sp.log(T),
        cell=MU * sp.log(MU / PI),
        moment=PI - MU,
    ),
    Divergence(
        "reverse-kl",
        "reverse KL divergence KL(pi || mu)",
        "nats",
        f=T * sp.log(T),
        cell=PI * sp.log(PI / MU),
        moment=PI * sp.log(PI / MU),
    ),
    Divergence(
        "tv",
        "total variation distance",
        "probability",
        f=sp.Abs(T - 1) / 2,
        cell=sp.Abs(PI - MU) / 2,
        moment=PI * sp.sign(PI - MU) / 2,
    ),
    Divergence(
        "jensen-shannon",
        "Jensen-Shannon divergence",
        "nats",
        f=(T * sp.log(2 * T / (1 + T)) + sp.log(2 / (1 + T))) / 2,
        cell=(MU * sp.log(2 * MU / (MU + PI)) + PI * sp.log(2 * PI / (MU + PI))) / 2,
        moment=PI * sp.log(2 * PI / (MU + PI)) / 2,
    ),
    Divergence(
        "squared-hellinger",
        "squared Hellinger distance",
        "probability",
        f=(1 - sp.sqrt(T)) ** 2 / 2,
        cell=(sp.sqrt(PI) - sp.sqrt(MU)) ** 2 / 2,
        moment=sp.sqrt(PI) * (sp.sqrt(PI) - sp.sqrt(MU)) / 2,
    ),
    Divergence(
        "chi2",
        "chi-squared divergence chi2(mu || pi)",
        "dimensionless",
        f=(1 - T) ** 2 / T,
        cell=(MU - PI) ** 2 / PI,
        moment=(PI - MU) * (PI + MU) / PI,
    ),
    Divergence(
        "reverse-chi2",
        "chi-squared divergence chi2(pi || mu)",
        "dimensionless",
        f=(T - 1) ** 2,
        cell=(PI - MU) ** 2 / MU,
        moment=2 * PI * (PI - MU) / MU,
    ),
)
