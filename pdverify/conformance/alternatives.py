"""Other answers with a name: documented conventions, and the bugs that look like nothing else.

When a target is wrong, each alternative is asked for its answers on the very inputs that showed
it.  One that gives all of the target's answers names the difference: a convention which the
caller may accept, or the likely cause of a bug.  An alternative is the definition with one thing
changed, evaluated in float64; it only counts where its own answer is clear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Rows
from pdverify.conformance.answers import Answer
from pdverify.conformance.questions import Question
from pdverify.conformance.truth import Array
from pdverify.definitions import masks
from pdverify.definitions.cells import Cells, build, log_softmax
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.losses import weights
from pdverify.formats import FORMATS
from pdverify.registry import Registry
from pdverify.rules import Rule

CLEAR = 1e-3
"""Relative change of D, r and C under which an alternative's own decision must stand."""

SPARE = 4.0
"""Budgets by which a value may part from an alternative's: theirs may differ from ours."""

BoolArray = NDArray[np.bool_]
Loss = Callable[["Scene"], tuple[Array, Array]]
"""Per token: the loss, and its derivative with respect to log pi_k."""


@dataclass(frozen=True)
class Alternative:
    """The definition with one thing changed; what is None stays as it is.

    Attributes:
        id: its name in `ALTERNATIVES`, and what `--accept` takes.
        summary: what is different, as in "follows the convention '...'".
        documented: whether someone documents it as a convention, so that it can be accepted.
        source: who does so; for a bug, where it has been seen.
        rule: changes the rule.
        rows: changes what is known of the policies.
        cells: changes the masses on the cells.
        divergence, coefficient: change the value.
        keep: changes the decision, given both criteria.
        loss: replaces the loss.
        applies: whether it means anything for a question.
    """

    id: str
    summary: str
    documented: bool
    source: str
    rule: Callable[[Rule], Rule] | None = None
    rows: Callable[[Rows], Rows] | None = None
    cells: Callable[[Cells, Rows], Cells] | None = None
    divergence: Callable[[Array, Cells, Rule], Array] | None = None
    coefficient: Callable[[Array, Cells, Rows], Array] | None = None
    keep: Callable[[Criteria], BoolArray] | None = None
    loss: Loss | None = None
    applies: Callable[[Question], bool] = lambda question: True


@dataclass(frozen=True)
class Criteria:
    """Both criteria of a rule at every token, `[T]`.

    `pushes` has the sign of the direction quantity (C, or log r) without A; for a clip `outside`
    says that r is beyond the bound of its sign of A.
    """

    advantages: Array
    outside: BoolArray
    pushes: Array

    def drop(self) -> BoolArray:
        """The definition."""
        return self.outside & (self.advantages * self.pushes > 0)


@dataclass(frozen=True)
class Scene:
    """What a loss is computed from, `[T]`."""

    advantages: Array
    log_pi: Array
    gap: Array
    keep: BoolArray
    cap: float
    rule: Rule

    @property
    def ratio(self) -> Array:
        """The importance ratio, not capped."""
        return np.asarray(np.exp(np.minimum(self.gap, 700.0)))


@dataclass(frozen=True)
class Expectation:
    """An alternative's answers, `[T]`; `sure` where its decision is clear."""

    keep: BoolArray
    sure: BoolArray
    divergence: Array | None
    coefficient: Array | None
    loss: Array
    slope: Array


ALTERNATIVES: Registry[Alternative] = Registry("convention")


def definition_loss(scene: Scene) -> tuple[Array, Array]:
    """`-A sg(min(r, cap)) keep log pi_k` and its derivative."""
    return score_loss(scene, np.minimum(scene.ratio, scene.cap))


def score_loss(scene: Scene, weight: Array) -> tuple[Array, Array]:
    """`-A weight keep log pi_k`, the weight detached."""
    slope = np.where(scene.keep, -scene.advantages * weight, 0.0)
    return np.where(slope != 0, slope * scene.log_pi, 0.0), slope


