"""The divergences the oracle knows: one entry each, written over the abstract arithmetic.

Every one is an f-divergence, D = sum_j mu_j f(t_j) with t = pi / mu, taken with its generator
centered: f(1) = f'(1) = 0.  Centering adds a multiple of sum (pi - mu) = 0, which changes
neither D nor the coefficient.  For a cell with mu, pi > 0 and l = log pi - log mu an entry gives

* `cell`          F = mu f(t) >= 0, the cell's share of D; convex in mu;
* `cell_slope`    dF/dmu = f(t) - t f'(t), monotone in mu;
* `moment`        h = pi f'(t) = pi dD/dpi, decreasing in mu; the coefficient is linear in it;
* `moment_slope`  dh/dmu = -t^2 f''(t), monotone in mu; None where h jumps (total variation);

and the limits for cells where one policy has probability zero, None where they are infinite:

* `no_mu`         F = h = pi f'(infinity), as a function of pi;
* `no_pi`         F = mu f(0), as a function of mu;
* `moment_no_pi`  h = mu lim t f'(t) at t = 0, as a function of mu.

Everything is written in l rather than in quotients: l is known from the logits where the
probabilities underflow.

Formulas: `docs/formulas.md`; the masks they serve: arXiv 2607.10848.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pdverify.oracle.balls import Ball
from pdverify.registry import Registry

Cell: TypeAlias = Callable[[Ball, Ball, Ball], Ball]
Unary: TypeAlias = Callable[[Ball], Ball]


@dataclass(frozen=True)
class OracleDivergence:
    """One divergence; see the module's docstring.

    `centering` is what centering has added: D = sum F + centering * (sum mu - sum pi).  It
    matters where stored masses sum to more than one, so that the tail is clipped at zero.
    """

    cell: Cell
    cell_slope: Unary
    moment: Cell
    moment_slope: Unary | None
    no_mu: Unary | None
    no_pi: Unary | None
    moment_no_pi: Unary | None
    centering: int = 0


ORACLE_DIVERGENCES: Registry[OracleDivergence] = Registry("divergence")


def _same(x: Ball) -> Ball:
    return x


def _half(x: Ball) -> Ball:
    return x * 0.5


def _half_log2(x: Ball) -> Ball:
    return x * x.exact(np.array(2.0)).log() * 0.5


def _zero(x: Ball) -> Ball:
    return x * 0.0


def _log_mean(gap: Ball) -> Ball:
    """log((1 + t) / 2)."""
    return (gap.expm1() * 0.5).log1p()


ORACLE_DIVERGENCES.add(
    "kl",
    OracleDivergence(
        cell=lambda mu, pi, gap: pi - mu - mu * gap,
        cell_slope=lambda gap: -gap,
        moment=lambda mu, pi, gap: pi - mu,
        moment_slope=lambda gap: gap * 0.0 - 1.0,
        no_mu=_same,
        no_pi=None,
        moment_no_pi=lambda mu: -mu,
        centering=1,
    ),
)
ORACLE_DIVERGENCES.add(
    "reverse-kl",
    OracleDivergence(
        cell=lambda mu, pi, gap: pi * gap - (pi - mu),
        cell_slope=lambda gap: -gap.expm1(),
        moment=lambda mu, pi, gap: pi * gap,
        moment_slope=lambda gap: -gap.exp(),
        no_mu=None,
        no_pi=_same,
        moment_no_pi=_zero,
        centering=-1,
    ),
)
ORACLE_DIVERGENCES.add(
    "tv",
    OracleDivergence(
        cell=lambda mu, pi, gap: (pi - mu).abs() * 0.5,
        cell_slope=lambda gap: gap.sign() * -0.5,
        moment=lambda mu, pi, gap: pi * gap.sign() * 0.5,
        moment_slope=None,
        no_mu=_half,
        no_pi=_half,
        moment_no_pi=_zero,
    ),
)
ORACLE_DIVERGENCES.add(
    "jensen-shannon",
    OracleDivergence(
        cell=lambda mu, pi, gap: (pi * gap - (pi + mu) * _log_mean(gap)) * 0.5,
        cell_slope=lambda gap: _log_mean(gap) * -0.5,
        moment=lambda mu, pi, gap: pi * (gap - _log_mean(gap)) * 0.5,
        moment_slope=lambda gap: ((-gap).exp() + 1.0).reciprocal() * -0.5,
        no_mu=_half_log2,
        no_pi=_half_log2,
        moment_no_pi=_zero,
    ),
)
ORACLE_DIVERGENCES.add(
    "squared-hellinger",
    OracleDivergence(
        cell=lambda mu, pi, gap: mu * (gap * 0.5).expm1().square() * 0.5,
        cell_slope=lambda gap: (gap * 0.5).expm1() * -0.5,
        moment=lambda mu, pi, gap: pi * (gap * -0.5).expm1() * -0.5,
        moment_slope=lambda gap: (gap * 0.5).exp() * -0.25,
        no_mu=_half,
        no_pi=_half,
        moment_no_pi=_zero,
    ),
)
ORACLE_DIVERGENCES.add(
    "chi2",
    OracleDivergence(
        cell=lambda mu, pi, gap: pi * (-gap).expm1().square(),
        cell_slope=lambda gap: (-gap).expm1() * 2.0,
        moment=lambda mu, pi, gap: -pi * (gap * -2.0).expm1(),
        moment_slope=lambda gap: (-gap).exp() * -2.0,
        no_mu=_same,
        no_pi=None,
        moment_no_pi=None,
    ),
)
ORACLE_DIVERGENCES.add(
    "reverse-chi2",
    OracleDivergence(
        cell=lambda mu, pi, gap: mu * gap.expm1().square(),
        cell_slope=lambda gap: -(gap * 2.0).expm1(),
        moment=lambda mu, pi, gap: pi * gap.expm1() * 2.0,
        moment_slope=lambda gap: (gap * 2.0).exp() * -2.0,
        no_mu=None,
        no_pi=_same,
        moment_no_pi=_zero,
    ),
)
