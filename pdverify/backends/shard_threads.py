"""Ranks that are threads of this process: how ``vocab-parallel`` is judged on plain logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from pdverify.backends.masks import TorchBackend
from pdverify.backends.shards import Communicator, Shard

Result = TypeVar("Result")


class Threads:
    """`size` ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: dict[int, Tensor] = {}

    def run(self, function: Callable[[Communicator], Result]) -> list[Result]:
        """Results of `function` on every rank.

        Where ranks raise, the others stop waiting for them, and the first rank's error is raised.
        """
        recording = torch.is_grad_enabled()

        def work(rank: int) -> Result:
            try:
                with torch.set_grad_enabled(recording):
                    return function(_Thread(self, rank))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            ranks = [pool.submit(work, rank) for rank in range(self.size)]
        errors = [error for rank in ranks if (error := rank.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [rank.result() for rank in ranks]

    def exchange(self, rank: int, x: Tensor) -> Tensor:
        """What all ranks gave, `[size, ...]`."""
        self._given[rank] = x
        self._barrier.wait()
        found = torch.stack([self._given[other] for other in range(self.size)])
        self._barrier.wait()
        return found


class _Thread:
    """One of `Threads`."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.size = threads, rank, threads.size

    def maximum(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        return self._threads.exchange(self.rank, x).amax(0)

    def total(self, x: Tensor) -> Tensor:
        """See `Communicator`."""
        return self._threads.exchange(self.rank, x).sum(0)


def uneven(size: int) -> tuple[int, ...]:
    """Where three shards of a vocabulary begin, and its end: a sixth, a half and the rest."""
    return 0, size // 6, size // 6 + size // 2, size


def in_threads(
    backend: TorchBackend,
    cuts: Callable[[int], Sequence[int]] = uneven,
    padding: int = 3,
) -> SimpleNamespace:
    """Functions of `backend` on plain logits `[*lead, V]`, over ranks that are threads.

    Args:
        cuts: from V the columns where the shards begin, and V.
        padding: columns of NaN that the last shard has besides.

    Raises:
        RuntimeError: ranks return different results (when a function is called).
    """

    def on_ranks(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(logits: Tensor, *arguments: Any, **options: Any) -> Tensor:
            size = logits.shape[-1]
            bounds = cuts(size)

            def split(whole: Tensor) -> list[Tensor]:
                parts = [whole[..., a:b] for a, b in pairwise(bounds)]
                last = torch.nn.functional.pad(parts[-1], (0, padding), value=torch.nan)
                return [*parts[:-1], last]

            behavior = options.pop("behavior_logits", None)
            given = [split(x) for x in (logits, behavior) if x is not None]

            def one(rank: Communicator) -> Tensor:
                here = [Shard(x[rank.rank], bounds[rank.rank], size, rank) for x in given]
                more = {} if behavior is None else {"behavior_logits": here[1]}
                return function(here[0], *arguments, **options, **more)

            return _joined(Threads(len(given[0])).run(one))

        return call

    names = "divergence coefficient keep_mask predictive_mask log_prob policy_loss"
    names += " predictive_policy_loss"
    return SimpleNamespace(**{name: on_ranks(getattr(backend, name)) for name in names.split()})


def _joined(results: list[Tensor]) -> Tensor:
    """The ranks' common result, with the gradients of all."""
    first = results[0].detach()
    for rank, other in enumerate(results):
        if not ((other == first) | (other.isnan() & first.isnan())).all():
            raise RuntimeError(f"rank {rank} returned {other.detach()}, rank 0 {first}")
    joined: Tensor = _Joined.apply(*results)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    """One of several equal tensors; all of them get its gradient."""

    @staticmethod
    def forward(*results: Tensor) -> Tensor:
        return results[0].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.count = len(inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grads[0] for _ in range(ctx.count))