def expect(question: Question, alternative: Alternative) -> Expectation:
    """The alternative's answers to a question, in float64."""
    rows = question.material.rows
    if alternative.rows is not None:
        rows = alternative.rows(rows)
    rule = question.rule if alternative.rule is None else alternative.rule(question.rule)
    partition = "binary" if rule.direction in ("clip", "none") else rule.partition
    cells = build(rows, partition, "append")
    if alternative.cells is not None:
        cells = alternative.cells(cells, rows)
    own = build(rows, "binary", "append") if partition == "full" else cells
    gap = own.log_gap
    divergence = coefficient = None
    with np.errstate(all="ignore"):
        if rule.divergence is not None and rule.direction != "none":
            divergence = masks.divergence(cells, rule.divergence)
            if alternative.divergence is not None:
                divergence = alternative.divergence(divergence, cells, rule)
            if rule.direction in ("predictive", "second-order") and rule.tail != "bracket":
                coefficient = masks.coefficient(cells, rule.divergence, rule.tail)
                if alternative.coefficient is not None:
                    coefficient = alternative.coefficient(coefficient, cells, rows)
        keeps = _keeps(rule, cells, rows, divergence, coefficient, gap, alternative)
        keep = keeps[0]
        sure = np.all([k == keep for k in keeps], axis=0)
        if divergence is not None:  # where D is infinite nobody is judged
            sure &= np.isfinite(divergence)
        log_pi = _log_pi(rows)
        scene = Scene(rows.advantages, log_pi, gap, keep, question.ratio_cap, rule)
        loss, slope = (alternative.loss or definition_loss)(scene)
    return Expectation(keep, sure, divergence, coefficient, loss, slope)


UNCHANGED = Alternative("unchanged", "the definition", False, "")


def _log_pi(rows: Rows) -> Array:
    if rows.logits is None:
        assert rows.logprobs is not None
        return rows.logprobs.astype(np.float64)
    return np.asarray(log_softmax(rows.logits)[np.arange(len(rows)), rows.tokens])


def _keeps(
    rule: Rule,
    cells: Cells,
    rows: Rows,
    divergence: Array | None,
    coefficient: Array | None,
    gap: Array,
    alternative: Alternative,
) -> list[BoolArray]:
    """The decision, then what it becomes when either criterion moves a little."""
    a = rows.advantages
    delta = np.where(a > 0, rule.delta_high, rule.delta_low)
    scale = CLEAR * (cells.mu_k + cells.pi_k + CLEAR)
    keeps = []
    for d in (0.0, CLEAR, -CLEAR):
        for c in (0.0, 1.0, -1.0):
            if rule.direction == "none":
                criteria = Criteria(a, np.zeros(len(a), dtype=bool), a)
            elif rule.direction == "clip":
                low = np.log(1 - rule.clip_low) if rule.clip_low < 1 else -np.inf
                moved = gap + d
                outside = np.where(a > 0, moved > np.log1p(rule.clip_high), moved < low)
                criteria = Criteria(a, outside, np.sign(gap))
            elif rule.direction == "ratio":
                assert divergence is not None
                criteria = Criteria(a, divergence * (1 + d) > delta, np.sign(gap + CLEAR * c))
            elif rule.tail == "bracket":
                assert divergence is not None
                assert rule.divergence is not None
                both = [
                    np.sign(masks.coefficient(cells, rule.divergence, end) + c * scale)
                    for end in ("aggregated", "uniform")
                ]
                agreed = np.where(both[0] == both[1], both[0], 0.0)
                criteria = Criteria(a, divergence * (1 + d) > delta, agreed)
            else:
                assert divergence is not None
                assert coefficient is not None
                distance = divergence
                if rule.direction == "second-order":
                    distance = masks.predicted_divergence(cells, rule, a)
                criteria = Criteria(a, distance * (1 + d) > delta, coefficient + c * scale)
            drop = alternative.keep(criteria) if alternative.keep else ~criteria.drop()
            keeps.append(np.asarray(drop))
    return keeps


@dataclass(frozen=True)
class Given:
    """What is compared with an alternative: an answer, and what may be said of it.

    Attributes:
        answer: the target's.
        kept, known: the decisions `[T]` it says or implies, and where it says any; `kept` is None
            where it says none.
        faulty: tokens whose answer is wrong.
        excused: tokens that may be decided either way by the definition.
        at: the input at which the gradient was taken.
        aggregation: how the loss is reduced.
        unit: unit roundoff the target is held to.
    """

    answer: Answer
    kept: BoolArray | None
    known: BoolArray
    faulty: BoolArray
    excused: BoolArray
    at: str | None
    aggregation: str
    unit: float


