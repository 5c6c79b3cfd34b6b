"""How a target is to be judged: the options of `pdverify check TARGET`, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from pdverify.batch import InputError, check_threshold
from pdverify.definitions.losses import AGGREGATIONS
from pdverify.definitions.masks import MASKS, TAILS, Mask
from pdverify.formats import policy_format
from pdverify.rules import Partition, Rule, Support, Tail

RATIO_CAP = 20.0
"""Upper bound of the importance ratio in the loss where the caller declares none."""

LEVELS = ("quick", "full")


@dataclass(frozen=True)
class Options:
    """What the target claims to be, and how hard to look.

    A number left at None is varied by the suite where the target takes it by name, and has its
    default (`delta` 0.15, clips 0.2, `eta` 1, `ratio_cap` 20) elsewhere.

    Attributes:
        mask: name in `MASKS`.
        view: ``topk`` or ``full``; masks that know one partition only ignore it.
        tail: estimator of the tail's collision mass, for a predictive mask on ``topk``.
        support: ``append`` or ``replace``.
        top_k: K of every input.
        delta, delta_low, delta_high: thresholds in the divergence's unit.
        clip_low, clip_high: clip range of the importance ratio.
        ratio_cap: upper bound of the importance ratio in the loss.
        eta: step size of the second-order mask.
        aggregation: how a scalar loss is reduced; None where the loss is per token.
        precision: number format that the target computes in.
        neg_inf: whether inputs may hold -inf.
        time_limit: seconds one call may take; the first may take twice that.
        select, deselect: globs of check ids.
        accept: ids of conventions that the caller follows on purpose.
        level: ``quick`` or ``full``.
        seed: of every input.

    Raises:
        UnknownName, InputError: naming the option.
    """

    mask: str
    view: str = "topk"
    tail: str | None = None
    support: str = "append"
    top_k: int | None = None
    delta: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    ratio_cap: float | None = None
    eta: float | None = None
    aggregation: str | None = None
    precision: str = "fp32"
    neg_inf: bool = True
    time_limit: float = 8.0
    select: tuple[str, ...] = ()
    deselect: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    level: str = "quick"
    seed: int = 0

    def __post_init__(self) -> None:
        definition = MASKS[self.mask]
        policy_format(self.precision)
        choices = {
            "view": ("topk", "full"),
            "tail": (None, *TAILS),
            "support": get_args(Support),
            "aggregation": (None, *(a for a in AGGREGATIONS if a != "none")),
            "level": LEVELS,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                shown = ", ".join(str(x) for x in known if x is not None)
                raise InputError(name, None, value, f"known: {shown}")
        if definition.needs_tail(self.partition) and self.tail is None:
            raise InputError(
                "tail",
                None,
                None,
                f"{self.mask} on the topk view needs --tail {'|'.join(TAILS)}",
            )
        for name in ("delta", "delta_low", "delta_high", "clip_low", "clip_high"):
            check_threshold(name, getattr(self, name))
        for name, value in (("ratio_cap", self.ratio_cap), ("eta", self.eta)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(name, None, value, "a finite number > 0")
        if not self.time_limit > 0:
            raise InputError("time_limit", None, self.time_limit, "seconds > 0")
        if self.top_k is not None and self.top_k < 1:
            raise InputError("top_k", None, self.top_k, "at least 1")

    @property
    def definition(self) -> Mask:
        """The mask's entry."""
        return MASKS[self.mask]

    @property
    def partition(self) -> Partition:
        """The cells that the mask is taken on."""
        own = MASKS[self.mask].partition
        if own is not None:
            return own
        return "full" if self.view == "full" else "topk"

    def rule(self, **changes: float) -> Rule:
        """The rule with the options' thresholds, `changes` (fields of `Rule`, or `delta`) over
        them."""
        delta = changes.pop("delta", 0.15 if self.delta is None else self.delta)
        tail: Tail | None = self.tail  # type: ignore[assignment]
        support: Support = self.support  # type: ignore[assignment]
        rule = self.definition.rule(
            view="full" if self.partition == "full" else "topk",
            tail=tail,
            support=support,
            delta=delta,
            delta_low=self.delta_low,
            delta_high=self.delta_high,
            clip_low=0.2 if self.clip_low is None else self.clip_low,
            clip_high=0.2 if self.clip_high is None else self.clip_high,
            eta=1.0 if self.eta is None else self.eta,
        )
        return replace(rule, **changes)  # type: ignore[arg-type]
