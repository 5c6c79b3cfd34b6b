"""An array namespace on which the generated code runs exactly: SymPy symbols, or rationals.

Arrays are NumPy arrays of dtype object.  Symbols stand for positive numbers, so every guard of
the generated code takes the branch for positive masses.
"""

from __future__ import annotations

import random
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import sympy as sp

from derivations.emit import formulas_text

Array = Any


class ExactNamespace:
    """`where`, `sum`, `abs`, `log`, `sqrt` and `sign` on object arrays."""

    @staticmethod
    def where(condition: Array, x: Array, y: Array) -> Array:
        """Elementwise choice."""
        return np.where(condition, np.asarray(x, dtype=object), np.asarray(y, dtype=object))[()]

    @staticmethod
    def sum(x: Array, axis: int) -> Array:
        """Exact sum; an empty one is the rational 0."""
        return np.sum(np.asarray(x, dtype=object), axis=axis)

    @staticmethod
    def abs(x: Array) -> Array:
        """Elementwise absolute value."""
        return np.abs(np.asarray(x, dtype=object))[()]

    @staticmethod
    def log(x: Array) -> Array:
        """Elementwise natural logarithm, left symbolic."""
        return _map(sp.log, x)

    @staticmethod
    def sqrt(x: Array) -> Array:
        """Elementwise square root, left symbolic."""
        return _map(sp.sqrt, x)

    @staticmethod
    def sign(x: Array) -> Array:
        """Elementwise sign, left symbolic unless the argument is a number."""
        return _map(_sign, x)


EXACT = ExactNamespace()


def _sign(x: Any) -> Any:
    if isinstance(x, sp.Expr) and not x.is_number:
        return sp.sign(x, evaluate=False)
    return (x > 0) - (x < 0) if isinstance(x, (int, float, Fraction)) else sp.sign(x)


def _map(function: Any, x: Array) -> Array:
    if not isinstance(x, np.ndarray):
        return function(x)
    result = np.empty(x.shape, dtype=object)
    for place in np.ndindex(x.shape):
        result[place] = function(x[place])
    return result


@cache
def formulas() -> dict[str, Any]:
    """The namespace of the text that `write` would write now."""
    return execute(formulas_text())


def execute(text: str) -> dict[str, Any]:
    """The namespace that a formula file defines."""
    namespace: dict[str, Any] = {"__name__": "_formulas"}
    exec(compile(text, "_formulas.py", "exec"), namespace)
    return namespace


def array(values: Any) -> Array:
    """An object array."""
    values = list(values)
    result = np.empty(len(values), dtype=object)
    result[:] = values
    return result


def random_policy(rng: random.Random, size: int, scale: int = 1000) -> list[sp.Rational]:
    """A policy of positive rationals with common denominator, peaked about half of the time."""
    power = rng.choice((1, 4))
    weights = [1 + int(scale * rng.random() ** power) for _ in range(size)]
    return [sp.Rational(weight, sum(weights)) for weight in weights]


def call(name: str, *arguments: Any, code: dict[str, Any] | None = None) -> Any:
    """Run a generated function on one token: vectors are object arrays, the rest are scalars."""
    function = (code or formulas())[name]
    rows = [x[None] if isinstance(x, np.ndarray) else array([x]) for x in arguments]
    extra = {"xp": EXACT} if "xp" in function.__annotations__ else {}
    return function(*rows, **extra)[0]
