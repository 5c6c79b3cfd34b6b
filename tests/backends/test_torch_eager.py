"""Eager torch against the definitions, in a trainer's dtypes; loss, gradients, poisoned padding."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pdverify.backends import torch_eager
from pdverify.backends.cell_functions import STABLE
from pdverify.batch import Batch
from pdverify.cases import EDGE_CASES, FAMILIES, replace_last
from pdverify.cases import build as family
from pdverify.definitions import _formulas, losses, masks
from pdverify.definitions.cells import build
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS
from pdverify.formats import FORMATS
from pdverify.oracle import Judge
from pdverify.rules import Rule
from tests.definitions.helpers import StrictBudgets, one_token, padded_batch

BEHAVIOR = ("behavior_logits", "behavior_logprobs", "topk_ids", "topk_logprobs")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
TAILS = {"full": (None,), "binary": ("exact",), "topk": ("aggregated", "uniform", "exact")}


def behavior(batch: Batch) -> dict[str, torch.Tensor | None]:
    found = {name: getattr(batch, name) for name in BEHAVIOR}
    return {name: None if x is None else torch.as_tensor(x) for name, x in found.items()}


def inputs(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tokens; ids on padding as an engine leaves them."""
    tokens = np.where(batch.response_mask, batch.tokens, 0)
    return torch.as_tensor(batch.logits), torch.as_tensor(tokens)


def keep_mask(batch: Batch, rule: Rule, **options: object) -> np.ndarray:
    kept = torch_eager.keep_mask(
        *inputs(batch),
        torch.as_tensor(batch.advantages),
        rule=rule,
        response_mask=torch.as_tensor(batch.response_mask),
        **behavior(batch),
        **options,
    )
    return kept.numpy()


def check_values(batch: Batch, partition: str, module: Any = torch_eager) -> None:
    """D and C within budget of the oracle; never NaN where the definition is finite."""
    rows, valid = batch.rows(), batch.response_mask
    cells, judge = build(rows, partition), Judge(rows)
    with np.errstate(all="ignore"):
        for compute, unit in UNITS.items():
            budgets = StrictBudgets(rows, partition, "append", unit, "complement", cells)
            options = {"compute_dtype": compute, "partition": partition, **behavior(batch)}
            for name in DIVERGENCES:
                truth = judge.divergence(name, partition)
                # stored masses may sum to a little over 1; a negative sum is reported as 0
                low, high = np.maximum(truth.low, 0.0), np.maximum(truth.high, 0.0)
                value = module.divergence(*inputs(batch), name=name, **options)
                mine, budget = masks.divergence(cells, name), budgets.divergence(name)
                check(value.double().numpy()[valid], mine, low, high, budget)
                for tail in TAILS[partition]:
                    truth = judge.coefficient(name, partition, tail)
                    value = module.coefficient(*inputs(batch), name=name, tail=tail, **options)
                    mine = masks.coefficient(cells, name, tail)
                    budget = budgets.coefficient(name, tail)
                    check(value.double().numpy()[valid], mine, truth.low, truth.high, budget)


def check(
    value: np.ndarray, mine: np.ndarray, low: np.ndarray, high: np.ndarray, budget: np.ndarray
) -> None:
    assert not np.isnan(value[np.isfinite(mine)]).any()
    off = np.maximum(low - value, value - high)
    wrong = np.isfinite(low) & np.isfinite(high) & ~(off <= budget)
    assert not wrong.any(), (off[wrong], budget[wrong])


