"""Rollouts of a behavior policy, and what masks and divergences say of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdverify.backends import torch_eager
from pdverify.rules import Partition, Rule


@dataclass(frozen=True)
class Rollout:
    """Sampled tokens and what is known of the behavior policy there.

    Attributes:
        contexts, tokens: int64 `[S, B]`.
        log_mu: `[S, B, V]` behavior log-probs, nats.
        advantages: `[S, B]`.
        topk_ids, topk_logprobs: `[S, B, K]`, the behavior policy's top-K.
    """

    contexts: Tensor
    tokens: Tensor
    log_mu: Tensor
    advantages: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor

    @property
    def log_mu_k(self) -> Tensor:
        """Behavior log-prob of the sampled tokens, `[S, B]` nats."""
        return self.log_mu.gather(-1, self.tokens[..., None])[..., 0]

    def take(self, places: Tensor) -> Rollout:
        """The tokens at `places` (int64 `[N]`) of the batch."""
        return Rollout(*(getattr(self, name)[:, places] for name in self.__dataclass_fields__))


def sample(log_mu: Tensor, uniform: Tensor) -> Tensor:
    """Tokens by the inverse distribution function: `[S, B]` from `[S, B, V]` and `[S, B]`."""
    cumulated = log_mu.exp().cumsum(-1)
    token = torch.searchsorted(cumulated, uniform[..., None] * cumulated[..., -1:], right=True)
    # the last token of positive probability: rounding may carry the search beyond it
    possible = torch.arange(log_mu.shape[-1]).where(log_mu > -torch.inf, -1).amax(-1)
    return torch.minimum(token[..., 0], possible)


def rollout(
    contexts: Tensor, tokens: Tensor, log_mu: Tensor, advantages: Tensor, top_k: int
) -> Rollout:
    """A rollout with its top-K view; shapes as in `Rollout`.

    Raises:
        ValueError: `top_k` is not in `1 .. V - 1`.
    """
    if not 0 < top_k < log_mu.shape[-1]:
        raise ValueError(f"top_k = {top_k}: expected 1 .. V - 1 = {log_mu.shape[-1] - 1}")
    listed = log_mu.topk(top_k, -1)
    return Rollout(contexts, tokens, log_mu, advantages, listed.indices, listed.values)


def divergence(
    rows: Rollout, logits: Tensor, name: str = "kl", partition: Partition = "full"
) -> Tensor:
    """`D(mu, pi)` at each token, `[S, B]`, of training logits `[S, B, V]`."""
    return torch_eager.divergence(
        logits,
        rows.tokens,
        name=name,
        partition=partition,
        behavior_logits=rows.log_mu,
        behavior_logprobs=rows.log_mu_k,
        topk_ids=rows.topk_ids,
        topk_logprobs=rows.topk_logprobs,
        compute_dtype=torch.float64,
    )


def keep(rows: Rollout, logits: Tensor, rule: Rule) -> Tensor:
    """What a mask keeps, bool `[S, B]`."""
    full = rule.partition == "full"
    return torch_eager.keep_mask(
        logits,
        rows.tokens,
        rows.advantages,
        rule=rule,
        behavior_logits=rows.log_mu if full else None,
        behavior_logprobs=rows.log_mu_k,
        topk_ids=None if full else rows.topk_ids,
        topk_logprobs=None if full else rows.topk_logprobs,
        compute_dtype=torch.float64,
    )
