"""What came back from a target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.conformance.records import VerdictKind


@dataclass(frozen=True)
class Failure:
    """Why a call gave no usable answer."""

    kind: VerdictKind
    message: str


@dataclass(frozen=True)
class Answer:
    """What a target said.

    Attributes:
        values: returned name -> array; `keep` bool `[B, L]`, the others float64, `[B, L]` or `[]`.
        gradient: of the sum of the loss at `Target.differentiates`, float64, or None.
        failure: why there is no usable answer, or None.
    """

    values: dict[str, NDArray[Any]] = field(default_factory=dict)
    gradient: NDArray[np.float64] | None = None
    failure: Failure | None = None
