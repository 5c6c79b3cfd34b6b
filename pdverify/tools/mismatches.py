"""Real ways in which a rollout's policy differs from the policy being trained.

Each entry of `MISMATCHES` rolls out from the behavior side and names the training model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdverify.registry import Registry
from pdverify.tools.lm import Workbench
from pdverify.tools.rollout import (
    Float64,
    RollOut,
    Rollout,
    generate,
    generate_llama_cpp,
    log_softmax,
    teacher_forced,
)

STALE_STEPS = 3
STALE_LEARNING_RATE = 4e-5
TEMPERATURE = 0.7
TOP_P = 0.8


@dataclass(frozen=True)
class Mismatch:
    """One real way in which rollout and training differ.

    Attributes:
        summary: one line, for tables and for a recording's provenance.
        roll_out: samples from the behavior policy.
        training: the model whose logits are the training policy's.
        needs_engine: llama-cpp-python is wanted.
    """

    summary: str
    roll_out: RollOut
    training: Callable[[Workbench], Any]
    needs_engine: bool = False


MISMATCHES: Registry[Mismatch] = Registry("mismatch")


def advantages_of(count: int, rng: np.random.Generator) -> Float64:
    """`[count]` standard normal rewards, normalized to mean 0 and standard deviation 1."""
    rewards = rng.standard_normal(count)
    return rewards if count == 1 else (rewards - rewards.mean()) / rewards.std()


def nucleus(logits: Float64, top_p: float) -> Float64:
    """`logits` `[..., V]` with -inf outside the smallest set of mass >= `top_p`.

    Ties at the border are broken by lowest id.
    """
    order = np.argsort(-logits, axis=-1, kind="stable")
    p = np.exp(log_softmax(np.take_along_axis(logits, order, axis=-1)))
    outside = np.empty(logits.shape, dtype=bool)
    np.put_along_axis(outside, order, np.cumsum(p, axis=-1) - p >= top_p, axis=-1)
    return np.where(outside, -np.inf, logits)


def fp8_round_trip(weight: Any) -> Any:
    """`weight` `[out, in]` (torch) quantized to e4m3fn with one float scale per row, and back.

    The scale maps the row's largest magnitude to 448, the largest finite e4m3fn value, so nothing
    overflows; an all-zero row has scale 1.
    """
    import torch

    kind = torch.float8_e4m3fn
    largest = torch.finfo(kind).max
    amax = weight.abs().amax(dim=1, keepdim=True)
    scale = torch.where(amax > 0, amax / largest, torch.ones_like(amax))
    return (weight / scale).clamp(-largest, largest).to(kind).to(weight.dtype) * scale


def _base(bench: Workbench) -> Any:
    return bench.model


def _bf16(bench: Workbench) -> Any:
    def make() -> Any:
        import torch

        return copy.deepcopy(bench.model).to(torch.bfloat16)

    return bench.once("bf16", make)


def _fp8(bench: Workbench) -> Any:
    """A copy whose linear layers, but not the tied embedding, went through fp8 weights."""

    def make() -> Any:
        import torch

        model = copy.deepcopy(bench.model)
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(fp8_round_trip(module.weight))
        return model

    return bench.once("fp8", make)


def nearly_trained(bench: Workbench) -> Any:
    """A copy after `STALE_STEPS` AdamW steps of policy gradient on one rollout of its own."""

    def make() -> Any:
        import torch

        rng = bench.rng("stale")
        rollout = generate(bench, bench.model, [8] * 4, rng, "fp32", int(rng.integers(1000)))
        tokens = torch.tensor([t for row in rollout.tokens for t in row])
        weights = torch.tensor(
            np.repeat(advantages_of(len(rollout.tokens), rng), [len(t) for t in rollout.tokens])
        )
        model = copy.deepcopy(bench.model).requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=STALE_LEARNING_RATE)
        for _ in range(STALE_STEPS):
            logits = torch.cat(list(teacher_forced(model, rollout)))
            logprobs = torch.log_softmax(logits, dim=-1)[torch.arange(len(tokens)), tokens]
            optimizer.zero_grad()
            loss: Any = -(weights * logprobs).mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        return model.requires_grad_(False)

    return bench.once("stale", make)


def _sampled_from(
    model: Callable[[Workbench], Any], warp: Callable[[Float64], Float64] | None = None
) -> RollOut:
    def roll_out(
        bench: Workbench,
        lengths: Sequence[int],
        rng: np.random.Generator,
        top_k: int,
        dtype: str,
        first_prompt: int,
    ) -> Rollout:
        return generate(bench, model(bench), lengths, rng, dtype, first_prompt, warp)

    return roll_out


MISMATCHES.add(
    "stale",
    Mismatch(
        f"training is {STALE_STEPS} AdamW policy-gradient steps (lr {STALE_LEARNING_RATE:g}) ahead",
        _sampled_from(_base),
        nearly_trained,
    ),
)
MISMATCHES.add(
    "bf16-rollout",
    Mismatch("same weights; the rollout runs in bf16", _sampled_from(_bf16), _base),
)
MISMATCHES.add(
    "fp8-weights",
    Mismatch(
        "the rollout's linear layers have e4m3fn weights with one float scale per row",
        _sampled_from(_fp8),
        _base,
    ),
)
MISMATCHES.add(
    "temperature",
    Mismatch(
        f"one-sided temperature: behavior logits divided by {TEMPERATURE}, training raw",
        _sampled_from(_base, lambda logits: logits / TEMPERATURE),
        _base,
    ),
)
MISMATCHES.add(
    "top-p",
    Mismatch(
        f"one-sided truncation: behavior -inf outside the top-p {TOP_P} nucleus, training raw",
        _sampled_from(_base, lambda logits: nucleus(logits, TOP_P)),
        _base,
    ),
)
MISMATCHES.add(
    "stale+fp8",
    Mismatch("fp8-weights and stale together", _sampled_from(_fp8), nearly_trained),
)
MISMATCHES.add(
    "llama.cpp",
    Mismatch(
        "same GGUF file; the rollout is llama.cpp, of which only top lists are seen",
        generate_llama_cpp,
        _base,
        needs_engine=True,
    ),
)