def explains(alternative: Alternative, question: Question, given: Given) -> bool:
    """Whether an alternative gives all of a target's answers to a question.

    Values are held to it within a few budgets of the declared precision.  It must part from the
    definition on every faulty token on which its own decision is clear, and be clear on one.
    """
    if given.answer.failure is not None or not alternative.applies(question):
        return False
    try:
        expected, definition = (
            question.material.once(
                (question.rule, question.ratio_cap, one.id), partial(expect, question, one)
            )
            for one in (alternative, UNCHANGED)
        )
    except (ValueError, AssertionError):
        return False
    values = _values(question, given, expected, definition)
    if values is None:
        return False
    sure = expected.sure
    parts = expected.keep != definition.keep
    # decisions that are read off a gradient show where it is 0, for whatever reason
    said = "keep" in given.answer.values
    keep, usual = (
        (x.keep if said else (x.slope != 0) | (question.material.rows.advantages == 0))
        for x in (expected, definition)
    )
    parts |= keep != usual
    if given.kept is not None:
        held = given.known & sure & ~(given.excused & (keep == usual))
        if (given.kept != keep)[held].any():
            return False
    for got, value, other, allowed in values:
        if (np.abs(got - value) > allowed)[sure].any() or np.isnan(got[sure]).any():
            return False
        parts |= np.abs(value - other) > allowed
    if not given.faulty.any():
        return True
    return bool((given.faulty & sure).any() and not (given.faulty & sure & ~parts).any())


Compared = tuple[Array, Array, Array, Array]
"""What came, the alternative's value, the definition's, and how far the first two may part."""


def _values(
    question: Question, given: Given, expected: Expectation, definition: Expectation
) -> list[Compared] | None:
    """The values of an answer beside those of an alternative; None where it has no such value."""
    material, rule = question.material, question.rule
    index = tuple(material.rows.index.T)
    compared: list[Compared] = []
    for name in ("divergence", "coefficient"):
        value, other = getattr(expected, name), getattr(definition, name)
        if name not in given.answer.values or name not in question.judges:
            continue
        if value is None or other is None:
            return None
        assert rule.divergence is not None
        tail = rule.tail if name == "coefficient" else None
        budget = material.truth.budget(
            name, rule.divergence, rule.partition, tail, given.unit, "plain"
        )
        allowed = SPARE * (budget + given.unit * np.abs(value))
        got = given.answer.values[name][index]
        known = np.isfinite(value) & np.isfinite(other) & np.isfinite(allowed)
        compared.append(_where(known, got, value, other, allowed))
    if question.loss and "loss" in given.answer.values:
        compared += _losses(question, given, expected, definition)
    return compared


def _where(known: BoolArray, *columns: Array) -> Any:
    return tuple(np.where(known, column, 0.0) for column in columns)


def _losses(
    question: Question, given: Given, expected: Expectation, definition: Expectation
) -> list[Compared]:
    """Loss and gradient, a row of a gradient standing for its entry that is farthest off."""
    material = question.material
    rows = material.rows
    index = tuple(rows.index.T)
    weight = weights(question.batch.response_mask, given.aggregation)[index]
    gap = material.truth.budget("log_ratio", None, "binary", None, given.unit, "plain")
    relative = SPARE * (np.expm1(gap) + 8 * given.unit)
    tiny = FORMATS["fp32"].min_normal
    compared: list[Compared] = []
    loss = given.answer.values["loss"]
    values = [weight * one.loss for one in (expected, definition)]
    if "loss" in question.judges and loss.ndim:
        size = weight * np.abs(expected.slope) * (1 + np.abs(_log_pi(rows)))
        allowed = relative * (np.abs(values[0]) + size) + tiny
        compared.append(_finite_in_float32(loss[index], values[0], values[1], allowed))
    elif "loss" in question.judges and expected.sure.all() and question.tokens != "padding":
        total = np.array([float(loss), *(value.sum() for value in values)])
        allowed = np.full(len(rows), (relative * np.abs(values[0])).sum() + tiny)
        shown = (np.full(len(rows), x) for x in total)
        compared.append((*shown, allowed))  # type: ignore[arg-type]
    if given.answer.gradient is not None and "gradient" in question.judges:
        got = given.answer.gradient[index]
        slopes = [weight * one.slope for one in (expected, definition)]
        if given.at == "logprobs":
            columns = [got, slopes[0], slopes[1]]
            stored = FORMATS["fp32"]
        else:
            assert rows.logits is not None
            direction = -np.exp(log_softmax(rows.logits))
            direction[np.arange(len(rows)), rows.tokens] += 1
            at = (np.arange(len(rows)), np.abs(got - direction * slopes[0][:, None]).argmax(-1))
            columns = [got[at], *(direction[at] * slope for slope in slopes)]
            stored = FORMATS[question.batch.dtype]
        size = np.abs(slopes[0])
        allowed = (relative + SPARE * stored.unit_roundoff) * size + stored.min_normal
        compared.append(_finite_in_float32(columns[0], columns[1], columns[2], allowed))
    return compared


