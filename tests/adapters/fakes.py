"""Stand-ins for the frameworks' modules: the definitions, in each framework's calling form.

A right stand-in behind an adapter conforms only if the adapter passes every argument to its place.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def drops(kind: str, lp: Tensor, lm: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """Bool `[...]`: the token is dropped, by the definition."""
    bound = torch.where(a > 0, high, low)
    outward = a.sign() * (lp - lm) > 0
    if kind == "clip":
        r = torch.exp((lp - lm).clamp(max=80))
        return torch.where(a > 0, r > 1 + high, r < 1 - low) & (a != 0)
    if kind == "tv":
        return ((lp.exp() - lm.exp()).abs() > bound) & outward
    mu, pi = lm.double().exp(), lp.double().exp()
    rest = (1 - mu) * (torch.log1p(-mu) - torch.log1p(-pi))
    return (mu * (lm - lp).double() + rest > bound) & outward


def token_loss(drop: Tensor, lp: Tensor, lm: Tensor, a: Tensor, cap: float = 1e30) -> Tensor:
    """`-A sg(min(r, cap)) log pi_k` of kept tokens `[...]`, 0 elsewhere."""
    r = torch.exp((lp - lm).clamp(max=69.0)).clamp(max=cap).detach()
    return torch.where(drop | (a * r == 0), 0.0, -a * r * lp)


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid tokens; what stands elsewhere is not touched."""
    valid = mask.bool()
    return torch.where(valid, x, 0.0).sum() / valid.sum()


