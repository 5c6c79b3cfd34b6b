"""Predictive masks on the full vocabulary, with one bug in each function (its docstring)."""

from __future__ import annotations

import torch
from torch import Tensor


def _policies(logits: Tensor, behavior_logits: Tensor) -> tuple[Tensor, Tensor]:
    return behavior_logits.float().log_softmax(-1), logits.float().log_softmax(-1)


def _weighted(weight: Tensor, log_ratio: Tensor) -> Tensor:
    """sum weight * log_ratio, 0 where the weight is."""
    return torch.where(weight > 0, weight * log_ratio, 0.0).sum(-1)


def _at(x: Tensor, tokens: Tensor) -> Tensor:
    return x.gather(-1, tokens[..., None])[..., 0]


def _general(pi: Tensor, slope: Tensor, tokens: Tensor) -> Tensor:
    """C = pi_k (g_k - gbar) - sum pi^2 (g - gbar)."""
    slope = torch.where(pi > 0, slope, 0.0)
    slope = slope - (pi * slope).sum(-1, keepdim=True)
    return _at(pi * slope, tokens) - (pi * pi * slope).sum(-1)


def _kl_coefficient(mu: Tensor, pi: Tensor, tokens: Tensor) -> Tensor:
    return _at(pi - mu, tokens) + (pi * (mu - pi)).sum(-1)


def _keep(distance: Tensor, push: Tensor, advantages: Tensor, delta: float) -> Tensor:
    return ~((distance > delta) & (advantages.sign() * push > 0))


