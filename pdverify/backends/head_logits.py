"""Logits as what they are made from, a `LinearHead`, and how a tile of them is multiplied out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from pdverify.backends.engine import NEG_INF


@dataclass(frozen=True, eq=False)
class LinearHead:
    """Logits `z = cap(hidden . weight^T + bias) / temperature`, as what they are made from.

    `cap(x) = softcap tanh(x / softcap)`: the cap belongs to the model and comes before the
    sampling temperature.  Columns from `vocab_size` on are padding: their logits are -inf and
    their rows of `weight` are never read; they count in `V`, as -inf columns do everywhere.

    Args:
        hidden: `[*lead, d]`, any floating dtype.
        weight: `[V, d]`, any floating dtype.
        bias: `[V]`, any floating dtype, or None.
        softcap: bound of the logits before the temperature, > 0, or None.
        temperature: > 0.
        vocab_size: columns that are not padding, 1 to V; None is V.

    Raises:
        ValueError: another shape, or a number out of its domain.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0
    vocab_size: int | None = None
    met: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False, repr=False)
    """`(ids, logits)`, `[T, M]`, that a sweep came past, for the look-up that follows it."""

    def __post_init__(self) -> None:
        if self.weight.dim() != 2 or not len(self.weight):
            raise ValueError(f"weight.shape = {tuple(self.weight.shape)}: expected (V, d), V > 0")
        size, features = self.weight.shape
        found = tuple(self.hidden.shape)
        if not found or found[-1] != features:
            raise ValueError(f"hidden.shape = {found}: expected (..., {features})")
        if self.bias is not None and tuple(self.bias.shape) != (size,):
            raise ValueError(f"bias.shape = {tuple(self.bias.shape)}: expected ({size},)")
        for name, number in (("softcap", self.softcap), ("temperature", self.temperature)):
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} = {number}: must be positive and finite")
        if self.vocab_size is not None and not 1 <= self.vocab_size <= size:
            raise ValueError(f"vocab_size = {self.vocab_size}: must be 1 to {size}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits, `(*lead, V)`."""
        return (*self.hidden.shape[:-1], len(self.weight))

    @property
    def used(self) -> int:
        """Columns that are not padding."""
        return len(self.weight) if self.vocab_size is None else self.vocab_size

    def dim(self) -> int:
        """Dimensions of the logits."""
        return self.hidden.dim()

    def reshape(self, *shape: int) -> LinearHead:
        """The head with its leading dimensions reshaped; the last stays `V`."""
        return replace(self, hidden=self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]))

    def dtype_of(self, compute: torch.dtype) -> torch.dtype:
        """The dtype of products under `compute`: no operand loses bits."""
        for operand in (self.hidden, self.weight, self.bias):
            if operand is not None:
                compute = torch.promote_types(compute, operand.dtype)
        return compute

    def finish(self, product: Tensor, bias: Tensor | None) -> None:
        """Logits from `hidden . weight^T`, in place; `bias` is that of the product's columns."""
        if bias is not None:
            product.add_(bias)
        if self.softcap is not None:
            product.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1:
            product.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of logits by what the cap takes, `hidden . weight^T + bias`."""
        if self.softcap is None:
            return 1 / self.temperature
        tanh = logits * (self.temperature / self.softcap)
        return tanh.square_().neg_().add_(1).div_(self.temperature)


Source: TypeAlias = LinearHead | Tensor

ALIGNED = 16
"""Columns of a tile are a multiple of so many numbers, 64 bytes of float32."""


def slices(count: int, step: int) -> Iterator[slice]:
    """Consecutive parts of `range(count)`, `step` long but for the last."""
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def used(source: Source) -> int:
    """Columns that may hold something."""
    return source.used if isinstance(source, LinearHead) else source.shape[-1]


def tile_dtype(source: Source, compute: torch.dtype) -> torch.dtype:
    """The dtype of a tile: the logits lose no bits before the sums do."""
    if isinstance(source, LinearHead):
        return source.dtype_of(compute)
    return torch.promote_types(compute, source.dtype)


def local(ids: Tensor, columns: slice) -> Tensor:
    """Ids inside a tile; those of other columns point to the first of its padding."""
    inside = (ids >= columns.start) & (ids < columns.stop)
    return torch.where(inside, ids - columns.start, columns.stop - columns.start)


class Tiles:
    """Some of the `T` rows of a source, a tile of columns at a time.

    A tile is contiguous, and the last 1 to `ALIGNED` of its columns are -inf.

    Args:
        source: `[T, V]`.
        rows: a slice or indices.
        dtype: of the tiles.
    """

    def __init__(self, source: Source, rows: slice | Tensor, dtype: torch.dtype) -> None:
        self.source = source
        self.rows = source.hidden[rows] if isinstance(source, LinearHead) else source[rows]
        """Hidden states (on a CPU in `dtype`) or logits of the rows."""
        self._half: torch.dtype | None = None
        if isinstance(source, LinearHead):
            if dtype == torch.float32 and self.rows.dtype == source.weight.dtype != dtype:
                self._half = self.rows.dtype
            if self._half is None or not self.rows.is_cuda:
                self.rows = self.rows.to(dtype)

    @staticmethod
    def buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a tile."""
        return torch.empty(rows * _padded(columns), dtype=dtype, device=device)

    def make(self, columns: slice, out: Tensor) -> Tensor:
        """Logits in `columns` and padding, in a `buffer` of as many rows and columns or more."""
        source, width = self.source, columns.stop - columns.start
        pitch = _padded(width)
        tile = out[: len(self.rows) * pitch].view(len(self.rows), pitch)
        if isinstance(source, Tensor):
            tile[:, :width], tile[:, width:] = self.rows[:, columns], NEG_INF
            return tile
        count = min(max(source.used - columns.start, 0), width)
        columns = slice(columns.start, columns.start + count)
        tile[:, count:] = NEG_INF
        product, weight = tile[:, :count], source.weight[columns].mT
        if self._half is not None and product.is_cuda:
            torch.mm(self.rows, weight, out_dtype=tile.dtype, out=product)
        else:
            with _narrow_operands(self._half):
                torch.mm(self.rows, weight.to(tile.dtype), out=product)
        source.finish(product, None if source.bias is None else source.bias[columns])
        return tile


def _padded(columns: int) -> int:
    return -(-(columns + 1) // ALIGNED) * ALIGNED


@contextmanager
def _narrow_operands(dtype: torch.dtype | None) -> Iterator[None]:
    """float32 products whose operands hold bfloat16 numbers, at the speed of bfloat16 on CPUs.

    oneDNN then rounds its operands to bfloat16, here without loss, and accumulates and returns
    float32.  The setting is one for the process: it holds for a single product, and products of
    other threads in that time round their operands too.
    """
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    if dtype == torch.bfloat16:
        setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
