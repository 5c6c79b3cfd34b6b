"""Masks on a top-K view, rightly done in many styles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

NEG_INF = float("-inf")


def kl_gathered(
    support_logprobs: Tensor,
    behavior_support_logprobs: Tensor,
    support_mask: Tensor,
    support_ids: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """DPPO top-K KL from gathered log-probs alone: both tails are 1 - sum."""
    used = support_mask & (behavior_support_logprobs > NEG_INF)
    lm = torch.where(used, behavior_support_logprobs, NEG_INF)
    lp = torch.where(used, support_logprobs, NEG_INF)
    mu, pi = lm.exp(), lp.exp()
    mu_tail, pi_tail = (1 - mu.sum(-1)).clamp_min(0), (1 - pi.sum(-1)).clamp_min(1e-12)
    terms = torch.where(used, mu * (lm - lp), 0.0).sum(-1)
    divergence = terms + torch.where(mu_tail > 0, mu_tail * (mu_tail / pi_tail).log(), 0.0)
    own = used & (support_ids == tokens[..., None])
    gap = torch.where(own, lp - lm, 0.0).sum(-1)
    keep = ~((divergence > delta) & (gap * advantages.sign() > 0))
    return {"keep": keep, "divergence": divergence.clamp_min(0)}


def tv_in_numpy(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    delta: float,
) -> Any:
    """DPPO top-K TV row by row in NumPy float64, support as a set of ids."""
    keep = np.ones(tokens.shape, dtype=bool)
    for b, t in np.argwhere(response_mask.numpy()):
        z = logits[b, t].double().numpy()
        pi = np.exp(z - z.max())
        pi /= pi.sum()
        mass = dict(
            zip(topk_ids[b, t].tolist(), topk_logprobs[b, t].double().exp().tolist(), strict=True)
        )
        mass = {i: m for i, m in mass.items() if m > 0}
        k = int(tokens[b, t])
        mass[k] = float(behavior_logprobs[b, t].double().exp())
        ids = list(mass)
        tail = abs(max(0.0, 1 - sum(mass.values())) - np.delete(pi, ids).sum())
        distance = (sum(abs(mass[i] - pi[i]) for i in ids) + tail) / 2
        keep[b, t] = distance <= delta or float(advantages[b, t]) * (pi[k] - mass[k]) <= 0
    return keep


class _Plain:
    """Masses on support and tail from log_softmax and gather, in the dtype of `log_pi`."""

    def __init__(
        self, log_pi: Tensor, tokens: Tensor, ids: Tensor, used: Tensor, stored: Tensor
    ) -> None:
        used = used & (stored > NEG_INF)
        self.used = used
        self.own = used & (ids == tokens[..., None])
        self.lm = torch.where(used, stored.to(log_pi.dtype), NEG_INF)
        self.lp = torch.where(used, log_pi.gather(-1, ids), NEG_INF)
        self.mu, self.pi = self.lm.exp(), self.lp.exp()
        self.tail = log_pi.exp().scatter_add(-1, ids, -self.pi)
        self.mu_t, self.pi_t = (1 - self.mu.sum(-1)).clamp_min(0), self.tail.sum(-1)
        self.count = log_pi.shape[-1] - used.sum(-1)

    def at_k(self, x: Tensor) -> Tensor:
        return torch.where(self.own, x, 0.0).sum(-1)

    def exact(self) -> Tensor:
        share = self.tail / self.pi_t.clamp_min(1e-38)[..., None]
        return (share * self.tail).sum(-1)

    def kl(self) -> Tensor:
        terms = torch.where(self.mu > 0, self.mu * (self.lm - self.lp), 0.0).sum(-1)
        ratio = torch.where(self.mu_t > 0, self.mu_t / self.pi_t, 1.0)
        return terms + self.mu_t * ratio.log()

    def kl_coefficient(self, w: Tensor) -> Tensor:
        local = self.at_k(self.pi - self.mu)
        return local + (self.pi * (self.mu - self.pi)).sum(-1) + w * (self.mu_t - self.pi_t)


def _outside(d: Tensor, c: Tensor, advantages: Tensor, delta: float) -> Tensor:
    return (d > delta) & (advantages * c > 0)


def predictive_float64(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """float64 throughout; everything is returned."""
    c = _Plain(
        logits.double().log_softmax(-1),
        tokens,
        support_ids,
        support_mask,
        behavior_support_logprobs,
    )
    distance, push = c.kl(), c.kl_coefficient(c.exact())
    keep = ~_outside(distance, push, advantages.double(), delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def predictive_log_softmax(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float = 0.15,
) -> dict[str, Tensor]:
    """log_softmax and gather in fp32, the product A C compared with 0; a default threshold."""
    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    distance, push = c.kl(), c.kl_coefficient(c.exact())
    keep = ~_outside(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


@torch.no_grad()
def predictive_softmax_then_log(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta_low: float,
    delta_high: float,
) -> Tensor:
    """softmax, then log of the gathered probabilities; one threshold for each sign."""
    full = logits.float().softmax(-1)
    used = support_mask & (behavior_support_logprobs > NEG_INF)
    pi = full.gather(-1, support_ids).masked_fill(~used, 0.0)
    mu = behavior_support_logprobs.masked_fill(~used, NEG_INF).exp()
    unlisted = torch.ones_like(full, dtype=torch.bool)
    unlisted.scatter_(-1, support_ids.where(used, tokens[..., None]), False)
    tail = full * unlisted
    mu_t, pi_t = (1 - mu.sum(-1)).clamp_min(0), tail.sum(-1)
    distance = torch.xlogy(mu, mu) - torch.xlogy(mu, pi)
    distance = distance.sum(-1) + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, pi_t)
    own = used & (support_ids == tokens.unsqueeze(-1))
    push = ((pi - mu) * own).sum(-1) + (pi * (mu - pi)).sum(-1)
    push = push + (tail * tail).sum(-1) / pi_t.clamp_min(1e-30) * (mu_t - pi_t)
    drop_up = (advantages > 0) & (distance > delta_high) & (push > 0)
    drop_down = (advantages < 0) & (distance > delta_low) & (push < 0)
    return ~drop_up & ~drop_down


def predictive_chunked(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The normalizer and the tail are accumulated over chunks of 96 columns."""
    z = logits.float()
    top = z.amax(-1, keepdim=True)
    parts = z.split(96, dim=-1)
    norm = torch.stack([(part - top).exp().sum(-1) for part in parts]).sum(0)
    log_norm = top + norm.log()[..., None]
    used = support_mask & (behavior_support_logprobs > NEG_INF)
    lm = torch.where(used, behavior_support_logprobs, NEG_INF)
    lp = torch.where(used, z.gather(-1, support_ids) - log_norm, NEG_INF)
    mu, pi = lm.exp(), lp.exp()
    pi_t, collision, start = torch.zeros_like(norm), torch.zeros_like(norm), 0
    for part in parts:
        here = (support_ids >= start) & (support_ids < start + part.shape[-1]) & used
        place = torch.where(here, support_ids - start, part.shape[-1])
        p = (part - log_norm).exp()
        p = torch.cat([p, torch.zeros_like(p[..., :1])], -1).scatter(-1, place, 0.0)
        pi_t, collision = pi_t + p.sum(-1), collision + (p * p).sum(-1)
        start += part.shape[-1]
    mu_t = (1 - mu.sum(-1)).clamp_min(0)
    w = torch.where(pi_t > 0, collision / pi_t.clamp_min(1e-38), 0.0)
    distance = torch.where(mu > 0, mu * (lm - lp), 0.0).sum(-1)
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, pi_t)
    own = used & (support_ids == tokens[..., None])
    push = torch.where(own, pi - mu, 0.0).sum(-1) + (pi * (mu - pi)).sum(-1) + w * (mu_t - pi_t)
    return ~((distance > delta) & (advantages.sign() * push > 0))