def _finite_in_float32(got: Array, value: Array, other: Array, allowed: Array) -> Compared:
    """Infinities of float32 arithmetic count as the large numbers they stand for."""
    huge = np.isinf(got) & (np.abs(value) > FORMATS["fp32"].max_finite)
    return np.where(huge, value, got), value, other, allowed


def _add(alternative: Alternative) -> None:
    ALTERNATIVES.add(alternative.id, alternative)


def _convention(id: str, summary: str, source: str, **changes: Any) -> None:
    _add(Alternative(id, summary, True, source, **changes))


def _bug(id: str, summary: str, source: str = "", **changes: Any) -> None:
    _add(Alternative(id, summary, False, source, **changes))


def _divergence(question: Question) -> bool:
    return question.rule.divergence is not None and question.rule.direction != "none"


def _predictive(question: Question) -> bool:
    return question.rule.direction in ("predictive", "second-order")


def _coarse(question: Question) -> bool:
    return _divergence(question) and question.rule.partition == "topk"


def _binary_kl(question: Question) -> bool:
    return question.rule.divergence == "kl" and question.rule.partition == "binary"


def _tv(question: Question) -> bool:
    return question.rule.divergence == "tv"


def _clip(question: Question) -> bool:
    return question.rule.direction == "clip"


# ---- the loss


def _differentiated(scene: Scene, cap: float) -> tuple[Array, Array]:
    r = scene.ratio
    value = np.where(scene.keep, -scene.advantages * np.minimum(r, cap), 0.0)
    return value, np.where(scene.keep & (r < cap), -scene.advantages * r, 0.0)


_convention(
    "ratio-gradient",
    "gradient through the ratio: loss -A min(r, cap), no gradient above the cap",
    "surrogate objective of TRPO and PPO",
    loss=lambda s: _differentiated(s, s.cap),
)
_convention(
    "ratio-gradient-uncapped",
    "gradient through the ratio, uncapped: loss -A r",
    "prime-rl, SkyRL and UniRL, 2026",
    loss=lambda s: _differentiated(s, np.inf),
)


def _clamped(scene: Scene) -> tuple[Array, Array]:
    r = np.exp(np.clip(scene.gap, -20, 20))
    value = np.where(scene.keep, -scene.advantages * r, 0.0)
    return value, np.where(np.abs(scene.gap) < 20, value, 0.0)


_convention(
    "ratio-gradient-clamped",
    "gradient through the ratio, its log clamped to [-20, 20], without one outside",
    "verl's vanilla loss, SkyRL, OpenRLHF, 2026",
    loss=_clamped,
)
_convention(
    "ratio-uncapped",
    "no cap on the importance ratio in the loss",
    "open-instruct branches, 2026",
    loss=lambda s: score_loss(s, s.ratio),
)


def _capped(cap: float) -> Loss:
    return lambda s: score_loss(s, np.minimum(s.ratio, cap))


for _cap, _source in (
    (3.0, "verl's configured default"),
    (5.0, "slime-based predictive mask"),
    (10.0, "Stable-RL's code"),
    (20.0, "DPPO paper; TRL's experimental DPPO"),
):
    _convention(
        f"ratio-cap-{_cap:.0f}",
        f"importance ratio capped at {_cap:.0f} whatever the caller says",
        _source,
        loss=_capped(_cap),
    )
_convention(
    "log-ratio-clamp-20",
    "log-ratio clamped to [-20, 20] before exp",
    "verl, SkyRL, UniRL, 2026",
    loss=lambda s: score_loss(s, np.minimum(np.exp(np.clip(s.gap, -20, 20)), s.cap)),
)
_convention(
    "log-ratio-clamp-stops-gradient",
    "log-ratio clamped to [-20, 20] before exp, and no gradient outside",
    "surrogates that differentiate through the clamp: verl's vanilla loss, SkyRL, OpenRLHF, 2026",
    loss=lambda s: score_loss(s, np.where(np.abs(s.gap) < 20, np.minimum(s.ratio, s.cap), 0.0)),
)
_convention(
    "cispo-two-sided",
    "importance ratio clamped to [1 - clip_low, 1 + clip_high] as a weight",
    "CISPO in verl and slime, 2026",
    loss=lambda s: score_loss(s, np.clip(s.ratio, 1 - s.rule.clip_low, 1 + s.rule.clip_high)),
)


