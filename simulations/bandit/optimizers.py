"""Optimizers by name: torch's own, which treat every number, hence every seed, by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from pdverify.registry import Registry
from simulations.bandit.policies import Params

Make: TypeAlias = Callable[[Params, float], torch.optim.Optimizer]
"""`(parameters, learning rate) -> optimizer`; parameters are leaves that require gradients."""

OPTIMIZERS: Registry[Make] = Registry("optimizer")


def sgd(params: Params, rate: float) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(list(params.values()), lr=rate)


def momentum(params: Params, rate: float) -> torch.optim.Optimizer:
    """Gradient descent with heavy-ball momentum 0.9."""
    return torch.optim.SGD(list(params.values()), lr=rate, momentum=0.9)


def adam(params: Params, rate: float) -> torch.optim.Optimizer:
    """Adam with betas 0.9 and 0.95."""
    return torch.optim.Adam(list(params.values()), lr=rate, betas=(0.9, 0.95))


OPTIMIZERS.add("sgd", sgd)
OPTIMIZERS.add("momentum", momentum)
OPTIMIZERS.add("adam", adam)
