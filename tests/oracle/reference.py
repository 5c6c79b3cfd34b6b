"""A second road to D, C and the second-order coefficient: their definitions, at 500 bits.

Nothing here knows a coefficient formula.  A policy is a list of probabilities, the divergence is
summed from its textbook form, and its derivatives are central differences along the motion
z + h u of softmax logits, with a step so small that the difference is exact to 100 digits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flint import arb

from pdverify.batch import Rows
from pdverify.oracle.arb_balls import precision

BITS = 500
STEP = arb(2) ** -160


def _kl(m, p):
    if m == 0:
        return arb(0)
    return m * (m / p).log()


def _mean_kl(m, p):
    half = (m + p) / 2
    return (_kl(m, half) + _kl(p, half)) / 2


TERMS: dict[str, Callable] = {
    "kl": _kl,
    "reverse-kl": lambda m, p: _kl(p, m),
    "tv": lambda m, p: abs(p - m) / 2,
    "jensen-shannon": _mean_kl,
    "squared-hellinger": lambda m, p: (p.sqrt() - m.sqrt()) ** 2 / 2,
    "chi2": lambda m, p: (m - p) ** 2 / p if (m - p) != 0 else arb(0),
    "reverse-chi2": lambda m, p: (m - p) ** 2 / m if (m - p) != 0 else arb(0),
}


def softmax(z: np.ndarray) -> list:
    weights = [arb(0) if np.isneginf(v) else arb(float(v)).exp() for v in z]
    total = sum(weights, arb(0))
    return [w / total for w in weights]


class Cells:
    """mu on the cells; which tokens of a (possibly surrogate) training policy make up each."""

    def __init__(self, mu: list, pi: list, groups: list[list[int]], k: int):
        self.mu, self.pi, self.groups, self.k = mu, pi, groups, k

    def coarse(self, pi: list) -> list:
        return [sum((pi[i] for i in group), arb(0)) for group in self.groups]

    def divergence(self, name: str, pi: list | None = None):
        cells = self.coarse(self.pi if pi is None else pi)
        return sum((TERMS[name](m, p) for m, p in zip(self.mu, cells, strict=True)), arb(0))

    def moved(self, h) -> list:
        """pi after the logits moved by h (e_k - pi), the direction frozen."""
        weights = [p * (h * ((1 if i == self.k else 0) - p)).exp() for i, p in enumerate(self.pi)]
        total = sum(weights, arb(0))
        return [w / total for w in weights]

    def coefficient(self, name: str):
        up = self.divergence(name, self.moved(STEP))
        down = self.divergence(name, self.moved(-STEP))
        return (up - down) / (2 * STEP)

    def second_derivative(self, name: str):
        up = self.divergence(name, self.moved(STEP))
        down = self.divergence(name, self.moved(-STEP))
        return (up + down - 2 * self.divergence(name)) / (STEP * STEP)


def cells(rows: Rows, t: int, partition: str, tail: str | None, y_moved: dict | None = None):
    """The cells of one row; `y_moved` maps a token to another behavior log-prob."""
    pi, k = softmax(rows.logits[t]), int(rows.tokens[t])
    size = rows.vocab_size
    if partition == "full":
        return Cells(softmax(rows.behavior_logits[t]), pi, [[i] for i in range(size)], k)
    stored = {k: float(rows.behavior_logprobs[t])}
    if partition == "topk":
        for i, y in zip(rows.topk_ids[t], rows.topk_logprobs[t], strict=True):
            if np.isfinite(y):
                stored[int(i)] = float(y)
    stored.update(y_moved or {})
    support = list(stored)
    mu = [arb(stored[i]).exp() for i in support]
    rest = 1 - sum(mu, arb(0))
    mu.append(rest if rest > 0 else arb(0))
    outside = [i for i in range(size) if i not in stored]
    order = [pi[i] for i in support]
    mass = sum((pi[i] for i in outside), arb(0))
    if tail == "exact" or tail is None:
        tail_tokens = [pi[i] for i in outside]
    elif tail == "aggregated":
        tail_tokens = [mass]
    else:
        tail_tokens = [mass / len(outside)] * len(outside)
    groups = [[i] for i in range(len(support))]
    groups.append(list(range(len(support), len(support) + len(tail_tokens))))
    return Cells(mu, order + tail_tokens, groups, support.index(k))


__all__ = ["BITS", "TERMS", "Cells", "cells", "precision", "softmax"]