def _clipped_surrogate(scene: Scene, dual: float = np.inf) -> tuple[Array, Array]:
    a, r, rule = scene.advantages, scene.ratio, scene.rule
    clipped = np.clip(r, 1 - rule.clip_low, 1 + rule.clip_high)
    value = np.maximum(-a * r, -a * clipped)
    value = np.where(a < 0, np.minimum(value, -a * dual), value)
    live = scene.keep & ((a >= 0) | (r < dual))
    return value, np.where(live, -a * r, 0.0)


_convention(
    "ppo-surrogate",
    "clipped surrogate: a dropped token leaves a constant in the loss",
    "PPO, arXiv 1707.06347",
    loss=_clipped_surrogate,
    applies=_clip,
)
_convention(
    "ppo-dual-clip",
    "dual clip: A < 0 is dropped besides where r > 3, as a clipped surrogate",
    "verl's vanilla policy loss",
    loss=lambda s: _clipped_surrogate(s, 3.0),
    applies=_clip,
)

# ---- decisions


def _negative_rule(criteria: Criteria) -> BoolArray:
    a = np.where(criteria.advantages == 0, -1.0, criteria.advantages)
    return ~(criteria.outside & (a * criteria.pushes > 0))


_convention(
    "zero-advantage-negative-rule",
    "A = 0 is treated like A < 0",
    "verl, Stable-RL, TRL's experimental DPPO, prime-rl, 2026",
    keep=_negative_rule,
)
_convention(
    "drops-at-equality",
    "a token exactly at the threshold is dropped",
    "DIS: an open interval on the importance ratio",
    applies=lambda q: False,
)
_convention(
    "symmetric-mask",
    "no direction criterion: drops every token outside the trust region",
    "prime-rl's IPO loss; IcePop, arXiv 2510.18855",
    keep=lambda c: ~(c.outside & (c.advantages != 0)),
    applies=_divergence,
)
_convention(
    "ratio-direction",
    "direction of the importance ratio instead of the divergence's",
    "DPPO, arXiv 2602.04879",
    rule=lambda rule: replace(rule, direction="ratio"),
    applies=_predictive,
)
_convention(
    "predictive-direction",
    "direction of the divergence instead of the ratio's",
    "arXiv 2607.10848",
    rule=lambda rule: replace(rule, direction="predictive", tail="exact"),
    applies=lambda q: q.rule.direction == "ratio" and q.rule.partition == "topk",
)

# ---- cells and tails


def _with(**changes: Any) -> Callable[[Rule], Rule]:
    return lambda rule: replace(rule, **changes)


def _tail_is_not(tail: str) -> Callable[[Question], bool]:
    return lambda q: _predictive(q) and _coarse(q) and q.rule.tail != tail


def _divergence_is(name: str) -> Callable[[Question], bool]:
    return lambda q: _divergence(q) and q.rule.divergence == name


def _divergence_is_not(name: str) -> Callable[[Question], bool]:
    return lambda q: (
        _divergence(q) and q.rule.divergence != name and q.rule.direction != "second-order"
    )


def _floored(floor: float) -> Callable[[Cells, Rows], Cells]:
    return lambda cells, rows: replace(
        cells,
        mu_tail=np.maximum(cells.mu_tail, floor),
        pi_tail=np.maximum(cells.pi_tail, floor),
    )


for _tail in masks.TAILS:
    _convention(
        f"tail-{_tail}",
        f"{_tail} tail whatever the caller says",
        "arXiv 2607.10848" if _tail in ("aggregated", "uniform") else "pdverify",
        rule=_with(tail=_tail),
        applies=_tail_is_not(_tail),
    )
for _floor, _source in (
    (1e-12, "Stable-RL and TRL's experimental DPPO"),
    (1e-8, "slime-based DPPO"),
    (1e-6, "KLPO"),
):
    _convention(
        f"tail-floor-{_floor:.0e}".replace("e-0", "e-"),
        f"tail masses are at least {_floor:.0e}".replace("e-0", "e-"),
        _source,
        cells=_floored(_floor),
        # total variation moves by the floor itself, which no decision sees
        applies=lambda q: _divergence(q) and q.rule.partition != "full" and not _tv(q),
    )


