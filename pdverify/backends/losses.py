"""The log-prob of the sampled token with its gradient, and the aggregation of a token loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from pdverify.backends.engine import Engine

Aggregation: TypeAlias = Literal["none", "token-mean", "sequence-mean", "fixed-length"]

Evaluate: TypeAlias = Callable[[Any], tuple[Tensor, ...]]
"""From detached logits `[T, V]`: log-probs of k (float64 `[T]`), log-normalizers, and more."""


class _LogProb(torch.autograd.Function):
    """`log pi_k` of each row; what `evaluate` finds besides carries no gradient.

    Between the passes it keeps the logits, which the caller has anyway, and `[T]` numbers.
    """

    @staticmethod
    def forward(
        logits: Tensor,
        tokens: Tensor,
        engine: Engine,
        compute: torch.dtype,
        evaluate: Evaluate,
    ) -> tuple[Tensor, ...]:
        log_pi, norm, *others = evaluate(logits)
        return log_pi.to(compute), norm, *others

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, tokens, engine, _, _ = inputs
        ctx.save_for_backward(logits, tokens, *output[:2])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.engine = engine

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if grad is None:
            return None, None, None, None, None
        logits, tokens, log_pi, norm = ctx.saved_tensors
        slope = _Slope.apply(logits, tokens, log_pi, norm, grad, ctx.engine)  # type: ignore[no-untyped-call]
        return slope, None, None, None, None


class _Slope(torch.autograd.Function):
    """The gradient of `_LogProb`; apart, because engines write into buffers."""

    @staticmethod
    def forward(
        logits: Tensor, tokens: Tensor, log_pi: Tensor, norm: Tensor, grad: Tensor, engine: Engine
    ) -> Tensor:
        slope: Tensor = engine.softmax_gradient(logits, norm, grad)
        # 1 - pi_k through expm1: it cancels where k has nearly all of the mass
        at_k = torch.where(grad == 0, 0.0, -grad * torch.expm1(log_pi))
        return slope.scatter_(-1, tokens[:, None], at_k[:, None].to(slope.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise NotImplementedError("policy losses have first derivatives only")


def log_prob(
    engine: Engine, logits: Any, tokens: Tensor, compute: torch.dtype, evaluate: Evaluate
) -> tuple[Tensor, ...]:
    """Log-prob of `tokens` `[T]` (nats, in `compute`), and what `evaluate` finds besides.

    Engines that read logits from something else have a `log_prob` of their own.
    """
    own = getattr(engine, "log_prob", None)
    if own is not None:
        found: tuple[Tensor, ...] = own(logits, tokens, compute, evaluate)
        return found
    log_pi, _, *others = _LogProb.apply(logits, tokens, engine, compute, evaluate)  # type: ignore[no-untyped-call]
    return log_pi, *others


def aggregate(loss: Tensor, valid: Tensor, aggregation: Aggregation) -> Tensor:
    """Aggregate a per-token loss `[B, L]` over the `valid` tokens; see `policy_loss`."""
    if aggregation == "none":
        return loss
    lengths = valid.sum(-1)
    if aggregation == "token-mean":
        return loss.sum() / lengths.sum().clamp_min(1)
    if aggregation == "sequence-mean":
        per_sequence = loss.sum(-1) / lengths.clamp_min(1)
        return per_sequence.sum() / (lengths > 0).sum().clamp_min(1)
    if aggregation == "fixed-length":
        return loss.sum() / valid.numel()
    raise ValueError(
        f"aggregation = {aggregation}: known: none, token-mean, sequence-mean, fixed-length"
    )
