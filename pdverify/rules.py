"""A mask as data: which tokens it drops.

A `Rule` is what a mask's name, its options and its thresholds come down to.  The definitions,
the backends and the oracle each interpret it on their own; they share no code, only this record.

A token is DROPPED when it is outside the trust region (proximity criterion) AND its update would
push it further out (direction criterion); every comparison is strict, so `A = 0`, `D = delta` and
`C = 0` keep it.  With `r = pi_k / mu_k`, `h = eta A r`, and `delta` short for `delta_high` where
`A > 0`, `delta_low` where `A < 0`:

=================  ===============================================================
direction          dropped when
=================  ===============================================================
``none``           never
``clip``           `A > 0 and r > 1 + clip_high`, or `A < 0 and r < 1 - clip_low`
``ratio``          `D > delta` and `A (pi_k - mu_k) > 0`
``predictive``     `D > delta` and `A C > 0`
``second-order``   `A C > 0` and `D + h C + h^2 Var / 2 > delta`
=================  ===============================================================

`D`, `C` and `Var` belong to `divergence` on the cells of `partition`: every token (``full``), the
retained support plus one tail cell (``topk``), or {k, rest} (``binary``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Direction: TypeAlias = Literal["none", "clip", "ratio", "predictive", "second-order"]
Partition: TypeAlias = Literal["full", "topk", "binary"]
Tail: TypeAlias = Literal["aggregated", "uniform", "exact", "bracket"]
Support: TypeAlias = Literal["append", "replace"]


@dataclass(frozen=True)
class Rule:
    """Which tokens a mask drops; see the module's table.

    Attributes:
        mask: the mask's name, for messages.
        direction: the direction criterion.
        divergence: name of the divergence, or None where no divergence is used.
        partition: the cells it is taken on.
        tail: estimator of the tail's collision mass where `partition` is ``topk`` and the
            direction is predictive; ``bracket`` drops only if both ends (aggregated and uniform)
            say that the divergence increases.  None elsewhere.
        support: ``append`` retains the top-K plus the sampled token; ``replace`` takes the top-K
            list as it is (it holds the sampled token already).
        delta_low, delta_high: thresholds in the divergence's unit (nats or probability), for
            `A < 0` and `A > 0`.
        clip_low, clip_high: bounds of ``clip`` on the importance ratio.
        eta: step size of ``second-order``.
    """

    mask: str
    direction: Direction
    divergence: str | None = None
    partition: Partition = "topk"
    tail: Tail | None = None
    support: Support = "append"
    delta_low: float = 0.15
    delta_high: float = 0.15
    clip_low: float = 0.2
    clip_high: float = 0.2
    eta: float = 1.0
