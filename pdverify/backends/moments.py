"""Sums over a vocabulary from which everything else follows, and how those of its parts are joined.

Weights are relative to the largest logit of the tokens summed, so nothing overflows, and a policy
whose sampled token has nearly all of the mass still keeps the digits of the others.  All fields
are float64 `[T]`.  Sums over disjoint parts of the vocabulary (tiles, chunks, ranks) join.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TailMoments:
    """Sums over the tokens outside an excluded set.

    `top` is the largest logit among them, 0 where there is none (all excluded or -inf);
    `s1`, `s2`, `s3` are the sums of `e^(z - top)`, of its squares and of its cubes.
    """

    top: Tensor
    s1: Tensor
    s2: Tensor
    s3: Tensor

    @property
    def log_mass(self) -> Tensor:
        """`log sum e^z`, -inf where no token is left."""
        return self.top + self.s1.log()


@dataclass(frozen=True)
class FullMoments:
    """Sums over the vocabulary without k, of both policies, logits z (training), y (behavior).

    With `d = (z - top_z) - (y - top_y)`: `s1`, `s2`, `s3` as in `TailMoments`; `m1` sums
    `e^(y - top_y)`, `x` sums `e^(z - top_z + y - top_y)`, `f` sums `e^(y - top_y) d`, `e1` sums
    `e^(z - top_z) d` and `e2` sums `e^2(z - top_z) d`.

    A token with both logits -inf contributes nothing; with z alone, f is -inf; with y alone, e1
    and e2 are +inf.
    """

    top_z: Tensor
    s1: Tensor
    s2: Tensor
    s3: Tensor
    top_y: Tensor
    m1: Tensor
    x: Tensor
    f: Tensor
    e1: Tensor
    e2: Tensor


def times(mass: Tensor, factor: Tensor) -> Tensor:
    """`mass * factor` with `0 * inf = 0`."""
    return torch.where(mass == 0, 0.0, mass * factor)


def _common_top(top: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of the tops `[..., n]` of sums that are not 0, and how far each rises to it.

    `[...]` and `[..., n]`; both are 0 for sums that are 0.
    """
    highest = torch.where(weight == 0, -torch.inf, top).amax(-1)
    highest = torch.where(torch.isneginf(highest), 0.0, highest)
    return highest, torch.where(weight == 0, 0.0, highest[..., None] - top)


def lowered(m: FullMoments, down_z: Tensor, down_y: Tensor) -> tuple[Tensor, ...]:
    """The sums `(s1, s2, s3, m1, x, f, e1, e2)` relative to tops that are higher by `down`.

    A side without mass in one policy has that policy's d relative to 0: its f, e1 are infinite or
    0, and `down` is 0 for it.
    """
    rz, ry = (-down_z).exp(), (-down_y).exp()
    shift = down_y - down_z  # every d moves by as much
    return (
        m.s1 * rz,
        m.s2 * rz**2,
        m.s3 * rz**3,
        m.m1 * ry,
        m.x * rz * ry,
        times(ry, m.f + shift * m.m1),
        times(rz, m.e1 + shift * m.s1),
        times(rz**2, m.e2 + shift * m.s2),
    )


def joined_tails(m: TailMoments) -> TailMoments:
    """Moments `[..., n]` of `n` disjoint sets of tokens together, `[...]`."""
    top, down = _common_top(m.top, m.s1)
    scale = (-down).exp()
    sums = m.s1 * scale, m.s2 * scale**2, m.s3 * scale**3
    return TailMoments(top, *(x.sum(-1) for x in sums))


def joined_full(m: FullMoments) -> FullMoments:
    """Moments `[..., n]` of `n` disjoint parts of the vocabulary together, `[...]`."""
    (top_z, down_z), (top_y, down_y) = _common_top(m.top_z, m.s1), _common_top(m.top_y, m.m1)
    s1, s2, s3, *others = (x.sum(-1) for x in lowered(m, down_z, down_y))
    return FullMoments(top_z, s1, s2, s3, top_y, *others)


def merge_tails(a: TailMoments, b: TailMoments) -> TailMoments:
    """Moments of two disjoint sets of tokens together."""
    return joined_tails(TailMoments(*_stacked(a, b)))


def merge_full(a: FullMoments, b: FullMoments) -> FullMoments:
    """Moments of two disjoint parts of the vocabulary together."""
    return joined_full(FullMoments(*_stacked(a, b)))


def _stacked(a: TailMoments | FullMoments, b: TailMoments | FullMoments) -> list[Tensor]:
    fields = zip(vars(a).values(), vars(b).values(), strict=True)
    return [torch.stack(pair, -1) for pair in fields]
