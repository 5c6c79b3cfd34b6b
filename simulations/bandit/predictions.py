"""What each direction says of the next change of a token's divergence.

A *local* prediction takes the token's logits as free; `gram` and `jvp` see how the other tokens'
steps move them through shared parameters (`docs/formulas.md` has the coefficients).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pdverify.backends import torch_eager
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.registry import Registry
from pdverify.rules import Partition, Tail
from simulations.bandit.policies import Params, Policy
from simulations.bandit.rollout import Rollout


@dataclass(frozen=True)
class Step:
    """One update of the training policy on a rollout.

    Attributes:
        policy: the policy.
        before, after: its parameters.
        rows: the rollout whose gradient made the step.
        rate: h of `dz = h A r (e_k - pi)`: how far a token's own gradient moves its own logits
            where they are free (learning rate over batch size, under plain gradient descent).
    """

    policy: Policy
    before: Params
    after: Params
    rows: Rollout
    rate: float

    def logits(self, params: Params) -> Tensor:
        """Training logits at the rollout's tokens, `[S, B, V]`."""
        with torch.no_grad():
            return self.policy.logits(params, self.rows.contexts)

    @property
    def weights(self) -> Tensor:
        """`A r` of each token, `[S, B]`."""
        log_pi = torch.log_softmax(self.logits(self.before), -1)
        log_pi_k = log_pi.gather(-1, self.rows.tokens[..., None])[..., 0]
        return self.rows.advantages * (log_pi_k - self.rows.log_mu_k).exp()


Predict: TypeAlias = Callable[[Step], Tensor]
"""Predicted change of the divergence at each token, `[S, B]`, up to a positive factor."""


@dataclass(frozen=True)
class Prediction:
    """A direction criterion.

    Attributes:
        name: as in tables.
        summary: one line.
        partition: cells of the divergence whose change it predicts; None: of either.
        predict: the prediction.
    """

    name: str
    summary: str
    partition: Partition | None
    predict: Predict


PREDICTIONS: Registry[Prediction] = Registry("prediction")


def slope(rows: Rollout, logits: Tensor, name: str = "kl", partition: Partition = "full") -> Tensor:
    """Gradient of a divergence at the training logits, `[S, B, V]`, nats.

    `h_j - pi_j sum h` with the moments `h = pi g` of the divergence; for the forward KL that is
    `pi - mu`.  In the top-K view the tail is one cell, whose moment its tokens share as they share
    its mass.

    Raises:
        UnknownName: no divergence of that name.
    """
    moment, pi, mu = DIVERGENCES[name].moment, torch.softmax(logits, -1), rows.log_mu.exp()
    if partition == "full":
        h = moment(mu, pi, xp=torch)
    else:
        sampled = torch.zeros_like(mu).scatter_(-1, rows.tokens[..., None], 1.0).bool()
        retained = torch.zeros_like(mu).scatter_(-1, rows.topk_ids, 1.0).bool()
        # listed tokens of probability zero belong to the tail, except the sampled one
        retained = (retained & (mu > 0)) | sampled
        mu_tail, tail = mu.masked_fill(retained, 0.0).sum(-1, True), pi.masked_fill(retained, 0.0)
        pi_tail = tail.sum(-1, True)
        share = moment(mu_tail, pi_tail, xp=torch) / pi_tail.clamp_min(1e-300)
        h = torch.where(retained, moment(mu, pi, xp=torch), tail * share)
    found: Tensor = h - pi * h.sum(-1, keepdim=True)
    return found


def coefficient(step: Step, partition: Partition, tail: Tail | None) -> Tensor:
    """`C` of the forward KL at each token, `[S, B]`."""
    rows = step.rows
    return torch_eager.coefficient(
        step.logits(step.before),
        rows.tokens,
        name="kl",
        partition=partition,
        tail=tail,
        behavior_logits=rows.log_mu,
        behavior_logprobs=rows.log_mu_k,
        topk_ids=rows.topk_ids,
        topk_logprobs=rows.topk_logprobs,
        compute_dtype=torch.float64,
    )


def ratio(step: Step) -> Tensor:
    """PPO and DPPO: away from one, `A (log pi_k - log mu_k)`."""
    log_pi = torch.log_softmax(step.logits(step.before), -1)
    log_pi_k = log_pi.gather(-1, step.rows.tokens[..., None])[..., 0]
    return step.rows.advantages * (log_pi_k - step.rows.log_mu_k)


def second_order(step: Step) -> Tensor:
    """`h C + h^2 Var_pi(e_k - pi) / 2` with the token's own `h = rate A r`, in the full view.

    Source: statement `second-order.kl` of `docs/formulas.md`.
    """
    pi = torch.softmax(step.logits(step.before), -1)
    pi_k = pi.gather(-1, step.rows.tokens[..., None])[..., 0]
    mean = pi_k - (pi * pi).sum(-1)
    variance = pi_k - 2 * pi_k * pi_k + (pi**3).sum(-1) - mean * mean
    h = step.rate * step.weights
    return h * coefficient(step, "full", None) + h * h * variance / 2


def gram(step: Step) -> Tensor:
    """Through the last layer: `sum_t' (h_t . h_t') w_t' (pi_t - mu_t) . (e_k' - pi_t')`.

    Exact to first order for a linear policy, and for free logits, under plain gradient descent.
    """
    rows, logits = step.rows, step.logits(step.before)
    away, pi = slope(rows, logits), torch.softmax(logits, -1)
    columns = rows.tokens[:, None, :].expand(-1, away.shape[1], -1)
    brackets = away.gather(-1, columns) - away @ pi.mT
    kernel = step.policy.kernel(step.before, rows.contexts)
    return (kernel * brackets * step.weights[:, None, :]).sum(-1)


def pushed(step: Step, partition: Partition = "full") -> Tensor:
    """`sum_j (dD / dz_j) dz_j`, dz the actual update pushed through the policy in forward mode.

    Exact to first order for any policy and optimizer.
    """
    change = {name: step.after[name] - p for name, p in step.before.items()}
    moved = forward(
        lambda params: step.policy.logits(params, step.rows.contexts), step.before, change
    )
    logits = step.logits(step.before)
    return (slope(step.rows, logits, partition=partition) * moved).sum(-1)


def forward(function: Callable[[Params], Tensor], params: Params, direction: Params) -> Tensor:
    """Derivative of a function of the parameters along a direction, in forward mode."""
    moved: Tensor = torch.func.jvp(function, (params,), (direction,))[1]
    return moved


def _add(name: str, summary: str, partition: Partition | None, predict: Predict) -> None:
    PREDICTIONS.add(name, Prediction(name, summary, partition, predict))


def _add_tail(tail: Tail) -> None:
    def predict(step: Step) -> Tensor:
        return step.rows.advantages * coefficient(step, "topk", tail)

    _add(tail, f"the top-K coefficient with the {tail} tail", "topk", predict)


_add("ratio", "the sampled token's importance ratio moves away from one", None, ratio)
for _tail in ("aggregated", "uniform", "exact"):
    _add_tail(_tail)
_add(
    "full",
    "the coefficient of the full divergence",
    "full",
    lambda step: step.rows.advantages * coefficient(step, "full", None),
)
_add("second-order", "the same with the curvature of the token's own step", "full", second_order)
_add("gram", "all tokens' steps, through the last layer", "full", gram)
_add("jvp", "the actual update, in forward mode", "full", pushed)
