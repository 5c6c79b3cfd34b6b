"""The masks by name, their rules, and the definitions on edge cases."""

from __future__ import annotations

import numpy as np
import pytest

from pdverify.batch import InputError
from pdverify.budgets import Budgets
from pdverify.cases import EDGE_CASES
from pdverify.cases import build as family
from pdverify.definitions import _formulas, masks
from pdverify.definitions.cells import build, tail_mean
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS
from pdverify.oracle import Judge
from pdverify.rules import Rule
from tests.definitions.helpers import one_token

UNIT = 2.0**-53
QUANTITIES = [
    (name, right)
    for name, case in EDGE_CASES.items()
    for right in case.right
    if right.quantity in ("divergence", "coefficient", "product", "importance-ratio")
]


@pytest.mark.parametrize(
    ("name", "right"), QUANTITIES, ids=[f"{n}-{r.quantity}-{r.tail}" for n, r in QUANTITIES]
)
def test_edge_case_values(name, right):
    rows = EDGE_CASES[name].batch.rows()
    partition = "binary" if rows.behavior_logits is rows.topk_ids is None else right.partition
    cells = build(rows, partition)
    # without a tail, masses that storage leaves above 1 part the plain form from the complement
    form = "plain" if (cells.tail_cells == 0).all() else "complement"
    budgets = Budgets(rows, partition, "append", UNIT, form, cells)
    expected = np.array([float(v) for v in right.values])
    ratio = np.exp(cells.log_gap)
    if right.quantity == "divergence":
        value, bound = (
            masks.divergence(cells, right.divergence),
            budgets.divergence(right.divergence),
        )
    elif right.quantity == "importance-ratio":
        value, bound = ratio, ratio * (np.expm1(budgets.log_ratio()) + 4 * UNIT)
    else:
        divergence = right.divergence or "kl"
        value = masks.coefficient(cells, divergence, right.tail)
        bound = budgets.coefficient(divergence, right.tail)
        if right.quantity == "product":
            value = rows.advantages * ratio * value
            relative = np.expm1(budgets.log_ratio()) + 8 * UNIT
            bound = np.abs(rows.advantages) * ratio * bound + relative * np.abs(value)
    same = value == expected
    # the expected decimal is itself rounded to float64
    with np.errstate(invalid="ignore"):
        off = np.abs(value - expected)
    assert (same | (off <= bound + UNIT * np.abs(expected))).all()


@pytest.mark.parametrize("name", [name for name, case in EDGE_CASES.items() if case.decisions])
def test_edge_case_decisions(name):
    case = EDGE_CASES[name]
    for decision in case.decisions:
        assert tuple(masks.keep(case.batch.rows(), decision.rule)) == decision.keep, decision.rule


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("tail", ["aggregated", "uniform", "exact"])
def test_the_complement_form_is_the_closed_form(divergence, tail):
    rows = family("zipf", vocab_size=40, top_k=6).rows()
    formula = DIVERGENCES[divergence]
    top, full = build(rows, "topk"), build(rows, "full")
    w = tail_mean(top, tail)
    closed = formula.coarse_coefficient(
        top.mu, top.pi, top.mu_k, top.pi_k, top.mu_tail, top.pi_tail, w
    )
    plain = Budgets(rows, "topk", "append", UNIT, "plain", top).coefficient(divergence, tail)
    assert (np.abs(masks.coefficient(top, divergence, tail) - closed) <= 2 * plain).all()
    closed = formula.coefficient(full.mu, full.pi, full.mu_k, full.pi_k)
    plain = Budgets(rows, "full", "append", UNIT, "plain", full).coefficient(divergence)
    assert (np.abs(masks.coefficient(full, divergence, tail) - closed) <= 2 * plain).all()


@pytest.mark.parametrize("partition", ["topk", "full"])
def test_signs_survive_near_one_hot_rows(partition):
    rows = family("near-one-hot", sequences=8, length=16, vocab_size=60, top_k=6).rows()
    cells = build(rows, partition)
    tail = None if partition == "full" else "exact"
    truth = Judge(rows).coefficient("kl", partition, tail)
    certain = (truth.low > 0) | (truth.high < 0)
    mine = masks.coefficient(cells, "kl", tail)
    open_sign = np.abs(truth.mid) <= Budgets(
        rows, partition, "append", UNIT, "complement", cells
    ).coefficient("kl", tail)
    assert (certain & ~open_sign).sum() > len(rows) // 2
    assert (np.sign(mine) == np.sign(truth.mid))[certain & ~open_sign].all()


def test_every_divergence_has_a_predictive_mask():
    for name in DIVERGENCES:
        rule = MASKS[f"predictive-{name}"].rule(tail="exact")
        assert (rule.direction, rule.divergence, rule.partition) == ("predictive", name, "topk")
        assert rule.tail == "exact"
        full = MASKS[f"predictive-{name}"].rule(view="full", tail="exact")
        assert (full.partition, full.tail) == ("full", None)