def _epsilon_in_log(divergence: Array, cells: Cells, rule: Rule) -> Array:
    mu, pi = cells.mu_k, cells.pi_k
    rest = cells.mu_tail * np.log((cells.mu_tail + 1e-8) / (cells.pi_tail + 1e-8))
    return np.asarray(mu * np.log(mu / pi) + rest)


_convention(
    "log-epsilon-1e-8",
    "1e-8 added inside the logs of 1 - p",
    "verl's and Stable-RL's binary KL",
    divergence=_epsilon_in_log,
    applies=_binary_kl,
)


def _clamped_probabilities(cells: Cells, rows: Rows) -> Cells:
    mu, pi = (np.clip(x, 1e-6, 1 - 1e-6) for x in (cells.mu_k, cells.pi_k))
    return replace(
        cells,
        mu=mu[:, None],
        pi=pi[:, None],
        mu_k=mu,
        pi_k=pi,
        mu_tail=1 - mu,
        pi_tail=1 - pi,
    )


_convention(
    "probability-clamp-1e-6",
    "probabilities clamped to [1e-6, 1 - 1e-6]",
    "open-instruct's DPPO branch",
    cells=_clamped_probabilities,
    applies=_binary_kl,
)
_convention(
    "l1-distance",
    "sum of |pi - mu|: twice the total variation distance",
    "open-instruct's mean of |rho - 1|",
    divergence=lambda d, cells, rule: 2 * d,
    applies=_tv,
)


def _replaced(rows: Rows) -> Rows:
    """The list with a missing sampled token in the place of its least likely entry."""
    assert rows.topk_ids is not None
    assert rows.topk_logprobs is not None
    assert rows.behavior_logprobs is not None
    ids, stored = rows.topk_ids.copy(), rows.topk_logprobs.copy()
    absent = np.flatnonzero(~(ids == rows.tokens[:, None]).any(axis=-1))
    worst = stored[absent].argmin(axis=-1)
    ids[absent, worst], stored[absent, worst] = rows.tokens[absent], rows.behavior_logprobs[absent]
    return replace(rows, topk_ids=ids, topk_logprobs=stored)


_convention(
    "support-replace",
    "a missing sampled token takes the K-th entry's place instead of a slot of its own",
    "Stable-RL and TRL's experimental DPPO",
    rows=_replaced,
    applies=lambda q: _coarse(q) and q.rule.support == "append",
)


def _own_cell(cells: Cells, rows: Rows) -> Cells:
    """Entries of behavior probability 0 stay cells of the retained support."""
    assert cells.ids is not None
    assert rows.logits is not None
    pi_all = np.exp(log_softmax(rows.logits))
    listed = cells.ids.copy()
    duplicate = np.zeros(listed.shape, dtype=bool)
    duplicate[:, -1] = (listed[:, :-1] == listed[:, -1:]).any(axis=-1)
    pi = np.where(duplicate, 0.0, np.take_along_axis(pi_all, listed, axis=-1))
    gone = pi.sum(-1) - cells.pi.sum(-1)
    return replace(
        cells,
        pi=pi,
        pi_tail=np.maximum(cells.pi_tail - gone, 0.0),
        tail_cells=rows.vocab_size - (~duplicate).sum(-1),
        collision=np.maximum(cells.collision - (pi**2).sum(-1) + (cells.pi**2).sum(-1), 0.0),
    )


_convention(
    "neg-inf-own-cell",
    "a listed token of probability 0 is a cell of its own instead of joining the tail",
    "engines that return -inf entries (nucleus-filtered log-probs)",
    cells=_own_cell,
    applies=_coarse,
)
_convention(
    "binary-cells",
    "the two cells {sampled token, rest} instead of the retained support",
    "DPPO's binary divergences",
    rule=lambda rule: replace(rule, partition="binary"),
    applies=_coarse,
)
_convention(
    "full-view",
    "the full vocabulary instead of the top-K view",
    "arXiv 2607.10848",
    rule=lambda rule: replace(rule, partition="full", tail=None),
    applies=_coarse,
)
_convention(
    "coefficient-product",
    "the coefficient is A r C, the change itself",
    "arXiv 2607.10848",
    coefficient=lambda c, cells, rows: rows.advantages * np.exp(cells.log_gap) * c,
    keep=lambda c: ~(c.outside & (c.pushes > 0)),
    applies=_predictive,
)

