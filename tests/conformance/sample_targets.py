"""Targets as a maintainer would write them, right and wrong in ways the tests name."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


def full_kl(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The predictive forward-KL mask in the full view, plainly."""
    log_pi = torch.log_softmax(logits.float(), -1)
    log_mu = torch.log_softmax(behavior_logits.float(), -1)
    pi, mu = log_pi.exp(), log_mu.exp()
    divergence = torch.where(mu > 0, mu * (log_mu - log_pi), 0.0).sum(-1)
    at = tokens[..., None]
    local = (pi.gather(-1, at) - mu.gather(-1, at))[..., 0]
    coefficient = local + (pi * (mu - pi)).sum(-1)
    keep = ~((divergence > delta) & (advantages * coefficient > 0))
    return {"keep": keep, "divergence": divergence, "coefficient": coefficient}


def full_kl_keep(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    return full_kl(logits, behavior_logits, tokens, advantages, delta)["keep"]


def ratio_direction(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    answer = full_kl(logits, behavior_logits, tokens, advantages, delta)
    at = tokens[..., None]
    gap = torch.log_softmax(logits, -1).gather(-1, at) - torch.log_softmax(
        behavior_logits, -1
    ).gather(-1, at)
    return ~((answer["divergence"] > delta) & (advantages * gap[..., 0] > 0))


def raises(tokens: Tensor, logits: Tensor, delta: float) -> Tensor:
    raise RuntimeError("no kernel for this input")


def raises_on_one_token(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    if tokens.numel() == 1:
        raise IndexError("index 1 is out of bounds")
    return full_kl_keep(logits, behavior_logits, tokens, advantages, delta)


def hangs(logits: Tensor, delta: float) -> Tensor:
    while True:
        time.sleep(0.01)


def hangs_on_large_vocabularies(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    while logits.shape[-1] > 100_000:
        time.sleep(0.01)
    return full_kl_keep(logits, behavior_logits, tokens, advantages, delta)


def flattened(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    return full_kl_keep(logits, behavior_logits, tokens, advantages, delta).flatten()


def float_mask(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    return full_kl_keep(logits, behavior_logits, tokens, advantages, delta).float()


def unknown_key(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    return {"mask": full_kl_keep(logits, behavior_logits, tokens, advantages, delta)}


def not_a_number(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    answer = full_kl(logits, behavior_logits, tokens, advantages, delta)
    large = answer["divergence"] > 1
    return answer | {"divergence": torch.where(large, torch.nan, answer["divergence"])}


def modifies(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    keep = full_kl_keep(logits, behavior_logits, tokens, advantages, delta)
    advantages.mul_(keep)
    return keep


def coarse_arithmetic(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    answer = full_kl(logits, behavior_logits, tokens, advantages, delta)
    divergence = answer["divergence"].bfloat16().float()
    coefficient = answer["coefficient"].bfloat16().float()
    keep = ~((divergence > delta) & (advantages * coefficient > 0))
    return {"keep": keep, "divergence": divergence, "coefficient": coefficient}


def no_delta(logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    return full_kl_keep(logits, behavior_logits, tokens, advantages, 0.05)


def unknown_parameter(logits: Tensor, temperature: float) -> Tensor:
    raise AssertionError("never called")


def defaults_and_kwargs(
    logits: Tensor,
    behavior_logits: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    delta: float,
    temperature: float = 1.0,
    **rest: Any,
) -> list[list[bool]]:
    assert not rest
    keep = full_kl_keep(logits / temperature, behavior_logits, tokens, advantages, delta)
    return keep.tolist()  # type: ignore[no-any-return]


def binary_tv(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    gap = logprobs.exp() - behavior_logprobs.exp()
    return ~((gap.abs() > delta) & (advantages * gap > 0))


def binary_tv_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The masked policy loss, safe on padding and where the ratio overflows."""
    gap = torch.where(response_mask, logprobs - behavior_logprobs, 0.0)
    moved = torch.where(response_mask, logprobs.exp() - behavior_logprobs.exp(), 0.0)
    drop = (moved.abs() > delta) & (advantages * moved > 0)
    active = response_mask & ~drop
    ratio = torch.where(active, gap, 0.0).exp().clamp(max=ratio_cap).detach()
    weight = torch.where(active, advantages * ratio, 0.0)
    return {"loss": -weight * torch.where(active, logprobs, 0.0)}


def surrogate_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Gradient through the ratio, uncapped."""
    gap = torch.where(response_mask, logprobs - behavior_logprobs, 0.0)
    moved = torch.where(response_mask, logprobs.exp() - behavior_logprobs.exp(), 0.0)
    drop = (moved.abs() > delta) & (advantages * moved > 0)
    active = response_mask & ~drop
    ratio = torch.where(active, gap, 0.0).exp()
    return {"loss": -torch.where(active, advantages, 0.0) * ratio}


def mean_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    loss = binary_tv_loss(logprobs, behavior_logprobs, advantages, response_mask, delta, ratio_cap)[
        "loss"
    ]
    return {"loss": loss.sum() / response_mask.sum()}
