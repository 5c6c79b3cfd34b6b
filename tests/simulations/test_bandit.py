"""The simulator: policies, rollouts, masks, updates, and what theory says of them."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from pdverify.backends import torch_eager
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS, TAILS
from pdverify.formats import FORMATS, SCALED
from pdverify.registry import UnknownName
from simulations import bandit
from simulations.bandit import Behavior, Setting, Streams
from simulations.bandit.learning import MULTIPLES, draw_rollout, masked_by
from simulations.bandit.predictions import coefficient, pushed, slope
from simulations.studies.scenes import MISMATCHES, SHARING, Plan, everything, scene

UNIT = 2.0**-53
SMALL = Setting(contexts=6, vocab_size=12, width=5, prompts=3, group=4, rollouts=3, top_k=4)


def _policy(name, seeds=range(3), **sizes):
    sizes = {"contexts": 6, "vocab_size": 12, "width": 5} | sizes
    return bandit.POLICIES[name](Streams(seeds, "test"), **sizes)


@pytest.mark.parametrize("name", list(bandit.POLICIES))
def test_logits_of_a_policy_by_hand(name):
    policy, params = _policy(name)
    contexts = torch.tensor([[0, 5, 2], [1, 1, 3], [4, 0, 0]])
    logits = policy.logits(params, contexts)
    assert logits.shape == (3, 3, 12)
    assert logits.dtype == torch.float64
    for s in range(3):
        for b in range(3):
            x = contexts[s, b]
            if name == "tabular":
                expected = params["table"][s, x]
            else:
                h = policy.features[s, x]
                if name == "network":
                    h = torch.tanh(params["body"][s] @ h) / math.sqrt(5 * 0.3943)
                expected = params["head"][s] @ h
            torch.testing.assert_close(logits[s, b], expected, rtol=0, atol=1e3 * UNIT)


@pytest.mark.parametrize("name", list(bandit.POLICIES))
def test_a_seed_does_not_depend_on_its_batch(name):
    setting = replace(SMALL, policy=name, behavior=Behavior("fp8-row", "bf16"), staleness=2)
    decide = masked_by(bandit.variants()["predictive-kl/topk/exact"].rule(delta=0.02))
    whole = bandit.train(setting, decide, range(4))
    alone = bandit.train(setting, decide, range(2, 3))
    for field, of_all in vars(whole).items():
        torch.testing.assert_close(of_all[2:3], getattr(alone, field), rtol=1e-9, atol=1e-12)


def test_samples_follow_the_policy():
    log_mu = torch.log_softmax(torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf]).double(), -1)
    count = 20_000
    tokens = bandit.sample(
        log_mu.expand(1, count, -1), Streams(range(1), "sample").uniform("u", count)
    )
    seen = torch.bincount(tokens.flatten(), minlength=5).numpy()
    assert seen[4] == 0
    assert chisquare(seen[:4], count * log_mu[:4].exp().numpy()).pvalue > 1e-3


def test_samples_at_the_ends_have_positive_probability():
    log_mu = torch.tensor([-torch.inf, 0.0, -torch.inf]).double().expand(1, 2, -1)
    ends = torch.tensor([[2.0**-54, 1 - 2.0**-53]]).double()
    assert bandit.sample(log_mu, ends).tolist() == [[1, 1]]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", *SCALED])
def test_rounding_is_that_of_the_registry(name):
    x = Streams(range(2), "round").normal("x", 6, 40)
    form = SCALED[name] if name in SCALED else FORMATS[name]
    assert np.array_equal(bandit.rounded(x, name).numpy(), form.round(x.numpy()))


def test_rounded_parameters_pass_gradients_through():
    p = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    used = bandit.straight_through({"p": p}, "fp8-row")["p"]
    assert torch.equal(used.detach(), bandit.rounded(p, "fp8-row"))
    assert not torch.equal(used.detach(), p.detach())
    (used * 3).sum().backward()
    assert torch.equal(p.grad, torch.full_like(p, 3.0))


def test_temperature_and_truncation_of_the_behavior_policy():
    policy, params = _policy("linear")
    contexts = torch.arange(6).expand(3, -1)
    plain = Behavior().log_probs(policy, params, contexts)
    warm = Behavior(temperature=2.0).log_probs(policy, params, contexts)
    torch.testing.assert_close(warm, torch.log_softmax(plain / 2, -1))
    cut = Behavior(top_p=0.7).log_probs(policy, params, contexts)
    kept = cut > -torch.inf
    mass = torch.where(kept, plain.exp(), 0.0).sum(-1)
    assert (mass >= 0.7).all()
    smallest = torch.where(kept, plain, torch.inf).amin(-1).exp()
    assert (mass - smallest < 0.7).all()
    torch.testing.assert_close(cut.exp().sum(-1), torch.ones(3, 6).double())


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_bad_behavior_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Behavior(**bad)


def test_an_unknown_format_is_refused():
    with pytest.raises(UnknownName, match="bf17"):
        Behavior(weights="bf17")


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0]]).double()
    baseline = torch.full_like(rewards, 0.25)
    made = {name: f(rewards, baseline, 4)[0].tolist() for name, f in bandit.ADVANTAGES.items()}
    assert made["group-normalized"] == [1.0, -1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert made["group-centered"] == [0.5, -0.5, -0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert made["plain"] == [0.75, -0.25, -0.25, 0.75, 1.75, 1.75, 1.75, 1.75]


@pytest.mark.parametrize("name", list(bandit.REWARDS))
def test_rewards_are_a_seed_s_own(name):
    table = bandit.REWARDS[name](Streams(range(4), "r"), 5, 30)
    alone = bandit.REWARDS[name](Streams(range(3, 4), "r"), 5, 30)
    assert table.shape == (4, 5, 30)
    assert torch.equal(table[3:], alone)
    drawn = bandit.draw_rewards(
        name,
        table,
        torch.zeros(4, 400, dtype=torch.int64),
        torch.zeros(4, 400, dtype=torch.int64),
        Streams(range(4), "r").uniform("luck", 400),
    )
    # five standard deviations of a mean of 0 or 1; exact for rewards that are not drawn
    assert (drawn.mean(-1) - table[:, 0, 0]).abs().max() <= 2.5 / 20


def test_top_k_must_leave_a_tail():
    log_mu = torch.log_softmax(torch.zeros(1, 2, 4).double(), -1)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="top_k = 4"):
        bandit.rollout(tokens, tokens, log_mu, torch.ones(1, 2).double(), 4)


def test_variants_cover_the_registry():
    found = bandit.variants()
    assert {v.mask.name for v in found.values()} == set(MASKS)
    for tail in TAILS:
        assert f"predictive-kl/topk/{tail}" in found


@pytest.mark.parametrize("name", list(bandit.variants()))
def test_every_variant_decides_as_its_definition(name):
    from pdverify.batch import Rows
    from pdverify.definitions.masks import keep

    made = scene(Plan(vocab_size=30, top_k=5, batch=16, distance=1.0), range(4), "variants")
    rule = bandit.variants()[name].rule(delta=0.1, eta=0.5)
    logits = made.policy.logits(made.params, made.rows.contexts)
    kept = bandit.keep(made.rows, logits, rule)
    flat = Rows(
        index=np.zeros((64, 2), dtype=np.int64),
        tokens=made.rows.tokens.flatten().numpy(),
        advantages=made.rows.advantages.flatten().numpy(),
        vocab_size=30,
        logits=logits.flatten(0, 1).numpy(),
        behavior_logits=made.rows.log_mu.flatten(0, 1).numpy(),
        logprobs=None,
        behavior_logprobs=made.rows.log_mu_k.flatten().numpy(),
        topk_ids=made.rows.topk_ids.flatten(0, 1).numpy(),
        topk_logprobs=made.rows.topk_logprobs.flatten(0, 1).numpy(),
        dtype="fp64",
        logprob_dtype="fp64",
    )
    assert np.array_equal(kept.flatten().numpy(), keep(flat, rule))


def test_the_step_is_that_of_the_policy_loss():
    policy, params = _policy("network")
    setting = replace(SMALL, policy="network")
    streams = Streams(range(3), "test")
    table = bandit.REWARDS["dense"](streams, 6, 12)
    rows = draw_rollout(setting, streams, policy, params, table, 0)
    moved = {n: p + 0.3 * streams.normal(n, *p.shape[1:]) for n, p in params.items()}
    rule = bandit.variants()["predictive-kl/full"].rule(delta=0.05)
    leaves = {n: p.clone().requires_grad_() for n, p in moved.items()}
    kept, _ = bandit.masked_gradient_step(
        policy,
        leaves,
        rows,
        masked_by(rule),
        bandit.OPTIMIZERS["sgd"](leaves, 0.5),
        ratio_cap=2.0,
    )
    assert kept.any()
    assert not kept.all()
    own = {n: p.clone().requires_grad_() for n, p in moved.items()}
    loss = torch_eager.policy_loss(
        policy.logits(own, rows.contexts),
        rows.tokens,
        rows.advantages,
        rows.log_mu_k,
        kept,
        ratio_cap=2.0,
        aggregation="none",
        compute_dtype=torch.float64,
    )
    loss.mean(-1).sum().backward()
    for name in params:
        expected = moved[name] - 0.5 * own[name].grad
        torch.testing.assert_close(leaves[name].detach(), expected, rtol=0, atol=1e4 * UNIT)


@pytest.mark.parametrize("sharing", list(SHARING))
@pytest.mark.parametrize("optimizer", list(bandit.OPTIMIZERS))
def test_jvp_is_the_derivative_along_the_update(sharing, optimizer):
    step = scene(Plan(sharing=sharing, optimizer=optimizer, batch=16), range(2), "jvp").step()
    d = []
    for h in (1e-4, -1e-4):
        at = {n: p + h * (step.after[n] - p) for n, p in step.before.items()}
        d.append(bandit.divergence(step.rows, step.logits(at)))
    slope = (d[0] - d[1]) / 2e-4
    # central difference: rounding of D over h, and curvature times h^2
    torch.testing.assert_close(pushed(step), slope, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("view", ["full", "topk"])
@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_slope_of_the_divergence(name, view):
    step = scene(Plan(batch=8, vocab_size=20, top_k=4), range(2), "slope").step()
    logits = step.logits(step.before)
    away = slope(step.rows, logits, name, view)
    for j in range(20):
        moved = torch.zeros_like(logits)
        moved[..., j] = 1e-5
        up, down = (
            bandit.divergence(step.rows, logits + sign * moved, name, view) for sign in (1, -1)
        )
        torch.testing.assert_close(away[..., j], (up - down) / 2e-5, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sharing", ["free", "table", "linear-16"])
def test_gram_is_exact_where_the_last_layer_is_all(sharing):
    step = scene(Plan(sharing=sharing, batch=16), range(2), "gram").step()
    torch.testing.assert_close(
        bandit.PREDICTIONS["gram"].predict(step) * step.rate, pushed(step), rtol=1e-9, atol=1e-14
    )


def test_free_logits_move_by_the_coefficient():
    step = scene(Plan(sharing="free", batch=16), range(2), "free").step()
    predicted = step.rate * step.weights * coefficient(step, "full", None)
    torch.testing.assert_close(pushed(step), predicted, rtol=1e-9, atol=1e-15)
    coarse = step.rate * step.weights * coefficient(step, "topk", "exact")
    torch.testing.assert_close(pushed(step, "topk"), coarse, rtol=1e-9, atol=1e-15)


def test_a_single_token_s_step_is_predicted_in_every_policy_with_free_logits():
    """The first control: on free logits a small step of one token agrees in sign, always."""
    made = scene(Plan(sharing="free", reach=1e-6), range(16), "control")
    step = made.step()
    change = bandit.divergence(step.rows, step.logits(step.after)) - bandit.divergence(
        step.rows, step.logits(step.before)
    )
    said = step.rows.advantages * coefficient(step, "full", None)
    assert torch.equal(change.sign(), said.sign())


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_every_mismatch_makes_a_scene(mismatch):
    distance = 8.0 if mismatch == "stale" else 0.3
    made = scene(Plan(mismatch=mismatch, distance=distance, batch=16), range(3), "mismatch")
    d = bandit.divergence(made.rows, made.policy.logits(made.params, made.rows.contexts))
    assert (d >= 0).all()
    assert 1e-8 < d.median() < 5
    assert torch.isneginf(made.rows.log_mu).any() == (mismatch == "top-p")


def test_noise_has_the_distance_that_was_asked_for():
    for sharing in SHARING:
        made = scene(Plan(sharing=sharing, distance=0.01), range(8), "distance")
        log_pi = torch.log_softmax(made.policy.logits(made.params, made.rows.contexts), -1)
        gap = (log_pi - made.rows.log_mu).std(dim=-1).mean()
        assert 0.008 < gap < 0.012, sharing


def test_training_learns_and_records():
    setting = replace(SMALL, rollouts=20, policy="tabular", rate=0.2, epochs=2, staleness=4)
    history = bandit.train(setting, everything, range(8))
    assert history.reward.shape == (8, 20)
    assert (history.reward[:, -1] > history.reward[:, 0]).all()
    assert history.beyond.shape == (8, 20, len(MULTIPLES))
    assert (history.beyond.diff(dim=-1) <= 0).all()
    assert (history.quantiles.diff(dim=-1) >= 0).all()
    assert (history.dropped == 0).all()
    assert ((history.effective > 0) & (history.effective <= 1 + 8 * UNIT)).all()
    assert (history.divergence >= 0).all()
    assert (history.entropy >= 0).all()


def test_a_mask_that_drops_everything_leaves_the_policy_alone():
    history = bandit.train(
        SMALL, lambda update: torch.zeros_like(update.rows.tokens, dtype=torch.bool), range(2)
    )
    assert (history.dropped == 1).all()
    assert torch.equal(history.reward[:, 0], history.reward[:, -1])


@pytest.mark.parametrize("kind", ["policy", "reward", "advantage", "optimizer"])
def test_unknown_names_are_refused(kind):
    with pytest.raises(UnknownName, match="nothing"):
        bandit.train(replace(SMALL, **{kind: "nothing"}), everything, range(1))


def test_the_stale_policy_is_that_many_updates_behind():
    seen = []

    def watch(update):
        seen.append((update.rows.log_mu, torch.log_softmax(update.logits, -1)))
        return everything(update)

    setting = replace(SMALL, policy="tabular", contexts=1, prompts=1, minibatches=1, epochs=1)
    for staleness in (0, 2):
        seen.clear()
        bandit.train(replace(setting, staleness=staleness, rollouts=6), watch, range(1))
        for update, (log_mu, _) in enumerate(seen):
            sampled_by = max(update - staleness, 0)
            torch.testing.assert_close(log_mu[0, 0], seen[sampled_by][1][0, 0])


def _seconds(setting, seeds):
    decide = masked_by(bandit.variants()["predictive-kl/topk/exact"].rule(delta=0.15))
    started = time.perf_counter()
    bandit.train(setting, decide, seeds)
    return time.perf_counter() - started


def test_a_batch_of_seeds_is_cheaper_than_its_seeds():
    setting = Setting(
        policy="linear", width=8, contexts=4, prompts=1, group=4, optimizer="sgd", epochs=1,
        vocab_size=1_000, top_k=20, rollouts=4, staleness=0,
    )  # fmt: skip
    _seconds(setting, range(64))
    ratios = []
    for _ in range(5):
        together = _seconds(setting, range(64))
        # eight of the 64, spread over them: each is a run of its own
        apart = 8 * sum(_seconds(setting, range(s, s + 1)) for s in range(0, 64, 8))
        ratios.append(apart / together)
    assert statistics.median(ratios) >= 5


def test_time_grows_no_faster_than_linearly_in_the_vocabulary():
    setting = Setting(
        policy="linear", width=4, contexts=4, prompts=2, group=4, optimizer="sgd", epochs=1,
        top_k=20, rollouts=2, staleness=0,
    )  # fmt: skip
    sizes = (12_500, 100_000)
    times = {v: [] for v in sizes}
    for _ in range(3):
        for v in sizes:
            times[v].append(_seconds(replace(setting, vocab_size=v), range(2)))
    growth = statistics.median(times[sizes[1]]) / statistics.median(times[sizes[0]])
    # eight times the arms; caches that overflow may cost half as much again
    assert growth <= 12