@pytest.mark.parametrize("partition", ["full", "topk", "binary"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_within_budget(name, partition):
    dtype = "bf16" if partition == "full" else "fp32"
    check_values(family(name, sequences=2, vocab_size=64, top_k=8, dtype=dtype), partition)


@pytest.mark.parametrize("logprobs", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["peaked", "huge-scale", "k-almost-all", "near-one-hot"])
def test_stored_masses_that_sum_past_one(name, logprobs):
    batch = family(name, sequences=2, vocab_size=40, top_k=38)
    # almost half a last place up, everywhere: as far as honest rounding can go
    up = np.float32(1 - 0.9 * FORMATS[logprobs].unit_roundoff)
    batch = replace(
        batch,
        behavior_logprobs=batch.behavior_logprobs * up,
        topk_logprobs=batch.topk_logprobs * up,
        logprob_dtype=logprobs,
    )
    assert (build(batch.rows(), "topk").mu.sum(axis=-1) > 1).any()
    check_values(batch, "topk")


def test_no_tail_when_everything_is_retained():
    batch = one_token(k=4, ids=(0, 1, 2, 3))
    batch = replace(batch, topk_logprobs=batch.topk_logprobs - 2.0**-9, logprob_dtype="bf16")
    check_values(batch, "topk")


@pytest.mark.parametrize("name", [name for name, case in EDGE_CASES.items() if case.decisions])
@pytest.mark.parametrize("compute", UNITS)
def test_edge_case_decisions(name, compute):
    case = EDGE_CASES[name]
    if case.batch.logits is None:
        pytest.skip("torch-eager works from logits")
    for decision in case.decisions:
        kept = keep_mask(case.batch, decision.rule, compute_dtype=compute)
        assert tuple(kept[case.batch.response_mask]) == decision.keep, decision.rule


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["peaked", "far-apart", "sampled-outside", "top-p-both"])
def test_masks_agree_with_the_definitions(mask, name):
    batch = family(name, vocab_size=64, top_k=8)
    for view in MASKS[mask].views():
        for tail in masks.TAILS if MASKS[mask].needs_tail(view) else (None,):
            rule = MASKS[mask].rule(view=view, tail=tail, delta=0.1)
            mine = masks.keep(batch.rows(), rule)
            theirs = keep_mask(batch, rule, compute_dtype=torch.float64)
            differ = theirs[batch.response_mask] != mine
            assert not (differ & certain_sign(batch, rule)).any(), rule
            assert not theirs[~batch.response_mask].any()


def certain_sign(batch: Batch, rule: Rule) -> np.ndarray:
    """Where float64 rounding of both sides cannot turn the sign of C."""
    rows = batch.rows()
    if rule.direction not in ("predictive", "second-order"):
        return np.ones(len(rows), dtype=bool)
    cells = build(rows, rule.partition)
    budgets = StrictBudgets(rows, rule.partition, "append", 2.0**-53, "complement", cells)
    ends = ("aggregated", "uniform") if rule.tail == "bracket" else (rule.tail,)
    with np.errstate(all="ignore"):
        sizes = [np.abs(masks.coefficient(cells, rule.divergence, end)) for end in ends]
        bounds = [2 * budgets.coefficient(rule.divergence, end) for end in ends]
    return np.all([size > bound for size, bound in zip(sizes, bounds, strict=True)], axis=0)


@pytest.mark.parametrize("tail", masks.TAILS)
def test_replaced_lists(tail):
    batch = replace_last(family("sampled-outside", vocab_size=64, top_k=8))
    for name in ("kl", "tv"):
        rule = MASKS[f"predictive-{name}"].rule(tail=tail, support="replace", delta=0.05)
        mine = masks.keep(batch.rows(), rule)
        theirs = keep_mask(batch, rule, compute_dtype=torch.float64)
        assert (theirs[batch.response_mask] == mine).all()


def test_thresholds_keep_their_float64_digits():
    batch = family("peaked", sequences=1, length=1, vocab_size=16, top_k=4)
    batch = replace(batch, advantages=np.ones((1, 1), dtype=np.float32))
    d = torch_eager.divergence(
        *inputs(batch), name="kl", compute_dtype=torch.float64, **behavior(batch)
    ).item()
    sign = torch_eager.coefficient(
        *inputs(batch), name="kl", compute_dtype=torch.float64, **behavior(batch)
    ).item()
    batch = replace(batch, advantages=np.full((1, 1), np.sign(sign), dtype=np.float32))
    for delta, kept in ((d, True), (np.nextafter(d, 0.0), False)):
        rule = MASKS["predictive-kl"].rule(tail="exact", delta=delta)
        assert keep_mask(batch, rule, compute_dtype=torch.float64).item() is kept


def test_zero_advantage_is_kept():
    batch = family("far-apart", vocab_size=64, top_k=8)
    rule = MASKS["predictive-kl"].rule(tail="exact", delta=0.0)
    still = batch.response_mask & (batch.advantages == 0)
    assert still.any()
    assert keep_mask(batch, rule)[still].all()


def test_predictive_mask_is_the_rule():
    batch = family("far-apart", vocab_size=64, top_k=8)
    options = {"response_mask": torch.as_tensor(batch.response_mask), **behavior(batch)}
    advantages = torch.as_tensor(batch.advantages)
    for tail in masks.TAILS:
        mask = torch_eager.predictive_mask(
            *inputs(batch), advantages, divergence="tv", tail=tail, delta_low=0.1, **options
        )
        rule = MASKS["predictive-tv"].rule(tail=tail, delta_low=0.1)
        assert (mask.numpy() == keep_mask(batch, rule)).all()
    options |= {"topk_ids": None, "topk_logprobs": None}
    mask = torch_eager.predictive_mask(*inputs(batch), advantages, **options)
    full = MASKS["predictive-kl"].rule(view="full")
    assert (mask.numpy() == keep_mask(batch, full)).all()


def test_behavior_logprobs_come_from_the_logits_where_none_are_stored():
    batch = family("far-apart", vocab_size=64, top_k=8)
    bare = replace(batch, behavior_logprobs=None, topk_ids=None, topk_logprobs=None)
    rule = MASKS["dppo-binary-kl"].rule(delta=0.1)
    mine = masks.keep(bare.rows(), rule)
    assert (keep_mask(bare, rule, compute_dtype=torch.float64)[bare.response_mask] == mine).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_every_dtype(dtype):
    batch = family("peaked", vocab_size=64, top_k=8, dtype=dtype)
    rule = MASKS["predictive-kl"].rule(tail="exact")
    logits, tokens = inputs(batch)
    narrow = torch_eager.keep_mask(
        logits.to(DTYPES[dtype]),
        tokens,
        torch.as_tensor(batch.advantages),
        rule=rule,
        response_mask=torch.as_tensor(batch.response_mask),
        **behavior(batch),
    )
    assert (narrow.numpy() == keep_mask(batch, rule)).all()


def test_masks_carry_no_gradient_and_leave_their_inputs_alone():
    batch = family("peaked", vocab_size=64, top_k=8)
    logits, tokens = inputs(batch)
    logits.requires_grad_()
    advantages = torch.as_tensor(batch.advantages)
    valid = torch.as_tensor(batch.response_mask)
    given = {"logits": logits, "tokens": tokens, "advantages": advantages, "valid": valid}
    given |= behavior(batch)
    before = {name: x.detach().clone() for name, x in given.items()}
    rule = MASKS["predictive-kl"].rule(tail="bracket")
    kept = torch_eager.keep_mask(
        logits, tokens, advantages, rule=rule, response_mask=valid, **behavior(batch)
    )
    assert not kept.requires_grad
    for function in (torch_eager.divergence, torch_eager.coefficient):
        assert not function(logits, tokens, name="tv", **behavior(batch)).requires_grad
    torch_eager.policy_loss(
        logits, tokens, advantages, given["behavior_logprobs"], kept, response_mask=valid
    ).backward()
    for name, x in given.items():
        same = (x.detach() == before[name]) | (
            torch.isnan(x.detach()) if x.is_floating_point() else False
        )
        assert same.all(), name


def test_non_contiguous_inputs():
    batch = family("peaked", vocab_size=64, top_k=8)
    rule = MASKS["predictive-kl"].rule(tail="exact")

    def strided(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    logits, tokens = inputs(batch)
    assert not strided(logits).is_contiguous()
    options = {name: strided(x) for name, x in behavior(batch).items()}
    kept = torch_eager.keep_mask(
        strided(logits),
        strided(tokens),
        strided(torch.as_tensor(batch.advantages)),
        rule=rule,
        response_mask=strided(torch.as_tensor(batch.response_mask)),
        **options,
    )
    assert (kept.numpy() == keep_mask(batch, rule)).all()


def test_micro_batches_decide_as_the_whole():
    batch = family("far-apart", sequences=6, vocab_size=64, top_k=8)
    rule = MASKS["predictive-kl"].rule(tail="exact")
    fields = ("tokens", "advantages", "response_mask", "logits", *BEHAVIOR)
    parts = []
    for start in range(6):
        cut = {name: getattr(batch, name)[start : start + 1] for name in fields}
        parts.append(keep_mask(replace(batch, **cut), rule))
    assert (np.concatenate(parts) == keep_mask(batch, rule)).all()


def test_any_leading_shape():
    batch = family("peaked", vocab_size=64, top_k=8)
    logits, tokens = inputs(batch)
    flat = {name: x.flatten(0, 1) for name, x in behavior(batch).items()}
    d = torch_eager.divergence(logits.flatten(0, 1), tokens.flatten(), name="kl", **flat)
    whole = torch_eager.divergence(logits, tokens, name="kl", **behavior(batch))
    assert torch.equal(d.nan_to_num(), whole.flatten().nan_to_num())


def test_padding_may_hold_any_id():
    batch = family("padding", vocab_size=64, top_k=8)
    poisoned = replace(
        batch,
        tokens=np.where(batch.response_mask, batch.tokens, -100),
        topk_ids=np.where(batch.response_mask[..., None], batch.topk_ids, -1),
    )
    rule = MASKS["predictive-kl"].rule(tail="exact")
    options = {"response_mask": torch.as_tensor(batch.response_mask), **behavior(poisoned)}
    kept = torch_eager.keep_mask(
        torch.as_tensor(poisoned.logits),
        torch.as_tensor(poisoned.tokens),
        torch.as_tensor(poisoned.advantages),
        rule=rule,
        **options,
    )
    assert (kept.numpy() == keep_mask(batch, rule)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(2, 3, dtype=torch.int64)}, "logits.shape"),
        ({"partition": "full", "behavior_logits": None}, "behavior_logits = None"),
        ({"partition": "full", "behavior_logits": torch.zeros(1, 1, 4)}, "behavior_logits.shape"),
        ({"behavior_logprobs": None}, "behavior_logprobs = None"),
        ({"topk_ids": None}, "topk_ids"),
        ({"topk_logprobs": torch.zeros(1, 1, 1)}, "topk_logprobs.shape"),
    ],
)
def test_bad_inputs_are_named(change, message):
    batch = one_token()
    logits, tokens = inputs(batch)
    options = {"tokens": tokens, "name": "kl", **behavior(batch)} | change
    with pytest.raises(ValueError, match=message):
        torch_eager.divergence(logits, **options)


