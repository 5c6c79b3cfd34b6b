"""Figures of the tables."""

from __future__ import annotations

import numpy as np
import pytest

from pdverify.precision.records import MARGINS, Rate
from pdverify.precision.statistics import binned, bits_of, middle_of, pooled, rate_of


def test_bits_are_the_median_of_relative_errors():
    error, scale = np.array([2.0**-3, 2.0**-5, 2.0**-9]), np.ones(3)
    middle, low, high, limited = bits_of(error, np.zeros(3), scale)
    assert (middle, low, high, limited) == (5.0, 3.0, 9.0, False)
    assert bits_of(np.full(2, np.nan), np.zeros(2), np.ones(2)) == (None, None, None, False)


def test_errors_below_what_is_known_give_a_limit():
    middle, _, _, limited = bits_of(np.zeros(5), np.full(5, 2.0**-40), np.ones(5))
    assert (middle, limited) == (40.0, True)


@pytest.mark.parametrize("count", [8, 21, 200])
def test_interval_of_the_median_covers_it(count):
    rng = np.random.default_rng(0)
    found = [middle_of(rng.exponential(size=count)) for _ in range(2000)]
    covered = np.mean([low <= np.log(2) <= high for _, low, high in found])
    assert covered >= 0.94
    assert all(low <= middle <= high for middle, low, high in found)


def test_bins_count_every_token_once():
    margin = np.array([0.0, 1e-9, 0.3, 0.31, 1.0])
    flipped = np.array([True, False, True, True, False])
    bins = binned(flipped, margin, np.array([True, True, True, False, True]))
    assert len(bins) == len(MARGINS)
    assert (bins[0], bins[-1]) == ((1, 2), (0, 1))
    assert [sum(x) for x in zip(*bins, strict=True)] == [2, 4]


def test_rates_of_different_tokens_pool():
    assert pooled([rate_of(1, 4), rate_of(2, 6)]) == rate_of(3, 10)
    assert pooled([]) == Rate(0, 0, 0.0, 1.0)
