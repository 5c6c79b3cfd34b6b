"""Two policies that differ, a rollout of one, and one step of the other: a scene to measure."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from simulations import bandit
from simulations.bandit import Behavior, Params, Policy, Rollout, Setting, Step, Streams
from simulations.bandit.learning import Decide, Update, draw_rollout
from simulations.bandit.predictions import forward
from simulations.bandit.rewards import REWARDS

SHARING = {
    "free": ("tabular", 1),
    "linear-256": ("linear", 256),
    "linear-64": ("linear", 64),
    "linear-16": ("linear", 16),
    "linear-4": ("linear", 4),
    "network": ("network", 32),
    "table": ("tabular", 1),
}
"""How parameters are shared -> (policy, width).

``free``: every token has logits of its own.  Then every token has a context of its own, and
contexts share features at random, more of them the fewer there are, or a network.  ``table``: free
logits of 16 contexts, of which 8 are drawn with a group of tokens in each, which share all.
"""

MISMATCHES = ("noise", "stale", "bf16", "fp8-row", "fp8-group", "tempered", "top-p")


@dataclass(frozen=True)
class Scene:
    """Before the step: what a mask sees.

    `pi` (`params` of `policy`) is about to be updated on `rows`, which `mu` sampled.  `moments` are
    those of the Adam updates that made a stale policy, or empty.
    """

    policy: Policy
    params: Params
    rows: Rollout
    optimizer: str
    rate: float
    moments: dict[str, Any] = field(default_factory=dict)

    def update(self, *, resumed: bool = False) -> Update:
        """The update that is about to be made, by a fresh optimizer or with the `moments`."""
        params = {name: p.clone().requires_grad_() for name, p in self.params.items()}
        optimizer = bandit.OPTIMIZERS[self.optimizer](params, self.rate)
        if resumed and self.optimizer == "adam" and self.moments:
            optimizer.load_state_dict(copy.deepcopy(self.moments))
            for group in optimizer.param_groups:
                group["lr"] = self.rate
        with torch.no_grad():
            logits = self.policy.logits(self.params, self.rows.contexts)
        return Update(self.policy, self.params, self.rows, logits, optimizer)

    def step(self, decide: Decide | None = None, *, resumed: bool = False) -> Step:
        """One update under a mask; None: under none.  `resumed`: as in `update`."""
        optimizer = self.update(resumed=resumed).optimizer
        params = dict(zip(self.params, optimizer.param_groups[0]["params"], strict=True))
        bandit.masked_gradient_step(self.policy, params, self.rows, decide or everything, optimizer)
        after = {name: p.detach() for name, p in params.items()}
        count = self.rows.tokens.shape[-1]
        return Step(self.policy, self.params, after, self.rows, self.rate / count)


def everything(update: Update) -> torch.Tensor:
    """The decision of no mask."""
    return torch.ones_like(update.rows.tokens, dtype=torch.bool)


@dataclass(frozen=True)
class Plan:
    """What a scene is made of.

    Attributes:
        sharing: of `SHARING`.
        mismatch: how `pi` came to differ from `mu`: ``noise`` on its parameters, or ``stale``: as
            many updates on real rewards; the others are rollouts by the parameters of `pi` after
            `distance` of noise, in a number format, tempered (1.25) or top-p truncated (0.95).
        distance: about the standard deviation of `log pi - log mu`, nats (``stale``: updates).
        spread: standard deviation of the logits at the start: more is less entropy.
        vocab_size, top_k, batch: V, K, and tokens of the rollout.
        optimizer, reach: the step moves a free token's logits by `reach A r` under plain gradient
            descent; under Adam every parameter moves by `reach`.
    """

    sharing: str = "network"
    mismatch: str = "noise"
    distance: float = 0.3
    spread: float = 1.5
    vocab_size: int = 100
    top_k: int = 20
    batch: int = 64
    optimizer: str = "sgd"
    reach: float = 1e-3

    @property
    def setting(self) -> Setting:
        """The training that makes a stale policy."""
        policy, width = SHARING[self.sharing]
        behavior = {
            "bf16": Behavior(weights="bf16", logits="bf16"),
            "fp8-row": Behavior(weights="fp8-row", logits="bf16"),
            "fp8-group": Behavior(weights="fp8-group", logits="bf16"),
            "tempered": Behavior(temperature=1.25),
            "top-p": Behavior(top_p=0.95),
        }.get(self.mismatch, Behavior())
        return Setting(
            policy=policy,
            width=width,
            spread=self.spread,
            contexts=16 if self.sharing == "table" else self.batch,
            vocab_size=self.vocab_size,
            reward="dense",
            advantage="plain",
            prompts=8,
            group=self.batch // 8,
            behavior=behavior,
            rate={"tabular": 0.1, "linear": 0.16 * width**-0.5, "network": 0.008}[policy],
            top_k=self.top_k,
        )


def scene(plan: Plan, seeds: range, label: str = "scene") -> Scene:
    """The scene of each seed; equal labels give common random numbers."""
    setting, streams = plan.setting, Streams(seeds, label)
    policy, behavior = bandit.POLICIES[setting.policy](
        streams,
        contexts=setting.contexts,
        vocab_size=setting.vocab_size,
        width=setting.width,
        spread=setting.spread,
    )
    table = REWARDS[setting.reward](streams, setting.contexts, setting.vocab_size)
    moments: dict[str, Any] = {}
    if plan.mismatch == "stale":
        params, moments = _trained(setting, streams, policy, behavior, table, int(plan.distance))
    else:
        params = _perturbed(streams, policy, behavior, plan.distance)
    sampler = behavior if plan.mismatch in ("noise", "stale") else params
    if plan.sharing == "table":
        rows = draw_rollout(setting, streams, policy, sampler, table, 10**6)
    else:
        rows = _one_in_each(setting, streams, policy, sampler, table)
    rate = plan.reach if plan.optimizer == "adam" else plan.reach * plan.batch
    return Scene(policy, params, rows, plan.optimizer, rate, moments)


def _one_in_each(
    setting: Setting, streams: Streams, policy: Policy, params: Params, table: torch.Tensor
) -> Rollout:
    """One token in each context."""
    contexts = torch.arange(setting.contexts).expand(len(streams.seeds), -1)
    log_mu = setting.behavior.log_probs(policy, params, contexts)
    tokens = bandit.sample(log_mu, streams.uniform("tokens", setting.contexts))
    rewards = table.gather(-1, tokens[..., None])[..., 0]
    return bandit.rollout(
        contexts, tokens, log_mu, rewards - (log_mu.exp() * table).sum(-1), setting.top_k
    )


def _perturbed(streams: Streams, policy: Policy, params: Params, distance: float) -> Params:
    """Parameters with noise that moves the logits by a standard deviation of `distance`."""
    noise = {name: streams.normal(f"noise {name}", *p.shape[1:]) for name, p in params.items()}
    # every tensor in proportion to its own size, seed by seed
    noise = {name: x * params[name].std(dim=(1, 2), keepdim=True) for name, x in noise.items()}
    everywhere = torch.arange(policy.contexts).expand(len(streams.seeds), -1)
    moved = forward(lambda p: policy.logits(p, everywhere), params, noise)
    scale = distance / moved.std(dim=(1, 2)).clamp_min(1e-12)
    return {
        name: p + scale.reshape(-1, *[1] * (p.dim() - 1)) * noise[name]
        for name, p in params.items()
    }


def _trained(
    setting: Setting,
    streams: Streams,
    policy: Policy,
    params: Params,
    table: torch.Tensor,
    updates: int,
) -> tuple[Params, dict[str, Any]]:
    """Parameters after Adam updates on fresh on-policy rollouts, and the state of the optimizer."""
    params = {name: p.clone().requires_grad_() for name, p in params.items()}
    optimizer = bandit.OPTIMIZERS["adam"](params, setting.rate)
    plain = replace(setting, behavior=Behavior())
    for update in range(updates):
        current = {name: p.detach() for name, p in params.items()}
        rows = draw_rollout(plain, streams, policy, current, table, update)
        bandit.masked_gradient_step(policy, params, rows, everything, optimizer)
    return {name: p.detach() for name, p in params.items()}, optimizer.state_dict()