def test_bad_options_are_named():
    batch = one_token()
    with pytest.raises(ValueError, match="tail = bracket"):
        torch_eager.coefficient(*inputs(batch), name="kl", tail="bracket", **behavior(batch))
    wrong = Rule("any", "second-order", "tv", "topk", "exact")
    with pytest.raises(ValueError, match="divergence = tv"):
        keep_mask(batch, wrong)
    with pytest.raises(ValueError, match=r"advantages\.shape"):
        torch_eager.keep_mask(*inputs(batch), torch.zeros(2, 2), rule=wrong)
    with pytest.raises(ValueError, match="aggregation = mean"):
        torch_eager.aggregate(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "mean")
    for cap in (0.0, float("nan")):
        with pytest.raises(ValueError, match="ratio_cap"):
            loss_of(batch, np.ones((1, 1), dtype=bool), ratio_cap=cap)


def loss_of(
    batch: Batch, keep: np.ndarray, compute: torch.dtype = torch.float64, **options: object
) -> tuple[np.ndarray, np.ndarray]:
    logits = torch.as_tensor(batch.logits).clone().requires_grad_()
    loss = torch_eager.policy_loss(
        logits,
        torch.as_tensor(batch.tokens),
        torch.as_tensor(batch.advantages),
        torch.as_tensor(batch.behavior_logprobs),
        torch.as_tensor(keep),
        response_mask=torch.as_tensor(batch.response_mask),
        compute_dtype=compute,
        **options,
    )
    loss.sum().backward()
    return loss.detach().numpy(), logits.grad.numpy()


