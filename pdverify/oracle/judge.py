"""The judge: the right keep/drop decision for the very bits it is given, with certificates.

Adaptive like the exact predicates of computational geometry: float64 balls decide most tokens at
NumPy's speed; the rest are decided row by row in arb, at `PRECISIONS` bits until the decision is
certain.  Both run the same formulas (`view.py`).

A decision is settled for the exact bits first.  It keeps when A = 0, when D <= delta is certain,
or when the direction certainly does not push the policy out; it drops when both D > delta and
the push are certain.  It is DETERMINED when it also survives moving every stored log-prob by
half its last place in the format it was stored in (an exact 0.0 stays).  Logits are exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdverify.batch import Rows
from pdverify.oracle.arb_balls import ArbBall, precision
from pdverify.oracle.balls import Ball, BoolArray, FloatArray
from pdverify.oracle.float_balls import FloatBall
from pdverify.oracle.view import Quantity, View
from pdverify.rules import Partition, Rule, Support, Tail

PRECISIONS = (128, 256, 512, 1024)
"""Significand bits of the arb passes."""

BLOCK = 2**17
"""Vocabulary entries per block of rows of the float64 pass: its arrays fit a cache."""

ARB_CELLS = 2**18
"""Vocabulary entries kept in arb form between calls; the oldest rows go first."""

DETERMINED = "determined"
PROXIMITY = "undecided-proximity"
DIRECTION = "undecided-direction"
NOISE = "undecided-input-noise"
NOT_FINITE = "not-finite"
LIMIT = "precision-limit"
STATUSES = (DETERMINED, PROXIMITY, DIRECTION, NOISE, NOT_FINITE, LIMIT)

StatusArray: TypeAlias = NDArray[np.str_]


@dataclass(frozen=True)
class Enclosure:
    """`[T]` float64 bounds, rounded outward: low <= truth <= high.

    Both are inf where the quantity is +infinity, both NaN where it is undefined or nothing is
    known.
    """

    low: FloatArray
    high: FloatArray

    @property
    def mid(self) -> FloatArray:
        """`[T]`: the middle of each enclosure; NaN where it is not finite."""
        with np.errstate(invalid="ignore"):
            return self.low + (self.high - self.low) / 2


@dataclass(frozen=True)
class Decisions:
    """What the judge knows of `T` tokens under a rule.

    Attributes:
        keep: `[T]`, the right decision for the exact bits where one is certified; elsewhere a
            best guess that must not be used.
        status: `[T]`, one of `STATUSES`.  ``undecided-proximity`` (``-direction``): that test
            alone is not certain at the highest precision; ``precision-limit``: neither is.
            ``undecided-input-noise``: certain for the exact bits, not for the numbers they may
            stand for.  ``not-finite``: D or C is infinite and the finite ones do not settle it.
        determined: `[T]`, status is ``determined``.
        divergence: enclosure of the quantity the proximity test compares with delta (D, or the
            predicted D of a second-order rule; for ``bracket`` the hull of both ends), exact
            bits; NaN where the rule has none.
        direction: enclosure of the quantity whose sign the direction test takes, without A:
            C (for ``bracket`` the hull of both ends), or log r for ratio and clip; NaN for none.
        margin: `[T]`, the smaller of two signed relative distances, (D - delta) / max(D, delta)
            and sign(A) C / (sum of the magnitudes of C's terms); for a ratio direction
            (pi_k - mu_k) / max(pi_k, mu_k), and for clip the same with its bound times mu_k.
            Above 0 where the token is dropped.  Its size is how far the decision is from
            flipping: a dropped token flips with its nearest test, a kept one with its farthest.
            -inf where A = 0; NaN where a quantity is not finite.
        escalated: `[T]`, float64 balls did not suffice.
    """

    keep: BoolArray
    status: StatusArray
    determined: BoolArray
    divergence: Enclosure
    direction: Enclosure
    margin: FloatArray
    escalated: BoolArray


@dataclass(frozen=True)
class _Tests:
    """Both criteria of one rule with one tail estimator, on one view.

    `outside` and `inside`: D > delta, D <= delta are certain.  `pushes` and `pulls`: the
    direction test certainly drops, keeps.  `infinite`: D or C is.  `stuck`: so is the quantity
    that the decision hangs on.
    """

    outside: BoolArray
    inside: BoolArray
    pushes: BoolArray
    pulls: BoolArray
    infinite: BoolArray
    stuck: BoolArray
    divergence: Quantity | None
    direction: Ball
    scale: Ball | None

    @property
    def keeps(self) -> BoolArray:
        return self.inside | self.pulls

    @property
    def drops(self) -> BoolArray:
        return self.outside & self.pushes & ~self.infinite


class Judge:
    """Encloses divergences and coefficients of `rows`, and decides rules on them.

    Args:
        rows: the tokens.  What is computed is cached, so ask much of one chunk of rows (64, say)
            before the next.
        support: the retained support of the top-K partition.
        noise: whether `divergence`, `coefficient` and `ratio_gap` enclose every value the stored
            log-probs may stand for (True) or the value of the exact bits (False).  `decide`
            looks at both.
    """

    def __init__(self, rows: Rows, *, support: Support = "append", noise: bool = False) -> None:
        self.rows, self.support, self.noise = rows, support, noise
        step = max(1, BLOCK // rows.vocab_size)
        self._blocks = [slice(i, i + step) for i in range(0, len(rows), step)]
        self._views: dict[Support, list[View]] = {}
        self._arb: OrderedDict[tuple[Support, int, int], View] = OrderedDict()

    def divergence(self, name: str, partition: Partition, *, bits: int | None = None) -> Enclosure:
        """D of the divergence `name` on `partition`: `[T]`, nats or probability.

        With `bits`, every row is computed in arb at that precision; without, in float64 and only
        where that fails in arb.

        Raises:
            UnknownName: no such divergence.
            InputError: the rows do not carry what the partition needs.
        """
        return self._enclose(
            lambda view: view.divergence(name, partition, self.noise), np.inf, bits
        )

    def coefficient(
        self,
        name: str,
        partition: Partition,
        tail: Tail | None = None,
        *,
        bits: int | None = None,
    ) -> Enclosure:
        """C of the divergence `name`: `[T]`; NaN where it is infinite.

        `tail` chooses the tail's motion w (``aggregated``, ``uniform`` or ``exact``); None in the
        full partition.  Errors and `bits` as in `divergence`.
        """
        return self._enclose(
            lambda view: view.coefficient(name, partition, tail, self.noise), np.nan, bits
        )

    def ratio_gap(self, partition: Partition = "binary", *, bits: int | None = None) -> Enclosure:
        """log pi_k - log mu_k: `[T]`; NaN where pi_k = 0.

        Its sign is the ratio direction.  From `behavior_logits` in the full partition, from the
        stored log-prob elsewhere.
        """
        return self._enclose(
            lambda view: Quantity(
                view.ratio_gap(partition, self.noise), view.cells(partition).sampled_has_no_pi()
            ),
            np.nan,
            bits,
        )

    def tail_mass(self, partition: Partition = "topk") -> tuple[Enclosure, Enclosure]:
        """(pi_T, mu_T): what either policy has outside the retained support, exact bits."""
        pi = self._enclose(lambda view: _finite(view.cells(partition).pi[:, -1]), np.nan, None)
        mu = self._enclose(lambda view: _finite(view.cells(partition).mu[:, -1]), np.nan, None)
        return pi, mu

    def tail_rate(self, tail: Tail, partition: Partition = "topk") -> Enclosure:
        """w = x / pi_T of a tail estimator."""

        def rate(view: View) -> Quantity:
            motion = view.tail_motion(partition, tail)
            assert motion is not None
            return _finite(motion.rate)

        return self._enclose(rate, np.nan, None)

    def variance(self, partition: Partition, tail: Tail | None = None) -> Enclosure:
        """The second-order coefficient of forward KL (h^2 / 2 multiplies it), exact bits."""
        return self._enclose(lambda view: _finite(view.variance(partition, tail)), np.nan, None)

    def decide(self, rule: Rule) -> Decisions:
        """The right decision of `rule` at every row, and how sure it is.

        Raises:
            InputError: the rows do not carry what the rule needs.
        """
        with np.errstate(all="ignore"):
            parts = [
                self._decide_block(index, rule, block) for index, block in enumerate(self._blocks)
            ]
        joined = {
            name: _concatenate([getattr(part, name) for part in parts])
            for name in Decisions.__dataclass_fields__
        }
        return Decisions(**joined)  # type: ignore[arg-type]

    def _view(self, index: int, support: Support) -> View:
        views = self._views.setdefault(
            support,
            [
                View(FloatBall, self.rows.take(block), support, seek_ties=False)
                for block in self._blocks
            ],
        )
        return views[index]

    def _arb_view(self, row: int, support: Support, bits: int) -> View:
        key = (support, row, bits)
        if key not in self._arb:
            one = self.rows.take(slice(row, row + 1))
            self._arb[key] = View(ArbBall, one, support, seek_ties=True)
            while len(self._arb) > 1 and len(self._arb) * self.rows.vocab_size > ARB_CELLS:
                self._arb.popitem(last=False)
        self._arb.move_to_end(key)
        return self._arb[key]

    def _enclose(
        self, quantity: Callable[[View], Quantity], infinite: float, bits: int | None
    ) -> Enclosure:
        low, high = np.full((2, len(self.rows)), np.nan)
        missing = np.ones(len(self.rows), dtype=bool)
        with np.errstate(all="ignore"):
            for index, block in enumerate(self._blocks if bits is None else []):
                value = quantity(self._view(index, self.support))
                low[block], high[block] = value.ball.bounds()
                low[block][value.infinite] = high[block][value.infinite] = infinite
                missing[block] = ~(value.ball.finite() | value.infinite)
            for row in np.nonzero(missing)[0]:
                for precision_bits in PRECISIONS if bits is None else (bits,):
                    with precision(precision_bits):
                        value = quantity(self._arb_view(int(row), self.support, precision_bits))
                        if value.infinite[0]:
                            low[row] = high[row] = infinite
                            break
                        if value.ball.finite()[0]:
                            low[row], high[row] = (end[0] for end in value.ball.bounds())
                            break
        return Enclosure(low, high)

    def _decide_block(self, index: int, rule: Rule, block: slice) -> Decisions:
        view = self._view(index, rule.support)
        advantages = view.rows.advantages
        count = len(advantages)
        if rule.direction == "none":
            return _all_kept(count)
        result = _decide(view, rule)
        start = block.start
        open_rows = ~(result.determined | np.isin(result.status, (NOT_FINITE, NOISE)))
        for row in np.nonzero(open_rows)[0]:
            for bits in PRECISIONS:
                with precision(bits):
                    arb_view = self._arb_view(start + int(row), rule.support, bits)
                    one = _decide(arb_view, rule)
                if one.status[0] in (DETERMINED, NOISE, NOT_FINITE):
                    break
            _write(result, int(row), one)
        return result


def _finite(ball: Ball) -> Quantity:
    return Quantity(ball, np.zeros(ball.positive().shape, dtype=bool))


def _concatenate(parts: list[object]) -> object:
    if isinstance(parts[0], Enclosure):
        return Enclosure(
            np.concatenate([part.low for part in parts]),  # type: ignore[attr-defined]
            np.concatenate([part.high for part in parts]),  # type: ignore[attr-defined]
        )
    return np.concatenate(parts)  # type: ignore[arg-type]


def _write(result: Decisions, row: int, one: Decisions) -> None:
    """Put the single decision `one` in the place of `row`; the margin's scale stays."""
    result.keep[row], result.status[row] = one.keep[0], one.status[0]
    result.determined[row], result.escalated[row] = one.determined[0], True
    result.margin[row] = one.margin[0]
    for mine, theirs in (
        (result.divergence, one.divergence),
        (result.direction, one.direction),
    ):
        mine.low[row], mine.high[row] = theirs.low[0], theirs.high[0]


def _all_kept(count: int) -> Decisions:
    unknown = np.full(count, np.nan)
    return Decisions(
        keep=np.ones(count, dtype=bool),
        status=np.full(count, DETERMINED, dtype="U21"),
        determined=np.ones(count, dtype=bool),
        divergence=Enclosure(unknown.copy(), unknown.copy()),
        direction=Enclosure(unknown.copy(), unknown.copy()),
        margin=np.full(count, -np.inf),
        escalated=np.zeros(count, dtype=bool),
    )


def _decide(view: View, rule: Rule) -> Decisions:
    """The decisions of one view: exact bits first, then over the box of input noise."""
    tails: tuple[Tail | None, ...] = (rule.tail,)
    if rule.tail == "bracket":
        tails = ("aggregated", "uniform")
    still = view.rows.advantages == 0
    exact = [_tests(view, rule, tail, noise=False) for tail in tails]
    keeps = still | np.any([test.keeps for test in exact], axis=0)
    drops = ~still & np.all([test.drops for test in exact], axis=0)
    stuck = np.any([test.stuck for test in exact], axis=0) & ~keeps
    status = np.full(len(still), LIMIT, dtype="U21")
    outside = np.all([test.outside for test in exact], axis=0)
    pushes = np.all([test.pushes for test in exact], axis=0)
    status[pushes] = PROXIMITY
    status[outside] = DIRECTION
    status[keeps | drops] = DETERMINED
    partition: Partition = "binary" if rule.direction == "clip" else rule.partition
    if view.noisy(partition):
        noisy = [_tests(view, rule, tail, noise=True) for tail in tails]
        noisy_keeps = still | np.any([test.keeps for test in noisy], axis=0)
        noisy_drops = np.all([test.drops for test in noisy], axis=0)
        survives = np.where(keeps, noisy_keeps, noisy_drops)
        status[(keeps | drops) & ~survives] = NOISE
    status[stuck] = NOT_FINITE
    return Decisions(
        keep=keeps | ~(drops | (stuck & outside & pushes)),
        status=status,
        determined=status == DETERMINED,
        divergence=_divergence_enclosure(exact, len(still)),
        direction=_hull([test.direction for test in exact]),
        margin=np.where(still, -np.inf, _margin(view, rule, exact)),
        escalated=np.full(len(still), isinstance(exact[0].direction, ArbBall)),
    )


def _delta(view: View, rule: Rule) -> FloatArray:
    return np.where(view.rows.advantages > 0, rule.delta_high, rule.delta_low)


def _tests(view: View, rule: Rule, tail: Tail | None, *, noise: bool) -> _Tests:
    sign = np.sign(view.rows.advantages)
    none = np.zeros(len(sign), dtype=bool)
    if rule.direction == "clip":
        gap = view.ratio_gap("binary", noise)
        beyond = _beyond_clip(view, rule, gap)
        return _Tests(
            ~none, none, beyond.positive(), beyond.nonpositive(), none, none, None, gap, beyond
        )
    assert rule.divergence is not None
    divergence = view.divergence(rule.divergence, rule.partition, noise)
    infinite = divergence.infinite
    scale: Ball | None
    if rule.direction == "ratio":
        direction = view.ratio_gap(rule.partition, noise)
        gone = view.cells(rule.partition).sampled_has_no_pi()
        push = (direction * view.kind.exact(sign)).put(gone, view.kind.exact(-sign[gone]))
        pushes, pulls, lost = push.positive(), push.nonpositive(), np.zeros_like(gone)
        scale = None
    else:
        coefficient = view.coefficient(rule.divergence, rule.partition, tail, noise)
        direction, scale = coefficient.ball, coefficient.scale
        push = direction * view.kind.exact(sign)
        lost = coefficient.infinite
        pushes = push.positive() & ~lost
        pulls = push.nonpositive() & ~lost
        if rule.direction == "second-order":
            divergence = Quantity(_second_order(view, rule, tail, noise=noise), divergence.infinite)
    above = divergence.ball - view.kind.exact(_delta(view, rule))
    return _Tests(
        outside=above.positive() | divergence.infinite,
        inside=above.nonpositive() & ~divergence.infinite,
        pushes=pushes,
        pulls=pulls,
        infinite=infinite | lost,
        stuck=lost | (infinite & pushes),
        divergence=divergence,
        direction=direction,
        scale=scale,
    )


def _beyond_clip(view: View, rule: Rule, gap: Ball) -> Ball:
    """`[T]`, how far log r lies beyond the clip bound that A makes active; positive drops."""
    exact, advantages = view.kind.exact, view.rows.advantages
    upper = gap - exact(np.full(len(advantages), rule.clip_high)).log1p()
    lower = gap.put(slice(None), -1.0)
    if rule.clip_low < 1:
        lower = exact(np.full(len(advantages), -rule.clip_low)).log1p() - gap
    gone = view.cells("binary").sampled_has_no_pi()
    upper = upper.put(gone, -1.0)
    lower = lower.put(gone, 1.0 if rule.clip_low < 1 else -1.0)
    return upper.put(advantages < 0, lower[advantages < 0])


def _second_order(view: View, rule: Rule, tail: Tail | None, *, noise: bool) -> Ball:
    """D + h C + h^2 Var / 2 with h = eta A r: the divergence predicted after the step."""
    assert rule.divergence is not None
    if rule.divergence != "kl":
        raise ValueError(f"second-order is derived for kl only, not {rule.divergence!r}")
    gap = view.ratio_gap(rule.partition, noise)
    gone = view.cells(rule.partition).sampled_has_no_pi()
    ratio = gap.exp().put(gone, 0.0)
    step = ratio * view.kind.exact(view.rows.advantages) * view.kind.exact(np.array(rule.eta))
    first = view.coefficient(rule.divergence, rule.partition, tail, noise).ball
    second = view.variance(rule.partition, tail, noise)
    start = view.divergence(rule.divergence, rule.partition, noise).ball
    return start + step * first + step.square() * second * 0.5


def _hull(balls: list[Ball]) -> Enclosure:
    ends = [ball.bounds() for ball in balls]
    return Enclosure(
        np.min([low for low, _ in ends], axis=0), np.max([high for _, high in ends], axis=0)
    )


def _divergence_enclosure(tests: list[_Tests], count: int) -> Enclosure:
    known = [test.divergence for test in tests if test.divergence is not None]
    if not known:
        return Enclosure(*np.full((2, count), np.nan))
    hull = _hull([quantity.ball for quantity in known])
    hull.low[known[0].infinite] = hull.high[known[0].infinite] = np.inf
    return hull


def _middle(ball: Ball) -> FloatArray:
    low, high = ball.bounds()
    return low + (high - low) / 2


def _margin(view: View, rule: Rule, tests: list[_Tests]) -> FloatArray:
    """See `Decisions.margin`; for a bracket, the smaller of both estimators' margins."""
    sign = np.sign(view.rows.advantages)
    return np.asarray(np.min([_one_margin(view, rule, test, sign) for test in tests], axis=0))


def _one_margin(view: View, rule: Rule, test: _Tests, sign: FloatArray) -> FloatArray:
    if rule.direction == "clip":
        assert test.scale is not None
        return _relative_gap(_middle(test.scale))
    assert test.divergence is not None
    value, delta = _middle(test.divergence.ball), _delta(view, rule)
    larger = np.maximum(value, delta)
    proximity = np.where(larger > 0, (value - delta) / larger, 0.0)
    proximity[test.divergence.infinite] = 1.0
    if test.scale is None:
        return np.minimum(proximity, _relative_gap(sign * _middle(test.direction)))
    scale = _middle(test.scale)
    direction = np.where(scale > 0, sign * _middle(test.direction) / scale, 0.0)
    return np.minimum(proximity, direction)


def _relative_gap(gap: FloatArray) -> FloatArray:
    """(e^gap - 1) / max(e^gap, 1)."""
    return -np.sign(gap) * np.expm1(-np.abs(gap))
