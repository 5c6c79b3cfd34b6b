"""Input noise: how D and C answer to the numbers that both policies are stored in.

Cells are tokens and, in a top-K view, the tail, with logits zeta (the tail's is the log-sum-exp of
its tokens').  kappa is 1 on a token and x / pi_T^2 on the tail, so that n2 = sum kappa pi^2 and
v_c = pi_c s_c with s_c = 1[c = k] - kappa_c pi_c - pi_k + n2 (`coarse.affine`).
"""

from __future__ import annotations

import random

import sympy as sp
from flint import arb

from derivations import indexed as ix
from derivations.divergences import DIVERGENCES, MU, PI, T
from derivations.exact import Array, array, call
from derivations.motion import SIZES, softmax, weights
from derivations.statements import require, require_zero, statement


def _at_logit(expression: sp.Expr, e: Array, i: int) -> sp.Expr:
    """d/dzeta_i = e_i d/de_i."""
    return e[i] * sp.diff(expression, e[i])


def _rates(pi: Array, kappa: Array) -> Array:
    """s_c; the sampled token is the first cell."""
    n2 = sum(kappa * pi * pi)
    return array([int(c == 0) - kappa[c] * pi[c] - pi[0] + n2 for c in range(len(pi))])


def _cells(size: int) -> tuple[Array, Array]:
    """Weights of the cells, and kappa: the last cell is a tail."""
    return weights(size), array([*[sp.Integer(1)] * (size - 1), sp.Symbol("kappa", positive=True)])


def claimed(
    pi: Array, kappa: Array, g: Array, curvature: Array, i: int, sampled: int = 0
) -> sp.Expr:
    """dC/dzeta_i of `noise.training`; `curvature` is f''(t) t."""
    s = _rates(pi, kappa)
    q, h, n2 = curvature * pi * s, g * pi, sum(kappa * pi * pi)
    base = 2 * pi[i] * (kappa[i] * pi[i] - n2) - pi[sampled] * (int(i == sampled) - pi[i])
    own = q[i] - pi[i] * sum(q) + h[i] * (s[i] - kappa[i] * pi[i])
    return own - pi[i] * (sum(h * s) - sum(h * kappa * pi)) + sum(h) * base


@statement(
    "noise.divergence",
    "What stored logits do to D",
    formula=r"\frac{\partial D}{\partial\zeta_i}=\pi_i(g_i-\bar g),\qquad "
    r"\frac{\partial D}{\partial y_i}=\mu_i\Bigl(\varphi_i-\sum_j\mu_j\varphi_j\Bigr),\quad "
    r"\varphi=f-tf',\qquad \frac{\partial D}{\partial\log\mu_i}=\mu_i(\varphi_i-\varphi_T)",
    how="indexed sums, general V, arbitrary f",
    used="precision.noise; the last form on a list of log-probs whose tail takes what they leave",
)
def divergence() -> None:
    """phi is the derivative of mu f(pi / mu) by mu.  Both policies are a softmax of their cells'
    logits (`motion.jacobian`), or mu_T = 1 - sum_S mu."""
    f = sp.Function("f")
    slope = sp.diff(MU * f(PI / MU), MU).doit()
    f0, f1 = sp.symbols("f0 f1")
    require(slope.has(sp.Subs), "the derivative of f occurs")
    value = slope.replace(lambda x: isinstance(x, sp.Subs), lambda _: f1).subs(f(PI / MU), f0)
    require_zero(value - (f0 - PI / MU * f1), "phi = f - t f'")
    for policy in (ix.P, ix.Q):
        moved = ix.total(
            sp.expand(ix.G[ix.N] * policy[ix.N] * (ix.delta(ix.N, ix.J) - policy[ix.J]))
        )
        mean = ix.total(policy[ix.N] * ix.G[ix.N])
        claim = policy[ix.J] * (ix.G[ix.J] - mean)
        require_zero(ix.reduce_sums(moved) - ix.reduce_sums(claim), "chain rule, general V")


