"""From a failing question to the smallest one that a person can check by hand.

Greedy: one token, then fewer vocabulary entries, a shorter list, rounder numbers.  A step stands
if the target, asked again, is still wrong in the same way; right answers and budgets are computed
anew for every step, so the end is as certain as the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pdverify.batch import Batch, FloatArray, InputError, IntArray, take
from pdverify.cases.assemble import log_softmax, round_logits
from pdverify.conformance.judging import Fault
from pdverify.conformance.questions import Question
from pdverify.conformance.truth import Array
from pdverify.rules import Rule

TRIES = 120
"""Calls of the target that one reduction may take."""

Verdict = Callable[[Question], Fault | None]
"""The fault of the sought kind that an answer to the question shows, if any."""

Steps = Iterator[Callable[[], Question]]
"""Ways to make a question smaller, the boldest first; one may turn out to be impossible."""


@dataclass(frozen=True)
class Shrunk:
    """The reduced question, its fault, and whether it got smaller."""

    question: Question
    fault: Fault
    smaller: bool


def shrink(
    question: Question, fault: Fault, verdict: Verdict, seconds: float, free: frozenset[str]
) -> Shrunk:
    """Reduce `question` while `verdict` still finds a fault, for at most `seconds`.

    `free` names the thresholds that may be changed: the target takes them.
    """
    deadline = time.monotonic() + seconds
    best, found, smaller = question, fault, False
    tries = 0
    for stage in (_tokens, _plain, _easier, _vocabulary, _lists, _rounder, _vocabulary):
        moved = True
        while moved:
            moved = False
            for make in stage(best, found, free):
                tries += 1
                if tries > TRIES or time.monotonic() > deadline:
                    return Shrunk(best, found, smaller)
                try:
                    candidate = make()
                    seen = verdict(candidate)
                    if seen is None and "delta" in free:
                        candidate = _retuned(candidate, found)
                        seen = verdict(candidate)
                except (InputError, ValueError):  # no valid batch comes of this step
                    continue
                if seen is not None:
                    best, found, smaller = candidate, seen, True
                    moved = stage is not _easier
                    break
    return Shrunk(best, found, smaller)


def _retuned(question: Question, fault: Fault) -> Question:
    """The question with its threshold as far from D, relatively, as it was in `fault`.

    Raises:
        ValueError: where that means nothing.
    """
    rule = question.rule
    small = fault.quantity == "keep" and abs(fault.margin) < 0.5
    if not small or rule.divergence is None or len(question.material.rows) > 1:
        raise ValueError("no threshold to follow")
    d = float(question.material.truth.divergence(rule.divergence, rule.partition).mid[0])
    if not (np.isfinite(d) and d > 0):
        raise ValueError("no finite D")
    # the margin is (D - delta) over the larger of the two
    delta = d * (1 - fault.margin) if fault.margin > 0 else d / (1 + fault.margin)
    return replace(question, rule=replace(rule, delta_low=delta, delta_high=delta))


def _tokens(question: Question, fault: Fault, free: frozenset[str]) -> Steps:
    """The faulty token alone, or fewer sequences and positions."""
    batch = question.batch
    count, length = batch.tokens.shape

    def part(sequences: slice, positions: slice) -> Callable[[], Question]:
        return lambda: question.on(take(batch, sequences, positions))

    if (count, length) == (1, 1):
        return
    if fault.place is not None:
        b, position = fault.place
        yield part(slice(b, b + 1), slice(position, position + 1))
        if count > 1:
            yield part(slice(b, b + 1), slice(None))
        if length > 1:
            yield part(slice(None), slice(position, position + 1))
    for half in (slice(0, count // 2), slice(count // 2, None)):
        if count > 1:
            yield part(half, slice(None))
    for half in (slice(0, length // 2), slice(length // 2, None)):
        if length > 1:
            yield part(slice(None), half)


def _plain(question: Question, fault: Fault, free: frozenset[str]) -> Steps:
    """The simplest layout, and harmless padding."""
    if question.presentation != "contiguous":
        yield lambda: replace(question, presentation="contiguous")
    if question.poison:
        yield lambda: replace(question, poison=False)


def _easier(question: Question, fault: Fault, free: frozenset[str]) -> Steps:
    """A threshold far from D, which leaves room for everything that follows."""
    if fault.quantity != "keep" or fault.row is None or "delta" not in free:
        return
    right = question.material.truth.decide(question.rule).divergence
    d = float(right.mid[fault.row])
    if np.isfinite(d) and d > 0:
        for factor in (0.5, 2.0):
            short = float(f"{factor * d:.1g}")
            yield partial(
                replace, question, rule=replace(question.rule, delta_low=short, delta_high=short)
            )


def _vocabulary(question: Question, fault: Fault, free: frozenset[str]) -> Steps:
    """Fewer tokens outside the retained support."""
    batch = question.batch
    if not _reducible(batch):
        return
    size, special = batch.vocab_size, _special(batch)
    for target in (len(special) + 1, len(special) + 2, 3 * len(special), size // 8, size // 2):
        if len(special) < target < size:
            yield partial(_on_part, question, batch, special, target - len(special))


def _lists(question: Question, fault: Fault, free: frozenset[str]) -> Steps:
    """A shorter top-K list, on the fewest other tokens."""
    batch = question.batch
    if not _reducible(batch):
        return
    assert batch.topk_ids is not None
    k = batch.topk_ids.shape[-1]
    for fewer in sorted({1, 2, 3, 5, k // 2, k - 1}):
        if 0 < fewer < k:
            for spare in (1, 2):
                yield partial(_on_shorter, question, fewer, spare)


def _on_shorter(question: Question, k: int, spare: int) -> Question:
    batch = question.batch
    assert batch.topk_ids is not None
    assert batch.topk_logprobs is not None
    shorter = replace(
        batch, topk_ids=batch.topk_ids[..., :k], topk_logprobs=batch.topk_logprobs[..., :k]
    )
    return _on_part(question, shorter, _special(shorter), spare)


def _special(batch: Batch) -> IntArray:
    """The retained and the sampled ids of a batch."""
    assert batch.topk_ids is not None
    return np.unique(np.concatenate([batch.topk_ids.ravel(), batch.tokens.ravel()]))


def _on_part(question: Question, batch: Batch, special: IntArray, spare: int) -> Question:
    """Every id that is not special merged into one of `spare` new ones: cells keep their mass."""
    others = np.setdiff1d(np.arange(batch.vocab_size), special)
    if not len(others):
        raise ValueError("nothing to merge")
    spare = min(spare, len(others))
    new = np.empty(batch.vocab_size, dtype=np.int64)
    new[special] = np.arange(len(special))
    new[others] = len(special) + np.arange(len(others)) % spare
    return question.on(_merged(batch, new))


def _rounder(question: Question, fault: Fault, free: frozenset[str]) -> Steps:
    """Logits, advantages and thresholds with fewer digits."""
    batch, rule = question.batch, question.rule
    valid = batch.response_mask
    unit = np.sign(batch.advantages).astype(np.float32)
    if (unit != batch.advantages)[valid].any():
        yield lambda: question.on(replace(batch, advantages=unit))
    if _reducible(batch) and batch.vocab_size <= 64:
        assert batch.logits is not None
        assert batch.behavior_logits is not None
        for step in (1.0, 0.5, 0.25, 0.125):
            if any(
                (np.round(x[valid] / step) * step != x[valid]).any()
                for x in (batch.logits, batch.behavior_logits)
            ):
                yield partial(_on_grid, question, step)
    for digits in (1, 2, 3):
        short = _shorter(rule, digits, free)
        if short != rule:
            yield partial(replace, question, rule=short)


def _on_grid(question: Question, step: float) -> Question:
    batch = question.batch
    assert batch.logits is not None
    assert batch.behavior_logits is not None
    z, y = (_rounded(x, batch, step) for x in (batch.logits, batch.behavior_logits))
    return question.on(_rebuilt(batch, z, y))


def _shorter(rule: Rule, digits: int, free: frozenset[str]) -> Rule:
    names = set(free & {"delta_low", "delta_high", "clip_low", "clip_high"})
    if "delta" in free:
        names |= {"delta_low", "delta_high"}
    short: dict[str, Any] = {n: float(f"{getattr(rule, n):.{digits}g}") for n in names}
    return replace(rule, **short)


def _reducible(batch: Batch) -> bool:
    """Whether both policies are known on the whole vocabulary, so that it can be cut."""
    return batch.logits is not None and batch.behavior_logits is not None


def _rounded(logits: FloatArray, batch: Batch, step: float) -> Array:
    """Log-probs rounded to multiples of `step`: logits of about the same policy."""
    rounded = np.zeros(logits.shape)
    exact = logits[batch.response_mask].astype(np.float64)
    rounded[batch.response_mask] = np.round(log_softmax(exact) / step) * step
    return rounded


def _merged(batch: Batch, new: IntArray) -> Batch:
    """The batch with token `j` renamed to `new[j]`; tokens of one name have their mass added."""
    assert batch.logits is not None
    assert batch.behavior_logits is not None
    merged = []
    for logits in (batch.logits, batch.behavior_logits):
        x = np.where(batch.response_mask[..., None], logits, 0.0).astype(np.float64)
        top = x.max(axis=-1, keepdims=True)
        mass = np.zeros((*x.shape[:-1], new.max() + 1))
        for old, name in enumerate(new):
            mass[..., name] += np.exp(x[..., old] - top[..., 0])
        with np.errstate(divide="ignore"):
            merged.append(np.log(mass))
    return _rebuilt(batch, merged[0], merged[1], new)


def _rebuilt(
    batch: Batch, training: FloatArray, behavior: FloatArray, new: IntArray | None = None
) -> Batch:
    """The batch with other logits; stored log-probs follow them, -inf entries stay.

    `new` renumbers the ids.
    """
    valid = batch.response_mask
    assert batch.topk_ids is not None
    assert batch.topk_logprobs is not None
    z, y = (
        round_logits(np.where(valid[..., None], x, np.nan), batch.dtype)
        for x in (training, behavior)
    )
    tokens = batch.tokens if new is None else new[batch.tokens]
    ids = batch.topk_ids if new is None else new[batch.topk_ids]
    stored = np.zeros(y.shape)
    stored[valid] = log_softmax(y[valid].astype(np.float64))
    listed = np.take_along_axis(stored, ids, axis=-1)
    cut = np.isneginf(batch.topk_logprobs)
    own = np.take_along_axis(stored, tokens[..., None], axis=-1)[..., 0]
    return replace(
        batch,
        vocab_size=z.shape[-1],
        tokens=tokens,
        topk_ids=ids,
        logits=z,
        behavior_logits=y,
        topk_logprobs=np.where(cut, -np.inf, listed).astype(np.float32),
        behavior_logprobs=own.astype(np.float32),
    )
