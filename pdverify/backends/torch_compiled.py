"""Trust-region masks through torch.compile: ``torch-compiled``.

Must agree with `pdverify.definitions`.  The sums of `pdverify.backends.engine`, each compiled into
one kernel that reads a few rows at a time, tile by tile.  Vocabularies of less than a tile are
left to the plain sums.  Shapes are dynamic: one
compilation serves every batch and vocabulary of a dtype.  Needs what torch.compile needs (a C++
compiler on a CPU, triton on a GPU); without it the backend is unavailable, it never falls back.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor

from pdverify.backends.cell_functions import cell_functions, log_ratio
from pdverify.backends.engine import NEG_INF, Engine, centered, finite_or_zero
from pdverify.backends.losses import aggregate as aggregate
from pdverify.backends.masks import TorchBackend
from pdverify.backends.moments import (
    FullMoments,
    TailMoments,
    joined_full,
    joined_tails,
    merge_full,
    times,
)

CPU_ROWS = 8
"""Rows of which a kernel needs a copy, or writes one."""

READ_ROWS = 32
"""Rows that a kernel reads where they lie, tile by tile."""

TILE = 1024
"""Columns that are summed in the working precision; the tiles are joined in float64."""

PARTS = 8
"""Parts of a tile that are compared side by side: a running maximum waits for itself."""


def unavailable() -> str | None:
    """Why torch.compile cannot be used here, or None."""
    if torch._dynamo.config.disable:
        return "torch.compile is switched off (TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE)"
    if torch.cuda.is_available():
        found = importlib.util.find_spec("triton")
        return None if found else "torch.compile needs triton on a GPU: pip install triton"
    names = [os.environ.get("CXX", "g++"), "g++", "clang++"]
    if any(shutil.which(name) for name in names):
        return None
    return "torch.compile needs a C++ compiler on a CPU: apt install g++, or set CXX"


VERSIONS = 64
"""Kernels of one function: logits dtype x arithmetic, and a few special shapes of each."""


def _compiled(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    compiled = torch.compile(function, dynamic=True, fullgraph=True)

    @wraps(function)
    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._dynamo.config.patch(recompile_limit=VERSIONS):
            found: tuple[Tensor, ...] = compiled(*(_kernel_input(x) for x in tensors))
            return found

    return call


def _kernel_input(x: Tensor) -> Tensor:
    """The same memory, but with two rows at least and no base.

    A single row, and the shape of the tensor that this is a view of, would each be compiled for.
    """
    x = x.expand(2, *x.shape[1:]) if len(x) == 1 else x
    memory = x.untyped_storage()
    return x.new_empty(0).set_(memory, x.storage_offset(), x.shape, x.stride())


def _largest(tile: Tensor) -> Tensor:
    """The largest logit of each tile, 0 where all are -inf."""
    parts = list(tile.unfold(-1, TILE // PARTS, TILE // PARTS).unbind(-2))
    while len(parts) > 1:
        parts = [torch.maximum(x, y) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return finite_or_zero(parts[0].amax(-1))


@_compiled
def _tail(z: Tensor) -> tuple[Tensor, ...]:
    """Fields of `TailMoments` of tiles `[rows, n, TILE]`, `[rows, n]` each."""
    top = _largest(z)
    a = (z - top[..., None]).exp()
    square = a * a
    return top, a.sum(-1), square.sum(-1), (square * a).sum(-1)


def _moments(z: Tensor, y: Tensor, like: Tensor, holes: bool) -> tuple[Tensor, ...]:
    """Fields of `FullMoments` of tiles `[rows, n, TILE]`; logits may be -inf with `holes` only."""
    top_z, top_y = _largest(z).to(like.dtype), _largest(y).to(like.dtype)
    z, y = z.to(like.dtype) - top_z[..., None], y.to(like.dtype) - top_y[..., None]
    a, b, d = z.exp(), y.exp(), log_ratio(z, y) if holes else z - y
    ad, bd = (times(a, d), times(b, d)) if holes else (a * d, b * d)
    square, change = a * a, times(a, ad) if holes else a * ad
    sums = a, square, square * a, b, a * b, bd, ad, change
    s1, s2, s3, *others = (x.sum(-1) for x in sums)
    return top_z, s1, s2, s3, top_y, *others


_whole = _compiled(partial(_moments, holes=False))
_with_holes = _compiled(partial(_moments, holes=True))


def _total(x: Tensor) -> Tensor:
    return x.sum(-1, dtype=torch.float64)


@cache
def _cells(name: str) -> Callable[..., Any]:
    cell, moment = cell_functions(name)

    def cells(
        z: Tensor, y: Tensor, k: Tensor, norm: Tensor, behavior_norm: Tensor
    ) -> tuple[Tensor, ...]:
        others = torch.arange(z.shape[-1], device=z.device) != k[:, None]
        z, rest_z = centered(z, norm, z.dtype)
        y, rest_y = centered(y, behavior_norm, y.dtype)
        shift = torch.where(torch.isneginf(z) & torch.isneginf(y), 0.0, rest_z - rest_y)
        gap = torch.where(others, log_ratio(z, y) - shift, 0.0)
        pi = torch.where(others, (z - rest_z).exp(), 0.0)
        mu = torch.where(others, (y - rest_y).exp(), 0.0)
        h = moment(mu, pi, gap)
        return _total(cell(mu, pi, gap)), _total(h), _total(times(pi, h))

    return _compiled(cells)


@_compiled
def _gradient(z: Tensor, norm: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    centered_z, rest = centered(z, norm, grad.dtype)
    slope = -grad[:, None] * (centered_z - rest).exp()
    return (torch.where(grad[:, None] == 0, 0.0, slope).to(z.dtype),)


class TorchCompiled(Engine):
    """One compiled kernel for each sum."""

    def blocks(self, logits: Tensor, rows: int = CPU_ROWS) -> Iterator[slice]:
        """Blocks of rows, none of a single row: a kernel would be compiled anew for it."""
        count, size = logits.shape
        if logits.device.type == "cpu":
            step = self.block // size if self.block else rows
        else:
            step = next(super().blocks(logits)).stop
        step = max(step, 2)
        start = 0
        while start < count:
            stop = count if count - start <= step + 1 else start + step
            yield slice(start, stop)
            start = stop

    def tail(self, logits: Any, ids: Tensor, excluded: Tensor, compute: torch.dtype) -> TailMoments:
        size = logits.shape[-1]
        width = -(-size // TILE) * TILE
        if not len(logits):
            return super().tail(logits, ids, excluded, compute)

        def sums(rows: slice) -> tuple[Tensor, ...]:
            z = logits.new_full((rows.stop - rows.start, width), NEG_INF, dtype=compute)
            z[:, :size] = logits[rows]
            hidden = torch.where(excluded[rows], NEG_INF, z.gather(-1, ids[rows]))
            # amin: a slot that is kept may repeat an id that is left out
            z.scatter_reduce_(-1, ids[rows], hidden, "amin")
            tiles = (x[: len(z)].double() for x in _tail(z.unflatten(-1, (-1, TILE))))
            return tuple(vars(joined_tails(TailMoments(*tiles))).values())

        return TailMoments(*self.over_blocks(logits, sums))

    def full(self, logits: Any, behavior: Any, tokens: Tensor, compute: torch.dtype) -> FullMoments:
        tiles = logits.shape[-1] // TILE
        like = torch.empty(2, dtype=compute, device=tokens.device)
        if not tiles or not len(logits):
            return super().full(logits, behavior, tokens, compute)

        def sums(rows: slice) -> tuple[Tensor, ...]:
            z, y, k = logits[rows], behavior[rows], tokens[rows, None]
            main = [x[:, : tiles * TILE].unflatten(-1, (tiles, TILE)) for x in (z, y)]
            found = torch.stack(_whole(*main, like))[:, : len(k)].double()
            if not found.isfinite().all():
                found = torch.stack(_with_holes(*main, like))[:, : len(k)].double()
            # apart, with care: k's tile, that of the likeliest other, and what no tile holds
            at_k = k // TILE
            tops = torch.cat([found[0], torch.zeros_like(found[0, :, :1])], -1)
            best = tops.scatter(-1, at_k, NEG_INF)[:, :tiles].argmax(-1, keepdim=True)
            apart = torch.cat([at_k, best], -1)
            left_out = torch.zeros(len(k), tiles + 1, dtype=torch.bool, device=k.device)
            found[:, left_out.scatter(-1, apart, True)[:, :tiles]] = 0.0
            rest = self._apart(z, y, k, apart, compute)
            whole = joined_full(FullMoments(*found))
            return tuple(vars(merge_full(whole, rest)).values())

        parts = [sums(rows) for rows in self.blocks(logits, READ_ROWS)]
        return FullMoments(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _apart(
        self, z: Tensor, y: Tensor, k: Tensor, tiles: Tensor, compute: torch.dtype
    ) -> FullMoments:
        """Moments of some tiles and of the columns after the last whole one, without k."""
        size = z.shape[-1]
        after = size // TILE * TILE
        columns = tiles[..., None] * TILE + torch.arange(TILE, device=k.device)
        last = torch.arange(after, size, device=k.device).expand(len(k), -1)
        columns = torch.cat([columns.flatten(1), last], -1)
        # not twice: the columns after the last tile as k's tile, and k's tile as the likeliest
        again = torch.cat([tiles[:, :1] * TILE >= after, tiles[:, 1:] == tiles[:, :1]], -1)
        inside = columns.clamp(max=size - 1)
        found = []
        for x in (z, y):
            taken = x.gather(-1, inside)
            taken[:, : 2 * TILE].view(-1, 2, TILE)[again] = NEG_INF
            found.append(taken)
        at = torch.where(k < after, k % TILE, 2 * TILE + k - after)[:, 0]
        return Engine().full(found[0], found[1], at, compute)

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
        if not len(logits):
            return super().cell_sums(logits, behavior, tokens, norm, behavior_norm, name, compute)

        def sums(rows: slice) -> tuple[Tensor, ...]:
            z, y = logits[rows].to(compute), behavior[rows].to(compute)
            found = _cells(name)(z, y, tokens[rows], norm[rows], behavior_norm[rows])
            return tuple(x[: len(z)] for x in found)

        cells, moments, weighted = self.over_blocks(logits, sums)
        return cells, moments, weighted

    def softmax_gradient(self, logits: Any, norm: Tensor, grad: Tensor) -> Tensor:
        out = torch.empty_like(logits)
        for rows in self.blocks(logits):
            (slope,) = _gradient(logits[rows], norm[rows], grad[rows])
            out[rows] = slope[: rows.stop - rows.start]
        return out


_backend = TorchBackend(TorchCompiled())
divergence = _backend.divergence
coefficient = _backend.coefficient
keep_mask = _backend.keep_mask
predictive_mask = _backend.predictive_mask
log_prob = _backend.log_prob
policy_loss = _backend.policy_loss
predictive_policy_loss = _backend.predictive_policy_loss
