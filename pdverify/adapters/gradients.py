"""Judging a surrogate loss through its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def score_form(loss: Tensor, logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """The score-function form of a surrogate loss: its gradient, and the value that goes with it.

    A surrogate such as ``-A r`` has the gradient of ``-A sg(r) log pi_k`` and another value; only
    the gradient reaches the optimizer.  The value returned is ``sum(g log pi_k)`` over valid
    tokens, with ``g = d loss / d log pi_k``; the gradient returned is ``g``, untouched, on valid
    tokens and on padding.

    Args:
        loss: scalar.
        logprobs: float32 `[B, L]`, the log-probs that `loss` was computed from.
        response_mask: bool `[B, L]`.

    Returns:
        A scalar; `loss` itself where no gradient is asked for.
    """
    import torch

    if not (torch.is_grad_enabled() and logprobs.requires_grad and loss.requires_grad):
        return loss
    (slope,) = torch.autograd.grad(loss, logprobs)

    class Form(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, at: Tensor) -> Tensor:
            # r = 0 gives the limit 0 of r log pi_k, as in the definition
            term = torch.where(response_mask & (slope != 0), slope * at, torch.zeros_like(at))
            return term.sum()

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:
            return upstream * slope

    form: Tensor = Form.apply(logprobs)  # type: ignore[no-untyped-call]
    return form
