"""The second-order predictive mask, with one bug in each function (its docstring)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cells(NamedTuple):
    """Both policies on the support `[B, L, M]`, at the sampled token and on the tail `[B, L]`.

    `mean` and `square` are sum pi^2 / pi_T and sum pi^3 / pi_T over the tail.
    """

    mu: Tensor
    pi: Tensor
    mu_k: Tensor
    pi_k: Tensor
    mu_rest: Tensor
    pi_rest: Tensor
    mean: Tensor
    square: Tensor


def _cells(
    logits: Tensor, tokens: Tensor, support_ids: Tensor, support_mask: Tensor, stored: Tensor
) -> Cells:
    used = support_mask & (stored > -torch.inf)
    own = used & (support_ids == tokens[..., None])
    full = logits.float().softmax(-1)
    pi = torch.where(used, full.gather(-1, support_ids), 0.0)
    mu = torch.where(used, stored, -torch.inf).exp()
    rest = full.scatter_add(-1, support_ids, -pi)
    pi_rest = rest.sum(-1)
    share = torch.where(pi_rest[..., None] > 0, rest / pi_rest[..., None].clamp_min(1e-38), 0.0)
    return Cells(
        mu,
        pi,
        torch.where(own, mu, 0.0).sum(-1),
        torch.where(own, pi, 0.0).sum(-1),
        (1 - mu.sum(-1)).clamp_min(0),
        pi_rest,
        (share * rest).sum(-1),
        (share * rest * rest).sum(-1),
    )


def _kl(c: Cells) -> Tensor:
    listed = torch.xlogy(c.mu, c.mu) - torch.xlogy(c.mu, c.pi)
    rest = torch.xlogy(c.mu_rest, c.mu_rest) - torch.xlogy(c.mu_rest, c.pi_rest)
    return listed.sum(-1) + rest


def _coefficient(c: Cells) -> Tensor:
    motion = (c.pi * (c.mu - c.pi)).sum(-1) + c.mean * (c.mu_rest - c.pi_rest)
    return c.pi_k - c.mu_k + motion


def _full_variance(c: Cells) -> Tensor:
    n2 = (c.pi**2).sum(-1) + c.pi_rest * c.mean
    cubes = (c.pi**3).sum(-1) + c.pi_rest * c.square
    return c.pi_k - 2 * c.pi_k**2 + cubes - (c.pi_k - n2) ** 2


def _variance(c: Cells) -> Tensor:
    """Second derivative of the top-K divergence along the step."""
    return _full_variance(c) - c.mu_rest * (c.square - c.mean**2)


def _keep(after: Tensor, push: Tensor, advantages: Tensor, delta: float) -> Tensor:
    return ~((after > delta) & (advantages.sign() * push > 0))


def curvature_missing(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """The prediction stops at first order."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages * c.pi_k / c.mu_k, _coefficient(c)
    return _keep(_kl(c) + h * push, push, advantages, delta)


def curvature_without_the_half(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """The second-order term is not halved."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages * c.pi_k / c.mu_k, _coefficient(c)
    return _keep(_kl(c) + h * push + h * h * _variance(c), push, advantages, delta)


def curvature_subtracted(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """The second-order term enters with a minus sign."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages * c.pi_k / c.mu_k, _coefficient(c)
    return _keep(_kl(c) + h * push - h * h * _variance(c) / 2, push, advantages, delta)


def curvature_of_the_full_divergence(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """The spread inside the tail is not taken out: the full divergence's curvature."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages * c.pi_k / c.mu_k, _coefficient(c)
    after = _kl(c) + h * push + h * h * _full_variance(c) / 2
    return _keep(after, push, advantages, delta)


def curvature_of_the_score(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """pi_k (1 - pi_k), the variance for a step along the sampled logit alone."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages * c.pi_k / c.mu_k, _coefficient(c)
    after = _kl(c) + h * push + h * h * c.pi_k * (1 - c.pi_k) / 2
    return _keep(after, push, advantages, delta)


def step_size_ignored(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """eta is accepted and never used."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = advantages * c.pi_k / c.mu_k, _coefficient(c)
    return _keep(_kl(c) + h * push + h * h * _variance(c) / 2, push, advantages, delta)


def ratio_missing_from_the_step(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """The step is eta A, without the importance ratio."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages, _coefficient(c)
    return _keep(_kl(c) + h * push + h * h * _variance(c) / 2, push, advantages, delta)


def sign_of_the_advantage_as_step(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """Only the sign of the advantage enters the step, not its size."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages.sign() * c.pi_k / c.mu_k, _coefficient(c)
    return _keep(_kl(c) + h * push + h * h * _variance(c) / 2, push, advantages, delta)


def direction_not_asked(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """Whatever ends outside the region is dropped, also if it moves inward."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages * c.pi_k / c.mu_k, _coefficient(c)
    after = _kl(c) + h * push + h * h * _variance(c) / 2
    return (after <= delta) | (advantages == 0)


def only_if_outside_already(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """A token still inside the region is kept, though its step leads out."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages * c.pi_k / c.mu_k, _coefficient(c)
    after = torch.minimum(_kl(c), _kl(c) + h * push + h * h * _variance(c) / 2)
    return _keep(after, push, advantages, delta)


def ratio_capped_in_the_step(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """The step uses the ratio clipped to [0.8, 1.2]."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    h, push = eta * advantages * (c.pi_k / c.mu_k).clamp(0.8, 1.2), _coefficient(c)
    return _keep(_kl(c) + h * push + h * h * _variance(c) / 2, push, advantages, delta)
