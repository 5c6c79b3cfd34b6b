"""The random rows of the rounding experiments, and the little arithmetic that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pdverify.oracle.float_balls import FloatBall

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]


def tree_sum(x: NDArray[Any]) -> NDArray[Any]:
    """Pairwise sum over the last axis: ceil(log2 n) levels of additions."""
    size = x.shape[-1]
    full = 1 << (size - 1).bit_length()
    padded = np.zeros((*x.shape[:-1], full), dtype=x.dtype)
    padded[..., :size] = x
    while padded.shape[-1] > 1:
        half = padded.shape[-1] // 2
        padded = padded[..., :half] + padded[..., half:]
    return padded[..., 0]


def at(x: NDArray[Any], k: NDArray[np.int64]) -> NDArray[Any]:
    """The value of the sampled token."""
    return np.take_along_axis(x, k[:, None], axis=-1)[:, 0]


def without(x: NDArray[Any], k: NDArray[np.int64]) -> NDArray[Any]:
    """A copy with 0 in the slot of the sampled token."""
    x = x.copy()
    np.put_along_axis(x, k[:, None], 0, axis=-1)
    return x


def log_softmax(logits: Float32) -> Float32:
    """A straightforward float32 log-softmax."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Float32 = shifted - np.log(tree_sum(np.exp(shifted)))[..., None]
    return result


def enclosed_log_softmax(logits: Float32) -> FloatBall:
    """Balls around the exact log-softmax of the very float32 logits."""
    exact = logits.astype(np.float64)
    shifted = FloatBall.exact(exact) - FloatBall.exact(exact.max(axis=-1, keepdims=True))
    total = shifted.exp().sum().log()
    return shifted - FloatBall(total.mid[..., None], total.rad[..., None])


@dataclass(frozen=True)
class Family:
    """Rows of one kind: training logits `z`, behavior logits `y`, sampled tokens `k`."""

    z: Float32
    y: Float32
    k: NDArray[np.int64]


def families(rows: int, size: int, seed: int) -> Iterator[tuple[str, Family]]:
    """Flat, Zipf and peaked rows, with fp32 and with bf16-stored logits."""
    rng = np.random.default_rng(seed)
    for kind in ("flat", "zipf", "peaked"):
        for stored in ("fp32", "bf16"):
            noise = rng.normal(size=(rows, size))
            if kind == "flat":
                z = noise * rng.uniform(0.1, 2.0, size=(rows, 1))
            else:
                slope = rng.uniform(0.7, 2.0, size=(rows, 1))
                z = noise - slope * np.log(rng.permutation(size) + 1.0)
            if kind == "peaked":
                z[np.arange(rows), rng.integers(size, size=rows)] += rng.uniform(8, 30, size=rows)
            z += rng.uniform(-20, 20, size=(rows, 1))
            y = z + rng.normal(size=z.shape) * 10 ** rng.uniform(-4, 0, size=(rows, 1))
            y += rng.uniform(-20, 20, size=(rows, 1))
            behind = np.cumsum(np.exp(y - y.max(axis=-1, keepdims=True)), axis=-1)
            k = (behind < behind[:, -1:] * rng.random((rows, 1))).sum(axis=-1)
            z32, y32 = z.astype(np.float32), y.astype(np.float32)
            if stored == "bf16":
                z32 = z32.astype(ml_dtypes.bfloat16).astype(np.float32)
                y32 = y32.astype(ml_dtypes.bfloat16).astype(np.float32)
            yield f"{kind}, {stored} logits, V = {size}", Family(z32, y32, k)


@dataclass(frozen=True)
class TopK:
    """Top-K view of rows: stored behavior log-probs `y`, `[T, K + 1]`, k in slot `own`.

    `ids` are the retained tokens; an unused slot repeats k and has `used` False.
    """

    ids: NDArray[np.int64]
    y: Float32
    used: NDArray[np.bool_]
    own: NDArray[np.int64]


RETAINED = 20


def top_k(rows: Family, log_mu: Float64) -> TopK:
    """The view as a rollout engine stores it: float32 log-probs of the top 20, k appended."""
    stored = log_mu.astype(np.float32)
    best = np.argpartition(-stored, RETAINED, axis=-1)[:, :RETAINED]
    ids = np.concatenate([best, rows.k[:, None]], axis=-1)
    listed = best == rows.k[:, None]
    used = np.ones(ids.shape, dtype=bool)
    used[:, -1] = ~listed.any(axis=-1)
    own = np.where(used[:, -1], RETAINED, listed.argmax(axis=-1))
    return TopK(ids, np.take_along_axis(stored, ids, axis=-1), used, own)
