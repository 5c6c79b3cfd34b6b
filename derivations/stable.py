"""Forms of the same numbers that do not cancel."""

from __future__ import annotations

import sympy as sp

from derivations.exact import Array, array, call
from derivations.statements import require, require_zero, statement

#: Numbers of tokens besides k in the symbolic proofs.
OTHERS = (1, 2, 3)


def _policy(name: str, others: int) -> tuple[sp.Expr, Array, sp.Symbol]:
    """(mass of k, masses of the others, tail mass), which sum to 1."""
    rest = array(sp.symbols(f"{name}1:{others + 1}", positive=True))
    tail = sp.Symbol(f"{name}_T", positive=True)
    return 1 - sum(rest) - tail, rest, tail


@statement(
    "stable.complement-kl",
    "Complement form of the forward-KL coefficient",
    formula=r"C=\sum_{S\setminus k}(\varepsilon+\pi_i)(\mu_i-\pi_i)+(\varepsilon+w)(\mu_T-\pi_T),"
    r"\quad \varepsilon=\sum_{S\setminus k}\pi_i+\pi_T",
    how="symbolic in the sums over S without k, hence general V; the code, |S| = 2, 3, 4",
    used="kl_complement_coefficient",
)
def complement_kl() -> None:
    """mu_k = 1 - sum' mu - mu_T and pi_k = 1 - eps.  The sums over S without k that occur are
    those of pi, mu, pi^2 and pi mu; both forms are the same polynomial in them, in mu_T, pi_T
    and w."""
    p, m, pp, pm = sp.symbols("p m pp pm", positive=True)
    mu_t, pi_t, w = sp.symbols("mu_T pi_T w", positive=True)
    mu_k, pi_k, eps = 1 - m - mu_t, 1 - p - pi_t, p + pi_t
    plain = (pi_k - mu_k) + pi_k * (mu_k - pi_k) + pm - pp + w * (mu_t - pi_t)
    complement = eps * (m - p) + pm - pp + (eps + w) * (mu_t - pi_t)
    require_zero(plain - complement, "complement form, general V")
    for others in OTHERS:
        mu_k, mu, mu_t = _policy("m", others)
        pi_k, pi, pi_t = _policy("p", others)
        arguments = array([mu_k, *mu]), array([pi_k, *pi]), mu_k, pi_k, mu_t, pi_t, w
        plain = call("kl_coarse_coefficient", *arguments)
        require_zero(
            call("kl_complement_coefficient", mu, pi, mu_t, pi_t, w) - plain, "code, top-K view"
        )
        full = array([mu_k + mu_t, *mu]), array([pi_k + pi_t, *pi]), mu_k + mu_t, pi_k + pi_t
        plain = call("kl_coefficient", *full)
        complement = call("kl_complement_coefficient", mu, pi, 0, 0, 0)
        require_zero(complement - plain, "code, full view")


@statement(
    "stable.complement-universal",
    "Complement form of the coefficient of any f-divergence",
    formula=r"C=h_k(\varepsilon^2+q')-\sum_{S\setminus k}h_j(\pi_j+\pi_k\varepsilon-q')"
    r"-h_T(w+\pi_k\varepsilon-q'),\quad q'=\sum_{S\setminus k}\pi_j^2+\pi_Tw",
    how="symbolic in the sums over S without k, hence general V; the code, |S| = 2, 3, 4",
    used="complement_coefficient",
)
def complement_universal() -> None:
    """`motion.sampled` gives the rates of k and of the others, the tail being one more cell with
    v_T = -pi_T (w + pi_k eps - q').  Only sum' pi, sum' pi^2, sum' h and sum' pi h occur."""
    p, pp, s, ph = sp.symbols("p pp s ph", real=True)
    h_k, h_t, pi_t, w = sp.symbols("h_k h_T pi_T w", real=True)
    eps, q = p + pi_t, pp + pi_t * w
    pi_k = 1 - eps
    mean, n2 = h_k + s + h_t, pi_k**2 + q
    plain = h_k - w * h_t - (pi_k * h_k + ph) - mean * (pi_k - n2)
    shift = pi_k * eps - q
    complement = h_k * (eps**2 + q) - (ph + shift * s) - h_t * (w + shift)
    require_zero(plain - complement, "complement form, general V")
    for others in OTHERS:
        pi_k, pi, pi_t = _policy("p", others)
        h = array(sp.symbols(f"h1:{others + 1}", real=True))
        arguments = array([h_k, *h]), array([pi_k, *pi]), h_k, pi_k, h_t, pi_t, w
        plain = call("coefficient_from_moments", *arguments)
        for name in ("complement_form", "complement_coefficient"):
            require_zero(call(name, h, pi, h_k, pi_k, h_t, pi_t, w) - plain, f"code of {name}")


