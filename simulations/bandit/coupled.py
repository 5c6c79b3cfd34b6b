"""The coupled direction: what each token's part of a step does to the whole region outside.

The predictive mask takes a token's logits as free.  In a policy of shared parameters one step moves
every token's logits, so ask of each token what its part of the step does to
`Phi = sum_{t outside} D_t`.  With the gradient `G` of Phi and the optimizer's preconditioner `P`,
token t moves Phi, to first order, by `eta A r (d log pi_k / d theta) . (P G)`: one backward pass
gives G, one forward-mode pass the number of every token at once.  With free logits and plain
gradient descent it is the predictive mask: `eta A r C` (statements `coupled.shared-parameters` and
`coupled.free-logits` of `docs/formulas.md`).

Under Adam, first order means: the second moments are those before the step.  What the first
moments carry over from earlier steps moves Phi as well, but belongs to no token of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from pdverify.registry import Registry
from pdverify.rules import Partition
from simulations.bandit.learning import Decide, Update
from simulations.bandit.policies import Params
from simulations.bandit.predictions import forward, slope
from simulations.bandit.rollout import divergence

Layers: TypeAlias = Literal["all", "last"]
Scope: TypeAlias = Literal["outside", "any"]


@dataclass(frozen=True)
class Coupled:
    """A mask with the coupled direction.

    Attributes:
        summary: one line.
        divergence, partition: of proximity and direction both.
        layers: which parameters' part of the step is seen; ``last`` needs no pass through the rest.
        scope: whose gradient may be dropped, of tokens outside the trust region or of any.
        hinge: Phi counts `D - delta` of a token's slope instead of each token alike.
    """

    summary: str
    divergence: str = "kl"
    partition: Partition = "full"
    layers: Layers = "all"
    scope: Scope = "outside"
    hinge: bool = False

    def decide(self, delta: float) -> Decide:
        """The mask at a threshold, nats or probability."""

        def decision(update: Update) -> Tensor:
            d = divergence(update.rows, update.logits, self.divergence, self.partition)
            outside = d > delta
            weight = torch.where(outside, d - delta if self.hinge else 1.0, 0.0)
            raises = self.score(update, weight) > 0
            return ~(raises & outside) if self.scope == "outside" else ~raises

        return decision

    def score(self, update: Update, weight: Tensor) -> Tensor:
        """How each token's part of the update moves `Phi = sum weight D`, `[S, B]`.

        Up to a positive factor; `weight` `[S, B]` is held fixed.
        """
        rows, logits = update.rows, update.logits
        away = weight[..., None] * slope(rows, logits, self.divergence, self.partition)
        moved = along(update, away, self.layers)
        log_pi = torch.log_softmax(logits, -1)
        at_k = rows.tokens[..., None]
        motion = moved.gather(-1, at_k)[..., 0] - (log_pi.exp() * moved).sum(-1)
        ratio = (log_pi.gather(-1, at_k)[..., 0] - rows.log_mu_k).exp()
        return rows.advantages * ratio * motion


def along(update: Update, gradient: Tensor, layers: Layers = "all") -> Tensor:
    """How logits move, `[S, B, V]`, when parameters go along a preconditioned gradient.

    `gradient` `[S, B, V]` is that at the logits.
    """

    def logits(params: Params) -> Tensor:
        return update.policy.logits(params, update.rows.contexts)

    backward = torch.func.vjp(logits, update.params)[1]
    (found,) = backward(gradient)
    direction = {
        name: g * scale
        for (name, g), scale in zip(found.items(), preconditioner(update.optimizer), strict=True)
    }
    if layers == "last":
        *rest, _ = direction
        direction |= {name: torch.zeros_like(direction[name]) for name in rest}
    return forward(logits, update.params, direction)


def preconditioner(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What the optimizer multiplies each parameter's gradient by, up to a positive factor.

    `1 / (sqrt(v) + eps)` under Adam, with the bias-corrected second moments v before the step;
    1 under plain gradient descent, with or without momentum, and at Adam's first step, where
    there are none yet.
    """
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if "exp_avg_sq" not in state:
                found.append(torch.ones_like(p))
                continue
            v = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])
            found.append(1 / (v.sqrt() + group["eps"]))
    return found


COUPLED: Registry[Coupled] = Registry("coupled mask")
COUPLED.add(
    "predictive-kl-coupled",
    Coupled("drops what raises the sum of the divergences outside"),
)
COUPLED.add(
    "predictive-kl-coupled/last-layer",
    Coupled("the same, of the last layer's part of the step", layers="last"),
)
COUPLED.add(
    "predictive-kl-coupled/hinge",
    Coupled("each token outside weighs by its excess", hinge=True),
)
COUPLED.add(
    "predictive-kl-coupled/any",
    Coupled("tokens inside may be dropped too", scope="any"),
)
COUPLED.add(
    "predictive-tv-coupled",
    Coupled("the total variation outside instead of the forward KL", divergence="tv"),
)
