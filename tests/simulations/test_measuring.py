"""Controls: where theory is exact, what we measure agrees with it, so the measuring is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from simulations import bandit
from simulations.bandit import COUPLED, PREDICTIONS, divergence
from simulations.bandit.coupled import along, preconditioner
from simulations.bandit.optimizers import OPTIMIZERS
from simulations.bandit.predictions import Step, coefficient, slope
from simulations.studies.scenes import Plan, scene

SEEDS = range(8)


def _agreement(step, prediction):
    """Share of tokens whose realized change has the sign that was predicted."""
    before, after = (divergence(step.rows, step.logits(p)) for p in (step.before, step.after))
    moved = (step.rows.advantages != 0) & (after != before)
    right = prediction.sign() == (after - before).sign()
    return float((right & moved).sum() / moved.sum())


def test_a_step_on_one_token_with_free_logits_is_always_predicted():
    plan = Plan(sharing="free", reach=1e-6)
    made = scene(plan, SEEDS, "single")
    for token in (0, 17):
        alone = replace(made, rows=made.rows.take(torch.tensor([token])))
        step = alone.step()
        assert _agreement(step, PREDICTIONS["full"].predict(step)) == 1.0


def test_a_step_of_the_head_alone_is_predicted_by_gram():
    found = []
    for reach in (1e-2, 1e-4, 1e-6):
        made = scene(Plan(sharing="network", reach=reach), SEEDS, "head")
        step = made.step()
        step = replace(step, after=step.before | {"head": step.after["head"]})
        found.append(_agreement(step, PREDICTIONS["gram"].predict(step)))
    assert found[-1] >= 0.99
    assert found[-1] >= found[0]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_update_in_forward_mode_is_right_as_the_step_shrinks(optimizer):
    found = []
    for reach in (1e-1, 1e-3, 1e-6):
        made = scene(Plan(sharing="network", optimizer=optimizer, reach=reach), SEEDS, "jvp")
        step = made.step()
        found.append(_agreement(step, PREDICTIONS["jvp"].predict(step)))
    assert found[0] < found[-1]
    assert found[-1] >= 0.99


def _phi(update, params, outside, name="kl"):
    logits = update.policy.logits(params, update.rows.contexts)
    return (divergence(update.rows, logits, name) * outside).sum(-1)


def test_with_free_logits_the_coupled_score_is_the_coefficient():
    made = scene(Plan(sharing="free"), SEEDS, "coupled")
    update = made.update()
    now = Step(made.policy, made.params, made.params, made.rows, made.rate)
    outside = (divergence(made.rows, update.logits) > 0.05).double()
    local = now.weights * coefficient(now, "full", None) * outside
    assert (outside > 0).any()
    for name in ("predictive-kl-coupled", "predictive-kl-coupled/last-layer"):
        torch.testing.assert_close(COUPLED[name].score(update, outside), local)


@pytest.mark.parametrize("name", list(COUPLED))
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_coupled_score_is_what_a_tokens_step_does(name, optimizer):
    """Against a central difference along the token's own preconditioned gradient."""
    entry = COUPLED[name]
    plan = Plan(sharing="network", mismatch="stale", distance=8.0, optimizer=optimizer, batch=16)
    made = scene(plan, range(2), "own step")
    update = made.update(resumed=True)
    d = divergence(made.rows, update.logits, entry.divergence)
    outside = torch.where(d > d.median(), d if entry.hinge else 1.0, 0.0)
    score = entry.score(update, outside)
    scales = preconditioner(update.optimizer)
    assert (optimizer == "adam") == any((s != 1).any() for s in scales)
    for token in (0, 5):
        given = {n: p.clone().requires_grad_() for n, p in update.params.items()}
        log_pi = torch.log_softmax(update.policy.logits(given, made.rows.contexts), -1)
        own = log_pi.gather(-1, made.rows.tokens[..., None])[:, token, 0]
        grads = torch.autograd.grad(own.sum(), list(given.values()))
        frozen = entry.layers == "last"
        ends = []
        for h in (1e-6, -1e-6):
            moved = {
                n: update.params[n] + h * g * s * (n == "head" or not frozen)
                for n, g, s in zip(given, grads, scales, strict=True)
            }
            ends.append(_phi(update, moved, outside, entry.divergence))
        ratio = (own.detach() - made.rows.log_mu_k[:, token]).exp()
        expected = made.rows.advantages[:, token] * ratio * (ends[0] - ends[1]) / 2e-6
        torch.testing.assert_close(score[:, token], expected, rtol=1e-4, atol=1e-8)


def test_a_coupled_mask_drops_by_scope_and_nothing_without_tokens_outside():
    made = scene(Plan(sharing="network", mismatch="stale", distance=8.0), SEEDS, "scope")
    update = made.update()
    outside = divergence(made.rows, update.logits) > 0.05
    inner = COUPLED["predictive-kl-coupled"].decide(0.05)(update)
    wide = COUPLED["predictive-kl-coupled/any"].decide(0.05)(update)
    assert (inner | outside).all()
    assert not (wide | outside).all()
    assert torch.equal(inner & outside, wide & outside)
    assert COUPLED["predictive-kl-coupled/any"].decide(1e9)(update).all()


def test_pushing_along_a_gradient_is_symmetric():
    """The same product either way: of one token's gradient with that of another."""
    made = scene(Plan(sharing="network", batch=4), range(1), "symmetric")
    update = made.update()
    away = slope(made.rows, update.logits)
    one, two = (torch.zeros_like(away).index_fill_(1, torch.tensor(t), 1.0) for t in (0, 3))
    first = (along(update, away * one) * away * two).sum()
    second = (along(update, away * two) * away * one).sum()
    torch.testing.assert_close(first, second)
    assert first != 0


def test_coupled_masks_train():
    setting = bandit.Setting(
        contexts=6, vocab_size=12, prompts=4, group=4, rollouts=2, staleness=4, rate=0.1
    )
    decide = COUPLED["predictive-kl-coupled"].decide(0.01)
    history = bandit.train(setting, decide, range(2))
    assert (history.dropped > 0).any()
    assert history.reward.isfinite().all()
