"""Masks as studies take them: each mask of the registry on each of its views, with each tail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdverify.definitions.masks import MASKS, TAILS, Mask
from pdverify.rules import Partition, Rule, Tail


@dataclass(frozen=True)
class Variant:
    """A mask on a view, with the tail estimator that it needs there.

    Attributes:
        name: ``predictive-kl/topk/exact``; what the mask itself settles is left out.
        mask: the entry of the registry.
        view: the cells of its divergence.
        tail: the tail estimator, or None.
        options: thresholds other than `delta` that belong to the name.
    """

    name: str
    mask: Mask
    view: Partition
    tail: Tail | None
    options: tuple[tuple[str, float], ...] = ()

    def rule(self, **options: Any) -> Rule:
        """The rule, under the options of `Mask.rule` (`delta`, `eta`, ...)."""
        return self.mask.rule(view=self.view, tail=self.tail, **(options | dict(self.options)))


def variants() -> dict[str, Variant]:
    """Name -> variant, of every mask in the registry."""
    return {variant.name: variant for variant in _variants()}


def _variants() -> Iterator[Variant]:
    for name, mask in MASKS.items():
        for view in mask.views():
            tails: tuple[Tail | None, ...] = TAILS if mask.needs_tail(view) else (None,)
            for tail in tails:
                parts = [
                    name,
                    *([view] if mask.partition is None else []),
                    *([tail] if tail else []),
                ]
                yield Variant("/".join(parts), mask, view, tail)
        if mask.direction == "clip":
            higher = (("clip_low", 0.2), ("clip_high", 0.28))
            yield Variant(f"{name}/higher", mask, mask.views()[0], None, higher)