def kl_of_the_best_tokens(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """Only the behavior policy's 20 likeliest tokens enter the divergence."""
    lm, lp = _policies(logits, behavior_logits)
    best, ids = lm.topk(min(20, lm.shape[-1] - 1), dim=-1)
    distance = _weighted(best.exp(), best - lp.gather(-1, ids))
    return _keep(distance, _kl_coefficient(lm.exp(), lp.exp(), tokens), advantages, delta)


def kl_mean_over_the_vocabulary(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """The terms are averaged over V, as a loss with reduction "mean" would."""
    lm, lp = _policies(logits, behavior_logits)
    distance = _weighted(lm.exp(), lm - lp) / lm.shape[-1]
    return _keep(distance, _kl_coefficient(lm.exp(), lp.exp(), tokens), advantages, delta)


def kl_swapped(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """Training and behavior policy change places in the divergence and in the direction."""
    lp, lm = _policies(logits, behavior_logits)
    distance = _weighted(lm.exp(), lm - lp)
    push = _kl_coefficient(lm.exp(), lp.exp(), tokens)
    keep = _keep(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def kl_epsilon_in_the_logs(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """log(p + 1e-4) for log p: the many small probabilities are all biased."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = (mu * ((mu + 1e-4).log() - (pi + 1e-4).log())).sum(-1)
    push = _kl_coefficient(mu, pi, tokens)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def kl_in_bf16(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """Both softmaxes run in bfloat16, though fp32 is claimed."""
    lm, lp = (x.bfloat16().log_softmax(-1) for x in (behavior_logits, logits))
    mu, pi = lm.exp(), lp.exp()
    distance = _weighted(mu, lm - lp).float()
    push = _kl_coefficient(mu, pi, tokens).float()
    keep = _keep(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def kl_one_sample(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """The sampled token's log-ratio stands in for the whole divergence."""
    lm, lp = _policies(logits, behavior_logits)
    distance = _at(lm - lp, tokens).abs()
    return _keep(distance, _kl_coefficient(lm.exp(), lp.exp(), tokens), advantages, delta)


def kl_step_moves_one_logit(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The step is taken as e_k, without the -pi that the softmax's gradient has."""
    lm, lp = _policies(logits, behavior_logits)
    distance = _weighted(lm.exp(), lm - lp)
    push = _at(lp.exp() - lm.exp(), tokens)
    return {"keep": _keep(distance, push, advantages, delta), "coefficient": push}


def kl_step_from_the_behavior_policy(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The step is taken as e_k - mu, not e_k - pi."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = _weighted(mu, lm - lp)
    push = _at(pi - mu, tokens) + (mu * (mu - pi)).sum(-1)
    return {"keep": _keep(distance, push, advantages, delta), "coefficient": push}


def kl_descent_for_ascent(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The coefficient has the sign of a step that lowers the surrogate."""
    lm, lp = _policies(logits, behavior_logits)
    distance = _weighted(lm.exp(), lm - lp)
    push = -_kl_coefficient(lm.exp(), lp.exp(), tokens)
    return {"keep": _keep(distance, push, advantages, delta), "coefficient": push}


def kl_softmax_over_positions(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> Tensor:
    """The softmax runs along the sequence, not the vocabulary."""
    clean = [torch.nan_to_num(x.float(), 0.0) for x in (behavior_logits, logits)]
    lm, lp = (x.log_softmax(1) for x in clean)
    distance = _weighted(lm.exp(), lm - lp)
    return _keep(distance, _kl_coefficient(lm.exp(), lp.exp(), tokens), advantages, delta)


def kl_across_the_batch(
    logits: Tensor,
    behavior_logits: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    delta: float,
) -> Tensor:
    """Proximity is the mean divergence of the batch, one verdict for every token."""
    lm, lp = _policies(logits, behavior_logits)
    mean = _weighted(lm.exp(), lm - lp)[response_mask].mean()
    push = _kl_coefficient(lm.exp(), lp.exp(), tokens)
    return _keep(mean.expand_as(push), push, advantages, delta)


def reverse_kl_without_the_mean(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """C = pi_k l_k - sum pi^2 l: the log-ratios are not centered by D."""
    lm, lp = _policies(logits, behavior_logits)
    pi = lp.exp()
    gap = torch.where(pi > 0, lp - lm, 0.0)
    distance = (pi * gap).sum(-1)
    push = _at(pi * gap, tokens) - (pi * pi * gap).sum(-1)
    return {"keep": _keep(distance, push, advantages, delta), "coefficient": push}


def reverse_kl_without_the_others(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """C = pi_k (l_k - D): the sum over pi^2 is missing."""
    lm, lp = _policies(logits, behavior_logits)
    pi = lp.exp()
    gap = torch.where(pi > 0, lp - lm, 0.0)
    distance = (pi * gap).sum(-1)
    push = _at(pi * (gap - distance[..., None]), tokens)
    return {"keep": _keep(distance, push, advantages, delta), "coefficient": push}


def tv_sum_of_differences(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The L1 distance, twice the total variation."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = (pi - mu).abs().sum(-1)
    push = _general(pi, (pi - mu).sign(), tokens)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def tv_largest_difference(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The largest single difference, not half their sum."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = (pi - mu).abs().amax(-1)
    push = _general(pi, (pi - mu).sign(), tokens)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def jensen_shannon_mixture_forgotten(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The symmetric half-sum of both KLs (Jeffreys), which has no mixture in it."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = (_weighted(mu, lm - lp) + _weighted(pi, lp - lm)) / 2
    slope = torch.where(pi > 0, lp - lm - mu / pi, 0.0)
    return {"keep": _keep(distance, _general(pi, slope, tokens), advantages, delta)}


def jensen_shannon_direction_to_behavior(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The slope is log(pi / mu), where the mixture belongs in the denominator."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    log_mixture = ((mu + pi) / 2).log()
    distance = (_weighted(mu, lm - log_mixture) + _weighted(pi, lp - log_mixture)) / 2
    push = _general(pi, (lp - lm) / 2, tokens)
    return {"keep": _keep(distance, push, advantages, delta), "coefficient": push}


def jensen_shannon_in_bits(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """Base-2 logarithms: the divergence ends at 1, not at log 2."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    log_mixture = ((mu + pi) / 2).log()
    nats = (_weighted(mu, lm - log_mixture) + _weighted(pi, lp - log_mixture)) / 2
    push = _general(pi, (lp - log_mixture) / 2, tokens)
    keep = _keep(nats / 0.6931472, push, advantages, delta)
    return {"keep": keep, "divergence": nats / 0.6931472}


def hellinger_not_squared(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The distance, not its square."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = (((pi.sqrt() - mu.sqrt()) ** 2).sum(-1) / 2).sqrt()
    slope = torch.where(pi > 0, -((lm - lp) / 2).exp(), 0.0)
    push = _general(pi, slope, tokens)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def hellinger_without_the_half(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """sum (sqrt pi - sqrt mu)^2, twice the squared distance."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = ((pi.sqrt() - mu.sqrt()) ** 2).sum(-1)
    slope = torch.where(pi > 0, -((lm - lp) / 2).exp(), 0.0)
    push = _general(pi, slope, tokens)
    return {"keep": _keep(distance, push, advantages, delta), "divergence": distance}


def chi2_other_denominator(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """sum (pi - mu)^2 / mu, where the training policy belongs in the denominator."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = torch.where(mu > 0, (pi - mu) ** 2 / mu, 0.0).sum(-1)
    push = _general(pi, torch.where(mu > 0, 2 * pi / mu, 0.0), tokens)
    keep = _keep(distance, push, advantages, delta)
    return {"keep": keep, "divergence": distance, "coefficient": push}


def chi2_direction_of_kl(
    logits: Tensor, behavior_logits: Tensor, tokens: Tensor, advantages: Tensor, delta: float
) -> dict[str, Tensor]:
    """The distance is chi-squared, the direction that of forward KL."""
    lm, lp = _policies(logits, behavior_logits)
    mu, pi = lm.exp(), lp.exp()
    distance = torch.where(pi > 0, (pi - mu) ** 2 / pi, 0.0).sum(-1)
    push = _kl_coefficient(mu, pi, tokens)
    return {"keep": _keep(distance, push, advantages, delta), "coefficient": push}
