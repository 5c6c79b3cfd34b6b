"""Keep/drop decisions: the table of rules, certificates, input noise, what cannot be decided."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

from pdverify.batch import Batch, InputError, Rows
from pdverify.formats import FORMATS
from pdverify.oracle import ORACLE_DIVERGENCES, STATUSES, Judge, judge
from pdverify.oracle.arb_balls import ArbBall, precision
from pdverify.oracle.cells import half_last_place
from pdverify.oracle.view import View
from pdverify.rules import Rule
from tests.oracle.reference import BITS, cells
from tests.oracle.rows import KINDS, literal, log_softmax, make_rows


def with_columns(rows: Rows, **columns: object) -> Rows:
    return Rows(**{**vars(rows), **columns})


def rules(delta: float, eta: float = 1.0) -> list[Rule]:
    both = {"delta_low": delta, "delta_high": delta}
    made = [
        Rule("none", "none"),
        Rule("ppo-clip", "clip"),
        Rule("dppo-binary-tv", "ratio", "tv", "binary", **both),
        Rule("dppo-topk-kl", "ratio", "kl", "topk", **both),
    ]
    for name in ORACLE_DIVERGENCES:
        made.append(Rule(f"predictive-{name}", "predictive", name, "full", **both))
        for tail in ("aggregated", "uniform", "exact", "bracket"):
            made.append(Rule(f"predictive-{name}", "predictive", name, "topk", tail, **both))
    for tail in ("aggregated", "uniform", "exact", "bracket"):
        made.append(Rule("second", "second-order", "kl", "topk", tail, eta=eta, **both))
    made.append(Rule("second", "second-order", "kl", "full", eta=eta, **both))
    return made


def drops(rows: Rows, t: int, rule: Rule, tail: str | None) -> bool | None:
    """The rule's own sentence, evaluated on the definitions; None where it is not finite."""
    advantage = float(rows.advantages[t])
    if rule.direction == "none" or advantage == 0:
        return False
    if tail == "bracket":
        ends = [drops(rows, t, rule, end) for end in ("aggregated", "uniform")]
        return None if None in ends else all(ends)
    partition = "binary" if rule.direction == "clip" else rule.partition
    at = cells(rows, t, partition, tail)
    place = (
        at.k
        if partition == "full"
        else next(i for i, group in enumerate(at.groups) if group == [at.k])
    )
    pi_k, mu_k = at.pi[at.k], at.mu[place]
    if rule.direction == "clip":
        r = pi_k / mu_k
        if advantage > 0:
            return bool(r > 1 + arb(rule.clip_high))
        return bool(r < 1 - arb(rule.clip_low))
    delta = arb(rule.delta_high if advantage > 0 else rule.delta_low)
    d = at.divergence(rule.divergence)
    if not d.is_finite():
        return None
    if rule.direction == "ratio":
        return bool(d > delta) and bool((pi_k - mu_k) * advantage > 0)
    c = at.coefficient(rule.divergence)
    if rule.direction == "predictive":
        return bool(d > delta) and bool(c * advantage > 0)
    h = rule.eta * advantage * pi_k / mu_k
    predicted = d + h * c + h * h * at.second_derivative("kl") / 2
    return bool(c * advantage > 0) and bool(predicted > delta)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_determined_decisions_are_those_of_the_definitions(kind, seed):
    rows = make_rows(4, kind=kind, seed=seed)
    asked = Judge(rows)
    for rule in rules(delta=0.02):
        decided = asked.decide(rule)
        assert set(decided.status) <= set(STATUSES)
        assert (decided.determined == (decided.status == "determined")).all()
        for t in np.nonzero(decided.determined)[0]:
            with precision(BITS):
                right = drops(rows, int(t), rule, rule.tail)
            if right is not None:
                assert decided.keep[t] is np.bool_(not right), (rule, t)


