"""Rewards of arms, and the advantages made from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from pdverify.registry import Registry
from simulations.bandit.streams import Streams

Table: TypeAlias = Callable[[Streams, int, int], Tensor]
"""`(streams, X, V) -> [S, X, V]`: the mean reward of each arm in each context."""

Advantage: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]
"""`(rewards [S, B], baseline [S, B], group size) -> advantages [S, B]`."""

REWARDS: Registry[Table] = Registry("reward")
ADVANTAGES: Registry[Advantage] = Registry("advantage")


def one_good_arm(streams: Streams, contexts: int, vocab_size: int) -> Tensor:
    """1 for one arm of each context, 0 for the others."""
    best = streams.integers("best arm", vocab_size, contexts)
    return torch.nn.functional.one_hot(best, vocab_size).double()


def sparse(streams: Streams, contexts: int, vocab_size: int) -> Tensor:
    """1 for a twentieth of the arms."""
    return (streams.uniform("good arms", contexts, vocab_size) < 0.05).double()


def dense(streams: Streams, contexts: int, vocab_size: int) -> Tensor:
    """Standard normal."""
    return streams.normal("rewards", contexts, vocab_size)


def chances(streams: Streams, contexts: int, vocab_size: int) -> Tensor:
    """Chances of success `u^4`, u uniform: few arms are good, and rewards (0 or 1) are noisy."""
    return streams.uniform("chances", contexts, vocab_size) ** 4


REWARDS.add("one-good-arm", one_good_arm)
REWARDS.add("sparse", sparse)
REWARDS.add("dense", dense)
REWARDS.add("chances", chances)

NOISY = frozenset({"chances"})
"""Rewards that are drawn, 0 or 1, with the table's chances."""


def draw_rewards(
    kind: str, table: Tensor, contexts: Tensor, tokens: Tensor, uniform: Tensor
) -> Tensor:
    """Rewards of tokens, all `[S, B]`; `table` is `[S, X, V]`."""
    mean = table[torch.arange(len(table))[:, None], contexts, tokens]
    return (uniform < mean).double() if kind in NOISY else mean


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, group)


def group_normalized(rewards: Tensor, baseline: Tensor, group: int) -> Tensor:
    """GRPO: `(R - mean) / std` over the samples of a context, 0 where they are all equal."""
    grouped = _grouped(rewards, group)
    centered = grouped - grouped.mean(-1, keepdim=True)
    spread = centered.square().mean(-1, keepdim=True).sqrt()
    return torch.where(spread > 1e-9, centered / spread.clamp_min(1e-9), 0.0).flatten(-2)


def group_centered(rewards: Tensor, baseline: Tensor, group: int) -> Tensor:
    """`R - mean` over the samples of a context."""
    grouped = _grouped(rewards, group)
    return (grouped - grouped.mean(-1, keepdim=True)).flatten(-2)


def plain(rewards: Tensor, baseline: Tensor, group: int) -> Tensor:
    """`R - E_mu R`, the expectation taken exactly."""
    return rewards - baseline


ADVANTAGES.add("group-normalized", group_normalized)
ADVANTAGES.add("group-centered", group_centered)
ADVANTAGES.add("plain", plain)
