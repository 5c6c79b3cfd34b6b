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
        module: where its functions on plain logits are, if they can be called as they are.
    """

    name: str
    summary: str
    form: Form
    precisions: tuple[str, ...]
    devices: Callable[[], tuple[str, ...]]
    unavailable: Callable[[], str | None]
    bind: Callable[[Batch, str, str], Bound]
    module: str | None = None


BACKENDS: Registry[Backend] = Registry("backend")


def _available() -> str | None:
    return None


def _bind_numpy(batch: Batch, precision: str, device: str) -> Bound:
    from pdverify.backends.bound import BoundNumpy

    return BoundNumpy(batch)


def _bind_torch(module: str, judged: str | None) -> Callable[[Batch, str, str], Bound]:
    def bind(batch: Batch, precision: str, device: str) -> Bound:
        import importlib

        from pdverify.backends.bound_torch import BoundTorch

        functions = importlib.import_module(module)
        functions = getattr(functions, judged) if judged else functions
        return BoundTorch(functions, batch, precision, device)

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


def _add_torch(name: str, module: str, summary: str, judged: str | None = None) -> None:
    """A torch backend; what its module says of itself in `unavailable` and `devices` counts.

    `judged` is an object of that module with the functions on plain logits, where those of the
    module read them from something else.
    """

    def ask(function: str, usual: Callable[[], Any]) -> Any:
        import importlib

        return getattr(importlib.import_module(module), function, usual)()

    BACKENDS.add(
        name,
        Backend(
            name,
            summary,
            "complement",
            ("fp32", "fp64"),
            lambda: ask("devices", _torch_devices),
            lambda: ask("unavailable", _available),
            _bind_torch(module, judged),
            None if judged else module,
        ),
    )


_add_torch("torch-eager", "pdverify.backends.torch_eager", "eager torch in stable forms")
_add_torch(
    "torch-chunked",
    "pdverify.backends.torch_chunked",
    "eager torch, one pass, nothing of the size of the logits",
)
_add_torch(
    "linear-head",
    "pdverify.backends.exact_heads",
    "from hidden states and the language-model head",
    "exact_products",
)
_add_torch(
    "vocab-parallel",
    "pdverify.backends.vocab_parallel",
    "logits sharded over ranks along the vocabulary",
    "in_process",
)
_add_torch(
    "torch-compiled", "pdverify.backends.torch_compiled", "the same sums through torch.compile"
)
_add_torch("native", "pdverify.backends.native", "a C++ kernel for CPUs, built on first use")
_add_torch("triton", "pdverify.backends.triton_backend", "Triton kernels for GPUs")
