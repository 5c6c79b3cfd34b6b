"""Families: the door, determinism, and the property each one claims."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdverify.batch import Batch
from pdverify.cases import FAMILIES, as_view, build, designed_rows, replace_last
from pdverify.cases.families import (
    DYADIC,
    GRADED_OCTAVES,
    NEAR_EQUAL_NOISE,
    NEAR_THRESHOLD,
)
from pdverify.formats import FORMATS, POLICY_FORMATS
from pdverify.registry import UnknownName

ROUNDING = 2.0**-24 * 64
"""Relative change of a mass when logits within 64 of the top are rounded to float32."""

LARGE = {"sequences": 6, "length": 20, "vocab_size": 1000, "top_k": 20}


def policies(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """`[T, V]` mu and pi in float64."""
    rows = batch.rows()
    both = []
    for logits in (rows.behavior_logits, rows.logits):
        mass = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
        both.append(mass / mass.sum(axis=-1, keepdims=True))
    return both[0], both[1]


def forward_kl(mu: np.ndarray, pi: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mu > 0, mu * np.log(mu / pi), 0.0).sum(axis=-1)


def coefficient(mu: np.ndarray, pi: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    row = np.arange(len(tokens))
    return pi[row, tokens] - mu[row, tokens] + (pi * (mu - pi)).sum(axis=-1)


def support(batch: Batch) -> np.ndarray:
    """`[T, V]` bool: the top-K list and the sampled token."""
    rows = batch.rows()
    kept = np.zeros((len(rows), rows.vocab_size), dtype=bool)
    np.put_along_axis(kept, rows.topk_ids, True, axis=-1)
    kept[np.arange(len(rows)), rows.tokens] = True
    return kept


def is_listed(batch: Batch) -> np.ndarray:
    rows = batch.rows()
    return (rows.topk_ids == rows.tokens[:, None]).any(axis=-1)


def kinds(batch: Batch, count: int) -> np.ndarray:
    """The running number of each valid position modulo `count`."""
    index = batch.rows().index
    return (index[:, 0] * batch.tokens.shape[1] + index[:, 1]) % count


def arrays(batch: Batch) -> dict[str, np.ndarray]:
    return {name: x for name, x in vars(batch).items() if isinstance(x, np.ndarray)}


@pytest.mark.parametrize("dtype", POLICY_FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_the_door_at_every_size(name, dtype):
    sizes = [(5, 20), (5, 1), (64, 62), (257, 20), (1000, 20)]
    for vocab_size, top_k in sizes:
        for sequences, length in [(3, 7), (1, 1), (1, 2), (3, 1)]:
            batch = build(
                name,
                sequences=sequences,
                length=length,
                vocab_size=vocab_size,
                top_k=top_k,
                dtype=dtype,
            )
            assert batch.tokens.shape == (sequences, length)
            assert batch.vocab_size == vocab_size
            assert support(batch).sum(axis=-1).max() < vocab_size


@pytest.mark.parametrize("name", FAMILIES)
def test_same_seed_same_bits_another_seed_another_batch(name):
    first, again, other = (build(name, seed, dtype="bf16") for seed in (7, 7, 8))
    for key, x in arrays(first).items():
        np.testing.assert_array_equal(x, arrays(again)[key])
    assert any(not np.array_equal(x, arrays(other)[key]) for key, x in arrays(first).items())


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_is_there_and_poisoned(name):
    batch = build(name)
    padded = ~batch.response_mask
    assert padded.any()
    for key, x in arrays(batch).items():
        if x.dtype.kind == "f":
            assert np.isnan(x[padded]).all(), key
            assert not np.isnan(x[~padded]).any(), key
    assert (batch.tokens[padded] == 0).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_advantages_have_both_signs_and_exact_zeros(name):
    advantages = build(name, **LARGE).rows().advantages
    assert (advantages > 0).any()
    assert (advantages < 0).any()
    assert (advantages == 0).sum() == math.ceil(len(advantages) / 8)


@pytest.mark.parametrize("dtype", POLICY_FORMATS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_representable_and_stored_logprobs_are_theirs(name, dtype):
    batch = build(name, vocab_size=129, dtype=dtype)
    rows = batch.rows()
    for logits in (rows.logits, rows.behavior_logits):
        np.testing.assert_array_equal(FORMATS[dtype].round(logits), logits)
        assert logits.dtype == (np.float64 if dtype == "fp64" else np.float32)
    y = rows.behavior_logits.astype(np.float64)
    top = y.max(axis=-1, keepdims=True)
    exact = y - top - np.log(np.exp(y - top).sum(axis=-1, keepdims=True))
    listed = np.take_along_axis(exact, rows.topk_ids, axis=-1)
    finite = np.isfinite(listed)
    assert (np.isneginf(rows.topk_logprobs) == ~finite).all()
    # Half a last place of float32, and the rounding of `exact` itself: sums of V terms below 1.
    own_error = 2.0**-52 * (np.abs(listed) + rows.vocab_size)
    allowed = 2.0**-24 * np.abs(listed) + own_error
    stored = rows.topk_logprobs[finite].astype(np.float64)
    assert (np.abs(stored - listed[finite]) <= allowed[finite]).all()
    assert (rows.topk_logprobs[:, 1:] <= rows.topk_logprobs[:, :-1]).all()
    rest = exact.copy()
    np.put_along_axis(rest, rows.topk_ids, -np.inf, axis=-1)
    assert (rest.max(axis=-1) <= listed[:, -1]).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_neg_inf_is_declared(name):
    rows = build(name, **LARGE).rows()
    held = np.isneginf(rows.logits).any() or np.isneginf(rows.behavior_logits).any()
    assert held == FAMILIES[name].neg_inf


def test_descriptions_are_one_line_and_names_agree():
    for name, family in FAMILIES.items():
        assert family.name == name
        assert "\n" not in family.description
        assert family.description


def test_unknown_names_and_impossible_sizes():
    with pytest.raises(UnknownName, match="peaked"):
        build("peeked")
    with pytest.raises(UnknownName, match="bf16"):
        build("peaked", dtype="bf61")
    with pytest.raises(ValueError, match="vocab_size = 4: at least 5"):
        build("peaked", vocab_size=4)


@pytest.mark.parametrize("name", ["peaked", "zipf", "flat"])
def test_tokens_follow_the_behavior_policy(name):
    batch = build(name, sequences=8, length=250, vocab_size=50, top_k=4)
    mu, _ = policies(batch)
    own = is_listed(batch)
    kept = np.zeros_like(mu, dtype=bool)
    np.put_along_axis(kept, batch.rows().topk_ids, True, axis=-1)
    share = (mu * kept).sum(axis=-1)
    deviation = math.sqrt((share * (1 - share)).sum())
    assert abs(own.sum() - share.sum()) < 4 * deviation


def test_peaked_rows_range_from_near_certain_to_led_by_the_bulk():
    mu, pi = policies(build("peaked", **LARGE))
    top = mu.max(axis=-1)
    assert top.max() > 0.95
    assert top.min() < 0.5
    kl = forward_kl(mu, pi)
    assert kl.min() < 0.01 < NEAR_THRESHOLD < kl.max()


def test_flat_rows_have_most_of_their_mass_in_the_tail():
    batch = build("flat", **LARGE)
    mu, _ = policies(batch)
    assert ((mu * ~support(batch)).sum(axis=-1) > 0.9).all()


def test_near_one_hot_covers_its_range_and_samples_rare_tokens():
    batch = build("near-one-hot", **LARGE)
    _, pi = policies(batch)
    top = pi.argmax(axis=-1)
    rest = pi.copy()
    rest[np.arange(len(pi)), top] = 0
    eps = rest.sum(axis=-1)
    assert eps.min() < 1e-8
    assert eps.max() > 1e-3
    rounded = 1 + ROUNDING
    assert (eps * rounded >= 1e-9).all()
    assert (eps <= 1e-2 * rounded).all()
    rare = batch.rows().tokens != top
    np.testing.assert_array_equal(rare, kinds(batch, 5) == 4)


def test_near_equal_rows_have_their_noise_and_some_none():
    batch = build("near-equal", **LARGE)
    rows = batch.rows()
    noise = np.std(rows.behavior_logits - rows.logits.astype(np.float64), axis=-1)
    expected = np.asarray(NEAR_EQUAL_NOISE)[kinds(batch, len(NEAR_EQUAL_NOISE))]
    assert (noise[expected == 0] == 0).all()
    moved = expected > 0
    assert (np.abs(np.log2(noise[moved] / expected[moved])) < 0.5).all()


def test_identical_rows_are_equal_bit_by_bit():
    batch = build("identical", dtype="bf16")
    rows = batch.rows()
    np.testing.assert_array_equal(rows.logits, rows.behavior_logits)
    mu, pi = policies(batch)
    assert (forward_kl(mu, pi) == 0).all()


def test_ties_straddle_the_last_listed_place():
    batch = build("ties", **LARGE, dtype="bf16")
    rows = batch.rows()
    last = np.take_along_axis(rows.behavior_logits, rows.topk_ids[:, -1:], axis=-1)
    tied = rows.behavior_logits == last
    assert (tied.sum(axis=-1) > 1).all()
    for row in range(len(rows)):
        listed = set(rows.topk_ids[row].tolist())
        ids = np.flatnonzero(tied[row]).tolist()
        flags = [i in listed for i in ids]
        assert flags == sorted(flags, reverse=True)


def test_swapped_rows_tie_exactly_on_all_but_two_tokens():
    batch = build("swapped", **LARGE)
    rows = batch.rows()
    different = rows.logits != rows.behavior_logits
    assert (different.sum(axis=-1) == 2).all()
    np.testing.assert_array_equal(
        np.sort(rows.logits, axis=-1), np.sort(rows.behavior_logits, axis=-1)
    )
    sampled = different[np.arange(len(rows)), rows.tokens]
    np.testing.assert_array_equal(sampled, kinds(batch, 2) == 0)


def test_training_tail_holds_one_heavy_token():
    batch = build("training-tail", **LARGE)
    mu, pi = policies(batch)
    tail = pi * ~support(batch)
    heavy = tail.max(axis=-1)
    outside = batch.rows().tokens != tail.argmax(axis=-1)
    assert outside.all()
    assert (heavy * (1 + ROUNDING) >= 0.2).all()
    assert (heavy <= 0.7 * (1 + ROUNDING)).all()
    assert (mu[np.arange(len(mu)), tail.argmax(axis=-1)] < mu.max(axis=-1) / 2).mean() > 0.9


def test_behavior_tail_holds_tokens_as_heavy_as_the_listed_ones():
    batch = build("behavior-tail", **LARGE)
    mu, _ = policies(batch)
    listed = np.take_along_axis(mu, batch.rows().topk_ids, axis=-1)
    assert ((mu * ~support(batch)).max(axis=-1) > 0.5 * listed.min(axis=-1)).mean() > 0.9


@pytest.mark.parametrize("dtype", POLICY_FORMATS)
def test_offset_rows_keep_their_shape_in_every_format(dtype):
    mu, pi = policies(build("offset", **LARGE, dtype=dtype))
    logits = build("offset", **LARGE, dtype=dtype).rows().logits
    assert logits.min() > 100
    assert forward_kl(mu, pi).min() > 0
    assert mu.max() > 0.5


def test_scales():
    tiny, huge = build("tiny-scale", **LARGE), build("huge-scale", **LARGE)
    assert np.abs(tiny.rows().logits).max() < 1e-5
    assert np.ptp(huge.rows().logits, axis=-1).min() > 140
    _, pi = policies(huge)
    assert (np.log(pi, out=np.full_like(pi, -1e3), where=pi > 0).min(axis=-1) < -104).all()


def test_far_apart_policies_are_far_apart():
    mu, pi = policies(build("far-apart", **LARGE))
    assert np.median(forward_kl(mu, pi)) > 1


def test_temperature_is_one_factor_per_row():
    rows = build("temperature", **LARGE, dtype="fp64").rows()
    ratio = rows.logits / rows.behavior_logits
    spread = ratio.max(axis=-1) - ratio.min(axis=-1)
    assert (spread <= 4 * 2.0**-52).all()
    assert ratio.max() - ratio.min() > 0.5


def test_neg_inf_families():
    padded = build("padded-vocabulary", **LARGE).rows()
    for logits in (padded.logits, padded.behavior_logits):
        assert (np.isneginf(logits) == (np.arange(1000) >= 938)).all()

    behavior = build("top-p-behavior", **LARGE)
    rows = behavior.rows()
    assert np.isneginf(rows.behavior_logits).any(axis=-1).all()
    assert np.isfinite(rows.logits).all()
    assert np.isneginf(rows.topk_logprobs).any()

    both = build("top-p-both", **LARGE)
    rows = both.rows()
    np.testing.assert_array_equal(np.isneginf(rows.logits), np.isneginf(rows.behavior_logits))
    mu, pi = policies(both)
    assert (forward_kl(mu, pi)[kinds(both, 2) == 1] == 0).all()


@pytest.mark.parametrize("dtype", POLICY_FORMATS)
@pytest.mark.parametrize(("vocab_size", "top_k"), [(5, 3), (1000, 20)])
def test_training_neg_inf_makes_forward_kl_infinite(dtype, vocab_size, top_k):
    size = LARGE | {"vocab_size": vocab_size, "top_k": top_k}
    batch = build("training-neg-inf", **size, dtype=dtype)
    rows, kind = batch.rows(), kinds(batch, 4)
    mu, pi = policies(batch)
    assert np.isposinf(forward_kl(mu, pi)).all()
    assert np.isfinite(rows.behavior_logits).all()
    own = np.isneginf(rows.logits[np.arange(len(rows)), rows.tokens])
    np.testing.assert_array_equal(own, kind == 0)
    kept = support(batch)
    removed_listed = (np.isneginf(rows.logits) & kept).any(axis=-1)
    np.testing.assert_array_equal(removed_listed, kind < 2)
    tail_left = ((pi > 0) & ~kept).any(axis=-1)
    np.testing.assert_array_equal(tail_left, kind != 3)


def test_list_lengths():
    assert build("k-one", **LARGE).topk_ids.shape[-1] == 1
    almost = build("k-almost-all", vocab_size=40)
    assert almost.topk_ids.shape[-1] == 38
    assert (~is_listed(almost)[kinds(almost, 2) == 1]).all()
    assert build("peaked", vocab_size=8, top_k=20).topk_ids.shape[-1] == 6


def test_where_the_sampled_token_is():
    assert not is_listed(build("sampled-outside", **LARGE)).any()
    assert is_listed(build("sampled-inside", **LARGE)).all()
    last = build("sampled-last", **LARGE)
    rows, even = last.rows(), kinds(last, 2) == 0
    assert (rows.topk_ids[even, -1] == rows.tokens[even]).all()
    assert not is_listed(last)[~even].any()
    outside = rows.behavior_logits.copy()
    np.put_along_axis(outside, rows.topk_ids, -np.inf, axis=-1)
    assert (rows.tokens == outside.argmax(axis=-1))[~even].all()


@pytest.mark.parametrize("dtype", POLICY_FORMATS)
def test_dyadic_divergences_are_exact(dtype):
    batch = build("dyadic", vocab_size=5, dtype=dtype)
    mu, pi = policies(batch)
    kind = kinds(batch, len(DYADIC))
    total_variation = np.abs(mu - pi).sum(axis=-1) / 2
    for row, (m, n, shared) in enumerate(np.asarray(DYADIC)[kind]):
        assert (mu[row] > 0).sum() == m
        assert (pi[row] > 0).sum() == n
        assert ((mu[row] > 0) & (pi[row] > 0)).sum() == shared
        assert total_variation[row] == 1 - shared * min(1 / m, 1 / n)
        assert pi[row, batch.rows().tokens[row]] > 0
    assert {0.0, 0.25, 0.5, 0.75} == set(total_variation)
    assert np.isposinf(forward_kl(mu, pi)).any()


@pytest.mark.parametrize("vocab_size", [5, 257, 1000])
def test_direction_conflict_rows_are_outside_and_point_the_wrong_way(vocab_size):
    batch = build("direction-conflict", sequences=6, length=20, vocab_size=vocab_size)
    mu, pi = policies(batch)
    tokens = batch.rows().tokens
    row = np.arange(len(tokens))
    ratio = np.sign(pi[row, tokens] - mu[row, tokens])
    assert (ratio == -np.sign(coefficient(mu, pi, tokens))).all()
    assert (ratio == np.where(kinds(batch, 2) == 0, 1, -1)).all()
    assert (forward_kl(mu, pi)[kinds(batch, 2) == 0] > NEAR_THRESHOLD).all()


def test_tail_conflict_flips_the_aggregated_sign_only():
    batch = build("tail-conflict", **LARGE)
    mu, pi = policies(batch)
    tokens, kept = batch.rows().tokens, support(batch)
    row = np.arange(len(tokens))
    local = pi[row, tokens] - mu[row, tokens] + (pi * (mu - pi) * kept).sum(axis=-1)
    m, p = ((x * ~kept).sum(axis=-1) for x in (mu, pi))
    masses = {
        "exact": (pi**2 * ~kept).sum(axis=-1),
        "uniform": p**2 / (~kept).sum(axis=-1),
        "aggregated": p**2,
    }
    sign = {name: np.sign(local + x * (m - p) / p) for name, x in masses.items()}
    assert (sign["exact"] == sign["uniform"]).all()
    assert (sign["exact"] == -sign["aggregated"]).all()
    listed = (
        np.concatenate([np.where(kept, mu, 0), m[:, None]], axis=-1),
        np.concatenate([np.where(kept, pi, 0), p[:, None]], axis=-1),
    )
    assert (forward_kl(*listed) > NEAR_THRESHOLD).all()


def test_near_threshold_rows_lie_close_on_both_sides():
    batch = build("near-threshold", **LARGE)
    mu, pi = policies(batch)
    kept = support(batch)
    cells = [
        np.concatenate([np.where(kept, x, 0), (x * ~kept).sum(axis=-1, keepdims=True)], axis=-1)
        for x in (mu, pi)
    ]
    full = kinds(batch, 2) == 0
    kl = np.where(full, forward_kl(mu, pi), forward_kl(*cells))
    gap = kl / NEAR_THRESHOLD - 1
    assert (np.abs(gap) < 0.11).all()
    assert np.abs(gap).min() < 1e-3
    for side in (gap > 0, gap < 0):
        assert (side & full).any()
        assert (side & ~full).any()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_graded_differences_cover_the_octaves(dtype):
    batch = build("graded", sequences=8, length=25, vocab_size=257, dtype=dtype)
    rows = batch.rows()
    zero = rows.behavior_logits == 0
    difference = rows.logits.astype(np.float64) - rows.behavior_logits
    assert (difference[~zero] == 0).all()
    assert zero[np.arange(len(rows)), rows.tokens].all()
    octave = np.sort(-np.log2(np.abs(difference).max(axis=-1)))
    assert octave[-1] - octave[0] > GRADED_OCTAVES - 4
    assert np.diff(octave).max() < 4


def test_mostly_padding():
    batch = build("padding", **LARGE)
    assert not batch.response_mask[-1].any()
    steps = np.diff(batch.response_mask[0].astype(int))
    assert (steps == 1).sum() > 1


def test_views():
    batch = build("sampled-outside", dtype="bf16")
    assert batch.view == "full"
    topk = as_view(batch, "topk")
    assert (topk.view, topk.logits is batch.logits) == ("topk", True)
    sampled = as_view(batch, "sampled", training="logprobs")
    assert sampled.view == "sampled"
    assert sampled.logits is None
    _, pi = policies(batch)
    stored = sampled.rows().logprobs
    own = np.log(pi[np.arange(len(pi)), batch.rows().tokens])
    assert (np.abs(stored - own) <= 2.0**-24 * np.abs(own) + 2.0**-52 * batch.vocab_size).all()


def test_replacement_takes_the_last_place_only_where_the_sampled_token_is_absent():
    outside = build("sampled-outside")
    moved = replace_last(outside)
    rows = moved.rows()
    assert (rows.topk_ids[:, -1] == rows.tokens).all()
    assert (rows.topk_logprobs[:, -1] == rows.behavior_logprobs).all()
    np.testing.assert_array_equal(rows.topk_ids[:, :-1], outside.rows().topk_ids[:, :-1])
    inside = build("sampled-inside")
    np.testing.assert_array_equal(replace_last(inside).topk_ids, inside.topk_ids)
    with pytest.raises(ValueError, match="no top-K list"):
        replace_last(as_view(inside, "sampled"))


@pytest.mark.parametrize(("dtype", "reach"), [("fp32", 38.0), ("bf16", 36.0), ("fp16", 36.0)])
def test_designed_rows_reach_their_octaves_far_outside_the_trust_region(dtype, reach):
    def margin(batch: Batch) -> np.ndarray:
        return coefficient_stable(batch)

    def scale(batch: Batch) -> np.ndarray:
        return np.full(len(batch.rows()), 8.0)

    batch = designed_rows(
        np.random.default_rng(0),
        margin,
        scale,
        sequences=4,
        length=15,
        vocab_size=65,
        top_k=8,
        dtype=dtype,
    )
    mu, pi = policies(batch)
    assert (forward_kl(mu, pi) > 2 * NEAR_THRESHOLD).all()
    reached = margin(batch) / scale(batch)
    octave = -np.log2(np.abs(reached))
    assert octave.max() > reach
    assert octave.min() < 12
    assert 0.25 < (reached > 0).mean() < 0.75
    spacing = np.diff(np.sort(octave))
    assert spacing.max() < 6
    rows = batch.rows()
    np.testing.assert_array_equal(FORMATS[dtype].round(rows.logits), rows.logits)


def coefficient_stable(batch: Batch) -> np.ndarray:
    """Complement form in float64."""
    mu, pi = policies(batch)
    tokens = batch.rows().tokens[:, None]
    rest = pi.copy()
    np.put_along_axis(rest, tokens, 0.0, axis=-1)
    weight = rest.sum(axis=-1, keepdims=True) + pi
    np.put_along_axis(weight, tokens, 0.0, axis=-1)
    return (weight * (mu - pi)).sum(axis=-1)


def test_designed_rows_say_when_the_vocabulary_is_too_small():
    with pytest.raises(ValueError, match="vocab_size = 9"):
        designed_rows(
            np.random.default_rng(0),
            coefficient_stable,
            coefficient_stable,
            sequences=1,
            length=2,
            vocab_size=9,
            top_k=2,
        )
