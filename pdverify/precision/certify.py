"""Which decisions survive: computed D and C, with their certificates, against the exact ones.

The bound of a quantity is the sum of two: how far stored numbers can lie from the exact ones
(input noise, `pdverify.precision.noise`) and how far arithmetic can go from the value of the
stored ones (`pdverify.precision.evaluate`).  A decision is *determined* when no D and C within
their bounds would make it differ; one that is determined and differs from the exact policies'
refutes the certificate, and so does an error beyond its bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.oracle import Enclosure

Float64: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Estimate:
    """A computed quantity `[T]` and what may separate it from that of the exact policies.

    `noise` and `rounding` are `[T]` bounds, infinite where nothing is known.
    """

    value: Float64
    noise: Float64
    rounding: Float64

    @property
    def bound(self) -> Float64:
        """Of `|value - exact|`, `[T]`; infinite where the value is not finite."""
        total = (self.noise + self.rounding) * (1 + 2.0**-50)
        return np.where(np.isfinite(self.value) & ~np.isnan(total), total, np.inf)

    def beyond(self, truth: Enclosure) -> Bools:
        """`[T]`: the error is certainly larger than the bound."""
        with np.errstate(invalid="ignore"):
            away = np.maximum(truth.low - self.value, self.value - truth.high)
        return np.asarray(np.isfinite(truth.low) & (away > self.bound))

    def error(self, truth: Enclosure) -> Float64:
        """`|value - exact|`, `[T]`, to the enclosure's middle; NaN where there is none."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(self.value - truth.mid))


@dataclass(frozen=True, eq=False)
class Verdict:
    """`[T]` each.

    Attributes:
        judged: the exact policies' answer is certain (and finite).
        flipped: the computed answer is another one.
        determined: the certificate says that it cannot be.
        close: the certificate is within a factor of two of saying so, either way.
    """

    judged: Bools
    flipped: Bools
    determined: Bools
    close: Bools

    @property
    def wrong(self) -> Bools:
        """`[T]`: flipped although determined."""
        return np.asarray(self.flipped & self.determined)


def sign(c: Estimate, truth: Enclosure) -> Verdict:
    """The sign of C; exact zeros have none."""
    right = np.where(truth.low > 0, 1.0, np.where(truth.high < 0, -1.0, 0.0))
    judged = right != 0
    said = np.sign(np.where(np.isnan(c.value), 0.0, c.value))
    size = np.abs(c.value)
    return Verdict(
        judged,
        judged & (said != right),
        judged & (size > c.bound),
        judged & ~(size > 2 * c.bound),
    )


def decision(
    d: Estimate,
    c: Estimate,
    true_d: Enclosure,
    true_c: Enclosure,
    advantages: Float64,
    delta: Float64,
) -> Verdict:
    """Keep or drop: dropped when `D > delta` and `A C > 0`.

    A token whose D or C is NaN is dropped, as the backends do.

    Args:
        d, c: of the setting.
        true_d, true_c: of the exact policies.
        advantages, delta: `[T]`, thresholds in the divergence's unit.
    """
    side = np.sign(advantages)
    inside, outside = true_d.high <= delta, true_d.low > delta
    pulls = np.where(side > 0, true_c.high <= 0, true_c.low >= 0)
    pushes = np.where(side > 0, true_c.low > 0, true_c.high < 0)
    kept, dropped = inside | pulls, outside & pushes & np.isfinite(true_d.high)
    judged = kept | dropped
    moved = side * c.value
    keeps = (d.value <= delta) | (moved <= 0)
    wide, near = _certain(d, moved, c.bound, delta, 1.0), _certain(d, moved, c.bound, delta, 2.0)
    return Verdict(judged, judged & (keeps != kept), judged & wide, judged & ~near)


def _certain(d: Estimate, moved: Float64, c_bound: Float64, delta: Float64, factor: float) -> Bools:
    """Nothing within `factor` times the bounds changes the decision."""
    with np.errstate(invalid="ignore"):
        inside = d.value + factor * d.bound <= delta
        outside = d.value - factor * d.bound > delta
        pulls, pushes = moved + factor * c_bound <= 0, moved - factor * c_bound > 0
    return np.asarray(inside | pulls | (outside & pushes))


def combine(*parts: Float64) -> Float64:
    """Sum of bounds that is itself a bound."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total = (total + part) * (1 + 2.0**-51)
    return total
