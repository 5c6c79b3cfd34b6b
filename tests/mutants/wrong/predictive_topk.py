"""Predictive masks on a top-K view, with one bug in each function (its docstring)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cells(NamedTuple):
    """Both policies on the support `[B, L, M]`, at the sampled token and on the tail `[B, L]`.

    `collision` is the sum of pi^2 over the tail, `count` its number of tokens.
    """

    mu: Tensor
    pi: Tensor
    mu_k: Tensor
    pi_k: Tensor
    mu_rest: Tensor
    pi_rest: Tensor
    collision: Tensor
    count: Tensor


def _cells(
    logits: Tensor, tokens: Tensor, support_ids: Tensor, support_mask: Tensor, stored: Tensor
) -> Cells:
    used = support_mask & (stored > -torch.inf)
    own = used & (support_ids == tokens[..., None])
    full = logits.float().softmax(-1)
    pi = torch.where(used, full.gather(-1, support_ids), 0.0)
    mu = torch.where(used, stored, -torch.inf).exp()
    rest = full.scatter_add(-1, support_ids, -pi)
    return Cells(
        mu,
        pi,
        torch.where(own, mu, 0.0).sum(-1),
        torch.where(own, pi, 0.0).sum(-1),
        (1 - mu.sum(-1)).clamp_min(0),
        rest.sum(-1),
        (rest * rest).sum(-1),
        logits.shape[-1] - used.sum(-1),
    )


def _kl(c: Cells) -> Tensor:
    listed = torch.xlogy(c.mu, c.mu) - torch.xlogy(c.mu, c.pi)
    rest = torch.xlogy(c.mu_rest, c.mu_rest) - torch.xlogy(c.mu_rest, c.pi_rest)
    return listed.sum(-1) + rest


def _tv(c: Cells) -> Tensor:
    return ((c.mu - c.pi).abs().sum(-1) + (c.mu_rest - c.pi_rest).abs()) / 2


def _kl_coefficient(c: Cells, w: Tensor) -> Tensor:
    return c.pi_k - c.mu_k + (c.pi * (c.mu - c.pi)).sum(-1) + w * (c.mu_rest - c.pi_rest)


def _exact(c: Cells) -> Tensor:
    """Mean of pi over the tail, weighted by pi; 0 where pi has left it."""
    return torch.where(c.pi_rest > 0, c.collision / c.pi_rest.clamp_min(1e-38), 0.0)


def _slopes(c: Cells, slope: Tensor, slope_k: Tensor, slope_rest: Tensor, w: Tensor) -> Tensor:
    """C of any divergence from its slopes dD/dpi on the support, at k and on the tail."""
    mean = (c.pi * slope).sum(-1) + c.pi_rest * slope_rest
    others = (c.pi * c.pi * (slope - mean[..., None])).sum(-1)
    return c.pi_k * (slope_k - mean) - others - w * c.pi_rest * (slope_rest - mean)


def _keep(distance: Tensor, push: Tensor, advantages: Tensor, delta: float) -> Tensor:
    return ~((distance > delta) & (advantages.sign() * push > 0))


def ratio_direction(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The direction is the ratio's: the sampled token's own term alone."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), c.pi_k - c.mu_k, advantages, delta)


def sign_of_the_global_term(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The softmax's motion of the other tokens enters with the wrong sign."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    local = c.pi_k - c.mu_k
    push = local - (_kl_coefficient(c, _exact(c)) - local)
    return _keep(_kl(c), push, advantages, delta)


def global_term_not_weighted(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The other tokens' differences are summed without their factor pi."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = c.pi_k - c.mu_k + (c.mu - c.pi).sum(-1)
    return _keep(_kl(c), push, advantages, delta)


def global_term_weighted_by_behavior(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The other tokens' differences are weighted by mu, not pi."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = c.pi_k - c.mu_k + (c.mu * (c.mu - c.pi)).sum(-1)
    push = push + _exact(c) * (c.mu_rest - c.pi_rest)
    return _keep(_kl(c), push, advantages, delta)


def local_term_weighted(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The sampled token's own term carries a factor pi_k that belongs to the others only."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    local = c.pi_k - c.mu_k
    push = _kl_coefficient(c, _exact(c)) - local + c.pi_k * local
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push}


def tail_stands_still(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The tail is in the divergence, but its motion is missing from the direction."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), _kl_coefficient(c, torch.zeros_like(c.pi_k)), advantages, delta)


def aggregated_for_exact(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The tail moves as one token, where its own collision mass is asked for."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), _kl_coefficient(c, c.pi_rest), advantages, delta)


def uniform_for_exact(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The tail is taken as flat, where its own collision mass is asked for."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), _kl_coefficient(c, c.pi_rest / c.count), advantages, delta)


def exact_for_aggregated(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The true collision mass, where the aggregated tail is asked for."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), _kl_coefficient(c, _exact(c)), advantages, delta)


def aggregated_not_squared(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The tail's term is (mu_T - pi_T) without its factor pi_T."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = _kl_coefficient(c, torch.ones_like(c.pi_k))
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push}


def uniform_over_the_vocabulary(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    vocab_size: int,
) -> dict[str, Tensor]:
    """The flat tail is spread over all V tokens, not over the V - |S| that are left."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = _kl_coefficient(c, c.pi_rest / vocab_size)
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push}