@statement(
    "noise.training",
    "What stored training logits do to C",
    formula=r"\begin{gathered}\frac{\partial C}{\partial\zeta_i}=q_i-\pi_iQ+h_i(s_i-\kappa_i\pi_i)"
    r"-\pi_i(C-G)+\bar h\,b_i,\\ b_i=2\pi_i(\kappa_i\pi_i-n_2)-\pi_k(1[i=k]-\pi_i),\quad "
    r"q=f''(t)\,t\,v,\ Q=\sum q,\ G=\sum h\kappa\pi,\ \bar h=\sum h\end{gathered}",
    how="symbolic with arbitrary g and f'', 2, 3, 4 cells with a tail; the code of both KL "
    "divergences, 3 cells",
    used="precision.noise",
)
def training() -> None:
    """C = sum g v.  g_j = f'(t_j) moves by f'' t (1[i = j] - pi_i), which gives q_i - pi_i Q, and v
    is differentiated.  A constant added to every g leaves the slopes: all are slopes of C, which
    it leaves (`motion.conserved`)."""
    for size in SIZES:
        e, kappa = _cells(size)
        pi = softmax(e)
        g = array(sp.symbols(f"g1:{size + 1}", real=True))
        bent = array(sp.symbols(f"c1:{size + 1}", real=True))
        v = pi * _rates(pi, kappa)
        for i in range(size):
            direct = sum(g[j] * _at_logit(v[j], e, i) for j in range(size))
            direct += sum(bent[j] * (int(i == j) - pi[i]) * v[j] for j in range(size))
            require_zero(direct - claimed(pi, kappa, g, bent, i), f"{size} cells, i = {i}")
    for name in ("kl", "reverse-kl"):
        _prove_code(name)


def _prove_code(name: str) -> None:
    """The generated top-K coefficient on {k, another token, tail} has the claimed slopes."""
    row = next(row for row in DIVERGENCES if row.name == name)
    e, kappa = _cells(3)
    pi, mu = softmax(e), softmax(weights(3, "f"))
    w = kappa[2] * pi[2]
    closed = call(
        f"{row.identifier}_coarse_coefficient", mu[:2], pi[:2], mu[0], pi[0], mu[2], pi[2], w
    )
    first, second = sp.diff(row.centered, T), T * sp.diff(row.centered, T, 2)
    g = array([first.subs(T, p / m) for m, p in zip(mu, pi, strict=True)])
    bent = array([second.subs(T, p / m) for m, p in zip(mu, pi, strict=True)])
    for i in range(3):
        require_zero(
            _at_logit(closed, e, i) - claimed(pi, kappa, g, bent, i), f"code of {name}, i = {i}"
        )


@statement(
    "noise.behavior",
    "What stored behavior logits or log-probs do to C",
    formula=r"\frac{\partial C}{\partial y_i}=-q_i+\mu_iQ,\qquad "
    r"\frac{\partial C}{\partial\log\mu_i}=-q_i+\mu_i\,\frac{q_T}{\mu_T}",
    how="symbolic with arbitrary f'', 2, 3, 4 cells",
    used="precision.noise; the second form as the last one of noise.divergence",
)
def behavior() -> None:
    """g = f'(pi / mu) answers to log mu by -f'' t; v does not depend on mu."""
    for size in SIZES:
        e, kappa = _cells(size)
        f = weights(size, "f")
        pi, mu = softmax(e), softmax(f)
        v = pi * _rates(pi, kappa)
        q = array(sp.symbols(f"c1:{size + 1}", real=True)) * v
        for i in range(size):
            moved = sum(-q[j] * _at_logit(sp.log(mu[j]), f, i) for j in range(size))
            require_zero(moved - (-q[i] + mu[i] * sum(q)), f"softmax, {size} cells, i = {i}")
        y = sp.symbols(f"y1:{size}", real=True)
        tail = 1 - sum(sp.exp(x) for x in y)
        for i in range(size - 1):
            moved = -q[i] - q[-1] * sp.diff(sp.log(tail), y[i])
            require(sp.simplify(moved - (-q[i] + sp.exp(y[i]) * q[-1] / tail)) == 0, "list")


