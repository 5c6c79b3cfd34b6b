"""Times of several calls in interleaved rounds, ratios of their medians, and how they grow.

A machine's speed drifts (frequency, neighbors, page cache).  One round runs every call once, in
an order drawn anew, so that drift meets them all alike; a ratio is resampled by whole rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import linregress
from scipy.stats import t as student

from pdverify.tools.bench.records import Interval

Call: TypeAlias = Callable[[], Any]
Times: TypeAlias = NDArray[np.float64]

RESAMPLES = 2000
"""Bootstrap resamples of an interval."""

QUANTILES = (0.025, 0.975)


def interleaved(
    calls: Mapping[str, Call],
    *,
    rounds: int,
    seed: int = 0,
    synchronize: Call = lambda: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Times]:
    """Seconds of every call in every round, `[rounds]` each, after a round that does not count.

    Args:
        calls: name -> what to time; results are dropped.
        rounds: how often each is timed.
        seed: of the order within the rounds.
        synchronize: waits for the device; called before and after each call.
        progress: called as `progress(done, rounds)`.
    """
    rng = np.random.default_rng(seed)
    names = list(calls)
    times = np.zeros((len(names), rounds + 1))
    for number in range(rounds + 1):
        progress(number, rounds)
        for i in rng.permutation(len(names)):
            synchronize()
            started = time.perf_counter()
            calls[names[i]]()
            synchronize()
            times[i, number] = time.perf_counter() - started
    return dict(zip(names, times[:, 1:], strict=True))


def median(times: Times, seed: int = 0) -> Interval:
    """The median with its bootstrap interval; `times` is `[rounds]`."""
    return ratio(times, np.ones_like(times), seed)


def ratio(slow: Times, fast: Times, seed: int = 0) -> Interval:
    """`median(slow) / median(fast)` with its bootstrap interval, resampled by whole rounds."""
    picked = np.random.default_rng(seed).integers(0, len(slow), size=(RESAMPLES, len(slow)))
    many = np.median(slow[picked], axis=-1) / np.median(fast[picked], axis=-1)
    low, high = np.quantile(many, QUANTILES)
    return Interval(float(np.median(slow) / np.median(fast)), float(low), float(high))


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> Interval:
    """The exponent of `cost ~ size^exponent`, by least squares on both logs.

    The 95 % interval comes from the scatter about the line, so that it is wide where a power law
    does not fit.

    Raises:
        ValueError: fewer than three sizes, equal ones only, or a number that is not positive.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(costs, dtype=np.float64)
    if len(set(sizes)) < 3 or len(x) != len(y) or not (x > 0).all() or not (y > 0).all():
        raise ValueError("a fit needs at least three sizes with a cost, all of them positive")
    line = linregress(np.log(x), np.log(y))
    reach = float(student.ppf(QUANTILES[1], len(x) - 2) * line.stderr)
    slope = float(line.slope)
    return Interval(slope, slope - reach, slope + reach)
