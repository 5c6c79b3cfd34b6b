"""Sums over a vocabulary from which everything else follows, and how two of them are merged.

Weights are relative to the largest logit of the tokens summed, so nothing overflows, and a policy
whose sampled token has nearly all of the mass still keeps the digits of the others.  All fields
are float64 `[T]`.  Sums over disjoint parts of the vocabulary (tiles, chunks, ranks) merge.
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


def _rise(top: Tensor, weight: Tensor, other_top: Tensor, other_weight: Tensor) -> Tensor:
    """How far the merged top lies above `top` (>= 0); 0 for a sum without tokens."""
    higher = (weight != 0) & (other_weight != 0) & (other_top > top)
    return torch.where(higher, other_top - top, 0.0)


def merge_tails(a: TailMoments, b: TailMoments) -> TailMoments:
    """Moments of two disjoint sets of tokens together."""
    down_a, down_b = _rise(a.top, a.s1, b.top, b.s1), _rise(b.top, b.s1, a.top, a.s1)
    scale_a, scale_b = (-down_a).exp(), (-down_b).exp()
    return TailMoments(
        torch.where(a.s1 == 0, b.top, a.top + down_a),
        a.s1 * scale_a + b.s1 * scale_b,
        a.s2 * scale_a**2 + b.s2 * scale_b**2,
        a.s3 * scale_a**3 + b.s3 * scale_b**3,
    )


def _lowered(m: FullMoments, down_z: Tensor, down_y: Tensor) -> tuple[Tensor, ...]:
    """The sums `(s1, s2, s3, m1, x, f, e1, e2)` relative to tops that are higher by `down`."""
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


def merge_full(a: FullMoments, b: FullMoments) -> FullMoments:
    """Moments of two disjoint parts of the vocabulary together."""
    za, zb = _rise(a.top_z, a.s1, b.top_z, b.s1), _rise(b.top_z, b.s1, a.top_z, a.s1)
    ya, yb = _rise(a.top_y, a.m1, b.top_y, b.m1), _rise(b.top_y, b.m1, a.top_y, a.m1)
    # a side without mass in one policy has that policy's d relative to 0: its f, e1 are infinite
    # or 0, so no shift is needed
    s1, s2, s3, m1, x, f, e1, e2 = (
        one + other for one, other in zip(_lowered(a, za, ya), _lowered(b, zb, yb), strict=True)
    )
    top_z = torch.where(a.s1 == 0, b.top_z, a.top_z + za)
    top_y = torch.where(a.m1 == 0, b.top_y, a.top_y + ya)
    return FullMoments(top_z, s1, s2, s3, top_y, m1, x, f, e1, e2)