def test_most_random_decisions_are_determined_without_arb():
    rows = make_rows(90, size=40, seed=3)
    for rule in rules(delta=0.02):
        decided = Judge(rows).decide(rule)
        settled = decided.determined | (decided.status == "not-finite")
        assert settled.mean() > 0.85, (rule, np.unique(decided.status, return_counts=True))
        assert decided.escalated.mean() < 0.25, rule


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(KINDS),
    delta=st.sampled_from([0.0, 1e-12, 1e-3, 0.1]),
    place=st.sampled_from(["fp32", "bf16"]),
)
def test_the_fast_and_the_slow_path_never_contradict_each_other(seed, kind, delta, place):
    rows = make_rows(3, kind=kind, seed=seed, logprob_dtype=place)
    for rule in rules(delta):
        if rule.direction == "none":
            continue
        fast = Judge(rows).decide(rule)
        for t in range(len(rows)):
            with precision(512), np.errstate(all="ignore"):
                view = View(ArbBall, rows.take(slice(t, t + 1)), rule.support, seek_ties=True)
                slow = judge._decide(view, rule)
            if fast.determined[t]:
                assert slow.status[0] in ("determined", "undecided-input-noise"), (rule, t)
                assert slow.keep[0] == fast.keep[t], (rule, t)
            if fast.status[t] == "not-finite":
                assert slow.status[0] == "not-finite"


@pytest.mark.parametrize("partition", ["full", "topk"])
def test_a_zero_advantage_keeps_and_a_negative_one_turns_the_direction(partition):
    tail = None if partition == "full" else "exact"
    rule = Rule("m", "predictive", "kl", partition, tail, delta_low=1e-4, delta_high=1e-4)
    kept = {}
    for advantage in (-1.0, 0.0, 1.0):
        rows = literal([0.4, 0.35, 0.25], [0.42, 0.56, 0.02], 0, k=1, advantage=advantage)
        kept[advantage] = bool(Judge(rows).decide(rule).keep[0])
    assert kept[0.0]
    assert kept[-1.0] != kept[1.0]


def test_the_predictive_rule_keeps_what_the_ratio_rule_drops():
    rows = literal([0.4, 0.35, 0.25], [0.42, 0.56, 0.02], token=0)
    judged = Judge(rows)
    predictive = judged.decide(Rule("p", "predictive", "kl", "full"))
    ratio = judged.decide(Rule("r", "ratio", "kl", "full"))
    assert predictive.keep[0]
    assert predictive.determined[0]
    assert predictive.margin[0] < 0
    assert not ratio.keep[0]
    assert ratio.margin[0] > 0


def test_each_sign_of_the_advantage_has_its_own_threshold():
    for advantage, expected in ((1.0, True), (-1.0, False)):
        mu, pi = [0.5, 0.3, 0.2], [0.6, 0.2, 0.2]
        if advantage < 0:
            mu, pi = pi, mu
        rows = literal(mu, pi, token=0, advantage=advantage)
        rule = Rule("m", "ratio", "tv", "full", delta_low=0.05, delta_high=0.2)
        assert bool(Judge(rows).decide(rule).keep[0]) is expected


@pytest.mark.parametrize(
    ("advantage", "ratio", "kept"),
    [
        (1.0, 1.21, False),
        (1.0, 1.19, True),
        (1.0, 0.5, True),
        (-1.0, 0.79, False),
        (-1.0, 0.81, True),
        (-1.0, 1.5, True),
        (0.0, 2.0, True),
    ],
)
def test_clip_looks_at_the_bound_that_the_advantage_makes_active(advantage, ratio, kept):
    rows = literal([0.4, 0.6], [0.4 * ratio, 1 - 0.4 * ratio], 0, advantage=advantage)
    decided = Judge(rows).decide(Rule("ppo-clip", "clip"))
    assert decided.determined[0]
    assert bool(decided.keep[0]) is kept


def test_clip_on_a_token_the_training_policy_has_lost():
    for advantage, kept in ((-1.0, False), (1.0, True)):
        rows = literal([0.4, 0.6], [0.0, 1.0], 0, advantage=advantage)
        decided = Judge(rows).decide(Rule("ppo-clip", "clip"))
        assert decided.determined[0]
        assert bool(decided.keep[0]) is kept
    wide = Rule("ppo-clip", "clip", clip_low=1.0)
    rows = literal([0.4, 0.6], [0.0, 1.0], 0, advantage=-1.0)
    assert Judge(rows).decide(wide).keep[0]


