"""Effective precision in bits, and the intervals of counted shares.

How many significant bits does an implementation's direction criterion have?  The largest margin
among its mistakes would be one answer, but a single extreme is unstable, and a worst-case budget
inflates it.  Here the whole pattern of right and wrong signs is fitted instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binomtest, chi2, norm

from pdverify.batch import Batch
from pdverify.cases.designed import RowValues, designed_rows
from pdverify.formats import FORMATS

CONFIDENCE = 0.95
"""Confidence of every interval in this module."""

RANGE = (0.0, 96.0)
"""Bits that are searched: from coin flips to far beyond float64."""

CALIBRATION = -10.7
"""Bits to add to `-log2 s` on rows of `designed_rows`: what `calibrate` gives.

The budget is a worst case; this is its usual slack, in octaves.  `calibrate` with the full-view
forward-KL coefficient and `pdverify.budgets` in its plain form, 1,024 tokens at V = 257, gave
-10.9 [-11.4, -10.4] and -10.4 [-10.9, -9.9] for the generators `default_rng(0)`, `default_rng(1)`.
"""


@dataclass(frozen=True)
class Bits:
    """Effective precision of a direction criterion, in bits (24 for plain fp32).

    Attributes:
        estimate: maximum-likelihood estimate; None without a mistake (or without a token).
        low, high: 95 % profile-likelihood interval of the estimate, clipped to the searched
            range; None with it.
        at_least: with tokens but no mistake, the precision below which (at 95 % confidence) a
            mistake would have been seen: the limit of the test set.  None otherwise, and with so
            few tokens that coin flips could have got them all right.
        tokens: tokens that count.
        mistakes: how many of them had the wrong sign.
        left_out: tokens with `C = 0` exactly: they have no sign to get wrong.
    """

    estimate: float | None
    low: float | None
    high: float | None
    at_least: float | None
    tokens: int
    mistakes: int
    left_out: int


def effective_bits(
    margin_over_beta: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    *,
    calibration: float = CALIBRATION,
) -> Bits:
    """The precision at which these signs of C were computed.

    Model: the error of the computed C is normal with standard deviation `s beta`, so
    `P(wrong) = Phi(-|C| / (s beta))`, and `bits = calibration - log2 s`.  The log-likelihood is
    concave in `1/s`, hence has a single maximum in `log2 s`; the interval is where it lies within
    half the 95 % point of chi-squared with one degree of freedom of that maximum.

    Args:
        margin_over_beta: `[T]` float64, `|C| / beta` with `beta` the budget of C per unit
            roundoff; zeros are left out and counted.
        wrong: `[T]` bool, where the computed sign of C differs from the right one.
        calibration: such that a plain fp32 run on the same kind of rows reports 24 bits; see
            `calibrate`.  The default belongs to `designed_rows`; on near-equal policies
            (`graded`) the errors of the two sides cancel in part and plain fp32 looks 2 bits
            better.

    Raises:
        ValueError: for arrays of different sizes, or a margin that is negative or not finite.
    """
    margin = np.asarray(margin_over_beta, dtype=np.float64).ravel()
    missed = np.asarray(wrong, dtype=bool).ravel()
    if margin.size != missed.size:
        raise ValueError(f"{margin.size} margins but {missed.size} signs")
    if not (np.isfinite(margin) & (margin >= 0)).all():
        raise ValueError("margins are finite and >= 0")
    counts = margin > 0
    octave, missed = np.log2(margin[counts]), missed[counts]
    side = np.where(missed, -1.0, 1.0)

    def likelihood(bits: float) -> float:
        return float(norm.logcdf(side * np.exp2(octave + bits - calibration)).sum())

    tokens, mistakes = int(counts.sum()), int(missed.sum())
    left_out = margin.size - tokens
    if mistakes == 0:
        at_least = _crossing(likelihood, float(np.log1p(-CONFIDENCE)), RANGE)
        return Bits(None, None, None, at_least, tokens, mistakes, left_out)
    best = _maximum(likelihood)
    level = likelihood(best) - float(chi2.ppf(CONFIDENCE, 1)) / 2
    low = _crossing(likelihood, level, (RANGE[0], best))
    high = _crossing(likelihood, level, (best, RANGE[1]))
    return Bits(
        estimate=best,
        low=RANGE[0] if low is None else low,
        high=RANGE[1] if high is None else high,
        at_least=None,
        tokens=tokens,
        mistakes=mistakes,
        left_out=left_out,
    )


def _maximum(likelihood: Callable[[float], float]) -> float:
    """Where the unimodal `likelihood` is largest within `RANGE`.

    A scan by whole bits comes first: far from the maximum the function is flat, and a search by
    brackets alone would stop there.
    """
    scan = np.arange(RANGE[0], RANGE[1] + 1.0)
    peak = float(scan[np.argmax([likelihood(x) for x in scan])])
    bounds = (max(RANGE[0], peak - 1), min(RANGE[1], peak + 1))
    found = float(minimize_scalar(lambda x: -likelihood(x), bounds=bounds, method="bounded").x)
    return max(found, peak, key=likelihood)


def _crossing(
    likelihood: Callable[[float], float], level: float, interval: tuple[float, float]
) -> float | None:
    """Where `likelihood` passes `level` in `interval`; None if both ends are on the same side."""
    start, end = (likelihood(x) - level for x in interval)
    if (start < 0) == (end < 0):
        return None
    return float(brentq(lambda x: likelihood(x) - level, *interval))


def plain_signs(batch: Batch) -> NDArray[np.float64]:
    """`[T]`: the sign of the full-view forward-KL coefficient in plain float32 arithmetic.

    `C = (pi_k - mu_k) + sum_i pi_i (mu_i - pi_i)` term by term, as a straightforward
    implementation has it: softmax, differences, pairwise sums.  What `CALIBRATION` calls 24 bits.

    Raises:
        ValueError: if the batch does not hold both logits.
    """
    rows = batch.rows()
    if rows.logits is None or rows.behavior_logits is None:
        raise ValueError("the batch does not hold both logits")
    pi, mu = (_softmax32(x.astype(np.float32)) for x in (rows.logits, rows.behavior_logits))
    local = np.take_along_axis(pi - mu, rows.tokens[:, None], axis=-1)[:, 0]
    return np.asarray(np.sign(local + (pi * (mu - pi)).sum(axis=-1)), dtype=np.float64)


def _softmax32(z: NDArray[np.float32]) -> NDArray[np.float32]:
    mass = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(mass / mass.sum(axis=-1, keepdims=True), dtype=np.float32)


def calibrate(
    rng: np.random.Generator,
    coefficient: RowValues,
    beta: RowValues,
    *,
    sequences: int = 16,
    length: int = 64,
    vocab_size: int = 257,
    top_k: int = 20,
) -> Bits:
    """What `CALIBRATION` must be, as an estimate with its 95 % interval.

    Runs plain float32 arithmetic (`plain_signs`) on tokens designed for the full-view forward-KL
    coefficient and its budget, and solves `calibration - log2 s = 24`.

    Args:
        rng: source of the designed tokens.
        coefficient: `Batch -> [T]` float64, the full-view forward-KL coefficient, good to 2^-50.
        beta: `Batch -> [T]` float64, the budget of its plain form per unit roundoff.
        sequences, length, vocab_size, top_k: size of the designed batch.

    Raises:
        ValueError: if the run made no mistake, so that nothing can be fitted.
    """
    batch = designed_rows(
        rng,
        coefficient,
        beta,
        sequences=sequences,
        length=length,
        vocab_size=vocab_size,
        top_k=top_k,
    )
    right = coefficient(batch)
    wrong = plain_signs(batch) != np.sign(right)
    fit = effective_bits(np.abs(right) / beta(batch), wrong, calibration=0.0)
    if fit.estimate is None or fit.low is None or fit.high is None:
        raise ValueError("no mistake in plain fp32: take more tokens")
    target = FORMATS["fp32"].significand_bits
    return Bits(
        estimate=target - fit.estimate,
        low=target - fit.high,
        high=target - fit.low,
        at_least=None,
        tokens=fit.tokens,
        mistakes=fit.mistakes,
        left_out=fit.left_out,
    )


@dataclass(frozen=True)
class Share:
    """A counted share with its 95 % interval; `share` is NaN where nothing was counted."""

    share: float
    low: float
    high: float
    successes: int
    trials: int


def wilson(successes: int, trials: int) -> Share:
    """The share `successes / trials` with its 95 % Wilson score interval.

    Without trials nothing is known: the share is NaN and the interval [0, 1].

    Raises:
        ValueError: unless `0 <= successes <= trials`.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials")
    if trials == 0:
        return Share(float("nan"), 0.0, 1.0, 0, 0)
    interval = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    low, high = float(interval.low), float(interval.high)
    return Share(successes / trials, low, high, successes, trials)


def paired(a_only: int, b_only: int) -> float:
    """Two-sided exact McNemar p-value of two criteria judged on the same tokens.

    Only tokens on which exactly one of them is right speak: under equal error rates `a_only` of
    the `a_only + b_only` is binomial with probability 1/2.  1 where there is none.

    Raises:
        ValueError: for a negative count.
    """
    if min(a_only, b_only) < 0:
        raise ValueError(f"counts are >= 0, not {a_only} and {b_only}")
    if a_only + b_only == 0:
        return 1.0
    return float(binomtest(a_only, a_only + b_only, 0.5).pvalue)