@statement(
    "noise.kl",
    "The slopes of C of both KL divergences",
    formula=r"\begin{gathered}\mathrm{KL}(\mu\|\pi):\ q=\mu s,\ Q=-C,\quad "
    r"\frac{\partial C}{\partial\zeta_i}=\pi_i(s_i-\kappa_ih_i+G)+\bar h\,b_i,\ h=\pi-\mu;\\ "
    r"\mathrm{KL}(\pi\|\mu):\ q=v,\ Q=0\end{gathered}",
    how="symbolic, 2, 3, 4 cells with a tail",
    used="precision.noise",
)
def kl() -> None:
    """f'' t is mu / pi for the forward one and 1 for the reverse one; sum pi s = sum v = 0."""
    for size in SIZES:
        e, kappa = _cells(size)
        pi, mu = softmax(e), array(sp.symbols(f"m1:{size + 1}", positive=True))
        s, h = _rates(pi, kappa), pi - mu
        require_zero(sum(pi * s), "sum v = 0")
        require_zero(sum(mu * s) + sum(h * s), "Q = -C")
        g_sum = sum(h * kappa * pi)
        n2 = sum(kappa * pi * pi)
        for i in range(size):
            base = 2 * pi[i] * (kappa[i] * pi[i] - n2) - pi[0] * (int(i == 0) - pi[i])
            short = pi[i] * (s[i] - kappa[i] * h[i] + g_sum) + sum(h) * base
            require_zero(short - claimed(pi, kappa, h / pi, mu / pi, i), f"{size} cells, i = {i}")
    for name, bent in (("kl", 1 / T), ("reverse-kl", sp.Integer(1))):
        row = next(row for row in DIVERGENCES if row.name == name)
        require_zero(T * sp.diff(row.f, T, 2) - bent, f"f'' t of {name}")


@statement(
    "noise.tail",
    "How a tail moves as one cell",
    formula=r"\begin{gathered}\rho_i=\pi_i/\pi_T,\ \kappa=\sum_T\rho_i^2,\quad "
    r"\frac{\partial C}{\partial\kappa}=\pi_T(\pi_T\bar h-h_T),\quad "
    r"\frac{\partial\kappa}{\partial z_i}=2\rho_i(\rho_i-\kappa),\\ |\delta_i|\le r_i:\quad "
    r"\Bigl|\log\sum_T\rho_ie^{\delta_i}\Bigr|\le\log\sum_T\rho_ie^{r_i}\end{gathered}",
    how="symbolic, 2, 3, 4 cells or tail tokens; the inequality in prose",
    used="precision.noise",
)
def tail() -> None:
    """Upward each term grows by at most e^r.  Downward, by the concavity of the logarithm,
    -log sum rho e^d <= -sum rho d <= sum rho r <= log sum rho e^r."""
    for size in SIZES:
        e, kappa = _cells(size)
        pi = softmax(e)
        g = array(sp.symbols(f"g1:{size + 1}", real=True))
        c = sum(g * pi * _rates(pi, kappa))
        h = g * pi
        require_zero(sp.diff(c, kappa[-1]) - pi[-1] * (pi[-1] * sum(h) - h[-1]), "dC/dkappa")
        for i in range(size):
            slope = _at_logit(sum(pi * pi), e, i)
            require_zero(slope - 2 * pi[i] * (pi[i] - sum(pi * pi)), "dkappa/dz")


