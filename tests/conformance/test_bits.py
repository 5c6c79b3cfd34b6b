"""Effective precision: calibration, coverage, separation; Wilson intervals; McNemar's test."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from scipy.stats import binom

from pdverify.batch import Batch
from pdverify.budgets import Budgets
from pdverify.cases import build
from pdverify.cases.designed import designed_rows
from pdverify.conformance.bits import (
    CALIBRATION,
    calibrate,
    effective_bits,
    paired,
    plain_signs,
    wilson,
)
from pdverify.formats import FORMATS

SIZE = {"vocab_size": 65, "top_k": 8}


def _policies(batch: Batch):
    rows = batch.rows()
    both = []
    for logits in (rows.logits, rows.behavior_logits):
        shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
        mass = np.exp(shifted)
        both.append((shifted, mass / mass.sum(axis=-1, keepdims=True)))
    return rows.tokens, *both


def coefficient(batch: Batch) -> np.ndarray:
    """Full-view forward-KL C in float64, complement form."""
    tokens, (_, pi), (_, mu) = _policies(batch)
    rest = pi.copy()
    rest[np.arange(len(rest)), tokens] = 0.0
    weight = rest.sum(axis=-1, keepdims=True) + pi
    weight[np.arange(len(rest)), tokens] = 0.0
    return (weight * (mu - pi)).sum(axis=-1)


def beta(batch: Batch) -> np.ndarray:
    """Budget of the plain form per unit roundoff."""
    unit = FORMATS["fp32"].unit_roundoff
    return Budgets(batch.rows(), "full", "append", unit, "plain").coefficient("kl") / unit


def rounded_signs(batch: Batch, dtype: object) -> np.ndarray:
    """The plain formula with every operation rounded to `dtype`."""
    rows = batch.rows()

    def softmax(logits):
        z = logits.astype(dtype)
        mass = np.exp(z - z.max(axis=-1, keepdims=True))
        total = mass.astype(np.float32).sum(axis=-1, keepdims=True).astype(dtype)
        return mass / total

    pi, mu = softmax(rows.logits), softmax(rows.behavior_logits)
    local = np.take_along_axis(pi - mu, rows.tokens[:, None], axis=-1)[:, 0]
    distant = (pi * (mu - pi)).astype(np.float32).sum(axis=-1).astype(dtype)
    return np.sign((local + distant).astype(np.float64))


def simulated(rng, bits: float, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Margins over 36 octaves, and signs drawn from the model at this precision."""
    margin = np.exp2(-36 * rng.random(tokens) - 4)
    return margin, rng.normal(size=tokens) * 2.0 ** (CALIBRATION - bits) > margin


@pytest.fixture(scope="module")
def designed() -> Batch:
    return designed_rows(
        np.random.default_rng(5), coefficient, beta, sequences=6, length=30, **SIZE
    )


def test_calibration_constant_is_what_a_plain_fp32_run_gives():
    fit = calibrate(np.random.default_rng(0), coefficient, beta, sequences=8, **SIZE)
    assert fit.low <= CALIBRATION <= fit.high
    assert fit.high - fit.low < 2


def test_plain_fp32_reports_24_bits(designed):
    right = coefficient(designed)
    fit = effective_bits(np.abs(right) / beta(designed), plain_signs(designed) != np.sign(right))
    assert fit.low <= 24 <= fit.high


@pytest.mark.parametrize(
    ("dtype", "bits"), [(ml_dtypes.bfloat16, 8), (np.float16, 11), (np.float32, 24)]
)
def test_arithmetic_in_a_format_is_told_apart_from_the_others(designed, dtype, bits):
    right = coefficient(designed)
    wrong = rounded_signs(designed, dtype) != np.sign(right)
    fit = effective_bits(np.abs(right) / beta(designed), wrong)
    assert [b for b in (8, 11, 24) if fit.low <= b <= fit.high] == [bits]


