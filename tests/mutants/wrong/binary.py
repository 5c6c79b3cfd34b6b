"""DPPO's binary masks (total variation, KL), with one bug in each function (its docstring)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _keep(divergence: Tensor, gap: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    up = (advantages > 0) & (divergence > high) & (gap > 0)
    down = (advantages < 0) & (divergence > low) & (gap < 0)
    return ~(up | down)


def _tv(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    return (logprobs.exp() - behavior_logprobs.exp()).abs()


def _kl(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """KL({mu_k, 1 - mu_k} || {pi_k, 1 - pi_k}) in nats."""
    mu, rest = behavior_logprobs.exp(), -torch.expm1(behavior_logprobs)
    other = torch.xlogy(rest, rest) - torch.xlogy(rest, -torch.expm1(logprobs))
    return mu * (behavior_logprobs - logprobs) + other


def tv_symmetric(logprobs: Tensor, behavior_logprobs: Tensor, delta: float) -> Tensor:
    """Every token outside the region is dropped, whichever way its update pushes."""
    return _tv(logprobs, behavior_logprobs) <= delta


def tv_both_cells_summed(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """The differences of both cells are added without the half: twice the distance."""
    gap = logprobs - behavior_logprobs
    return _keep(2 * _tv(logprobs, behavior_logprobs), gap, advantages, delta_low, delta_high)


def tv_half_of_one_cell(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """Half the difference of the sampled token alone: half the distance."""
    gap = logprobs - behavior_logprobs
    return _keep(_tv(logprobs, behavior_logprobs) / 2, gap, advantages, delta_low, delta_high)


def tv_from_the_ratio(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """|r - 1| is taken for the total variation distance."""
    gap = logprobs - behavior_logprobs
    return _keep((gap.exp() - 1).abs(), gap, advantages, delta_low, delta_high)


def tv_drops_at_the_threshold(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A distance equal to the threshold is dropped: >= for >."""
    pi = logits.float().softmax(-1).gather(-1, tokens[..., None])[..., 0]
    change = pi - behavior_logprobs.exp()
    return ~((change.abs() >= delta) & (advantages.sign() * change > 0))


def tv_in_bf16(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """Probabilities are rounded to bfloat16 before they are subtracted."""
    change = logprobs.exp().bfloat16() - behavior_logprobs.exp().bfloat16()
    return _keep(change.abs(), change, advantages, delta_low, delta_high)


def tv_rounded_to_decimals(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """The distance passes through a metric rounded to three decimals."""
    distance = torch.round(_tv(logprobs, behavior_logprobs), decimals=3)
    gap = logprobs - behavior_logprobs
    return _keep(distance, gap, advantages, delta_low, delta_high)


def tv_of_log_probs(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """Log-probs are subtracted where probabilities should be."""
    gap = logprobs - behavior_logprobs
    return _keep(gap.abs(), gap, advantages, delta_low, delta_high)


def tv_one_sided(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, delta_high: float
) -> Tensor:
    """Only positive advantages are masked."""
    change = logprobs.exp() - behavior_logprobs.exp()
    return ~((advantages > 0) & (change > delta_high))


def tv_zero_advantage_as_negative(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """A = 0 falls into the branch for negative advantages."""
    change = logprobs.exp() - behavior_logprobs.exp()
    return torch.where(advantages > 0, change <= delta_high, change >= -delta_low)


def tv_thresholds_swapped(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """The thresholds for positive and negative advantages change places."""
    change = logprobs.exp() - behavior_logprobs.exp()
    return _keep(change.abs(), change, advantages, delta_high, delta_low)


def kl_reversed(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> dict[str, Tensor]:
    """KL(pi || mu) where KL(mu || pi) is asked for."""
    divergence = _kl(behavior_logprobs, logprobs)
    gap = logprobs - behavior_logprobs
    keep = _keep(divergence, gap, advantages, delta_low, delta_high)
    return {"keep": keep, "divergence": divergence}


def kl_without_the_rest(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """Only the sampled token's term; the cell of all other tokens is missing."""
    gap = logprobs - behavior_logprobs
    return _keep(-behavior_logprobs.exp() * gap, gap, advantages, delta_low, delta_high)


def kl_large_epsilon(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> dict[str, Tensor]:
    """An epsilon of 1e-4 in the logs of the rest biases near-certain tokens."""
    mu, pi = behavior_logprobs.exp(), logprobs.exp()
    gap = logprobs - behavior_logprobs
    divergence = -mu * gap + (1 - mu) * ((1 - mu + 1e-4).log() - (1 - pi + 1e-4).log())
    keep = _keep(divergence, gap, advantages, delta_low, delta_high)
    return {"keep": keep, "divergence": divergence}


def kl_clamped_probabilities(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> dict[str, Tensor]:
    """Probabilities are clamped to [0.001, 0.999] on both sides."""
    mu = behavior_logprobs.exp().clamp(1e-3, 1 - 1e-3)
    pi = logprobs.exp().clamp(1e-3, 1 - 1e-3)
    divergence = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    keep = _keep(divergence, logprobs - behavior_logprobs, advantages, delta_low, delta_high)
    return {"keep": keep, "divergence": divergence}


def kl_nan_near_one(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> dict[str, Tensor]:
    """1 - p rounds to 0 in bfloat16: the divergence is NaN near certainty, and the token kept."""
    mu, pi = behavior_logprobs.exp().bfloat16(), logprobs.exp().bfloat16()
    gap = logprobs - behavior_logprobs
    rest = (1 - mu).float() * (torch.log1p(-mu) - torch.log1p(-pi)).float()
    divergence = -behavior_logprobs.exp() * gap + rest
    keep = _keep(divergence, gap, advantages, delta_low, delta_high)
    return {"keep": keep, "divergence": divergence}


def kl_one_sample_k3(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """The one-sample estimator r - 1 - log r is taken for the divergence."""
    gap = logprobs - behavior_logprobs
    return _keep(gap.exp() - 1 - gap, gap, advantages, delta_low, delta_high)


def kl_one_sample_k2(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """The one-sample estimator (log r)^2 / 2 is taken for the divergence."""
    gap = logprobs - behavior_logprobs
    return _keep(gap * gap / 2, gap, advantages, delta_low, delta_high)


def kl_in_bits(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """The divergence is in bits, the threshold in nats."""
    divergence = _kl(logprobs, behavior_logprobs) / math.log(2)
    gap = logprobs - behavior_logprobs
    return _keep(divergence, gap, advantages, delta_low, delta_high)


def kl_as_a_distance(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """sqrt(KL / 2), Pinsker's bound on TV, is compared with a threshold meant for KL."""
    divergence = (_kl(logprobs, behavior_logprobs).clamp_min(0) / 2).sqrt()
    gap = logprobs - behavior_logprobs
    return _keep(divergence, gap, advantages, delta_low, delta_high)


def kl_direction_reversed(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """Tokens that move back toward the behavior policy are dropped, the others kept."""
    gap = behavior_logprobs - logprobs
    divergence = _kl(logprobs, behavior_logprobs)
    return _keep(divergence, gap, advantages, delta_low, delta_high)


def kl_one_threshold(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """delta_low is accepted and never used: one threshold serves both signs."""
    gap = logprobs - behavior_logprobs
    divergence = _kl(logprobs, behavior_logprobs)
    return _keep(divergence, gap, advantages, delta_high, delta_high)
