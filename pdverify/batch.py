"""What is known of both policies at each token, checked once, at the door.

A `Batch` holds `B` sequences of `L` token positions over a vocabulary of `V` tokens, in the
layout of a trainer.  Everything behind the door (definitions, oracle, budgets) works on `Rows`:
the valid positions, flattened to `T` rows.  Padding may hold anything, NaN included: it never
passes `Batch.rows`.

Three things are told apart (they are often confused): a log-prob that is missing (None, NaN), a
probability of zero (-inf, legal), and a placeholder (-9999, float-min; rejected).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.formats import FORMATS, POLICY_FORMATS

FloatArray: TypeAlias = NDArray[np.floating[Any]]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
View: TypeAlias = Literal["full", "topk", "sampled"]

PLACEHOLDER = -9999.0
"""Stored finite log-probs at or below this are placeholders of an engine, not probabilities."""


class InputError(ValueError):
    """Bad input.  The message names the argument, the place and the value."""

    def __init__(self, argument: str, place: tuple[int, ...] | None, value: object, why: str):
        where = "" if place is None else "[" + ", ".join(str(i) for i in place) + "]"
        shown = f"{value:.9g}" if isinstance(value, float) else str(value)
        super().__init__(f"{argument}{where} = {shown}: {why}")
        self.argument, self.place, self.value, self.why = argument, place, value, why


@dataclass(frozen=True, eq=False)
class Rows:
    """The `T` valid tokens of a batch, flattened.  Fields as in `Batch`, without `[B, L]`.

    `index` is `[T, 2]`: the (sequence, position) each row came from.
    """

    index: IntArray
    tokens: IntArray
    advantages: NDArray[np.float64]
    vocab_size: int
    logits: FloatArray | None
    behavior_logits: FloatArray | None
    logprobs: FloatArray | None
    behavior_logprobs: FloatArray | None
    topk_ids: IntArray | None
    topk_logprobs: FloatArray | None
    dtype: str
    logprob_dtype: str

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: slice | IntArray | BoolArray) -> Rows:
        """The same columns on a selection of rows."""
        columns: dict[str, Any] = {
            name: column[rows]
            for name, column in vars(self).items()
            if isinstance(column, np.ndarray)
        }
        return replace(self, **columns)


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of sampled tokens with what is known of both policies.

    Attributes:
        tokens: `[B, L]` int64, the sampled token `k` of each position.
        advantages: `[B, L]` float32.
        response_mask: `[B, L]` bool, False on padding.
        vocab_size: `V`; columns with -inf logits count.
        logits: `[B, L, V]` float32 or float64, training-policy logits; every value is exactly
            representable in `dtype`.  -inf means probability zero.
        behavior_logits: `[B, L, V]`, behavior-policy logits (the full view), or None.
        logprobs: `[B, L]` float32, stored training log-probs of the sampled token (nats), or
            None; wanted only where `logits` is None.
        behavior_logprobs: `[B, L]` float32, stored behavior log-probs of the sampled token
            (nats), or None.
        topk_ids: `[B, L, K]` int64, the behavior policy's retained ids, or None.
        topk_logprobs: `[B, L, K]` float32, their stored log-probs (nats), best first is not
            required.
        dtype: name of the format the logits were stored in.
        logprob_dtype: name of the format the log-probs were stored in.

    Raises:
        InputError: see the module's docstring and `docs/inputs.md` for each rule.
    """

    tokens: IntArray
    advantages: FloatArray
    response_mask: BoolArray
    vocab_size: int
    logits: FloatArray | None = None
    behavior_logits: FloatArray | None = None
    logprobs: FloatArray | None = None
    behavior_logprobs: FloatArray | None = None
    topk_ids: IntArray | None = None
    topk_logprobs: FloatArray | None = None
    dtype: str = "fp32"
    logprob_dtype: str = "fp32"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def view(self) -> View:
        """The richest view of the behavior policy that this batch carries."""
        if self.behavior_logits is not None:
            return "full"
        return "topk" if self.topk_ids is not None else "sampled"

    def rows(self) -> Rows:
        """The valid tokens, flattened to `[T, ...]`; padding is dropped."""
        b, position = np.nonzero(self.response_mask)

        def pick(x: Any) -> Any:
            return None if x is None else x[b, position]

        return Rows(
            index=np.stack([b, position], axis=1).astype(np.int64),
            tokens=pick(self.tokens),
            advantages=pick(self.advantages).astype(np.float64),
            vocab_size=self.vocab_size,
            logits=pick(self.logits),
            behavior_logits=pick(self.behavior_logits),
            logprobs=pick(self.logprobs),
            behavior_logprobs=pick(self.behavior_logprobs),
            topk_ids=pick(self.topk_ids),
            topk_logprobs=pick(self.topk_logprobs),
            dtype=self.dtype,
            logprob_dtype=self.logprob_dtype,
        )


