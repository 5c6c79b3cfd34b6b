"""Arrays in the arithmetic of a number format, each with a rigorous running error bound.

A `Rounded` holds float64 arrays: the `value` that a format's arithmetic gives, and an `error` that
bounds `|value - exact|`, where exact is what the same expression gives on the same inputs without
any rounding.  The same `error` bounds the distance of any other implementation of these operations
in this order in this format: it does not use how the emulated operations happened to round.

**One operation.**  Let every implementation's operands lie within their `error` of the exact ones,
`s` be the emulated result before it is rounded, and `e` bound how far the operands' errors can
carry any implementation's result from the exact one.  Results before rounding are at most
`|s| + 2 e`, so `u (|s| + 2 e) + a` bounds the rounding, and `e` plus that the total.  `u` is the
unit roundoff; `a` is the smallest normal number where hardware may flush subnormal numbers to
zero (fp64, fp32, tf32, bf16), else half the smallest number.  Operands' errors are taken about
values that are themselves off: `x` of another implementation is within `2 error` of `value`.

**Functions.**  exp, log and expm1 err by at most `KAPPA u` relative in fp32 (twice that in fp64,
of which NumPy's own functions are an instance).  Narrower formats have no functions of their own:
an operation is done in float32 and its result rounded, `u' = u + 2^-24 (1 + u)` for arithmetic and
`u + KAPPA 2^-24 (1 + u)` for functions.

**Sums.**  With `S` the sum of the magnitudes of all partial sums and `d` the number of additions
on the longest path, any implementation's error is at most
`(sum of the terms' errors + u S + n a) (1 + 2u)^d`.

Bounds are computed in float64 and inflated for it.  Overflow gives infinite bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.budgets import KAPPA
from pdverify.formats import FORMATS, Format

Float64: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Order: TypeAlias = Literal["pairwise", "naive", "blocked", "compensated"]

SINGLE = 2.0**-24
"""Unit roundoff of float32, in which narrower formats compute."""

INFLATE = 1 + 2.0**-44
"""Covers what the float64 arithmetic of one bound loses: well below 256 units of 2^-53."""

BLOCK = 128
"""Terms of a block in ``blocked`` sums, and lanes of ``compensated`` ones."""


@dataclass(frozen=True)
class Arithmetic:
    """Formats that a mask is computed in.

    Attributes:
        elementwise: format of every operation on single numbers.
        accumulator: format of the additions of sums; their results are rounded to `elementwise`.
        order: of sums: ``pairwise`` (a tree), ``naive`` (one term after the other), ``blocked``
            (naive in blocks of 128, then a tree) or ``compensated`` (128 lanes that keep the
            rounding errors of their additions, joined as a tree).
    """

    elementwise: str = "fp32"
    accumulator: str = "fp32"
    order: Order = "pairwise"

    @cached_property
    def single(self) -> _Unit:
        """Operations on single numbers."""
        return _Unit(FORMATS[self.elementwise])

    @cached_property
    def sums(self) -> _Unit:
        """Additions of sums."""
        return _Unit(FORMATS[self.accumulator])

    @cached_property
    def widens(self) -> bool:
        """Every number of `elementwise` is one of `accumulator`."""
        return self.sums.holds(self.single)

    @cached_property
    def narrows(self) -> bool:
        """Every number of `accumulator` is one of `elementwise`."""
        return self.single.holds(self.sums)

    def number(self, x: NDArray[Any]) -> Rounded:
        """Exact inputs; they are not rounded."""
        value = np.asarray(x, dtype=np.float64)
        return Rounded(value, np.zeros_like(value), self)


@dataclass(frozen=True)
class _Unit:
    """Rounding in one format."""

    form: Format

    @cached_property
    def narrow(self) -> bool:
        """Whether operations are done in float32 and then rounded."""
        return self.form.significand_bits < 24

    @cached_property
    def unit(self) -> float:
        """Relative error of an operation."""
        u = self.form.unit_roundoff
        return u + SINGLE * (1 + u) if self.narrow else u

    @cached_property
    def function(self) -> float:
        """Relative error of exp, log and expm1."""
        u = self.form.unit_roundoff
        if self.narrow:
            return u + KAPPA * SINGLE * (1 + u)
        return (2 * KAPPA if self.form.name == "fp64" else KAPPA) * u

    @cached_property
    def least(self) -> float:
        """Absolute error of an operation whose result is subnormal."""
        if self.form.min_normal <= 2.0**-126:
            return 2 * self.form.min_normal
        return self.form.min_subnormal / 2 + 2.0**-125

    @cached_property
    def ceiling(self) -> float:
        """No implementation overflows below this magnitude."""
        return self.form.max_finite

    def holds(self, other: _Unit) -> bool:
        """Every number of the other format is one of this one."""
        mine, its = self.form, other.form
        return (
            mine.significand_bits >= its.significand_bits
            and mine.min_subnormal <= its.min_subnormal
            and mine.max_finite >= its.max_finite
        )

    def round(self, x: Float64) -> Float64:
        """`x` in the format, narrower ones by way of float32."""
        if self.form.name == "fp64":
            return x
        if self.form.significand_bits == 24:
            return x.astype(np.float32).astype(np.float64)
        y = x.astype(np.float32)
        if self.form.name == "tf32":
            return _tf32(y)
        return np.asarray(y.astype(self.form.dtype).astype(np.float64))


def _tf32(y: NDArray[np.float32]) -> Float64:
    """To nearest even at bit 13 of float32's bits (a new array, overwritten)."""
    if y.ndim == 0:
        return np.asarray(_tf32(y[None])[0])
    bits = y.view(np.uint32)
    odd = bits >> np.uint32(13)
    odd &= np.uint32(1)
    odd += np.uint32(0xFFF)
    finite = np.isfinite(y)
    rounded = ((bits + odd) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.asarray(np.where(finite, rounded, y).astype(np.float64))


@dataclass(frozen=True, eq=False)
class Rounded:
    """See the module; `value` and `error` are float64 of one shape, never written to again."""

    value: Float64
    error: Float64
    arithmetic: Arithmetic

    def __getitem__(self, index: Any) -> Rounded:
        return Rounded(self.value[index], self.error[index], self.arithmetic)

    def _result(self, value: Float64, error: Float64, step: float | None = None) -> Rounded:
        """The result `value` rounded; `error`, a new array, is what the operands hand on."""
        unit = self.arithmetic.single
        step = unit.unit if step is None else step
        size = np.abs(value)
        size *= step * INFLATE
        grown = error * ((1 + 2 * step) * INFLATE)
        grown += size
        grown += unit.least
        rounded = unit.round(value)
        if unit.ceiling < 1e9:
            size = np.abs(value)
            size += grown
            size += grown
            grown = np.where(size < unit.ceiling, grown, np.inf)
        return Rounded(rounded, grown, self.arithmetic)

    def __neg__(self) -> Rounded:
        return Rounded(-self.value, self.error, self.arithmetic)

    def __add__(self, other: Rounded) -> Rounded:
        return self._result(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return self._result(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Rounded) -> Rounded:
        return self._result(self.value * other.value, _product_error(self, other))

    def __truediv__(self, other: Rounded) -> Rounded:
        size = np.abs(other.value)
        least = size - 2 * other.error
        share = (np.abs(self.value) + self.error) / (size - other.error)
        error = (self.error + share * other.error) / least
        return self._result(self.value / other.value, np.where(least > 0, error, np.inf))

    def halved(self) -> Rounded:
        """Exact, but for subnormal numbers."""
        error = self.error / 2 + self.arithmetic.single.least
        return Rounded(self.arithmetic.single.round(self.value / 2), error, self.arithmetic)

    def _grown(self) -> Float64:
        """`|e^x' / e^x - 1|` at most, over two numbers within `error` of the exact one."""
        grown = np.expm1(self.error)
        grown *= 1 + grown
        return grown

    def exp(self) -> Rounded:
        """`e^x`."""
        value = np.exp(self.value)
        return self._result(value, value * self._grown(), self.arithmetic.single.function)

    def expm1(self) -> Rounded:
        """`e^x - 1`; the bound is infinite where another implementation may overflow."""
        value = np.expm1(self.value)
        error = self._grown() * (value + (1 + 2.0**-50))
        found = self._result(value, error, self.arithmetic.single.function)
        high = np.abs(value) + 2 * found.error
        error = np.where(high < self.arithmetic.single.ceiling, found.error, np.inf)
        return Rounded(found.value, error, self.arithmetic)

    def log(self) -> Rounded:
        """Natural logarithm; the bound is infinite where the number may be 0."""
        value = np.log(np.maximum(self.value, 0.0))
        share = self.error / (self.value - self.error)
        inside = (share < 1) & (self.value > self.error)
        error = -np.log1p(-np.where(inside, share, 0.0)) * (1 + 2.0**-48)
        error = np.where(inside, error, np.inf)
        return self._result(value, error, self.arithmetic.single.function)

    def abs(self) -> Rounded:
        """Exact."""
        return Rounded(np.abs(self.value), self.error, self.arithmetic)

    def sign(self) -> Rounded:
        """-1, 0 or 1; where it is not certain off by up to 2, by 1 at a 0."""
        certain = (np.abs(self.value) > 2 * self.error) | (self.error == 0)
        off = np.where(self.value == 0, 1.0, 2.0)
        return Rounded(np.sign(self.value), np.where(certain, 0.0, off), self.arithmetic)

    def nonnegative(self) -> Rounded:
        """max(0, x), of a number whose exact value is not below 0."""
        return Rounded(np.maximum(self.value, 0.0), self.error, self.arithmetic)

    def where(self, keep: Bools, other: float = 0.0) -> Rounded:
        """`other`, exactly, where not `keep`."""
        value, error = np.where(keep, self.value, other), np.where(keep, self.error, 0.0)
        return Rounded(value, error, self.arithmetic)

    def choose(self, here: Bools, other: Rounded) -> Rounded:
        """`other` where `here`."""
        value = np.where(here, other.value, self.value)
        return Rounded(value, np.where(here, other.error, self.error), self.arithmetic)

    def off(self, by: Float64) -> Rounded:
        """The same number as an approximation of another one, up to `by` away."""
        return Rounded(self.value, (self.error + by) * INFLATE, self.arithmetic)

    def exactly(self) -> Rounded:
        """The computed number itself, without error."""
        return Rounded(self.value, np.zeros_like(self.error), self.arithmetic)

    def at(self, ids: NDArray[np.int64]) -> Rounded:
        """Elements `[T, M]` of `[T, V]`."""
        value = np.take_along_axis(self.value, ids, axis=-1)
        return Rounded(value, np.take_along_axis(self.error, ids, axis=-1), self.arithmetic)

    def max(self) -> Rounded:
        """The largest over the last axis, `[..., 1]`; of exact inputs."""
        return self.at(self.value.argmax(axis=-1, keepdims=True))

    def sum(self) -> Rounded:
        """Sum over the last axis, `[...]`, in the accumulator's format and order."""
        how, unit = self.arithmetic, self.arithmetic.sums
        terms, error = self.value, self.error.sum(axis=-1)
        count = terms.shape[-1]
        if not how.widens:
            error = error + (np.abs(terms).sum(axis=-1) + 2 * error) * unit.unit
            error += count * unit.least
            terms = unit.round(terms)
        value, error = _SUMS[how.order](terms, error, unit)
        error = (error + count * unit.least) * _grown_by(count)
        if unit.ceiling < 1e9:
            # partial sums lie below the sum of the magnitudes
            size = np.abs(terms).sum(axis=-1) + 2 * error
            error = np.where(size < unit.ceiling, error, np.inf)
        total = Rounded(value, error, how)
        return total if how.narrows else total._result(value, error)


def _product_error(a: Rounded, b: Rounded) -> Float64:
    """`|a' b' - a* b*|` for `a'`, `a` within `a.error` of `a*`, and so on."""
    error = 3 * b.error
    error += np.abs(b.value)
    error *= a.error
    size = np.abs(a.value)
    size *= b.error
    error += size
    return error


def _grown_by(count: int) -> float:
    """Covers a float64 sum of `count` nonnegative numbers in any order, many times over."""
    return INFLATE + count * 2.0**-51


def join(parts: list[Rounded]) -> Rounded:
    """Columns side by side."""
    return Rounded(
        np.concatenate([x.value for x in parts], axis=-1),
        np.concatenate([x.error for x in parts], axis=-1),
        parts[0].arithmetic,
    )


Pair: TypeAlias = tuple[Float64, Float64]


def _tree(value: Float64, error: Float64, unit: _Unit) -> Pair:
    """Halves are added elementwise; `error` `[...]` is that of all terms together."""
    spent, depth = np.zeros(value.shape[:-1]), 0
    while (n := value.shape[-1]) > 1:
        half = n // 2
        added = unit.round(value[..., :half] + value[..., half : 2 * half])
        spent += np.abs(added).sum(axis=-1)
        if n % 2:
            added = np.concatenate([added, value[..., -1:]], axis=-1)
        value, depth = added, depth + 1
    return value[..., 0], (error + spent * unit.unit) * (1 + 2 * unit.unit) ** depth


def _running(value: Float64, unit: _Unit) -> Float64:
    """Partial sums `[..., n]`, each rounded: NumPy accumulates in the dtype, in order."""
    if unit.form.name == "tf32":
        partial = value.copy()
        for i in range(1, value.shape[-1]):
            partial[..., i] = unit.round(partial[..., i - 1] + value[..., i])
        return partial
    return np.add.accumulate(value.astype(unit.form.dtype), axis=-1).astype(np.float64)


def _naive(value: Float64, error: Float64, unit: _Unit) -> Pair:
    partial = _running(value, unit)
    spent = np.abs(partial[..., 1:]).sum(axis=-1) * unit.unit
    return partial[..., -1], (error + spent) * _power(unit, value.shape[-1])


def _power(unit: _Unit, depth: int) -> float:
    """`(1 + 2u)^depth`, infinite beyond what float64 holds."""
    return float(np.exp(min(depth * np.log1p(2 * unit.unit), 710.0)) * INFLATE)


def _in_blocks(x: Float64) -> Float64:
    """`[..., n]` as `[..., blocks, BLOCK]`, zeros at the end."""
    n = x.shape[-1]
    width = -(-n // BLOCK) * BLOCK
    if width != n:
        padded = np.zeros((*x.shape[:-1], width))
        padded[..., :n] = x
        x = padded
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _blocked(value: Float64, error: Float64, unit: _Unit) -> Pair:
    partial = _running(_in_blocks(value), unit)
    spent = np.abs(partial[..., 1:]).sum(axis=(-1, -2)) * unit.unit
    return _tree(partial[..., -1], (error + spent) * _power(unit, BLOCK), unit)


def _compensated(value: Float64, error: Float64, unit: _Unit) -> Pair:
    """128 lanes keep the rounding errors of their additions, which are numbers of the format.

    So only the sum of these errors, and adding it at the end, is rounded.  With `t` the partial
    sums, `L` the magnitudes of all rounding errors so far and `R` the error of their sum, each
    addition grows `L` by `u (|t| + 2 error + 2 L)` and each addition of errors grows `R` by
    `u (L + R)`, for any implementation.
    """
    blocks = _in_blocks(value)
    total, lost = blocks[..., 0, :], np.zeros_like(blocks[..., 0, :])
    spent = _Spent(np.zeros_like(total), np.zeros_like(total), 2 * error[..., None])
    for i in range(1, blocks.shape[-2]):
        total, fault = _two_sum(total, blocks[..., i, :], unit)
        lost = unit.round(lost + fault)
        spent.add(total, unit, 1)
    while (n := total.shape[-1]) > 1:
        half = n // 2
        left, right = lost[..., :half], lost[..., half:]
        total, fault = _two_sum(total[..., :half], total[..., half:], unit)
        lost = unit.round(unit.round(left + fault) + right)
        spent.fold(half)
        spent.add(total, unit, 2)
    result = unit.round(total + lost)[..., 0]
    grown = error + spent.rounded[..., 0]
    return result, grown + (np.abs(result) * (1 + unit.unit) + 2 * grown) * unit.unit * INFLATE


@dataclass
class _Spent:
    """`L` and `R` of `_compensated`, and twice the terms' error."""

    lost: Float64
    rounded: Float64
    twice: Float64

    def add(self, total: Float64, unit: _Unit, times: int) -> None:
        step = unit.unit * (1 + 4 * unit.unit) * INFLATE
        self.lost = (self.lost * (1 + 2 * step)) + (np.abs(total) + self.twice) * step
        for _ in range(times):
            self.rounded = self.rounded + (self.lost + self.rounded) * step

    def fold(self, half: int) -> None:
        self.lost = self.lost[..., :half] + self.lost[..., half:]
        self.rounded = self.rounded[..., :half] + self.rounded[..., half:]


def _two_sum(a: Float64, b: Float64, unit: _Unit) -> Pair:
    """The rounded sum and its error, exactly (but for overflow).

    Float64's own error is found as Knuth does; what is left is a number of the format.
    """
    exact = a + b
    other = exact - a
    rest = (a - (exact - other)) + (b - other)
    added = unit.round(exact)
    return added, (exact - added) + rest


_SUMS: dict[str, Callable[[Float64, Float64, _Unit], Pair]] = {
    "pairwise": _tree,
    "naive": _naive,
    "blocked": _blocked,
    "compensated": _compensated,
}
