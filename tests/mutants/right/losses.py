"""The masked policy loss, rightly done in several styles."""

from __future__ import annotations

import torch
from torch import Tensor


def score_form(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """-A sg(min(r, cap)) log pi, selected before the exponential and before the product."""
    log_pi = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    active = response_mask & (advantages != 0) & (log_pi > -torch.inf)
    gap = torch.where(active, log_pi.detach() - behavior_logprobs, 0.0)
    weight = torch.where(active, advantages, 0.0) * gap.clamp_max(80).exp().clamp_max(ratio_cap)
    return {"loss": -weight * torch.where(active, log_pi, 0.0)}


def float64(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """float64 through cross entropy."""
    safe = torch.where(response_mask[..., None], logits.double(), 0.0)
    nll = torch.nn.functional.cross_entropy(
        safe.reshape(-1, safe.shape[-1]), tokens.reshape(-1), reduction="none"
    ).reshape(tokens.shape)
    active = response_mask & (advantages != 0) & (nll < torch.inf)
    with torch.no_grad():
        gap = torch.where(active, -nll - behavior_logprobs.double(), 0.0)
        weight = gap.clamp_max(700).exp().clamp_max(ratio_cap)
        weight = torch.where(active, weight * advantages.double(), 0.0)
    return {"loss": weight * torch.where(active, nll, 0.0)}


def binary_mask_and_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Takes log-probs, returns mask and loss of the binary total-variation mask."""
    with torch.no_grad():
        change = logprobs.exp() - behavior_logprobs.exp()
        keep = ~((change.abs() > delta) & (advantages.sign() * change > 0))
        active = keep & response_mask & (advantages != 0) & (logprobs > -torch.inf)
        gap = torch.where(active, logprobs - behavior_logprobs, 0.0)
        weight = gap.clamp_max(80).exp().clamp_max(ratio_cap)
        weight = torch.where(active, advantages * weight, 0.0)
    return {"keep": keep, "loss": -weight * torch.where(active, logprobs, 0.0)}


def token_mean(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The sum over valid tokens divided by their number."""
    per_token = score_form(logits, tokens, behavior_logprobs, advantages, response_mask, ratio_cap)[
        "loss"
    ]
    return {"loss": per_token[response_mask].mean()}


def sequence_mean(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Mean over each sequence's valid tokens, then over the sequences that have any."""
    per_token = score_form(logits, tokens, behavior_logprobs, advantages, response_mask, ratio_cap)[
        "loss"
    ]
    counts = response_mask.sum(-1)
    means = per_token.sum(-1)[counts > 0] / counts[counts > 0]
    return {"loss": means.mean()}


def fixed_length(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The sum divided by B L."""
    per_token = score_form(logits, tokens, behavior_logprobs, advantages, response_mask, ratio_cap)[
        "loss"
    ]
    return {"loss": per_token.sum() / response_mask.numel()}
