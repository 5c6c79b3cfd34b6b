"""PPO's clip as a mask, with one bug in each function (its docstring)."""

from __future__ import annotations

import torch
from torch import Tensor


def _keep(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    up = (advantages > 0) & (ratio > 1 + high)
    down = (advantages < 0) & (ratio < 1 - low)
    return ~(up | down)


def both_sides_whatever_the_sign(
    logprobs: Tensor, behavior_logprobs: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """The band around 1 is applied without looking at the advantage."""
    ratio = (logprobs - behavior_logprobs).exp()
    return (ratio <= 1 + clip_high) & (ratio >= 1 - clip_low)


def drops_at_the_bound(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """A ratio exactly at the bound is dropped: >= for >."""
    ratio = (logprobs - behavior_logprobs).exp()
    up = (advantages > 0) & (ratio >= 1 + clip_high)
    down = (advantages < 0) & (ratio <= 1 - clip_low)
    return ~(up | down)


def bounds_swapped(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The lower and the upper clip change places."""
    ratio = (logprobs - behavior_logprobs).exp()
    return _keep(ratio, advantages, clip_high, clip_low)


def one_clip_for_both(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """clip_low is accepted and never used: the upper bound serves both signs."""
    return _keep((logprobs - behavior_logprobs).exp(), advantages, clip_high, clip_high)


def inverse_ratio(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The ratio is mu / pi, not pi / mu."""
    return _keep((behavior_logprobs - logprobs).exp(), advantages, clip_low, clip_high)


def bound_on_the_log_ratio(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """log r is compared with the clip itself, the first-order stand-in for log(1 + clip)."""
    return _keep(1 + logprobs - behavior_logprobs, advantages, clip_low, clip_high)


def reciprocal_lower_bound(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The lower bound is 1 / (1 + clip_low), not 1 - clip_low."""
    ratio = (logprobs - behavior_logprobs).exp()
    return _keep(ratio, advantages, 1 - 1 / (1 + clip_low), clip_high)


def difference_for_ratio(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The probability difference is clipped where the ratio should be."""
    return _keep(1 + logprobs.exp() - behavior_logprobs.exp(), advantages, clip_low, clip_high)


def negative_side_forgotten(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, clip_high: float
) -> Tensor:
    """Tokens with a negative advantage are never dropped."""
    ratio = (logprobs - behavior_logprobs).exp()
    return ~((advantages > 0) & (ratio > 1 + clip_high))


def zero_advantage_as_negative(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """A = 0 falls into the branch for negative advantages."""
    ratio = (logprobs - behavior_logprobs).exp()
    return torch.where(advantages > 0, ratio <= 1 + clip_high, ratio >= 1 - clip_low)


def ratio_of_the_sequence(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Every token is judged by the geometric mean ratio of its sequence."""
    gap = torch.where(response_mask, logprobs - behavior_logprobs, 0.0)
    mean = gap.sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True).clamp_min(1)
    return _keep(mean.exp().expand_as(gap), advantages, clip_low, clip_high)


def ratio_in_bf16(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The ratio is rounded to bfloat16 before the comparison."""
    ratio = (logprobs - behavior_logprobs).exp().bfloat16()
    return _keep(ratio, advantages, clip_low, clip_high)


def policy_against_itself(
    logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """The old log-probs are recomputed from the current policy: the ratio is 1 everywhere."""
    return _keep((logprobs - logprobs.detach()).exp(), advantages, clip_low, clip_high)


def shifted_by_one(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Behavior log-probs are read one position late."""
    late = torch.cat([behavior_logprobs[:, :1], behavior_logprobs[:, :-1]], dim=1)
    return _keep((logprobs - late).exp(), advantages, clip_low, clip_high)


def clip_after_weighting(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """The bound is put on A r, so that it depends on the size of the advantage."""
    weighted = (logprobs - behavior_logprobs).exp() * advantages.abs()
    return _keep(weighted, advantages, clip_low, clip_high)
