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
    ordered = np.sort(pi, axis=-1)[:, ::-1]
    low, high = np.empty(len(rows)), np.empty(len(rows))
    for t in range(len(rows)):
        tail = ordered[t, : int(cells.tail_cells[t])]
        low[t], high[t] = _rearranged(tail, float(cells.mu_tail[t]), float(cap[t]))
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


def _rearranged(tail: NDArray[np.float64], mass: float, cap: float) -> tuple[float, float]:
    """Smallest and largest `sum pi mu` with `0 <= mu <= cap`, `sum mu = mass`; `tail` descends."""
    if tail.size == 0 or mass == 0.0:
        return 0.0, 0.0
    cap = max(cap, mass / tail.size)
    filled = min(int(mass / cap), tail.size)
    left = mass - filled * cap
    high = cap * tail[:filled].sum()
    low = cap * tail[tail.size - filled :].sum()
    if filled < tail.size:
        high += left * tail[filled]
        low += left * tail[tail.size - filled - 1]
    return float(low), float(high)
