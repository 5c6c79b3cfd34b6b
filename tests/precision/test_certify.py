"""Verdicts: what a certificate says, and what refutes it."""

from __future__ import annotations

import numpy as np
import pytest

from pdverify.oracle import Enclosure
from pdverify.precision.certify import Estimate, combine, decision, sign


def exactly(*x: float) -> Enclosure:
    return Enclosure(np.array(x), np.array(x))


def estimate(value: float, noise: float = 0.0, rounding: float = 0.0) -> Estimate:
    return Estimate(np.array([value]), np.array([noise]), np.array([rounding]))


@pytest.mark.parametrize(
    ("value", "bound", "truth", "judged", "flipped", "determined"),
    [
        (0.5, 0.4, 0.7, True, False, True),
        (0.5, 0.6, 0.7, True, False, False),
        (-0.5, 0.6, 0.05, True, True, False),
        (-0.5, 0.4, 0.05, True, True, True),  # the certificate is refuted
        (0.0, 0.0, 0.7, True, True, False),
        (0.5, 0.1, 0.0, False, False, False),
        (np.nan, 0.1, 0.7, True, True, False),
        (np.inf, 0.1, 0.7, True, False, False),
    ],
)
def test_sign(value, bound, truth, judged, flipped, determined):
    found = sign(estimate(value, bound / 2, bound / 2), exactly(truth))
    assert (found.judged[0], found.flipped[0], found.determined[0]) == (judged, flipped, determined)
    assert found.wrong[0] == (flipped and determined)


@pytest.mark.parametrize(
    ("d", "d_bound", "c", "c_bound", "determined"),
    [
        (0.10, 0.04, 1.0, 9.0, True),  # inside whatever C is
        (0.14, 0.04, 1.0, 9.0, False),
        (0.14, 0.04, -1.0, 0.9, True),  # pulled back wherever it is
        (0.14, 0.04, 1.0, 0.9, False),
        (0.20, 0.04, 1.0, 0.9, True),
        (0.20, 0.04, 1.0, 1.1, False),
        (0.20, np.inf, 1.0, 0.1, False),
        (0.15, 0.0, 1.0, 0.1, True),  # D = delta is inside
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_decision_is_determined_when_no_test_within_its_bound_changes_it(
    d, d_bound, c, c_bound, determined, advantage
):
    c = c * np.sign(advantage)
    delta, a = np.array([0.15]), np.array([advantage])
    found = decision(estimate(d, d_bound), estimate(c, c_bound), exactly(d), exactly(c), a, delta)
    assert found.judged[0]
    assert not found.flipped[0]
    assert found.determined[0] == determined


def test_a_flip_outside_the_certificate_is_wrong():
    a, delta = np.array([1.0]), np.array([0.15])
    truth = exactly(0.1), exactly(1.0)
    for bound, wrong in ((0.01, True), (0.2, False)):
        found = decision(estimate(0.2, bound), estimate(1.0, 0.1), *truth, a, delta)
        assert found.flipped[0]
        assert found.wrong[0] == wrong


def test_an_undecided_truth_is_not_judged():
    unknown = Enclosure(np.array([-1.0]), np.array([1.0]))
    assert not sign(estimate(0.5), unknown).judged[0]
    found = decision(
        estimate(0.2), estimate(0.5), exactly(0.2), unknown, np.array([1.0]), np.array([0.1])
    )
    assert not found.judged[0]


def test_errors_beyond_the_bound_are_seen():
    truth = exactly(1.0)
    assert estimate(1.2, 0.1).beyond(truth)[0]
    assert not estimate(1.2, 0.1, 0.11).beyond(truth)[0]
    assert not estimate(np.nan, 0.1).beyond(truth)[0]
    assert estimate(1.2).error(truth)[0] == pytest.approx(0.2)


def test_combined_bounds_are_bounds():
    parts = np.array([[1.0, 2.0**-53], [2.0**-53, 1.0], [2.0**-54, 2.0**-54]])
    total = combine(*parts)
    assert (total > 1.0).all()
