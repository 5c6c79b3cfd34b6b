"""The `numpy` backend bound to a batch."""

from __future__ import annotations

from functools import cache
from typing import Any

from numpy.typing import NDArray

from pdverify.backends import numpy_reference
from pdverify.batch import Batch
from pdverify.definitions.cells import Cells, build
from pdverify.rules import Partition, Rule, Tail


class BoundNumpy:
    """See `pdverify.backends.Bound`.  The cells of each partition are built once."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._rows = batch.rows()
        self._cells = cache(self._build)

    def _build(self, partition: Partition) -> Cells:
        return build(self._rows, partition)

    def divergence(self, name: str, partition: Partition) -> NDArray[Any]:
        return numpy_reference.divergence(
            self._batch, name=name, partition=partition, cells=self._cells(partition)
        )

    def coefficient(self, name: str, partition: Partition, tail: Tail | None) -> NDArray[Any]:
        return numpy_reference.coefficient(
            self._batch, name=name, partition=partition, tail=tail, cells=self._cells(partition)
        )

    def keep(self, rule: Rule) -> NDArray[Any]:
        return numpy_reference.keep_mask(
            self._batch, rule=rule, cells=self._cells(rule.partition), rows=self._rows
        )

    def loss(
        self, keep: NDArray[Any], ratio_cap: float, aggregation: str
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        return numpy_reference.policy_loss(
            self._batch, keep, ratio_cap=ratio_cap, aggregation=aggregation
        )
