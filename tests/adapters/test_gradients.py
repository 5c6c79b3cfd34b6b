"""The score-function form of a surrogate."""

from __future__ import annotations

import torch

from pdverify.adapters.gradients import score_form


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    return logprobs, torch.tensor([[True, True, False]])


def test_the_gradient_is_that_of_the_surrogate_and_the_value_goes_with_it() -> None:
    logprobs, valid = _inputs()
    ratio = torch.exp(logprobs - torch.tensor([[-1.5, -1.0, -0.5]]))
    advantages = torch.tensor([[1.0, -2.0, 0.5]])
    loss = -(ratio * advantages * valid).sum()
    expected = -(ratio * advantages * valid).detach()
    form = score_form(loss, logprobs, valid)
    (gradient,) = torch.autograd.grad(form, logprobs)
    assert torch.equal(gradient, expected)
    assert torch.equal(form.detach(), (expected * logprobs.detach())[valid].sum())


def test_a_leak_on_padding_stays_visible_in_the_gradient_alone() -> None:
    logprobs, valid = _inputs()
    form = score_form((3.0 * logprobs).sum(), logprobs, valid)
    assert form.item() == 3.0 * (-1.0 - 2.0)
    (gradient,) = torch.autograd.grad(form, logprobs)
    assert torch.equal(gradient, torch.full((1, 3), 3.0))


def test_nan_on_padding_leaves_the_value_alone() -> None:
    logprobs = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    form = score_form((2.0 * logprobs).sum(), logprobs, torch.tensor([[True, False]]))
    assert form.item() == -2.0


def test_without_a_gradient_the_loss_is_handed_back() -> None:
    logprobs, valid = _inputs()
    loss = logprobs.sum()
    with torch.no_grad():
        assert score_form(loss, logprobs, valid) is loss
    assert score_form(torch.zeros(()), logprobs, valid).item() == 0.0
