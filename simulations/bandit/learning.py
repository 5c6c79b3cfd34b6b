"""Training a softmax bandit off-policy under a mask, for a batch of seeds at once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from pdverify.rules import Rule
from simulations.bandit.behavior import Behavior, straight_through
from simulations.bandit.optimizers import OPTIMIZERS
from simulations.bandit.policies import POLICIES, Params, Policy
from simulations.bandit.rewards import ADVANTAGES, REWARDS, draw_rewards
from simulations.bandit.rollout import Rollout, divergence, keep, rollout, sample
from simulations.bandit.streams import Streams


@dataclass(frozen=True)
class Update:
    """What a mask may look at: an optimizer update that is about to be made.

    Attributes:
        policy: the policy.
        params: its parameters as the trainer's forward pass takes them, detached.
        rows: the tokens of the update.
        logits: training logits there, `[S, B, V]`, detached.
        optimizer: what will make the update; its learning rate and moments, not to be changed.
    """

    policy: Policy
    params: Params
    rows: Rollout
    logits: Tensor
    optimizer: torch.optim.Optimizer


Decide: TypeAlias = Callable[[Update], Tensor]
"""What to keep of an update, bool `[S, B]`."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Attributes:
        policy, width, spread: the policy of `POLICIES`; see its factories.
        contexts, vocab_size: `X` and `V`.
        reward, advantage: of `REWARDS` and `ADVANTAGES`.
        prompts, group: contexts of a rollout, and samples of each.
        minibatches, epochs: optimizer updates on one rollout, `minibatches * epochs`.
        staleness: updates by which the rollout's parameters lag behind at its start.
        behavior: what the rollout engine makes of the parameters.
        trainer: number format of the parameters in the trainer's forward pass.
        optimizer, rate: of `OPTIMIZERS`, and the learning rate.
        rollouts: how many.
        top_k: size of the behavior policy's list.
        delta: threshold outside of which a token counts as such, nats of the full forward KL.
        ratio_cap: bound of the importance ratio in the loss.
    """

    policy: str = "network"
    width: int = 32
    spread: float = 1.5
    contexts: int = 16
    vocab_size: int = 64
    reward: str = "chances"
    advantage: str = "group-normalized"
    prompts: int = 8
    group: int = 8
    minibatches: int = 4
    epochs: int = 4
    staleness: int = 8
    behavior: Behavior = field(default_factory=Behavior)
    trainer: str = "fp64"
    optimizer: str = "adam"
    rate: float = 0.05
    rollouts: int = 60
    top_k: int = 8
    delta: float = 0.15
    ratio_cap: float = 10.0


MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Multiples of `delta` at which the distribution of divergences is recorded."""

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class History:
    """What happened, `[S, R]` over `R` rollouts, at the end of each.

    Attributes:
        reward: expected reward of the training policy over all contexts, exact.
        entropy: mean entropy of its contexts, nats.
        divergence: mean full forward KL of the rollout's tokens after its updates, nats.
        beyond: share of them beyond each of `MULTIPLES` times `delta`, `[S, R, 6]`.
        quantiles: their `QUANTILES`, `[S, R, 3]`.
        dropped: share of gradients that the mask dropped.
        effective: effective sample size over sample size, of the importance ratios.
    """

    reward: Tensor
    entropy: Tensor
    divergence: Tensor
    beyond: Tensor
    quantiles: Tensor
    dropped: Tensor
    effective: Tensor


