"""Intervals over seeds, paired tests and their correction."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import permutation_test

from simulations.statistics import Estimate, holm, mean, paired, share


def test_intervals_cover_as_often_as_they_say():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        totals = rng.integers(20, 60, 48)
        hits = rng.binomial(totals, 0.3)
        found = share(hits, totals)
        inside += found.low <= 0.3 <= found.high
    # five standard deviations below 95 %, and a percentile interval's usual shortfall of 2 %
    assert inside >= 200 * (0.95 - 0.02) - 5 * math.sqrt(200 * 0.95 * 0.05)
    assert inside < 200


def test_share_by_hand():
    found = share(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert found.value == 4 / 6
    assert found.low == 0.5
    assert found.high == 0.75


def test_seeds_without_tokens_do_not_count():
    with_empty = share(np.array([1.0, 0.0, 3.0]), np.array([2.0, 0.0, 4.0]))
    assert with_empty == share(np.array([1.0, 3.0]), np.array([2.0, 4.0]))
    assert math.isnan(share(np.zeros(3), np.zeros(3)).value)


def test_constant_values_have_no_width():
    assert mean(np.full(5, 0.25)) == Estimate(0.25, 0.25, 0.25)


def test_the_paired_test_is_the_permutation_test():
    rng = np.random.default_rng(1)
    first, second = rng.normal(0.3, 1, 10), rng.normal(0, 1, 10)
    _, p = paired(first, second)
    gap = first - second
    flips = np.array(list(itertools.product((-1, 1), repeat=10))) @ gap
    exact = (np.abs(flips) >= abs(gap.sum()) * (1 - 1e-12)).mean()
    # five standard deviations of 99,999 draws
    assert abs(p - exact) < 5 * math.sqrt(exact * (1 - exact) / 99_999) + 1e-5
    library = permutation_test(
        (first, second), lambda a, b, axis: (a - b).mean(axis), permutation_type="samples",
        vectorized=True, n_resamples=np.inf,
    )  # fmt: skip
    assert abs(exact - library.pvalue) < 1e-12


def test_differences_that_are_all_zero_have_no_p():
    found, p = paired(np.ones(4), np.ones(4))
    assert found.value == 0
    assert math.isnan(p)
    assert math.isnan(paired(np.full(3, np.nan), np.ones(3))[0].value)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.5, 0.9], [1.0, 1.0]),
        ([0.01, math.nan, 0.02], [0.02, math.nan, 0.02]),
        ([], []),
    ],
)
def test_holm_by_hand(p, expected):
    np.testing.assert_allclose(holm(p), expected, rtol=1e-12)