def test_named_masks_fix_their_partition():
    for partition in ("binary", "topk"):
        for name in ("tv", "kl"):
            rule = MASKS[f"dppo-{partition}-{name}"].rule(view="full")
            assert (rule.direction, rule.divergence, rule.partition) == ("ratio", name, partition)
            assert rule.tail is None
    assert MASKS["none"].views() == ("binary",)
    assert MASKS["predictive-kl"].views() == ("topk", "full")


def test_thresholds_of_either_sign():
    rule = MASKS["predictive-kl"].rule(view="full", delta=0.3, delta_low=0.1)
    assert (rule.delta_low, rule.delta_high) == (0.1, 0.3)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"view": "topk"}, "tail"),
        ({"tail": "exact", "delta": -0.1}, "delta"),
        ({"tail": "exact", "delta_low": float("nan")}, "delta_low"),
        ({"tail": "exact", "delta_high": float("inf")}, "delta_high"),
    ],
)
def test_bad_options_are_named(options, argument):
    with pytest.raises(InputError) as caught:
        MASKS["predictive-kl"].rule(**options)
    assert caught.value.argument == argument


def test_no_mask_keeps_everything():
    rows = family("far-apart", vocab_size=20, top_k=4).rows()
    assert masks.keep(rows, MASKS["none"].rule()).all()


def test_zero_advantage_is_kept_whatever_the_rule():
    rows = one_token(k=1, ids=(0, 1), advantage=0.0).rows()
    for direction in ("clip", "ratio", "predictive", "second-order"):
        rule = Rule("any", direction, "kl", "full", delta_low=0.0, delta_high=0.0)
        assert masks.keep(rows, rule).all()


def test_clip_by_hand():
    for advantage, k, kept in [(1, 1, False), (1, 0, True), (-1, 0, False), (-1, 1, True)]:
        rows = one_token(k=k, advantage=advantage).rows()
        assert masks.keep(rows, MASKS["ppo-clip"].rule()).tolist() == [kept]
    low = one_token(k=0, advantage=-1).rows()
    assert masks.keep(low, MASKS["ppo-clip"].rule(clip_low=1.0)).all()


def test_equality_with_the_threshold_keeps():
    rows = one_token(k=1, mu=(0.5, 0.5), pi=(0.25, 0.75), ids=(0,)).rows()
    d = float(masks.divergence(build(rows, "full"), "tv")[0])
    for delta, kept in ((d, True), (np.nextafter(d, 0), False)):
        rule = MASKS["predictive-tv"].rule(view="full", delta=delta)
        assert masks.keep(rows, rule).tolist() == [kept]


def test_bracket_drops_only_where_both_ends_do():
    rows = family("tail-conflict", vocab_size=200, top_k=8).rows()
    kept = {t: masks.keep(rows, MASKS["predictive-kl"].rule(tail=t)) for t in masks.TAILS}
    assert (kept["bracket"] == (kept["aggregated"] | kept["uniform"])).all()
    assert (kept["aggregated"] != kept["uniform"]).any()


def test_an_undefined_coefficient_drops():
    # chi2 is infinite both ways: pi misses a token that mu has, so D and C are infinite
    rows = one_token(mu=(0.5, 0.25, 0.25), pi=(0.75, 0.25, 0.0), k=0, ids=(0,)).rows()
    cells = build(rows, "full")
    with np.errstate(all="ignore"):
        assert np.isposinf(masks.divergence(cells, "chi2")).all()
        assert np.isinf(masks.coefficient(cells, "chi2")).all()


def test_second_order_adds_the_step():
    rows = one_token(k=1, advantage=1.0).rows()
    cells = build(rows, "full")
    d, c = masks.divergence(cells, "kl"), masks.coefficient(cells, "kl", None)
    rule = MASKS["predictive-kl-second-order"].rule(view="full", eta=2.0**-20)
    h = rule.eta * rows.advantages * np.exp(cells.log_gap)
    predicted = masks.predicted_divergence(cells, rule, rows.advantages)
    variance = _formulas.kl_second_order_variance(cells.pi, cells.pi_k)
    np.testing.assert_allclose(predicted, d + h * c + h * h * variance / 2, rtol=8 * UNIT)

    # against the divergence after the step, whose third order is below h^3
    logits = rows.logits[0] + h * (np.eye(5)[1] - cells.pi[0])
    moved = np.exp(logits) / np.exp(logits).sum()
    after = (cells.mu[0] * np.log(cells.mu[0] / moved)).sum()
    assert abs(after - predicted[0]) <= h[0] ** 3 + 64 * UNIT
