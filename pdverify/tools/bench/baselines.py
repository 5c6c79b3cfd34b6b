"""What people write today: log-softmaxes materialized in fp32, then `exp` and sums.

Kept as it is found in training code, not tuned and not in stable forms: what backends are
compared with, in speed, memory and accuracy.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pdverify.definitions.divergences import DIVERGENCES
from pdverify.tools.bench.inputs import Inputs
from pdverify.tools.bench.workloads import Workload

ROWS = 8
"""Rows at a time of the variant that does not thrash memory."""

HEAD_ROWS = 256
"""The same behind a head: fewer would read the head again and again."""

RATIO_CAP = 20.0

FLOOR = 1e-8
"""The least tail mass, in code that takes tails by `1 - sum`."""

Outcome: TypeAlias = dict[str, Tensor]
"""Some of `divergence`, `coefficient`, `keep`, `log_prob`, `loss`, `[1, T]`, and `gradient` of the
summed loss at the logits, `[1, T, V]`."""


def materialized(workload: Workload, inputs: Inputs, form: torch.dtype = torch.float32) -> Outcome:
    """Both policies' log-probs as `[T, V]` fp32 tensors, and everything else from them.

    `form` is the format of the softmaxes: a narrow one is planted, to be found inaccurate.
    """
    if workload.kind == "head":
        return {"log_prob": _log_prob(inputs.hidden @ inputs.head.T, inputs.tokens)}
    with torch.no_grad():
        outcome = _mask(workload, inputs, form)
    if workload.kind == "mask":
        return outcome
    logits = inputs.logits.detach().requires_grad_()
    log_pi = _log_prob(logits, inputs.tokens)
    ratio = (log_pi.detach() - inputs.behavior_logprobs).exp().clamp(max=RATIO_CAP)
    loss = -inputs.advantages * ratio * log_pi * outcome["keep"]
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return {"loss": loss.detach(), "gradient": gradient}


def by_rows(workload: Workload, inputs: Inputs) -> Outcome:
    """`materialized`, a few rows at a time: its temporaries stay in the cache."""
    count = inputs.tokens.shape[1]
    step = HEAD_ROWS if workload.kind == "head" else ROWS
    whole: Outcome = {}
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        for name, x in materialized(workload, inputs.rows(rows)).items():
            if start == 0:
                whole[name] = x.new_empty(1, count, *x.shape[2:])
            whole[name][:, rows] = x
    return whole


def top_k_by_frameworks(workload: Workload, inputs: Inputs) -> Outcome:
    """The top-K divergence as training frameworks have it: gather, and tails by `1 - sum`.

    The coefficient takes the aggregated tail, which needs nothing beyond the gathered log-probs.
    """
    log_pi = torch.log_softmax(inputs.logits.float(), dim=-1)
    ids, mu, used = _support(inputs)
    pi = log_pi.gather(-1, ids).exp() * used
    pi_tail = (1 - pi.sum(-1)).clamp(min=FLOOR)
    return _from_support(workload, inputs, pi, mu, pi_tail, pi_tail * pi_tail)


def fused_cross_entropy(package: str, workload: Workload, inputs: Inputs) -> Outcome:
    """The fused linear cross-entropy of cut-cross-entropy or Liger-Kernel."""
    hidden, head, tokens = inputs.hidden, inputs.head, inputs.tokens
    with torch.no_grad():
        if package == "cut-cross-entropy":
            module = importlib.import_module("cut_cross_entropy")
            implementation = "cce" if hidden.is_cuda else "torch_compile"
            given = {"reduction": "none", "impl": implementation}
            return {"log_prob": -module.linear_cross_entropy(hidden, head, tokens, **given)}
        module = importlib.import_module("liger_kernel.transformers.functional")
        loss = module.liger_fused_linear_cross_entropy(hidden[0], head, tokens[0], reduction="none")
        return {"log_prob": -loss[None]}


def missing(package: str) -> str | None:
    """Why a package (or triton, which it imports on any device) cannot be used, or None."""
    for name in (package, "triton"):
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            return f"{name} is not installed: pip install {name}"
    return None


def _log_prob(logits: Any, tokens: Tensor) -> Tensor:
    log_pi = torch.log_softmax(logits.float(), dim=-1)
    return log_pi.gather(-1, tokens[..., None])[..., 0]


def _mask(workload: Workload, inputs: Inputs, form: torch.dtype) -> Outcome:
    log_pi = torch.log_softmax(inputs.logits.to(form), dim=-1).float()
    if workload.view == "topk":
        ids, mu, used = _support(inputs)
        full = log_pi.exp()
        pi = full.gather(-1, ids) * used
        pi_tail = (1 - pi.sum(-1)).clamp(min=FLOOR)
        tail_square = ((full * full).sum(-1) - (pi * pi).sum(-1)).clamp(min=0)
        return _from_support(workload, inputs, pi, mu, pi_tail, tail_square)
    log_mu = torch.log_softmax(inputs.behavior_logits.to(form), dim=-1).float()
    pi, mu, k = log_pi.exp(), log_mu.exp(), inputs.tokens[..., None]
    if workload.divergence == "kl":
        distance = (mu * (log_mu - log_pi)).sum(-1)
        change = _at(pi, k) - _at(mu, k) + (pi * (mu - pi)).sum(-1)
    elif workload.divergence == "reverse-kl":
        gap = log_pi - log_mu
        distance = (pi * gap).sum(-1)
        change = _at(pi, k) * (_at(gap, k) - distance)
        change = change - (pi * pi * (gap - distance[..., None])).sum(-1)
    else:
        # C = h_k - sum pi h - hbar (pi_k - sum pi^2), h the moments, hbar their sum
        formula = DIVERGENCES[workload.divergence]
        h = formula.moment(mu, pi, xp=torch)
        distance = formula.cell(mu, pi, xp=torch).sum(-1)
        change = _at(h, k) - (pi * h).sum(-1)
        change = change - h.sum(-1) * (_at(pi, k) - (pi * pi).sum(-1))
    return _decided(workload, inputs, distance, change)


def _at(x: Tensor, k: Tensor) -> Tensor:
    return x.gather(-1, k)[..., 0]


def _support(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, masses and use (1 or 0) of the top-K list with the sampled token appended."""
    k = inputs.tokens[..., None]
    ids = torch.cat([inputs.topk_ids, k], -1)
    log_mu = torch.cat([inputs.topk_logprobs, inputs.behavior_logprobs[..., None]], -1)
    missing = (inputs.topk_ids != k).all(-1, keepdim=True)
    used = torch.cat([torch.ones_like(inputs.topk_logprobs), missing.float()], -1)
    return ids, log_mu.exp() * used, used


