"""Top-K views: the coarsened divergence, its tail estimators, and what is certain."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import sympy as sp
from flint import arb, fmpq

from derivations import indexed as ix
from derivations.coefficients import latex_term, normalized, symbols
from derivations.divergences import DIVERGENCES, Divergence, T
from derivations.exact import array, call, random_policy
from derivations.motion import along_step, softmax
from derivations.statements import add, require, require_zero, statement

#: (V, |S|) of the symbolic proofs: one tail token, then two.
SHAPES = ((3, 2), (4, 2))


@statement(
    "coarse.affine",
    "The derivative of the top-K divergence is affine in the tail's collision mass",
    formula=r"C(x)=\sum_{j\in S}g_jv_j+g_Tv_T,\quad v_T=-x-\pi_T\pi_k+\pi_T n_2,\quad "
    r"n_2=\sum_S\pi_j^2+x,\quad \frac{dC}{dx}=\bar g-g_T,\quad x=\pi_T w=\sum_{i\notin S}\pi_i^2",
    how="symbolic with arbitrary g, |S| = 1, 2, 3; indexed sums for v_T",
    used="coefficient_from_moments; every coarse coefficient",
)
def affine() -> None:
    """The tail cell moves by the sum of the rates of its tokens, none of which is k.  Everything
    else is linear in n_2 = sum_S pi^2 + x.  The code is the same function with x = pi_T w."""
    tail_rate = ix.total(sp.expand(ix.P[ix.N] * (-ix.P[ix.N] - ix.P[ix.K])))
    mass, n2 = sp.symbols("pi_T n2", positive=True)
    x = ix.total(ix.P[ix.N] ** 2)
    moved = ix.reduce_sums(tail_rate, policies=()) + mass * n2
    moved = moved.subs(ix.total(ix.P[ix.N]), mass)
    require_zero(moved - (-x - mass * ix.P[ix.K] + mass * n2), "rate of the tail")
    w = sp.Symbol("w", positive=True)
    for size in (1, 2, 3):
        pi = array(sp.symbols(f"p1:{size + 1}", positive=True))
        g = array(sp.symbols(f"g1:{size + 1}", real=True))
        g_tail = sp.Symbol("g_T", real=True)
        x = mass * w
        n2 = sum(pi * pi) + x
        v = [pi[j] * (int(j == 0) - pi[j] - pi[0] + n2) for j in range(size)]
        v_tail = -x - mass * pi[0] + mass * n2
        claim = sum(g[j] * v[j] for j in range(size)) + g_tail * v_tail
        h, h_tail = g * pi, g_tail * mass
        for name in ("plain_form", "coefficient_from_moments"):
            code = call(name, h, pi, h[0], pi[0], h_tail, mass, w)
            require_zero(code - claim, f"{name}, |S| = {size}")
        slope = sp.diff(claim, w) / mass
        require_zero(slope - (sum(g * pi) + g_tail * mass - g_tail), "dC/dx = gbar - g_T")


def prove_coarse(row: Divergence, code: dict[str, Any] | None = None) -> None:
    """The coarse coefficient with the exact tail is the derivative of the top-K divergence."""
    for size, retained in SHAPES:
        mu, e, substitution = symbols(row, size)
        pi = softmax(e)
        mu_tail, pi_tail = sum(mu[retained:]), sum(pi[retained:])
        if row.f.has(sp.sqrt(T)):
            # The square roots of the tail's two masses must resolve as well: one tail token.
            if size - retained > 1:
                continue
            mu_tail, pi_tail = mu[-1], pi[-1]
        pairs = [*zip(mu[:retained], pi[:retained], strict=True), (mu_tail, pi_tail)]
        cells = [call(f"{row.identifier}_cell", m, p) for m, p in pairs]
        derivative = sum(along_step(cell, e, 0) for cell in cells)
        w = sum(pi[retained:] ** 2) / pi_tail
        arguments = mu[:retained], pi[:retained], mu[0], pi[0], mu_tail, pi_tail, w
        closed = call(f"{row.identifier}_coarse_coefficient", *arguments, code=code)
        claim = f"top-K C of {row.name}, V = {size}, |S| = {retained}"
        require_zero(normalized(derivative - closed, substitution), claim)


@statement(
    "coarse.exact",
    "With the exact tail the coefficient is the change of the divergence that is tested",
    formula=r"w=\frac{1}{\pi_T}\sum_{i\notin S}\pi_i^2\ \Longrightarrow\ "
    r"C=\frac{d}{dh}D_{\text{top-}K}\Big|_{h=0}",
    how="exact rationals: the code of w and of C on 40 random policies against the sum of g v "
    "over the true rates, chi-squared and total variation; symbolic in coarse.<name>",
    used="tail_mean_exact; tail exact",
)
def exact() -> None:
    """`coarse.affine` with the true x.  The policies here have V = 8 and |S| = 3, so that the
    tail is a real one; for all divergences see `coarse.<name>`."""
    rng = random.Random(11)
    for row in DIVERGENCES:
        if row.slope.has(sp.log, sp.sqrt(T)):
            continue
        for _ in range(40):
            mu, pi = array(random_policy(rng, 8)), array(random_policy(rng, 8))
            n2 = sum(pi * pi)
            v = [pi[j] * (int(j == 0) - pi[j] - pi[0] + n2) for j in range(8)]
            mu_tail, pi_tail = sum(mu[3:]), sum(pi[3:])
            slopes = [row.slope.subs(T, p / m) for m, p in zip(mu[:3], pi[:3], strict=True)]
            truth = sum(slopes[j] * v[j] for j in range(3))
            truth += row.slope.subs(T, pi_tail / mu_tail) * sum(v[3:])
            w = call("tail_mean_exact", sum(pi[3:] ** 2), pi_tail)
            arguments = mu[:3], pi[:3], mu[0], pi[0], mu_tail, pi_tail, w
            require(call(f"{row.identifier}_coarse_coefficient", *arguments) == truth, row.name)


@statement(
    "coarse.ends",
    "The uniform and the aggregated tail are the two ends of what the tail can be",
    formula=r"\frac{\pi_T^2}{n}\le x=\sum_{i\notin S}\pi_i^2\le\pi_T^2,\quad "
    r"n\,x-\pi_T^2=\sum_{i<j}(\pi_i-\pi_j)^2,\quad \pi_T^2-x=2\sum_{i<j}\pi_i\pi_j,\quad n=V-|S|",
    how="symbolic, n = 1 to 6 tail tokens; general n by the same identities (Lagrange)",
    used="tail_mean_uniform, tail_mean_aggregated; tail bracket",
)
def ends() -> None:
    """Both differences are sums of squares or of products of probabilities.  Equality at the
    lower end exactly for a flat tail, at the upper end exactly for a single token."""
    for n in range(1, 7):
        p = sp.symbols(f"p1:{n + 1}", positive=True)
        mass, x = sum(p), sum(y**2 for y in p)
        pairs = list(itertools.combinations(p, 2))
        require_zero(n * x - mass**2 - sum((a - b) ** 2 for a, b in pairs), f"lower end, n = {n}")
        require_zero(mass**2 - x - 2 * sum(a * b for a, b in pairs), f"upper end, n = {n}")
        require_zero(call("tail_mean_uniform", mass, n) - mass / n, "code of the uniform tail")
        require_zero(call("tail_mean_aggregated", mass) - mass, "code of the aggregated one")


@statement(
    "coarse.bracket",
    "The bracket certificate, and which end is smaller",
    formula=r"x=(1-\theta)x_0+\theta x_1\Rightarrow C(x)=(1-\theta)C(x_0)+\theta C(x_1),\quad "
    r"C(x_1)-C(x_0)=(\bar g-g_T)(x_1-x_0);\qquad \text{forward KL: } "
    r"\bar g-g_T=\frac{\mu_T-\pi_T}{\pi_T}",
    how="symbolic, |S| = 3, arbitrary moments",
    used="tail bracket",
)
def bracket() -> None:
    """C is affine in x (`coarse.affine`), and x lies between the ends (`coarse.ends`), so C(x) is
    a mixture of its two end values: if both have one sign, so has C for every tail.  The larger
    x gives the smaller C exactly when gbar < g_T, for forward KL when mu_T < pi_T."""
    h, pi = array(sp.symbols("h1:4", real=True)), array(sp.symbols("p1:4", positive=True))
    h_tail = sp.Symbol("h_T", real=True)
    mass, x0, x1, theta = sp.symbols("pi_T x0 x1 theta", positive=True)

    def c(x: sp.Expr) -> sp.Expr:
        return call("coefficient_from_moments", h, pi, h[0], pi[0], h_tail, mass, x / mass)

    mixture = (1 - theta) * c(x0) + theta * c(x1)
    require_zero(c((1 - theta) * x0 + theta * x1) - mixture, "affine between the ends")
    gap = (sum(h) + h_tail - h_tail / mass) * (x1 - x0)
    require_zero(c(x1) - c(x0) - gap, "difference of the ends")
    mu_tail = sp.Symbol("mu_T", positive=True)
    arguments = [
        array(sp.symbols("m1:4", positive=True)),
        pi,
        sp.Symbol("m1"),
        pi[0],
        mu_tail,
        mass,
    ]
    difference = call("kl_coarse_coefficient", *arguments, x1 / mass)
    difference -= call("kl_coarse_coefficient", *arguments, x0 / mass)
    require_zero(difference - (mu_tail - mass) / mass * (x1 - x0), "forward KL")


@statement(
    "coarse.lower-bound",
    "The top-K divergence never exceeds the full one",
    formula=r"D_{\text{top-}K}(\mu,\pi)\le D(\mu,\pi)",
    how="prose (Jensen) from f'' > 0; ball arithmetic on 40 random rational policies each",
    used="invariants of batches and implementations",
)
def lower_bound() -> None:
    """f is convex, so within the tail sum_T mu_i f(pi_i / mu_i) >= mu_T f(sum_T pi_i / mu_T), by
    Jensen's inequality with weights mu_i / mu_T.  Merging changes no other cell."""
    rng = random.Random(13)
    for row in DIVERGENCES:
        generator = on_balls(row.centered)
        for _ in range(40):
            mu, pi = random_policy(rng, 6), random_policy(rng, 6)
            full = divergence_ball(generator, mu, pi)
            merged = divergence_ball(generator, [*mu[:2], sum(mu[2:])], [*pi[:2], sum(pi[2:])])
            require(not full < merged, f"{row.name}: merging raised the divergence")
            if row.smooth:
                require(full > merged, f"{row.name}: merging unequal ratios lowers it strictly")


