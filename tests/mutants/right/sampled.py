"""Masks that need the sampled token alone (PPO's clip, DPPO's binary ones), rightly done."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def clip_in_log_space(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Bounds and ratio are compared as logarithms."""
    gap = logprobs - behavior_logprobs
    low = math.log(1 - clip_low) if clip_low < 1 else -math.inf
    return ~(((advantages > 0) & (gap > math.log1p(clip_high))) | ((advantages < 0) & (gap < low)))


def clip_by_the_ratio(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """exp of the clamped log-ratio, as trainers write it; defaults for both bounds."""
    ratio = (logprobs - behavior_logprobs).clamp(-20, 20).exp()
    inside = torch.where(advantages > 0, ratio <= 1 + clip_high, ratio >= 1 - clip_low)
    return inside | (advantages == 0)


def clip_from_logits(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
) -> Tensor:
    """Takes no bounds (0.2 both); padding comes back False."""
    log_pi = torch.log_softmax(logits.float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(log_pi - behavior_logprobs)
    drop = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    return response_mask & ~drop


def tv_in_one_comparison(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """Proximity and direction in one comparison for each sign."""
    change = logprobs.exp() - behavior_logprobs.exp()
    drop = ((advantages > 0) & (change > delta_high)) | ((advantages < 0) & (change < -delta_low))
    return drop.logical_not()


def tv_in_numpy(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, delta: float
) -> dict[str, Any]:
    """NumPy arrays come back."""
    pi, mu = np.exp(logprobs.numpy()), np.exp(behavior_logprobs.numpy())
    outward = np.sign(advantages.numpy()) * np.sign(pi - mu) > 0
    distance = np.abs(pi - mu)
    return {"keep": ~((distance > delta) & outward), "divergence": distance}


def tv_token_by_token(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> list[list[bool]]:
    """Plain Python over the tokens; nested lists come back."""
    kept = []
    for lp, lm, a, valid in zip(
        logprobs.tolist(),
        behavior_logprobs.tolist(),
        advantages.tolist(),
        response_mask.tolist(),
        strict=True,
    ):
        row = []
        for t in range(len(lp)):
            change = math.exp(lp[t]) - math.exp(lm[t]) if valid[t] else 0.0
            row.append(not (abs(change) > delta and a[t] * change > 0))
        kept.append(row)
    return kept


def kl_with_expm1(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> dict[str, Tensor]:
    """1 - p by expm1 and its logarithm by log1mexp."""

    def log1mexp(x: Tensor) -> Tensor:
        return torch.where(x > -math.log(2), (-torch.expm1(x)).log(), torch.log1p(-x.exp()))

    gap = logprobs - behavior_logprobs
    rest = -torch.expm1(behavior_logprobs)
    other = torch.where(rest > 0, rest * (log1mexp(behavior_logprobs) - log1mexp(logprobs)), 0.0)
    divergence = other - behavior_logprobs.exp() * gap
    delta = torch.where(advantages > 0, delta_high, delta_low)
    drop = (divergence > delta) & (torch.sign(advantages) * gap > 0)
    return {"keep": ~drop, "divergence": divergence}


def kl_plain(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) as it stands in a paper."""
    mu, pi = behavior_logprobs.exp(), logprobs.exp()
    rest = torch.xlogy(1 - mu, 1 - mu) - torch.xlogy(1 - mu, 1 - pi)
    divergence = mu * (behavior_logprobs - logprobs) + rest
    return ~((divergence > delta) & ((pi - mu) * advantages.sign() > 0))


def kl_from_logits_in_float64(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """float64 throughout; log(1 - pi) by logsumexp over the other tokens."""
    log_all = logits.double().log_softmax(-1)
    own = tokens[..., None]
    lp, lm = log_all.gather(-1, own)[..., 0], behavior_logprobs.double()
    others = log_all.scatter(-1, own, -math.inf).logsumexp(-1)
    rest = -torch.expm1(lm)
    divergence = (
        lm.exp() * (lm - lp) + torch.xlogy(rest, rest) - torch.where(rest > 0, rest * others, 0.0)
    )
    drop = (divergence > delta) & (advantages.double() * (lp - lm) > 0)
    return {"keep": ~drop, "divergence": divergence}
