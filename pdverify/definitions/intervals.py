"""What a top-K view says of the FULL divergence: the rearrangement interval (forward KL).

Against the full vocabulary, `C = C_S - x + sum_tail pi mu`, and only `sum_tail pi mu` is unknown.
With `0 <= mu_i <= cap` (no unretained token is likelier than the K-th best of the list) and
`sum_tail mu = mu_T`, it is largest when `mu` sits at the cap on the largest `pi` of the tail,
smallest when it sits on the smallest: both ends are attained, so no narrower interval holds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import InputError, Rows
from pdverify.definitions import _formulas
from pdverify.definitions.cells import Cells, Float64, log_softmax
from pdverify.formats import FORMATS


def coefficient_interval(rows: Rows, cells: Cells) -> tuple[Float64, Float64]:
    """Ends of the interval for the full forward-KL coefficient, each `[T]`.

    The cap is the smallest mass of the list, its log-prob widened by half a unit in its last
    stored place; without k under ``replace``, where k may rank below what the list left out.
    Where the tail's mass exceeds what the cap allows (stored rounding), the cap is raised to fit.

    Raises:
        InputError: no top-K list or no logits.

    Source: statement `coarse.rearrangement` of `docs/formulas.md`.
    """
    if rows.logits is None or rows.topk_logprobs is None or cells.ids is None:
        raise InputError("topk_logprobs", None, None, "the interval needs a top-K view")
    pi = np.exp(log_softmax(rows.logits))
    used = cells.mu > 0
    row = np.broadcast_to(np.arange(len(rows))[:, None], used.shape)
    pi[row[used], cells.ids[used]] = 0.0
    cap = _cap(rows, cells)
    low, high = _rearranged(pi, cells.tail_cells, cells.mu_tail, cap)
    base = _formulas.kl_coefficient(cells.mu, cells.pi, cells.mu_k, cells.pi_k) - cells.collision
    return base + low, base + high


def _cap(rows: Rows, cells: Cells) -> Float64:
    """Largest probability that the list leaves to a token outside of it, `[T]`."""
    assert rows.topk_logprobs is not None
    assert cells.ids is not None
    y = rows.topk_logprobs.astype(np.float64)
    if cells.ids.shape == y.shape:
        y[np.arange(len(rows)), cells.slot] = 0.0
    smallest = y.min(axis=-1)
    # a list that ends in probability zero leaves nothing: -inf has no last place
    place = FORMATS[rows.logprob_dtype].unit_roundoff * np.abs(smallest)
    widened = smallest + np.where(np.isneginf(smallest), 0.0, place)
    return np.asarray(np.exp(np.minimum(widened, 0.0)))


def _rearranged(
    pi: Float64, count: NDArray[np.int64], mass: Float64, cap: Float64
) -> tuple[Float64, Float64]:
    """Smallest and largest `sum pi mu` of each row with `0 <= mu <= cap`, `sum mu = mass`, `[T]`.

    `pi` is `[T, V]`, 0 outside the tail of `count` tokens.
    """
    held = (count > 0) & (mass > 0)
    count = np.where(held, count, 1)
    cap = np.where(held, np.maximum(cap, mass / count), 1.0)
    filled = np.minimum((np.where(held, mass, 0.0) / cap).astype(np.int64), count)
    left = np.where(held, mass, 0.0) - filled * cap
    ascending = np.sort(pi, axis=-1)
    low, high = (
        _capped(ordered, start, filled, count, cap, left)
        for ordered, start in (
            (ascending, pi.shape[-1] - count),
            (ascending[:, ::-1], np.zeros_like(count)),
        )
    )
    return np.where(held, low, 0.0), np.where(held, high, 0.0)


def _capped(
    ordered: Float64,
    start: NDArray[np.int64],
    filled: NDArray[np.int64],
    count: NDArray[np.int64],
    cap: Float64,
    left: Float64,
) -> Float64:
    """`cap` on the first `filled` tokens from `start` on, `left` on the next if there is one.

    What lies before `start` is 0, so that its sum costs no digits.
    """
    sums = np.zeros((len(ordered), ordered.shape[-1] + 1))
    np.cumsum(ordered, axis=-1, out=sums[:, 1:])
    row = np.arange(len(ordered))
    last = np.minimum(start + filled, ordered.shape[-1] - 1)
    rest = np.where(filled < count, left * ordered[row, last], 0.0)
    return np.asarray(cap * sums[row, start + filled] + rest)
