"""Trust-region masks in portable eager torch at real vocabulary sizes: ``torch-chunked``.

Must agree with `pdverify.definitions`.  One row at a time (more where rows are short), in buffers
that are allocated once and fit the cache: no temporary has the size of the logits.  Forward and
reverse KL and every top-K view come from one pass, the other divergences take a second sweep over
each row.

With `a = e^(z - max)`, `b = e^(y - max)` and `d = log a - log b` every moment is a dot product of
two vectors.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pdverify.backends.cell_functions import log_ratio
from pdverify.backends.engine import Engine
from pdverify.backends.losses import aggregate as aggregate
from pdverify.backends.masks import TorchBackend
from pdverify.backends.moments import FullMoments, TailMoments, times

SPAN = 2**13
"""Columns of a dot product in the working precision; the spans are added in float64."""

TILE = 1024
"""Rows of a buffer are whole tiles, summed one by one; a largest logit is looked for in one."""

NOWHERE = -1e30
"""Logit of a token to be left out: its probability is 0, and differences with it are finite."""

Z, Y, A, B, D, SQUARE = range(6)


@cache
def cache_size() -> int:
    """Bytes of this machine's second-level cache; 1 MiB where the system does not say."""
    try:
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or 2**20
    except (AttributeError, OSError, ValueError):
        return 2**20


