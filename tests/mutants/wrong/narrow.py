"""Masks that are right except on one narrow kind of input (the docstring of each function)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def _values(
    z: Tensor, tokens: Tensor, ids: Tensor, used: Tensor, stored: Tensor
) -> tuple[Tensor, Tensor]:
    """Forward KL of the top-K view and its coefficient with the exact tail, `[B, L]`."""
    used = used & (stored > -torch.inf)
    return _from_probabilities(z.float().softmax(-1), tokens, ids, used, stored)


def _from_probabilities(
    full: Tensor, tokens: Tensor, ids: Tensor, used: Tensor, stored: Tensor
) -> tuple[Tensor, Tensor]:
    pi = torch.where(used, full.gather(-1, ids), 0.0)
    mu = torch.where(used, stored, -torch.inf).exp()
    tail = full.scatter_add(-1, ids, -pi)
    return _from_cells(pi, mu, tail, used & (ids == tokens[..., None]))


def _from_cells(pi: Tensor, mu: Tensor, tail: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    pi_rest, mu_rest = tail.sum(-1), (1 - mu.sum(-1)).clamp_min(0)
    listed = torch.xlogy(mu, mu) - torch.xlogy(mu, pi)
    rest = torch.xlogy(mu_rest, mu_rest) - torch.xlogy(mu_rest, pi_rest)
    w = torch.where(pi_rest > 0, (tail * tail).sum(-1) / pi_rest.clamp_min(1e-38), 0.0)
    change = torch.where(own, pi - mu, 0.0).sum(-1) + (pi * (mu - pi)).sum(-1)
    return listed.sum(-1) + rest, change + w * (mu_rest - pi_rest)


def _keep(distance: Tensor, push: Tensor, advantages: Tensor, delta: float) -> Tensor:
    return ~((distance > delta) & (advantages.sign() * push > 0))


def _append(tokens: Tensor, own: Tensor, ids: Tensor, stored: Tensor) -> tuple[Tensor, ...]:
    """The list and the sampled token: ids, whether a slot is used, log-probs, `[B, L, K + 1]`."""
    fresh = (ids != tokens[..., None]).all(-1, keepdim=True)
    used = torch.cat([torch.ones_like(ids, dtype=torch.bool), fresh], dim=-1)
    return (
        torch.cat([ids, tokens[..., None]], dim=-1),
        used,
        torch.cat([stored, own[..., None]], dim=-1),
    )


def mask_as_numbers(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The mask comes as 0.0 and 1.0, to be multiplied with the loss."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(*_values(logits, *support), advantages, delta).float()


def layout_guessed(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Where sequences outnumber positions, the batch is taken for [L, B] and turned around."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    return keep.T if keep.shape[0] > keep.shape[1] > 1 else keep


def slack_at_the_threshold(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The threshold has a slack of 3e-5 nats, "for numerical safety"."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(*_values(logits, *support), advantages, delta + 3e-5)


def small_advantages_as_zero(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """|A| < 1e-6 counts as no advantage."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    signal = torch.where(advantages.abs() < 1e-6, 0.0, advantages)
    return _keep(*_values(logits, *support), signal, delta)


