"""Torch's own casts: the second witness for every number format.

`pdverify.formats` rounds through NumPy and ml_dtypes; this module through torch, whose dtypes
are what trainers and kernels use.  Where the two are known to differ is data: `DIFFERENCES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.formats import FORMATS, SCALED, Scaled, storage

if TYPE_CHECKING:
    from torch import Tensor

Float64: TypeAlias = NDArray[np.float64]
Floats: TypeAlias = NDArray[np.floating[Any]]
Mask: TypeAlias = NDArray[np.bool_]

DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
"""Names of torch's dtypes.  tf32 has none: torch stores float32 and rounds inside products."""


@dataclass(frozen=True)
class Difference:
    """A known difference between torch's casts and `Format.round`.

    Attributes:
        formats: the element formats concerned.
        where: the inputs concerned, in words.
        ours, torch: what becomes of them.
        concerns: mask of the inputs concerned, for float arrays of any shape.
    """

    formats: tuple[str, ...]
    where: str
    ours: str
    torch: str
    concerns: Callable[[Floats], Mask]


def _beyond_e4m3(x: Floats) -> Mask:
    return np.asarray(np.abs(x) > 464)  # the midpoint of 448, the largest value, and 480


def _not_float32(x: Floats) -> Mask:
    with np.errstate(over="ignore"):
        return np.asarray((x.astype(np.float32) != x) & ~np.isnan(x))


DIFFERENCES = (
    Difference(
        ("e4m3",),
        "beyond 464, infinities included",
        "NaN, as e4m3fn has no infinity",
        "saturates to 448 with its sign (2.13); NaN before pytorch/pytorch#178817 (2.11)",
        _beyond_e4m3,
    ),
    Difference(
        ("tf32", "bf16", "fp16", "e4m3", "e5m2"),
        "float64 numbers that float32 does not hold",
        "rounded once",
        "rounded to float32 first, so that a number next to a midpoint may go the other way",
        _not_float32,
    ),
)


def known_differences(name: str, x: Floats) -> Mask:
    """Where torch's cast of `x` (any shape) to the element format may differ from ours."""
    found = np.zeros(np.shape(x), dtype=np.bool_)
    for difference in DIFFERENCES:
        if name in difference.formats:
            found |= difference.concerns(np.asarray(x))
    return found


def torch_round(name: str, x: Floats) -> Float64:
    """`x` as it comes back from an element or scaled format in torch, on the CPU.

    Any shape; `[..., R, C]` for scaled formats, which are composed of torch's operations on
    float32 as kernels do: amax of the group, scale, quotient, clamp, cast; then the exact product
    with the scale.  tf32 is rounded on the bits of float32, to nearest even.

    Raises:
        UnknownName: no registry has the name.
        ValueError: fewer than two axes (scaled formats).
    """
    import torch

    storage(name)
    tensor = torch.from_numpy(np.array(x, order="C"))
    if name in SCALED:
        back = _scaled(SCALED[name], tensor.float())
    elif name == "tf32":
        back = _tf32(tensor.float())
    else:
        back = tensor.to(getattr(torch, DTYPES[name]))
    found: Float64 = back.double().numpy()
    return found


def _tf32(x: Tensor) -> Tensor:
    """Float32 numbers rounded to 11 bits: add just under half a place, or half if odd, and cut."""
    import torch

    bits = x.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def _scaled(entry: Scaled, x: Tensor) -> Tensor:
    """A scaled format on float32 `[..., R, C]`; float64."""
    import torch

    if x.ndim < 2:
        raise ValueError(f"a scaled format wants [..., R, C], got shape {tuple(x.shape)}")
    largest = FORMATS[entry.element].max_finite
    zero = x.isneginf()
    amax = _amax(x.masked_fill(zero, 0.0).abs(), entry)
    if entry.power_of_two:
        # exponents straight from the bits; E8M0 stores the biased exponent of the scale
        emax = int(np.frexp(largest)[1]) - 1
        biased = (((amax.view(torch.int32) >> 23) & 0xFF) - emax).clamp(0, 254)
        scale = biased.to(torch.uint8).view(torch.float8_e8m0fnu).float()
        scale = scale.masked_fill(~amax.isfinite(), torch.nan)
    else:
        scale = (amax / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scale = scale.masked_fill(amax == 0, 1.0)
    element = (x / scale).clamp(-largest, largest).to(getattr(torch, DTYPES[entry.element]))
    return torch.where(zero, x.double(), element.double() * scale.double())


def _amax(size: Tensor, entry: Scaled) -> Tensor:
    """The maximum of each group, at every element of it: zeros fill up the last groups."""
    import torch

    r, c = size.shape[-2:]
    rows, columns = entry.rows or max(r, 1), entry.columns or max(c, 1)
    padded = torch.nn.functional.pad(size, (0, -c % columns, 0, -r % rows))
    lead = padded.shape[:-2]
    blocks = padded.reshape(*lead, -1, rows, padded.shape[-1] // columns, columns)
    most = blocks.amax(dim=(-3, -1), keepdim=True).expand_as(blocks)
    return most.reshape(padded.shape)[..., :r, :c].contiguous()