def _shielded(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [torch.where(mask.bool(), x, torch.zeros_like(x)) for x in tensors]


def verl() -> ModuleType:
    """`verl.trainer.ppo.core_algos`."""

    def policy(kind: str) -> Any:
        def compute(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str,
            config: Any,
        ) -> tuple[Tensor, dict[str, Any]]:
            assert (config.strategy, config.rollout_n) == ("fsdp", 1)
            lp, lm, a = _shielded(response_mask, log_prob, old_log_prob, advantages)
            cap, low, high = 1e30, config.clip_ratio_low, config.clip_ratio_high
            if kind == "cispo":
                assert low == 1.0
                drop, cap = torch.zeros_like(a, dtype=torch.bool), 1 + high
            else:
                drop, cap = drops(kind, lp, lm, a, low, high), config.clip_ratio_c
            loss = token_loss(drop, lp, lm, a, cap)
            if loss_agg_mode == "token-mean":
                return mean(loss, response_mask), {}
            assert loss_agg_mode == "seq-mean-token-mean"
            lengths = response_mask.sum(-1)
            rows = (loss * response_mask).sum(-1) / lengths.clamp(min=1)
            return rows.sum() / (lengths > 0).sum(), {}

        return compute

    module = ModuleType("verl.trainer.ppo.core_algos")
    module.ActorConfig = SimpleNamespace  # type: ignore[attr-defined]
    for name, kind in {
        "dppo_tv": "tv",
        "dppo_kl": "kl",
        "vanilla": "clip",
        "cispo": "cispo",
    }.items():
        setattr(module, f"compute_policy_loss_{name}", policy(kind))
    return module


def skyrl() -> ModuleType:
    """`skyrl.backends.skyrl_train.utils.ppo_utils`."""

    def reduction(advantages: Tensor, mask: Tensor, loss_reduction: str, **sizes: int) -> Tensor:
        assert loss_reduction == "token_mean"
        assert sizes == {"micro_batch_size": len(mask), "max_seq_len": mask.shape[-1]}
        return advantages / mask.sum()

    def policy(bounds: Any) -> Any:
        def compute(
            lp: Tensor,
            lm: Tensor,
            a: Tensor,
            config: Any,
            loss_mask: Tensor,
            rollout_logprobs: None,
        ) -> tuple[Tensor, dict[str, Any]]:
            assert rollout_logprobs is None
            lp, lm, a = _shielded(loss_mask, lp, lm, a)
            kind, low, high = bounds(config)
            if kind == "cispo":
                assert low == 1.0
                drop, cap = torch.zeros_like(a, dtype=torch.bool), 1 + high
            else:
                drop, cap = drops(kind, lp, lm, a, low, high), 1e30
            return token_loss(drop, lp, lm, a, cap).sum(), {}

        return compute

    module: Any = ModuleType("skyrl.backends.skyrl_train.utils.ppo_utils")
    module.apply_loss_reduction_to_advantages_minibatch = reduction
    module.dppo_policy_loss = policy(
        lambda c: (c.dppo.dppo_type.removeprefix("binary_"), c.dppo.delta_low, c.dppo.delta_high)
    )
    module.ppo_policy_loss = policy(lambda c: ("clip", c.eps_clip_low, c.eps_clip_high))
    module.compute_policy_loss_cispo = policy(
        lambda c: ("cispo", c.cispo.cispo_eps_clip_low, c.cispo.cispo_eps_clip_high)
    )
    return module


def trl() -> ModuleType:
    """`trl.trainer.grpo_trainer`."""

    class GRPOTrainer:
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            me: Any = self
            mask, a = inputs["completion_mask"], inputs["advantages"]
            lp, _, _ = me._get_per_token_logps_and_entropies(model)
            lp, lm, a = _shielded(mask, lp, inputs["old_per_token_logps"], a)
            if me.loss_type == "cispo":
                drop, cap = torch.zeros_like(a, dtype=torch.bool), me.epsilon_high
            else:
                drop, cap = drops("clip", lp, lm, a, me.epsilon_low, me.epsilon_high), 1e30
            loss = torch.where(mask.bool(), token_loss(drop, lp, lm, a, cap), 0.0)
            return loss.sum() / inputs["num_items_in_batch"]

    module: Any = ModuleType("trl.trainer.grpo_trainer")
    module.GRPOTrainer = GRPOTrainer
    return module


def trl_dppo() -> ModuleType:
    """`trl.experimental.dppo.dppo_trainer`."""

    class DPPOTrainer:
        def _compute_divergence_mask(
            self, lp: Tensor, lm: Tensor, a: Tensor, mask: Tensor, top_lp: Any, top_lm: Any
        ) -> Tensor:
            me: Any = self
            lp, lm, a = _shielded(mask, lp, lm, a)
            view, kind = me.divergence_type.split("_")
            if view == "binary":
                drop = drops(kind, lp, lm, a, me.epsilon_low, me.epsilon_high)
                return (~drop).float() * mask
            pi, mu = (torch.exp(x.double()) for x in (top_lp, top_lm))
            pi_rest, mu_rest = ((1 - x.sum(-1, keepdim=True)).clamp(min=1e-30) for x in (pi, mu))
            pi, mu = torch.cat([pi, pi_rest], -1), torch.cat([mu, mu_rest], -1)
            cells = (pi - mu).abs() / 2 if kind == "tv" else torch.xlogy(mu, mu / pi)
            bound = torch.where(a > 0, me.epsilon_high, me.epsilon_low)
            drop = (cells.sum(-1) > bound) & (a.sign() * (lp - lm) > 0)
            return (~drop).float() * mask

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            me: Any = self
            mask, a = inputs["completion_mask"], inputs["advantages"]
            lm, top = inputs["sampling_per_token_logps"], None
            if "sampling_topk_token_ids" in inputs:
                lp, _, top = me._get_per_token_logps_with_topk(model)
            else:
                lp, _, _ = me._get_per_token_logps_and_entropies(model)
            keep = self._compute_divergence_mask(
                lp, lm, a, mask, top, inputs.get("sampling_topk_logps")
            )
            lp, lm, a = _shielded(mask, lp, lm, a)
            loss = token_loss(keep == 0, lp, lm, a, me.clip_ratio_c)
            return torch.where(mask.bool(), loss, 0.0).sum() / inputs["num_items_in_batch"]

    module: Any = ModuleType("trl.experimental.dppo.dppo_trainer")
    module.DPPOTrainer = DPPOTrainer
    return module


def openrlhf() -> ModuleType:
    """`openrlhf.models.loss`, whose gate has a direction criterion here."""

    class PolicyLoss:
        def __init__(self, **settings: Any) -> None:
            self.settings = settings

        def __call__(
            self,
            lp: Tensor,
            old: Tensor,
            a: Tensor,
            mask: Tensor,
            rollout_log_probs: Tensor | None = None,
        ) -> tuple[Tensor, None]:
            s = self.settings
            if rollout_log_probs is None:
                lp, lm, a = _shielded(mask, lp, old, a)
                drop = drops("clip", lp, lm, a, s["clip_eps_low"], s["clip_eps_high"])
            else:
                assert (s["is_correction_level"], s["is_correction_mode"]) == ("token", "mask")
                lp, lm, a = _shielded(mask, lp, rollout_log_probs, a)
                assert torch.equal(_shielded(mask, old)[0], lp)
                assert not old.requires_grad
                low, high = s["is_correction_threshold"]
                assert low == 0.0
                kind = s["is_correction_gating"].removeprefix("binary_")
                drop = drops(kind, lp, lm, a, high, high)
            return mean(token_loss(drop, lp, lm, a), mask), None

    module: Any = ModuleType("openrlhf.models.loss")
    module.PolicyLoss = PolicyLoss
    return module


def liger() -> ModuleType:
    """`liger_kernel.chunked_loss.grpo_loss`."""

    class LigerFusedLinearGRPOFunction:
        @staticmethod
        def ppo_loss_fn(
            per_token_logps: Tensor,
            attention_mask: Tensor,
            advantages: Tensor,
            full_attention_mask: Tensor,
            *,
            old_per_token_logps: Tensor,
            epsilon_low: float,
            epsilon_high: float,
            beta: float,
            loss_type: str,
        ) -> tuple[Tensor, list[Tensor]]:
            assert beta == 0.0
            assert advantages.ndim == 1
            lp, lm, a = _shielded(
                attention_mask, per_token_logps, old_per_token_logps, advantages[:, None]
            )
            if loss_type == "cispo":
                drop, cap = torch.zeros_like(a, dtype=torch.bool), epsilon_high
            else:
                drop, cap = drops("clip", lp, lm, a, epsilon_low, epsilon_high), 1e30
            loss = torch.where(attention_mask.bool(), token_loss(drop, lp, lm, a, cap), 0.0)
            return loss.sum() / full_attention_mask.sum(), []

    module: Any = ModuleType("liger_kernel.chunked_loss.grpo_loss")
    module.LigerFusedLinearGRPOFunction = LigerFusedLinearGRPOFunction
    return module


def areal() -> ModuleType:
    """`areal.utils.functional.functional`."""

    def ppo_actor_loss_fn(
        *,
        logprobs: Tensor,
        proximal_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        eps_clip: float,
        eps_clip_higher: float,
        loss_mask: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        lp, lm, a = _shielded(loss_mask, logprobs, proximal_logprobs, advantages)
        assert loss_mask.dtype == torch.bool
        drop = drops("clip", lp, lm, a, eps_clip, eps_clip_higher)
        return mean(token_loss(drop, lp, lm, a), loss_mask), {}

    module: Any = ModuleType("areal.utils.functional.functional")
    module.ppo_actor_loss_fn = ppo_actor_loss_fn
    return module


FAKES = {
    "verl": verl,
    "skyrl": skyrl,
    "trl": trl,
    "trl-dppo": trl_dppo,
    "openrlhf": openrlhf,
    "liger": liger,
    "areal": areal,
}
"""Framework -> a function that makes its module."""
