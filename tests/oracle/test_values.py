"""Divergences, coefficients and variances against their definitions, by another road."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

from pdverify.batch import InputError
from pdverify.oracle import ORACLE_DIVERGENCES, Judge
from pdverify.oracle.arb_balls import ArbBall
from pdverify.oracle.float_balls import UNIT
from tests.oracle.reference import BITS, TERMS, cells, precision
from tests.oracle.rows import KINDS, literal, make_rows

VIEWS = [
    ("full", None),
    ("topk", "aggregated"),
    ("topk", "uniform"),
    ("topk", "exact"),
    ("binary", "exact"),
]


def _contains(low: float, high: float, exact: arb, slack: arb) -> bool:
    return bool(arb(low) <= exact + slack) and bool(exact - slack <= arb(high))


def test_every_divergence_has_a_definition_to_be_checked_against():
    assert set(ORACLE_DIVERGENCES) == set(TERMS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_enclosures_hold_the_definitions(kind, seed):
    rows = make_rows(3, kind=kind, seed=seed)
    for name in ORACLE_DIVERGENCES:
        for partition, tail in VIEWS:
            for bits in (None, 256):
                judge = Judge(rows)
                d = judge.divergence(name, partition, bits=bits)
                c = judge.coefficient(name, partition, tail, bits=bits)
                for t in range(len(rows)):
                    where = (name, partition, tail, bits, t)
                    with precision(BITS):
                        truth = cells(rows, t, partition, tail)
                        exact = truth.divergence(name)
                        assert exact.is_finite() == np.isfinite(d.low[t]), where
                        if not exact.is_finite():
                            continue
                        slack = (1 + abs(exact)) * arb(2) ** -250
                        assert _contains(d.low[t], d.high[t], exact, slack), where
                        rate = truth.coefficient(name)
                        slack = (1 + abs(exact)) * arb(2) ** -100
                        assert _contains(c.low[t], c.high[t], rate, slack), where


@pytest.mark.parametrize(("partition", "tail"), VIEWS)
def test_enclosures_are_tight(partition, tail):
    rows = make_rows(9, seed=4)
    judge = Judge(rows)
    for name in ORACLE_DIVERGENCES:
        d = judge.divergence(name, partition)
        low, high = (end[np.isfinite(d.high)] for end in (d.low, d.high))
        assert len(high) >= 6
        assert (high - low <= 4096 * UNIT * (1 + high)).all()


@pytest.mark.parametrize("tail", ["aggregated", "uniform", "exact"])
@pytest.mark.parametrize("seed", range(3))
def test_variance_is_the_second_derivative_of_forward_kl(tail, seed):
    rows = make_rows(4, kind="flat", seed=seed)
    for partition, estimator in (("topk", tail), ("full", None)):
        enclosure = Judge(rows).variance(partition, estimator)
        for t in range(len(rows)):
            with precision(BITS):
                exact = cells(rows, t, partition, estimator).second_derivative("kl")
                slack = arb(2) ** -60
                assert _contains(enclosure.low[t], enclosure.high[t], exact, slack)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(3, 30),
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(list(ORACLE_DIVERGENCES)),
    view=st.sampled_from(VIEWS),
)
def test_the_two_arithmetics_never_disagree(seed, size, kind, name, view):
    partition, tail = view
    rows = make_rows(4, size=size, k=min(4, size - 1), kind=kind, seed=seed)
    judge = Judge(rows)
    for fast, slow in (
        (judge.divergence(name, partition), judge.divergence(name, partition, bits=512)),
        (
            judge.coefficient(name, partition, tail),
            judge.coefficient(name, partition, tail, bits=512),
        ),
        (judge.ratio_gap(partition), judge.ratio_gap(partition, bits=512)),
    ):
        assert (np.isnan(fast.low) == np.isnan(slow.low)).all()
        known = ~np.isnan(fast.low)
        assert (fast.low <= slow.high)[known].all()
        assert (slow.low <= fast.high)[known].all()


@pytest.mark.parametrize("name", list(ORACLE_DIVERGENCES))
@pytest.mark.parametrize("gap", [-3.0, -0.5, 1e-3, 0.8, 4.0])
def test_slopes_are_the_derivatives_in_mu(name, gap):
    entry, pi = ORACLE_DIVERGENCES[name], arb(0.3)
    with precision(BITS):
        step = arb(2) ** -100

        def at(mu: arb, function):
            ball = ArbBall(np.array([mu], dtype=object))
            other = ArbBall(np.array([pi], dtype=object))
            return function(ball, other, other.log() - ball.log()).x[0]

        mu = pi * arb(-gap).exp()
        for function, slope in ((entry.cell, entry.cell_slope), (entry.moment, entry.moment_slope)):
            if slope is None:
                continue
            numeric = (at(mu + step, function) - at(mu - step, function)) / (2 * step)
            stated = slope(ArbBall(np.array([arb(gap)], dtype=object))).x[0]
            assert abs(numeric - stated) < (1 + abs(stated)) * arb(2) ** -150


def test_sampled_token_outside_the_list_is_its_own_cell():
    rows = literal([0.6, 0.2, 0.1, 0.06, 0.04], [0.5, 0.2, 0.1, 0.19, 0.01], token=4, k=3)
    judge = Judge(rows)
    assert judge.divergence("kl", "topk").mid[0] == pytest.approx(0.095684, abs=5e-7)
    for tail in ("aggregated", "uniform", "exact"):
        assert judge.coefficient("kl", "topk", tail).mid[0] == pytest.approx(-0.0044, abs=5e-9)


def test_top_1_needs_its_tail():
    rows = literal([0.6, 0.4], [0.9, 0.1], token=0, k=1)
    for partition in ("topk", "binary", "full"):
        assert Judge(rows).divergence("kl", partition).mid[0] == pytest.approx(0.311239, abs=5e-7)


def test_the_direction_that_differs_from_the_ratio():
    rows = literal([0.4, 0.35, 0.25], [0.42, 0.56, 0.02], token=0)
    judge = Judge(rows)
    assert judge.divergence("kl", "full").mid[0] == pytest.approx(0.447415, abs=5e-7)
    coefficient = judge.coefficient("kl", "full").mid[0]
    assert coefficient * 0.42 / 0.4 == pytest.approx(-0.106470, abs=5e-7)
    assert judge.ratio_gap("full").low[0] > 0


def test_an_infinite_slot_of_the_list_leaves_for_the_tail():
    y = np.array([-0.5, -1.2, -3.0, -np.inf])
    pi = np.exp([-0.6, -1.1, -2.9, -6.0])
    rest = 1 - pi.sum()
    mu = np.append(np.exp(y), 1 - np.exp(y).sum())
    rows = literal(list(mu), [*pi, rest], token=0, k=4)
    rows = type(rows)(
        **{
            **vars(rows),
            "topk_ids": np.array([[0, 1, 2, 3]]),
            "topk_logprobs": y[None],
        }
    )
    assert Judge(rows).divergence("kl", "topk").mid[0] == pytest.approx(0.008621, abs=5e-7)


def test_tail_mass_of_the_retained_support():
    rows = literal([0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25], token=0, k=2)
    judge = Judge(rows)
    pi, mu = judge.tail_mass()
    assert pi.low[0] <= 0.5 <= pi.high[0]
    assert mu.mid[0] == pytest.approx(0.2, abs=1e-15)
    assert judge.tail_rate("aggregated").mid[0] == pytest.approx(0.5)
    assert judge.tail_rate("uniform").mid[0] == pytest.approx(0.25)
    assert judge.tail_rate("exact").mid[0] == pytest.approx(0.25)


def test_a_large_vocabulary():
    rows = make_rows(2, size=152_000, k=20, kind="zipf", seed=5)
    for partition, tail in (("full", None), ("topk", "exact")):
        fast = Judge(rows.take(slice(0, 1))).coefficient("kl", partition, tail)
        slow = Judge(rows.take(slice(0, 1))).coefficient("kl", partition, tail, bits=64)
        assert fast.low[0] <= slow.high[0]
        assert slow.low[0] <= fast.high[0]
        assert fast.high[0] - fast.low[0] < 1e-13


def test_columns_that_are_missing_are_named():
    rows = make_rows(1)
    bare = type(rows)(**{**vars(rows), "behavior_logits": None, "topk_ids": None})
    with pytest.raises(InputError, match="behavior_logits"):
        Judge(bare).divergence("kl", "full")
    with pytest.raises(InputError, match="topk_ids"):
        Judge(bare).divergence("kl", "topk")
    with pytest.raises(LookupError, match="reverse-kl"):
        Judge(rows).divergence("reverse_kl", "full")
