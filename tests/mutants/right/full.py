"""Predictive masks on the full vocabulary, rightly done in many styles."""

from __future__ import annotations

import torch
from torch import Tensor


def _at(x: Tensor, tokens: Tensor) -> Tensor:
    return x.gather(-1, tokens[..., None])[..., 0]


def _drop(d: Tensor, c: Tensor, advantages: Tensor, delta: float) -> Tensor:
    return (d > delta) & (advantages.sign() * c > 0)


def _general(pi: Tensor, g: Tensor, tokens: Tensor) -> Tensor:
    g = torch.where(pi > 0, g, 0.0)
    centered = g - (pi * g).sum(-1, keepdim=True)
    return _at(pi * centered, tokens) - (pi * pi * centered).sum(-1)


def kl(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """log_softmax on both sides; the coefficient as it stands in the paper."""
    lp, lm = logits.float().log_softmax(-1), behavior_logits.float().log_softmax(-1)
    mu, pi = lm.exp(), lp.exp()
    distance = torch.where(mu > 0, mu * (lm - lp), 0.0).sum(-1)
    push = _at(pi - mu, tokens) + (pi * (mu - pi)).sum(-1)
    keep = ~_drop(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def kl_by_cross_entropy(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """Cross entropy minus entropy, both through torch.nn.functional, in float64."""
    z, y = logits.double(), behavior_logits.double()
    mu, pi = y.softmax(-1), z.softmax(-1)
    entropy = -torch.special.entr(mu).sum(-1)
    log_pi = torch.where(mu > 0, z.log_softmax(-1), 0.0)
    distance = entropy - torch.linalg.vecdot(mu, log_pi)
    push = _at(pi, tokens) - _at(mu, tokens) + torch.linalg.vecdot(pi, mu - pi)
    return ~_drop(distance, push, advantages, delta)


def kl_slopes_shifted(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """The general formula with slopes 7 - mu / pi: the constant falls out."""
    lp, lm = logits.double().log_softmax(-1), behavior_logits.double().log_softmax(-1)
    mu, pi = lm.exp(), lp.exp()
    distance = torch.where(mu > 0, mu * (lm - lp), 0.0).sum(-1)
    push = _general(pi, 7 - (lm - lp).exp(), tokens)
    return ~_drop(distance, push, advantages, delta)


def kl_in_bf16(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """bfloat16 throughout, and declared as such."""
    lp, lm = (x.bfloat16().log_softmax(-1) for x in (logits, behavior_logits))
    mu, pi = lm.exp(), lp.exp()
    distance = torch.where(mu > 0, mu * (lm - lp), 0.0).sum(-1)
    push = _at(pi - mu, tokens) + (pi * (mu - pi)).sum(-1)
    return ~_drop(distance, push, advantages, delta)


def reverse_kl(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """pi_k (l_k - D) - sum pi^2 (l - D)."""
    lp, lm = logits.float().log_softmax(-1), behavior_logits.float().log_softmax(-1)
    pi = lp.exp()
    gap = torch.where(pi > 0, lp - lm, 0.0)
    distance = (pi * gap).sum(-1)
    centered = gap - distance[..., None]
    push = _at(pi * centered, tokens) - (pi * pi * centered).sum(-1)
    keep = ~_drop(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def total_variation(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """1 - sum min(mu, pi); signs for slopes."""
    pi, mu = logits.float().softmax(-1), behavior_logits.float().softmax(-1)
    distance = (pi - mu).clamp_min(0).sum(-1)
    push = _general(pi, torch.sign(pi - mu), tokens) / 2
    keep = ~_drop((mu - pi).abs().sum(-1) / 2, push, advantages, delta)
    return {"keep": keep, "divergence": (distance + (mu - pi).clamp_min(0).sum(-1)) / 2}


def jensen_shannon(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """Both KLs to the mixture, whose log comes from logaddexp."""
    lp, lm = logits.float().log_softmax(-1), behavior_logits.float().log_softmax(-1)
    mixture = torch.logaddexp(lp, lm) - torch.log(torch.tensor(2.0))
    mu, pi = lm.exp(), lp.exp()
    terms = torch.where(mu > 0, mu * (lm - mixture), 0.0)
    terms = terms + torch.where(pi > 0, pi * (lp - mixture), 0.0)
    distance = terms.sum(-1) / 2
    push = _general(pi, (lp - mixture) / 2, tokens)
    keep = ~_drop(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def squared_hellinger(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """Half the squared difference of the roots; slopes (1 - sqrt(mu / pi)) / 2."""
    lp, lm = logits.float().log_softmax(-1), behavior_logits.float().log_softmax(-1)
    distance = ((lp / 2).exp() - (lm / 2).exp()).square().sum(-1) / 2
    push = _general(lp.exp(), (1 - ((lm - lp) / 2).exp()) / 2, tokens)
    return ~_drop(distance, push, advantages, delta)


def chi2(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """sum (mu - pi)^2 / pi in float64; moments (pi^2 - mu^2) / pi."""
    lp, lm = logits.double().log_softmax(-1), behavior_logits.double().log_softmax(-1)
    mu, pi = lm.exp(), lp.exp()
    distance = torch.where(pi > 0, (mu - pi) ** 2 / pi, 0.0).sum(-1)
    push = _general(pi, 1 - (2 * (lm - lp)).exp(), tokens)
    keep = ~_drop(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}
