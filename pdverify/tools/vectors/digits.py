"""Right values to 40 certain digits: the oracle's formulas on arbitrary-precision balls.

A ball is printed only if both of its ends round to the same 40 digits and to the same float64;
where they do not, the row is computed again at twice the precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import numpy as np

from pdverify.batch import Rows
from pdverify.formats import FORMATS
from pdverify.oracle.arb_balls import ArbBall, precision
from pdverify.oracle.view import Quantity, View
from pdverify.rules import Partition, Support, Tail

DIGITS = 40
PRECISIONS = (256, 512, 1024)
_DECIMAL = Context(prec=DIGITS, Emin=-(10**6), Emax=10**6)


@dataclass(frozen=True)
class Value:
    """A right value: `decimal` to 40 digits and the `nearest` float64, both correctly rounded.

    Infinity is ``inf``.  Both are None where no digit is certain at the highest precision (the
    ball still touches 0) or where a coefficient is infinite.  `why` says so, and also where a
    float32 cannot hold the value.
    """

    decimal: str | None
    nearest: float | None
    why: str | None = None


ZERO = Value("0", 0.0)
INFINITE = Value("inf", float("inf"), "infinite")
UNDEFINED = Value(None, None, "infinite")
UNCERTAIN = Value(None, None, "not-certified")


def decimal_text(value: Decimal) -> str:
    """`value` rounded to 40 significant digits as ``d.ddde+x``, without trailing zeros."""
    rounded = _DECIMAL.plus(value)
    if rounded == 0:
        return "0"
    mantissa, exponent = f"{rounded:.{DIGITS - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"


def _rounded(end: Any) -> tuple[str, float]:
    """The exact binary number `end` as 40 digits and as a float64, each rounded once."""
    mantissa, exponent = (int(part) for part in end.man_exp())
    top, bottom = mantissa << max(exponent, 0), 1 << max(-exponent, 0)
    decimal = decimal_text(_DECIMAL.divide(Decimal(top), Decimal(bottom)))
    try:
        return decimal, top / bottom
    except OverflowError:
        return decimal, math.inf if top > 0 else -math.inf


def certify(ball: Any) -> Value | None:
    """The value of one `arb`, or None where its radius leaves a digit open."""
    if not ball.is_finite():
        return None
    low, high = _rounded(ball.lower()), _rounded(ball.upper())
    if low != high:
        return None
    return Value(*low, "overflow" if abs(low[1]) > FORMATS["fp32"].max_finite else None)


class ExactRows:
    """Certain digits of the quantities of `rows`; each is a list with one `Value` per row."""

    def __init__(self, rows: Rows, support: Support = "append") -> None:
        self.rows, self.support = rows, support
        self._views: dict[tuple[int, int], View] = {}

    def divergence(self, name: str, partition: Partition) -> list[Value]:
        """D, in the unit of the divergence."""
        values = self._each(lambda view: view.divergence(name, partition), INFINITE)
        stored = self.rows.logprobs
        if partition == "binary" and self.rows.logits is None and stored is not None:
            # two policies known by the same number are the same policy on {k, rest}
            same = stored == self.rows.behavior_logprobs
            values = [ZERO if equal else v for v, equal in zip(values, same, strict=True)]
        return values

    def coefficient(self, name: str, partition: Partition, tail: Tail | None) -> list[Value]:
        """C; undefined where it is infinite."""
        return self._each(lambda view: view.coefficient(name, partition, tail), UNDEFINED)

    def loss(self, ratio_cap: float | None) -> list[Value]:
        """-A min(r, cap) log pi_k; 0 where A = 0 or pi_k = 0 (the limit of r log pi_k)."""
        return self._each(lambda view: _loss(view, ratio_cap), UNDEFINED)

    def _each(self, quantity: Callable[[View], Quantity], infinite: Value) -> list[Value]:
        with np.errstate(all="ignore"):
            return [self._one(row, quantity, infinite) for row in range(len(self.rows))]

    def _one(self, row: int, quantity: Callable[[View], Quantity], infinite: Value) -> Value:
        for bits in PRECISIONS:
            with precision(bits):
                found = quantity(self._view(row, bits))
                if found.infinite[0]:
                    return infinite
                assert isinstance(found.ball, ArbBall)
                value = certify(found.ball.x[0])
            if value is not None:
                return value
        return UNCERTAIN

    def _view(self, row: int, bits: int) -> View:
        if (row, bits) not in self._views:
            one = self.rows.take(slice(row, row + 1))
            self._views[row, bits] = View(ArbBall, one, self.support, seek_ties=True)
        return self._views[row, bits]


def _loss(view: View, ratio_cap: float | None) -> Quantity:
    rows = view.rows
    assert rows.behavior_logprobs is not None
    exact, gone = view.kind.exact, view.cells("binary").sampled_has_no_pi()
    gap = view.ratio_gap("binary")
    log_pi = gap + exact(rows.behavior_logprobs)
    ratio = gap.exp()
    if ratio_cap is not None:
        over = (ratio - ratio_cap).positive()
        ratio = ratio.put(over, ratio_cap)
        open_rows = ~over & ~(ratio - ratio_cap).nonpositive()
        ratio = ratio.put(open_rows, np.nan)
    loss = -(ratio * log_pi) * exact(rows.advantages)
    still = gone | (rows.advantages == 0)
    return Quantity(loss.put(still, 0.0), np.zeros(len(rows), dtype=bool))