def take(batch: Batch, sequences: slice, positions: slice) -> Batch:
    """A part of a batch.

    Raises:
        InputError: it holds no valid token.
    """
    return _columns(batch, (sequences, positions))


def gather(batch: Batch, rows: NDArray[np.intp]) -> Batch:
    """The valid tokens of those numbers, `[N]`, as one sequence of a batch `[1, N]`."""
    b, position = np.nonzero(batch.response_mask)
    return _columns(batch, (b[rows][None], position[rows][None]))


def _columns(batch: Batch, where: Any) -> Batch:
    columns: dict[str, Any] = {
        name: column[where]
        for name, column in vars(batch).items()
        if isinstance(column, np.ndarray)
    }
    return replace(batch, **columns)


def check_threshold(name: str, value: float | None) -> None:
    """Reject a threshold (in the unit of its divergence) that is NaN, infinite or negative."""
    if value is not None and not (np.isfinite(value) and value >= 0):
        raise InputError(name, None, value, "a threshold is a finite number >= 0")


def _first(bad: BoolArray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(bad)[0])


def _reject(argument: str, x: NDArray[Any], bad: BoolArray, why: str) -> None:
    if bad.any():
        place = _first(bad)
        raise InputError(argument, place, x[place].item(), why)


def _check(batch: Batch) -> None:
    _check_shapes(batch)
    valid = batch.response_mask
    size = batch.vocab_size
    _reject(
        "tokens",
        batch.tokens,
        valid & ((batch.tokens < 0) | (batch.tokens >= size)),
        f"token ids lie in [0, {size})",
    )
    _reject("advantages", batch.advantages, valid & ~np.isfinite(batch.advantages), "not finite")
    for name in ("logits", "behavior_logits"):
        logits = getattr(batch, name)
        if logits is not None:
            _check_logits(batch, name, logits)
    for name in ("logprobs", "behavior_logprobs"):
        stored = getattr(batch, name)
        if stored is not None:
            _check_logprobs(batch, name, stored, valid)
    if batch.behavior_logprobs is not None:
        _reject(
            "behavior_logprobs",
            batch.behavior_logprobs,
            valid & np.isneginf(batch.behavior_logprobs),
            "the behavior policy sampled this token, its probability cannot be zero",
        )
    if batch.topk_ids is not None:
        _check_topk(batch)


def _check_shapes(batch: Batch) -> None:
    if batch.tokens.ndim != 2:
        raise InputError("tokens.shape", None, batch.tokens.shape, "expected [B, L]")
    if batch.tokens.size == 0 or not batch.response_mask.any():
        raise InputError("response_mask", None, batch.tokens.shape, "the batch has no valid token")
    if batch.vocab_size < 2:
        raise InputError("vocab_size", None, batch.vocab_size, "a vocabulary has at least 2 tokens")
    for name in ("dtype", "logprob_dtype"):
        if getattr(batch, name) not in POLICY_FORMATS:
            known = ", ".join(POLICY_FORMATS)
            raise InputError(name, None, getattr(batch, name), f"known: {known}")
    lead = batch.tokens.shape
    k = None if batch.topk_ids is None else batch.topk_ids.shape[-1]
    expected: dict[str, tuple[tuple[int | None, ...], str]] = {
        "tokens": (lead, "i"),
        "advantages": (lead, "f"),
        "response_mask": (lead, "b"),
        "logits": ((*lead, batch.vocab_size), "f"),
        "behavior_logits": ((*lead, batch.vocab_size), "f"),
        "logprobs": (lead, "f"),
        "behavior_logprobs": (lead, "f"),
        "topk_ids": ((*lead, k), "i"),
        "topk_logprobs": ((*lead, k), "f"),
    }
    kinds = {"i": "an integer dtype", "f": "float32 or float64", "b": "bool"}
    for name, (shape, kind) in expected.items():
        x = getattr(batch, name)
        if x is None:
            continue
        if x.shape != shape:
            raise InputError(f"{name}.shape", None, x.shape, f"expected {shape}")
        if x.dtype.kind != kind or x.dtype == np.float16:
            raise InputError(f"{name}.dtype", None, x.dtype, f"expected {kinds[kind]}")
    if (batch.topk_ids is None) != (batch.topk_logprobs is None):
        missing = "topk_logprobs" if batch.topk_logprobs is None else "topk_ids"
        raise InputError(missing, None, None, "topk_ids and topk_logprobs come together")
    if batch.topk_ids is not None and batch.behavior_logprobs is None:
        raise InputError("behavior_logprobs", None, None, "a top-K view needs it")
    if batch.logits is None and batch.logprobs is None:
        raise InputError("logits", None, None, "the training policy is unknown")
    if batch.behavior_logits is None and batch.behavior_logprobs is None:
        raise InputError("behavior_logprobs", None, None, "the behavior policy is unknown")
    if k is not None and not 1 <= k < batch.vocab_size:
        raise InputError("topk_ids.shape", None, k, f"K lies in [1, V - 1], V = {batch.vocab_size}")