def _from_support(
    workload: Workload, inputs: Inputs, pi: Tensor, mu: Tensor, pi_tail: Tensor, square: Tensor
) -> Outcome:
    """D and C from the masses `[1, T, K + 1]` of the support, the tail's, and its `sum pi^2`."""
    mu_tail = (1 - mu.sum(-1)).clamp(min=FLOOR)
    listed = torch.cat([inputs.topk_ids, inputs.tokens[..., None]], -1)
    is_k = (listed == inputs.tokens[..., None]) & (mu > 0)
    pi_k = (pi * is_k).sum(-1)
    if workload.divergence == "kl":
        log_ratio = torch.where(mu > 0, (mu / pi).log(), 0.0)
        distance = (mu * log_ratio).sum(-1) + mu_tail * (mu_tail / pi_tail).log()
        change = pi_k - (mu * is_k).sum(-1) + (pi * (mu - pi)).sum(-1)
        change = change + square * (mu_tail - pi_tail) / pi_tail
        return _decided(workload, inputs, distance, change)
    formula = DIVERGENCES[workload.divergence]
    h, h_tail = (formula.moment(*x, xp=torch) for x in ((mu, pi), (mu_tail, pi_tail)))
    distance = formula.cell(mu, pi, xp=torch).sum(-1) + formula.cell(mu_tail, pi_tail, xp=torch)
    change = (h * is_k).sum(-1) - square / pi_tail * h_tail - (pi * h).sum(-1)
    change = change - (h.sum(-1) + h_tail) * (pi_k - (pi * pi).sum(-1) - square)
    return _decided(workload, inputs, distance, change)


def _decided(workload: Workload, inputs: Inputs, distance: Tensor, change: Tensor) -> Outcome:
    rule = workload.rule()
    delta = torch.where(inputs.advantages > 0, rule.delta_high, rule.delta_low)
    keep = (distance <= delta) | (inputs.advantages * change <= 0)
    return {"divergence": distance, "coefficient": change, "keep": keep}
