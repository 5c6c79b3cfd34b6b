"""Edge cases: right values recomputed, stated values of the field, decisions, bad inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdverify.batch import Batch, InputError
from pdverify.cases.edge import (
    BAD_INPUTS,
    BINARY_KL,
    COEFFICIENT,
    EDGE_CASES,
    KL,
    RATIO,
    TV,
    TV_COEFFICIENT,
    Right,
    _plain,
)
from pdverify.rules import Rule, Tail

from .exact import evaluate

STATED = {
    ("sampled-outside-list", "divergence", None): "0.095684",
    ("sampled-outside-list", "coefficient", "aggregated"): "-0.004400",
    ("sampled-outside-list", "coefficient", "uniform"): "-0.004400",
    ("sampled-outside-list", "coefficient", "exact"): "-0.004400",
    ("sampled-outside-list", "product", "exact"): "-0.001100",
    ("listed-once", "tail-mass", None): "0.119203",
    ("no-tail-term", "divergence", None): "0.311239",
    ("training-tail-at-threshold", "divergence", None): "0.11722",
    ("neg-inf-slot", "divergence", None): "0.008621",
    ("neg-inf-slot-dropped", "divergence", None): "0.3616",
    ("truncated-behavior", "divergence", None): "0.2231",
    ("truncated-behavior", "importance-ratio", None): "0.8",
    ("tempered-training", "divergence", None): "0.0782",
    ("tempered-training", "importance-ratio", None): "1.2276",
    ("half-precision-probabilities", "divergence", None): "0.15150",
    ("phantom-column", "logprob", None): "-0.4076",
    ("near-certain-logprob", "logprob", None): "-1.523e-8",
    ("direction-against-ratio", "divergence", None): "0.447415",
    ("direction-against-ratio", "product", None): "-0.106470",
    ("sampled-takes-last-place", "divergence", None): "0.529",
    ("total-variation-not-ratio", "divergence", None): "0.2",
    ("exactly-at-threshold", "divergence", None): "0.5",
    ("common-offset", "logprob", None): str(-math.log(2)),
}
"""What was written down of these cases, in decimals, before the inputs were rounded to float32."""


@pytest.mark.parametrize("name", EDGE_CASES)
def test_every_value_is_what_its_expression_gives(name):
    case = EDGE_CASES[name]
    assert case.right
    for right in case.right:
        assert evaluate(case.batch, right) == right.values, right.quantity


@pytest.mark.parametrize("key", STATED, ids=str)
def test_values_agree_with_what_was_stated(key):
    name, quantity, tail = key
    matches = [r for r in EDGE_CASES[name].right if r.quantity == quantity and r.tail == tail]
    mantissa, _, exponent = STATED[key].partition("e")
    half_last_place = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    assert matches
    assert abs(float(matches[0].values[0]) - float(STATED[key])) <= half_last_place


def reads(batch: Batch, rule: Rule, expression: str, tail: Tail | None = None) -> list[float]:
    return [
        float(v)
        for v in evaluate(batch, Right("product", expression, (), rule.partition, tail=tail))
    ]


def dropped(batch: Batch, rule: Rule) -> list[bool]:
    """The rule's table read off, with 40-digit values."""
    sign = reads(batch, rule, "sgn(A)")
    if rule.direction == "clip":
        ratio = reads(batch, rule, RATIO)
        return [
            (a > 0 and r > 1 + rule.clip_high) or (a < 0 and r < 1 - rule.clip_low)
            for a, r in zip(sign, ratio, strict=True)
        ]
    binary = {"kl": BINARY_KL, "tv": "abs(p_k - m_k)"}
    cells = {"kl": KL, "tv": TV}
    expression = (binary if rule.partition == "binary" else cells)[rule.divergence]
    outside = [
        d > (rule.delta_high if a > 0 else rule.delta_low)
        for d, a in zip(reads(batch, rule, expression), sign, strict=True)
    ]
    if rule.direction == "ratio":
        ways = [reads(batch, rule, "sgn(p_k - m_k)")]
    else:
        direction = f"sgn({TV_COEFFICIENT if rule.divergence == 'tv' else COEFFICIENT})"
        tails = ["aggregated", "uniform"] if rule.tail == "bracket" else [rule.tail]
        ways = [reads(batch, rule, direction, tail) for tail in tails]
    return [
        out and all(a * way[i] > 0 for way in ways)
        for i, (out, a) in enumerate(zip(outside, sign, strict=True))
    ]


@pytest.mark.parametrize("name", [name for name, case in EDGE_CASES.items() if case.decisions])
def test_every_decision_follows_from_its_rule(name):
    case = EDGE_CASES[name]
    for decision in case.decisions:
        assert [not keep for keep in decision.keep] == dropped(case.batch, decision.rule)


def test_both_decisions_occur_and_the_tails_disagree():
    kept = [k for _, case in EDGE_CASES.items() for d in case.decisions for k in d.keep]
    assert {True, False} == set(kept)
    for name in ("aggregated-tail-wrong", "uniform-tail-wrong"):
        by_tail = {d.rule.tail: d.keep for d in EDGE_CASES[name].decisions}
        assert by_tail["exact"] != by_tail[name.split("-")[0]]


def test_the_tie_at_the_last_place_is_broken_by_the_lowest_id():
    batch = EDGE_CASES["tie-at-last-place"].batch
    assert batch.topk_ids.tolist() == [[[0, 1]]]


def test_padding_of_the_poisoned_case_is_poisoned():
    batch = EDGE_CASES["poisoned-padding"].batch
    assert not batch.response_mask[1].any()
    assert np.isnan(batch.logits[~batch.response_mask]).all()
    assert len(batch.rows()) == 1


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_every_bad_input_is_rejected_by_argument_place_and_value(name):
    bad = BAD_INPUTS[name]
    with pytest.raises(InputError) as caught:
        bad.make()
    assert (caught.value.argument, caught.value.place) == (bad.argument, bad.place)
    where = "" if bad.place is None else str(list(bad.place))
    assert str(caught.value).startswith(f"{bad.argument}{where} = ")


def test_the_row_the_bad_inputs_are_made_from_is_good():
    fine = _plain()
    assert fine.tokens.shape == (2, 2)
    assert fine.view == "full"


@pytest.mark.parametrize("table", [EDGE_CASES, BAD_INPUTS], ids=["edge", "bad"])
def test_every_entry_explains_itself(table):
    for name, entry in table.items():
        assert entry.name == name
        assert entry.summary
        assert entry.goes_wrong.endswith(".")