@statement(
    "stable.difference",
    "Difference form near mu = pi",
    formula=r"\mu_i-\pi_i=\pi_i\operatorname{expm1}(-l_i),\quad l_i=\log\pi_i-\log\mu_i"
    r"=(z_i-y_i)-(\operatorname{lse} z-\operatorname{lse} y)",
    how="symbolic, one token",
    used="backends",
)
def difference() -> None:
    """exp(-l) = mu / pi.  The second form of l holds because the log-probs are logits minus their
    log-sum-exp."""
    m, p = sp.symbols("m p", positive=True)
    logit = sp.log(p) - sp.log(m)
    require(sp.simplify(p * (sp.exp(-logit) - 1) - (m - p)) == 0, "expm1 form")
    z, y, lz, ly = sp.symbols("z y lz ly", real=True)
    require(sp.expand((z - lz) - (y - ly) - ((z - y) - (lz - ly))) == 0, "log-ratio")


@statement(
    "stable.tail-mass",
    "Tail mass of the behavior policy without 1 - sum",
    formula=r"\mu_T=1-\sum_S\mu_i=-\operatorname{expm1}(y_{\max})-\sum_{S\setminus\max}e^{y_i}",
    how="symbolic, |S| = 1 to 4",
    used="backends; the top-K budget",
)
def tail_mass() -> None:
    """Split the largest mass off the sum: 1 - exp(y) = -expm1(y), which is accurate near y = 0."""
    for size in range(1, 5):
        y = sp.symbols(f"y1:{size + 1}", real=True)
        rest = sum((sp.exp(x) for x in y[1:]), sp.Integer(0))
        tail = 1 - sum(sp.exp(x) for x in y)
        require(sp.expand(tail - (-(sp.exp(y[0]) - 1) - rest)) == 0, f"tail mass, |S| = {size}")


def _moments(z: Array, y: Array, mz: sp.Expr, my: sp.Expr) -> dict[str, sp.Expr]:
    """The seven moments of one pass, with running maxima mz and my."""
    d = [(a - mz) - (b - my) for a, b in zip(z, y, strict=True)]
    e = [sp.exp(a - mz) for a in z]
    f = [sp.exp(b - my) for b in y]
    return {
        "S1": sum(e),
        "S2": sum(a**2 for a in e),
        "M1": sum(f),
        "X": sum(a * b for a, b in zip(e, f, strict=True)),
        "F": sum(b * c for b, c in zip(f, d, strict=True)),
        "E1": sum(a * c for a, c in zip(e, d, strict=True)),
        "E2": sum(a**2 * c for a, c in zip(e, d, strict=True)),
    }


def _masses(e: Array, f: Array) -> tuple[Array, Array]:
    return f / sum(f), e / sum(e)


@statement(
    "stable.moments",
    "Seven moments of one pass give both KL divergences and their coefficients",
    formula=r"\begin{gathered}S_1=\sum e^{z-m_z},\ S_2=\sum e^{2(z-m_z)},\ M_1=\sum e^{y-m_y},\ "
    r"X=\sum e^{z-m_z+y-m_y},\\ F=\sum e^{y-m_y}d,\ E_1=\sum e^{z-m_z}d,\ E_2=\sum e^{2(z-m_z)}d,"
    r"\ d=(z-m_z)-(y-m_y),\\ c=\log S_1-\log M_1,\quad q=S_2/S_1^2,\quad "
    r"\mathrm{KL}(\mu\|\pi)=c-F/M_1,\quad \mathrm{KL}(\pi\|\mu)=E_1/S_1-c,\\ "
    r"C_{\mathrm{kl}}=\pi_k-\mu_k+X/(S_1M_1)-q,\quad "
    r"C_{\mathrm{rkl}}=\pi_k(l_k-D)-E_2/S_1^2+qE_1/S_1\end{gathered}",
    how="symbolic, V = 2, 3; general V in prose",
    used="fused backends",
)
def moments() -> None:
    """log(pi / mu) = d - c, pi = e^(z - mz) / S1 and mu = e^(y - my) / M1; every moment is a sum
    over the vocabulary of one such product, so the identities hold term by term for any V.  For
    the reverse KL, sum pi^2 (l - D) = E2 / S1^2 - c q - D q and c + D = E1 / S1."""
    for size in (2, 3):
        e = array(sp.symbols(f"e1:{size + 1}", positive=True))
        f = array(sp.symbols(f"f1:{size + 1}", positive=True))
        mu, pi = _masses(e, f)
        d = [sp.log(a) - sp.log(b) for a, b in zip(e, f, strict=True)]
        s1, s2, m1 = sum(e), sum(e * e), sum(f)
        x, f_ = sum(e * f), sum(f * d)
        e1, e2 = sum(e * d), sum(e * e * d)
        c, q = sp.log(s1) - sp.log(m1), s2 / s1**2
        forward = sum(call("kl_cell", m, p) for m, p in zip(mu, pi, strict=True))
        backward = sum(call("reverse_kl_cell", m, p) for m, p in zip(mu, pi, strict=True))
        require_zero(c - f_ / m1 - forward, "KL(mu || pi)")
        require_zero(e1 / s1 - c - backward, "KL(pi || mu)")
        c_kl = pi[0] - mu[0] + x / (s1 * m1) - q
        require_zero(c_kl - call("kl_coefficient", mu, pi, mu[0], pi[0]), "C of forward KL")
        c_rkl = pi[0] * (d[0] - c - (e1 / s1 - c)) - e2 / s1**2 + q * e1 / s1
        code = call("reverse_kl_coefficient", mu, pi, mu[0], pi[0])
        require_zero(c_rkl - code, "C of reverse KL")