@pytest.mark.parametrize("bits", [8, 11, 24])
def test_interval_covers_the_true_precision(bits):
    rng = np.random.default_rng(bits)
    repeats = 200
    fits = [effective_bits(*simulated(rng, bits, 180)) for _ in range(repeats)]
    covered = sum(fit.low <= bits <= fit.high for fit in fits)
    assert covered >= binom.ppf(1e-3, repeats, 0.95)
    assert np.median([fit.high - fit.low for fit in fits]) < 3
    assert abs(np.mean([fit.estimate for fit in fits]) - bits) < 0.5


def test_72_tokens_separate_8_from_24_bits():
    rng = np.random.default_rng(2)
    for _ in range(50):
        low, high = (effective_bits(*simulated(rng, bits, 72)) for bits in (8, 24))
        # without a mistake among 72 tokens there is a lower limit alone
        assert low.high < (high.at_least if high.low is None else high.low)


def test_without_a_mistake_the_limit_of_the_test_set_is_reported():
    rng = np.random.default_rng(3)
    margin, _ = simulated(rng, 24, 180)
    fit = effective_bits(margin, np.zeros(180, dtype=bool))
    assert (fit.estimate, fit.low, fit.high, fit.mistakes) == (None, None, None, 0)
    limit = fit.at_least
    chance = [
        not (rng.normal(size=180) * 2.0 ** (CALIBRATION - limit) > margin).any()
        for _ in range(2000)
    ]
    assert binom.ppf(1e-3, 2000, 0.05) <= sum(chance) <= binom.ppf(1 - 1e-3, 2000, 0.05)


def test_few_right_signs_prove_nothing():
    assert effective_bits(np.full(4, 2.0**-20), np.zeros(4, dtype=bool)).at_least is None
    assert effective_bits(np.zeros(0), np.zeros(0, dtype=bool)).at_least is None


def test_a_flipped_sign_has_no_precision_at_all():
    margin = np.exp2(-np.arange(36.0))
    fit = effective_bits(margin, np.ones(36, dtype=bool))
    assert fit.estimate == 0.0
    assert fit.low == 0.0


def test_exact_zeros_are_left_out_and_counted():
    margin, wrong = simulated(np.random.default_rng(4), 11, 90)
    with_zeros = effective_bits(np.append(margin, [0.0, 0.0]), np.append(wrong, [True, False]))
    assert (with_zeros.tokens, with_zeros.left_out) == (90, 2)
    assert with_zeros.estimate == effective_bits(margin, wrong).estimate


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_margins_that_are_no_margins_are_rejected(bad):
    with pytest.raises(ValueError, match="margins"):
        effective_bits(np.array([1.0, bad]), np.zeros(2, dtype=bool))
    with pytest.raises(ValueError, match="2 margins but 1 signs"):
        effective_bits(np.ones(2), np.zeros(1, dtype=bool))


def test_plain_signs_need_both_logits():
    batch = build("peaked", vocab_size=8, top_k=3)
    assert set(plain_signs(batch)) <= {-1.0, 0.0, 1.0}
    right = coefficient(batch)
    clear = np.abs(right) > 2.0**-24 * beta(batch)
    assert (plain_signs(batch)[clear] == np.sign(right[clear])).all()


def test_wilson_interval():
    z = 1.959963984540054
    share, n = 3 / 20, 20
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    result = wilson(3, 20)
    assert result.share == 0.15
    assert math.isclose(result.low, center - half, rel_tol=2**-40)
    assert math.isclose(result.high, center + half, rel_tol=2**-40)
    assert wilson(0, 20).low == 0.0 < wilson(0, 20).high
    nothing = wilson(0, 0)
    assert (nothing.low, nothing.high, math.isnan(nothing.share)) == (0.0, 1.0, True)
    with pytest.raises(ValueError, match="3 successes in 2 trials"):
        wilson(3, 2)


def test_exact_mcnemar():
    assert paired(0, 0) == 1.0
    assert paired(5, 5) == 1.0
    assert math.isclose(paired(1, 9), 2 * (1 + 10) / 2**10, rel_tol=2**-40)
    assert paired(9, 1) == paired(1, 9)
    with pytest.raises(ValueError, match="-1"):
        paired(-1, 2)
