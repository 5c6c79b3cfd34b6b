"""The interval of the full coefficient that a top-K view leaves open."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

from pdverify.batch import InputError
from pdverify.cases import build as family
from pdverify.definitions.cells import build
from pdverify.definitions.intervals import _rearranged, coefficient_interval
from pdverify.definitions.masks import coefficient
from tests.definitions.helpers import one_token

UNIT = 2.0**-53


def _ends(tail, mass, cap):
    """Ends for one row, whose tail lies among tokens outside of it."""
    pi = np.concatenate([np.zeros(2), tail, np.zeros(1)])[None]
    found = _rearranged(pi, np.array([len(tail)]), np.array([mass]), np.array([cap]))
    return tuple(float(x[0]) for x in found)


@pytest.mark.parametrize("seed", range(20))
def test_ends_are_those_of_the_linear_program(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    tail = np.sort(rng.dirichlet(np.ones(size)))[::-1]
    mass = float(rng.uniform(0, 0.9))
    cap = float(rng.uniform(mass / size, 1.0))
    ends = _ends(tail, mass, cap)
    for sign, end in zip((1, -1), ends, strict=True):
        best = linprog(sign * tail, A_eq=np.ones((1, size)), b_eq=[mass], bounds=[(0, cap)] * size)
        # the solver stops at its own feasibility tolerance of 1e-7
        assert abs(sign * best.fun - end) <= 1e-7


def test_empty_tails_leave_nothing_open():
    assert _ends(np.empty(0), 0.5, 0.1) == (0.0, 0.0)
    assert _ends(np.array([0.5, 0.5]), 0.0, 0.1) == (0.0, 0.0)


def test_a_cap_below_the_mean_is_raised_to_fit():
    low, high = _ends(np.array([0.75, 0.25]), 0.5, 0.1)
    assert low == high == 0.25 * (0.75 + 0.25)


def test_by_hand():
    rows = one_token(k=0, ids=(0, 1)).rows()
    cells = build(rows, "topk")
    low, high = coefficient_interval(rows, cells)
    # tail pi = (1/16, 1/8, 1/16), tail mass 1/4, cap 1/4 (half a last place above)
    base = (0.25 - 0.5) + 0.25 * 0.25 - 0.5 * 0.25 - (2 / 256 + 1 / 64)
    np.testing.assert_allclose(low, base + 0.25 / 16, rtol=16 * UNIT)
    np.testing.assert_allclose(high, base + 0.25 / 8, rtol=16 * UNIT)


@pytest.mark.parametrize("name", ["peaked", "zipf", "behavior-tail", "k-one", "sampled-outside"])
def test_the_full_coefficient_lies_inside(name):
    rows = family(name, sequences=4, length=8, vocab_size=60, top_k=5).rows()
    low, high = coefficient_interval(rows, build(rows, "topk"))
    full = coefficient(build(rows, "full"), "kl", None)
    # log-probs are stored in float32: each retained mass is off by that much
    noise = 2.0**-24 * 16 * rows.topk_ids.shape[-1]
    assert ((low - noise <= full) & (full <= high + noise)).all()
    assert (low <= high).all()


def test_it_needs_a_topk_view():
    batch = one_token()
    with pytest.raises(InputError, match="top-K view"):
        coefficient_interval(batch.rows(), build(batch.rows(), "full"))
    sampled = replace(batch, topk_ids=None, topk_logprobs=None)
    with pytest.raises(InputError, match="top-K view"):
        coefficient_interval(sampled.rows(), build(sampled.rows(), "binary"))


def test_a_list_that_ends_in_zero_probability_leaves_nothing():
    mu = (0.5, 0.25, 0.25, 0.0, 0.0)
    rows = one_token(mu=mu, k=0, ids=(0, 1, 2, 3)).rows()
    # stored log-probs that leave a little mass to nobody: the cap is raised to fit it
    rows.topk_logprobs[0, :3] -= 2.0**-20
    cells = build(rows, "topk")
    assert cells.mu_tail > 0
    low, high = coefficient_interval(rows, cells)
    assert np.isfinite(low).all()
    assert (low <= high).all()
    assert (high - low <= cells.mu_tail).all()


def test_a_replaced_last_entry_is_no_cap():
    rows = one_token(k=4, ids=(0, 4)).rows()
    low, high = coefficient_interval(rows, build(rows, "topk", "replace"))
    full = coefficient(build(rows, "full"), "kl", None)
    assert low < full < high
    alone = one_token(k=4, ids=(4,)).rows()
    low, high = coefficient_interval(alone, build(alone, "topk", "replace"))
    assert low < full < high