@pytest.mark.parametrize("compute", UNITS)
@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@pytest.mark.parametrize("cap", [20.0, 0.75])
def test_loss_and_gradient_are_the_definitions(aggregation, cap, compute):
    batch = padded_batch()
    keep = np.ones(batch.tokens.shape, dtype=bool)
    keep[2, 0] = False
    loss, gradient = loss_of(batch, keep, compute, aggregation=aggregation, ratio_cap=cap)
    right = losses.policy_loss(batch, keep, aggregation=aggregation, ratio_cap=cap)
    # a dozen roundings of numbers below 16 in size per token
    size = np.abs(losses.policy_loss(batch, keep)[0]).sum()
    bound = 64 * UNITS[compute] * size
    np.testing.assert_allclose(loss, right[0], rtol=0, atol=bound)
    np.testing.assert_allclose(gradient, right[1], rtol=0, atol=bound)
    silent = ~batch.response_mask | ~keep | (batch.advantages == 0)
    assert (gradient[silent] == 0).all()
    assert np.isfinite(loss).all()


@pytest.mark.parametrize("ratio", [1000.0, -np.inf])
@pytest.mark.parametrize("kept", [True, False])
def test_overflowing_tokens(ratio, kept):
    batch = one_token(k=1, ids=(0,))
    if ratio > 0:
        batch = replace(batch, behavior_logprobs=np.array([[-ratio]]))
    else:
        batch = one_token(pi=(0.5, 0.0, 0.5, 0, 0), k=1, ids=(0,))
    loss, gradient = loss_of(batch, np.full((1, 1), kept), aggregation="token-mean")
    assert np.isfinite(loss).all()
    assert np.isfinite(gradient).all()
    if not kept or ratio < 0:
        assert loss == 0
        assert (gradient == 0).all()
    right = losses.policy_loss(batch, np.full((1, 1), kept))
    np.testing.assert_allclose(gradient, right[1], rtol=64 * 2.0**-53)


