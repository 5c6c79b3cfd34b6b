"""Study `gradient-bias`: what a mask adds in bias, and what it saves in variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pdverify.report.tables import Plot, Table
from simulations.bandit import Rollout, Streams, keep, rollout, sample, variants
from simulations.statistics import mean, share
from simulations.studies.study import (
    Cell,
    Level,
    Study,
    Summary,
    in_batches,
    matching,
    per_seed,
    varied,
)

BASE: Cell = {
    "distance": 0.5,
    "vocab_size": 32,
    "spread": 1.5,
    "top_k": 8,
    "delta": 0.05,
    "contexts": 4,
}
DISTANCES = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
DRAWS = 256
"""Tokens of the Monte-Carlo witness, in each context."""

BATCH_SIZE = 64
"""Tokens in the batch whose mean squared error is reported."""

FACTORS: Mapping[Level, Mapping[str, tuple[float, ...]]] = {
    "quick": {"delta": (0.02, 0.1, 0.2), "spread": (0.5, 3.0)},
    "full": {
        "delta": (0.01, 0.02, 0.1, 0.2),
        "spread": (0.5, 3.0),
        "vocab_size": (16, 64, 128),
        "top_k": (2, 4, 16),
    },
}


def cells(level: Level) -> list[Cell]:
    """Distance by each of the other factors."""
    groups = [{name: values, "distance": DISTANCES} for name, values in FACTORS[level].items()]
    return varied(BASE, {"distance": DISTANCES}, *groups)


def run(cell: Cell, seeds: range) -> pd.DataFrame:
    """Bias, variance and angle of every mask's gradient, of each seed, by enumeration."""
    size = int(cell["vocab_size"]) ** 2 * int(cell["contexts"])
    parts = [_batch(cell, batch) for batch in in_batches(seeds, size)]
    return pd.concat(parts, ignore_index=True)


def _batch(cell: Cell, seeds: range) -> pd.DataFrame:
    streams = Streams(seeds, "gradient-bias")
    vocab, contexts = int(cell["vocab_size"]), int(cell["contexts"])
    shape = (contexts, vocab)
    y = float(cell["spread"]) * streams.normal("logits", *shape)
    z = y + float(cell["distance"]) * streams.normal("distance", *shape)
    rewards = streams.normal("rewards", *shape)
    log_mu, log_pi = torch.log_softmax(y, -1), torch.log_softmax(z, -1)
    mu, pi = log_mu.exp(), log_pi.exp()
    advantages = rewards - (mu * rewards).sum(-1, keepdim=True)
    everyone = _all_tokens(log_mu, advantages, int(cell["top_k"]))
    logits = z.repeat_interleave(vocab, 1)
    target = _expected(pi, pi * advantages)
    drawn = sample(
        log_mu.repeat_interleave(DRAWS, 1), streams.uniform("draws", contexts * DRAWS)
    ).reshape(-1, contexts, DRAWS)
    frames = []
    for name, variant in variants().items():
        rule = variant.rule(delta=float(cell["delta"]), eta=1.0)
        kept = keep(everyone, logits, rule).double().reshape(pi.shape)
        # mu r = pi: the ratio cancels in the mean, not in the variance
        weight = kept * advantages * (log_pi - log_mu).exp()
        expected = _expected(pi, mu * weight)
        bias = expected - target
        length = 1 - 2 * pi + (pi * pi).sum(-1, keepdim=True)  # |e_k - pi|^2
        variance = (mu * weight**2 * length).sum(-1) - (expected**2).sum(-1)
        norm = target.norm(dim=-1)
        frames.append(
            per_seed(
                seeds,
                mask=name,
                bias=((bias**2).sum(-1) / norm**2).mean(-1),
                variance=(variance / norm**2).mean(-1),
                mse=(((bias**2).sum(-1) + variance / BATCH_SIZE) / norm**2).mean(-1),
                cosine=_cosine(expected, target).mean(-1),
                dropped=(mu * (1 - kept)).sum(-1).mean(-1),
                z=_witness(weight, mu, pi, expected, drawn).mean(-1) * contexts**0.5,
            )
        )
    return pd.concat(frames, ignore_index=True)


def _all_tokens(log_mu: Tensor, advantages: Tensor, top_k: int) -> Rollout:
    """Every token of every context once, `[S, X V]`."""
    count, contexts, vocab = log_mu.shape
    tokens = torch.arange(vocab).repeat(contexts).expand(count, -1)
    places = torch.arange(contexts).repeat_interleave(vocab).expand(count, -1)
    return rollout(places, tokens, log_mu.repeat_interleave(vocab, 1), advantages.flatten(1), top_k)


