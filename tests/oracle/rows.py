"""Random rows of every kind: flat, peaked, tiny and huge logits, -inf, nearly equal policies."""

from __future__ import annotations

import numpy as np

from pdverify.batch import Batch, Rows
from pdverify.formats import FORMATS

KINDS = ("flat", "zipf", "peaked", "one-hot", "close", "wide", "tiny", "huge-offset", "neg-inf")


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def logits_pair(kind: str, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    z = rng.standard_normal(size)
    noise = 0.3
    if kind == "zipf":
        z = -1.2 * np.log(1 + rng.permutation(size))
    elif kind in ("peaked", "one-hot"):
        z[rng.integers(size)] += 12 if kind == "peaked" else 60
    elif kind == "close":
        noise = 1e-5
    elif kind == "wide":
        z *= 60
    elif kind == "tiny":
        z *= 1e-30
        noise = 1e-30
    elif kind == "huge-offset":
        z = z + 2.0**20
    other = z + noise * rng.standard_normal(size)
    return z.astype(np.float32), other.astype(np.float32)


def make_rows(
    count: int = 1,
    size: int = 12,
    k: int = 4,
    kind: str | None = None,
    seed: int = 0,
    logprob_dtype: str = "fp32",
) -> Rows:
    rng = np.random.default_rng(seed)
    kinds = [kind or KINDS[i % len(KINDS)] for i in range(count)]
    pairs = [logits_pair(name, size, rng) for name in kinds]
    z, z_mu = (np.stack(side) for side in zip(*pairs, strict=True))
    y = log_softmax(z_mu.astype(np.float64))
    tokens = (y + rng.gumbel(size=y.shape)).argmax(axis=-1)
    for t, name in enumerate(kinds):
        if name == "neg-inf":
            free = [i for i in rng.permutation(size) if i != tokens[t]]
            z[t, free[0]] = z_mu[t, free[0]] = -np.inf
            if seed % 3 == 1:
                z[t, free[1]] = -np.inf
            if seed % 3 == 2:
                z_mu[t, free[1]] = -np.inf
    y = log_softmax(z_mu.astype(np.float64))
    stored = FORMATS[logprob_dtype].round(y).astype(np.float32)
    stored = np.minimum(stored, 0.0)
    ids = np.argsort(-z_mu, axis=-1)[:, :k]
    return Batch(
        tokens=tokens[None],
        advantages=rng.choice([-1.5, 0.0, 0.7], size=(1, count), p=[0.4, 0.1, 0.5]).astype("f4"),
        response_mask=np.ones((1, count), dtype=bool),
        vocab_size=size,
        logits=z[None],
        behavior_logits=z_mu[None],
        behavior_logprobs=np.take_along_axis(stored, tokens[:, None], axis=1)[:, 0][None],
        topk_ids=ids[None],
        topk_logprobs=np.take_along_axis(stored, ids, axis=1)[None],
        dtype="fp64",
        logprob_dtype=logprob_dtype,
    ).rows()


def literal(
    mu: list[float],
    pi: list[float],
    token: int,
    k: int | None = None,
    advantage: float = 1.0,
    logprob_dtype: str = "fp64",
) -> Rows:
    """Rows from literal probabilities; log-probs stored in float64."""
    with np.errstate(divide="ignore"):
        y, z = np.log(np.array(mu)), np.log(np.array(pi))
    ids = np.argsort(-y, kind="stable")[: (k or 1)]
    return Batch(
        tokens=np.array([[token]]),
        advantages=np.array([[advantage]]),
        response_mask=np.ones((1, 1), dtype=bool),
        vocab_size=len(mu),
        logits=z[None, None],
        behavior_logits=y[None, None],
        behavior_logprobs=y[None, None, token],
        topk_ids=ids[None, None],
        topk_logprobs=y[ids][None, None],
        dtype="fp64",
        logprob_dtype=logprob_dtype,
    ).rows()