def test_nothing_valid_gives_zero_and_not_nan():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for aggregation in losses.AGGREGATIONS:
        assert (torch_eager.aggregate(torch.zeros(2, 3), nothing, aggregation) == 0).all()


def test_a_divergence_without_a_stable_form(monkeypatch):
    formula = _formulas.DIVERGENCES["tv"]
    twice = formula._replace(
        name="twice-tv",
        cell=lambda mu, pi, xp=np: 2 * formula.cell(mu, pi, xp),
        moment=lambda mu, pi, xp=np: 2 * formula.moment(mu, pi, xp),
    )
    monkeypatch.setitem(DIVERGENCES._entries, "twice-tv", twice)
    batch = family("peaked", vocab_size=64, top_k=8)
    rows, valid = batch.rows(), batch.response_mask
    assert "twice-tv" not in STABLE
    for partition in TAILS:
        options = {"compute_dtype": torch.float64, "partition": partition, **behavior(batch)}
        cells = build(rows, partition)
        budgets = StrictBudgets(rows, partition, "append", 2.0**-53, "complement", cells)
        d = torch_eager.divergence(*inputs(batch), name="twice-tv", **options).numpy()[valid]
        c = torch_eager.coefficient(*inputs(batch), name="twice-tv", **options).numpy()[valid]
        # both sides round: twice the budget
        assert (
            np.abs(d - masks.divergence(cells, "twice-tv")) <= 2 * budgets.divergence("twice-tv")
        ).all()
        assert (
            np.abs(c - masks.coefficient(cells, "twice-tv"))
            <= 2 * budgets.coefficient("twice-tv", "exact")
        ).all()


def test_torch_is_all_it_needs():
    script = textwrap.dedent(
        """
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"flint", "scipy", "rich", "ml_dtypes", "safetensors"}:
                    raise ImportError(f"{name} is blocked")
                return None

        sys.meta_path.insert(0, Block())
        import torch
        from pdverify.backends.torch_eager import policy_loss, predictive_mask

        logits = torch.zeros(1, 2, 5, requires_grad=True)
        tokens = torch.tensor([[0, 1]])
        advantages = torch.tensor([[1.0, -1.0]])
        behavior = torch.tensor([[[3.0, 0, 0, 0, 0], [0, 3.0, 0, 0, 0]]])
        keep = predictive_mask(logits, tokens, advantages, behavior_logits=behavior)
        stored = behavior.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        policy_loss(logits, tokens, advantages, stored, keep).backward()
        print(keep.tolist())
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # the sampled token has lost mass: raising it comes back, lowering it goes further out
    assert done.stdout.strip() == "[[True, False]]"
