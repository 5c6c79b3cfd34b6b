"""How far D and C can move when a top-K list is chosen differently among tokens near its border.

With `S` a list, `U` the largest one it may be and `T(S)`, `T(U)` their tails, `g = f'(pi / mu)`:

    D_core <= D_S <= D_U,
    C_S - C_U = sum_{U minus S} (g_T(S) - g_j) v_j + (g_T(S) - g_T(U)) v_T(U),

where `g_T(S)` lies between the least and the greatest of `g_T(U)` and the `g_j` of what joins the
tail, since its ratio is their mediant.

Source: statements `noise.selection`, `coarse.lower-bound` of `docs/formulas.md`.
"""

from __future__ import annotations

import numpy as np

from pdverify.batch import InputError, Rows
from pdverify.definitions.cells import log_softmax, retained_support
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.precision.boxes import WIDEN, Bools, Float64
from pdverify.rules import Partition, Tail

BLOCK = 2**15
"""Cells of a block of rows: few enough that their arrays stay in the cache."""

SLACK = 2.0**-40
"""Float64 evaluates a divergence or a coefficient to far less than this of its terms."""


def selection_reach(
    rows: Rows, band: Bools, *, divergence: str, partition: Partition, tail: Tail | None
) -> tuple[Float64, Float64]:
    """Bounds of how far D and C are from those on another top-K list, chosen differently in `band`.

    A token outside the band is in both lists or in none; the sampled token is retained.

    Args:
        rows: `T` tokens with both policies' logits, taken as exact, and the list that was chosen.
        band: `[T, V]` bool, tokens that may belong to the list or not.
        divergence, partition, tail: as in `reach`; the partition is ``topk``.

    Returns:
        Two float64 `[T]`; 0 where the list is certain, infinite where nothing can be said.

    Raises:
        InputError: rows without either policy's logits, another shape of band or partition.
    """
    z, y = rows.logits, rows.behavior_logits
    if z is None or y is None:
        raise InputError("behavior_logits", None, None, "a list is chosen among them")
    if partition != "topk":
        raise InputError("partition", None, partition, "a list is chosen in topk")
    if band.shape != z.shape:
        raise InputError("band.shape", None, band.shape, f"expected {z.shape}")
    moving = np.flatnonzero(band.any(axis=-1))
    d, c = np.zeros(len(rows)), np.zeros(len(rows))
    step = max(1, BLOCK // rows.vocab_size)
    for start in range(0, len(moving), step):
        part = moving[start : start + step]
        with np.errstate(all="ignore"):
            pi, mu = np.exp(log_softmax(z[part])), np.exp(log_softmax(y[part]))
            found = _selected(rows.take(part), pi, mu, band[part], divergence, tail)
            d[part], c[part] = (np.where(np.isnan(x), np.inf, x) for x in found)
    return d, c


def _total(x: Float64, inside: Bools) -> Float64:
    return np.asarray(np.where(inside, x, 0.0).sum(axis=-1))


def _selected(
    rows: Rows, pi: Float64, mu: Float64, band: Bools, divergence: str, tail: Tail | None
) -> tuple[Float64, Float64]:
    formula = DIVERGENCES[divergence]
    ids, y = retained_support(rows)
    used = ~np.isneginf(y)
    kept = np.zeros(band.shape, dtype=bool)
    row = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
    kept[row[used], ids[used]] = True
    own = np.arange(rows.vocab_size) == rows.tokens[:, None]
    moving = band & ~own
    core, under = kept & ~moving | own, ~(kept | moving | own)
    pi_t, mu_t = _total(pi, under), _total(mu, under)
    pi_b, mu_b = _total(pi, moving), _total(mu, moving)

    cells = formula.cell(mu, pi)
    most = _total(cells, ~under) + formula.cell(mu_t, pi_t)
    least = _total(cells, core) + formula.cell(mu_t + mu_b, pi_t + pi_b)
    d = (most - least) * WIDEN + SLACK * (1 + np.abs(most))

    g, g_t = formula.moment(mu, pi) / pi, formula.moment(mu_t, pi_t) / pi_t
    low = np.minimum(g_t, np.where(moving, g, np.inf).min(axis=-1))
    high = np.maximum(g_t, np.where(moving, g, -np.inf).max(axis=-1))
    v = pi * (own - pi - pi[own][:, None] + (pi * pi).sum(axis=-1, keepdims=True))
    away = np.maximum(g - low[:, None], high[:, None] - g)
    c = _total(np.abs(v) * away, moving) + np.abs(_total(v, under)) * (high - low)
    slack = SLACK * (_total(np.abs(v * g), ~under) + np.abs(g_t) * _total(np.abs(v), under))
    if tail in ("aggregated", "uniform"):
        # C is affine in the tail's collision mass, of slope hbar - g_T
        n = under.sum(axis=-1)
        many, few = (1, 1) if tail == "aggregated" else (n + moving.sum(axis=-1), np.maximum(n, 1))
        least_x, most_x = pi_t**2 / many, (pi_t + pi_b) ** 2 / few
        error = most_x + _total(pi * pi, ~core)
        change = most_x - least_x + _total(pi * pi, moving)
        mean = _total(pi * g, ~under) + pi_t * g_t
        drift = (pi_t + pi_b) * (high - low)
        slope = np.maximum(np.abs(mean - low), np.abs(mean - high)) + drift
        slope = slope + SLACK * (_total(np.abs(pi * g), ~under) + np.abs(pi_t * g_t))
        extra = change * slope + error * (2 * drift + high - low)
        return d, (2 * c + extra) * WIDEN + slack
    return d, 2 * c * WIDEN + slack
