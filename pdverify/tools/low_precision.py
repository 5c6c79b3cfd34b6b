"""The precision study as a whole: synthetic inputs, recordings, and the real model's rollouts.

The real input has the model's own tokens: `mu` is SmolLM2 in fp32, `pi` the same after a few
optimizer steps, both taken as exact.  On the same prefixes the rollout then runs again in every
number format: its last product alone, the weights of its layers, or weights and activations.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdverify.batch import InputError, Rows
from pdverify.conformance.truth import Progress
from pdverify.conformance.versions import versions
from pdverify.definitions.cells import build as cells_of
from pdverify.definitions.cells import log_softmax
from pdverify.definitions.masks import MASKS, TAILS, coefficient, divergence, keep
from pdverify.precision.casts import torch_round
from pdverify.precision.records import DropRate, Options, Report, RolloutRow
from pdverify.precision.side_by_side import compare_forms
from pdverify.precision.stages import STAGES, Setting, Source, exact_rows
from pdverify.precision.statistics import middle_of, rate, rate_of
from pdverify.precision.study import INPUTS, Found, check, source_from, study
from pdverify.rules import Tail
from pdverify.tools.lm import Workbench, load_workbench, one_thread, why_unavailable
from pdverify.tools.mismatches import advantages_of, nearly_trained
from pdverify.tools.rollout import Float64, Rollout, draw, generate, teacher_forced

REAL_TOKENS = {"quick": 16, "full": 192}
LENGTH = 32
"""Tokens of a response."""

DELTA = 0.05
"""Threshold of the rollout table, nats: real policies that are a few steps apart lie around it."""

TOP_K = 20

LAYER_STAGES = ("rollout-weights", "rollout")


def run(options: Options, progress: Progress) -> Report:
    """The study on every input, the forms side by side, and rollouts of the real model.

    Raises:
        InputError: a recording that cannot be read or has one policy only, or stages and formats
            that do not fit each other or the inputs.
        UnknownName: a format, stage, divergence or family that is in no registry.
        ModelUnavailable: the input ``real`` was asked for and the model is missing.
    """
    started = time.perf_counter()
    check(options)
    found: list[Found] = []
    by_vocab: dict[str, int] = {}
    rollouts: list[RolloutRow] = []
    notes = []
    for name in options.inputs or INPUTS[options.level]:
        if name == "real" and not options.inputs and why_unavailable() is not None:
            notes.append(f"input real was left out: {why_unavailable()}")
            continue
        for source in _sources(name, options, progress):
            new = study(source, options, progress)
            key = str(source.vocab_size)
            by_vocab[key] = by_vocab.get(key, 0) + sum(x.decisions for x in new)
            found += new
            if source.rollouts:
                rollouts += rollout_rows(source, options.seed)
    if not found:
        raise InputError("--stage", None, " ".join(options.stages), "no stage and format fits")
    if not rollouts:
        stages = ", ".join(name for name, stage in STAGES.items() if stage.model)
        notes.append(f"{stages}: only with input real, whose model runs again in every format")
    return Report(
        rows=tuple(x.row for x in found),
        forms=tuple(compare_forms(options, progress)) if not options.stages else (),
        rollouts=tuple(rollouts),
        decisions=sum(x.decisions for x in found),
        close=sum(x.close for x in found),
        by_vocab=by_vocab,
        wrong=sum(x.row.wrong for x in found),
        seed=options.seed,
        level=options.level,
        command=options.command,
        versions=versions(),
        device=f"cpu, {os.cpu_count()} cores",
        seconds=time.perf_counter() - started,
        notes=tuple(notes),
    )


def _sources(name: str, options: Options, progress: Progress) -> Iterator[Source]:
    if name != "real":
        yield from source_from(name, options)
        return
    tokens = options.tokens or REAL_TOKENS[options.level]
    formats = set(options.formats) if options.formats else None
    with one_thread():
        yield real_source(tokens, options.seed, formats, progress)


@dataclass(frozen=True)
class _Headed:
    """A model's layers under another last product."""

    model: Any
    lm_head: Any


