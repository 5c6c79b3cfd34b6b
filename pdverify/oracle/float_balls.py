"""Midpoint-radius arithmetic on float64 arrays, with rigorous forward error.

A ball holds every real x with |x - mid| <= rad.  `u = 2^-53` is the unit roundoff.  What is
taken for granted, and tested against arb: NumPy's `+ - * /` are correctly rounded (IEEE 754) and
its exp, expm1, log and log1p are within `ULPS` units in the last place.

Radii are themselves computed in float64.  Their expressions are sums and products of a few
nonnegative terms, so each is off by a relative error below `k u` with k < 64, and multiplying
the result by `INFLATE` makes it an upper bound.  `TINY` covers what a product, an exp or a radius
loses to underflow (at most 2^-1074 for each element of a sum).
"""

from __future__ import annotations

from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.oracle.balls import Ball, BoolArray, FloatArray, Index

UNIT = 2.0**-53
ULPS = 4
FUNCTION_ERROR = 2 * ULPS * UNIT
"""Relative error of NumPy's elementary functions: an ulp is at most 2u of the value."""
INFLATE = 1 + 128 * UNIT
TINY = 2.0**-1000

Number: TypeAlias = "FloatBall | float"


def _tree_sum(x: FloatArray) -> FloatArray:
    """Sum over the last axis along an explicit binary tree: at most two additions a level."""
    while (n := x.shape[-1]) > 1:
        half = n // 2
        y = x[..., :half] + x[..., half : 2 * half]
        if n % 2:
            y[..., 0] += x[..., -1]
        x = y
    return x[..., 0]


def _growth(rad: FloatArray) -> FloatArray:
    """An upper bound of exp(rad) - 1, up to `INFLATE`."""
    if rad.size == 0 or np.max(rad) <= 1:
        return rad * rad + rad
    return np.where(rad <= 1, rad * rad + rad, np.expm1(rad) * (1 + 2 * FUNCTION_ERROR))


