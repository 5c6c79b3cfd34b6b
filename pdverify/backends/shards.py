"""Logits sharded over ranks along the vocabulary, and what reduces over the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed
from torch import Tensor


@runtime_checkable
class Communicator(Protocol):
    """Reductions over ranks, the same bits on each; `x` may be overwritten."""

    rank: int
    size: int

    def maximum(self, x: Tensor) -> Tensor:
        """Largest of the ranks' `x`, elementwise."""

    def total(self, x: Tensor) -> Tensor:
        """Sum of the ranks' `x`, elementwise."""


class Processes:
    """Ranks of a torch.distributed process group; None is the default one.

    Raises:
        ValueError: this process is not in the group.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("group: this process is not a member")

    def maximum(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX, self._group)
        return x

    def total(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        torch.distributed.all_reduce(x, torch.distributed.ReduceOp.SUM, self._group)
        return x


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's columns of logits `[*lead, size]`.

    The ranks' shards hold every column once, in any order.  They need not be equally wide; one may
    be empty (`V_local = 0`), and columns at or beyond `size` are padding: they are never read, and
    their gradient is 0.

    Args:
        logits: `[*lead, V_local]`, any floating dtype.
        start: the vocabulary's column that is the first one here, >= 0.
        size: vocabulary size, >= 1.
        group: a torch.distributed process group, None for the default one, or a `Communicator`.

    Raises:
        ValueError: a number out of its domain, or logits without a dimension.
    """

    logits: Tensor
    start: int
    size: int
    group: Any = None
    met: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False, repr=False)
    """`(ids, logits)`, `[T, M]`, that came with other sums."""

    def __post_init__(self) -> None:
        if not self.logits.dim():
            raise ValueError("logits.shape = (): expected (..., V_local)")
        if self.start < 0:
            raise ValueError(f"start = {self.start}: must not be negative")
        if self.size < 1:
            raise ValueError(f"size = {self.size}: must be positive")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits of all ranks, `(*lead, size)`."""
        return (*self.logits.shape[:-1], self.size)

    @property
    def used(self) -> int:
        """Columns here that are not padding."""
        return max(0, min(self.logits.shape[-1], self.size - self.start))

    @property
    def columns(self) -> Tensor:
        """The logits without padding, `[*lead, used]`, not copied."""
        return self.logits[..., : self.used]

    @property
    def layout(self) -> tuple[int, int, int]:
        """First column, the one after the last, vocabulary size."""
        return self.start, self.start + self.used, self.size

    def dim(self) -> int:
        """Dimensions of the logits."""
        return self.logits.dim()

    def reshape(self, *shape: int) -> Shard:
        """The shard with its leading dimensions reshaped; the last stays `size`."""
        lead = list(shape[:-1])
        if -1 in lead:  # torch cannot tell where there are no columns
            others = math.prod(x for x in lead if x != -1)
            lead[lead.index(-1)] = math.prod(self.logits.shape[:-1]) // max(others, 1)
        return replace(self, logits=self.logits.reshape(*lead, self.logits.shape[-1]))

    def communicator(self) -> Communicator:
        """What reduces over the ranks of `group`."""
        return self.group if isinstance(self.group, Communicator) else Processes(self.group)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of `ids` in this shard, 0 for those of another rank, and which are here."""
        start, stop, _ = self.layout
        here = (ids >= start) & (ids < stop)
        return torch.where(here, ids - start, 0), here

    def gather(self, ids: Tensor) -> Tensor:
        """Logits at `ids` `[T, M]`, float64; 0 for those of another rank."""
        at, here = self.places(ids)
        if not self.used:
            return torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        return torch.where(here, self.columns.gather(-1, at).double(), 0.0)