def _expected(pi: Tensor, weight: Tensor) -> Tensor:
    """`sum_k weight_k (e_k - pi)`: the gradient at the logits of each context, `[S, X, V]`."""
    return weight - pi * weight.sum(-1, keepdim=True)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    cosine: Tensor = torch.nn.functional.cosine_similarity(a, b, dim=-1, eps=1e-300)
    return cosine


def _witness(weight: Tensor, mu: Tensor, pi: Tensor, expected: Tensor, drawn: Tensor) -> Tensor:
    """Monte Carlo minus enumeration, along the expected gradient, in exact standard errors.

    `[S, X]`; `weight` is what the mask leaves of `A r`, 0 where the token is dropped.
    """
    along = expected / expected.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    of_token = weight * (along - (along * pi).sum(-1, keepdim=True))
    center = (expected * along).sum(-1)
    error = ((mu * of_token**2).sum(-1) - center**2).clamp_min(0.0).sqrt() / DRAWS**0.5
    gap = of_token.gather(-1, drawn).mean(-1) - center
    return torch.where(error > 0, gap / error.clamp_min(1e-300), 0.0)


def _named(frame: pd.DataFrame) -> list[str]:
    return [name for name in variants() if name in set(frame["mask"])]


def _column(part: pd.DataFrame, name: str) -> Any:
    return mean(part.sort_values("seed")[name].to_numpy())


def summarize(frame: pd.DataFrame) -> Summary:
    """All masks at the base distance, and the main ones by distance."""
    base = matching(frame, **{k: v for k, v in BASE.items() if k != "distance"})
    rows = []
    for name in _named(frame):
        part = matching(base, mask=name, distance=BASE["distance"])
        rows.append(
            [
                name,
                _column(part, "dropped").percent,
                str(_column(part, "bias")),
                str(_column(part, "variance")),
                str(_column(part, "mse")),
                str(_column(part, "cosine")),
                _break_even(base, name, float(BASE["distance"])),
            ]
        )
    everything = Table(
        f"Every mask, distance {BASE['distance']}, in units of the squared on-policy gradient",
        ["mask", "dropped, %>", "squared bias>", "variance of one token>",
         f"MSE, {BATCH_SIZE} tokens>", "cosine>", "break-even batch>"],
        rows,
        ["break-even batch: the number of tokens below which the mask's mean squared error is"
         " smaller than without a mask; 0: it saves no variance",
         "delta is the same number for every divergence, nats or probability"],
    )  # fmt: skip
    by_distance = []
    for distance in DISTANCES:
        for name in MAIN:
            part = matching(base, mask=name, distance=distance)
            by_distance.append(
                [f"{distance:g}", name,
                 *(str(_column(part, x)) for x in ("dropped", "bias", "mse", "cosine")),
                 _break_even(base, name, distance)]
            )  # fmt: skip
    return Summary(
        _finding(base),
        [
            everything,
            Table(
                "By distance",
                [
                    "distance>",
                    "mask",
                    "dropped>",
                    "squared bias>",
                    "MSE>",
                    "cosine>",
                    "break-even batch>",
                ],
                by_distance,
            ),
        ],
        _plots(base),
    )


MAIN = (
    "none",
    "ppo-clip",
    "dppo-topk-kl",
    "predictive-kl/topk/aggregated",
    "predictive-kl/topk/uniform",
    "predictive-kl/topk/exact",
    "predictive-kl/full",
    "predictive-kl-second-order/full",
)


def _break_even(base: pd.DataFrame, name: str, distance: float) -> str:
    """Batch size below which a mask's mean squared error is the smaller one, over all seeds."""
    part, none = (matching(base, mask=n, distance=distance) for n in (name, "none"))
    bias = part["bias"].mean()
    if bias < 2.0**-80:
        return "-"
    saved = share(
        (
            none.sort_values("seed")["variance"].to_numpy()
            - part.sort_values("seed")["variance"].to_numpy()
        ),
        part.sort_values("seed")["bias"].to_numpy(),
    )
    return str(saved)