def predictive_rows_apart(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """A Python loop over the valid tokens, one row at a time."""
    keep = torch.ones_like(response_mask)
    for b, t in response_mask.nonzero().tolist():
        row = slice(t, t + 1)
        c = _Plain(
            logits[b, row].float().log_softmax(-1),
            tokens[b, row],
            support_ids[b, row],
            support_mask[b, row],
            behavior_support_logprobs[b, row],
        )
        drop = _outside(c.kl(), c.kl_coefficient(c.exact()), advantages[b, row], delta)
        keep[b, t] = not bool(drop[0])
    return keep


def predictive_sorted_sums(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Every sum runs over ascending terms, by cumsum."""

    def total(x: Tensor) -> Tensor:
        return x.sort(-1).values.cumsum(-1)[..., -1]

    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    pi_t, mu_t = total(c.tail), (1 - total(c.mu)).clamp_min(0)
    w = torch.where(pi_t > 0, total(c.tail**2) / pi_t.clamp_min(1e-38), 0.0)
    distance = total(torch.where(c.mu > 0, c.mu * (c.lm - c.lp), 0.0))
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, pi_t)
    push = c.at_k(c.pi - c.mu) + total(c.pi * (c.mu - c.pi)) + w * (mu_t - pi_t)
    keep = ~_outside(distance, push, advantages.sign(), delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def predictive_kahan(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Compensated sums over the support."""

    def total(x: Tensor) -> Tensor:
        result, lost = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
        for term in x.unbind(-1):
            y = term - lost
            new = result + y
            lost, result = (new - result) - y, new
        return result

    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    mu_t = (1 - total(c.mu)).clamp_min(0)
    distance = total(torch.where(c.mu > 0, c.mu * (c.lm - c.lp), 0.0))
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, c.pi_t)
    motion = total(c.pi * (c.mu - c.pi)) + c.exact() * (mu_t - c.pi_t)
    return ~_outside(distance, c.at_k(c.pi - c.mu) + motion, advantages.sign(), delta)


def predictive_einsum(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Sums of products as contractions, one-hot for the sampled token."""
    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    gap = torch.where(c.mu > 0, c.lm - c.lp, 0.0)
    distance = torch.einsum("blm,blm->bl", c.mu, gap)
    distance = distance + torch.xlogy(c.mu_t, c.mu_t) - torch.xlogy(c.mu_t, c.pi_t)
    move = c.mu - c.pi
    push = torch.einsum("blm,blm->bl", c.pi, move) - torch.einsum(
        "blm,blm->bl", c.own.float(), move
    )
    w = torch.einsum("blv,blv->bl", c.tail, c.tail) / c.pi_t.clamp_min(1e-30)
    push = push + w * (c.mu_t - c.pi_t)
    keep = ~_outside(distance, push, advantages.sign(), delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def _row(z: Tensor, k: Tensor, ids: Tensor, used: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Divergence and coefficient of one token; no data-dependent control flow."""
    used = used & (stored > NEG_INF)
    full = torch.softmax(z.float(), -1)
    pi = torch.where(used, full[ids], 0.0)
    mu = torch.where(used, stored, NEG_INF).exp()
    tail = full.scatter_add(-1, ids, -pi)
    mu_t, pi_t = (1 - mu.sum()).clamp_min(0), tail.sum()
    distance = (torch.xlogy(mu, mu) - torch.xlogy(mu, pi)).sum()
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, pi_t)
    push = torch.where(used & (ids == k), pi - mu, 0.0).sum() + (pi * (mu - pi)).sum()
    return distance, push + (tail * tail).sum() / pi_t.clamp_min(1e-30) * (mu_t - pi_t)


def predictive_vmap(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """One token's function, mapped over positions and sequences."""
    over_tokens = torch.func.vmap(torch.func.vmap(_row))
    distance, push = over_tokens(
        logits, tokens, support_ids, support_mask, behavior_support_logprobs
    )
    keep = ~_outside(distance, push, advantages.sign(), delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


_compiled: dict[str, Callable[..., Tensor]] = {}


def predictive_compiled(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """torch.compile, traced once for all shapes."""
    if "drop" not in _compiled:
        _compiled["drop"] = torch.compile(_drop_plain, backend="eager", dynamic=True)
    drop = _compiled["drop"](
        logits,
        tokens,
        support_ids,
        support_mask,
        behavior_support_logprobs,
        advantages,
        torch.tensor(delta, dtype=torch.float64),
    )
    return ~drop


def _drop_plain(
    logits: Tensor,
    tokens: Tensor,
    ids: Tensor,
    used: Tensor,
    stored: Tensor,
    advantages: Tensor,
    delta: Tensor,
) -> Tensor:
    used = used & (stored > NEG_INF)
    full = logits.float().softmax(-1)
    pi = torch.where(used, full.gather(-1, ids), 0.0)
    mu = torch.where(used, stored, NEG_INF).exp()
    tail = full.scatter_add(-1, ids, -pi)
    mu_t, pi_t = (1 - mu.sum(-1)).clamp_min(0), tail.sum(-1)
    distance = (torch.xlogy(mu, mu) - torch.xlogy(mu, pi)).sum(-1)
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, pi_t)
    push = torch.where(used & (ids == tokens[..., None]), pi - mu, 0.0).sum(-1)
    push = push + (pi * (mu - pi)).sum(-1)
    push = push + (tail * tail).sum(-1) / pi_t.clamp_min(1e-30) * (mu_t - pi_t)
    return (distance > delta) & (advantages.sign() * push > 0)


def predictive_general_formula(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """pi_k (g_k - gbar) - sum pi^2 (g - gbar) with g = 1 - mu / pi, in float64."""
    c = _Plain(
        logits.double().log_softmax(-1),
        tokens,
        support_ids,
        support_mask,
        behavior_support_logprobs,
    )
    slope = torch.where(c.pi > 0, 1 - (c.lm - c.lp).exp(), 0.0)
    slope_t = torch.where(c.pi_t > 0, 1 - c.mu_t / c.pi_t.clamp_min(1e-300), 0.0)
    mean = (c.pi * slope).sum(-1) + c.pi_t * slope_t
    slope, slope_t = slope - mean[..., None], slope_t - mean
    push = c.at_k(c.pi * slope) - (c.pi**2 * slope).sum(-1) - (c.tail**2).sum(-1) * slope_t
    distance = c.kl()
    keep = ~_outside(distance, push, advantages.double(), delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def predictive_complement(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The form without cancellation: sums over what is not the sampled token."""
    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    mu, pi = (torch.where(c.own, 0.0, x) for x in (c.mu, c.pi))
    first = -torch.expm1(c.at_k(c.lm))
    mu_t = (first - mu.sum(-1)).clamp_min(0)
    eps = pi.sum(-1) + c.pi_t
    push = ((eps[..., None] + pi) * (mu - pi)).sum(-1) + (eps + c.exact()) * (mu_t - c.pi_t)
    distance = torch.where(c.mu > 0, c.mu * (c.lm - c.lp), 0.0).sum(-1)
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, c.pi_t)
    keep = ~_outside(distance, push, advantages.sign(), delta)
    return {"keep": keep, "coefficient": push}


def predictive_moments(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Unnormalized weights e^(z - max) and their moments, divided at the end; float64 sums."""
    z = logits.double()
    weight = (z - z.amax(-1, keepdim=True)).exp()
    used = support_mask & (behavior_support_logprobs > NEG_INF)
    listed = torch.where(used, weight.gather(-1, support_ids), 0.0)
    tail = weight.scatter_add(-1, support_ids, -listed)
    s1, s2, t1 = weight.sum(-1), (listed**2).sum(-1), tail.sum(-1)
    mu = torch.where(used, behavior_support_logprobs.double(), NEG_INF).exp()
    mu_t = (1 - mu.sum(-1)).clamp_min(0)
    own = used & (support_ids == tokens[..., None])
    cross = (listed * mu).sum(-1) / s1
    push = torch.where(own, listed / s1[..., None] - mu, 0.0).sum(-1) + cross - s2 / s1**2
    w = (tail**2).sum(-1) / t1.clamp_min(1e-300) / s1
    push = push + w * (mu_t - t1 / s1)
    entropy = torch.xlogy(mu, mu).sum(-1) + torch.xlogy(mu_t, mu_t)
    crossed = torch.xlogy(mu, listed / s1[..., None]).sum(-1) + torch.xlogy(mu_t, t1 / s1)
    return ~_outside(entropy - crossed, push, advantages.double(), delta)


def predictive_autograd(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The derivative of the divergence along e_k - pi, by forward-mode differentiation."""
    z = torch.where(response_mask[..., None], logits.double(), 0.0)
    used = support_mask & (behavior_support_logprobs > NEG_INF)
    mu = torch.where(used, behavior_support_logprobs.double(), NEG_INF).exp()
    mu_t = (1 - mu.sum(-1)).clamp_min(0)

    def divergence(z: Tensor) -> Tensor:
        full = z.softmax(-1)
        pi = full.gather(-1, support_ids)
        listed = torch.where(used, pi, 0.0)
        pi_t = full.scatter_add(-1, support_ids, -listed).sum(-1)
        quotient = torch.where(mu > 0, mu, 1.0) / torch.where(mu > 0, pi, 1.0)
        terms = (mu * quotient.log()).sum(-1)
        return terms + mu_t * torch.where(mu_t > 0, mu_t / pi_t, 1.0).log()

    step = -z.softmax(-1)
    step = step.scatter_add(-1, tokens[..., None], torch.ones_like(step[..., :1]))
    distance, push = torch.func.jvp(divergence, (z,), (step,))
    keep = ~_outside(distance, push, advantages.double(), delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def predictive_scaled(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """The predicted change eta A r C decides, with eta = 1e-3; only its sign matters."""
    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    ratio = c.at_k(c.lp - c.lm).clamp(-20, 20).exp()
    change = 1e-3 * advantages.double() * ratio * c.kl_coefficient(c.exact())
    return ~((c.kl() > delta) & (change > 0))


def predictive_dense_behavior(
    logits: Tensor,
    tokens: Tensor,
    behavior_logprobs: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """The behavior policy is scattered into the vocabulary; a mask says what is retained."""
    pi = logits.float().softmax(-1)
    mu = torch.zeros_like(pi).scatter(-1, topk_ids, topk_logprobs.exp())
    mu = mu.scatter(-1, tokens[..., None], behavior_logprobs.exp()[..., None])
    retained = mu > 0
    retained.scatter_(-1, tokens[..., None], True)
    tail = torch.where(retained, 0.0, pi)
    mu_t, pi_t = (1 - mu.sum(-1)).clamp_min(0), tail.sum(-1)
    distance = (torch.xlogy(mu, mu) - torch.xlogy(mu, pi)).sum(-1)
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, pi_t)
    gap = torch.where(retained, mu - pi, 0.0)
    push = (pi * gap).sum(-1) - gap.gather(-1, tokens[..., None])[..., 0]
    push = push + (tail * tail).sum(-1) / pi_t.clamp_min(1e-30) * (mu_t - pi_t)
    keep = (distance <= delta) | (advantages.sign() * push <= 0)
    return {"keep": keep, "divergence": distance}


def predictive_replace(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """K slots, the sampled token among them; aggregated tail."""
    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    distance, push = c.kl(), c.kl_coefficient(c.pi_t)
    keep = ~_outside(distance, push, advantages.sign(), delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def aggregated_gathered(
    support_logprobs: Tensor,
    behavior_support_logprobs: Tensor,
    support_mask: Tensor,
    support_ids: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Aggregated tail from gathered log-probs alone."""
    used = support_mask & (behavior_support_logprobs > NEG_INF)
    lm = torch.where(used, behavior_support_logprobs, NEG_INF)
    lp = torch.where(used, support_logprobs, NEG_INF)
    mu, pi = lm.exp(), lp.exp()
    mu_t, pi_t = (1 - mu.sum(-1)).clamp_min(0), (1 - pi.sum(-1)).clamp_min(1e-12)
    distance = torch.where(mu > 0, mu * (lm - lp), 0.0).sum(-1)
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, pi_t)
    own = used & (support_ids == tokens[..., None])
    push = torch.where(own, pi - mu, 0.0).sum(-1) + (pi * (mu - pi)).sum(-1)
    push = push + pi_t * (mu_t - pi_t)
    return {"keep": ~_outside(distance, push, advantages.sign(), delta), "coefficient": push}


def uniform_gathered(
    support_logprobs: Tensor,
    behavior_support_logprobs: Tensor,
    support_mask: Tensor,
    support_ids: Tensor,
    tokens: Tensor,
    vocab_size: int,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Uniform tail from gathered log-probs alone; float64 after the gather."""
    used = support_mask & (behavior_support_logprobs > NEG_INF)
    lm = torch.where(used, behavior_support_logprobs, NEG_INF).double()
    lp = torch.where(used, support_logprobs, NEG_INF).double()
    mu, pi = lm.exp(), lp.exp()
    mu_t, pi_t = (1 - mu.sum(-1)).clamp_min(0), (1 - pi.sum(-1)).clamp_min(1e-12)
    distance = torch.where(mu > 0, mu * (lm - lp), 0.0).sum(-1)
    distance = distance + torch.xlogy(mu_t, mu_t) - torch.xlogy(mu_t, pi_t)
    own = used & (support_ids == tokens[..., None])
    push = torch.where(own, pi - mu, 0.0).sum(-1) + (pi * (mu - pi)).sum(-1)
    push = push + pi_t / (vocab_size - used.sum(-1)).clamp_min(1) * (mu_t - pi_t)
    return ~_outside(distance, push, advantages.double(), delta)


def bracket_both_ends(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> Tensor:
    """Drops where the smaller of both ends' A C is positive."""
    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    ends = torch.stack([c.kl_coefficient(c.pi_t), c.kl_coefficient(c.pi_t / c.count)])
    least = (advantages.sign() * ends).amin(0)
    return ~((c.kl() > delta) & (least > 0))


def _coefficient(c: _Plain, g: Tensor, g_t: Tensor) -> Tensor:
    """C from the slopes g on the support and on the tail, exact tail."""
    mean = (c.pi * g).sum(-1) + c.pi_t * g_t
    others = (c.pi * c.pi * (g - mean[..., None])).sum(-1)
    own = c.at_k(c.pi * (g - mean[..., None]))
    return own - others - (c.tail * c.tail).sum(-1) * (g_t - mean)


def reverse_kl(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """KL(pi || mu) on the cells, slopes log(pi / mu)."""
    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    g = torch.where(c.pi > 0, c.lp - c.lm, 0.0)
    g_t = torch.where(c.pi_t > 0, c.pi_t.log() - c.mu_t.log(), 0.0)
    distance = (c.pi * g).sum(-1) + c.pi_t * g_t
    push = _coefficient(c, g, g_t)
    keep = ~_outside(distance, push, advantages.sign(), delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def total_variation(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
) -> dict[str, Tensor]:
    """Half the differences; slopes are half the signs."""
    c = _Plain(
        logits.float().log_softmax(-1), tokens, support_ids, support_mask, behavior_support_logprobs
    )
    distance = ((c.pi - c.mu).abs().sum(-1) + (c.pi_t - c.mu_t).abs()) / 2
    push = _coefficient(c, (c.pi - c.mu).sign() / 2, (c.pi_t - c.mu_t).sign() / 2)
    return {"keep": ~_outside(distance, push, advantages.sign(), delta), "divergence": distance}


def second_order(
    logits: Tensor,
    tokens: Tensor,
    support_ids: Tensor,
    support_mask: Tensor,
    behavior_support_logprobs: Tensor,
    advantages: Tensor,
    delta: float,
    eta: float,
) -> Tensor:
    """Divergence, coefficient and curvature of the top-K view, in float64."""
    c = _Plain(
        logits.double().log_softmax(-1),
        tokens,
        support_ids,
        support_mask,
        behavior_support_logprobs,
    )
    share = c.tail / c.pi_t.clamp_min(1e-300)[..., None]
    w, w2 = (share * c.tail).sum(-1), (share * c.tail**2).sum(-1)
    pi_k = c.at_k(c.pi)
    mean = pi_k - (c.pi**2).sum(-1) - c.pi_t * w
    cubes = (c.pi**3).sum(-1) + c.pi_t * w2
    curvature = pi_k - 2 * pi_k**2 + cubes - mean**2 - c.mu_t * (w2 - w * w)
    step = eta * advantages.double() * c.at_k((c.lp - c.lm).exp())
    push = c.kl_coefficient(w)
    after = c.kl() + step * push + step * step * curvature / 2
    return ~((after > delta) & (advantages.sign() * push > 0))
