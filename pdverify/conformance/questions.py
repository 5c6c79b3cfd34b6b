"""What a target is asked: a batch, a rule, a way to lay out the arguments.

A `Question` fixes everything about one call; `arguments` turns it into the arrays of the target
protocol.  The right answers belong to the batch (`Material`), so that questions on one batch
share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, Rows
from pdverify.budgets import ANY_ORDER
from pdverify.cases.assemble import as_view, log_softmax
from pdverify.conformance.options import RATIO_CAP
from pdverify.conformance.truth import Truth
from pdverify.formats import FORMATS
from pdverify.rules import Rule

Known = TypeVar("Known")

Presentation: TypeAlias = Literal["contiguous", "strided", "split", "repeated", "guarded"]
"""How the arguments are laid out and the target is called.

``strided``: every tensor a non-contiguous view of a larger one.  ``split``: one call per sequence.
``repeated``: the same call twice, the second answer counts and equals the first.  ``guarded``:
the arguments are compared with copies afterwards.
"""

ARGUMENTS: dict[str, str] = {
    "logits": "working",
    "behavior_logits": "working",
    "logprobs": "float32",
    "behavior_logprobs": "float32",
    "tokens": "int64",
    "topk_ids": "int64",
    "topk_logprobs": "float32",
    "support_ids": "int64",
    "support_mask": "bool",
    "support_logprobs": "float32",
    "behavior_support_logprobs": "float32",
    "advantages": "float32",
    "response_mask": "bool",
    "vocab_size": "number",
    "top_k": "number",
    "delta": "number",
    "delta_low": "number",
    "delta_high": "number",
    "clip_low": "number",
    "clip_high": "number",
    "ratio_cap": "number",
    "eta": "number",
}
"""Inputs of the target protocol: name -> dtype (``working`` is that of the logits)."""

GARBAGE = 1e4
"""What stands on the padding of the input that a gradient is taken at."""

RETURNS = ("keep", "divergence", "coefficient", "loss")


class Material:
    """A batch with its right answers.

    `sampled_only`: the training policy is known to the target by the stored log-prob of the
    sampled token alone, so the right answers must hold for every value it may stand for.
    """

    def __init__(self, batch: Batch, *, sampled_only: bool = False) -> None:
        self.batch = batch
        self._sampled_only = sampled_only
        self._known: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Known]) -> Known:
        """What `make` gives, made once for this batch and key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]  # type: ignore[no-any-return]

    @cached_property
    def rows(self) -> Rows:
        """The valid tokens, as the target sees them."""
        if self._sampled_only:
            return as_view(self.batch, "sampled", training="logprobs").rows()
        return self.batch.rows()

    @cached_property
    def truth(self) -> Truth:
        """Oracle and budgets of the rows; sums may be taken in any order."""
        return Truth(self.rows, ANY_ORDER)


@dataclass(frozen=True, eq=False)
class Question:
    """One call of a target.

    Attributes:
        name: what the input is, for messages.
        material: the batch with its right answers.
        rule: the mask with its thresholds.
        ratio_cap: upper bound of the importance ratio in the loss.
        presentation: see `Presentation`.
        judges: what is judged of the answer, of ``keep``, ``divergence``, ``coefficient``,
            ``loss`` and ``gradient``.
        tokens: where loss and gradient are judged: ``kept``, ``dropped`` or ``all``; ``padding``
            judges padding, and that nothing else is NaN.
        poison: NaN on padding and in unused support slots, instead of harmless numbers.
        infinite: with `poison`, infinity (log-probs: -inf) instead of NaN.
        unanimous: tokens decided at exact equality: all of them lie on the threshold, which
            keeps; the target fails if it drops every one.
    """

    name: str
    material: Material
    rule: Rule
    ratio_cap: float = RATIO_CAP
    presentation: Presentation = "contiguous"
    judges: tuple[str, ...] = ("keep", "divergence", "coefficient", "loss", "gradient")
    tokens: Literal["kept", "dropped", "padding", "all"] = "all"
    poison: bool = False
    infinite: bool = False
    unanimous: bool = False

    @property
    def batch(self) -> Batch:
        """The batch that is asked about."""
        return self.material.batch

    @property
    def loss(self) -> bool:
        """Whether the loss or its gradient is judged."""
        return "loss" in self.judges or "gradient" in self.judges

    def on(self, batch: Batch) -> Question:
        """The same question about another batch."""
        fresh = Material(batch, sampled_only=self.material._sampled_only)
        return replace(self, material=fresh)