def masked_gradient_step(
    policy: Policy,
    params: Params,
    rows: Rollout,
    decide: Decide,
    optimizer: torch.optim.Optimizer,
    *,
    trainer: str = "fp64",
    ratio_cap: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """One optimizer update, in place, on the surrogate `mean_t keep A min(r, cap) log pi_k`.

    `params` are the leaves that `optimizer` holds.  Returns what was kept, bool `[S, B]`, and the
    importance ratios, `[S, B]`.
    """
    optimizer.zero_grad()
    given = straight_through(params, trainer)
    logits = policy.logits(given, rows.contexts)
    log_pi_k = torch.log_softmax(logits, -1).gather(-1, rows.tokens[..., None])[..., 0]
    seen = {name: p.detach() for name, p in given.items()}
    kept = decide(Update(policy, seen, rows, logits.detach(), optimizer))
    ratio = (log_pi_k.detach() - rows.log_mu_k).exp()
    weight = torch.where(kept, rows.advantages * ratio.clamp_max(ratio_cap), 0.0)
    # summed over seeds: each has its own parameters, hence its own gradient
    (-weight * log_pi_k).mean(-1).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return kept, ratio


def masked_by(rule: Rule) -> Decide:
    """A mask of the registry as a decision."""

    def decide(update: Update) -> Tensor:
        return keep(update.rows, update.logits, rule)

    return decide


def draw_rollout(
    setting: Setting, streams: Streams, policy: Policy, params: Params, table: Tensor, step: int
) -> Rollout:
    """`prompts * group` tokens of the rollout engine, with their advantages."""
    prompts = streams.integers("prompts", setting.contexts, setting.prompts, step=step)
    contexts = prompts.repeat_interleave(setting.group, -1)
    log_mu = setting.behavior.log_probs(policy, params, prompts)
    expected = (log_mu.exp() * table[torch.arange(len(table))[:, None], prompts]).sum(-1)
    log_mu = log_mu.repeat_interleave(setting.group, -2)
    tokens = sample(log_mu, streams.uniform("tokens", contexts.shape[-1], step=step))
    luck = streams.uniform("luck", contexts.shape[-1], step=step)
    rewards = draw_rewards(setting.reward, table, contexts, tokens, luck)
    baseline = expected.repeat_interleave(setting.group, -1)
    advantages = ADVANTAGES[setting.advantage](rewards, baseline, setting.group)
    return rollout(contexts, tokens, log_mu, advantages, setting.top_k)


def train(setting: Setting, decide: Decide, seeds: range, label: str = "train") -> History:
    """Train every seed; equal labels give common random numbers.

    Raises:
        UnknownName: a policy, reward, advantage, optimizer or format of the setting.
    """
    streams = Streams(seeds, label)
    policy, params = POLICIES[setting.policy](
        streams,
        contexts=setting.contexts,
        vocab_size=setting.vocab_size,
        width=setting.width,
        spread=setting.spread,
    )
    table = REWARDS[setting.reward](streams, setting.contexts, setting.vocab_size)
    params = {name: p.requires_grad_() for name, p in params.items()}
    optimizer = OPTIMIZERS[setting.optimizer](params, setting.rate)
    everywhere = torch.arange(setting.contexts).expand(len(seeds), -1)
    past: deque[Params] = deque([_copied(params)], maxlen=setting.staleness + 1)
    bounds = setting.delta * torch.tensor(MULTIPLES, dtype=torch.float64)
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    found = []
    for step in range(setting.rollouts):
        rows = draw_rollout(setting, streams, policy, past[0], table, step)
        dropped, effective = [], []
        for _ in range(setting.epochs):
            for places in torch.arange(rows.tokens.shape[-1]).chunk(setting.minibatches):
                kept, ratio = masked_gradient_step(
                    policy,
                    params,
                    rows.take(places),
                    decide,
                    optimizer,
                    trainer=setting.trainer,
                    ratio_cap=setting.ratio_cap,
                )
                past.append(_copied(params))
                dropped.append((~kept).double().mean(-1))
                effective.append(ratio.mean(-1).square() / ratio.square().mean(-1))
        with torch.no_grad():
            given = straight_through(params, setting.trainer)
            log_pi = torch.log_softmax(policy.logits(given, everywhere), -1)
            d = divergence(rows, policy.logits(given, rows.contexts))
        pi = log_pi.exp()
        found.append(
            (
                (pi * table).sum(-1).mean(-1),
                -(pi * log_pi.clamp_min(-1e9)).sum(-1).mean(-1),
                d.mean(-1),
                (d[..., None] > bounds).double().mean(-2),
                d.quantile(levels, -1).T,
                torch.stack(dropped).mean(0),
                torch.stack(effective).mean(0),
            )
        )
    return History(*(torch.stack(column, 1) for column in zip(*found, strict=True)))


def _copied(params: Params) -> Params:
    return {name: p.detach().clone() for name, p in params.items()}
