"""Softmax policies: free logits, linear in shared features, or a small network.

Parameters are a dict of float64 tensors `[S, ...]`, the last layer's last; a policy is a pure
function of them.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pdverify.registry import Registry
from simulations.bandit.streams import Streams

Params: TypeAlias = dict[str, Tensor]

TANH_SQUARE = 0.3943
"""Mean of `tanh(g)^2` over a standard normal g: makes the length of hidden states about 1."""


class Policy:
    """Logits `h W^T` from hidden states `h` and the last layer `W`, the parameter ``head``.

    Attributes:
        features: `[S, X, d]`, unit vectors that describe the contexts; not trained.
    """

    def __init__(self, features: Tensor) -> None:
        self.features = features

    @property
    def contexts(self) -> int:
        """Number of contexts `X`."""
        return self.features.shape[1]

    def hidden(self, params: Params, contexts: Tensor) -> Tensor:
        """Hidden states before the last layer, `[S, B, d]`, of contexts `[S, B]` (int64)."""
        return _rows(self.features, contexts)

    def logits(self, params: Params, contexts: Tensor) -> Tensor:
        """Logits `[S, B, V]` of contexts `[S, B]`."""
        return self.hidden(params, contexts) @ params["head"].mT

    def kernel(self, params: Params, contexts: Tensor) -> Tensor:
        """Products of hidden states, `[S, B, B]`: how a step of the last layer couples tokens."""
        h = self.hidden(params, contexts)
        return torch.einsum("sbd,scd->sbc", h, h)


class Tabular(Policy):
    """Free logits: the parameter ``table`` `[S, X, V]` is the logits."""

    def __init__(self, count: int, contexts: int) -> None:
        super().__init__(torch.empty(count, contexts, 0))

    def logits(self, params: Params, contexts: Tensor) -> Tensor:
        return _rows(params["table"], contexts)

    def kernel(self, params: Params, contexts: Tensor) -> Tensor:
        return (contexts[:, :, None] == contexts[:, None, :]).double()


class Network(Policy):
    """One hidden layer of tanh units, the parameter ``body`` `[S, h, d]`, under the last layer."""

    def hidden(self, params: Params, contexts: Tensor) -> Tensor:
        body = params["body"]
        scale = (body.shape[1] * TANH_SQUARE) ** -0.5
        return (super().hidden(params, contexts) @ body.mT).tanh().mul(scale)


class Factory(Protocol):
    """Makes a policy and its first parameters.

    Shapes: `width` is d of a linear policy and the number of hidden units of a network; logits
    have standard deviation `spread` at the start, about.
    """

    def __call__(
        self,
        streams: Streams,
        *,
        contexts: int,
        vocab_size: int,
        width: int = 8,
        spread: float = 1.0,
    ) -> tuple[Policy, Params]: ...


POLICIES: Registry[Factory] = Registry("policy")


def tabular(
    streams: Streams, *, contexts: int, vocab_size: int, width: int = 8, spread: float = 1.0
) -> tuple[Policy, Params]:
    """Free logits; `width` says nothing here."""
    table = spread * streams.normal("table", contexts, vocab_size)
    return Tabular(len(streams.seeds), contexts), {"table": table}


def linear(
    streams: Streams, *, contexts: int, vocab_size: int, width: int = 8, spread: float = 1.0
) -> tuple[Policy, Params]:
    """Linear in `width` shared features."""
    head = spread * streams.normal("head", vocab_size, width)
    return Policy(_features(streams, contexts, width)), {"head": head}


def network(
    streams: Streams, *, contexts: int, vocab_size: int, width: int = 8, spread: float = 1.0
) -> tuple[Policy, Params]:
    """A network with `width` hidden units on 16 features."""
    size = 16
    features = _features(streams, contexts, size) * size**0.5
    body = streams.normal("body", width, size) / size**0.5
    head = spread * streams.normal("head", vocab_size, width)
    return Network(features), {"body": body, "head": head}


POLICIES.add("tabular", tabular)
POLICIES.add("linear", linear)
POLICIES.add("network", network)


def _features(streams: Streams, contexts: int, width: int) -> Tensor:
    return torch.nn.functional.normalize(streams.normal("features", contexts, width), dim=-1)


def _rows(table: Tensor, contexts: Tensor) -> Tensor:
    return table[torch.arange(len(table))[:, None], contexts]
