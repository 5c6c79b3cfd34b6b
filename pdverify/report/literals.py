"""Inputs of a counterexample as Python literals."""

from __future__ import annotations

import math
from pprint import pformat
from typing import Any

import numpy as np


def literal(value: Any, dtype: str | None = None, width: int = 88) -> str:
    """`value` (nested lists, numbers, booleans) as Python source over lines of `width`.

    Where `dtype` is ``float32``, the fewest digits that give the same float32.  ``inf`` and
    ``nan`` stand for the floats: whoever pastes the text defines them.
    """
    return pformat(_short(value) if dtype == "float32" else value, width=width, compact=True)


def _short(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    short = float(str(np.float32(value)))
    return short if np.float32(short) == value else value


def shape(value: Any) -> tuple[int, ...]:
    """Sizes of nested lists: ``(2, 3)`` for two lists of three; ``()`` for a number."""
    sizes: list[int] = []
    while isinstance(value, list | tuple):
        sizes.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(sizes)


def cells(value: Any) -> int:
    """How many numbers nested lists of `shape(value)` hold."""
    return math.prod(shape(value))


def beginning(value: Any, limit: int = 8) -> str:
    """The first `limit` numbers of nested lists, flattened, and ``...``."""
    found: list[Any] = []
    rest = [value]
    while rest and len(found) < limit:
        item = rest.pop(0)
        if isinstance(item, list | tuple):
            rest[:0] = item
        else:
            found.append(item)
    return "[" + ", ".join(map(repr, found)) + ", ...]"


def place_text(place: tuple[int, int] | None) -> str:
    """Where in the batch, in words."""
    if place is None:
        return "the whole answer"
    return f"sequence {place[0]}, position {place[1]}"