def differentiated(names: tuple[str, ...]) -> str | None:
    """The input at which a loss's gradient is judged: `logits`, else `logprobs`."""
    return next((name for name in ("logits", "logprobs") if name in names), None)


def _filled(x: NDArray[Any], valid: NDArray[np.bool_], value: Any) -> NDArray[Any]:
    mask = valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim))
    return np.where(mask, x, np.asarray(value, dtype=x.dtype))


def arguments(question: Question, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments `names` of the target protocol: NumPy arrays and numbers.

    Logits come as float32 or float64 arrays that hold values of `batch.dtype`.  Poison on padding
    is NaN, except where a gradient is taken: there NaN has no gradient but NaN, whatever follows,
    so it is a large number.
    """
    batch, rule = question.batch, question.rule
    valid = batch.response_mask
    float_fill = 0.0 if not question.poison else np.inf if question.infinite else np.nan
    logprob_fill = -1.0 if not question.poison else -float_fill
    at = differentiated(names) if question.loss and question.poison else None
    made: dict[str, Any] = {
        "response_mask": valid,
        "tokens": np.where(valid, batch.tokens, 0),
        "advantages": _filled(batch.advantages.astype(np.float32), valid, float_fill),
        "vocab_size": batch.vocab_size,
        "delta_low": rule.delta_low,
        "delta_high": rule.delta_high,
        "delta": rule.delta_high,
        "clip_low": rule.clip_low,
        "clip_high": rule.clip_high,
        "eta": rule.eta,
        "ratio_cap": question.ratio_cap,
        "behavior_logprobs": _filled(_need(batch.behavior_logprobs), valid, logprob_fill),
    }
    for name in ("logits", "behavior_logits"):
        if name in names:
            fill = GARBAGE if name == at else float_fill
            made[name] = _filled(_need(getattr(batch, name)), valid, fill)
    if batch.topk_ids is not None:
        made["top_k"] = batch.topk_ids.shape[-1]
        made["topk_ids"] = _filled(batch.topk_ids, valid, 0)
        made["topk_logprobs"] = _filled(_need(batch.topk_logprobs), valid, logprob_fill)
    if {"logprobs", "support_logprobs"} & set(names):
        log_pi = np.zeros(_need(batch.logits).shape)
        log_pi[valid] = log_softmax(_need(batch.logits)[valid].astype(np.float64))
        own = np.take_along_axis(log_pi, made["tokens"][..., None], axis=-1)
        fill = -GARBAGE if at == "logprobs" else logprob_fill
        made["logprobs"] = _filled(own[..., 0].astype(np.float32), valid, fill)
    if any("support" in name for name in names):
        made.update(_support(question, made, log_pi if "support_logprobs" in names else None))
    return {name: made[name] for name in names}


def _need(x: NDArray[Any] | None) -> NDArray[Any]:
    assert x is not None  # the suite's batches carry both views
    return x


def _support(
    question: Question, made: dict[str, Any], log_pi: NDArray[np.float64] | None
) -> dict[str, Any]:
    """The `support_*` arguments: the list and, with ``append``, a slot for the sampled token."""
    valid = question.batch.response_mask
    ids, listed = made["topk_ids"], made["topk_logprobs"]
    used = np.ones(ids.shape, dtype=bool)
    if question.rule.support == "append":
        token, own = made["tokens"][..., None], made["behavior_logprobs"][..., None]
        absent = ~(ids == token).any(axis=-1, keepdims=True)
        ids = np.concatenate([ids, token], axis=-1)
        listed = np.concatenate([listed, own], axis=-1)
        used = np.concatenate([used, absent], axis=-1)
    slot_fill = -1.0 if not question.poison else -np.inf if question.infinite else np.nan
    support = {
        "support_ids": ids,
        "support_mask": used & valid[..., None],
        "behavior_support_logprobs": np.where(used, listed, slot_fill).astype(np.float32),
    }
    if log_pi is not None:
        training = np.take_along_axis(log_pi, ids, axis=-1)
        training = np.where(used & valid[..., None], training, slot_fill)
        support["support_logprobs"] = training.astype(np.float32)
    return support


def unit_roundoff(precision: str, parameters: tuple[str, ...]) -> float:
    """Unit roundoff a target is held to.

    That of the declared precision, or twice that of float32 where the target reads training
    log-probs that are stored in float32 (their rounding, and the arithmetic's).
    """
    unit = FORMATS[precision].unit_roundoff
    if {"logprobs", "support_logprobs"} & set(parameters):
        return max(unit, 2 * FORMATS["fp32"].unit_roundoff)
    return unit
