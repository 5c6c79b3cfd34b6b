"""Both policies on the cells of a partition of the vocabulary.

A divergence is taken on cells: every token (``full``), the retained support `S` plus one tail cell
(``topk``), or {k} and the rest (``binary``, which is the retained support of size one).

Conventions.  `S` is the behavior policy's top-K list and the sampled token `k`; listed tokens of
behavior probability zero (-inf) leave `S` for the tail, except `k`.  `mu` on `S` is `exp` of the
stored log-prob, `mu_T = max(0, 1 - sum_S mu)`; `pi` comes from the logits, `pi_T` is summed over
what is not retained.  A tail without tokens has mass 0 under both, whatever `sum_S mu` rounds to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import FloatArray, InputError, Rows
from pdverify.definitions import _formulas
from pdverify.rules import Partition, Support, Tail

Float64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cells:
    """Both policies on the cells of a partition, float64.

    Attributes:
        ids: `[T, M]` int64, the retained tokens, k included once (``full``: None, all of them).
        slot: `[T]` int64, the column of k among the `M`.
        mu, pi: `[T, M]` probabilities; a slot that holds no token has both 0.
        mu_k, pi_k: `[T]`, the sampled token's.
        mu_tail, pi_tail: `[T]` tail masses, 0 without a tail.
        tail_cells: `[T]` number of tokens in the tail, `V - |S|`.
        collision: `[T]`, `x = sum_tail pi^2`.
        cubes: `[T]`, `sum_tail pi^3`.
        log_gap: `[T]`, `log(pi_k / mu_k)` in nats.
    """

    ids: NDArray[np.int64] | None
    slot: NDArray[np.int64]
    mu: Float64
    pi: Float64
    mu_k: Float64
    pi_k: Float64
    mu_tail: Float64
    pi_tail: Float64
    tail_cells: NDArray[np.int64]
    collision: Float64
    cubes: Float64
    log_gap: Float64


def log_softmax(logits: FloatArray) -> Float64:
    """`log pi` in nats, float64, over the last axis; -inf logits have probability zero."""
    z = logits.astype(np.float64)
    top = z.argmax(axis=-1)[..., None]
    shifted = z - np.take_along_axis(z, top, axis=-1)
    # the largest term is 1: log1p of the others keeps log pi of a near-certain token
    others = np.exp(shifted)
    np.put_along_axis(others, top, 0.0, axis=-1)
    return np.asarray(shifted - np.log1p(others.sum(axis=-1, keepdims=True)))


def retained_support(rows: Rows, support: Support = "append") -> tuple[NDArray[np.int64], Float64]:
    """Retained support of each row: ids `[T, M]` and behavior log-probs `[T, M]` (nats).

    ``append``: `M = K + 1`, the sampled token in the last slot, whose log-prob is -inf if it is
    in the list already.  ``replace``: `M = K`, the list as it is.  Unused slots have -inf.

    Raises:
        InputError: no top-K list, or with ``replace`` a list without the sampled token.
    """
    if rows.topk_ids is None or rows.topk_logprobs is None or rows.behavior_logprobs is None:
        raise InputError("topk_ids", None, None, "the topk view needs a top-K list")
    listed = rows.topk_ids == rows.tokens[:, None]
    y = rows.topk_logprobs.astype(np.float64)
    if support == "replace":
        missing = ~listed.any(axis=-1)
        if missing.any():
            t = int(np.argmax(missing))
            raise InputError(
                "topk_ids",
                tuple(int(i) for i in rows.index[t]),
                int(rows.tokens[t]),
                "with --support replace the list holds the sampled token",
            )
        return rows.topk_ids, y
    own = np.where(listed.any(axis=-1), -np.inf, rows.behavior_logprobs.astype(np.float64))
    return (
        np.concatenate([rows.topk_ids, rows.tokens[:, None]], axis=-1),
        np.concatenate([y, own[:, None]], axis=-1),
    )


def build(rows: Rows, partition: Partition, support: Support = "append") -> Cells:
    """The cells of a partition, for every row.

    Raises:
        InputError: the rows lack what the partition needs.
    """
    if partition == "full":
        return _full(rows)
    if partition == "binary":
        return _binary(rows)
    ids, log_mu = retained_support(rows, support)
    return _coarse(rows, ids, log_mu)


def _full(rows: Rows) -> Cells:
    if rows.logits is None or rows.behavior_logits is None:
        raise InputError("behavior_logits", None, None, "the full view needs it")
    log_pi, log_mu = log_softmax(rows.logits), log_softmax(rows.behavior_logits)
    mu, pi = np.exp(log_mu), np.exp(log_pi)
    at = (np.arange(len(rows)), rows.tokens)
    none = np.zeros(len(rows))
    return Cells(
        ids=None,
        slot=rows.tokens,
        mu=mu,
        pi=pi,
        mu_k=mu[at],
        pi_k=pi[at],
        mu_tail=none,
        pi_tail=none,
        tail_cells=none.astype(np.int64),
        collision=none,
        cubes=none,
        log_gap=log_pi[at] - log_mu[at],
    )


def sampled_logprob(rows: Rows) -> Float64:
    """Behavior log-prob of the sampled token, `[T]` nats: as stored, else from the logits."""
    if rows.behavior_logprobs is not None:
        return rows.behavior_logprobs.astype(np.float64)
    assert rows.behavior_logits is not None
    return np.asarray(log_softmax(rows.behavior_logits)[np.arange(len(rows)), rows.tokens])


def _binary(rows: Rows) -> Cells:
    log_mu = sampled_logprob(rows)
    if rows.logits is not None:
        return _coarse(rows, rows.tokens[:, None], log_mu[:, None])
    assert rows.logprobs is not None
    log_pi = rows.logprobs.astype(np.float64)
    mu_k, pi_k = np.exp(log_mu), np.exp(log_pi)
    unknown = np.full(len(rows), np.nan)
    return Cells(
        ids=rows.tokens[:, None],
        slot=np.zeros(len(rows), dtype=np.int64),
        mu=mu_k[:, None],
        pi=pi_k[:, None],
        mu_k=mu_k,
        pi_k=pi_k,
        mu_tail=np.maximum(-np.expm1(log_mu), 0.0),
        pi_tail=np.maximum(-np.expm1(log_pi), 0.0),
        tail_cells=np.full(len(rows), rows.vocab_size - 1),
        collision=unknown,
        cubes=unknown,
        log_gap=log_pi - log_mu,
    )


def _behavior_tail(mu: Float64, log_mu: Float64) -> Float64:
    """`max(0, 1 - sum mu)` over the last axis, the largest mass subtracted from 1 by expm1."""
    top = log_mu.argmax(axis=-1)[:, None]
    others = mu.copy()
    np.put_along_axis(others, top, 0.0, axis=-1)
    first = -np.expm1(np.take_along_axis(log_mu, top, axis=-1)[:, 0])
    return np.asarray(np.maximum(first - others.sum(axis=-1), 0.0))


def _coarse(rows: Rows, ids: NDArray[np.int64], log_mu: Float64) -> Cells:
    if rows.logits is None:
        raise InputError("logits", None, None, "the topk view needs the training logits")
    log_pi = log_softmax(rows.logits)
    pi_all = np.exp(log_pi)
    used = ~np.isneginf(log_mu)
    slot = ((ids == rows.tokens[:, None]) & used).argmax(axis=-1)
    pi = np.where(used, np.take_along_axis(pi_all, ids, axis=-1), 0.0)
    tail = pi_all.copy()
    row = np.broadcast_to(np.arange(len(rows))[:, None], ids.shape)
    tail[row[used], ids[used]] = 0.0
    mu = np.exp(log_mu)
    at = (np.arange(len(rows)), rows.tokens)
    log_mu_k = log_mu[np.arange(len(rows)), slot]
    tail_cells = rows.vocab_size - used.sum(axis=-1)
    squares = tail * tail
    return Cells(
        ids=ids,
        slot=slot,
        mu=mu,
        pi=pi,
        mu_k=np.exp(log_mu_k),
        pi_k=pi_all[at],
        mu_tail=np.where(tail_cells > 0, _behavior_tail(mu, log_mu), 0.0),
        pi_tail=tail.sum(axis=-1),
        tail_cells=tail_cells,
        collision=squares.sum(axis=-1),
        cubes=(squares * tail).sum(axis=-1),
        log_gap=log_pi[at] - log_mu_k,
    )


def tail_mean(cells: Cells, tail: Tail | None) -> Float64:
    """`w = x / pi_T`, the mean of pi over the tail weighted by pi, as `tail` estimates it, `[T]`.

    ``exact`` (or None) sums the tail; ``aggregated`` takes it as one token, ``uniform`` as flat.
    Source: arXiv 2607.10848; statement `coarse.affine` of `docs/formulas.md`.
    """
    if tail == "aggregated":
        return np.asarray(_formulas.tail_mean_aggregated(cells.pi_tail))
    if tail == "uniform":
        return np.asarray(_formulas.tail_mean_uniform(cells.pi_tail, cells.tail_cells))
    if tail == "bracket":
        raise InputError("tail", None, tail, "a bracket has two ends; ask for each")
    return np.asarray(_formulas.tail_mean_exact(cells.collision, cells.pi_tail))


def tail_square(cells: Cells, tail: Tail | None) -> Float64:
    """`sum_tail pi^3 / pi_T` as `tail` estimates it, `[T]`; see `tail_mean`."""
    if tail in ("aggregated", "uniform"):
        return tail_mean(cells, tail) ** 2
    return np.asarray(_formulas.tail_mean_exact(cells.cubes, cells.pi_tail))
