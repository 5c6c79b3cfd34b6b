"""Given logits as products of hidden states and a head, bit for bit: how ``linear-head`` is judged.

`exact_products` has the functions of `linear_head` for logits `[B, L, V]`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdverify.backends import linear_head
from pdverify.backends.engine import NEG_INF
from pdverify.backends.head_logits import LinearHead
from pdverify.backends.losses import Aggregation, aggregate

GROUP = 64
"""Rows of a product at most: its cost grows with their square."""


def exact_heads(*logits: Tensor) -> list[tuple[Tensor, list[LinearHead]]]:
    """`(rows, heads)` of groups of rows, together all of `logits`, each `[T, V]`.

    The hidden states of a group are the identity and the head is the transpose of its logits:
    each logit is one product by 1 and sums of zeros, exact in any order.  Where -inf and 0 would
    meet in a product, -inf comes from the bias instead, so the rows of a group have it in the
    same places; a row with +inf or NaN is alone.
    """
    members: dict[object, list[int]] = defaultdict(list)
    zero = torch.stack([torch.isneginf(x) for x in logits], 1).cpu().numpy()
    alone = torch.stack([(x.isnan() | torch.isposinf(x)).any(-1) for x in logits]).any(0).tolist()
    for row, place in enumerate(zero):
        members[row if alone[row] else place.tobytes()].append(row)
    groups = []
    for found in members.values():
        for start in range(0, len(found), GROUP):
            rows = torch.tensor(found[start : start + GROUP], device=logits[0].device)
            groups.append((rows, [_head(x[rows]) for x in logits]))
    return groups


def _head(logits: Tensor) -> LinearHead:
    zero = torch.isneginf(logits[0])
    bias = torch.zeros_like(logits[0]).masked_fill(zero, NEG_INF) if zero.any() else None
    identity = torch.eye(len(logits), dtype=logits.dtype, device=logits.device)
    return LinearHead(identity, logits.masked_fill(zero, 0.0).mT, bias)


class ExactProducts:
    """Functions of `linear_head` on logits `[B, L, V]`, through `exact_heads`."""

    def divergence(self, logits: Tensor, tokens: Tensor, **options: Any) -> Tensor:
        """See `TorchBackend.divergence`."""
        return _by_groups(linear_head.divergence, logits, (tokens,), options)

    def coefficient(self, logits: Tensor, tokens: Tensor, **options: Any) -> Tensor:
        """See `TorchBackend.coefficient`."""
        return _by_groups(linear_head.coefficient, logits, (tokens,), options)

    def keep_mask(
        self, logits: Tensor, tokens: Tensor, advantages: Tensor, **options: Any
    ) -> Tensor:
        """See `TorchBackend.keep_mask`."""
        return _by_groups(linear_head.keep_mask, logits, (tokens, advantages), options)

    def policy_loss(
        self,
        logits: Tensor,
        tokens: Tensor,
        advantages: Tensor,
        behavior_logprobs: Tensor,
        keep: Tensor,
        *,
        response_mask: Tensor | None = None,
        aggregation: Aggregation = "token-mean",
        **options: Any,
    ) -> Tensor:
        """See `TorchBackend.policy_loss`; the gradient at the logits is that at the weights."""
        options |= {"response_mask": response_mask, "aggregation": "none"}
        arguments = tokens, advantages, behavior_logprobs, keep
        loss = _by_groups(linear_head.policy_loss, logits, arguments, options)
        return aggregate(
            loss, torch.ones_like(keep) if response_mask is None else response_mask, aggregation
        )


exact_products = ExactProducts()


def _by_groups(
    function: Callable[..., Tensor],
    logits: Tensor,
    arguments: tuple[Tensor, ...],
    options: dict[str, Any],
) -> Tensor:
    lead = arguments[0].shape

    def flat(x: Any) -> Any:
        return x.reshape(-1, *x.shape[len(lead) :]) if isinstance(x, Tensor) else x

    def pick(x: Any, rows: Tensor) -> Any:
        return x[rows] if isinstance(x, Tensor) else x

    behavior = options.get("behavior_logits")
    given = [flat(x) for x in (logits, behavior) if x is not None]
    arguments = tuple(map(flat, arguments))
    options = {name: flat(x) for name, x in options.items()}
    parts, order = [], []
    for rows, heads in exact_heads(*given):
        some = {name: pick(x, rows) for name, x in options.items()}
        if behavior is not None:
            some["behavior_logits"] = heads[1]
        parts.append(function(heads[0], *(x[rows] for x in arguments), **some))
        order.append(rows)
    return torch.cat(parts)[torch.cat(order).argsort()].reshape(lead)
