"""The definitions as a backend: ``numpy``, float64.

Same function names as the torch backends, for a `Batch`.  `cells` and `rows` save building them
again where the caller holds them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, Rows
from pdverify.definitions import losses, masks
from pdverify.definitions.cells import Cells, build
from pdverify.rules import Partition, Rule, Support, Tail


def _scatter(batch: Batch, values: NDArray[Any], fill: Any) -> NDArray[Any]:
    out = np.full(batch.tokens.shape, fill, dtype=values.dtype)
    out[batch.response_mask] = values
    return out


def divergence(
    batch: Batch,
    *,
    name: str,
    partition: Partition = "topk",
    support: Support = "append",
    cells: Cells | None = None,
) -> NDArray[np.float64]:
    """`pdverify.definitions.masks.divergence` of every token, `[B, L]`; NaN on padding."""
    cells = build(batch.rows(), partition, support) if cells is None else cells
    return _scatter(batch, masks.divergence(cells, name), np.nan)


def coefficient(
    batch: Batch,
    *,
    name: str,
    partition: Partition = "topk",
    tail: Tail | None = "exact",
    support: Support = "append",
    cells: Cells | None = None,
) -> NDArray[np.float64]:
    """`pdverify.definitions.masks.coefficient` of every token, `[B, L]`; NaN on padding."""
    cells = build(batch.rows(), partition, support) if cells is None else cells
    return _scatter(batch, masks.coefficient(cells, name, tail), np.nan)


def keep_mask(
    batch: Batch, *, rule: Rule, cells: Cells | None = None, rows: Rows | None = None
) -> NDArray[np.bool_]:
    """`pdverify.definitions.masks.keep` of every token, bool `[B, L]`; False on padding."""
    rows = batch.rows() if rows is None else rows
    return _scatter(batch, masks.keep(rows, rule, cells), False)


policy_loss = losses.policy_loss