def _check_logits(batch: Batch, name: str, logits: FloatArray) -> None:
    stored = FORMATS[batch.dtype]
    for b, position in np.argwhere(batch.response_mask):
        row = logits[b, position]
        if row.dtype != stored.dtype:
            moved = ~np.isnan(row) & (stored.round(row) != row)
            if moved.any():
                j = int(np.argmax(moved))
                place = (int(b), int(position), j)
                raise InputError(name, place, float(row[j]), f"not a value of {batch.dtype}")
        if np.isfinite(row).all():
            continue
        bad = np.isnan(row) | np.isposinf(row)
        if bad.any():
            j = int(np.argmax(bad))
            raise InputError(name, (int(b), int(position), j), float(row[j]), "not a logit")
        if np.isneginf(row).all():
            raise InputError(name, (int(b), int(position)), "-inf everywhere", "no policy")
        if name == "behavior_logits" and np.isneginf(row[batch.tokens[b, position]]):
            raise InputError(
                name,
                (int(b), int(position), int(batch.tokens[b, position])),
                float("-inf"),
                "the behavior policy sampled this token, its probability cannot be zero",
            )


def _check_logprobs(batch: Batch, name: str, stored: FloatArray, valid: BoolArray) -> None:
    unit = FORMATS[batch.logprob_dtype].unit_roundoff
    _reject(name, stored, valid & np.isnan(stored), "missing (NaN)")
    _reject(name, stored, valid & (stored > 1.01 * unit), "a log-prob is <= 0")
    _reject(
        name,
        stored,
        valid & np.isfinite(stored) & (stored <= PLACEHOLDER),
        "looks like a placeholder; probability zero is -inf",
    )


def _check_topk(batch: Batch) -> None:
    ids, stored, sampled = batch.topk_ids, batch.topk_logprobs, batch.behavior_logprobs
    assert ids is not None
    assert stored is not None
    assert sampled is not None
    valid = batch.response_mask[..., None] & np.ones(ids.shape, dtype=bool)
    _reject(
        "topk_ids",
        ids,
        valid & ((ids < 0) | (ids >= batch.vocab_size)),
        f"token ids lie in [0, {batch.vocab_size})",
    )
    order = np.argsort(ids, axis=-1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=-1)
    repeated = np.zeros(ids.shape, dtype=bool)
    np.put_along_axis(
        repeated,
        order,
        np.concatenate(
            [np.zeros((*ids.shape[:-1], 1), dtype=bool), ordered[..., 1:] == ordered[..., :-1]],
            axis=-1,
        ),
        axis=-1,
    )
    _reject("topk_ids", ids, valid & repeated, "the id is listed twice")
    _check_logprobs(batch, "topk_logprobs", stored, valid)
    is_sampled = valid & (ids == batch.tokens[..., None])
    _reject(
        "topk_logprobs",
        stored,
        is_sampled & (stored != sampled[..., None]),
        "the same token has another value in behavior_logprobs",
    )
    unit = FORMATS[batch.logprob_dtype].unit_roundoff
    with np.errstate(invalid="ignore", over="ignore"):
        y = np.where(valid, stored, -np.inf).astype(np.float64)
        mass = np.exp(y)
        total = mass.sum(axis=-1)
        noise = (mass * np.abs(np.where(mass > 0, y, 0.0))).sum(axis=-1)
        outside = ~(is_sampled.any(axis=-1))
        own = np.where(batch.response_mask, sampled, -np.inf).astype(np.float64)
        total += np.where(outside, np.exp(own), 0.0)
        noise += np.where(outside, np.exp(own) * np.abs(np.where(np.isfinite(own), own, 0.0)), 0.0)
    _reject(
        "topk_logprobs.sum",
        total,
        batch.response_mask & (total > 1 + 1.01 * unit * (1 + noise)),
        "the retained masses sum to more than 1",
    )