def test_bracket_drops_only_what_both_ends_drop():
    rows = make_rows(120, size=14, kind="flat", seed=11)
    asked = Judge(rows)
    kept = {
        tail: asked.decide(
            Rule("m", "predictive", "kl", "topk", tail, delta_low=1e-3, delta_high=1e-3)
        )
        for tail in ("aggregated", "uniform", "bracket")
    }
    assert (kept["aggregated"].keep != kept["uniform"].keep).any()
    assert (kept["bracket"].keep == (kept["aggregated"].keep | kept["uniform"].keep)).all()


@pytest.mark.parametrize("shift", [0.0, 3.0, -(2.0**20)])
@pytest.mark.parametrize("kind", KINDS)
def test_identical_policies_are_exactly_zero(shift, kind):
    rows = make_rows(2, size=20, kind="flat" if kind == "huge-offset" else kind, seed=3)
    logits = np.round(np.clip(rows.logits.astype(np.float64), -1e3, None) * 1024) / 1024
    logits[np.isneginf(rows.logits)] = -np.inf
    rows = with_columns(rows, logits=logits, behavior_logits=logits + shift)
    asked = Judge(rows)
    for name in ORACLE_DIVERGENCES:
        for enclosure in (asked.divergence(name, "full"), asked.coefficient(name, "full")):
            assert (enclosure.low == 0).all()
            assert (enclosure.high == 0).all()
        strict = Rule("m", "predictive", name, "full", delta_low=0.0, delta_high=0.0)
        decided = asked.decide(strict)
        assert decided.keep.all()
        assert decided.determined.all()


def test_a_shift_that_rounding_has_broken_is_not_identical():
    rows = make_rows(1, size=20, kind="flat", seed=3)
    moved = (rows.logits.astype(np.float64) + 0.1) + 1e-3
    rows = with_columns(rows, logits=rows.logits.astype(np.float64), behavior_logits=moved)
    divergence = Judge(rows).divergence("kl", "full", bits=512)
    assert 0 < divergence.low[0] < 1e-30
    absorbed = rows.logits + 2.0**60
    assert np.ptp(absorbed) == 0
    rows = with_columns(rows, behavior_logits=absorbed)
    assert Judge(rows).divergence("kl", "full").low[0] > 0.1


def test_ties_of_total_variation_are_exact_where_the_normalizers_are_equal():
    z = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))
    rows = literal([0.4, 0.3, 0.2, 0.1], [0.4, 0.2, 0.3, 0.1], token=0)
    rows = with_columns(rows, behavior_logits=z, logits=z[:, [0, 2, 1, 3]])
    exact = Judge(rows).coefficient("tv", "full", bits=128)
    pi, s = np.array([0.4, 0.2, 0.3, 0.1]), np.array([0, -1, 1, 0])
    sbar = (pi * s).sum()
    right = (pi[0] * (s[0] - sbar) - (pi**2 * (s - sbar)).sum()) / 2
    assert exact.mid[0] == pytest.approx(right, rel=1e-12)
    rule = Rule("m", "ratio", "tv", "full", delta_low=0.0, delta_high=0.0)
    decided = Judge(rows).decide(rule)
    assert decided.keep[0]
    assert decided.determined[0]
    assert decided.escalated[0]


def test_a_lost_token_makes_forward_kl_infinite_and_the_row_informative_only():
    rows = literal([0.5, 0.3, 0.2], [0.7, 0.3, 0.0], token=0)
    judged = Judge(rows)
    assert np.isposinf(judged.divergence("kl", "full").low[0])
    assert np.isfinite(judged.coefficient("kl", "full").low[0])
    assert judged.decide(Rule("m", "predictive", "kl", "full")).status[0] == "not-finite"
    turned = with_columns(rows, advantages=-rows.advantages)
    other = Judge(turned).decide(Rule("m", "predictive", "kl", "full"))
    assert other.determined[0]
    assert other.keep[0]
    assert Judge(rows).decide(Rule("m", "predictive", "reverse-kl", "full")).determined[0]


