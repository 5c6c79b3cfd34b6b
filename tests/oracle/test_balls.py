"""Both arithmetics enclose exact results; NumPy's functions are as accurate as assumed."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

from pdverify.oracle.arb_balls import ArbBall, precision
from pdverify.oracle.float_balls import ULPS, FloatBall

NUMBERS = st.one_of(
    st.floats(-1e3, 1e3),
    st.floats(-1.0, 1.0).map(lambda x: x * 2.0**-60),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-1074, 2.0**-1022, 1 + 2.0**-52, 700.0, -740.0]),
)
RADII = st.sampled_from([0.0, 2.0**-1074, 1e-300, 2.0**-60, 1e-9, 1e-3, 0.5, 3.0])


def _ball(mid: float, rad: float) -> FloatBall:
    return FloatBall(np.array([mid]), np.array([rad]))


def _points(mid: float, rad: float) -> list[arb]:
    return [arb(mid) + arb(rad) * side for side in (-1, 0, 1)]


def _holds(ball: FloatBall, exact: arb) -> bool:
    if not ball.finite()[0]:
        return True
    low, high = ball.bounds()
    inside = abs(exact - arb(ball.mid[0])) <= arb(ball.rad[0]) * (1 + arb(2) ** -300)
    return bool(inside) and bool(exact >= arb(low[0])) and bool(exact <= arb(high[0]))


UNARY = {
    "exp": (arb.exp, lambda x: True),
    "expm1": (arb.expm1, lambda x: True),
    "log": (arb.log, lambda x: x > 0),
    "log1p": (arb.log1p, lambda x: x > -1),
    "abs": (abs, lambda x: True),
    "square": (lambda x: x * x, lambda x: True),
    "reciprocal": (lambda x: 1 / x, lambda x: x != 0),
    "nonnegative_part": (lambda x: x if x > 0 else arb(0), lambda x: True),
    "sign": (lambda x: arb(1) if x > 0 else arb(-1) if x < 0 else arb(0), lambda x: True),
}


@pytest.mark.parametrize("name", UNARY)
@settings(deadline=None)
@given(mid=NUMBERS, rad=RADII)
def test_a_function_of_a_ball_holds_the_function_of_its_points(name, mid, rad):
    function, defined = UNARY[name]
    with np.errstate(all="ignore"), precision(2400):
        result = getattr(_ball(mid, rad), name)()
        for point in _points(mid, rad):
            if defined(point):
                assert _holds(result, function(point)), (name, mid, rad, result.bounds())


@settings(deadline=None)
@given(a=NUMBERS, ra=RADII, b=NUMBERS, rb=RADII)
def test_sums_products_quotients_and_hulls_hold_their_points(a, ra, b, rb):
    x, y = _ball(a, ra), _ball(b, rb)
    with np.errstate(all="ignore"), precision(5000):
        hull = x.hull(y)
        for p in _points(a, ra):
            assert _holds(hull, p)
            for q in _points(b, rb):
                assert _holds(x + y, p + q)
                assert _holds(x - y, p - q)
                assert _holds(x * y, p * q)
                if q != 0:
                    assert _holds(x / y, p / q)


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=70))
def test_a_sum_holds_the_exact_sum(values):
    with precision(2400):
        total = FloatBall.exact(np.array([values])).sum()
        assert _holds(total, sum((arb(v) for v in values), arb(0)))


def test_a_long_sum_is_tight():
    x = np.random.default_rng(0).random((1, 152_000))
    total = FloatBall.exact(x).sum()
    assert total.rad[0] < 1e-14 * total.mid[0]


@settings(deadline=None)
@given(mid=NUMBERS, rad=RADII)
def test_certain_signs_are_true(mid, rad):
    ball = _ball(mid, rad)
    with precision(2400):
        low, high = arb(mid) - arb(rad), arb(mid) + arb(rad)
        assert bool(ball.positive()[0]) == bool(low > 0)
        assert bool(ball.nonpositive()[0]) == bool(high <= 0)


def test_what_is_not_a_number_is_certain_of_nothing():
    with np.errstate(all="ignore"):
        for ball in (_ball(0.0, 1.0).log(), _ball(1e308, 0.0) * 10.0, _ball(800.0, 0.0).exp()):
            assert not ball.positive()[0]
            assert not ball.nonpositive()[0]
            assert not ball.finite()[0]
            assert np.isnan(ball.bounds()).all()


@pytest.mark.parametrize("name", ["exp", "expm1", "log", "log1p"])
def test_numpy_is_within_the_ulps_that_are_taken_for_granted(name):
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [
            rng.uniform(-745, 709, 4000),
            rng.uniform(-2, 2, 4000),
            rng.choice([-1, 1], 4000) * 10.0 ** rng.uniform(-300, 2, 4000),
            1 + rng.choice([-1, 1], 2000) * 2.0 ** rng.uniform(-52, -1, 2000),
        ]
    )
    if name == "log":
        x = np.abs(x)
    if name == "log1p":
        x = x[x > -1]
    x = np.resize(x, (len(x) // 8) * 8)
    got = getattr(np, name)(x)
    with precision(200):
        for a, b in zip(x, got, strict=True):
            exact = getattr(arb, name)(arb(float(a)))
            ulp = np.spacing(abs(float(exact)))
            assert abs(exact - arb(float(b))) <= ULPS * arb(float(ulp)), (name, a, b)


@settings(deadline=None)
@given(mid=st.floats(allow_nan=False, allow_infinity=False))
def test_arb_bounds_round_outward_and_keep_exact_numbers(mid):
    low, high = ArbBall.exact(np.array([mid])).bounds()
    assert low[0] == high[0] == mid
    with precision(200):
        third = ArbBall(np.array([arb(mid) / 3], dtype=object))
        low, high = third.bounds()
        assert arb(low[0]) <= third.x[0] + abs(third.x[0]) * arb(2) ** -190
        assert arb(high[0]) >= third.x[0] - abs(third.x[0]) * arb(2) ** -190
        assert high[0] <= np.nextafter(np.nextafter(low[0], np.inf), np.inf)