# ---- bugs

_bug(
    "inverted-mask",
    "the mask is inverted: True where the gradient is dropped",
    keep=lambda c: c.drop(),
)
_bug(
    "no-proximity",
    "the proximity criterion is missing: drops wherever the direction pushes out",
    keep=lambda c: ~(c.advantages * c.pushes > 0),
    applies=_divergence,
)
_bug(
    "advantage-ignored",
    "the direction criterion ignores the sign of A",
    keep=lambda c: ~(c.outside & (c.pushes > 0) & (c.advantages != 0)),
)
_bug(
    "direction-reversed",
    "the direction criterion has the wrong sign",
    keep=lambda c: ~(c.outside & (c.advantages * c.pushes < 0)),
    coefficient=lambda c, cells, rows: -c,
)
_bug("negated-coefficient", "C has the wrong sign", coefficient=lambda c, cells, rows: -c,
     applies=_predictive)  # fmt: skip
_bug(
    "only-positive-advantages",
    "tokens with A < 0 are never dropped",
    keep=lambda c: ~(c.drop() & (c.advantages > 0)),
)
_bug(
    "only-negative-advantages",
    "tokens with A > 0 are never dropped",
    keep=lambda c: ~(c.drop() & (c.advantages < 0)),
)
_bug(
    "swapped-thresholds",
    "the thresholds of A > 0 and A < 0 are swapped",
    rule=lambda rule: replace(
        rule,
        delta_low=rule.delta_high,
        delta_high=rule.delta_low,
        clip_low=rule.clip_high,
        clip_high=rule.clip_low,
    ),
)
_bug(
    "one-threshold-high",
    "the threshold of A > 0 is used for both signs",
    rule=lambda rule: replace(rule, delta_low=rule.delta_high, clip_low=rule.clip_high),
)
_bug(
    "one-threshold-low",
    "the threshold of A < 0 is used for both signs",
    rule=lambda rule: replace(rule, delta_high=rule.delta_low, clip_high=rule.clip_low),
)
_bug("never-drops", "nothing is dropped", keep=lambda c: np.ones(len(c.advantages), dtype=bool))


def _local(c: Array, cells: Cells, rows: Rows) -> Array:
    return cells.pi_k - cells.mu_k


_bug(
    "local-term-only",
    "the global term of C is missing: C = pi_k - mu_k",
    coefficient=_local,
    applies=lambda q: _predictive(q) and q.rule.divergence == "kl",
)
_bug(
    "global-term-only",
    "the local term of C is missing",
    coefficient=lambda c, cells, rows: c - _local(c, cells, rows),
    applies=lambda q: _predictive(q) and q.rule.divergence == "kl",
)
_bug(
    "global-term-negated",
    "the global term of C has the wrong sign",
    coefficient=lambda c, cells, rows: 2 * _local(c, cells, rows) - c,
    applies=lambda q: _predictive(q) and q.rule.divergence == "kl",
)


def _without_tail(divergence: Array, cells: Cells, rule: Rule) -> Array:
    assert rule.divergence is not None
    cell = DIVERGENCES[rule.divergence].cell
    return np.asarray(divergence - cell(cells.mu_tail, cells.pi_tail))


_bug(
    "tail-missing-in-divergence",
    "the tail cell is missing in D",
    "DPPO implementations that sum over the top-K only",
    divergence=_without_tail,
    applies=_coarse,
)
_bug(
    "tail-missing",
    "the tail cell is missing in D and C",
    cells=lambda cells, rows: replace(
        cells,
        mu_tail=np.zeros(len(rows)),
        pi_tail=np.zeros(len(rows)),
        collision=np.zeros(len(rows)),
    ),
    applies=_coarse,
)
_bug(
    "tail-missing-in-coefficient",
    "the tail cell is missing in C",
    coefficient=lambda c, cells, rows: (
        (cells.pi_k - cells.mu_k) + (cells.pi * (cells.mu - cells.pi)).sum(-1)
    ),
    applies=lambda q: _coarse(q) and _predictive(q) and q.rule.divergence == "kl",
)


def _spread_over(count: Callable[[int, int], int]) -> Callable[[Cells, Rows], Cells]:
    def spread(cells: Cells, rows: Rows) -> Cells:
        assert rows.topk_ids is not None
        number = count(rows.vocab_size, rows.topk_ids.shape[-1])
        return replace(cells, tail_cells=np.full(len(rows), number))

    return spread


