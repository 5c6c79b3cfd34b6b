"""The masked loss and its gradient: central differences, autograd, aggregation, padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pdverify.batch import InputError
from pdverify.cases import EDGE_CASES
from pdverify.definitions.losses import AGGREGATIONS, policy_loss, weights
from tests.definitions.helpers import MU, PI, one_token, padded_batch

VALID = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0]], dtype=bool)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("none", [[1, 1, 0], [0, 0, 0], [1, 0, 0]]),
        ("token-mean", [[1 / 3, 1 / 3, 0], [0, 0, 0], [1 / 3, 0, 0]]),
        ("sequence-mean", [[1 / 4, 1 / 4, 0], [0, 0, 0], [1 / 2, 0, 0]]),
        ("fixed-length", [[1 / 9, 1 / 9, 0], [0, 0, 0], [1 / 9, 0, 0]]),
    ],
)
def test_weights_by_hand(aggregation, expected):
    assert weights(VALID, aggregation).tolist() == expected


def test_unknown_aggregation_is_rejected():
    with pytest.raises(InputError, match="aggregation = mean"):
        weights(VALID, "mean")


def test_loss_by_hand():
    loss, gradient = policy_loss(one_token(k=1, advantage=1.5), np.ones((1, 1), dtype=bool))
    ratio = PI[1] / MU[1]
    np.testing.assert_allclose(loss, [[-1.5 * ratio * np.log(PI[1])]], rtol=1e-15)
    slope = -1.5 * ratio * (np.eye(5)[1] - PI)
    np.testing.assert_allclose(gradient, [[slope]], rtol=1e-14)


def test_the_ratio_is_capped():
    batch = one_token(k=1)
    capped, _ = policy_loss(batch, np.ones((1, 1), dtype=bool), ratio_cap=0.5)
    np.testing.assert_allclose(capped, [[-0.5 * np.log(PI[1])]], rtol=1e-15)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_is_the_frozen_ratio_slope(aggregation):
    """Central differences of `sum_t scale_t log pi_k` with the ratio and the mask held."""
    batch = padded_batch()
    keep = np.ones(batch.tokens.shape, dtype=bool)
    keep[0, 2] = False
    _, gradient = policy_loss(batch, keep, aggregation=aggregation)
    b, position = batch.rows().index.T

    logits = np.nan_to_num(batch.logits)
    tokens = np.where(batch.response_mask, batch.tokens, 0)
    live = torch.tensor(logits, requires_grad=True)
    log_pi = torch.log_softmax(live, -1).gather(-1, torch.tensor(tokens)[..., None])[..., 0]
    ratio = (log_pi.detach() - torch.tensor(np.nan_to_num(batch.behavior_logprobs))).exp()
    scale = torch.tensor(np.nan_to_num(batch.advantages)) * ratio.clamp_max(20.0)
    scale = scale * torch.tensor(keep * weights(batch.response_mask, aggregation))
    (-scale * log_pi).sum().backward()
    np.testing.assert_allclose(gradient, live.grad.numpy(), rtol=1e-12, atol=2.0**-50)

    def value(z: np.ndarray) -> float:
        shifted = z - z.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        own = np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
        return float(-(scale.numpy() * own).sum())

    step = 2.0**-17  # the cube root of u: truncation and rounding balance
    for place in zip(b, position, strict=True):
        for j in range(6):
            up, down = logits.copy(), logits.copy()
            up[place][j] += step
            down[place][j] -= step
            slope = (value(up) - value(down)) / (2 * step)
            size = np.abs(scale.numpy()).sum()
            assert abs(slope - gradient[place][j]) <= size * (step**2 + 64 * 2.0**-53 / step)


def test_padding_dropped_and_unmoved_tokens_contribute_exactly_zero():
    batch = padded_batch()
    keep = np.ones(batch.tokens.shape, dtype=bool)
    keep[2, 0] = False
    loss, gradient = policy_loss(batch, keep)
    silent = ~batch.response_mask | ~keep | (batch.advantages == 0)
    assert (loss[silent] == 0).all()
    assert (gradient[silent] == 0).all()
    assert (loss[~silent] != 0).all()
    for aggregation in AGGREGATIONS[1:]:
        total, _ = policy_loss(batch, keep, aggregation=aggregation)
        weighted = loss * weights(batch.response_mask, aggregation)
        np.testing.assert_allclose(total, weighted.sum(), rtol=1e-14)


def test_a_token_that_became_impossible_contributes_zero():
    batch = one_token(pi=(0.5, 0.5, 0, 0, 0), k=3)
    loss, gradient = policy_loss(batch, np.ones((1, 1), dtype=bool))
    assert loss.tolist() == [[0.0]]
    assert (gradient == 0).all()


def test_overflowing_ratios_stay_finite():
    batch = replace(one_token(k=1, ids=(0,)), behavior_logprobs=np.array([[-1000.0]]))
    keep = np.ones((1, 1), dtype=bool)
    loss, gradient = policy_loss(batch, keep)
    np.testing.assert_allclose(loss, [[-20 * np.log(PI[1])]], rtol=1e-14)
    assert np.isfinite(gradient).all()
    dropped, slope = policy_loss(batch, ~keep)
    assert dropped.tolist() == [[0.0]]
    assert (slope == 0).all()


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
def test_a_cap_must_be_positive(cap):
    with pytest.raises(InputError, match="ratio_cap"):
        policy_loss(one_token(), np.ones((1, 1), dtype=bool), ratio_cap=cap)


def test_logits_are_needed():
    batch = replace(one_token(), logits=None, logprobs=np.zeros((1, 1)))
    with pytest.raises(InputError, match="logits"):
        policy_loss(batch, np.ones((1, 1), dtype=bool))


def test_edge_case_of_a_huge_log_ratio():
    case = EDGE_CASES["huge-log-ratio"]
    right = {r.quantity: [float(v) for v in r.values] for r in case.right}
    (decision,) = case.decisions
    # the same training log-prob of the sampled token, as logits: the other token has the rest
    pi_k = np.exp(case.batch.logprobs.astype(np.float64))
    logits = np.log(np.stack([pi_k, 1 - pi_k], axis=-1))
    batch = replace(case.batch, vocab_size=2, logits=logits, logprobs=None, dtype="fp64")
    keep = np.array([decision.keep])
    loss, _ = policy_loss(batch, keep)
    # the case states the ratio form -A r; the score-function form is -A r log pi_k
    expected = np.array(right["loss"]) * case.batch.logprobs[0]
    np.testing.assert_allclose(loss[0], expected, rtol=16 * 2.0**-53)
    _, gradient = policy_loss(batch, keep, aggregation="token-mean")
    slope = np.array(right["loss-gradient"]) * (1 - pi_k[0])
    np.testing.assert_allclose(gradient[0, :, 0], slope, rtol=16 * 2.0**-53)
