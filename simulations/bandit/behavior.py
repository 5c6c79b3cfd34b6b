"""How a rollout engine's policy differs from the trainer's: numbers, temperature, truncation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pdverify.formats import storage
from simulations.bandit.policies import Params, Policy


def rounded(x: Tensor, number_format: str) -> Tensor:
    """`x` `[..., R, C]` in the values of a number format or scaled form of the registry, float64.

    Raises:
        UnknownName: no registry has it.
    """
    if number_format == "fp64":
        return x
    return torch.from_numpy(storage(number_format).round(x.detach().numpy())).double()


def straight_through(params: Params, number_format: str) -> Params:
    """Parameters in a number format, whose gradients reach the unrounded ones as they are."""
    if number_format == "fp64":
        return params
    return {name: p + (rounded(p, number_format) - p).detach() for name, p in params.items()}


@dataclass(frozen=True)
class Behavior:
    """What a rollout engine makes of the parameters it was given.

    Attributes:
        weights: number format of the parameters.
        logits: number format of the logits.
        temperature: divides the logits, > 0.
        top_p: mass that is kept, in (0, 1]; the rest of the vocabulary has probability zero.
    """

    weights: str = "fp64"
    logits: str = "fp64"
    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        storage(self.weights), storage(self.logits)
        if not self.temperature > 0:
            raise ValueError(f"temperature = {self.temperature}: expected > 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: expected in (0, 1]")

    def log_probs(self, policy: Policy, params: Params, contexts: Tensor) -> Tensor:
        """`log mu` of contexts `[S, B]`, `[S, B, V]` in nats, -inf where truncated."""
        with torch.no_grad():
            given = {name: rounded(p, self.weights) for name, p in params.items()}
            z = rounded(policy.logits(given, contexts), self.logits) / self.temperature
            log_mu = torch.log_softmax(z, -1)
            if self.top_p == 1:
                return log_mu
            ordered, places = log_mu.sort(dim=-1, descending=True, stable=True)
            before = ordered.exp().cumsum(-1) - ordered.exp()
            cut = torch.where(before < self.top_p, ordered, -math.inf)
            kept = torch.empty_like(log_mu).scatter_(-1, places, cut)
            return torch.log_softmax(kept, -1)
