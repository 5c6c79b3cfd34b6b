"""The coupled direction: what one token's part of a step does to the divergence of others."""

from __future__ import annotations

import sympy as sp

from derivations import indexed as ix
from derivations.statements import require_zero, statement


@statement(
    "coupled.free-logits",
    "With free logits the coupled direction is the coefficient",
    formula=r"\nabla_z\log\pi_k\cdot\nabla_zD=(e_k-\pi)\cdot(h-\bar h\,\pi)=C",
    how="indexed sums, general V",
    used="simulations/bandit/coupled.py; the mask on one token alone",
)
def free_logits() -> None:
    """The gradient of D at its own logits has the components pi_j (g_j - gbar) = h_j - hbar pi_j
    (`motion.jacobian`), that of log pi_k the components 1[j = k] - pi_j.  Their product is C of
    `coefficient.general`.  Where no parameter is shared, other tokens add nothing to it."""
    n2 = ix.total(ix.P[ix.N] ** 2)
    mean = ix.total(ix.P[ix.N] * ix.G[ix.N])
    product = sp.expand((ix.delta(ix.J, ix.K) - ix.P[ix.J]) * ix.P[ix.J] * ix.G[ix.J])
    own = sp.expand((ix.delta(ix.J, ix.K) - ix.P[ix.J]) * ix.P[ix.J])
    direct = ix.reduce_sums(ix.total(product, ix.J)) - mean * ix.reduce_sums(ix.total(own, ix.J))
    claim = ix.P[ix.K] * (ix.G[ix.K] - mean) - (ix.total(ix.P[ix.N] ** 2 * ix.G[ix.N]) - mean * n2)
    require_zero(sp.expand(direct - claim), "product of the gradients, general V")


@statement(
    "coupled.shared-parameters",
    "One backward and one forward pass give every token's part in the change of a sum",
    formula=r"\frac{d}{d\eta}\Phi\bigl(\theta+\eta\,w_tP\,\nabla\log\pi_{k_t}\bigr)\Big|_{\eta=0}"
    r"=w_t\,\nabla\log\pi_{k_t}\cdot PG,\quad\Phi=\sum_{s\in O}D_s,\ G=\nabla\Phi,\ P=P^\top",
    how="symbolic derivatives of a linear policy with two tokens, V = 3, d = 2, any diagonal P",
    used="simulations/bandit/coupled.py: along, Coupled.score",
)
def shared_parameters() -> None:
    """Chain rule, and P moves to the other factor since it is symmetric (diagonal for Adam, the
    identity for gradient descent).  The right side is the derivative of log pi_k along P G: G does
    not depend on t, so one direction serves all tokens.  SymPy differentiates both sides for a
    linear policy, the sum over O being the divergence of one token outside, moved by another."""
    size, width = 3, 2
    theta = sp.Matrix(size, width, sp.symbols(f"a1:{size * width + 1}", real=True))
    scale = sp.Matrix(size, width, sp.symbols(f"s1:{size * width + 1}", positive=True))
    x, y = (sp.Matrix(sp.symbols(f"{name}1:{width + 1}", real=True)) for name in "xy")
    mu = sp.symbols(f"m1:{size + 1}", positive=True)
    w, eta = sp.symbols("w eta", real=True)

    def log_softmax(z: sp.Matrix) -> list[sp.Expr]:
        log_sum = sp.log(sum(sp.exp(e) for e in z))
        return [e - log_sum for e in z]

    def outside(parameters: sp.Matrix) -> sp.Expr:
        return -sum(m * lp for m, lp in zip(mu, log_softmax(parameters * x), strict=True))

    own = log_softmax(theta * y)[0]
    gradient = theta.applyfunc(lambda a: sp.diff(own, a))
    step = gradient.multiply_elementwise(scale) * (eta * w)
    realized = sp.diff(outside(theta + step), eta).subs(eta, 0)
    pushed = theta.applyfunc(lambda a: sp.diff(outside(theta), a)).multiply_elementwise(scale)
    claim = w * sum(g * p for g, p in zip(gradient, pushed, strict=True))
    # exponentials of distinct logits are independent: name them, and the rest is rational
    names = {sp.exp(e): sp.Symbol(f"e{i}", positive=True)
             for i, e in enumerate([*(theta * x), *(theta * y)])}  # fmt: skip
    require_zero((realized - claim).subs(names), "derivative of the sum along one token's step")