def on_balls(expression: sp.Expr) -> Any:
    """An expression in `T` as a function of a ball."""
    operations = {"log": arb.log, "sqrt": arb.sqrt, "Abs": abs}
    return sp.lambdify(T, expression, modules=[operations, {}])


def to_ball(x: sp.Rational) -> arb:
    """A rational as a ball."""
    return arb(fmpq(int(x.p), int(x.q)))


def divergence_ball(generator: Any, mu: list[sp.Rational], pi: list[sp.Rational]) -> arb:
    """Enclosure of sum mu f(pi / mu)."""
    terms = (to_ball(m) * generator(to_ball(p / m)) for m, p in zip(mu, pi, strict=True))
    return sum(terms, arb(0))


@statement(
    "coarse.rearrangement",
    "What a top-K view says of the full forward-KL coefficient",
    formula=r"C=(\pi_k-\mu_k)+\sum_S\pi_i(\mu_i-\pi_i)-x+\sum_{T}\pi_i\mu_i,\qquad "
    r"\min_m\sum_T\pi_im_i\le\sum_{T}\pi_i\mu_i\le\max_m\sum_T\pi_im_i,\quad "
    r"0\le m_i\le c,\ \sum_Tm_i=\mu_T",
    how="symbolic for the identity, V = 4, |S| = 2; prose (exchange) for the extremes; every "
    "vertex of the polytope in exact rationals, 200 random tails of 1 to 5 tokens",
    used="coefficient_interval",
)
def rearrangement() -> None:
    """c is the K-th largest probability of mu, which no unretained token exceeds.  Maximum: fill
    m_i = c down the tokens in order of falling pi until mu_T is spent.  If some m had pi_a > pi_b
    with m_a < c and m_b > 0, moving min(c - m_a, m_b) from b to a would keep m feasible and
    raise the sum by (pi_a - pi_b) times that; so a maximum (one exists, the polytope being
    compact) has no such pair, which is the filling.  The minimum fills in order of rising pi.
    Both are attained, so the interval is the narrowest; its ends have one sign exactly when the
    sign of C is known.  Feasible exactly when mu_T <= n c."""
    mu, pi = sp.symbols("m1:5", positive=True), sp.symbols("p1:5", positive=True)
    full = call("kl_coefficient", array(mu), array(pi), mu[0], pi[0])
    retained = call("kl_coefficient", array(mu[:2]), array(pi[:2]), mu[0], pi[0])
    rest = sum(p * m - p**2 for p, m in zip(pi[2:], mu[2:], strict=True))
    require_zero(full - retained - rest, "decomposition of C")
    rng = random.Random(17)
    for _ in range(200):
        n = rng.randint(1, 5)
        tail = [sp.Rational(rng.randint(0, 6), 40) for _ in range(n)]
        cap = sp.Rational(rng.randint(1, 9), 60)
        mass = n * cap * sp.Rational(rng.randint(0, 12), 12)
        values = [sum(a * b for a, b in zip(tail, m, strict=True)) for m in vertices(n, cap, mass)]
        require(max(values) == filled(sorted(tail, reverse=True), mass, cap), "maximum")
        require(min(values) == filled(sorted(tail), mass, cap), "minimum")


