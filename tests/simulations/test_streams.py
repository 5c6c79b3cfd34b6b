"""Random numbers: a seed's own, whatever batch it is in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from simulations.bandit import Streams


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (5, 7)])
def test_a_seed_sees_the_same_numbers_in_every_batch(shape):
    whole = Streams(range(9), "x").uniform("u", *shape, step=3)
    part = Streams(range(4, 7), "x").uniform("u", *shape, step=3)
    alone = Streams(range(8, 9), "x").uniform("u", *shape, step=3)
    assert torch.equal(whole[4:7], part)
    assert torch.equal(whole[8:], alone)


def test_names_steps_labels_and_seeds_are_apart():
    one = Streams(range(2), "x")
    drawn = [
        one.uniform("u", 8),
        one.uniform("v", 8),
        one.uniform("u", 8, step=1),
        Streams(range(2), "y").uniform("u", 8),
    ]
    seen = torch.cat(drawn).flatten()
    assert len(seen.unique()) == len(seen)


def test_distributions():
    streams = Streams(range(64), "x")
    assert kstest(streams.uniform("u", 500).flatten().numpy(), "uniform").pvalue > 1e-3
    assert kstest(streams.normal("n", 500).flatten().numpy(), "norm").pvalue > 1e-3
    counts = np.bincount(streams.integers("i", 5, 1_000).flatten().numpy())
    # five standard deviations of a binomial count
    spread = (64_000 * 0.2 * 0.8) ** 0.5
    assert len(counts) == 5
    assert np.abs(counts - 12_800).max() < 5 * spread


@pytest.mark.parametrize("seeds", [range(0), range(0, 4, 2), range(-1, 3)])
def test_bad_seeds_are_refused(seeds):
    with pytest.raises(ValueError, match="seeds = "):
        Streams(seeds)
