"""Number formats: rounding, ranges, and radii that hold what was stored."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdverify.formats import FORMATS, POLICY_FORMATS, SCALED, policy_format, storage
from pdverify.registry import UnknownName

NARROW = ("tf32", "bf16", "fp16", "e4m3", "e5m2")
INPUTS = Path(__file__).parents[1] / "docs" / "inputs.md"


def nearest(x: float, name: str) -> float:
    """An independent witness, in exact rational arithmetic: to nearest, ties to even."""
    form = FORMATS[name]
    value = Fraction(x)
    if value == 0:
        return x
    exponent = np.frexp(abs(x))[1] - 1
    lowest = np.frexp(form.min_normal)[1] - 1
    step = Fraction(2) ** (int(max(exponent, lowest)) - form.significand_bits + 1)
    rounded = round(value / step) * step
    if abs(rounded) > Fraction(form.max_finite):
        return float("nan") if form.overflow == "nan" else float(np.copysign(np.inf, x))
    return float(np.copysign(float(rounded), x))


@pytest.mark.parametrize("name", NARROW)
@settings(max_examples=300, deadline=None)
@given(x=st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_rounding_is_to_nearest_even_from_any_float64(name, x):
    found = FORMATS[name].round(np.array([x]))[0]
    np.testing.assert_equal(found, nearest(x, name))


@pytest.mark.parametrize("name", NARROW)
def test_rounding_near_every_halfway_case(name):
    form = FORMATS[name]
    rng = np.random.default_rng(0)
    values = form.round(np.ldexp(rng.uniform(1, 2, 500), rng.integers(-8, 8, 500)))
    half = values + form.half_spacing(values)
    for x in (half, np.nextafter(half, 0), np.nextafter(half, np.inf), half * (1 + 2.0**-40)):
        want = [nearest(float(v), name) for v in x]
        np.testing.assert_array_equal(form.round(x), want)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=300, deadline=None)
@given(x=st.floats(allow_nan=False, width=64))
def test_the_radius_holds_what_was_stored(name, x):
    stored = FORMATS[name].store(np.array([x]))
    if np.isneginf(x):
        assert (stored.values[0], stored.radius[0]) == (-np.inf, 0)
        return
    distance = (
        abs(Fraction(x) - Fraction(stored.values[0]))
        if np.isfinite(stored.values[0]) and np.isfinite(x)
        else None
    )
    if distance is None:
        assert np.isinf(stored.radius[0])
    else:
        assert distance <= Fraction(stored.radius[0])


@pytest.mark.parametrize("name", FORMATS)
def test_limits(name):
    form = FORMATS[name]
    assert form.round(np.array([form.max_finite]))[0] == form.max_finite
    beyond = form.round(np.array([form.max_finite * (1 + 2 * form.unit_roundoff)]))[0]
    if name == "fp64":
        return
    assert np.isnan(beyond) if form.overflow == "nan" else np.isposinf(beyond)
    assert form.round(np.array([form.min_subnormal]))[0] == form.min_subnormal
    assert form.round(np.array([form.min_subnormal * 0.49]))[0] == 0


MATRICES = {
    "spread": lambda rng: rng.standard_normal((5, 300)) * np.exp(rng.normal(0, 4, (5, 300))),
    "tiny": lambda rng: rng.standard_normal((3, 70)) * 1e-42,
    "logits": lambda rng: rng.standard_normal((130, 131)) * 8,
    "one-heavy": lambda rng: np.where(rng.random((2, 64)) < 0.02, 1e6, rng.random((2, 64))),
}


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("name", SCALED)
def test_the_radius_of_a_scaled_form_holds_what_was_stored(name, kind):
    rng = np.random.default_rng(len(kind))
    x = MATRICES[kind](rng)
    stored = SCALED[name].store(x)
    assert np.isfinite(stored.values).all()
    assert (np.abs(x - stored.values) <= stored.radius).all()
    again = SCALED[name].store(stored.values)
    scales = SCALED[name].scales(x) == SCALED[name].scales(stored.values)
    np.testing.assert_array_equal(again.values[scales], stored.values[scales])


@pytest.mark.parametrize("name", SCALED)
def test_groups_of_zeros_nan_and_probability_zero(name):
    x = np.zeros((2, 400))
    x[0, :32] = np.linspace(-3, 3, 32)
    x[0, 200] = -np.inf
    stored = SCALED[name].store(x)
    assert stored.values[0, 200] == -np.inf
    assert stored.radius[0, 200] == 0
    assert (stored.values[1] == 0).all()
    assert np.isfinite(stored.values[0, :32]).all()
    x[0, 5] = np.nan
    poisoned = SCALED[name].store(x)
    assert np.isnan(poisoned.values[0, 0])
    assert np.isinf(poisoned.radius[0, 0])


def test_scales_by_hand():
    x = np.zeros((1, 64))
    x[0, 0], x[0, 40] = 3.0, 448.0 * 5
    np.testing.assert_allclose(SCALED["fp8-row"].scales(x)[0], np.full(64, 5.0))
    power = SCALED["mxfp8"].scales(x)[0]
    assert (power[:32] == 2.0 ** (1 - 8)).all()
    assert (power[32:] == 2.0 ** (11 - 8)).all()
    # 2240 / 8 = 280 is between 256 and 288; 3 * 128 = 384 is a value
    stored = SCALED["mxfp8"].store(x)
    assert stored.values[0, 0] == 3.0
    assert stored.values[0, 40] == 8 * float(ml_dtypes.float8_e4m3fn(280.0))
    heavy = np.full((1, 32), 511.0)
    assert (SCALED["mxfp8"].store(heavy).values == 448.0).all()
    assert (SCALED["mxfp8"].store(heavy).radius >= 63).all()


def test_names():
    assert storage("bf16") is FORMATS["bf16"]
    assert storage("mxfp8") is SCALED["mxfp8"]
    with pytest.raises(UnknownName, match="fp8-row"):
        storage("fp9")
    assert POLICY_FORMATS == ("fp64", "fp32", "bf16", "fp16")
    assert policy_format("bf16") is FORMATS["bf16"]
    with pytest.raises(UnknownName, match="known: fp64, fp32, bf16, fp16"):
        policy_format("e4m3")


def test_the_page_has_the_figures_of_the_registry():
    rows = {
        line.split("`")[1]: [cell.strip() for cell in line.split("|")[2:-1]]
        for line in INPUTS.read_text().splitlines()
        if re.match(r"\| `(\w+)` \| \d+ \|", line)
    }
    for name, form in FORMATS.items():
        bits, unit, largest, smallest, overflow = rows[name]
        assert (bits, unit) == (str(form.significand_bits), f"2^-{form.significand_bits}")
        assert largest == f"{form.max_finite:.5g}"
        assert smallest == f"{form.min_normal:.5g}"
        assert overflow == {"inf": "infinity", "nan": "NaN"}[form.overflow]
