"""Cells of each divergence in stable form: functions of the two masses and their log-ratio.

`pi - mu` comes from `expm1` of the log-ratio, so nothing cancels where the policies are close.
Must agree with `pdverify.definitions.divergences`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from pdverify.backends.moments import times

CellFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def log_ratio(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """`log pi - log mu`, 0 where both probabilities are zero."""
    both_zero = torch.isneginf(log_pi) & torch.isneginf(log_mu)
    return torch.where(both_zero, 0.0, log_pi - log_mu)


def _difference(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    """`pi - mu`, from the log-ratio: no cancellation, no overflow."""
    return torch.where(gap > 0, -pi * torch.expm1(-gap), mu * torch.expm1(gap))


def _log_cosh_half(gap: Tensor) -> tuple[Tensor, Tensor]:
    """(gap, log cosh(gap / 2)) with the gap clamped to where either mass is still visible."""
    gap = gap.clamp(-80.0, 80.0)
    return gap, torch.log1p(2 * torch.sinh(gap / 4) ** 2)


def _jensen_shannon_cell(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    gap, log_cosh = _log_cosh_half(gap)
    return 0.5 * ((pi - mu) * gap / 2 - (pi + mu) * log_cosh)


def _jensen_shannon_moment(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    gap, log_cosh = _log_cosh_half(gap)
    return 0.5 * pi * (gap / 2 - log_cosh)


def _hellinger_cell(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    larger = torch.where(gap > 0, pi, mu)
    return 0.5 * larger * torch.expm1(-gap.abs() / 2) ** 2


def _hellinger_moment(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    up = -pi * torch.expm1(-gap / 2)
    down = pi.sqrt() * mu.sqrt() * torch.expm1(gap / 2)
    return 0.5 * torch.where(gap > 0, up, down)


def _scaled(mass: Tensor, exponent: Tensor) -> Tensor:
    """`mass exp(exponent)`, 0 for mass 0; in two factors, so that it overflows only if it must."""
    root = torch.exp(exponent / 2)
    return torch.where(mass == 0, 0.0, mass * root * root)


def _chi2_cell(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    change = torch.where(gap > 0, torch.expm1(-gap), 1.0)
    up = pi * change * change
    root = torch.exp(-gap / 2)
    down = _difference(mu, pi, gap) * torch.expm1(-gap / 2) * (1 + root)
    return torch.where(gap > 0, up, torch.where(mu > 0, down.abs(), 0.0))


def _chi2_moment(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    change = _difference(mu, pi, gap)
    return change + _scaled(change, -gap)


def _reverse_chi2_moment(mu: Tensor, pi: Tensor, gap: Tensor) -> Tensor:
    return _scaled(2 * _difference(mu, pi, gap), gap)


# name -> (one cell's share of D, h = pi * dD/dpi of that cell), from (mu, pi, log pi - log mu)
STABLE: dict[str, tuple[CellFunction, CellFunction]] = {
    "kl": (lambda mu, pi, gap: _difference(mu, pi, gap) - times(mu, gap), _difference),
    "reverse-kl": (
        lambda mu, pi, gap: times(pi, gap) - _difference(mu, pi, gap),
        lambda mu, pi, gap: times(pi, gap),
    ),
    "tv": (
        lambda mu, pi, gap: 0.5 * _difference(mu, pi, gap).abs(),
        lambda mu, pi, gap: 0.5 * pi * gap.sign(),
    ),
    "jensen-shannon": (_jensen_shannon_cell, _jensen_shannon_moment),
    "squared-hellinger": (_hellinger_cell, _hellinger_moment),
    "chi2": (_chi2_cell, _chi2_moment),
    "reverse-chi2": (lambda mu, pi, gap: _chi2_cell(pi, mu, -gap), _reverse_chi2_moment),
}


CENTERING = {"kl": 1.0, "reverse-kl": -1.0}
"""Multiples of `sum mu - sum pi` that the centered cells above leave out of D."""


def cell_functions(name: str) -> tuple[CellFunction, CellFunction]:
    """The stable cell functions of a divergence, or its generic ones where it has none."""
    if name in STABLE:
        return STABLE[name]
    from pdverify.definitions.divergences import DIVERGENCES

    formula = DIVERGENCES[name]
    return (
        lambda mu, pi, _: formula.cell(mu, pi, xp=torch),
        lambda mu, pi, _: formula.moment(mu, pi, xp=torch),
    )
