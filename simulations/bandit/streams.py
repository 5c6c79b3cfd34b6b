"""Random numbers of a batch of seeds, the same for a seed whatever batch it is in."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

BLOCK = 4
"""Numbers that Philox makes from one value of its counter."""


class Streams:
    """Named streams of random numbers, one for each seed.

    A stream is a Philox generator keyed by `label`, its name and a step; seed `s` has its own
    range of the counter.  Equal names give equal numbers: settings that share a label see common
    random numbers.

    Args:
        seeds: consecutive seeds of the batch.
        label: what the numbers are for.
    """

    def __init__(self, seeds: range, label: str = "") -> None:
        if seeds.step != 1 or not len(seeds) or seeds.start < 0:
            raise ValueError(f"seeds = {seeds}: expected consecutive seeds from 0 on, at least one")
        self.seeds = seeds
        self.label = label

    def uniform(self, name: str, *shape: int, step: int = 0) -> Tensor:
        """Uniform in (0, 1), `[S, *shape]`."""
        count = math.prod(shape)
        blocks = -(-count // BLOCK)
        entropy = [*f"{self.label}/{name}".encode(), step]
        key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
        bits = np.random.Philox(key=key)
        bits.advance(self.seeds.start * blocks)
        drawn = np.random.Generator(bits).random((len(self.seeds), blocks * BLOCK))
        # 0 has no quantile under the normal distribution
        drawn = np.maximum(drawn[:, :count], 2.0**-54)
        return torch.from_numpy(drawn).reshape(len(self.seeds), *shape)

    def normal(self, name: str, *shape: int, step: int = 0) -> Tensor:
        """Standard normal, `[S, *shape]`."""
        return torch.from_numpy(ndtri(self.uniform(name, *shape, step=step).numpy()))

    def integers(self, name: str, high: int, *shape: int, step: int = 0) -> Tensor:
        """Uniform in `0 .. high - 1`, int64 `[S, *shape]`."""
        return (self.uniform(name, *shape, step=step) * high).long().clamp_max(high - 1)
