"""torch and ml_dtypes agree on every value of the narrow formats, and around every halfway case."""

from __future__ import annotations

import numpy as np
import pytest

from pdverify.formats import FORMATS, SCALED
from pdverify.precision.casts import known_differences, torch_round

NARROW = ("bf16", "fp16", "e4m3", "e5m2")


def every_value(name: str) -> np.ndarray:
    """All bit patterns of a format, as float64."""
    dtype = FORMATS[name].dtype
    bits = np.arange(2 ** (8 * dtype.itemsize), dtype=np.uint32)
    return bits.astype(np.uint8 if dtype.itemsize == 1 else np.uint16).view(dtype).astype(float)


def same(name: str, x: np.ndarray) -> None:
    x = x.astype(np.float32)
    x = x[~known_differences(name, x)]
    ours, theirs = FORMATS[name].round(x), torch_round(name, x)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[ours == 0]), np.signbit(theirs[ours == 0]))


@pytest.mark.parametrize("name", NARROW)
def test_every_bit_pattern_comes_back(name):
    values = every_value(name)
    np.testing.assert_array_equal(FORMATS[name].round(values), values)
    np.testing.assert_array_equal(torch_round(name, values.astype(np.float32)), values)


@pytest.mark.parametrize("name", NARROW)
def test_every_halfway_case_and_its_neighbors(name):
    values = np.unique(every_value(name)[np.isfinite(every_value(name))])
    half = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    exact = half.astype(float) == (values[:-1] + values[1:]) / 2
    assert exact.mean() > 0.99  # not the subnormals of bf16, whose middles float32 lacks
    half = half[exact]
    same(name, half)
    same(name, np.nextafter(half, np.float32(np.inf)))
    same(name, np.nextafter(half, np.float32(-np.inf)))


@pytest.mark.parametrize("name", NARROW)
def test_overflow_infinity_and_nan(name):
    form = FORMATS[name]
    edge = form.max_finite * (1 + form.unit_roundoff)
    x = np.array([form.max_finite, edge, 2 * form.max_finite, np.inf, np.nan, 0.0, 1e-30])
    x = np.concatenate([x, -x]).astype(np.float32)
    same(name, x)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (130, 257), (2, 5, 64)])
def test_scaled_forms(name, shape):
    rng = np.random.default_rng(len(shape))
    x = (rng.standard_normal(shape) * np.exp(rng.normal(0, 2, shape))).astype(np.float32)
    np.testing.assert_array_equal(SCALED[name].round(x), torch_round(name, x))


def test_tf32_against_rounding_in_float64():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(5000) * np.exp(rng.normal(0, 20, 5000))).astype(np.float32)
    half = FORMATS["tf32"].round(x) * (1 + 2.0**-11)
    same("tf32", np.concatenate([x, half.astype(np.float32), np.float32([0, np.inf, -np.inf])]))


def test_known_differences_are_no_wider_than_they_are():
    """Past 464 torch gives NaN or 448 by version, we give NaN; up to there both agree."""
    x = np.array([464.0, -464.0, 465.0, np.inf], dtype=np.float32)
    assert known_differences("e4m3", x).tolist() == [False, False, True, True]
    assert np.isnan(FORMATS["e4m3"].round(x)[2:]).all()
    theirs = torch_round("e4m3", x)
    assert (np.isnan(theirs[2:]) | (np.abs(theirs[2:]) == 448)).all()
    twice = np.array([1 + 2.0**-8 + 2.0**-40])  # rounds to float32 as a halfway case
    assert known_differences("bf16", twice).all()
    assert FORMATS["bf16"].round(twice)[0] != torch_round("bf16", twice)[0]
