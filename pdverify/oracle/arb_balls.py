"""The same arithmetic on python-flint's `arb`: slow, and as precise as `precision` asks.

An array of dtype object holds one `arb` per element; FLINT keeps the enclosures rigorous.  An
`arb` radius has 30 significand bits whatever the precision, so wide balls (the hulls of input
noise) are no tighter here than in float64: more precision is for the exact bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeAlias

import flint
import numpy as np
from flint import arb
from numpy.typing import NDArray

from pdverify.oracle.balls import Ball, BoolArray, FloatArray, Index

ObjectArray: TypeAlias = NDArray[np.object_]


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Significand bits of every `arb` operation inside the block."""
    before = flint.ctx.prec
    flint.ctx.prec = bits
    try:
        yield
    finally:
        flint.ctx.prec = before


def _elementwise(function: Callable[..., Any], x: ObjectArray, *others: ObjectArray) -> ObjectArray:
    return np.asarray(np.frompyfunc(function, 1 + len(others), 1)(x, *others), dtype=object)


def _certain(test: Callable[[Any], bool], x: ObjectArray) -> BoolArray:
    return _elementwise(test, x).astype(bool)


def _sign(x: Any) -> Any:
    if x > 0:
        return arb(1)
    if x < 0:
        return arb(-1)
    return arb(0) if x.is_zero() else arb(0, 1)


def _tighter(a: Any, b: Any) -> Any:
    return a if a.is_finite() and (not b.is_finite() or a.rad() <= b.rad()) else b


def _outward(end: Any, toward: float) -> float:
    """The float64 nearest to the exact number `end` on the side of `toward`."""
    value = float(end)
    if math.isnan(value):
        return value
    if math.isinf(value):
        return value if value == toward else math.copysign(np.finfo(np.float64).max, value)
    back = arb(value)
    wrong_side = back > end if toward < 0 else back < end
    return math.nextafter(value, toward) if wrong_side else value


class ArbBall(Ball):
    """See the module's docstring."""

    __slots__ = ("x",)

    def __init__(self, x: ObjectArray) -> None:
        self.x = x

    @classmethod
    def exact(cls, x: NDArray[np.floating[Any]]) -> Self:
        return cls(_elementwise(arb, np.asarray(x, dtype=np.float64).astype(object)))

    def __getitem__(self, index: Index) -> Self:
        return type(self)(np.asarray(self.x[index], dtype=object))

    def __neg__(self) -> Self:
        return type(self)(-self.x)

    def __add__(self, other: Self | float) -> Self:
        return type(self)(self.x + (other.x if isinstance(other, ArbBall) else other))

    def __mul__(self, other: Self | float) -> Self:
        return type(self)(self.x * (other.x if isinstance(other, ArbBall) else other))

    def reciprocal(self) -> Self:
        return type(self)(1 / self.x)

    def square(self) -> Self:
        return type(self)(self.x * self.x)

    def exp(self) -> Self:
        return type(self)(_elementwise(arb.exp, self.x))

    def expm1(self) -> Self:
        return type(self)(_elementwise(arb.expm1, self.x))

    def log(self) -> Self:
        return type(self)(_elementwise(arb.log, self.x))

    def log1p(self) -> Self:
        return type(self)(_elementwise(arb.log1p, self.x))

    def abs(self) -> Self:
        return type(self)(_elementwise(abs, self.x))

    def sign(self) -> Self:
        return type(self)(_elementwise(_sign, self.x))

    def sum(self) -> Self:
        return type(self)(np.asarray(np.add.reduce(self.x, axis=-1), dtype=object))

    def nonnegative_part(self) -> Self:
        return type(self)(_elementwise(arb.nonnegative_part, self.x))

    def hull(self, other: Self) -> Self:
        return type(self)(_elementwise(arb.union, self.x, other.x))

    def tighter(self, other: Self) -> Self:
        return type(self)(_elementwise(_tighter, self.x, other.x))

    def put(self, index: Index, value: Self | float) -> Self:
        x = self.x.copy()
        x[index] = value.x if isinstance(value, ArbBall) else arb(value)
        return type(self)(x)

    def append(self, last: Self) -> Self:
        return type(self)(np.concatenate([self.x, last.x[..., None]], axis=-1))

    def positive(self) -> BoolArray:
        return _certain(lambda x: bool(x > 0), self.x)

    def nonpositive(self) -> BoolArray:
        return _certain(lambda x: bool(x <= 0), self.x)

    def finite(self) -> BoolArray:
        return _certain(lambda x: bool(x.is_finite()), self.x)

    def bounds(self) -> tuple[FloatArray, FloatArray]:
        finite = self.finite()
        low = _elementwise(lambda x: _outward(x.lower(), -math.inf), self.x).astype(np.float64)
        high = _elementwise(lambda x: _outward(x.upper(), math.inf), self.x).astype(np.float64)
        return np.where(finite, low, np.nan), np.where(finite, high, np.nan)