def uniform_by_the_slots(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    vocab_size: int,
) -> dict[str, Tensor]:
    """The tail's tokens are counted by slots, K + 1 of them, used or not."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    count = max(vocab_size - support_ids.shape[-1], 1)
    push = _kl_coefficient(c, c.pi_rest / count)
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push}


def uniform_without_the_list(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    vocab_size: int,
    top_k: int,
) -> Tensor:
    """The tail's tokens are V - K, whether the sampled token is listed or not."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = _kl_coefficient(c, c.pi_rest / (vocab_size - top_k))
    return _keep(_kl(c), push, advantages, delta)


def uniform_over_five_at_least(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The flat tail is spread over at least five tokens, however few there are."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = _kl_coefficient(c, c.pi_rest / c.count.clamp_min(5))
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push}


def uniform_by_finite_columns(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """-inf columns are left out of the tail's count, though V counts them."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    dead = (logits == -torch.inf).sum(-1)
    push = _kl_coefficient(c, c.pi_rest / (c.count - dead).clamp_min(1))
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push}


def bracket_drops_when_either_end_does(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """One end of the bracket is enough to drop; both are needed."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    ends = (c.pi_rest, c.pi_rest / c.count)
    first, second = (_keep(_kl(c), _kl_coefficient(c, w), advantages, delta) for w in ends)
    return first & second


def bracket_by_its_middle(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The mean of both ends decides, instead of each."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = _kl_coefficient(c, (c.pi_rest + c.pi_rest / c.count) / 2)
    return _keep(_kl(c), push, advantages, delta)


def bracket_one_end_only(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Only the aggregated end is looked at."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), _kl_coefficient(c, c.pi_rest), advantages, delta)


def bracket_with_a_lower_end_of_zero(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The lower end is a tail that stands still, which no tail of few tokens can do."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    ends = (c.pi_rest, torch.zeros_like(c.pi_rest))
    first, second = (_keep(_kl(c), _kl_coefficient(c, w), advantages, delta) for w in ends)
    return first | second


def tail_by_the_sampled_token(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """A sampled token outside the list has its local term, but its mass stays in the tail."""
    used = torch.ones_like(topk_ids, dtype=torch.bool)
    c = _cells(logits, tokens, topk_ids, used, topk_logprobs)
    pi_k = logits.float().softmax(-1).gather(-1, tokens[..., None])[..., 0]
    c = c._replace(mu_k=behavior_logprobs.exp(), pi_k=pi_k)
    push = _kl_coefficient(c, c.pi_rest)
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push}


def training_side_renormalized(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The training policy is a softmax over the support alone."""
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    z = torch.where(used, logits.float().gather(-1, support_ids), -torch.inf)
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    pi = z.softmax(-1)
    pi_k = torch.where(used & (support_ids == tokens[..., None]), pi, 0.0).sum(-1)
    c = c._replace(pi=pi, pi_k=pi_k, pi_rest=torch.full_like(pi_k, 1e-8))
    return _keep(_kl(c), _kl_coefficient(c, c.pi_rest), advantages, delta)


def advantage_ignored(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    delta: float,
) -> Tensor:
    """The direction is taken as if every advantage were positive."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), _kl_coefficient(c, _exact(c)), torch.ones_like(c.pi_k), delta)


def proximity_ignored(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Every token that would move outward is dropped, also well inside the region."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return ~(advantages.sign() * _kl_coefficient(c, _exact(c)) > 0)


def direction_ignored(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Every token outside the region is dropped, whichever way it moves."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return (_kl(c) <= delta) | (advantages == 0)


def proximity_or_direction(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Either criterion is enough to drop: | for &."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = advantages.sign() * _kl_coefficient(c, _exact(c))
    return ~((_kl(c) > delta) | (push > 0))


def mask_inverted(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """True where the token is dropped."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return ~_keep(_kl(c), _kl_coefficient(c, _exact(c)), advantages, delta)


def proximity_by_another_divergence(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The distance is total variation, the direction that of forward KL."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_tv(c), _kl_coefficient(c, _exact(c)), advantages, delta)


def direction_by_another_divergence(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The distance is forward KL, the direction that of total variation."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    signs = ((c.pi - c.mu).sign(), (c.pi_k - c.mu_k).sign(), (c.pi_rest - c.mu_rest).sign())
    return _keep(_kl(c), _slopes(c, *signs, _exact(c)), advantages, delta)


def coefficient_with_the_ratio(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The coefficient that is returned has the importance ratio in it."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = _kl_coefficient(c, _exact(c))
    keep = _keep(_kl(c), push, advantages, delta)
    return {"keep": keep, "coefficient": push * c.pi_k / c.mu_k}


def coefficient_with_the_advantage(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The coefficient that is returned is multiplied by the advantage."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = _kl_coefficient(c, _exact(c))
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push * advantages}


def divergence_clamped_for_logging(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The divergence that is returned is clamped to 1 nat; the decision is not."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(_kl(c), _kl_coefficient(c, _exact(c)), advantages, delta)
    return {"keep": keep, "divergence": _kl(c).clamp_max(1.0)}


def one_temperature_only(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The training logits are divided by a sampling temperature that the other side never saw."""
    c = _cells(logits / 0.9, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), _kl_coefficient(c, _exact(c)), advantages, delta)


def last_listed_token_lost(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The list is cut one entry short, as if it held the sampled token in addition."""
    size = max(topk_ids.shape[-1] - 1, 1)
    ids = torch.cat([topk_ids[..., :size], tokens[..., None]], dim=-1)
    stored = torch.cat([topk_logprobs[..., :size], behavior_logprobs[..., None]], dim=-1)
    used = torch.ones_like(ids, dtype=torch.bool)
    used[..., -1] = (topk_ids[..., :size] != tokens[..., None]).all(-1)
    c = _cells(logits, tokens, ids, used, stored)
    return _keep(_kl(c), _kl_coefficient(c, _exact(c)), advantages, delta)


def twenty_slots_at_most(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """K = 20 is written into the code; a longer list is cut."""
    ids = torch.cat([topk_ids[..., :20], tokens[..., None]], dim=-1)
    stored = torch.cat([topk_logprobs[..., :20], behavior_logprobs[..., None]], dim=-1)
    used = torch.ones_like(ids, dtype=torch.bool)
    used[..., -1] = (topk_ids[..., :20] != tokens[..., None]).all(-1)
    c = _cells(logits, tokens, ids, used, stored)
    return _keep(_kl(c), _kl_coefficient(c, _exact(c)), advantages, delta)


def reverse_kl_without_the_mean(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """C = pi_k l_k - sum pi^2 l: the log-ratios are not centered by D."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    used = c.mu > 0
    gap = torch.where(used & (c.pi > 0), (c.pi / torch.where(used, c.mu, 1.0)).log(), 0.0)
    gap_rest = (c.pi_rest / c.mu_rest).log()
    distance = (c.pi * gap).sum(-1) + torch.xlogy(c.pi_rest, c.pi_rest / c.mu_rest)
    push = torch.xlogy(c.pi_k, c.pi_k / c.mu_k) - (c.pi * c.pi * gap).sum(-1)
    push = push - c.collision * gap_rest
    return {"keep": _keep(distance, push, advantages, delta), "coefficient": push}


def reverse_kl_by_the_forward_one(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Forward KL in both criteria, where reverse KL is asked for."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(_kl(c), _kl_coefficient(c, _exact(c)), advantages, delta)


def tv_direction_without_the_tail(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The tail's sign is left out of the mean and of the motion."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    sign, sign_k = (c.pi - c.mu).sign(), (c.pi_k - c.mu_k).sign()
    push = _slopes(c, sign, sign_k, torch.zeros_like(sign_k), _exact(c))
    return _keep(_tv(c), push, advantages, delta)


def tv_sign_of_the_log_ratio_only(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The mean sign is taken over the tokens with equal weights, not weighted by pi."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    sign, sign_k = (c.pi - c.mu).sign(), (c.pi_k - c.mu_k).sign()
    sign_rest = (c.pi_rest - c.mu_rest).sign()
    mean = (sign.sum(-1) + sign_rest) / (sign.shape[-1] + 1)
    push = c.pi_k * (sign_k - mean) - (c.pi * c.pi * (sign - mean[..., None])).sum(-1)
    push = push - c.collision * (sign_rest - mean)
    return _keep(_tv(c), push, advantages, delta)


def bracket_agreement_is_enough(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Outside the region it drops where both ends agree in sign, whichever sign that is."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    high, low = _kl_coefficient(c, c.pi_rest), _kl_coefficient(c, c.pi_rest / c.count)
    agree = (high.sign() == low.sign()) & (high != 0) & (advantages != 0)
    return ~((_kl(c) > delta) & agree)


def behavior_tail_taken_as_empty(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The tail's motion uses -pi_T where mu_T - pi_T belongs."""
    c = _cells(logits, tokens, support_ids, support_mask, behavior_support_logprobs)
    push = _kl_coefficient(c._replace(mu_rest=torch.zeros_like(c.mu_rest)), c.pi_rest)
    return {"keep": _keep(_kl(c), push, advantages, delta), "coefficient": push}
