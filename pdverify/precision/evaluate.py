"""D and C of rows in the arithmetic of number formats, with running error bounds.

Stored numbers are exact inputs here: what storing did to them is `pdverify.precision.noise`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import InputError, Rows
from pdverify.definitions.cells import retained_support
from pdverify.precision.forms import FORMS, Cells
from pdverify.precision.numbers import Arithmetic as Arithmetic
from pdverify.precision.numbers import Rounded, join
from pdverify.rules import Partition, Tail

Float64: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

BLOCK = 2**18
"""Logits of a block of rows: few enough that their arrays stay in the cache."""

NOWHERE = -1e4
"""Logit differences of tokens without probability: every format's exp of it is 0."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A computed quantity, `[T]` float64, and a bound of `|value - exact|` on the same rows.

    The bound is infinite where nothing is claimed: a token with probability in one policy alone,
    an overflow, a logarithm of what may be 0.
    """

    value: Float64
    bound: Float64


class Evaluation:
    """D and C of rows in one arithmetic; shares what divergences, tails and forms have in common.

    Args:
        rows: `T` tokens with logits; the full view needs behavior logits, the top-K view a list.
        arithmetic: formats of the computation.

    Raises:
        InputError: the rows have no logits.
    """

    def __init__(self, rows: Rows, arithmetic: Arithmetic) -> None:
        if rows.logits is None:
            raise InputError("logits", None, None, "precision needs the training logits")
        step = max(1, BLOCK // rows.vocab_size)
        cuts = range(0, len(rows), step)
        self._blocks = [_Block(rows.take(slice(i, i + step)), arithmetic) for i in cuts]

    def divergence(self, name: str, partition: Partition) -> Evaluated:
        """D `[T]`, as `sum mu (log mu - log pi)`, `sum pi (log pi - log mu)`, `sum |pi - mu| / 2`.

        Raises:
            InputError: another divergence, or the rows lack what the partition needs.
        """
        return self._join(lambda block: block.divergence(name, partition))

    def coefficient(
        self, name: str, partition: Partition, tail: Tail | None, form: str
    ) -> Evaluated:
        """C `[T]` in one of `FORMS`.

        Raises:
            InputError: as `divergence`, or the form does not know the divergence or view.
        """
        FORMS[form].check(name, partition)
        return self._join(lambda block: block.coefficient(name, partition, tail, form))

    def _join(self, ask: Callable[[_Block], Rounded]) -> Evaluated:
        with np.errstate(all="ignore"):
            parts = [ask(block) for block in self._blocks]
        value = np.concatenate([x.value for x in parts])
        bound = np.concatenate([x.error for x in parts])
        return Evaluated(value, np.where(np.isfinite(value) & ~np.isnan(bound), bound, np.inf))


def evaluate(
    rows: Rows,
    *,
    divergence: str,
    partition: Partition,
    tail: Tail | None,
    form: str,
    arithmetic: Arithmetic,
) -> tuple[Evaluated, Evaluated]:
    """D and C of rows, see `Evaluation`."""
    found = Evaluation(rows, arithmetic)
    return (
        found.divergence(divergence, partition),
        found.coefficient(divergence, partition, tail, form),
    )


@dataclass(frozen=True, eq=False)
class _Softmax:
    """One policy: `dz = z - max`, its normalizer, log-probs and masses; zeros are exact."""

    dz: Rounded
    norm: Rounded
    log_p: Rounded
    p: Rounded
    alive: Bools


def _softmax(z: Rounded) -> _Softmax:
    alive = ~np.isneginf(z.value)
    dz = (z - z.max()).where(alive, NOWHERE)
    norm = dz.exp().where(alive).sum().log()[:, None]
    log_p = dz - norm
    return _Softmax(dz, norm, log_p, log_p.exp().where(alive), alive)


class _Block:
    """A block of rows; every piece is computed once."""

    def __init__(self, rows: Rows, arithmetic: Arithmetic) -> None:
        self.rows, self.arithmetic = rows, arithmetic
        self._memory: dict[object, Any] = {}

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key]

    @property
    def training(self) -> _Softmax:
        logits: Any = self.rows.logits
        number: _Softmax = self._once("pi", lambda: _softmax(self.arithmetic.number(logits)))
        return number

    @property
    def behavior(self) -> _Softmax:
        logits = self.rows.behavior_logits
        if logits is None:
            raise InputError("behavior_logits", None, None, "the full view needs it")
        number: _Softmax = self._once("mu", lambda: _softmax(self.arithmetic.number(logits)))
        return number

    def divergence(self, name: str, partition: Partition) -> Rounded:
        cells = self.cells(partition, "exact", plain=False)
        if name == "kl":
            terms, factor = -(cells.mu * cells.l), None
        elif name == "reverse-kl":
            terms, factor = cells.pi * cells.l, None
        elif name == "tv":
            terms, factor = (cells.pi - cells.mu).abs(), 0.5
        else:
            raise InputError("divergence", None, name, "precision knows kl, reverse-kl and tv")
        total = terms.where(cells.used).sum()
        return self._claimed(total if factor is None else total.halved(), cells, name)

    def coefficient(self, name: str, partition: Partition, tail: Tail | None, form: str) -> Rounded:
        cells = self.cells(partition, tail, plain=form == "plain")
        return self._claimed(FORMS[form].coefficient(name, cells), cells, name)

    def _claimed(self, x: Rounded, cells: Cells, name: str) -> Rounded:
        """Nothing is claimed of rows where a cell has mass in one policy alone (but for tv)."""
        if name == "tv":
            return x
        lone = ((cells.mu.value > 0) != (cells.pi.value > 0)) & cells.used
        return Rounded(x.value, np.where(lone.any(axis=-1), np.inf, x.error), x.arithmetic)

    def cells(self, partition: Partition, tail: Tail | None, *, plain: bool) -> Cells:
        """Cells of a view; `plain` takes tail masses as 1 minus the retained ones."""
        if partition == "full":
            found: Cells = self._once("full", self._full)
        else:
            key = "topk", tail, plain
            found = self._once(key, lambda: self._coarse(tail, plain))
        return found

    def _full(self) -> Cells:
        pi, mu = self.training, self.behavior
        used = pi.alive | mu.alive
        both = pi.alive & mu.alive
        is_k = np.arange(self.rows.vocab_size) == self.rows.tokens[:, None]
        ratio = (pi.log_p - mu.log_p).where(both)
        direct = ((pi.dz - mu.dz) - (pi.norm - mu.norm)).where(both)
        return Cells(mu.p, pi.p, ratio, direct, pi.p, is_k, used, lambda: self._moments(is_k))

    def _moments(self, is_k: Bools) -> Rounded:
        """`stable.moments-complement` of `docs/formulas.md`, with masses relative to the maxima."""
        pi, mu = self.training, self.behavior
        a, b = pi.dz.exp().where(pi.alive), mu.dz.exp().where(mu.alive)
        s, m = a.sum(), b.sum()
        a, b = a.where(~is_k), b.where(~is_k)
        first, other = a.sum() / s, b.sum() / m
        return first * (other - first) + (a * b).sum() / (s * m) - (a * a).sum() / (s * s)

    def _coarse(self, tail: Tail | None, plain: bool) -> Cells:
        rows, number = self.rows, self.arithmetic.number
        ids, log_mu = retained_support(rows)
        used = ~np.isneginf(log_mu)
        policy = self.training
        stored = number(np.where(used, log_mu, NOWHERE))
        mu, pi = stored.exp().where(used), policy.p.at(ids).where(used)
        ratio = (policy.log_p.at(ids) - stored).where(used)
        alive = np.take_along_axis(policy.alive, ids, axis=-1) & used
        # a list's log-probs are normalized: only the training policy's normalizer is subtracted
        assert rows.logits is not None
        top = number(rows.logits.max(axis=-1, keepdims=True))
        logits = number(np.take_along_axis(rows.logits, ids, axis=-1))
        logits = logits.where(alive)
        direct = ((logits - top) - stored - policy.norm).where(alive)
        is_k = (ids == rows.tokens[:, None]) & used
        count = rows.vocab_size - used.sum(axis=-1)
        mu_t, pi_t, w = self._tail(tail, plain, ids, used, mu, pi, stored, count)
        log_t = pi_t.log() - mu_t.log()
        has = (count > 0)[:, None]

        def whole(x: Rounded, y: Rounded) -> Rounded:
            return join([x, y.where(has)])

        return Cells(
            whole(mu, mu_t),
            whole(pi, pi_t),
            whole(ratio.where(alive), log_t),
            whole(direct, log_t),
            whole(pi, w),
            np.concatenate([is_k, np.zeros_like(has)], axis=-1),
            np.concatenate([used, has], axis=-1),
            None,
        )

    def _tail(
        self,
        tail: Tail | None,
        plain: bool,
        ids: NDArray[np.int64],
        used: Bools,
        mu: Rounded,
        pi: Rounded,
        stored: Rounded,
        count: NDArray[np.int64],
    ) -> tuple[Rounded, Rounded, Rounded]:
        """`mu_T`, `pi_T` and `w`, `[T, 1]` each."""
        number = self.arithmetic.number
        outside = np.ones(self.training.p.value.shape, dtype=bool)
        row = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
        outside[row[used], ids[used]] = False
        rest = self.training.p.where(outside)
        one = number(np.ones(len(ids)))
        if plain:
            mu_t, pi_t = one - mu.sum(), one - pi.sum()
        else:
            best = np.arange(ids.shape[-1]) == stored.value.argmax(axis=-1)[:, None]
            others = mu.where(~best).sum()
            mu_t = -(stored.max()[:, 0].expm1()) - others
            pi_t = rest.sum()
        # a mass that came out below 0 is 0
        mu_t = Rounded(np.maximum(mu_t.value, 0.0), mu_t.error, self.arithmetic)
        pi_t = Rounded(np.maximum(pi_t.value, 0.0), pi_t.error, self.arithmetic)
        if tail == "aggregated":
            w = pi_t
        elif tail == "uniform":
            w = pi_t / number(np.maximum(count, 1).astype(np.float64))
        else:
            squares = (rest * rest).sum()
            w = squares / pi_t
            empty = pi_t.value <= 0
            w = w.where(~empty)
        return mu_t[:, None], pi_t[:, None], w[:, None]
