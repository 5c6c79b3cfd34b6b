"""The masked policy loss and its gradient, in float64.

Per token `-A sg(min(r, cap)) keep log pi_k`: the score-function form, in which neither the mask
nor the importance ratio carries a gradient.  Aggregations: ``token-mean`` divides by the number
of valid tokens; ``sequence-mean`` averages over the valid tokens of a sequence, then over the
sequences that have any; ``fixed-length`` divides by `B L`, padding included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, InputError
from pdverify.definitions.cells import Float64, log_softmax, sampled_logprob

AGGREGATIONS = ("none", "token-mean", "sequence-mean", "fixed-length")


def weights(valid: NDArray[np.bool_], aggregation: str) -> Float64:
    """Weight `[B, L]` of each token's loss in the aggregate; padding has 0.

    Raises:
        InputError: unknown aggregation.
    """
    if aggregation not in AGGREGATIONS:
        raise InputError("aggregation", None, aggregation, f"known: {', '.join(AGGREGATIONS)}")
    one = valid.astype(np.float64)
    if aggregation == "none":
        return one
    if aggregation == "token-mean":
        return np.asarray(one / valid.sum())
    if aggregation == "fixed-length":
        return one / valid.size
    lengths = valid.sum(axis=-1, keepdims=True)
    return np.asarray(one / np.maximum(lengths, 1) / (lengths > 0).sum())


def policy_loss(
    batch: Batch, keep: NDArray[np.bool_], *, ratio_cap: float = 20.0, aggregation: str = "none"
) -> tuple[Float64, Float64]:
    """Masked policy loss and its gradient with respect to the logits.

    loss = -A min(r, cap) keep log pi_k;  d loss / d z = -A min(r, cap) keep (e_k - pi)

    A token with `r = 0` contributes 0, the limit of `r log pi_k`.

    Args:
        batch: with training logits.
        keep: bool `[B, L]`.
        ratio_cap: upper bound of the importance ratio, > 0.
        aggregation: see the module; ``none`` gives the loss per token.

    Returns:
        The loss (`[B, L]` for ``none``, else `[]`) in nats, and its gradient `[B, L, V]` (for
        ``none``, of the sum over tokens).

    Raises:
        InputError: no logits, unknown aggregation or a cap that is not positive.
    """
    if batch.logits is None:
        raise InputError("logits", None, None, "the loss is a function of the training logits")
    if not ratio_cap > 0:
        raise InputError("ratio_cap", None, ratio_cap, "a cap on the importance ratio is positive")
    rows = batch.rows()
    b, position = rows.index.T
    assert rows.logits is not None
    log_pi = log_softmax(rows.logits)
    at = (np.arange(len(rows)), rows.tokens)
    active = keep[b, position] & (rows.advantages != 0)
    gap = np.where(active, log_pi[at] - sampled_logprob(rows), 0.0)
    scale = rows.advantages * np.minimum(np.exp(np.minimum(gap, 700.0)), ratio_cap)
    scale = np.where(active, scale * weights(batch.response_mask, aggregation)[b, position], 0.0)
    slope = np.exp(log_pi)
    slope[at] -= 1.0
    gradient = np.zeros(batch.logits.shape)
    gradient[b, position] = slope * scale[:, None]
    loss = np.zeros(batch.tokens.shape)
    loss[b, position] = -scale * np.where(scale != 0, log_pi[at], 0.0)
    return (loss if aggregation == "none" else np.asarray(loss.sum())), gradient
