"""DPPO's top-K masks (KL, total variation), with one bug in each function (its docstring)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cells(NamedTuple):
    """Both policies on the support, `[B, L, M]`, and on the tail, `[B, L]`."""

    mu: Tensor
    pi: Tensor
    mu_rest: Tensor
    pi_rest: Tensor


def _cells(logits: Tensor, ids: Tensor, used: Tensor, stored: Tensor) -> Cells:
    used = used & (stored > -torch.inf)
    full = logits.float().softmax(-1)
    pi = torch.where(used, full.gather(-1, ids), 0.0)
    mu = torch.where(used, stored, -torch.inf).exp()
    pi_rest = full.scatter_add(-1, ids, -pi).sum(-1)
    return Cells(mu, pi, (1 - mu.sum(-1)).clamp_min(0), pi_rest)


def _kl(cells: Cells) -> Tensor:
    listed = torch.xlogy(cells.mu, cells.mu) - torch.xlogy(cells.mu, cells.pi)
    rest = torch.xlogy(cells.mu_rest, cells.mu_rest) - torch.xlogy(cells.mu_rest, cells.pi_rest)
    return listed.sum(-1) + rest


def _tv(cells: Cells) -> Tensor:
    return ((cells.mu - cells.pi).abs().sum(-1) + (cells.mu_rest - cells.pi_rest).abs()) / 2


def _gap(logits: Tensor, tokens: Tensor, behavior_logprobs: Tensor) -> Tensor:
    log_pi = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return log_pi - behavior_logprobs


def _keep(distance: Tensor, push: Tensor, advantages: Tensor, delta: float) -> Tensor:
    return ~((distance > delta) & (advantages.sign() * push > 0))


def no_tail_cell(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The divergence is summed over the support only, then clamped at 0."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    empty = torch.zeros_like(cells.mu_rest)
    distance = _kl(cells._replace(mu_rest=empty, pi_rest=empty)).clamp_min(0)
    return _keep(distance, _gap(logits, tokens, behavior_logprobs), advantages, delta)


def renormalized_on_the_support(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Both policies are renormalized to the support, which hides what left it."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    empty = torch.zeros_like(cells.mu_rest)
    mu = cells.mu / cells.mu.sum(-1, keepdim=True)
    pi = cells.pi / cells.pi.sum(-1, keepdim=True)
    distance = _kl(Cells(mu, pi, empty, empty))
    return _keep(distance, _gap(logits, tokens, behavior_logprobs), advantages, delta)


def reversed_arguments(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """KL(pi || mu) where KL(mu || pi) is asked for."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    distance = _kl(Cells(cells.pi, cells.mu, cells.pi_rest, cells.mu_rest))
    keep = _keep(distance, _gap(logits, tokens, behavior_logprobs), advantages, delta)
    return {"keep": keep, "divergence": distance}


