"""The coefficient C of every divergence: general formula, definitions, and each closed form."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import sympy as sp

from derivations import indexed as ix
from derivations.divergences import DIVERGENCES, MU, PI, Divergence, T, vanishes
from derivations.emit import coefficient_text, plain
from derivations.exact import Array, array, call, random_policy
from derivations.motion import along_step, softmax, weights
from derivations.statements import add, normal_form, require, require_zero, statement

SIZES = (2, 3, 4)


@statement(
    "coefficient.general",
    "Coefficient of any divergence, and of any f-divergence in its moments",
    formula=r"C=\sum_j g_j v_j=\pi_k(g_k-\bar g)-\sum_j\pi_j^2(g_j-\bar g)"
    r"=h_k-\sum_j\pi_jh_j-\bar h\Bigl(\pi_k-\sum_j\pi_j^2\Bigr),\quad "
    r"g_j=\frac{\partial D}{\partial\pi_j},\ h_j=\pi_jg_j,\ "
    r"\bar g=\sum_j\pi_jg_j=\bar h=\sum_jh_j",
    how="indexed sums, general V; the code on symbols, V = 2, 3, 4",
    used="coefficient_from_moments; every coefficient",
)
def general() -> None:
    """Chain rule with the rates of `motion.rate`, then linearity of sums.  The identity needs no
    normalization.  Adding a constant to every g_j changes nothing (`motion.conserved`)."""
    n2 = ix.total(ix.P[ix.N] ** 2)
    mean = ix.total(ix.P[ix.N] * ix.G[ix.N])
    rate = ix.delta(ix.J, ix.K) - ix.P[ix.J] - ix.P[ix.K]
    moved = ix.total(sp.expand(ix.G[ix.J] * ix.P[ix.J] * rate), ix.J)
    direct = ix.reduce_sums(moved) + ix.reduce_sums(mean) * n2
    centered = ix.P[ix.K] * (ix.G[ix.K] - mean) - (
        ix.total(ix.P[ix.N] ** 2 * ix.G[ix.N]) - mean * n2
    )
    require_zero(direct - sp.expand(centered), "C with mean subtracted, general V")
    for size in SIZES:
        pi = array(sp.symbols(f"p1:{size + 1}", positive=True))
        h = array(sp.symbols(f"h1:{size + 1}", real=True))
        n2 = sum(pi * pi)
        claim = sum(h[j] * (int(j == 0) - pi[j] - pi[0] + n2) for j in range(size))
        for name in ("plain_form", "coefficient_from_moments"):
            code = call(name, h, pi, h[0], pi[0], 0, 0, 0)
            require_zero(code - claim, f"{name}, V = {size}")


def prove_definition(row: Divergence) -> None:
    """f, its centering, the cell, the moment and the mean of the moments of one divergence."""
    ratio = PI / MU
    require(row.f.subs(T, 1) == 0, "f(1) = 0")
    require(row.centered.subs(T, 1) == 0, "centered f(1) = 0")
    require(row.slope.subs(T, 1) == 0, "centered f'(1) = 0")
    require(vanishes(row.cell - MU * row.f.subs(T, ratio)), "cell = mu f(pi / mu)")
    moment = PI * row.slope.subs(T, ratio)
    require(vanishes(row.moment - moment), "moment = pi f'(pi / mu)")
    constant = sp.diff(row.f, T).subs(T, 1)
    from_cell = PI * sp.diff(row.cell, PI) - constant * PI
    require_zero(from_cell - row.moment, "moment = pi (d cell / d pi - f'(1))")
    if row.mean_moment is not None:
        c, b = row.mean_moment
        require_zero(row.moment - c * row.cell - b * (PI - MU), "h = c cell + b (pi - mu)")
    if row.smooth:
        second = sp.factor(sp.simplify(sp.diff(row.f, T, 2)))
        require(second.is_positive, f"f'' = {second} > 0")
    code = call(f"{row.identifier}_cell", MU, PI), call(f"{row.identifier}_moment", MU, PI)
    require_zero(code[0] - row.cell, "code of the cell")
    require_zero(code[1] - row.moment, "code of the moment")
    require_zero(call(f"{row.identifier}_f", T) - row.centered, "code of the generator")


def along(row: Divergence, mu: Array, e: Array, k: int) -> sp.Expr:
    """Derivative of D(mu, softmax) along the step, differentiating the code of the cell."""
    pi = softmax(e)
    cells = [call(f"{row.identifier}_cell", mu[j], pi[j]) for j in range(len(e))]
    return sum(along_step(cell, e, k) for cell in cells)


def symbols(row: Divergence, size: int) -> tuple[Array, Array, dict[sp.Expr, sp.Expr]]:
    """(mu, e, substitution): positive symbols, and what to insert in the end.

    mu_V = 1 - the others; or, where square roots occur (and no normalization is needed, f being
    centered as it stands), mu and e are squares, so that the roots resolve.
    """
    root = 2 if row.f.has(sp.sqrt(T)) else 1
    m = sp.symbols(f"m1:{size + 1}", positive=True)
    e = weights(size)
    if root == 2:
        return array(x**2 for x in m), e, {x: sp.Symbol(f"r{x}", positive=True) ** 2 for x in e}
    return array(m), e, {m[-1]: 1 - sum(m[:-1])}


def prove_coefficient(row: Divergence, code: dict[str, Any] | None = None) -> None:
    """The generated coefficient is the derivative of the divergence along the step."""
    for size in SIZES:
        mu, e, normalization = symbols(row, size)
        pi = softmax(e)
        closed = call(f"{row.identifier}_coefficient", mu, pi, mu[0], pi[0], code=code)
        residual = along(row, mu, e, 0) - closed
        require_zero(normalized(residual, normalization), f"C of {row.name}, V = {size}")


def normalized(expression: sp.Expr, substitution: dict[sp.Expr, sp.Expr]) -> sp.Expr:
    """The numerator of `expression` after the substitution of `symbols`."""
    if any(x.is_Pow for x in substitution.values()):
        return normal_form(expression.subs(substitution))
    return sp.expand(normal_form(expression).subs(substitution))


def require_ties(size: int) -> None:
    """Slope of |pi_j(h) - mu_j| on either side of a tie, from the slope of pi_j itself."""
    rng = random.Random(size)
    step = sp.Symbol("step", real=True)
    pi = random_policy(rng, size, scale=20)
    mixed = [pi[j] * sp.exp(step * (int(j == 0) - pi[j])) for j in range(size)]
    moved = [x / sum(mixed) for x in mixed]
    v = call("softmax_motion", array(pi), pi[0], np.array([j == 0 for j in range(size)]))
    for j in range(size):
        slope = sp.diff(moved[j], step).subs(step, 0)
        require_zero(slope - v[j], "slope of a tied cell")
    shift = sp.Rational(1, 100)
    mu = [pi[0], pi[1] - shift, *pi[2:-1], pi[-1] + shift]
    tied = [j for j in range(size) if mu[j] == pi[j]]
    c = call("tv_coefficient", array(mu), array(pi), mu[0], pi[0])
    loose = sum(sp.sign(pi[j] - mu[j]) * v[j] for j in range(size)) / 2
    require_zero(c - loose, "tied cells contribute nothing to C")
    kink = sum(sp.Abs(v[j]) for j in tied) / 2
    distance = sum(sp.Abs(moved[j] - mu[j]) for j in range(size)) / 2
    start = distance.subs(step, 0)
    for side in (1, -1):
        small = side * sp.Rational(1, 10**12)
        realized = ((distance - start) / sp.Abs(step)).subs(step, small).evalf(60)
        predicted = (side * c + kink).evalf(60)
        require(abs(realized - predicted) < 1e-10, "one-sided slope of TV at ties")


@statement(
    "coefficient.tv-ties",
    "Total variation at ties: the convention sign(0) = 0 and the true one-sided slope",
    formula=r"D(h)=D+hC+\frac{|h|}{2}\sum_{j:\,\pi_j=\mu_j}|v_j|+O(h^2)",
    how="exact rationals for the slopes of the tied cells, prose for the limit, and the "
    "difference quotient at step 1e-12 in 60 digits; V = 3, 4",
    used="tv_moment; the tie rows of the budgets",
)
def ties() -> None:
    """A cell with pi_j != mu_j keeps its sign for small h and contributes h s_j v_j / 2.  A tied
    cell has pi_j(h) - mu_j = h v_j + O(h^2), so it contributes |h| |v_j| / 2: nothing to C under
    sign(0) = 0, and a rise in both directions.  With ties both A > 0 and A < 0 can raise TV."""
    for size in (3, 4):
        require_ties(size)


@statement(
    "binary.direction",
    "For the partition {k, rest} the predicted direction is the ratio direction",
    formula=r"C=v_k\Bigl[f'\Bigl(\frac{\pi_k}{\mu_k}\Bigr)-f'\Bigl(\frac{1-\pi_k}{1-\mu_k}\Bigr)"
    r"\Bigr],\qquad \operatorname{sign} C=\operatorname{sign}(\pi_k-\mu_k)",
    how="symbolic, every divergence of the table; prose for the sign; exact signs on 60 "
    "random rational policies",
    used="dppo-binary-tv, dppo-binary-kl",
)
def binary() -> None:
    """The rest moves by -v_k (`motion.conserved`), and v_k > 0 for 0 < pi_k < 1
    (`motion.sampled`).  If pi_k > mu_k then pi_k / mu_k > 1 > (1 - pi_k) / (1 - mu_k), and f' is
    strictly increasing because f'' > 0 (`definition.<name>`), so the bracket is positive;
    pi_k < mu_k reverses both.  For total variation the bracket is sign(pi_k - mu_k)."""
    a, b, w = sp.symbols("a b w", positive=True)
    rng = random.Random(7)
    for row in DIVERGENCES:
        name = f"{row.identifier}_coarse_coefficient"
        odds = (a**2, b**2) if row.f.has(sp.sqrt(T)) else (a, b)
        (m, m_rest), (p, p_rest) = [(x / (1 + x), 1 / (1 + x)) for x in odds]
        code = call(name, array([m]), array([p]), m, p, m_rest, p_rest, w)
        v_k = p * (1 - 2 * p + p**2 + p_rest * w)
        bracket = row.slope.subs(T, p / m) - row.slope.subs(T, p_rest / m_rest)
        residual = code - v_k * bracket
        if not row.smooth:
            residual = residual.replace(sp.sign, _sign_of_difference(p - m))
        require_zero(residual, f"binary C of {row.name}")
        for _ in range(60):
            mu, pi = random_policy(rng, 4), random_policy(rng, 4)
            tail = 1 - mu[0], 1 - pi[0]
            mean = sum(x**2 for x in pi[1:]) / tail[1]
            c = call(name, array([mu[0]]), array([pi[0]]), mu[0], pi[0], *tail, mean)
            require(sp.sign(c) == sp.sign(pi[0] - mu[0]), f"direction of binary {row.name}")


def _sign_of_difference(difference: sp.Expr) -> Any:
    """Rewrite sign(c difference), c of known sign, as sign(c) sign(difference)."""
    s = sp.Symbol("s", real=True)
    return lambda x: s * sp.sign(sp.factor(x / difference))


def latex_term(expression: sp.Expr, index: str = "j") -> str:
    """LaTeX of an expression in `MU` and `PI` with an index."""
    names = {MU: sp.Symbol(rf"\mu_{index}"), PI: sp.Symbol(rf"\pi_{index}")}
    return str(sp.latex(expression.subs(names)))


def _register(row: Divergence) -> None:
    convex = "" if row.smooth else "  f is convex with a kink at t = 1, where f' = 0 by convention."
    mean = ""
    if row.mean_moment is not None:
        c, b = (sp.Symbol("D") * row.mean_moment[0]), row.mean_moment[1]
        cell, excess = plain(c).replace("D", "cell"), plain(b * sp.Symbol("(pi - mu)"))
        whole = " + ".join(x for x in (cell, excess) if x != "0")
        mean = f"  Moreover h = {whole}, so sum h = {plain(c)}."
    second = "  f'' > 0." if row.smooth else ""
    add(
        f"definition.{row.name}",
        f"Generator, cell and moment of the {row.title}",
        partial(prove_definition, row),
        formula=rf"f(t)={sp.latex(row.centered)},\quad "
        rf"D=\sum_j\Bigl[{latex_term(row.cell)}\Bigr],\quad h_j={latex_term(row.moment)}",
        how="symbolic, one cell (hence general V); the code on symbols",
        sketch="cell = mu f(pi / mu) for the classical f; subtracting f'(1) (t - 1) changes D by "
        "f'(1) (sum pi - sum mu) = 0 and makes f'(1) = 0; h = pi f'(pi / mu), which is pi times "
        f"the derivative of the cell up to a constant.{second}{convex}{mean}",
        used=f"{row.identifier}_f, {row.identifier}_cell, {row.identifier}_moment",
    )
    closed = coefficient_text(row).replace("sum", r"\sum").replace("hbar", r"\bar h")
    closed = closed.replace("pi_", r"\pi_").replace("mu_", r"\mu_")
    add(
        f"coefficient.{row.name}",
        f"Coefficient of the {row.title}",
        partial(prove_coefficient, row),
        formula="C=" + closed,
        how="symbolic, V = 2, 3, 4: the derivative of the code of D minus the code of C "
        f"simplifies to 0{'' if row.smooth else ', away from ties'}; general V in prose",
        sketch=f"General V: D is a sum of cells, so its derivative by pi_j is that of one cell, "
        f"h_j / pi_j up to a constant (`definition.{row.name}`); insert it in "
        "`coefficient.general`, the constant drops by `motion.conserved`.",
        used=f"{row.identifier}_coefficient",
    )


for _row in DIVERGENCES:
    _register(_row)
