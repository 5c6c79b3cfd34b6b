"""Backends: the same functions, in whatever runs them.  One registry entry each.

An entry binds a `Batch` to a device (`Bound`); what it binds is judged like anyone's code.  Torch
is imported when an entry is used, never before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from pdverify.registry import Registry

if TYPE_CHECKING:  # a trainer imports a torch backend with torch alone
    from numpy.typing import NDArray

    from pdverify.batch import Batch
    from pdverify.rules import Partition, Rule, Tail

Form: TypeAlias = Literal["plain", "complement"]


class Bound(Protocol):
    """A backend bound to one batch.  Everything comes back as NumPy arrays, `[B, L]`."""

    def divergence(self, name: str, partition: Partition) -> NDArray[Any]:
        """`D` in the unit of the divergence."""

    def coefficient(self, name: str, partition: Partition, tail: Tail | None) -> NDArray[Any]:
        """`C`."""

    def keep(self, rule: Rule) -> NDArray[Any]:
        """Keep mask, bool."""

    def loss(
        self, keep: NDArray[Any], ratio_cap: float, aggregation: str
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Masked policy loss and its gradient at the logits `[B, L, V]`."""


@dataclass(frozen=True)
class Backend:
    """One implementation.

    Attributes:
        name: as on the command line.
        summary: one line.
        form: the form of C whose rounding budget it is held to.
        precisions: formats it can compute in, the usual one first.
        devices: the devices it can run on here.
        unavailable: why it cannot run here, or None.
        bind: `(batch, precision, device) -> Bound`.
    """

    name: str
    summary: str
    form: Form
    precisions: tuple[str, ...]
    devices: Callable[[], tuple[str, ...]]
    unavailable: Callable[[], str | None]
    bind: Callable[[Batch, str, str], Bound]


BACKENDS: Registry[Backend] = Registry("backend")


def _available() -> str | None:
    return None


def _bind_numpy(batch: Batch, precision: str, device: str) -> Bound:
    from pdverify.backends.bound import BoundNumpy

    return BoundNumpy(batch)


def _bind_torch(module: str) -> Callable[[Batch, str, str], Bound]:
    def bind(batch: Batch, precision: str, device: str) -> Bound:
        import importlib

        from pdverify.backends.bound_torch import BoundTorch

        return BoundTorch(importlib.import_module(module), batch, precision, device)

    return bind


def _torch_devices() -> tuple[str, ...]:
    import torch

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


BACKENDS.add(
    "numpy",
    Backend(
        "numpy",
        "the definitions, float64",
        "complement",
        ("fp64",),
        lambda: ("cpu",),
        _available,
        _bind_numpy,
    ),
)
BACKENDS.add(
    "torch-eager",
    Backend(
        "torch-eager",
        "eager torch in stable forms",
        "complement",
        ("fp32", "fp64"),
        _torch_devices,
        _available,
        _bind_torch("pdverify.backends.torch_eager"),
    ),
)