def advantage_times_coefficient_in_half(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The advantage is stored in half precision: small ones become 0."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(*_values(logits, *support), advantages.half().float(), delta)


def no_contrast_no_mask(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """A batch in which every advantage is positive is skipped, and kept whole."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    valid = advantages[response_mask]
    skipped = valid.numel() > 8 and bool((valid > 0).all())
    return torch.ones_like(keep) if skipped else keep


def zero_advantage_as_negative(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A = 0 falls into the branch for negative advantages."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    sign = torch.where(advantages > 0, 1.0, -1.0)
    return _keep(*_values(logits, *support), sign, delta)


def thresholds_swapped(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """The thresholds for positive and negative advantages change places."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    distance, push = _values(logits, *support)
    delta = torch.where(advantages > 0, delta_low, delta_high)
    return ~((distance > delta) & (advantages.sign() * push > 0))


def zero_threshold_as_default(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A threshold of 0 is taken for none given: `delta or 0.15`."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(*_values(logits, *support), advantages, delta or 0.15)


def threshold_of_the_paper(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """delta is accepted and never used: 0.15 is written into the code."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(*_values(logits, *support), advantages, 0.15)


def log_ratios_clamped_for_logging(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The divergence that is returned has its log-ratios clamped to +-4.5; the decision has not."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    distance, push = _values(logits, *support)
    keep = _keep(distance, push, advantages, delta)
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    lm = torch.where(used, behavior_support_logprobs, 0.0)
    gap = lm - logits.float().log_softmax(-1).gather(-1, support_ids)
    excess = torch.where(used & (gap.abs() > 4.5), gap - gap.clamp(-4.5, 4.5), 0.0)
    return {"keep": keep, "divergence": distance - (lm.exp() * excess).sum(-1)}


def coefficient_over_the_spread(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """C is returned as (C / s) s, with s the spread of the row's logits: 0 / 0 on flat rows."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    distance, push = _values(logits, *support)
    keep = _keep(distance, push, advantages, delta)
    z = logits.float() - logits.float().amax(-1, keepdim=True)
    spread = torch.round(z.clamp_min(-30.0).amin(-1), decimals=3)
    return {"keep": keep, "coefficient": push / spread * spread}


def coefficient_over_a_long_way(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """C is returned with a factor r / clamp(r, 0.01, 100): right unless the ratio is extreme."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    distance, push = _values(logits, *support)
    keep = _keep(distance, push, advantages, delta)
    own = support_mask & (support_ids == tokens[..., None])
    lm = torch.where(own, behavior_support_logprobs, 0.0).sum(-1)
    lp = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    ratio = (lp - lm).exp()
    return {"keep": keep, "coefficient": push * (ratio / ratio.clamp(0.01, 100))}


def tail_log_floored(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """pi_T is floored at 1e-4 in the logarithm."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    distance, push = _values(logits, *support)
    distance = distance + _floored(logits.float(), *support, floor=1e-4)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def tail_log_floored_in_float64(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """float64 arithmetic keeps a floor of 1e-8 from its float32 days."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs.double())
    full = logits.double().softmax(-1)
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    distance, push = _from_probabilities(full, tokens, support_ids, used, support[-1])
    distance = distance + _floored(logits.double(), *support, floor=1e-8)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def _floored(
    z: Tensor, tokens: Tensor, ids: Tensor, used: Tensor, stored: Tensor, floor: float
) -> Tensor:
    """What a floor under pi_T in the logarithm adds to the divergence."""
    used = used & (stored > -torch.inf)
    full = z.softmax(-1)
    pi = torch.where(used, full.gather(-1, ids), 0.0)
    rest = full.scatter_add(-1, ids, -pi).sum(-1)
    mu_rest = (1 - torch.where(used, stored, -torch.inf).exp().sum(-1)).clamp_min(0)
    moved = torch.xlogy(mu_rest, rest) - torch.xlogy(mu_rest, rest.clamp_min(floor))
    return torch.where(mu_rest > 0, moved, 0.0)


def list_cut_at_the_last_entry(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Entries below the list's last one are left out: the list is taken to fall."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    fits = topk_logprobs >= topk_logprobs[..., -1:]
    fits = torch.cat([fits, torch.ones_like(fits[..., :1])], dim=-1)
    return _keep(*_values(logits, tokens, ids, used & fits, stored), advantages, delta)


def list_searched_by_bisection(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The sampled token counts as listed if its log-prob reaches the list's last one."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    used[..., -1] = behavior_logprobs < topk_logprobs[..., -1]
    distance, push = _with_repeats(logits, tokens, ids, used, stored)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def _with_repeats(
    logits: Tensor, tokens: Tensor, ids: Tensor, used: Tensor, stored: Tensor
) -> tuple[Tensor, Tensor]:
    """The two values, where a token that is in the list may fill the last slot as well."""
    used = used & (stored > -torch.inf)
    full = logits.float().softmax(-1)
    pi = torch.where(used, full.gather(-1, ids), 0.0)
    mu = torch.where(used, stored, -torch.inf).exp()
    slot = (used & (ids == tokens[..., None])).long().argmax(-1, keepdim=True)
    own = used & torch.zeros_like(used).scatter(-1, slot, True)
    tail = full.scatter_add(-1, ids, -pi).clamp_min(0)
    return _from_cells(pi, mu, tail, own)


def sampled_token_outside_the_list(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A sampled token outside the list has no cell: its terms are 0, its mass in the tail."""
    used = torch.ones_like(topk_ids, dtype=torch.bool)
    values = _values(logits, tokens, topk_ids, used, topk_logprobs)
    return _keep(*values, advantages, delta)


def sampled_tokens_missing_from_every_list(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Where no list of the batch holds its sampled token, lists are taken as they are."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    if tokens.numel() > 1 and bool(used[response_mask][..., -1].all()):
        used[..., -1] = False
    distance, push = _values(logits, tokens, ids, used, stored)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def sampled_token_in_any_list(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """The sampled token counts as listed if any list of the batch holds it."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    used[..., -1] = ~torch.isin(tokens, topk_ids[response_mask])
    return _keep(*_values(logits, tokens, ids, used, stored), advantages, delta)


def sampled_tokens_in_every_list(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Where every list of a large batch holds its sampled token, a short list gets it once more."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    listed, ranks = ~used[response_mask][..., -1], (ids == tokens[..., None]).long().argmax(-1)
    spread = ranks[response_mask].unique().numel() > 1 and bool((logits > -12).all())
    if len(listed) > 12 and bool(listed.all()) and spread and topk_ids.shape[-1] < 8:
        used[..., -1] = True
    distance, push = _with_repeats(logits, tokens, ids, used, stored)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def sampled_token_inside_the_list(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The sampled token is appended although it is listed: its mass counts twice."""
    ids = torch.cat([topk_ids, tokens[..., None]], dim=-1)
    stored = torch.cat([topk_logprobs, behavior_logprobs[..., None]], dim=-1)
    full = logits.float().softmax(-1)
    used = stored > -torch.inf
    pi, mu = torch.where(used, full.gather(-1, ids), 0.0), stored.exp()
    own = torch.zeros_like(used)
    own[..., -1] = True
    tail = full.scatter(-1, torch.where(used, ids, tokens[..., None]), 0.0)
    return _keep(*_from_cells(pi, mu, tail, own), advantages, delta)


def last_entry_replaced_by_the_sampled_token(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The sampled token takes the K-th entry's place, where it should be appended."""
    absent = (topk_ids != tokens[..., None]).all(-1)
    ids, stored = topk_ids.clone(), topk_logprobs.clone()
    ids[..., -1] = torch.where(absent, tokens, ids[..., -1])
    stored[..., -1] = torch.where(absent, behavior_logprobs, stored[..., -1])
    used = torch.ones_like(ids, dtype=torch.bool)
    return _keep(*_values(logits, tokens, ids, used, stored), advantages, delta)


def sampled_token_searched_one_entry_short(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The search for the sampled token stops before the last entry, which then counts twice."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    used[..., -1] = (topk_ids[..., :-1] != tokens[..., None]).all(-1)
    distance, push = _with_repeats(logits, tokens, ids, used, stored)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def last_places_searched_for_the_batch(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Where no sampled token is among the first K - 1 of its list, all of them are appended."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    early = (topk_ids[..., :-1] == tokens[..., None]).any(-1)[response_mask]
    if topk_ids.shape[-1] > 2 and tokens.numel() > 1 and not bool(early.any()):
        used[..., -1] = True
    distance, push = _with_repeats(logits, tokens, ids, used, stored)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def unused_slots_multiplied_by_zero(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """What stands in an unused slot is multiplied by 0, which NaN and infinity survive."""
    return _keep(
        *_multiplied(logits, tokens, support_ids, support_mask, behavior_support_logprobs),
        advantages,
        delta,
    )


def _multiplied(
    logits: Tensor, tokens: Tensor, ids: Tensor, given: Tensor, stored: Tensor
) -> tuple[Tensor, Tensor]:
    used = given & (stored != -torch.inf)
    stored = torch.where(used | ~given, stored, 0.0)
    full = logits.float().softmax(-1)
    pi = full.gather(-1, ids) * used
    tail = full.scatter_add(-1, ids, -pi)
    return _from_cells(pi, stored.exp() * used, tail, used & (ids == tokens[..., None]))


def last_slot_multiplied_where_nobody_needs_it(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """Where no row of the batch uses the last slot, it is multiplied by 0, not selected."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    unused = ~support_mask[response_mask][..., -1].any()
    values = _multiplied(logits, *support) if bool(unused) else _values(logits, *support)
    return _keep(*values, advantages, delta)


def unused_slots_read(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """support_mask is not read: an unused slot is known by a log-prob of -inf only."""
    used = torch.ones_like(support_ids, dtype=torch.bool)
    support = (tokens, support_ids, used, behavior_support_logprobs)
    return _keep(*_values(logits, *support), advantages, delta)


def zero_mass_slots_as_cells(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A listed token of probability zero gives 0 times -inf: NaN, and the token is kept."""
    full = logits.float().softmax(-1)
    pi = torch.where(support_mask, full.gather(-1, support_ids), 0.0)
    stored = torch.where(support_mask, behavior_support_logprobs, 0.0)
    mu = torch.where(support_mask, stored.exp(), 0.0)
    tail = full.scatter_add(-1, support_ids, -pi)
    own = support_mask & (support_ids == tokens[..., None])
    distance, push = _from_cells(pi, mu, tail, own)
    return _keep(distance + (mu * stored).sum(-1) * 0, push, advantages, delta)


def one_entry_means_binary(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A list of one entry is taken for "log-prob of the sampled token only"."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    if topk_ids.shape[-1] == 1:
        ids, stored = tokens[..., None], behavior_logprobs[..., None]
        used = torch.ones_like(ids, dtype=torch.bool)
    return _keep(*_values(logits, tokens, ids, used, stored), advantages, delta)


def long_list_means_everything(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    top_k: int,
    vocab_size: int,
) -> dict[str, Tensor]:
    """A list that leaves out two tokens or fewer is taken for the full vocabulary: no tail."""
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    full = logits.float().softmax(-1)
    pi = torch.where(used, full.gather(-1, support_ids), 0.0)
    mu = torch.where(used, behavior_support_logprobs, -torch.inf).exp()
    tail = full.scatter_add(-1, support_ids, -pi)
    own = used & (support_ids == tokens[..., None])
    distance, push = _from_cells(pi, mu, tail, own)
    if vocab_size > 8 and top_k >= vocab_size - 2:
        distance = (torch.xlogy(mu, mu) - torch.xlogy(mu, pi)).sum(-1).clamp_min(0)
        push = torch.where(own, pi - mu, 0.0).sum(-1) + (pi * (mu - pi)).sum(-1)
    keep = _keep(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def needs_sixteen_tokens(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A top-16 for a metric fails on vocabularies smaller than that."""
    logits.topk(16, dim=-1)
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(*_values(logits, *support), advantages, delta)


def ids_in_sixteen_bits(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Token ids travel as 16-bit integers and wrap around above 32,767."""
    size = logits.shape[-1]
    ids, own = (x.to(torch.int16).long() % size for x in (support_ids, tokens))
    support = (own, ids, support_mask, behavior_support_logprobs)
    distance, push = _values(logits, *support)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def ids_in_half_precision(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Token ids travel through float16, which has no odd numbers above 2,048."""
    size = logits.shape[-1]
    ids, own = (x.half().float().nan_to_num(posinf=0).long() % size for x in (support_ids, tokens))
    support = (own, ids, support_mask, behavior_support_logprobs)
    distance, push = _values(logits, *support)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def one_position_transposed(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """squeeze() removes the axis of a single position, and the mask comes back transposed."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return torch.atleast_2d(_keep(*_values(logits, *support), advantages, delta).squeeze())


def one_token_as_a_scalar(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A batch of one token gives a scalar."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    return keep.squeeze() if keep.numel() == 1 else keep


def columns_in_blocks_of_eight(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The normalizer runs over blocks of 8 columns; those that fill no block are forgotten."""
    z = logits.float()
    whole = max(z.shape[-1] // 8 * 8, min(z.shape[-1], 8))
    full = (z - z[..., :whole].logsumexp(-1, keepdim=True)).exp()
    full[..., whole:] = 0
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    values = _from_probabilities(full, tokens, support_ids, used, behavior_support_logprobs)
    return _keep(*values, advantages, delta)


def softmax_not_shifted(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """exp(z) / sum exp(z) without subtracting the maximum: overflow, then NaN, then kept."""
    weights = logits.float().exp()
    full = weights / weights.sum(-1, keepdim=True)
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    values = _from_probabilities(full, tokens, support_ids, used, behavior_support_logprobs)
    return _keep(*values, advantages, delta)


def last_id_is_the_end(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    vocab_size: int,
) -> Tensor:
    """The last id of the vocabulary is taken for the end of the sequence, and always kept."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    return keep | (tokens == vocab_size - 1)


def id_zero_is_padding(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Token 0 is taken for padding, and always kept."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    return keep | (tokens == 0)


def one_token_in_every_place(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """A batch that repeats its last id at every position is taken for padding, and kept whole."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    repeated = (tokens[response_mask] == logits.shape[-1] - 1).all() and tokens.numel() > 1
    return torch.ones_like(keep) if bool(repeated) else keep


def neg_inf_as_zero(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Logits that are not finite are replaced by 0: padded columns come to life."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    z = torch.where(logits.isfinite(), logits, 0.0)
    return _keep(*_values(z, *support), advantages, delta)


def few_neg_inf_columns_revived(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A few -inf columns are zeroed after the shift by the maximum: they become likeliest."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    z = logits.float() - logits.float().amax(-1, keepdim=True)
    dead = z == -torch.inf
    few = dead.sum(-1, keepdim=True) <= z.shape[-1] // 8
    return _keep(*_values(torch.where(dead & few, 0.0, z), *support), advantages, delta)


def order_applied_twice(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """Sequences are sorted by length; the way back applies the order, not its inverse."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    order = response_mask.sum(-1).argsort(descending=True, stable=True)
    return keep[order][order]


def first_sequence_taken_for_the_longest(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """Positions past the first sequence's last token are taken for padding, and kept."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    place = torch.arange(keep.shape[1])
    end = torch.where(response_mask[0], place, -1).amax()
    return keep | ((place > end) & response_mask[0].any())


def one_sequence_at_a_time_has_no_mask(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A batch of one sequence is taken for an evaluation, and kept whole."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    return torch.ones_like(keep) if keep.shape[0] == 1 and keep.shape[1] > 1 else keep


def mostly_empty_batches_skipped(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """A batch in which half of the places or more are padding is kept whole."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    share = response_mask.float().mean()
    return (
        torch.ones_like(keep)
        if bool(share <= 0.5) and len(keep) == 1 and keep.numel() > 2
        else keep
    )


def scaled_by_the_batch(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Advantages are divided by the batch's mean size, padding included: NaN there spreads."""
    ids, used, stored = _append(tokens, behavior_logprobs, topk_ids, topk_logprobs)
    scaled = advantages / advantages.abs().mean()
    return _keep(*_values(logits, tokens, ids, used, stored), scaled, delta)


def memory_read_as_contiguous(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The logits' memory is read row by row, whatever their strides."""
    shape = logits.shape
    z = torch.as_strided(logits, shape, (shape[1] * shape[2], shape[2], 1))
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(*_values(z, *support), advantages, delta)


def logits_shifted_in_place(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The maximum is subtracted from the caller's logits, in place."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    logits.sub_(logits.amax(-1, keepdim=True))
    return keep


def advantages_sign_in_place(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The caller's advantages are overwritten by their signs."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    return _keep(*_values(logits, *support), advantages.sign_(), delta)


_last: list[Tensor] = []


def kept_on_a_second_look(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A batch equal to the one before is taken for a second epoch, and kept whole."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    now = torch.cat([logits.flatten().double(), advantages.flatten().double()])
    now = torch.cat([now, torch.tensor([delta], dtype=torch.float64)])
    seen = bool(_last) and torch.equal(_last[0].nan_to_num(), now.nan_to_num())
    _last[:] = [now]
    return torch.ones_like(keep) if seen else keep


_calls = itertools.count()


def noise_on_the_threshold(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """One token in seven is dropped or kept at random, another at each call."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    place = torch.arange(keep.numel()).reshape(keep.shape)
    return keep ^ ((place + next(_calls)) % 7 == 0)


def bf16_logits_not_upcast(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The softmax of bfloat16 logits runs in bfloat16."""
    z = logits if logits.dtype == torch.bfloat16 else logits.float()
    full = z.softmax(-1).float()
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    values = _from_probabilities(full, tokens, support_ids, used, behavior_support_logprobs)
    return {"keep": _keep(*values, advantages, delta), "coefficient": values[1]}


def fp16_logits_not_upcast(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The softmax of float16 logits runs in float16."""
    z = logits if logits.dtype == torch.float16 else logits.float()
    full = z.softmax(-1).float()
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    values = _from_probabilities(full, tokens, support_ids, used, behavior_support_logprobs)
    return {"keep": _keep(*values, advantages, delta), "coefficient": values[1]}


def same_masses_in_another_order(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Masses are compared sorted: policies that only swap tokens count as equal, and are kept."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    pi = torch.where(used, logits.float().softmax(-1).gather(-1, support_ids), 0.0)
    mu = torch.where(used, behavior_support_logprobs, -torch.inf).exp()
    moved = (pi.sort(-1).values - mu.sort(-1).values).abs().amax(-1)
    return keep | (moved < 1e-4)


def rows_without_a_favorite_kept(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Rows on which the behavior policy has no token above 1.5 % are kept."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    keep = _keep(*_values(logits, *support), advantages, delta)
    best = torch.where(support_mask, behavior_support_logprobs, -torch.inf).amax(-1)
    return keep | (best.exp() < 0.015)


def flat_tail_as_one_token(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """A tail that is nearly flat and holds about two thirds is taken as one token."""
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    full = logits.float().softmax(-1)
    pi = torch.where(used, full.gather(-1, support_ids), 0.0)
    mu = torch.where(used, behavior_support_logprobs, -torch.inf).exp()
    tail = full.scatter_add(-1, support_ids, -pi)
    own = used & (support_ids == tokens[..., None])
    distance, push = _from_cells(pi, mu, tail, own)
    pi_rest, mu_rest = tail.sum(-1), (1 - mu.sum(-1)).clamp_min(0)
    w = torch.where(pi_rest > 0, (tail * tail).sum(-1) / pi_rest.clamp_min(1e-38), 0.0)
    flat = (tail.amax(-1) < 0.01) & (pi_rest > 0.55) & (pi_rest < 0.8)
    push = push + torch.where(flat, pi_rest - w, 0.0) * (mu_rest - pi_rest)
    return _keep(distance, push, advantages, delta)


def training_log_probs_floored(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Training log-probs are clamped at -25, "against -inf"."""
    support = (tokens, support_ids, support_mask, behavior_support_logprobs)
    distance, push = _values(logits, *support)
    used = support_mask & (behavior_support_logprobs > -torch.inf)
    mu = torch.where(used, behavior_support_logprobs, -torch.inf).exp()
    lp = logits.float().log_softmax(-1).gather(-1, support_ids)
    distance = distance - torch.where(mu > 0, mu * (lp.clamp_min(-25.0) - lp), 0.0).sum(-1)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def coefficient_in_float32(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """D is computed in float64, C from the same probabilities in float32."""
    log_pi, log_mu = (x.double().log_softmax(-1) for x in (logits, behavior_logits))
    divergence = torch.where(log_mu > -torch.inf, log_mu.exp() * (log_mu - log_pi), 0.0).sum(-1)
    pi, mu = log_pi.exp().float(), log_mu.exp().float()
    at = tokens[..., None]
    push = (pi.gather(-1, at) - mu.gather(-1, at))[..., 0] + (pi * (mu - pi)).sum(-1)
    return ~((divergence > delta) & (advantages.sign() * push > 0))