def _finding(base: pd.DataFrame) -> str:
    def of(name: str, distance: float) -> str:
        return str(_column(matching(base, mask=name, distance=distance), "mse"))

    exact = "predictive-kl/topk/exact"

    def best(distance: float) -> str:
        errors = {n: _column(matching(base, mask=n, distance=distance), "mse").value for n in MAIN}
        return min(errors, key=errors.__getitem__)

    said = ", ".join(f"{name} at {d:g}" for d, name in ((d, best(d)) for d in DISTANCES))
    return (
        f"Every mask that drops anything buys variance with bias.  Mean squared error of a batch of"
        f" {BATCH_SIZE} tokens, over the squared gradient, at distance 0.5: no mask"
        f" {of('none', 0.5)}, PPO clip {of('ppo-clip', 0.5)}, ratio direction"
        f" {of('dppo-topk-kl', 0.5)}, predictive (exact tail) {of(exact, 0.5)}, full"
        f" {of('predictive-kl/full', 0.5)}; at distance 2: {of('none', 2.0)},"
        f" {of('ppo-clip', 2.0)}, {of('dppo-topk-kl', 2.0)}, {of(exact, 2.0)},"
        f" {of('predictive-kl/full', 2.0)}.  Smallest by distance: {said}.  At distance 0.5 a batch"
        f" must be smaller than {_break_even(base, 'ppo-clip', 0.5)} tokens for PPO clip to pay,"
        f" {_break_even(base, 'dppo-topk-kl', 0.5)} for the ratio direction,"
        f" {_break_even(base, exact, 0.5)} for the predictive one: as a gradient estimator the"
        " predictive mask is not the better one; what it is for is the divergence."
    )


def _plots(base: pd.DataFrame) -> list[Plot]:
    def against_distance(column: str, label: str) -> Any:
        def draw(axes: Any) -> None:
            for place, name in enumerate(MAIN):
                found = [_column(matching(base, mask=name, distance=d), column) for d in DISTANCES]
                y = np.array([e.value for e in found])
                low, high = (np.array([getattr(e, end) for e in found]) for end in ("low", "high"))
                axes.errorbar(
                    DISTANCES, y, [y - low, high - y], label=name, marker="osd^v<>*"[place],
                    markersize=4, capsize=2,
                )  # fmt: skip
            axes.set_xscale("log")
            axes.set_xlabel("distance, nats")
            axes.set_ylabel(label)

        return draw

    return [
        Plot("bias.png", "Squared bias", against_distance("bias", "over squared gradient")),
        Plot(
            "mse.png",
            f"Mean squared error of a batch of {BATCH_SIZE}",
            against_distance("mse", "over squared gradient"),
        ),
        Plot("cosine.png", "Angle to the on-policy gradient", against_distance("cosine", "cosine")),
    ]


def violations(frame: pd.DataFrame) -> list[str]:
    """No mask: no bias.  The witness agrees within its interval.  A bracket drops the least."""
    found = []
    none = matching(frame, mask="none")
    # importance weights make it exact: what is left is rounding
    if (none["bias"] > 2.0**-80).any():
        found.append(f"the unmasked gradient has a squared bias of {none['bias'].max():.2g}")
    # variance 1 for each mask, cell and seed, which share their draws; Chebyshev's inequality
    seeds = frame["seed"].nunique()
    worst = float(frame.groupby("mask")["z"].mean().abs().max() * seeds**0.5)
    if worst > 10:
        found.append(f"Monte Carlo is {worst:.2g} standard errors off the enumeration")
    keys = [name for name in frame.columns if name in BASE or name == "seed"]
    dropped = frame.pivot_table("dropped", keys, "mask")
    bracket = dropped["predictive-kl/topk/bracket"]
    for tail in ("aggregated", "uniform", "exact"):
        more = int((bracket > dropped[f"predictive-kl/topk/{tail}"] + 1e-12).sum())
        if more:
            found.append(f"the bracket drops more than the {tail} tail in {more} cases")
    return found


STUDY = Study(
    name="gradient-bias",
    title="Gradient bias: what is bought with a mask",
    question="How much bias does each mask add to the policy gradient, and what does it save?",
    design=(
        "Softmax policies with free logits; the training policy differs from the behavior policy"
        " by Gaussian noise on the logits (standard deviation: the distance).  All tokens are"
        " enumerated: expectation and variance of the masked, importance-weighted gradient under"
        " the behavior policy are exact, and compared with the on-policy gradient; a Monte-Carlo"
        f" sample of {DRAWS} tokens is a second witness.  Base: V = 32, K = 8, delta = 0.05,"
        " normal rewards, ratios not capped."
    ),
    cells=cells,
    run=run,
    summarize=summarize,
    violations=violations,
    seeds={"quick": 8, "full": 32},
)