class FloatBall(Ball):
    """See the module's docstring; `mid` and `rad` are float64 arrays of one shape."""

    __slots__ = ("mid", "rad")

    def __init__(self, mid: FloatArray, rad: FloatArray) -> None:
        self.mid, self.rad = mid, rad

    @classmethod
    def exact(cls, x: NDArray[np.floating[Any]]) -> Self:
        mid = np.asarray(x, dtype=np.float64)
        return cls(mid, np.zeros_like(mid))

    def __getitem__(self, index: Index) -> Self:
        return type(self)(self.mid[index], self.rad[index])

    def __neg__(self) -> Self:
        return type(self)(-self.mid, self.rad)

    def __add__(self, other: Self | float) -> Self:
        if isinstance(other, FloatBall):
            mid = self.mid + other.mid
            rad = np.abs(mid)
            rad *= UNIT
            rad += self.rad
            rad += other.rad
        else:
            mid = self.mid + other
            rad = np.abs(mid)
            rad *= UNIT
            rad += self.rad
        rad *= INFLATE
        rad += TINY
        return type(self)(mid, rad)

    def __mul__(self, other: Self | float) -> Self:
        if isinstance(other, FloatBall):
            mid = self.mid * other.mid
            rad = np.abs(other.mid)
            rad += other.rad
            rad = rad * self.rad
            rad += np.abs(self.mid) * other.rad
        else:
            mid = self.mid * other
            rad = self.rad * abs(other)
        spread = np.abs(mid)
        spread *= UNIT
        rad += spread
        rad *= INFLATE
        rad += TINY
        return type(self)(mid, rad)

    def reciprocal(self) -> Self:
        size = np.abs(self.mid)
        mid = 1 / self.mid
        rad = self.rad / (size * (size - self.rad)) + UNIT * np.abs(mid)
        rad = np.where(size > self.rad, rad * INFLATE + TINY, np.inf)
        return type(self)(mid, rad)

    def square(self) -> Self:
        mid = self.mid * self.mid
        rad = np.abs(self.mid)
        rad *= 2
        rad += self.rad
        rad *= self.rad
        rad += UNIT * mid
        rad *= INFLATE
        rad += TINY
        return type(self)(mid, rad)

    def exp(self) -> Self:
        mid = np.exp(self.mid)
        rad = _growth(self.rad)
        rad += FUNCTION_ERROR
        rad *= mid
        rad *= INFLATE
        rad += TINY
        return type(self)(mid, rad)

    def expm1(self) -> Self:
        mid = np.expm1(self.mid)
        slope = 1 + np.maximum(mid, 0.0)
        rad = slope * _growth(self.rad) + FUNCTION_ERROR * np.abs(mid)
        return type(self)(mid, rad * INFLATE + TINY)

    def log(self) -> Self:
        inside = self.mid > self.rad
        mid = np.log(np.where(inside, self.mid, 1.0))
        rad = self.rad / np.where(inside, self.mid - self.rad, 1.0) + FUNCTION_ERROR * np.abs(mid)
        return type(self)(mid, np.where(inside, rad * INFLATE + TINY, np.nan))

    def log1p(self) -> Self:
        base = 1 + self.mid
        inside = base >= 2 * self.rad
        inside &= base > 0
        mid = np.log1p(np.where(inside, self.mid, 0.0))
        rad = self.rad / np.where(inside, base - self.rad, 1.0) + FUNCTION_ERROR * np.abs(mid)
        return type(self)(mid, np.where(inside, rad * INFLATE + TINY, np.nan))

    def abs(self) -> Self:
        return type(self)(np.abs(self.mid), self.rad)

    def sign(self) -> Self:
        certain = (np.abs(self.mid) > self.rad) | ((self.mid == 0) & (self.rad == 0))
        return type(self)(np.where(certain, np.sign(self.mid), 0.0), np.where(certain, 0.0, 1.0))

    def sum(self) -> Self:
        depth = 2 * (self.mid.shape[-1] - 1).bit_length()
        gamma = depth * UNIT / (1 - depth * UNIT)
        spread = np.abs(self.mid)
        spread *= gamma
        spread += self.rad
        return type(self)(_tree_sum(self.mid), _tree_sum(spread) * INFLATE + TINY)

    def nonnegative_part(self) -> Self:
        high = np.maximum(self.mid + self.rad, 0.0)
        inside = self.mid >= self.rad
        half = high / 2
        mid = np.where(inside, self.mid, half)
        rad = np.where(inside, self.rad, np.where(high > 0, half * INFLATE + TINY, 0.0))
        unknown = ~self.finite()
        return type(self)(np.where(unknown, self.mid, mid), np.where(unknown, np.nan, rad))

    def hull(self, other: Self) -> Self:
        low = np.minimum(self.mid - self.rad, other.mid - other.rad)
        high = np.maximum(self.mid + self.rad, other.mid + other.rad)
        rad = (high - low) / 2 + 4 * UNIT * (np.abs(low) + np.abs(high))
        return type(self)((low + high) / 2, rad * INFLATE + TINY)

    def tighter(self, other: Self) -> Self:
        mine = (self.rad <= other.rad) | ~other.finite()
        return type(self)(np.where(mine, self.mid, other.mid), np.where(mine, self.rad, other.rad))

    def put(self, index: Index, value: Self | float) -> Self:
        mid, rad = self.mid.copy(), self.rad.copy()
        if isinstance(value, FloatBall):
            mid[index], rad[index] = value.mid, value.rad
        else:
            mid[index], rad[index] = value, 0.0
        return type(self)(mid, rad)

    def append(self, last: Self) -> Self:
        return type(self)(
            np.concatenate([self.mid, last.mid[..., None]], axis=-1),
            np.concatenate([self.rad, last.rad[..., None]], axis=-1),
        )

    def positive(self) -> BoolArray:
        return np.asarray(self.mid > self.rad)

    def nonpositive(self) -> BoolArray:
        return np.asarray(self.mid <= -self.rad)

    def finite(self) -> BoolArray:
        return np.isfinite(self.mid) & np.isfinite(self.rad)

    def bounds(self) -> tuple[FloatArray, FloatArray]:
        point = self.rad == 0
        low = np.where(point, self.mid, np.nextafter(self.mid - self.rad, -np.inf))
        high = np.where(point, self.mid, np.nextafter(self.mid + self.rad, np.inf))
        unknown = ~self.finite()
        return np.where(unknown, np.nan, low), np.where(unknown, np.nan, high)
