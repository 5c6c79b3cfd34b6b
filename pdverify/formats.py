"""Number formats: unit roundoff, range and rounding, one registry entry each.

Rounding goes through ml_dtypes (or NumPy's own casts), never through torch, so that it is a
second witness for torch's casts.

`FORMATS` holds element formats, `SCALED` the forms in which fp8 is really stored: groups of
elements with a scale each.  Both offer `store`: the values that come back, and a radius that
holds the number that was stored for whoever knows only what came back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pdverify.registry import Registry, UnknownName

Float64: TypeAlias = NDArray[np.float64]
Overflow: TypeAlias = Literal["inf", "nan"]

_LEAST = float(np.finfo(np.float64).smallest_subnormal)
_FP32 = np.finfo(np.float32)


@dataclass(frozen=True)
class Stored:
    """What storing keeps, float64 arrays of one shape.

    Attributes:
        values: as they come back, exactly (an element times its scale is not rounded again).
        radius: `|x - values| <= radius` for every `x` that is stored as these values with these
            scales; infinite where a value is not finite.  Zero for `x` = -inf, which stands for
            probability zero and is kept, in formats without infinities too.
    """

    values: Float64
    radius: Float64


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: as used on the command line (``bf16``).
        significand_bits: bits of the significand, the hidden one included (8 for bf16).
        max_finite: the largest finite value.
        min_normal: the smallest positive normal value.
        dtype: the NumPy dtype that stores it (tf32: float32).
        overflow: what becomes of numbers that round beyond `max_finite`, infinities included:
            "inf", or "nan" in a format without infinities.
        holds_policies: whether logits are handed to a mask in it.
    """

    name: str
    significand_bits: int
    max_finite: float
    min_normal: float
    dtype: np.dtype[np.generic]
    overflow: Overflow = "inf"
    holds_policies: bool = True

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest: 2 ** -significand_bits."""
        return 2.0**-self.significand_bits

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value, and the spacing of subnormal ones."""
        return self.min_normal * 2.0 ** (1 - self.significand_bits)

    def round(self, x: NDArray[np.floating[Any]]) -> Float64:
        """`x` rounded to this format, to nearest even, returned as float64 (any shape).

        Rounded once, from the dtype of `x`.  Beyond `max_finite` see `overflow`; NaN stays NaN.
        """
        x = np.asarray(x)
        if self.name == "tf32":
            return _to_bits(x.astype(np.float64), self)
        with np.errstate(over="ignore"):
            return x.astype(self.dtype).astype(np.float64)

    def half_spacing(self, x: Float64) -> Float64:
        """Half the distance from each value of the format to the next one away from zero.

        `x`: float64 values of the format, any shape.  Every number that rounds to `x` is within
        it; infinite where `x` is not finite.
        """
        # fp64: half of the smallest number is not a number; the whole one holds as well
        least = max(self.min_subnormal / 2, _LEAST)
        with np.errstate(under="ignore"):
            _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
            half = np.maximum(np.ldexp(self.unit_roundoff / 2, exponent), least)
        return np.where(np.isfinite(x), half, np.inf)

    def store(self, x: NDArray[np.floating[Any]]) -> Stored:
        """`x` (any shape) as it comes back, and the radius that holds it."""
        zero = np.isneginf(x)
        values = np.where(zero, -np.inf, self.round(x))
        return Stored(values, np.where(zero, 0.0, self.half_spacing(values)))


def _to_bits(x: Float64, form: Format) -> Float64:
    """Rounding to nearest even in float64, for a format that no library stores."""
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(np.where(np.isfinite(x), x, 0.0))
        lowest = int(np.frexp(form.min_normal)[1])
        step = np.ldexp(2.0**-form.significand_bits, np.maximum(exponent, lowest))
        rounded = np.where(np.isfinite(x), np.rint(x / step) * step, x)
        return np.where(np.abs(rounded) > form.max_finite, np.copysign(np.inf, x), rounded)


FORMATS: Registry[Format] = Registry("number format")


def _add(name: str, dtype: object, overflow: Overflow = "inf", *, policies: bool = True) -> None:
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    info = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    limits = info.nmant + 1, float(info.max), float(info.smallest_normal)
    FORMATS.add(name, Format(name, *limits, kind, overflow, policies))


_add("fp64", np.float64)
_add("fp32", np.float32)
_add("bf16", ml_dtypes.bfloat16)
_add("fp16", np.float16)
FORMATS.add(
    "tf32",
    Format(
        "tf32",
        *(11, 2.0**128 - 2.0**117, 2.0**-126),
        np.dtype(np.float32),
        holds_policies=False,
    ),
)
_add("e4m3", ml_dtypes.float8_e4m3fn, "nan", policies=False)
_add("e5m2", ml_dtypes.float8_e5m2, policies=False)

POLICY_FORMATS = tuple(name for name, form in FORMATS.items() if form.holds_policies)
"""Formats in which logits and log-probs are handed to a mask, and masks are computed."""


def policy_format(name: str) -> Format:
    """One of `POLICY_FORMATS`.

    Raises:
        UnknownName: it is none of them.
    """
    if FORMATS[name].holds_policies:
        return FORMATS[name]
    known = ", ".join(POLICY_FORMATS)
    raise UnknownName(f"{name} is no format that masks are computed in; known: {known}")


