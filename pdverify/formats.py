"""Number formats: unit roundoff, range and rounding, one registry entry each.

Rounding goes through ml_dtypes (or NumPy's own casts), never through torch, so that it is a
second witness for torch's casts.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pdverify.registry import Registry


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: as used on the command line (``bf16``).
        significand_bits: bits of the significand, the hidden one included (8 for bf16).
        max_finite: the largest finite value.
        min_normal: the smallest positive normal value.
        dtype: the NumPy dtype that stores it.
    """

    name: str
    significand_bits: int
    max_finite: float
    min_normal: float
    dtype: np.dtype[np.generic]

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest: 2 ** -significand_bits."""
        return 2.0**-self.significand_bits

    def round(self, x: NDArray[np.floating]) -> NDArray[np.float64]:
        """`x` rounded to this format, to nearest even, returned as float64 (any shape).

        Overflow follows ml_dtypes and NumPy: to infinity where the format has one.
        """
        with np.errstate(over="ignore"):
            return np.asarray(x).astype(self.dtype).astype(np.float64)


FORMATS: Registry[Format] = Registry("number format")


def _add(name: str, dtype: object) -> None:
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    info = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    FORMATS.add(
        name, Format(name, info.nmant + 1, float(info.max), float(info.smallest_normal), kind)
    )


_add("fp64", np.float64)
_add("fp32", np.float32)
_add("bf16", ml_dtypes.bfloat16)
_add("fp16", np.float16)