def tv_without_the_half(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The absolute differences are summed without the half."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    push = _gap(logits, tokens, behavior_logprobs)
    return _keep(2 * _tv(cells), push, advantages, delta)


def tv_without_the_tail(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Half the differences on the support; the tail's difference is missing."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    distance = (cells.mu - cells.pi).abs().sum(-1) / 2
    return _keep(distance, _gap(logits, tokens, behavior_logprobs), advantages, delta)


def tv_tail_token_by_token(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Every unlisted token counts its whole probability as difference, mu taken as 0 there."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    distance = ((cells.mu - cells.pi).abs().sum(-1) + cells.pi_rest) / 2
    return _keep(distance, _gap(logits, tokens, behavior_logprobs), advantages, delta)


def sampled_token_left_in_the_tail(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """K slots only: a sampled token outside the list has no cell of its own."""
    cells = _cells(logits, topk_ids, torch.ones_like(topk_ids, dtype=torch.bool), topk_logprobs)
    return _keep(_kl(cells), _gap(logits, tokens, behavior_logprobs), advantages, delta)


def sampled_token_counted_twice(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The sampled token is appended although the list holds it already."""
    full = logits.float().softmax(-1)
    ids = torch.cat([topk_ids, tokens[..., None]], dim=-1)
    mu = torch.cat([topk_logprobs, behavior_logprobs[..., None]], dim=-1).exp()
    pi = full.gather(-1, ids)
    cells = Cells(mu, pi, (1 - mu.sum(-1)).clamp_min(0), (1 - pi.sum(-1)).clamp_min(0))
    return _keep(_tv(cells), _gap(logits, tokens, behavior_logprobs), advantages, delta)


def predictive_direction(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The direction is that of the predictive mask, where the ratio's is asked for."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    own = support_mask & (support_ids == tokens[..., None])
    local = torch.where(own, cells.pi - cells.mu, 0.0).sum(-1)
    motion = (cells.pi * (cells.mu - cells.pi)).sum(-1)
    tail = cells.pi_rest * (cells.mu_rest - cells.pi_rest)
    return _keep(_kl(cells), local + motion + tail, advantages, delta)


def direction_of_the_likeliest_token(
    logits: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The direction is read off the most likely token, not the sampled one."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    best = cells.mu.argmax(-1, keepdim=True)
    push = (cells.pi - cells.mu).gather(-1, best)[..., 0]
    return _keep(_kl(cells), push, advantages, delta)


def sampled_token_assumed_first(
    logits: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The engine's first entry is taken for the sampled token."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    push = cells.pi[..., 0] - cells.mu[..., 0]
    return _keep(_kl(cells), push, advantages, delta)


def sampled_token_assumed_last(
    logits: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The last slot is taken for the sampled token, used or not."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    push = cells.pi[..., -1] - cells.mu[..., -1]
    return _keep(_tv(cells), push, advantages, delta)


def one_list_late(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The behavior policy's lists are read one position late."""
    ids, used, stored = (
        torch.roll(x, 1, dims=1) for x in (support_ids, support_mask, behavior_support_logprobs)
    )
    distance = _kl(_cells(logits, ids, used, stored))
    return _keep(distance, _gap(logits, tokens, behavior_logprobs), advantages, delta)


def own_list_of_the_trainer(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The training policy's own top-K is compared with the behavior list, rank by rank."""
    pi = logits.float().softmax(-1).topk(topk_ids.shape[-1]).values
    mu = topk_logprobs.exp()
    cells = Cells(mu, pi, (1 - mu.sum(-1)).clamp_min(0), (1 - pi.sum(-1)).clamp_min(0))
    return _keep(_tv(cells), _gap(logits, tokens, behavior_logprobs), advantages, delta)


def masses_in_bf16(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Probabilities and their sums are kept in bfloat16."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    mu, pi = cells.mu.bfloat16(), cells.pi.bfloat16()
    rounded = Cells(mu, pi, (1 - mu.sum(-1)).clamp_min(0), (1 - pi.sum(-1)).clamp_min(1e-12))
    push = _gap(logits, tokens, behavior_logprobs)
    return _keep(_kl(rounded).float(), push, advantages, delta)


def mean_over_the_support(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The terms of the divergence are averaged over the slots, not summed."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    distance = _kl(cells) / (support_ids.shape[-1] + 1)
    return _keep(distance, _gap(logits, tokens, behavior_logprobs), advantages, delta)


def divergence_of_the_sequence(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Proximity is the sequence's mean divergence, the same for each of its tokens."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    valid = torch.where(response_mask, _kl(cells), 0.0)
    mean = valid.sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True).clamp_min(1)
    push = _gap(logits, tokens, behavior_logprobs)
    return _keep(mean.expand_as(push), push, advantages, delta)


def tv_drops_at_the_threshold(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A distance equal to the threshold is dropped: >= for >."""
    cells = _cells(logits, support_ids, support_mask, behavior_support_logprobs)
    push = advantages.sign() * _gap(logits, tokens, behavior_logprobs)
    return ~((_tv(cells) >= delta) & (push > 0))
