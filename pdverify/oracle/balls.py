"""The arithmetic the oracle's formulas are written over.

A `Ball` is an array of real intervals.  Whatever real numbers lie in the operands, the exact
result of an operation on them lies in the ball that the operation returns.  Comparisons are
three-valued: `positive` and `nonpositive` say what is certain, and where both are False nothing
is known.  A ball that is not a number (an overflow, a logarithm across zero) is certain of
nothing, so it can lose a decision but never give a wrong one.

Two arithmetics share this interface: `FloatBall` (float64, vectorized) and `ArbBall` (arbitrary
precision).  Every formula of the oracle is written once, over it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
Index: TypeAlias = Any
"""Whatever indexes a NumPy array."""


class Ball(ABC):
    """An array of intervals; `Self | float` operands are other balls or exact numbers."""

    @classmethod
    @abstractmethod
    def exact(cls, x: NDArray[np.floating[Any]]) -> Self:
        """The finite float64 numbers `x`, without error."""

    @abstractmethod
    def __add__(self, other: Self | float) -> Self: ...

    @abstractmethod
    def __mul__(self, other: Self | float) -> Self: ...

    @abstractmethod
    def __neg__(self) -> Self: ...

    @abstractmethod
    def __getitem__(self, index: Index) -> Self:
        """The selected elements, or the same ones with a new axis."""

    def __radd__(self, other: float) -> Self:
        return self + other

    def __rmul__(self, other: float) -> Self:
        return self * other

    def __sub__(self, other: Self | float) -> Self:
        return self + -other

    def __rsub__(self, other: float) -> Self:
        return -self + other

    def __truediv__(self, other: Self) -> Self:
        return self * other.reciprocal()

    @abstractmethod
    def reciprocal(self) -> Self: ...

    @abstractmethod
    def square(self) -> Self: ...

    @abstractmethod
    def exp(self) -> Self: ...

    @abstractmethod
    def expm1(self) -> Self: ...

    @abstractmethod
    def log(self) -> Self: ...

    @abstractmethod
    def log1p(self) -> Self: ...

    @abstractmethod
    def abs(self) -> Self: ...

    @abstractmethod
    def sign(self) -> Self:
        """-1, 0 or 1; [-1, 1] where the sign is not certain."""

    @abstractmethod
    def sum(self) -> Self:
        """Sum over the last axis."""

    @abstractmethod
    def nonnegative_part(self) -> Self:
        """max(0, x)."""

    @abstractmethod
    def hull(self, other: Self) -> Self:
        """The smallest ball around both operands."""

    @abstractmethod
    def tighter(self, other: Self) -> Self:
        """Of two balls around the SAME numbers, elementwise the smaller one."""

    @abstractmethod
    def put(self, index: Index, value: Self | float) -> Self:
        """A copy whose elements at `index` are replaced by `value`."""

    @abstractmethod
    def append(self, last: Self) -> Self:
        """`[T, n]` and `[T]` joined to `[T, n + 1]`."""

    @abstractmethod
    def positive(self) -> BoolArray:
        """True where x > 0 is certain."""

    @abstractmethod
    def nonpositive(self) -> BoolArray:
        """True where x <= 0 is certain."""

    @abstractmethod
    def finite(self) -> BoolArray:
        """True where the ball is bounded."""

    @abstractmethod
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Float64 bounds, rounded outward; NaN where the ball is not a number."""
