"""The cells of a partition: who is retained, what the tail holds, hand values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdverify.batch import InputError
from pdverify.cases import EDGE_CASES, replace_last
from pdverify.cases import build as family
from pdverify.definitions.cells import (
    build,
    log_softmax,
    retained_support,
    sampled_logprob,
    tail_mean,
    tail_square,
)
from tests.definitions.helpers import MU, PI, one_token


def test_topk_cells_by_hand():
    cells = build(one_token(k=3).rows(), "topk")
    assert cells.ids.tolist() == [[0, 1, 3]]
    assert cells.slot.tolist() == [2]
    np.testing.assert_allclose(cells.mu, [[0.5, 0.25, 0.0625]], rtol=1e-15)
    np.testing.assert_allclose(cells.pi, [[0.25, 0.5, 0.125]], rtol=1e-15)
    np.testing.assert_allclose(cells.mu_tail, 0.1875, rtol=1e-15)
    np.testing.assert_allclose(cells.pi_tail, 0.125, rtol=1e-15)
    assert cells.tail_cells.tolist() == [2]
    np.testing.assert_allclose(cells.collision, 2 * 0.0625**2, rtol=1e-15)
    np.testing.assert_allclose(cells.cubes, 2 * 0.0625**3, rtol=1e-15)
    np.testing.assert_allclose(cells.log_gap, np.log(2), rtol=1e-15)


def test_a_listed_token_is_counted_once():
    cells = build(one_token(k=1).rows(), "topk")
    assert cells.slot.tolist() == [1]
    np.testing.assert_allclose(cells.mu.sum(), 0.75, rtol=1e-15)
    assert cells.tail_cells.tolist() == [3]


def test_binary_is_topk_with_the_sampled_token_alone():
    rows = one_token(k=2).rows()
    binary, topk = build(rows, "binary"), build(one_token(k=2, ids=(2,)).rows(), "topk")
    for name in ("mu_k", "pi_k", "mu_tail", "pi_tail", "tail_cells", "collision", "log_gap"):
        assert getattr(binary, name).tolist() == getattr(topk, name).tolist(), name


def test_binary_from_logprobs_knows_no_collision():
    batch = replace(one_token(k=2), logits=None, logprobs=np.log([[PI[2]]]))
    cells = build(batch.rows(), "binary")
    np.testing.assert_allclose(cells.pi_tail, 1 - PI[2], rtol=1e-15)
    assert np.isnan(cells.collision).all()


def test_full_cells_have_no_tail():
    cells = build(one_token(k=2).rows(), "full")
    assert cells.ids is None
    np.testing.assert_allclose(cells.mu, [MU], rtol=1e-15)
    assert cells.mu_tail.tolist() == cells.pi_tail.tolist() == [0.0]
    for tail in (None, "exact", "aggregated", "uniform"):
        assert tail_mean(cells, tail).tolist() == [0.0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_no_tail_when_everything_is_retained(dtype):
    batch = one_token(k=4, ids=(0, 1, 2, 3))
    # stored one last place low: 1 - sum would leave a mass for a cell that does not exist
    low = batch.topk_logprobs - 2.0**-9
    cells = build(replace(batch, topk_logprobs=low, logprob_dtype=dtype).rows(), "topk")
    assert cells.tail_cells.tolist() == [0]
    assert cells.mu_tail.tolist() == cells.pi_tail.tolist() == [0.0]
    for tail in ("exact", "aggregated", "uniform"):
        assert tail_mean(cells, tail).tolist() == [0.0]
        assert tail_square(cells, tail).tolist() == [0.0]


def test_zero_behavior_probability_leaves_the_support():
    batch = one_token(mu=(0.5, 0.5, 0.0, 0.0, 0.0), k=1, ids=(0, 2, 1))
    cells = build(batch.rows(), "topk")
    np.testing.assert_allclose(cells.pi_tail, 0.25, rtol=1e-15)
    assert cells.tail_cells.tolist() == [3]
    assert cells.pi[0, 1] == 0.0


def test_the_tail_of_a_near_certain_list_keeps_its_digits():
    small = 2.0**-60
    batch = one_token(mu=(1 - small, small, 0, 0, 0), k=0, ids=(0,))
    exact = np.array([[-small]])
    batch = replace(batch, behavior_logprobs=exact, topk_logprobs=exact[..., None])
    assert build(batch.rows(), "topk").mu_tail.tolist() == [small]


def test_log_softmax_of_a_near_certain_token_keeps_its_digits():
    value = log_softmax(np.array([0.0, -50.0]))[0]
    np.testing.assert_allclose(value, -np.exp(-50.0), rtol=1e-15)


def test_tail_estimators_by_hand():
    cells = build(one_token(k=0, ids=(0,)).rows(), "topk")
    x = 0.5**2 + 2 * 0.0625**2 + 0.125**2
    np.testing.assert_allclose(tail_mean(cells, "aggregated"), 0.75, rtol=1e-14)
    np.testing.assert_allclose(tail_mean(cells, "uniform"), 0.75 / 4, rtol=1e-14)
    np.testing.assert_allclose(tail_mean(cells, "exact"), x / 0.75, rtol=1e-14)
    cubes = 0.5**3 + 2 * 0.0625**3 + 0.125**3
    np.testing.assert_allclose(tail_square(cells, "exact"), cubes / 0.75, rtol=1e-14)
    np.testing.assert_allclose(tail_square(cells, "uniform"), (0.75 / 4) ** 2, rtol=1e-14)
    with pytest.raises(InputError, match="two ends"):
        tail_mean(cells, "bracket")


def test_replace_takes_the_list_as_it_is():
    batch = one_token(k=3)
    with pytest.raises(InputError) as caught:
        retained_support(batch.rows(), "replace")
    assert (caught.value.argument, caught.value.place) == ("topk_ids", (0, 0))
    cells = build(replace_last(batch).rows(), "topk", "replace")
    assert cells.ids.tolist() == [[0, 3]]
    assert cells.slot.tolist() == [1]


def test_replaced_lists_mean_the_same_under_append():
    rows = replace_last(family("sampled-outside", vocab_size=30, top_k=5)).rows()
    left, right = build(rows, "topk", "replace"), build(rows, "topk", "append")
    for name in ("mu_k", "pi_k", "pi_tail", "tail_cells", "collision", "log_gap"):
        assert getattr(left, name).tolist() == getattr(right, name).tolist(), name
    np.testing.assert_allclose(left.mu_tail, right.mu_tail, atol=2.0**-52)


@pytest.mark.parametrize(
    ("partition", "missing", "argument"),
    [
        ("full", {"behavior_logits": None}, "behavior_logits"),
        ("topk", {"topk_ids": None, "topk_logprobs": None}, "topk_ids"),
        ("topk", {"logits": None, "logprobs": np.zeros((1, 1))}, "logits"),
    ],
)
def test_what_a_partition_lacks_is_named(partition, missing, argument):
    rows = replace(one_token(), **missing).rows()
    with pytest.raises(InputError) as caught:
        build(rows, partition)
    assert caught.value.argument == argument


def test_sampled_logprob_falls_back_on_the_logits():
    batch = one_token(k=2)
    rows = replace(batch, behavior_logprobs=None, topk_ids=None, topk_logprobs=None).rows()
    np.testing.assert_allclose(sampled_logprob(rows), np.log(MU[2]), rtol=1e-15)


@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_case_tail_masses(name):
    case = EDGE_CASES[name]
    attribute = {"tail-mass": "mu_tail", "training-tail-mass": "pi_tail"}
    for right in case.right:
        if right.quantity in attribute:
            cells = build(case.batch.rows(), right.partition)
            value = getattr(cells, attribute[right.quantity])
            # V float64 additions of numbers below 1, and as many exponentials
            bound = 8 * case.batch.vocab_size * 2.0**-53
            np.testing.assert_allclose(value, [float(v) for v in right.values], rtol=0, atol=bound)