@statement(
    "noise.mass",
    "Masses over a box of logits",
    formula=r"\frac{e^{z_i-r_i}}{e^{z_i-r_i}+\sum_{j\ne i}e^{z_j+r_j}}\le\pi_i\le"
    r"\frac{e^{z_i+r_i}}{e^{z_i+r_i}+\sum_{j\ne i}e^{z_j-r_j}}",
    how="symbolic, V = 2, 3, 4",
    used="precision.boxes",
)
def mass() -> None:
    """log pi_i grows with its own logit, at rate 1 - pi_i, and falls with the others', at rates
    pi_j: its ends are at corners of the box."""
    for size in SIZES:
        e = weights(size)
        pi = softmax(e)
        for j in range(size):
            require_zero(_at_logit(sp.log(pi[0]), e, j) - (int(j == 0) - pi[j]), "monotone")


@statement(
    "noise.three-points",
    "A KL divergence near the stored policies",
    formula=r"\begin{gathered}P'\propto Pe^{a},\ Q'\propto Qe^{b}:\quad "
    r"\mathrm{KL}(P'\|Q')-\mathrm{KL}(P\|Q)=\sum(Q-P)b+\Bigl[\log\sum Qe^b-\sum Qb\Bigr]\\ "
    r"{}+\sum(P-P')b+\mathrm{KL}(P'\|P)+\sum(P'-P)\log\frac PQ;\\ "
    r"|b|\le r:\ 0\le\log\sum Qe^b-\sum Qb\le\tfrac12\sum Q\,r^2e^r,\qquad "
    r"|a|\le s:\ \mathrm{KL}(P'\|P)\le\frac{\sum P\,s^2e^s}{2\sum Pe^{-s}},\\ "
    r"\sum(P'-P)x=\frac{\sum P(e^a-1)(x-\sum Px)}{\sum Pe^a}\end{gathered}",
    how="symbolic, V = 2, 3; the inequalities in prose, in ball arithmetic on random rows",
    used="precision.noise",
)
def three_points() -> None:
    """The identity: insert log Q' = log Q + b - log sum Q e^b.  log sum Q e^b <= sum Q e^b - 1 and
    e^b - 1 - b is the integral of (b - u) e^u, at most b^2 e^|b| / 2.  KL(P'|P) is the integral
    over t in [0, 1] of t Var_t(a), the variance under P_t ~ P e^(t a), which is at most
    E_t a^2 <= sum P s^2 e^s / sum P e^-s.  On a list of log-masses, P' = P e^a on S and the tail
    takes the rest: KL(P'|P) is the sum over cells of m' log(m'/m) - m' + m, on S the integral of
    u e^u from 0 to a, times P, at most P s^2 e^s / 2, on the tail at most (m' - m)^2 / m."""
    for size in (2, 3):
        p, q = softmax(weights(size, "p")), softmax(weights(size, "q"))
        ea, eb = weights(size, "a"), weights(size, "b")
        grown_p, grown_q = p * ea, q * eb
        p2, q2 = grown_p / sum(grown_p), grown_q / sum(grown_q)
        b = array([sp.log(x) for x in eb])

        def kl(x: Array, y: Array) -> sp.Expr:
            return sum(m * (sp.log(m) - sp.log(n)) for m, n in zip(x, y, strict=True))

        ratio = array([sp.log(m) - sp.log(n) for m, n in zip(p, q, strict=True)])
        claim = sum((q - p) * b) + sp.log(sum(grown_q)) - sum(q * b) + sum((p - p2) * b)
        claim += kl(p2, p) + sum((p2 - p) * ratio)
        require_zero(kl(p2, q2) - kl(p, q) - claim, f"identity, V = {size}")
        x = array(sp.symbols(f"x1:{size + 1}", real=True))
        moved = sum(p * (ea - 1) * (x - sum(p * x))) / sum(grown_p)
        require_zero(sum((p2 - p) * x) - moved, f"moved mean, V = {size}")
    rng = random.Random(5)
    for _ in range(500):
        size = rng.randint(2, 6)
        z = [arb(rng.gauss(0, 3)) for _ in range(size)]
        s = [arb(rng.choice((1e-3, 0.1, 1.0)) * rng.random()) for _ in range(size)]
        a = [x * rng.uniform(-1, 1) for x in s]
        p = _normalized([x.exp() for x in z])
        grown = [x * y.exp() for x, y in zip(p, a, strict=True)]
        total = sum(grown)
        mean = sum(x * y for x, y in zip(p, a, strict=True))
        bent = sum(x * y**2 * y.exp() for x, y in zip(p, s, strict=True)) / 2
        least = sum(x * (-y).exp() for x, y in zip(p, s, strict=True))
        log_mgf = total.log() - mean
        require(not log_mgf > bent, "log-moment")
        divergence = sum(x * y for x, y in zip(_normalized(grown), a, strict=True)) - total.log()
        require(not divergence > bent / least, "KL(P'|P)")
        m, bend = p[0], a[0]
        share = m * ((bend - 1) * bend.exp() + 1)
        require(not share > m * bend**2 * abs(bend).exp() / 2, "a listed cell")
        other = p[1]
        require(not other * (other / m).log() - other + m > (other - m) ** 2 / m, "the tail")