def filled(ordered: list[sp.Rational], mass: sp.Rational, cap: sp.Rational) -> sp.Rational:
    """Sum of pi m when the mass fills the tokens in the given order, `cap` each."""
    total = sp.Integer(0)
    for p in ordered:
        m = min(cap, mass)
        total, mass = total + p * m, mass - m
    return total


def vertices(n: int, cap: sp.Rational, mass: sp.Rational) -> list[tuple[sp.Rational, ...]]:
    """All vertices of {0 <= m_i <= cap, sum m = mass}: at most one entry is strictly inside."""
    found = []
    for free in range(n):
        for rest in itertools.product((sp.Integer(0), cap), repeat=n - 1):
            last = mass - sum(rest)
            if 0 <= last <= cap:
                found.append((*rest[:free], last, *rest[free:]))
    return found


def _register(row: Divergence) -> None:
    root = row.f.has(sp.sqrt(T))
    shapes = SHAPES[:1] if root else SHAPES
    add(
        f"coarse.{row.name}",
        f"Coefficient of the top-K {row.title}",
        partial(prove_coarse, row),
        formula=r"C=h_k-w\,h_T-\sum_S\pi_jh_j-\bar h\Bigl(\pi_k-\sum_S\pi_j^2-\pi_Tw\Bigr),\quad "
        rf"\bar h=\sum_Sh_j+h_T,\quad h_T={latex_term(row.moment, 'T')}"
        if row.name != "kl"
        else r"C=(\pi_k-\mu_k)+\sum_S\pi_i(\mu_i-\pi_i)+w(\mu_T-\pi_T)",
        how="symbolic, (V, |S|) = "
        + ", ".join(str(shape) for shape in shapes)
        + ": the derivative of the code of the top-K D minus the code of C simplifies to 0"
        + ("" if row.smooth else ", away from ties"),
        sketch=f"`coarse.affine` with the moments of `definition.{row.name}`, the tail being one "
        "more cell; this argument holds for every V and S.",
        used=f"{row.identifier}_coarse_coefficient",
    )


for _row in DIVERGENCES:
    _register(_row)