_counts: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    ("top-k", "V - K tokens whatever |S| is", lambda v, k: v - k),
    ("slots", "V - K - 1 tokens whatever |S| is", lambda v, k: v - k - 1),
    ("vocabulary", "all V tokens", lambda v, k: v),
)
for _id, _summary, _count in _counts:
    _bug(
        f"tail-count-{_id}",
        f"the uniform tail is spread over {_summary}",
        cells=_spread_over(_count),
        applies=lambda q: _coarse(q) and q.rule.tail == "uniform",
    )


def _sampled_in_tail(cells: Cells, rows: Rows) -> Cells:
    """A sampled token outside the list is left in the tail."""
    assert rows.topk_ids is not None
    outside = ~(rows.topk_ids == rows.tokens[:, None]).any(-1)
    mu, pi = cells.mu.copy(), cells.pi.copy()
    at = np.arange(len(rows))
    mu[at[outside], cells.slot[outside]] = 0.0
    pi[at[outside], cells.slot[outside]] = 0.0
    return replace(
        cells,
        mu=mu,
        pi=pi,
        mu_tail=cells.mu_tail + np.where(outside, cells.mu_k, 0.0),
        pi_tail=cells.pi_tail + np.where(outside, cells.pi_k, 0.0),
        collision=cells.collision + np.where(outside, cells.pi_k**2, 0.0),
        tail_cells=cells.tail_cells + outside,
    )


_bug(
    "sampled-token-in-tail",
    "a sampled token outside the top-K list stays in the tail",
    "lists whose support was built before the sampled token was appended",
    cells=_sampled_in_tail,
    applies=_coarse,
)


def _counted_twice(cells: Cells, rows: Rows) -> Cells:
    assert rows.topk_ids is not None
    listed = (rows.topk_ids == rows.tokens[:, None]).any(-1)
    extra_mu, extra_pi = (np.where(listed, x, 0.0) for x in (cells.mu_k, cells.pi_k))
    return replace(
        cells,
        mu=np.concatenate([cells.mu, extra_mu[:, None]], axis=-1),
        pi=np.concatenate([cells.pi, extra_pi[:, None]], axis=-1),
        mu_tail=np.maximum(cells.mu_tail - extra_mu, 0.0),
        pi_tail=np.maximum(cells.pi_tail - extra_pi, 0.0),
    )


_bug(
    "sampled-token-twice",
    "a sampled token in the top-K list is counted twice",
    "support_mask ignored, or a list that repeats the token",
    cells=_counted_twice,
    applies=_coarse,
)
for _mine, _other in (("kl", "reverse-kl"), ("reverse-kl", "kl"), ("chi2", "reverse-chi2"),
                      ("reverse-chi2", "chi2")):  # fmt: skip
    _bug(
        f"policies-swapped-{_mine}",
        f"the policies are swapped: {_other} instead of {_mine}",
        rule=_with(divergence=_other),
        applies=_divergence_is(_mine),
    )
for _name in DIVERGENCES:
    _bug(
        f"divergence-{_name}",
        f"another divergence: {_name}",
        rule=_with(divergence=_name),
        applies=_divergence_is_not(_name),
    )
_bug(
    "bits-for-nats",
    "base-2 logarithm: D in bits",
    divergence=lambda d, cells, rule: d / np.log(2),
    applies=lambda q: q.rule.divergence in ("kl", "reverse-kl", "jensen-shannon"),
)
_bug("halved-divergence", "D is halved", divergence=lambda d, cells, rule: d / 2,
     applies=_divergence)  # fmt: skip
_bug("doubled-divergence", "D is doubled", divergence=lambda d, cells, rule: 2 * d,
     applies=_divergence)  # fmt: skip
_bug(
    "loss-sign",
    "the loss has the wrong sign",
    loss=lambda s: tuple(-x for x in definition_loss(s)),
)
_bug(
    "loss-unmasked",
    "the loss ignores the mask",
    loss=lambda s: score_loss(
        replace(s, keep=np.ones(len(s.keep), dtype=bool)), np.minimum(s.ratio, s.cap)
    ),
)
_bug(
    "ratio-inverted",
    "the importance ratio is mu / pi",
    loss=lambda s: score_loss(s, np.minimum(np.exp(-s.gap), s.cap)),
)
_bug("ratio-missing", "the importance ratio is missing in the loss",
     loss=lambda s: score_loss(s, np.ones(len(s.keep))))  # fmt: skip