@statement(
    "stable.moments-complement",
    "Complement form of the forward-KL coefficient from moments without k",
    formula=r"C=\frac{S_1'}{S_1}\Bigl(\frac{M_1'}{M_1}-\frac{S_1'}{S_1}\Bigr)+\frac{X'}{S_1M_1}"
    r"-\frac{S_2'}{S_1^2}",
    how="symbolic, V = 2, 3, 4; general V in prose",
    used="fused backends",
)
def moments_complement() -> None:
    """`stable.complement-kl` in the full view: eps = S1' / S1, sum' mu = M1' / M1,
    sum' pi mu = X' / (S1 M1), sum' pi^2 = S2' / S1^2 (primes leave k out)."""
    for size in (2, 3, 4):
        e = array(sp.symbols(f"e1:{size + 1}", positive=True))
        f = array(sp.symbols(f"f1:{size + 1}", positive=True))
        mu, pi = _masses(e, f)
        s1, m1, rest = sum(e), sum(f), slice(1, None)
        eps = sum(e[rest]) / s1
        value = eps * (sum(f[rest]) / m1 - eps)
        value += sum(e[rest] * f[rest]) / (s1 * m1) - sum(e[rest] ** 2) / s1**2
        require_zero(value - call("kl_coefficient", mu, pi, mu[0], pi[0]), f"V = {size}")


@statement(
    "stable.moments-merge",
    "Rescaling the seven moments when a running maximum moves",
    formula=r"r_a=e^{m_z-m_z'},\ r_b=e^{m_y-m_y'},\ s=\ln r_a-\ln r_b:\quad F'=r_b(F+sM_1),\ "
    r"E_1'=r_a(E_1+sS_1),\ E_2'=r_a^2(E_2+sS_2),\ S_1'=r_aS_1,\ S_2'=r_a^2S_2,\ M_1'=r_bM_1,\ "
    r"X'=r_ar_bX",
    how="symbolic, one and two terms (all moments are sums of terms, hence general V)",
    used="fused backends",
)
def moments_merge() -> None:
    """Replace the maxima in each term; d grows by s.  Moments of two blocks brought to the same
    maxima then add."""
    mz, my, nz, ny = sp.symbols("mz my nz ny", real=True)
    for size in (1, 2):
        z, y = sp.symbols(f"z1:{size + 1}", real=True), sp.symbols(f"y1:{size + 1}", real=True)
        old, new = _moments(z, y, mz, my), _moments(z, y, nz, ny)
        ra, rb = sp.exp(mz - nz), sp.exp(my - ny)
        s = (mz - nz) - (my - ny)
        moved = {
            "S1": ra * old["S1"],
            "S2": ra**2 * old["S2"],
            "M1": rb * old["M1"],
            "X": ra * rb * old["X"],
            "F": rb * (old["F"] + s * old["M1"]),
            "E1": ra * (old["E1"] + s * old["S1"]),
            "E2": ra**2 * (old["E2"] + s * old["S2"]),
        }
        for name, value in moved.items():
            residual = sp.powsimp(sp.expand(value - new[name]))
            require(sp.simplify(residual) == 0, f"{name} after the maxima move")
