"""How a backend reads logits: the four sums over the vocabulary that its functions are made of.

`Engine` has them in careful plain torch, a block of rows at a time; a backend overrides what it
does faster.  Rows are flattened: `T` rows of `V` logits.  Results are float64 `[T]`, whatever the
arithmetic inside a block.

A log-normalizer `log sum e^z` is kept as `norm`, float64 `[T, 2]`: an anchor (the row's largest
logit) and the rest, so that `log pi = (z - anchor) - rest` keeps its digits under any offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pdverify.backends.cell_functions import cell_functions, log_ratio
from pdverify.backends.moments import FullMoments, TailMoments, times

CPU_BLOCK = 2**18
"""Logits per block of rows on a CPU: the temporaries of a block stay in its cache."""

DEVICE_BLOCK = 2**27
"""Logits per block of rows elsewhere, which bounds the memory of the temporaries."""

NEG_INF = float("-inf")


def finite_or_zero(top: Tensor) -> Tensor:
    """A largest logit to subtract: 0 where there is none."""
    return torch.where(torch.isneginf(top), 0.0, top)


def centered(logits: Tensor, norm: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """`(z', rest)` with `log pi = z' - rest`, `[T, V]` and `[T, 1]` in `compute`.

    The anchor is one of the logits, hence representable: a large common offset costs nothing.
    """
    anchor, rest = norm.to(compute).unbind(-1)
    return logits.to(compute) - anchor[:, None], rest[:, None]


class Engine:
    """Sums over the vocabulary, in plain torch.

    Args:
        block: logits held by the temporaries of one block of rows; None chooses by device.
    """

    from_moments: frozenset[str] = frozenset({"kl", "reverse-kl"})
    """Divergences that `full` alone settles in float32; the others, and float64, take a second
    sweep, `cell_sums`."""

    def __init__(self, block: int | None = None) -> None:
        self.block = block

    def rows(self, logits: Any, lead: tuple[int, ...], name: str, size: int | None = None) -> Any:
        """The argument `name` as `T` rows of logits.

        `lead` is the shape of the tokens, `size` the vocabulary size where it is known.

        Raises:
            ValueError: another shape.
        """
        size = size or (logits.shape[-1] if logits.dim() else 0)
        if tuple(logits.shape) != (*lead, size):
            raise ValueError(
                f"{name}.shape = {tuple(logits.shape)}: expected {(*lead, size or 'V')}"
            )
        return logits.reshape(-1, size)

    def usual_block(self, device: torch.device) -> int:
        """Logits of a block where the caller chose no number."""
        return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK

    def blocks(self, logits: Tensor) -> Iterator[slice]:
        """Blocks of rows whose temporaries are small."""
        count, size = logits.shape
        step = max(1, (self.block or self.usual_block(logits.device)) // size)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))

    def over_blocks(
        self, logits: Tensor, function: Callable[[slice], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """`function` of every block of rows, joined, in float64."""
        parts = [function(rows) for rows in self.blocks(logits)] or [function(slice(0, 0))]
        return tuple(torch.cat(column).double() for column in zip(*parts, strict=True))

    def gather(self, logits: Any, ids: Tensor) -> Tensor:
        """Logits at `ids` `[T, M]`, float64."""
        found: Tensor = logits.gather(-1, ids).double()
        return found

    def tail(self, logits: Any, ids: Tensor, excluded: Tensor, compute: torch.dtype) -> TailMoments:
        """Moments of the tokens outside a set.

        Args:
            logits: `[T, V]`, any floating dtype.
            ids: int64 `[T, M]`, in range; an id may appear more than once.
            excluded: bool `[T, M]`; `ids[excluded]` are left out.
            compute: float32 or float64, the arithmetic inside a block.
        """

        def sums(rows: slice) -> tuple[Tensor, ...]:
            z = logits[rows].to(compute)
            hidden = torch.where(excluded[rows], NEG_INF, z.gather(-1, ids[rows]))
            # amin: a slot that is kept may repeat an id that is left out
            z = z.scatter_reduce(-1, ids[rows], hidden, "amin")
            top = finite_or_zero(z.amax(-1))
            weight = (z - top[:, None]).exp()
            square = weight * weight
            return top, weight.sum(-1), square.sum(-1), (square * weight).sum(-1)

        return TailMoments(*self.over_blocks(logits, sums))

    def full(self, logits: Any, behavior: Any, tokens: Tensor, compute: torch.dtype) -> FullMoments:
        """Moments of both policies over the vocabulary without the sampled token.

        Args:
            logits, behavior: `[T, V]`, training and behavior logits.
            tokens: int64 `[T]`.
            compute: float32 or float64, the arithmetic inside a block.
        """

        def sums(rows: slice) -> tuple[Tensor, ...]:
            k = tokens[rows, None]
            z = logits[rows].to(compute).scatter(-1, k, NEG_INF)
            y = behavior[rows].to(compute).scatter(-1, k, NEG_INF)
            top_z, top_y = finite_or_zero(z.amax(-1)), finite_or_zero(y.amax(-1))
            best = z.argmax(-1, keepdim=True)
            z, y = z - top_z[:, None], y - top_y[:, None]
            d, ez, ey = log_ratio(z, y), z.exp(), y.exp()
            # the likeliest token apart, in float64: it may have nearly all of the mass
            a0, b0, d0 = (x.gather(-1, best)[:, 0].double() for x in (ez, ey, d))
            d, ez, ey = (x.scatter(-1, best, 0.0) for x in (d, ez, ey))
            square = ez * ez

            def total(x: Tensor, apart: Tensor) -> Tensor:
                return x.sum(-1).double() + apart

            return (
                top_z,
                total(ez, a0),
                total(square, a0),
                total(square * ez, a0),
                top_y,
                total(ey, b0),
                total(ez * ey, a0 * b0),
                total(times(ey, d), times(b0, d0)),
                total(times(ez, d), times(a0, d0)),
                total(times(square, d), times(a0, d0)),
            )

        return FullMoments(*self.over_blocks(logits, sums))

    def cell_sums(
        self,
        logits: Any,
        behavior: Any,
        tokens: Tensor,
        norm: Tensor,
        behavior_norm: Tensor,
        name: str,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over `i != k` of a divergence's cells, of its moments h, and of `h pi`.

        An infinite h where `pi = 0` counts 0 in `h pi`.

        Args:
            logits, behavior, tokens, compute: as in `full`.
            norm, behavior_norm: float64 `[T, 2]`, log-normalizers of both policies.
            name: a divergence of the registry.
        """
        cell, moment = cell_functions(name)

        def sums(rows: slice) -> tuple[Tensor, ...]:
            z, rest_z = centered(logits[rows], norm[rows], compute)
            y, rest_y = centered(behavior[rows], behavior_norm[rows], compute)
            k = tokens[rows, None]
            # differences of logits first: exact where the two policies are close
            gap = log_ratio(z, y) - torch.where(
                torch.isneginf(z) & torch.isneginf(y), 0.0, rest_z - rest_y
            )
            gap = gap.scatter(-1, k, 0.0)
            pi = (z - rest_z).exp().scatter(-1, k, 0.0)
            mu = (y - rest_y).exp().scatter(-1, k, 0.0)
            h = moment(mu, pi, gap)
            return cell(mu, pi, gap).sum(-1), h.sum(-1), times(pi, h).sum(-1)

        cells, moments, weighted = self.over_blocks(logits, sums)
        return cells, moments, weighted

    def softmax_gradient(self, logits: Any, norm: Tensor, grad: Tensor) -> Tensor:
        """`-grad_t pi_i`, `[T, V]` in the logits' dtype: the gradient of `log pi_k` for `i != k`.

        A row with `grad_t = 0` is 0, whatever its logits hold.

        Args:
            logits: `[T, V]`.
            norm: float64 `[T, 2]`, their log-normalizer.
            grad: float32 or float64 `[T]`.
        """
        out = torch.empty_like(logits)
        for rows in self.blocks(logits):
            z, rest = centered(logits[rows], norm[rows], grad.dtype)
            slope = -grad[rows, None] * (z - rest).exp()
            out[rows] = torch.where(grad[rows, None] == 0, 0.0, slope)
        return out