@dataclass(frozen=True)
class Scaled:
    """Elements of a narrow format in groups that share a scale.

    The scale takes a group's largest magnitude, amax, to the upper end of the element format:
    `amax / max_finite` rounded to float32, or, with `power_of_two`, `2^(floor(log2 amax) - emax)`
    as in OCP Microscaling (MX) v1.0, `emax` the exponent of `max_finite`.  Quotients are rounded
    to float32, clipped to the element format's range and cast, as kernels do; a power of two
    leaves up to an octave to be clipped (MX: elements saturate).

    A scale is at least the smallest normal float32 (MX: 2^-127), so that tiny groups lose bits
    but nothing is divided by zero; a group of zeros has scale 1.  -inf (probability zero) takes
    no part and stays.  A NaN, +inf or a number beyond float32's range makes its whole group NaN.

    Attributes:
        name: as used on the command line.
        element: name of the elements' format.
        rows, columns: a group's shape over the last two axes; None: all of them.  Groups at the
            far ends are smaller where the shape does not divide.
        power_of_two: how the scale is chosen.
    """

    name: str
    element: str
    rows: int | None
    columns: int | None
    power_of_two: bool = False

    @property
    def summary(self) -> str:
        """One line."""
        shape = f"{self.rows or 'R'} x {self.columns or 'C'}"
        kind = "power-of-two" if self.power_of_two else "float32"
        return f"{self.element} elements, a {kind} scale for each group of {shape}"

    def scales(self, x: NDArray[np.floating[Any]]) -> Float64:
        """The scale of each element's group, of the shape of `x` `[..., R, C]`; float32 values.

        Raises:
            ValueError: fewer than two axes.
        """
        x = np.asarray(x, dtype=np.float64)
        amax = _group_max(np.where(np.isneginf(x), 0.0, np.abs(x)), self.rows, self.columns)
        usable = amax <= float(_FP32.max)
        amax = np.where(usable, amax, 1.0)
        largest = FORMATS[self.element].max_finite
        if self.power_of_two:
            exponent = _octave(amax) - _octave(largest)
            scale = np.ldexp(1.0, np.maximum(exponent, -127))
        else:
            with np.errstate(under="ignore"):
                scale = (amax / largest).astype(np.float32).astype(np.float64)
            scale = np.maximum(scale, float(_FP32.smallest_normal))
        return np.where(usable, np.where(amax == 0, 1.0, scale), np.nan)

    def store(self, x: NDArray[np.floating[Any]]) -> Stored:
        """`x` `[..., R, C]` as it comes back, and the radius that holds it.

        Raises:
            ValueError: fewer than two axes.
        """
        form = FORMATS[self.element]
        x = np.asarray(x, dtype=np.float64)
        scale = self.scales(x)
        with np.errstate(under="ignore"):
            quotient = (x / scale).astype(np.float32).astype(np.float64)
        element = form.round(np.clip(quotient, -form.max_finite, form.max_finite))
        half = form.half_spacing(element)
        # The quotient q was rounded to float32 first, by less than 2^-23 |q|, and
        # |q| <= |element| + half < (2^(p+1) + 1) half.
        half = half * (1 + 2.0 ** (form.significand_bits + 2 - 23))
        if self.power_of_two:
            # At the end, everything below the next octave was clipped.  (Under a float32 scale
            # q exceeds max_finite by its own rounding only, far less than half a spacing.)
            clipped = np.ldexp(1.0, _octave(form.max_finite) + 1) - form.max_finite
            end = np.abs(element) == form.max_finite
            half = np.where(end, np.maximum(half, clipped), half)
        values = element * scale
        radius = np.where(np.isfinite(values), half * scale, np.inf)
        zero = np.isneginf(x)
        return Stored(np.where(zero, -np.inf, values), np.where(zero, 0.0, radius))

    def round(self, x: NDArray[np.floating[Any]]) -> Float64:
        """`x` `[..., R, C]` as it comes back."""
        return self.store(x).values


def _octave(x: Float64 | float) -> NDArray[np.int32]:
    """`floor(log2 x)` of positive numbers."""
    return np.asarray(np.frexp(x)[1] - 1)


def _group_max(x: Float64, rows: int | None, columns: int | None) -> Float64:
    """The maximum of each group (NaN if it has one), at every element of it."""
    if x.ndim < 2:
        raise ValueError(f"a scaled format wants [..., R, C], got an array of shape {x.shape}")
    if x.size == 0:
        return x
    for axis, step in ((-2, rows), (-1, columns)):
        size = x.shape[axis]
        starts = np.arange(0, size, step or size)
        most = np.maximum.reduceat(x, starts, axis=axis)
        x = np.repeat(most, np.diff(starts, append=size), axis=axis)
    return x


SCALED: Registry[Scaled] = Registry("scaled format")
for _entry in (
    Scaled("fp8-tensor", "e4m3", None, None),
    Scaled("fp8-row", "e4m3", 1, None),
    Scaled("fp8-block", "e4m3", 128, 128),
    Scaled("fp8-group", "e4m3", 1, 128),
    Scaled("mxfp8", "e4m3", 1, 32, power_of_two=True),
    Scaled("fp8-row-e5m2", "e5m2", 1, None),
):
    SCALED.add(_entry.name, _entry)


def storage(name: str) -> Format | Scaled:
    """The element or scaled format of that name.

    Raises:
        UnknownName: no registry has it.
    """
    if name in SCALED:
        return SCALED[name]
    try:
        return FORMATS[name]
    except UnknownName as error:
        raise UnknownName(f"{error}; scaled: {', '.join(SCALED)}") from None