def test_a_token_the_behavior_policy_cannot_sample_makes_reverse_kl_infinite():
    rows = literal([0.7, 0.3, 0.0], [0.5, 0.3, 0.2], token=0)
    for name in ("reverse-kl", "reverse-chi2"):
        assert np.isposinf(Judge(rows).divergence(name, "full").low[0])
        assert np.isnan(Judge(rows).coefficient(name, "full").low[0])
        rule = Rule("m", "predictive", name, "full")
        assert Judge(rows).decide(rule).status[0] == "not-finite"
        still = with_columns(rows, advantages=0 * rows.advantages)
        assert Judge(still).decide(rule).determined[0]
    for name in ("kl", "tv", "jensen-shannon", "squared-hellinger", "chi2"):
        assert np.isfinite(Judge(rows).divergence(name, "full").high[0])


def test_one_training_token_left_gives_a_zero_coefficient():
    rows = literal([0.5, 0.3, 0.2], [1.0, 0.0, 0.0], token=0)
    assert Judge(rows).coefficient("kl", "full", bits=64).low[0] == 0
    decided = Judge(rows).decide(Rule("m", "predictive", "kl", "full"))
    assert decided.keep[0]
    assert decided.determined[0]


def test_a_nearly_certain_token_keeps_its_sign():
    z = np.zeros((1, 50))
    z[0, 7] = 80.0
    other = z.copy()
    other[0, 3] += 0.5
    base = make_rows(1, size=50, kind="one-hot")
    for sign in (1.0, -1.0):
        rows = with_columns(
            base,
            tokens=np.array([7]),
            logits=z,
            behavior_logits=other,
            advantages=np.array([sign]),
        )
        rule = Rule("m", "predictive", "kl", "full", delta_low=0.0, delta_high=0.0)
        decided = Judge(rows).decide(rule)
        assert decided.determined[0]
        assert 0 < decided.direction.low[0] <= decided.direction.high[0] < 1e-60
        assert bool(decided.keep[0]) is (sign < 0)


def test_underflowing_probabilities_are_settled_in_arb():
    rows = literal([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], token=0)
    logits = np.array([[0.0, -1.0, -2000.0]])
    rows = with_columns(rows, logits=logits, behavior_logits=np.array([[0.0, -1.0, -3.0]]))
    for name in ("kl", "chi2"):
        enclosure = Judge(rows).divergence(name, "full")
        mu3 = np.exp(-3) / (1 + np.exp(-1) + np.exp(-3))
        if name == "kl":
            assert enclosure.mid[0] == pytest.approx(mu3 * 1997, rel=1e-2)
            assert Judge(rows).decide(Rule("m", "predictive", "kl", "full")).determined[0]
        else:
            assert enclosure.high[0] == np.inf
            assert enclosure.low[0] == np.finfo(np.float64).max


@pytest.mark.parametrize("place", ["fp32", "bf16"])
@pytest.mark.parametrize("partition", ["topk", "binary"])
def test_noise_enclosures_hold_every_point_of_the_box(place, partition):
    rng = np.random.default_rng(8)
    rows = make_rows(9, seed=5, logprob_dtype=place)
    asked = Judge(rows, noise=True)
    for name in ORACLE_DIVERGENCES:
        d = asked.divergence(name, partition)
        c = asked.coefficient(name, partition, "exact")
        for t in range(len(rows)):
            for _ in range(3):
                moved = _moved(rows, t, partition, rng)
                with precision(BITS):
                    truth = cells(rows, t, partition, "exact", moved)
                    exact, rate = truth.divergence(name), truth.coefficient(name)
                    slack = arb(2) ** -200 * (1 + abs(exact))
                    if exact.is_finite() and np.isfinite(d.low[t]):
                        assert arb(d.low[t]) <= exact + slack, (name, t)
                        assert exact - slack <= arb(d.high[t]), (name, t)
                    if rate.is_finite() and np.isfinite(c.low[t]):
                        assert arb(c.low[t]) <= rate + arb(2) ** -90, (name, t)
                        assert rate - arb(2) ** -90 <= arb(c.high[t]), (name, t)


def _moved(rows: Rows, t: int, partition: str, rng: np.random.Generator) -> dict[int, float]:
    """A corner of the box of stored log-probs: token -> moved log-prob."""
    stored = {int(rows.tokens[t]): float(rows.behavior_logprobs[t])}
    if partition == "topk":
        stored |= {
            int(i): float(y)
            for i, y in zip(rows.topk_ids[t], rows.topk_logprobs[t], strict=True)
            if np.isfinite(y)
        }
    places = half_last_place(np.array(list(stored.values())), rows.logprob_dtype)
    return {
        token: y + float(rng.choice([-1, 1]) * place)
        for (token, y), place in zip(stored.items(), places, strict=True)
    }