def _normalized(x: list[arb]) -> list[arb]:
    total = sum(x)
    return [y / total for y in x]


@statement(
    "noise.signs",
    "What changing signs do to C of the total variation",
    formula=r"C'-C=\sum_j(g'_j-g_j)\,v'_j+\sum_jg_j\,(v'_j-v_j),\qquad g=\tfrac12\,"
    r"\mathrm{sign}(\pi-\mu),\quad g'_j-g_j\in\{0,-2g_j\}\ \text{or, at a tie,}\ \pm\tfrac12",
    how="symbolic; prose",
    used="precision.noise",
)
def signs() -> None:
    """The second sum moves with fixed g, by `noise.training` with q = 0.  In the first, only tokens
    whose sign is open over the box count; one whose stored sign is 1 lowers C by v' at most, one
    whose stored sign is -1 raises it."""
    g, g2, v, v2 = sp.symbols("g g2 v v2", real=True)
    require_zero(g2 * v2 - g * v - ((g2 - g) * v2 + g * (v2 - v)), "split")


@statement(
    "noise.selection",
    "Another top-K list",
    formula=r"C_S-C_U=\sum_{j\in U\setminus S}(g_{T(S)}-g_j)\,v_j+(g_{T(S)}-g_{T(U)})\,v_{T(U)}"
    r"\quad(S\subset U),\qquad \min\le g_{T(S)}\le\max\ \text{of}\ g_{T(U)},\ g_j\ (j\in U"
    r"\setminus S)",
    how="symbolic, one, two and three tokens that leave; "
    "the mediant inequality on random rationals",
    used="precision.selection; D by coarse.lower-bound",
)
def selection() -> None:
    """With the exact tail C_S = sum_S g v + g_T(S) v_T(S), and v_T(S) is the sum of the rates of
    what is in the tail.  pi_T(S) / mu_T(S) is a mediant of the ratios of its parts, hence between
    them, and f' does not decrease."""
    for count in (1, 2, 3):
        g, v = sp.symbols(f"g1:{count + 1}", real=True), sp.symbols(f"v1:{count + 1}", real=True)
        g_s, g_u, v_u, core = sp.symbols("g_S g_U v_U core", real=True)
        all_in = core + sum(x * y for x, y in zip(g, v, strict=True)) + g_u * v_u
        left = core + g_s * (v_u + sum(v))
        claim = sum((g_s - x) * y for x, y in zip(g, v, strict=True)) + (g_s - g_u) * v_u
        require_zero(left - all_in - claim, f"{count} tokens leave")
    rng = random.Random(7)
    for _ in range(200):
        pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(rng.randint(2, 5))]
        ratios = [sp.Rational(p, m) for p, m in pairs]
        mediant = sp.Rational(sum(p for p, _ in pairs), sum(m for _, m in pairs))
        require(min(ratios) <= mediant <= max(ratios), "mediant")
