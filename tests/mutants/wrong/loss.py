"""The masked policy loss, with one bug in each function (its docstring)."""

from __future__ import annotations

import torch
from torch import Tensor


def _log_pi(logits: Tensor, tokens: Tensor) -> Tensor:
    logits = torch.where(logits.isnan(), 0.0, logits)
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def _ratio(log_pi: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    return (log_pi.detach() - behavior_logprobs).clamp_max(80.0).exp().clamp_max(cap)


def _inside(log_pi: Tensor, behavior_logprobs: Tensor, advantages: Tensor, delta: float) -> Tensor:
    """The binary total-variation mask."""
    change = log_pi.detach().exp() - behavior_logprobs.exp()
    return ~((change.abs() > delta) & (advantages.sign() * change > 0))


def _loss(ratio: Tensor, log_pi: Tensor, advantages: Tensor, active: Tensor) -> Tensor:
    used = active & (ratio > 0)
    terms = -advantages * ratio * torch.where(used, log_pi, 0.0)
    return torch.where(used, terms, 0.0)


def surrogate(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """-A min(r, cap), the ratio form: another value, and no gradient where the cap binds."""
    log_pi = _log_pi(logits, tokens)
    ratio = (log_pi - behavior_logprobs).clamp_max(80.0).exp().clamp_max(ratio_cap)
    return {"loss": torch.where(response_mask, -advantages * ratio, 0.0)}


def ratio_not_detached(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The importance ratio carries a gradient of its own."""
    log_pi = _log_pi(logits, tokens)
    ratio = (log_pi - behavior_logprobs).clamp_max(80.0).exp().clamp_max(ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def sign_flipped(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """An objective to be maximized is returned as the loss."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": -_loss(ratio, log_pi, advantages, response_mask)}


def ratio_missing(
    logits: Tensor, tokens: Tensor, advantages: Tensor, response_mask: Tensor
) -> dict[str, Tensor]:
    """Plain policy gradient: no importance ratio."""
    log_pi = _log_pi(logits, tokens)
    return {"loss": _loss(torch.ones_like(log_pi), log_pi, advantages, response_mask)}


def ratio_inverted(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The weight is mu / pi."""
    log_pi = _log_pi(logits, tokens)
    ratio = (behavior_logprobs - log_pi.detach()).clamp_max(80.0).exp().clamp_max(ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def cap_ignored(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The importance ratio is not capped."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, torch.inf)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def cap_on_the_weighted_ratio(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The cap is put on A r, and so also caps large advantages."""
    log_pi = _log_pi(logits, tokens)
    weight = (_ratio(log_pi, behavior_logprobs, torch.inf) * advantages).clamp_max(ratio_cap)
    return {"loss": _loss(torch.ones_like(log_pi), log_pi, weight, response_mask)}


def cap_two_sided(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The ratio is also bounded from below, by 0.8."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap).clamp_min(0.8)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def over_the_cap_dropped(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """A ratio above the cap gets weight 0, not the cap."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, torch.inf)
    ratio = torch.where(ratio > ratio_cap, 0.0, ratio)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def normalizer_detached(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The log-normalizer has no gradient: only the sampled logit moves."""
    z = logits.float()
    log_pi = z.gather(-1, tokens[..., None])[..., 0] - z.logsumexp(-1).detach()
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def gradient_only_through_a_constant(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """log pi - sg(log pi) for log pi: the gradient is right, the value 0."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    centered = log_pi - log_pi.detach()
    return {"loss": _loss(ratio, centered, advantages, response_mask)}


def log_probs_clamped(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Log-probs are clamped at -5, which also stops the gradient of rare tokens."""
    log_pi = _log_pi(logits, tokens).clamp_min(-5.0)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def loss_in_bf16(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The log-softmax of the loss runs in bfloat16."""
    log_pi = logits.bfloat16().log_softmax(-1).gather(-1, tokens[..., None])[..., 0].float()
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def temperature_in_the_loss(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The logits are divided by a temperature inside the loss only."""
    log_pi = _log_pi(logits / 0.9, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def advantages_normalized(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The advantages are whitened over the batch a second time."""
    valid = advantages[response_mask]
    scale = valid.std(correction=0).clamp_min(1e-6)
    white = torch.where(response_mask, (advantages - valid.mean()) / scale, 0.0)
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": _loss(ratio, log_pi, white, response_mask)}


def dropped_tokens_contribute(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The mask is returned, but the loss does not use it."""
    log_pi = _log_pi(logits, tokens)
    keep = _inside(log_pi, behavior_logprobs, advantages, delta)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"keep": keep, "loss": _loss(ratio, log_pi, advantages, response_mask)}


def dropped_by_multiplication(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Dropped and padded tokens are multiplied by 0, which leaves inf * 0 and NaN * 0."""
    log_pi = _log_pi(logits, tokens)
    keep = _inside(log_pi, behavior_logprobs, advantages, delta) & response_mask
    ratio = (log_pi.detach() - behavior_logprobs).exp().clamp_max(ratio_cap)
    return {"loss": -advantages * ratio * log_pi * keep}


def kept_tokens_dropped(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The loss keeps what the mask drops."""
    log_pi = _log_pi(logits, tokens)
    keep = _inside(log_pi, behavior_logprobs, advantages, delta)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, ~keep & response_mask)}


def dropped_value_stays(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Dropped tokens lose their gradient but stay in the value of the loss."""
    log_pi = _log_pi(logits, tokens)
    keep = _inside(log_pi, behavior_logprobs, advantages, delta)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    frozen = torch.where(keep, log_pi, log_pi.detach())
    return {"loss": _loss(ratio, frozen, advantages, response_mask)}


def penalty_switched_off_by_zero(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """A KL penalty with coefficient 0 overflows where pi_k is tiny: 0 times infinity."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    back = behavior_logprobs - log_pi
    loss = _loss(ratio, log_pi, advantages, response_mask) + 0.0 * (back.exp() - back - 1)
    return {"loss": torch.where(response_mask, loss, 0.0)}


def ratio_of_probabilities(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """pi / mu as a quotient of probabilities: 0 / 0 where both underflow."""
    log_pi = _log_pi(logits, tokens)
    ratio = (log_pi.detach().exp() / behavior_logprobs.exp()).clamp_max(ratio_cap)
    return {"loss": torch.where(response_mask, -advantages * ratio * log_pi, 0.0)}


def token_mean_with_padding(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The token mean divides by B L, padding included."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask).mean()}


def token_mean_of_the_kept(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The token mean divides by the tokens that the mask keeps."""
    log_pi = _log_pi(logits, tokens)
    keep = _inside(log_pi, behavior_logprobs, advantages, delta) & response_mask
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    loss = _loss(ratio, log_pi, advantages, keep)
    return {"loss": loss.sum() / keep.sum().clamp_min(1)}


def sequence_mean_with_empty_sequences(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Sequences without a valid token count as sequences."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    loss = _loss(ratio, log_pi, advantages, response_mask)
    return {"loss": (loss.sum(-1) / response_mask.sum(-1).clamp_min(1)).mean()}


def sequence_mean_is_a_token_mean(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Long sequences weigh more: a token mean where a sequence mean is asked for."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    loss = _loss(ratio, log_pi, advantages, response_mask)
    return {"loss": loss.sum() / response_mask.sum()}


def fixed_length_by_the_longest(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The fixed length is taken from the longest response of the batch."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    loss = _loss(ratio, log_pi, advantages, response_mask)
    longest = response_mask.sum(-1).amax()
    return {"loss": loss.sum() / (len(loss) * longest)}


def padding_poisons_the_mean(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Padding is multiplied by 0 in the mean: NaN there reaches the loss."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    loss = -advantages * ratio * log_pi
    return {"loss": (loss * response_mask).sum() / response_mask.sum()}


def centered_near_the_behavior_policy(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """For A < 0 near r = 1 the loss is -A (r - 1): the same gradient, another value."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    near = (ratio > 0.5) & (ratio < 1.9) & (advantages < 0) & (log_pi > -50)
    moving = (log_pi - behavior_logprobs).clamp_max(1.0).exp() - 1
    plain = _loss(ratio, log_pi, advantages, response_mask)
    return {"loss": torch.where(near & response_mask, -advantages * moving, plain)}


def ratio_differentiated_inside_its_clip(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """For A < 0 and r between 0.5 and 1.9 the importance ratio carries a gradient."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    moving = (log_pi - behavior_logprobs).clamp_max(1.0).exp()
    inside = (ratio > 0.5) & (ratio < 1.9) & (advantages < 0) & (log_pi > -50)
    ratio = torch.where(inside, moving, ratio)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def dropped_tokens_leak(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Dropped tokens below the cap keep a hundredth of their weight."""
    log_pi = _log_pi(logits, tokens)
    keep = _inside(log_pi, behavior_logprobs, advantages, delta)
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    weight = torch.where(keep, ratio, torch.where(ratio < ratio_cap, ratio / 100, 0.0))
    return {"keep": keep, "loss": _loss(weight, log_pi, advantages, response_mask)}


def mask_before_the_cap(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The ratio overflows, is multiplied by the mask and capped after that: inf * 0."""
    log_pi = _log_pi(logits, tokens)
    keep = _inside(log_pi, behavior_logprobs, advantages, delta)
    gap = torch.where(response_mask, log_pi.detach() - behavior_logprobs, 0.0)
    ratio = (gap.exp() * keep).clamp_max(ratio_cap)
    loss = -torch.where(response_mask, advantages, 0.0) * ratio * log_pi
    return {"keep": keep, "loss": torch.where(response_mask, loss, 0.0)}


def cap_of_twenty(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """ratio_cap is accepted and never used: 20 is written into the code."""
    log_pi = _log_pi(logits, tokens)
    ratio = _ratio(log_pi, behavior_logprobs, 20.0)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def log_ratio_clamped_both_ways(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """The log-ratio is clamped to +-20, which also holds tiny weights up."""
    log_pi = _log_pi(logits, tokens)
    gap = (log_pi.detach() - behavior_logprobs).clamp(-20, 20)
    ratio = gap.exp().clamp_max(ratio_cap)
    return {"loss": _loss(ratio, log_pi, advantages, response_mask)}


def padding_multiplied_by_zero(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    ratio_cap: float,
) -> dict[str, Tensor]:
    """Padding is multiplied by 0, not selected away."""
    log_pi = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    ratio = _ratio(log_pi, behavior_logprobs, ratio_cap)
    return {"loss": -advantages * ratio * log_pi * response_mask}
