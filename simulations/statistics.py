"""Intervals over seeds, paired tests, and their correction for multiple comparisons.

Seeds are the independent units: tokens and updates of one seed are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

CONFIDENCE = 0.95
RESAMPLES = 2000
PERMUTATIONS = 99_999

Float64: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval; NaN where nothing was counted."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.value)} [{_short(self.low)}, {_short(self.high)}]"

    @property
    def percent(self) -> str:
        """A share in percent."""
        if math.isnan(self.value):
            return "-"
        value, low, high = (100 * x for x in (self.value, self.low, self.high))
        return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _short(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:.3g}"


def share(hits: Float64, totals: Float64) -> Estimate:
    """`sum hits / sum totals` over seeds, both `[S]`, with its bootstrap interval over seeds."""
    hits, totals = np.asarray(hits, float), np.asarray(totals, float)
    if not totals.sum():
        return Estimate(math.nan, math.nan, math.nan)
    value = float(hits.sum() / totals.sum())
    used = totals > 0
    hits, totals = hits[used], totals[used]
    if len(hits) < 2 or np.ptp(hits / totals) == 0:
        return Estimate(value, value, value)
    found = bootstrap(
        (hits, totals),
        lambda h, t, axis: h.sum(axis) / t.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))


def mean(values: Float64) -> Estimate:
    """Mean over seeds `[S]` with its bootstrap interval."""
    values = np.asarray(values, float)
    return share(values, np.ones_like(values))


def paired(first: Float64, second: Float64) -> tuple[Estimate, float]:
    """Mean of `first - second` over seeds, and the p-value of a paired permutation test.

    Signs of the differences are flipped at random; two-sided.  NaN if all differences are 0, or
    fewer than two are known.
    """
    gap = np.asarray(first, float) - np.asarray(second, float)
    gap = gap[np.isfinite(gap)]
    if len(gap) < 2 or not gap.any():
        return mean(gap), math.nan
    flipped = np.abs(_signs(len(gap)) @ gap)
    # rounding must not make the observed arrangement less extreme than itself
    extreme = flipped >= abs(gap.sum()) * (1 - 1e-12)
    return mean(gap), float((1 + extreme.sum()) / (1 + len(extreme)))


@lru_cache(maxsize=4)
def _signs(count: int) -> Float64:
    return np.random.default_rng(0).choice([-1.0, 1.0], (PERMUTATIONS, count))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: compare with the level of the whole family; NaN stays."""
    known = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(known, key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(known) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