def real_source(tokens: int, seed: int, formats: set[str] | None, progress: Progress) -> Source:
    """`tokens` of the real model, and its rollouts in `formats` (None: all of the stages').

    Raises:
        ModelUnavailable: with the reason.
    """
    bench = load_workbench(seed=seed)
    rng = bench.rng("low precision")
    count = -(-tokens // LENGTH)
    lengths = [min(LENGTH, tokens)] * count
    rollout = generate(bench, bench.model, lengths, rng, "fp32", int(rng.integers(1000)))
    advantages = advantages_of(max(count, 2), rng)[:count]
    per_token = np.repeat(advantages, [len(x) for x in rollout.tokens])
    wanted = [
        (name, number_format)
        for name, stage in STAGES.items()
        if stage.model
        for number_format in stage.formats
        if formats is None or number_format in formats
    ]
    rollouts = {}
    for done, (name, number_format) in enumerate(wanted):
        progress(f"rollouts of the model: {name} {number_format}", done, len(wanted))
        rollouts[name, number_format] = _logits(_rolled_out(bench, name, number_format), rollout)
    return Source(
        name="real",
        logits=_logits(nearly_trained(bench), rollout),
        behavior_logits=_logits(bench.model, rollout),
        tokens=np.array([t for row in rollout.tokens for t in row], dtype=np.int64),
        advantages=np.where(per_token == 0, 1.0, per_token),
        top_k=TOP_K,
        rollouts=rollouts,
    ).take(slice(0, tokens))


def _logits(model: Any, rollout: Rollout) -> Float64:
    import torch

    with torch.no_grad():
        return np.concatenate([x.double().numpy() for x in teacher_forced(model, rollout)])


def _rolled_out(bench: Workbench, stage: str, number_format: str) -> Any:
    """The model, in the format at the stage."""
    base = bench.model
    if stage == "lm-head":
        weight = _rounded(base.lm_head.weight, number_format)
        return _Headed(base.model, lambda h: _rounded(h, number_format) @ weight.T)
    if stage == "lm-head-sums":
        return _Headed(base.model, lambda h: _one_by_one(h, base.lm_head.weight))
    if number_format == "bf16":
        import torch

        return copy.deepcopy(base).to(torch.bfloat16)
    return quantized(base, number_format, activations=stage == "rollout")


def _rounded(x: Any, number_format: str) -> Any:
    """A float32 tensor `[R, C]` in the values of a format."""
    import torch

    return torch.from_numpy(torch_round(number_format, x.detach().numpy())).float()


def _one_by_one(hidden: Any, weight: Any) -> Any:
    """`hidden @ weight.T` of bf16 operands in a bf16 accumulator, term after term."""
    import torch

    h, w = (x.detach().to(torch.bfloat16) for x in (hidden, weight))
    total = torch.zeros(len(h), len(w), dtype=torch.bfloat16)
    for i in range(h.shape[-1]):
        # a product of two bf16 numbers is exact in float32
        total = (total.float() + h[:, i : i + 1].float() * w[:, i].float()).to(torch.bfloat16)
    return total.float()


def quantized(model: Any, recipe: str, *, activations: bool) -> Any:
    """A copy whose layers' products take weights (and activations) through a scaled format.

    Weights `[out, in]` have the format's groups; activations `[tokens, in]` too, but 128 x 128
    blocks of weights go with groups of 128 activations, as in DeepSeek's recipe.  Products are
    float32; norms, embeddings, attention scores and the last product are left alone.
    """
    import torch

    copied = copy.deepcopy(model)
    of_activations = "fp8-group" if recipe == "fp8-block" else recipe

    def enter(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = arguments
        return (_rounded(x.reshape(-1, x.shape[-1]), of_activations).reshape(x.shape),)

    for module in copied.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(_rounded(module.weight, recipe))
            if activations:
                module.register_forward_pre_hook(enter)
    return copied


def rollout_rows(source: Source, seed: int) -> Iterator[RolloutRow]:
    """Divergence, drop rates and disagreements by how the rollout ran.

    Prefixes are common to all; `k ~ mu` is drawn from the rollout in question with common random
    numbers.
    """
    ways = {"fp32": source.behavior_logits}
    ways |= {f"{stage} {name}": x for (stage, name), x in source.rollouts.items()}
    trained = {"the same weights": source.behavior_logits, "a few steps ahead": source.logits}
    for training, logits in trained.items():
        for recipe, behavior in ways.items():
            if logits is behavior:
                continue
            tokens = draw(behavior, np.random.default_rng(seed))
            here = Source(training, logits, behavior, tokens, source.advantages, source.top_k)
            yield _rollout_row(recipe, here)


def _rollout_row(recipe: str, source: Source) -> RolloutRow:
    rows = exact_rows(source, Setting())
    full = cells_of(rows, "full")
    d = divergence(full, "kl")
    middle, low, high = middle_of(d)
    everyone = np.ones(len(rows), dtype=bool)
    drops = []
    for name, mask in MASKS.items():
        for view in mask.views():
            tails: tuple[Tail | None, ...] = TAILS if mask.needs_tail(view) else (None,)
            for tail in tails:
                rule = mask.rule(view=view, tail=tail, delta=DELTA)
                words = [
                    name,
                    *([view] if mask.partition is None else []),
                    *([tail] if tail else []),
                ]
                dropped = ~keep(rows, rule)
                drops.append(DropRate(":".join(filter(None, words)), rate(dropped, everyone)))
    return RolloutRow(
        training=source.name,
        recipe=recipe,
        tokens=len(rows),
        vocab_size=rows.vocab_size,
        top_k=source.top_k,
        median=middle,
        median_low=low,
        median_high=high,
        high=float(np.quantile(d, 0.95)),
        outside=rate(d > DELTA, everyone),
        delta=DELTA,
        drops=tuple(drops),
        disagreements=tuple(_disagreements(rows)),
    )


def _disagreements(rows: Rows) -> Iterator[DropRate]:
    """Directions that are not those of the full forward KL's C."""
    right = np.sign(coefficient(cells_of(rows, "full"), "kl"))
    assert rows.logits is not None
    assert rows.behavior_logits is not None
    k = rows.tokens[:, None]
    own = [np.take_along_axis(log_softmax(x), k, -1) for x in (rows.logits, rows.behavior_logits)]
    ways = {"ratio": np.sign(own[0] - own[1])[:, 0]}
    coarse = cells_of(rows, "topk", "append")
    for tail in ("exact", "uniform", "aggregated"):
        ways[tail] = np.sign(coefficient(coarse, "kl", tail))
    for name, said in ways.items():
        off = (said != right) & (right != 0)
        yield DropRate(name, rate_of(int(off.sum()), int((right != 0).sum())))
