"""What is measured: one registry entry each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS
from pdverify.registry import Registry
from pdverify.rules import Partition, Rule, Tail

Kind: TypeAlias = Literal["mask", "loss", "head"]

VOCAB = 151_936
"""A vocabulary that models are trained with."""

BY_ROWS, MATERIALIZED = "by-rows", "materialized"
READ, EXPONENTIALS, PRODUCT = "read-bandwidth", "exponentials", "matrix-product"
HEAD = "linear-head"
"""Names that others are compared with, and that of the backend with a workload of its own."""


@dataclass(frozen=True)
class Size:
    """`T` tokens, `V` vocabulary entries, `K` retained, `d` hidden (0: logits are the input)."""

    tokens: int
    vocab: int = VOCAB
    top_k: int = 20
    hidden: int = 0


@dataclass(frozen=True)
class Workload:
    """One thing to measure.

    Attributes:
        name: as on the command line.
        summary: what is measured.
        kind: ``mask``: D, C and the decision; ``loss``: the loss under the mask, with its gradient
            at the logits; ``head``: log-probs from hidden states and the head, forward only.
        divergence, view: of the mask.
        size: at level full.
        quick_tokens: `T` at level quick.
    """

    name: str
    summary: str
    kind: Kind
    divergence: str
    view: Partition
    size: Size
    quick_tokens: int

    def sized(self, level: str, tokens: int | None = None, vocab: int | None = None) -> Size:
        """The size at a level, or as asked for."""
        usual = self.size.tokens if level == "full" else self.quick_tokens
        return replace(self.size, tokens=tokens or usual, vocab=vocab or self.size.vocab)

    @property
    def tail(self) -> Tail | None:
        """The tail estimator: exact, in a top-K view."""
        return "exact" if self.view == "topk" else None

    def rule(self, tail: Tail | None = None) -> Rule:
        """The predictive mask at the paper's threshold, by default with the exact tail."""
        return MASKS[f"predictive-{self.divergence}"].rule(
            view="full" if self.view == "full" else "topk", tail=tail or self.tail
        )


WORKLOADS: Registry[Workload] = Registry("workload")


def _add(name: str, *about: object) -> None:
    WORKLOADS.add(name, Workload(name, *about))  # type: ignore[arg-type]


for _name, _divergence in DIVERGENCES.items():
    _summary = f"D, C and mask from both policies' logits: {_divergence.title}"
    _add(f"full-{_name}", _summary, "mask", _name, "full", Size(512), 128)
_add(
    "topk-kl",
    "D, C and mask from logits and a top-K list, exact tail",
    *("mask", "kl", "topk", Size(512), 128),
)
_add(
    "loss",
    "policy loss under the top-K mask, and its gradient at the logits",
    *("loss", "kl", "topk", Size(128), 32),
)
_add(
    "linear-head",
    "log-prob of the sampled token from hidden states and one head",
    *("head", "kl", "topk", Size(2048, 32_768, hidden=1024), 2048),
)
