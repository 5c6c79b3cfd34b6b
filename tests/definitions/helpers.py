"""Small batches for the tests of the definitions and of the backends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdverify.batch import Batch
from pdverify.budgets import Budgets

MU = (0.5, 0.25, 0.125, 0.0625, 0.0625)
PI = (0.25, 0.5, 0.0625, 0.125, 0.0625)


class StrictBudgets(Budgets):
    """Budgets without the allowance for forms that part where stored masses sum past 1.

    The oracle, the definitions and torch take one form there, so only rounding is excused.
    """

    _excess = np.zeros(())


def one_token(
    mu: Sequence[float] = MU,
    pi: Sequence[float] = PI,
    *,
    k: int = 0,
    ids: Sequence[int] = (0, 1),
    advantage: float = 1.0,
) -> Batch:
    """One token from literal probabilities, log-probs stored in float64."""
    with np.errstate(divide="ignore"):
        y, z = np.log(np.array(mu)), np.log(np.array(pi))
    listed = np.array(ids, dtype=np.int64)
    return Batch(
        tokens=np.array([[k]]),
        advantages=np.array([[advantage]], dtype=np.float64),
        response_mask=np.ones((1, 1), dtype=bool),
        vocab_size=len(mu),
        logits=z[None, None],
        behavior_logits=y[None, None],
        behavior_logprobs=y[None, None, k],
        topk_ids=listed[None, None],
        topk_logprobs=y[listed][None, None],
        dtype="fp64",
        logprob_dtype="fp64",
    )


def padded_batch() -> Batch:
    """Three sequences of four positions, one of them empty; NaN and bad ids on padding."""
    rng = np.random.default_rng(3)
    valid = np.array([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]], dtype=bool)
    logits = rng.normal(size=(3, 4, 6))
    tokens = rng.integers(0, 6, size=(3, 4))
    advantages = rng.normal(size=(3, 4))
    advantages[0, 1] = 0.0
    stored = np.log(rng.uniform(0.05, 0.9, size=(3, 4)))
    for values in (logits, advantages, stored):
        values[~valid] = np.nan
    return Batch(
        tokens=np.where(valid, tokens, -100),
        advantages=advantages,
        response_mask=valid,
        vocab_size=6,
        logits=logits,
        behavior_logprobs=stored,
        dtype="fp64",
        logprob_dtype="fp64",
    )