def test_noise_is_tight_near_equal_policies():
    rows = make_rows(60, size=30, k=8, kind="flat", seed=6, logprob_dtype="bf16")
    d = Judge(rows, noise=True).divergence("kl", "topk")
    plain = Judge(rows).divergence("kl", "topk")
    places = half_last_place(rows.topk_logprobs, "bf16").max(axis=-1)
    gap = np.abs(np.log(12.0))
    assert (d.high - d.low <= 2 * 8 * places * gap).all()
    assert (d.low <= plain.low).all()
    assert (d.high >= plain.high).all()


@pytest.mark.parametrize(
    ("value", "name", "half"),
    [
        (-1.0, "fp32", 2.0**-24),
        (-1.5, "fp32", 2.0**-24),
        (-0.75, "fp32", 2.0**-25),
        (-3.0, "bf16", 2.0**-7),
        (-10.0, "fp16", 2.0**-8),
        (0.0, "fp32", 0.0),
        (-np.inf, "fp32", 0.0),
    ],
)
def test_half_of_the_last_place(value, name, half):
    assert half_last_place(np.array([value]), name)[0] == half


@pytest.mark.parametrize(("place", "status"), [("fp32", "determined"), ("bf16", None)])
def test_a_threshold_inside_the_input_noise_is_not_determined(place, status):
    rows = make_rows(1, size=12, kind="flat", seed=2, logprob_dtype=place)
    d = Judge(rows).divergence("kl", "topk").mid[0]
    c = Judge(rows).coefficient("kl", "topk", "exact").mid[0]
    rows = with_columns(rows, advantages=np.array([np.sign(c)]))
    near, far = d * (1 - 1e-5), d / 4
    for delta, expected in ((near, status or "undecided-input-noise"), (far, "determined")):
        rule = Rule("m", "predictive", "kl", "topk", "exact", delta_low=delta, delta_high=delta)
        decided = Judge(rows).decide(rule)
        if place == "fp32" or delta == near:
            assert decided.status[0] == expected
        assert not decided.keep[0]


def test_logits_carry_no_noise():
    rows = make_rows(20, kind="flat", seed=9, logprob_dtype="bf16")
    plain, noisy = Judge(rows), Judge(rows, noise=True)
    assert (plain.divergence("kl", "full").high == noisy.divergence("kl", "full").high).all()


def test_the_binary_partition_from_stored_logprobs_alone():
    rows = make_rows(30, seed=10)
    mine = Judge(rows).divergence("kl", "binary")
    y = log_softmax(rows.logits.astype(np.float64))[np.arange(30), rows.tokens]
    bare = with_columns(
        rows, logits=None, behavior_logits=None, logprobs=np.minimum(y, 0.0).astype(np.float32)
    )
    stored = Judge(bare, noise=True).divergence("kl", "binary")
    usual = np.isfinite(stored.low) & np.isfinite(mine.low) & (y < -1e-3) & (y > -20)
    assert usual.sum() >= 10
    assert (stored.low <= mine.high + 1e-5)[usual].all()
    assert (mine.low - 1e-5 <= stored.high)[usual].all()
    decided = Judge(bare).decide(Rule("dppo-binary-kl", "ratio", "kl", "binary"))
    assert decided.determined.mean() > 0.8
    with pytest.raises(InputError, match="logits"):
        Judge(bare).divergence("kl", "topk")


def test_one_more_digit_than_float64_is_decided_in_arb():
    rows = make_rows(1, kind="flat", seed=13)
    enclosure = Judge(rows).divergence("kl", "full", bits=200)
    c = Judge(rows).coefficient("kl", "full").mid[0]
    rows = with_columns(rows, advantages=np.array([np.sign(c)]))
    for delta, kept in ((enclosure.low[0], False), (enclosure.high[0], True)):
        rule = Rule("m", "predictive", "kl", "full", delta_low=delta, delta_high=delta)
        decided = Judge(rows).decide(rule)
        assert decided.determined[0]
        assert decided.escalated[0]
        assert bool(decided.keep[0]) is kept


