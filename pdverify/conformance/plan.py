"""Inputs for checks: batches with their right answers, thresholds, advantages, made once.

A `Plan` knows what a target claims to be and what it takes; checks ask it for questions.  Plans of
equal options share their batches, so that many targets are judged with one set of truths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Batch, gather, take
from pdverify.budgets import ANY_ORDER, Budgets
from pdverify.cases import build as build_family
from pdverify.cases import replace_last
from pdverify.cases.assemble import Size, assemble
from pdverify.conformance.options import RATIO_CAP, Options
from pdverify.conformance.questions import Material, Question, unit_roundoff
from pdverify.conformance.truth import Array, finite
from pdverify.definitions import masks
from pdverify.definitions.cells import Cells, build
from pdverify.rules import Rule

THRESHOLDS = ("delta", "delta_low", "delta_high")

VOCABULARY, TOP_K = 257, 20
"""Size of an ordinary input."""


NUMBERS = frozenset((*THRESHOLDS, "clip_low", "clip_high", "ratio_cap", "eta"))
"""Parameters that the suite varies where a target takes them."""


@dataclass(frozen=True)
class _Store:
    """Batches and questions of one set of options, with their right answers, by key."""

    materials: dict[Any, Material]
    questions: dict[Any, list[Question]]


@lru_cache(maxsize=4)
def _store(options: Options) -> _Store:
    return _Store({}, {})


@lru_cache(maxsize=256)
def _built(family: str, seed: int, *size: tuple[str, Any]) -> Batch:
    """The batch of a family; many masks are asked about the same ones."""
    return build_family(family, seed=seed, **dict(size))


class Plan:
    """Makes questions for one kind of target.

    Args:
        options: what the target claims.
        parameters: the inputs it takes.
        outputs: what it returns.
    """

    def __init__(
        self, options: Options, parameters: tuple[str, ...], outputs: tuple[str, ...]
    ) -> None:
        self.options, self.parameters, self.outputs = options, parameters, outputs
        self._shared = _store(replace(options, select=(), deselect=(), accept=(), time_limit=1.0))
        self._traits = (NUMBERS & set(parameters), self.sampled_only, self._unit)

    def questions(self, check: Any) -> list[Question]:
        """What a check asks; the same objects for every target of these traits."""
        key = (check.id, self._traits)
        if key not in self._shared.questions:
            self._shared.questions[key] = list(check.questions(self))
        return self._shared.questions[key]

    def cached(self, key: tuple[Any, ...], make: Callable[[], Material]) -> Material:
        """The batch of that key, made once for all targets with these options."""
        whole = (*key, self.sampled_only)
        if whole not in self._shared.materials:
            self._shared.materials[whole] = make()
        return self._shared.materials[whole]

    # ---- what the target is

    def takes(self, *names: str) -> bool:
        """Whether the target takes any of these inputs."""
        return bool(set(names) & set(self.parameters))

    def free(self, *names: str) -> bool:
        """Whether the suite may vary these numbers: all taken by the target, none declared."""
        return all(n in self.parameters and getattr(self.options, n) is None for n in names)

    @property
    def rule(self) -> Rule:
        """The rule at the declared or default thresholds."""
        return self.options.rule()

    @property
    def partition(self) -> str:
        """The cells the mask is taken on."""
        return self.options.partition

    @property
    def measured(self) -> bool:
        """Whether the mask has a divergence."""
        return self.rule.divergence is not None and self.rule.direction != "none"

    @property
    def predictive(self) -> bool:
        """Whether the mask has a coefficient."""
        return self.rule.direction in ("predictive", "second-order")

    @property
    def sampled_only(self) -> bool:
        """Whether the target sees the training policy at the sampled token alone."""
        return not self.takes("logits", "support_logprobs")

    @property
    def delta_is_free(self) -> bool:
        """Whether the threshold may be varied."""
        if not self.measured or any(getattr(self.options, n) is not None for n in THRESHOLDS):
            return False
        return self.takes("delta") or {"delta_low", "delta_high"} <= set(self.parameters)

    @property
    def top_k_is_free(self) -> bool:
        """Whether K may be varied."""
        return self.partition == "topk" and self.options.top_k is None

    @property
    def seeds(self) -> range:
        """Seeds of one input: one at level quick, four at full."""
        return range(
            self.options.seed, self.options.seed + (4 if self.options.level == "full" else 1)
        )

    # ---- batches

    def material(
        self,
        family: str,
        *,
        advantages: str = "mixed",
        change: Callable[[Batch], Batch] | None = None,
        key: str = "",
        seed: int | None = None,
        **size: Any,
    ) -> Material:
        """The batch of a family, its zero advantages replaced, with its right answers.

        `advantages`: ``mixed``; ``push``: signed so that each token is dropped where it is
        outside; ``zero``: mostly 0.  `change` edits the batch; `key` names the edit.
        """
        seed = self.options.seed if seed is None else seed
        whole = {"vocab_size": VOCABULARY, "top_k": self.options.top_k or TOP_K, **size}

        def make() -> Material:
            batch = self._signed(_built(family, seed, *sorted(whole.items())), advantages)
            return self.wrap(change(batch) if change else batch)

        return self.cached((family, advantages, key, seed, *sorted(whole.items())), make)

    def sequence(self, family: str, length: int, **options: Any) -> Batch:
        """One sequence of a family without padding."""
        size = {"vocab_size": 65, "top_k": self.options.top_k or 6, **options}
        # a batch of one sequence is padded at its last place
        batch = self.material(family, sequences=1, length=length + 1, **size).batch
        assert batch.response_mask[:, :-1].all()
        return take(batch, slice(None), slice(0, length))

    def wrap(self, batch: Batch) -> Material:
        """A batch with its right answers, its lists replaced where the support says so."""
        if self.options.support == "replace":
            batch = replace_last(batch)
        # equal batches share their answers, however a question came by them
        return self.cached(
            (_digest(batch),), lambda: Material(batch, sampled_only=self.sampled_only)
        )

    def cells(self, batch: Batch) -> Cells:
        """The definitions' cells of the mask's partition."""
        partition = "binary" if self.rule.divergence is None else self.options.partition
        return build(Material(batch, sampled_only=self.sampled_only).rows, partition)

    def distance(self, batch: Batch) -> Array:
        """What the proximity criterion compares, `[T]` float64: D, or log r for a clip."""
        cells = self.cells(batch)
        if self.rule.divergence is None or not self.measured:
            return cells.log_gap
        return masks.divergence(cells, self.rule.divergence)

    def direction(self, batch: Batch) -> Array:
        """The direction quantity, `[T]` float64: C or log r; of a bracket 0 where its ends part."""
        cells, rule = self.cells(batch), self.rule
        if not self.predictive or rule.divergence is None:
            return cells.log_gap
        if rule.tail != "bracket":
            return masks.coefficient(cells, rule.divergence, rule.tail)
        low = masks.coefficient(cells, rule.divergence, "aggregated")
        high = masks.coefficient(cells, rule.divergence, "uniform")
        return np.where(np.sign(low) == np.sign(high), low, 0.0)

    def _signed(self, batch: Batch, how: str) -> Batch:
        a = np.where(batch.response_mask, batch.advantages, 0.0).astype(np.float32)
        index = np.arange(a.size).reshape(a.shape)
        if how == "zero":
            return replace(batch, advantages=np.where(index % 4 == 3, a, 0.0).astype(np.float32))
        a = np.where(a == 0, np.where(index % 2 == 0, 0.5, -0.5), a).astype(np.float32)
        if how == "push":
            sign = np.ones(a.shape)
            with np.errstate(all="ignore"):
                sign[batch.response_mask] = np.sign(self.direction(batch))
            a = np.where(sign == 0, a, sign * np.abs(a)).astype(np.float32)
        return replace(batch, advantages=a)

    # ---- thresholds

    def rules(self, material: Material) -> list[Rule]:
        """The rule at the usual thresholds and, where they are free, at a token's own distance."""
        if self.rule.direction == "clip":
            if self.free("clip_low", "clip_high"):
                return [self.rule, self.options.rule(clip_low=0.1, clip_high=0.5)]
            return [self.rule]
        if not self.delta_is_free:
            return [self.rule]
        known = np.sort(self.distance(material.batch))
        known = known[np.isfinite(known) & (known > 0)]
        if not len(known):
            return [self.rule]
        return [self.rule, self.options.rule(delta=_short(float(known[len(known) // 2])))]

    def ordinary(self, family: str, **options: Any) -> Iterator[Question]:
        """Questions about a family at the usual thresholds."""
        asked = {k: options.pop(k) for k in list(options) if k in Question.__dataclass_fields__}
        name = options.get("key") or family
        for seed in self.seeds:
            material = self.material(family, seed=seed, **options)
            for rule in self.rules(material):
                yield self.question(name, material, rule, **asked)

    def question(self, name: str, material: Material, rule: Rule, **options: Any) -> Question:
        """A question about a batch; its name says which thresholds."""
        options.setdefault("ratio_cap", self.loss_cap)
        return Question(f"{name}{_thresholds(rule)}", material, rule, **options)

    def near(self, family: str = "peaked", dtype: str = "fp32") -> Iterator[Question]:
        """Questions in which each token lies two to three budgets from its threshold.

        Every advantage pushes outward, so that the proximity criterion alone decides.  In a
        narrow format of logits only free thresholds can be brought that close.
        """
        if self.rule.direction == "clip" and self.free("clip_low", "clip_high"):
            yield from self._near_width(family, dtype)
        elif self.delta_is_free:
            yield from self._near_delta(family, dtype)
        elif dtype == "fp32" and self.rule.direction == "clip":
            yield from self._near_clip(family)
        elif dtype == "fp32" and self.measured:
            yield from self._near_fixed(family)

    def _near_width(self, family: str, dtype: str) -> Iterator[Question]:
        material = self.material(
            family, advantages="push", sequences=2, length=6, dtype=dtype, **self._small
        )
        ratio = np.exp(self.distance(material.batch))
        step = ratio * (np.expm1(2.5 * self._budget(material.batch)) + 8 * self._unit)
        usable = np.isfinite(step) & (np.abs(ratio - 1) > 4 * step) & (ratio > 1e-3)
        for t in np.flatnonzero(usable)[:5]:
            for side in (-1, 1):
                width = float(abs(ratio[t] - 1) + side * step[t])
                b, position = material.rows.index[t]
                yield self.question(
                    f"{family}, bound {'beyond' if side > 0 else 'short of'} r of"
                    f" [{b}, {position}], {dtype}",
                    material,
                    self.options.rule(clip_low=min(width, 1.0), clip_high=width),
                    judges=("keep",),
                )

    def _near_delta(self, family: str, dtype: str) -> Iterator[Question]:
        material = self.material(
            family, advantages="push", sequences=2, length=6, dtype=dtype, **self._small
        )
        middle, budget = self._threshold(material)
        usable = (middle > 1e-4) & np.isfinite(middle) & np.isfinite(budget)
        for t in np.flatnonzero(usable)[:5]:
            for side in (-2.5, 2.5):
                delta = float(middle[t] + side * (budget[t] + self._unit * middle[t]))
                if delta > 0:
                    b, position = material.rows.index[t]
                    name = f"{dtype} {family}, threshold {'above' if side > 0 else 'below'} D of"
                    yield self.question(
                        f"{name} [{b}, {position}]", material, self.options.rule(delta=delta),
                        judges=("keep",),
                    )  # fmt: skip

    def _threshold(self, material: Material) -> tuple[Array, Array]:
        """Where each token's decision turns, `[T]`, and the budget of that."""
        truth, rule = material.truth, self.rule
        assert rule.divergence is not None
        if rule.direction == "second-order" and rule.tail != "bracket":
            cells = self.cells(material.batch)
            predicted = masks.predicted_divergence(cells, rule, truth.rows.advantages)
            return predicted, truth.allowance(rule, rule.tail, self._unit, "plain").proximity
        right = truth.divergence(rule.divergence, rule.partition)
        return np.where(finite(right), right.mid, np.nan), self._budget(material.batch)

    @property
    def _small(self) -> dict[str, Any]:
        """Sizes with a small budget: sums of few terms."""
        return {"vocab_size": 17 + (self.options.top_k or 5), "top_k": self.options.top_k or 5}

    @property
    def _unit(self) -> float:
        return unit_roundoff(self.options.precision, self.parameters)

    def _budget(self, batch: Batch) -> Array:
        """Budget of D (or of log r), `[T]`."""
        rows = Material(batch, sampled_only=self.sampled_only).rows
        partition = "binary" if self.rule.divergence is None else self.options.partition
        budgets = Budgets(rows, partition, "append", self._unit, "plain", None, ANY_ORDER)
        if self.rule.divergence is None:
            return budgets.log_ratio()
        return budgets.divergence(self.rule.divergence)

    def _near_fixed(self, family: str) -> Iterator[Question]:
        batch = self.material(family, sequences=2, length=8, **self._small).batch
        for side, delta in (("A < 0", self.rule.delta_low), ("A > 0", self.rule.delta_high)):
            at = self.moved(batch, np.full(len(batch.rows()), delta))
            step = 2.5 * (self._budget(at) + self._unit * delta)
            sign = np.where(np.arange(len(step)) % 2 == 0, 1.0, -1.0)
            goal = np.where(np.isfinite(step), delta + sign * step, delta)
            near = self._signed(self.moved(batch, goal), "push")
            material = self.wrap(near)
            yield self.question(f"{family}, D near delta, {side}", material, self.rule,
                                judges=("keep",))  # fmt: skip

    def _near_clip(self, family: str) -> Iterator[Question]:
        rule = self.rule
        batch = self.material(family, sequences=2, length=8, **self._small).batch
        low = np.log(1 - rule.clip_low) if rule.clip_low < 1 else -np.inf
        for bound, a in ((np.log1p(rule.clip_high), 1.0), (low, -1.0)):
            if not np.isfinite(bound) or bound == 0:
                continue
            at = self.moved(batch, np.full(len(batch.rows()), bound))
            step = 2.5 * (self._budget(at) + 4 * self._unit)
            sign = np.where(np.arange(len(step)) % 2 == 0, 1.0, -1.0)
            near = self.moved(batch, bound + sign * step)
            near = replace(near, advantages=np.full(near.tokens.shape, a, dtype=np.float32))
            yield self.question(f"{family}, r near {np.exp(bound):.4g}", self.wrap(near), rule,
                                judges=("keep",))  # fmt: skip

    def moved(self, batch: Batch, goal: Array) -> Batch:
        """The batch with behavior logits moved so that the distance is `goal`, `[T]`.

        For a divergence along the line from the training logits through the behavior ones; for a
        clip by the behavior logit of the sampled token.
        """
        valid = batch.response_mask
        assert batch.logits is not None
        assert batch.behavior_logits is not None
        z = np.where(valid[..., None], batch.logits, 0.0).astype(np.float64)
        y = np.where(valid[..., None], batch.behavior_logits, 0.0).astype(np.float64)
        clip = not self.measured
        low, high = np.full((2, len(goal)), np.log(1e-4))
        high = np.full(len(goal), np.log(16.0))
        if clip:
            low, high = np.full(len(goal), -30.0), np.full(len(goal), 30.0)
        for _ in range(40):
            middle = (low + high) / 2
            above = self.distance(self._at(batch, z, y, middle, clip)) > goal
            if clip:  # a larger behavior logit lowers the ratio
                above = ~above
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return self._at(batch, z, y, (low + high) / 2, clip)

    def between(self, batch: Batch, *values: Callable[[Cells], Array]) -> Batch | None:
        """Tokens on which two ways to compute C have opposite signs, as far from 0 as they can be.

        The training logit of the sampled token is moved to where the sum of both is 0; tokens on
        which it never is are left out.  None if no token is left.
        """
        assert batch.logits is not None
        assert batch.behavior_logits is not None
        valid = batch.response_mask
        z, y = (
            np.where(valid[..., None], x, 0.0).astype(np.float64)
            for x in (batch.logits, batch.behavior_logits)
        )
        at = batch.tokens[..., None]

        def moved(step: Array) -> Batch:
            shifted, t = z.copy(), np.zeros(valid.shape)
            t[valid] = step
            np.put_along_axis(shifted, at, np.take_along_axis(z, at, -1) + t[..., None], axis=-1)
            return assembled(batch, shifted, y)

        def total(step: Array) -> Array:
            cells = self.cells(moved(step))
            return np.asarray(sum(value(cells) for value in values))

        count = int(valid.sum())
        scan = np.linspace(-4.0, 4.0, 9)
        signs = np.array([total(np.full(count, s)) > 0 for s in scan])
        crosses = signs[1:] != signs[:-1]
        rows = np.flatnonzero(crosses.any(axis=0))
        first = crosses.argmax(axis=0)
        low, high = scan[first], scan[first + 1]
        rising = ~signs[first, np.arange(count)]
        for _ in range(12):
            middle = (low + high) / 2
            above = (total(middle) > 0) == rising
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return gather(moved((low + high) / 2), rows) if len(rows) else None

    def outside(self, batch: Batch) -> Rule:
        """The rule at a threshold that all of these tokens exceed, where it is free."""
        smallest = float(self.distance(batch).min())
        if not self.delta_is_free or not smallest > 0:
            return self.rule
        return self.options.rule(delta=float(f"{smallest / 2:.1g}"))

    def _at(self, batch: Batch, z: Array, y: Array, where: Array, clip: bool) -> Batch:
        t = np.zeros(batch.tokens.shape)
        t[batch.response_mask] = where
        if clip:
            behavior = y.copy()
            own = np.take_along_axis(z, batch.tokens[..., None], axis=-1)
            np.put_along_axis(behavior, batch.tokens[..., None], own + t[..., None], axis=-1)
        else:
            behavior = z + np.exp(t)[..., None] * (y - z)
        return assembled(batch, z, behavior)

    @property
    def loss_cap(self) -> float:
        """The declared cap of the importance ratio, or the default."""
        return RATIO_CAP if self.options.ratio_cap is None else self.options.ratio_cap


def assembled(
    batch: Batch, training: Array, behavior: Array, tokens: NDArray[np.int64] | None = None
) -> Batch:
    """A batch of other logits with the mask, tokens, advantages and sizes of `batch`."""
    assert batch.topk_ids is not None
    length = batch.tokens.shape[1]
    size = Size(
        len(batch.tokens), length, training.shape[-1], batch.topk_ids.shape[-1], batch.dtype
    )
    chosen = batch.tokens if tokens is None else tokens
    made = assemble(
        np.random.default_rng(0),
        size,
        training,
        behavior,
        sampler=lambda *_: chosen,
        mask=batch.response_mask,
    )
    return replace(made, advantages=batch.advantages)


def _digest(batch: Batch) -> str:
    content = hashlib.blake2b()
    for name, value in vars(batch).items():
        content.update(name.encode())
        content.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return content.hexdigest()


def _short(x: float) -> float:
    """`x` with three significant digits: a threshold that a person can read."""
    return float(f"{x:.3g}")


def _thresholds(rule: Rule) -> str:
    if rule.direction == "clip":
        return f", r in [{1 - rule.clip_low:.4g}, {1 + rule.clip_high:.4g}]"
    if rule.direction == "none" or rule.divergence is None:
        return ""
    if rule.delta_low == rule.delta_high:
        return f", delta = {rule.delta_low:.6g}"
    return f", delta_low = {rule.delta_low:.6g}, delta_high = {rule.delta_high:.6g}"