class Buffer:
    """Vectors `[count, rows, V rounded up to whole tiles]` for a block of rows.

    Columns past the vocabulary are `NOWHERE` where logits are loaded.
    """

    def __init__(self, count: int, rows: int, logits: Tensor, compute: torch.dtype) -> None:
        self.size = logits.shape[-1]
        width = -(-self.size // TILE) * TILE
        self.vectors = torch.empty(count, rows, width, dtype=compute, device=logits.device)
        self.vectors[: Y + 1, :, self.size :] = NOWHERE
        self.spans = [x[0].split(SPAN) for x in self.vectors]

    def load(self, vector: int, logits: Tensor) -> Tensor:
        """Logits of a block, all or the first of the rows; returns the vector."""
        loaded = self.vectors[vector, : len(logits)]
        loaded[:, : self.size] = logits
        return loaded

    def dots(self, rows: int, *pairs: tuple[int, int]) -> Tensor:
        """Dot products of pairs of vectors, float64 `[len(pairs), rows]`."""
        if rows > 1:
            x = self.vectors[:, :rows]
            tiles = ((x[i] * x[j]).view(rows, -1, TILE).sum(-1) for i, j in pairs)
            return torch.stack([x.sum(-1, dtype=torch.float64) for x in tiles])
        spans = [zip(self.spans[i], self.spans[j], strict=True) for i, j in pairs]
        found = torch.stack([torch.dot(x, y) for pair in spans for x, y in pair])
        return found.view(len(pairs), -1).double().sum(-1, keepdim=True)

    def totals(self, rows: int, *vectors: int) -> Tensor:
        """Sums of vectors, float64 `[len(vectors), rows]`."""
        tiles = (self.vectors[i, :rows].view(rows, -1, TILE).sum(-1) for i in vectors)
        return torch.stack([x.sum(-1, dtype=torch.float64) for x in tiles])


def _largest(z: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its place, `[rows, 1]` each."""
    tiles = z.view(len(z), -1, TILE)
    top, tile = tiles.amax(-1).max(-1, keepdim=True)
    inside = tiles.gather(1, tile[..., None].expand(-1, -1, TILE))[:, 0].argmax(-1, keepdim=True)
    return _somewhere(top), tile * TILE + inside


def _somewhere(top: Tensor) -> Tensor:
    """A largest logit to subtract: 0 where no token is left."""
    return torch.where(top > NOWHERE, top, 0.0)


class TorchChunked(Engine):
    """Dot products, in buffers that are used again.

    Args:
        block: logits of a block of rows; None lets a CPU's second-level cache hold its vectors.
    """

    vectors = 6

    def usual_block(self, device: torch.device) -> int:
        if device.type == "cpu":
            return cache_size() // (self.vectors * 4)
        return super().usual_block(device)

    def tail(self, logits: Any, ids: Tensor, excluded: Tensor, compute: torch.dtype) -> TailMoments:
        parts = [torch.empty(4, 0, dtype=torch.float64, device=logits.device)]
        buffer: Buffer | None = None
        for rows in self.blocks(logits):
            buffer = buffer or Buffer(self.vectors, rows.stop - rows.start, logits, compute)
            z = buffer.load(Z, logits[rows])
            hidden = torch.where(excluded[rows], NOWHERE, z.gather(-1, ids[rows]))
            # amin: a slot that is kept may repeat an id that is left out
            z.scatter_reduce_(-1, ids[rows], hidden, "amin")
            top = _somewhere(z.amax(-1, keepdim=True))
            parts.append(torch.cat([top.T.double(), self.tail_sums(buffer, top)]))
        return TailMoments(*torch.cat(parts, 1))

    def tail_sums(self, buffer: Buffer, top: Tensor) -> Tensor:
        """Sums of a, its squares and cubes, float64 `[3, rows]`; logits are in Z."""
        rows = len(top)
        z, _, a, _, _, square = buffer.vectors[:, :rows]
        torch.sub(z, top, out=a).exp_()
        torch.mul(a, a, out=square)
        return torch.cat([buffer.totals(rows, A, SQUARE), buffer.dots(rows, (SQUARE, A))])

    def full(self, logits: Any, behavior: Any, tokens: Tensor, compute: torch.dtype) -> FullMoments:
        parts = [torch.empty(12, 0, dtype=torch.float64, device=logits.device)]
        buffer: Buffer | None = None
        holes = False
        for rows in self.blocks(logits):
            buffer = buffer or Buffer(self.vectors, rows.stop - rows.start, logits, compute)
            k = tokens[rows, None]
            z = buffer.load(Z, logits[rows]).scatter_(-1, k, NOWHERE)
            y = buffer.load(Y, behavior[rows]).scatter_(-1, k, NOWHERE)
            (top_z, best), top_y = _largest(z), _somewhere(y.amax(-1, keepdim=True))
            # the likeliest token apart, in float64: it may have nearly all of the mass
            apart = torch.cat([x.gather(-1, best) - top for x, top in ((z, top_z), (y, top_y))], -1)
            z.scatter_(-1, best, NOWHERE)
            y.scatter_(-1, best, NOWHERE)
            sums = self.full_sums(buffer, top_z, top_y, holes)
            if not holes and not sums.isfinite().all():
                holes = True  # -inf, in one policy or both
                sums = self.full_sums(buffer, top_z, top_y, holes)
            parts.append(torch.cat([top_z.T.double(), top_y.T.double(), sums, apart.T.double()]))
        top_z, top_y, s1, s2, s3, m1, x, f, e1, e2, z, y = torch.cat(parts, 1)
        one = torch.where(z == 0, 1.0, 0.0)
        b = y.to(compute).exp().double()
        d = log_ratio(z, y)
        bd, ad = times(b, d), times(one, d)
        return FullMoments(
            *(top_z, s1 + one, s2 + one, s3 + one, top_y, m1 + b, x + one * b),
            *(f + bd, e1 + ad, e2 + ad),
        )

    def full_sums(self, buffer: Buffer, top_z: Tensor, top_y: Tensor, holes: bool) -> Tensor:
        """Sums of a, a^2, a^3, b, ab, bd, ad, a^2 d, float64 `[8, rows]`; logits are in Z and Y.

        With `holes`, logits may be -inf, and sums are as `FullMoments` has them.
        """
        rows = len(top_z)
        z, y, a, b, d, square = buffer.vectors[:, :rows]
        torch.sub(z, top_z, out=a)
        torch.sub(y, top_y, out=b)
        torch.sub(a, b, out=d)
        if holes:
            return _with_holes(a, b)
        a.exp_()
        b.exp_()
        torch.mul(a, a, out=square)
        sums = buffer.totals(rows, A, SQUARE, B)
        dots = buffer.dots(rows, (SQUARE, A), (A, B), (B, D), (A, D), (SQUARE, D))
        return torch.stack([*sums[:2], dots[0], sums[2], *dots[1:]])


def _with_holes(log_a: Tensor, log_b: Tensor) -> Tensor:
    """`full_sums` where logits may be -inf."""
    a, b, d = log_a.exp(), log_b.exp(), log_ratio(log_a, log_b)
    square, gap = a * a, times(a, d)
    terms = a, square, square * a, b, a * b, times(b, d), gap, times(a, gap)
    return torch.stack([x.sum(-1) for x in terms]).double()


_backend = TorchBackend(TorchChunked())
divergence = _backend.divergence
coefficient = _backend.coefficient
keep_mask = _backend.keep_mask
predictive_mask = _backend.predictive_mask
log_prob = _backend.log_prob
policy_loss = _backend.policy_loss
predictive_policy_loss = _backend.predictive_policy_loss
