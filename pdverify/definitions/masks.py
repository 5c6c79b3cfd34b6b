"""The masks by name, and what each keeps, in float64.

`MASKS` turns a name and its options into a `Rule`; `divergence`, `coefficient` and `keep` are the
definitions that every backend must agree with.  `pdverify.rules` has the table of drop rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import InputError, Rows, check_threshold
from pdverify.definitions import _formulas
from pdverify.definitions.cells import Cells, Float64, build, tail_mean, tail_square
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.registry import Registry
from pdverify.rules import Direction, Partition, Rule, Support, Tail

TAILS: tuple[Tail, ...] = ("aggregated", "uniform", "exact", "bracket")


@dataclass(frozen=True)
class Mask:
    """A named mask.

    Attributes:
        name: as on the command line.
        summary: one line.
        direction: the direction criterion.
        divergence: the divergence of its proximity criterion, or None.
        partition: the cells it is taken on; None: those of the caller's view.
        source: where it was published.
    """

    name: str
    summary: str
    direction: Direction
    divergence: str | None
    partition: Partition | None
    source: str

    def views(self) -> tuple[Partition, ...]:
        """The partitions this mask can be taken on."""
        return ("topk", "full") if self.partition is None else (self.partition,)

    def needs_tail(self, view: Partition) -> bool:
        """Whether the mask needs a tail estimator on this view."""
        return self.partition is None and view == "topk"

    def rule(
        self,
        *,
        view: Literal["topk", "full", "binary"] = "topk",
        tail: Tail | None = None,
        support: Support = "append",
        delta: float = 0.15,
        delta_low: float | None = None,
        delta_high: float | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        eta: float = 1.0,
    ) -> Rule:
        """The rule this mask comes down to.

        Raises:
            InputError: a top-K predictive mask without a tail, or a bad threshold.
        """
        partition = self.partition or view
        if self.needs_tail(partition) and tail is None:
            raise InputError("tail", None, None, f"{self.name} on topk needs --tail")
        for name, value in (("delta", delta), ("delta_low", delta_low), ("delta_high", delta_high)):
            check_threshold(name, value)
        return Rule(
            mask=self.name,
            direction=self.direction,
            divergence=self.divergence,
            partition=partition,
            tail=tail if self.needs_tail(partition) else None,
            support=support,
            delta_low=delta if delta_low is None else delta_low,
            delta_high=delta if delta_high is None else delta_high,
            clip_low=clip_low,
            clip_high=clip_high,
            eta=eta,
        )


MASKS: Registry[Mask] = Registry("mask")


def _add(
    name: str,
    summary: str,
    direction: Direction,
    divergence: str | None = None,
    partition: Partition | None = None,
    source: str = "arXiv 2607.10848",
) -> None:
    MASKS.add(name, Mask(name, summary, direction, divergence, partition, source))


_add("none", "never drops", "none", partition="binary")
_add(
    "ppo-clip",
    "drops outside the clip range of the importance ratio",
    "clip",
    partition="binary",
    source="arXiv 1707.06347",
)
_coarse_partitions: tuple[Partition, ...] = ("binary", "topk")
for _divergence in ("tv", "kl"):
    for _partition in _coarse_partitions:
        _add(
            f"dppo-{_partition}-{_divergence}",
            f"{_partition} {DIVERGENCES[_divergence].title}, ratio direction",
            "ratio",
            _divergence,
            _partition,
            "arXiv 2602.04879",
        )
for _name, _formula in DIVERGENCES.items():
    _add(
        f"predictive-{_name}",
        f"{_formula.title}, direction of the same divergence",
        "predictive",
        _name,
    )
_add(
    "predictive-kl-second-order",
    "forward KL after the step, to second order",
    "second-order",
    "kl",
    source="docs/formulas.md",
)


def divergence(cells: Cells, name: str) -> Float64:
    """Divergence `D(mu, pi)` on the cells, `[T]`, in the unit of `DIVERGENCES[name]`.

    Source: the cells of `docs/formulas.md`, summed.
    """
    cell = DIVERGENCES[name].cell
    total = np.asarray(cell(cells.mu, cells.pi).sum(axis=-1) + cell(cells.mu_tail, cells.pi_tail))
    return np.asarray(np.maximum(total, 0.0))


def coefficient(cells: Cells, name: str, tail: Tail | None = "exact") -> Float64:
    """Coefficient `C` on the cells, `[T]`: a step moves the divergence by `eta A r C`.

    Taken in the complement form, which equals the closed forms of `_formulas` and keeps the sign
    of C where they lose it to `1 - pi_k` (near-certain rows).  `tail` chooses the tail's motion.

    Source: arXiv 2607.10848; statements `stable.complement-universal` and `coarse.affine` of
    `docs/formulas.md`.
    """
    moment = DIVERGENCES[name].moment
    mu, pi = cells.mu.copy(), cells.pi.copy()
    for masses in (mu, pi):
        masses[np.arange(len(masses)), cells.slot] = 0.0
    return np.asarray(
        _formulas.complement_coefficient(
            moment(mu, pi),
            pi,
            moment(cells.mu_k, cells.pi_k),
            cells.pi_k,
            moment(cells.mu_tail, cells.pi_tail),
            cells.pi_tail,
            tail_mean(cells, None if cells.ids is None else tail),
        )
    )


def predicted_divergence(cells: Cells, rule: Rule, advantages: Float64) -> Float64:
    """Forward KL after the step `h = eta A r`, to second order, `[T]` nats.

    Source: statement `second-order.*` of `docs/formulas.md`.
    """
    if cells.ids is None:
        variance = _formulas.kl_second_order_variance(cells.pi, cells.pi_k)
    else:
        variance = _formulas.kl_coarse_second_order_variance(
            cells.pi,
            cells.pi_k,
            cells.mu_tail,
            cells.pi_tail,
            tail_mean(cells, rule.tail),
            tail_square(cells, rule.tail),
        )
    step = rule.eta * advantages * np.exp(cells.log_gap)
    return np.asarray(
        _formulas.predicted_divergence(
            divergence(cells, "kl"), coefficient(cells, "kl", rule.tail), variance, step
        )
    )


def keep(rows: Rows, rule: Rule, cells: Cells | None = None) -> NDArray[np.bool_]:
    """Keep decision of every row, bool `[T]`.

    A NaN in D or C drops the token: a comparison with NaN must not let it through.  `cells` saves
    building them again where the caller holds `build(rows, rule.partition, rule.support)`.
    """
    if rule.direction == "none":
        return np.ones(len(rows), dtype=bool)
    # a clip needs the sampled token alone, whatever else the rows carry
    partition = "binary" if rule.direction == "clip" else rule.partition
    cells = build(rows, partition, rule.support) if cells is None else cells
    advantages = rows.advantages
    unmoved = advantages == 0
    if rule.direction == "clip":
        low = np.log(1 - rule.clip_low) if rule.clip_low < 1 else -np.inf
        inside = np.where(
            advantages > 0, cells.log_gap <= np.log1p(rule.clip_high), cells.log_gap >= low
        )
        return np.asarray(inside | unmoved)
    if rule.tail == "bracket":
        low, high = (replace(rule, tail=end) for end in ("aggregated", "uniform"))
        either = _keep(cells, low, advantages) | _keep(cells, high, advantages)
        return np.asarray(either | unmoved)
    return np.asarray(_keep(cells, rule, advantages) | unmoved)


def _keep(cells: Cells, rule: Rule, advantages: Float64) -> NDArray[np.bool_]:
    assert rule.divergence is not None
    delta = np.where(advantages > 0, rule.delta_high, rule.delta_low)
    with np.errstate(invalid="ignore", over="ignore"):
        if rule.direction == "ratio":
            moves = np.sign(advantages) * cells.log_gap
            return np.asarray((divergence(cells, rule.divergence) <= delta) | (moves <= 0))
        moves = np.sign(advantages) * coefficient(cells, rule.divergence, rule.tail)
        if rule.direction == "second-order":
            distance = predicted_divergence(cells, rule, advantages)
        else:
            distance = divergence(cells, rule.divergence)
        return np.asarray((distance <= delta) | (moves <= 0))