def test_what_the_highest_precision_cannot_decide_says_which_test(monkeypatch):
    monkeypatch.setattr(judge, "PRECISIONS", (30,))
    rows = make_rows(1, kind="flat", seed=13)
    d = Judge(rows).divergence("kl", "full", bits=200).low[0]
    c = Judge(rows).coefficient("kl", "full").mid[0]
    rows = with_columns(rows, advantages=np.array([np.sign(c)]))
    rule = Rule("m", "predictive", "kl", "full", delta_low=d, delta_high=d)
    decided = Judge(rows).decide(rule)
    assert decided.status[0] == "undecided-proximity"
    assert decided.escalated[0]
    assert not decided.determined[0]


def test_blocks_do_not_change_the_answer(monkeypatch):
    rows = make_rows(27, size=20, seed=14)
    rule = Rule("m", "predictive", "kl", "topk", "exact", delta_low=1e-3, delta_high=1e-3)
    whole = Judge(rows).decide(rule)
    monkeypatch.setattr(judge, "BLOCK", 80)
    parts = Judge(rows).decide(rule)
    assert (whole.keep == parts.keep).all()
    assert (whole.status == parts.status).all()
    assert (whole.divergence.low == parts.divergence.low).all()


def test_replace_wants_the_sampled_token_in_the_list():
    rows = literal([0.6, 0.2, 0.1, 0.06, 0.04], [0.5, 0.2, 0.1, 0.19, 0.01], token=4, k=3)
    rule = Rule("m", "predictive", "kl", "topk", "exact", support="replace")
    with pytest.raises(InputError, match="not in the list"):
        Judge(rows).decide(rule)
    inside = with_columns(rows, tokens=np.array([1]), behavior_logprobs=np.log(np.array([0.2])))
    assert Judge(inside, support="replace").divergence("kl", "topk").mid[0] == pytest.approx(
        Judge(inside).divergence("kl", "topk").mid[0], rel=1e-14
    )


def test_a_full_support_has_no_tail():
    """Nothing is left for a tail, so a retained mass below 1 (rounding) makes no tail cell."""
    y = np.log(np.array([[0.5, 0.3, 0.1]]))
    z = np.log(np.array([[0.4, 0.4, 0.2]]))
    rows = Batch(
        tokens=np.array([[2]]),
        advantages=np.array([[1.0]]),
        response_mask=np.ones((1, 1), dtype=bool),
        vocab_size=3,
        logits=z[None],
        behavior_logprobs=y[None, :, 2],
        topk_ids=np.array([[[0, 1]]]),
        topk_logprobs=y[None, :, :2],
        dtype="fp64",
        logprob_dtype="fp64",
    ).rows()
    pi, mu = Judge(rows).tail_mass()
    assert pi.high[0] == mu.high[0] == 0
    d = 0.5 * np.log(0.5 / 0.4) + 0.3 * np.log(0.3 / 0.4) + 0.1 * np.log(0.1 / 0.2)
    for noise in (False, True):
        enclosure = Judge(rows, noise=noise).divergence("kl", "topk")
        assert enclosure.mid[0] == pytest.approx(d, abs=1e-14)


def test_a_binary_divergence_may_vanish_inside_the_noise():
    rows = make_rows(20, size=6, kind="flat", seed=3, logprob_dtype="bf16")
    y = log_softmax(rows.logits.astype(np.float64))[np.arange(20), rows.tokens]
    stored = FORMATS["bf16"].round(y)
    rows = with_columns(rows, behavior_logprobs=stored)
    for name in ORACLE_DIVERGENCES:
        assert (Judge(rows).divergence(name, "binary").low > 0).any()
        assert (Judge(rows, noise=True).divergence(name, "binary").low <= 0).all()


@pytest.mark.parametrize("tail", [None, "bracket"])
def test_a_topk_coefficient_needs_one_tail_estimator(tail):
    with pytest.raises(InputError, match="tail"):
        Judge(make_rows(2)).coefficient("kl", "topk", tail)


def test_nothing_is_dropped_without_a_mask():
    decided = Judge(make_rows(5)).decide(Rule("none", "none"))
    assert decided.keep.all()
    assert decided.determined.all()
