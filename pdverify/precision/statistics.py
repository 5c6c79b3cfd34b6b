"""Figures of a table: effective bits, rates with their intervals, bounds over errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from pdverify.batch import Rows
from pdverify.conformance.bits import CONFIDENCE, wilson
from pdverify.definitions.cells import build as cells_of
from pdverify.definitions.cells import tail_mean
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.oracle import Enclosure
from pdverify.precision.records import MARGINS, Rate
from pdverify.rules import Partition, Tail

Float64: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]


def scale_of(rows: Rows, divergence: str, part: Partition, tail: Tail | None) -> Float64:
    """Sum of the magnitudes of the terms of C in its complement form, `[T]`."""
    cells = cells_of(rows, part)
    moment: Callable[..., Float64] = DIVERGENCES[divergence].moment
    ids = np.arange(rows.vocab_size)[None] if cells.ids is None else cells.ids
    others = ids != rows.tokens[:, None]
    pi = np.where(others, cells.pi, 0.0)
    with np.errstate(all="ignore"):
        h = np.where(others, moment(cells.mu, cells.pi), 0.0)
        h_k, h_tail = moment(cells.mu_k, cells.pi_k), moment(cells.mu_tail, cells.pi_tail)
    w = tail_mean(cells, tail) if part == "topk" else np.zeros(len(rows))
    eps = pi.sum(-1) + cells.pi_tail
    q = (pi * pi).sum(-1) + cells.pi_tail * w
    base = cells.pi_k * eps - q
    terms = np.abs(h * (pi + base[:, None])).sum(-1) + np.abs(h_k) * (eps * eps + q)
    if part == "topk":
        terms = terms + np.abs(h_tail * (w + base))
    return np.asarray(terms)


def bits_of(
    error: Float64, known: Float64, scale: Float64
) -> tuple[float | None, float | None, float | None, bool]:
    """Median over tokens of `-log2(error / scale)`, its 95 % interval, whether it is a lower limit.

    The interval is that of order statistics: it holds for any distribution of errors.  An error
    below what is known of the truth counts as that; the result is then a lower limit.
    """
    usable = np.isfinite(error) & np.isfinite(scale) & (scale > 0)
    if not usable.any():
        return None, None, None, False
    seen = np.maximum(error[usable], np.maximum(known[usable], scale[usable] * 2.0**-60))
    middle, low, high = middle_of(-np.log2(seen / scale[usable]))
    limited = float(np.mean(error[usable] <= known[usable])) >= 0.5
    return middle, low, high, limited


def middle_of(x: Float64) -> tuple[float, float, float]:
    """Median of a sample and its 95 % interval, that of order statistics: for any distribution."""
    ordered = np.sort(x)
    count = len(ordered)
    first = int(binom.ppf((1 - CONFIDENCE) / 2, count, 0.5))
    low, high = ordered[max(first - 1, 0)], ordered[min(count - first, count - 1)]
    return float(np.median(ordered)), float(low), float(high)


def rate(hit: Bools, of: Bools) -> Rate:
    """The share of `of` that are hit."""
    return rate_of(int(hit.sum()), int(of.sum()))


def rate_of(count: int, total: int) -> Rate:
    """`count` of `total`."""
    share = wilson(count, total)
    return Rate(share.successes, share.trials, share.low, share.high)


def pooled(rates: Iterable[Rate]) -> Rate:
    """Rates of different tokens as one."""
    known = list(rates)
    return rate_of(sum(x.count for x in known), sum(x.total for x in known))


def binned(flipped: Bools, margin: Float64, of: Bools) -> tuple[tuple[int, int], ...]:
    """`(flips, tokens)` in each bin of `MARGINS`."""
    bins = np.clip(np.searchsorted(MARGINS, margin[of], side="right") - 1, 0, len(MARGINS) - 1)
    counts = [np.bincount(bins, weights=w, minlength=len(MARGINS)) for w in (flipped[of], None)]
    return tuple((int(a), int(b)) for a, b in zip(*counts, strict=True))


def correct_bits(value: Float64, truth: Enclosure) -> Float64:
    """Correct bits of each C relative to itself, `[T]`, between 0 and 53."""
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = -np.log2(np.abs(value - truth.mid) / np.abs(truth.mid))
    return np.clip(np.where(np.isnan(bits), 0.0, bits), 0.0, 53.0) + 0.0
