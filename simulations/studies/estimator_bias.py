"""Study `estimator-bias`: errors of the top-K estimators of D and C, and of their signs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pdverify.backends import torch_eager
from pdverify.batch import Rows
from pdverify.definitions.cells import build
from pdverify.definitions.intervals import coefficient_interval
from pdverify.report.tables import Plot, Table
from simulations.bandit import Rollout, Streams, rollout, sample
from simulations.bandit import divergence as divergence_of
from simulations.statistics import Estimate, share
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

SHAPES = ("flat", "zipf-0.8", "zipf-1", "zipf-1.2", "zipf-1.5", "heavy")
ESTIMATORS = ("aggregated", "uniform", "exact")
BASE: Cell = {"shape": "zipf-1", "top_k": 20, "vocab_size": 1_000, "distance": 0.3, "batch": 64}


def cells(level: Level) -> list[Cell]:
    """Tail shape x K x V, and the distance between the policies."""
    if level == "quick":
        sizes: tuple[int, ...] = (128, 1_000)
        base = BASE | {"batch": 32}
    else:
        sizes, base = (1_000, 32_768, 152_000), BASE
    found = varied(
        base,
        {"shape": SHAPES, "top_k": (5, 20, 100), "vocab_size": sizes},
        {"shape": SHAPES, "distance": (0.03, 1.0)},
    )
    # a seed at the largest vocabulary is a few tokens: its logits alone are 20 MB
    return [c | {"batch": 16} if int(c["vocab_size"]) > 100_000 else c for c in found]


def logits_of(shape: str, streams: Streams, batch: int, vocab_size: int) -> Tensor:
    """Behavior logits, `[S, B, V]`: a shape, under noise of 0.5 nats on every token.

    ``flat``; ``zipf-s``: mass `rank^-s`; ``heavy`` as ``zipf-1.2``, with a tail token to which
    the training policy alone gives much mass (see `_moved`).
    """
    exponent = {"flat": 0.0, "heavy": 1.2}.get(shape)
    if exponent is None:
        exponent = float(shape.removeprefix("zipf-"))
    ranks = torch.arange(1, vocab_size + 1, dtype=torch.float64)
    return 0.5 * streams.normal("shape", batch, vocab_size) - exponent * ranks.log()


def _moved(shape: str, streams: Streams, y: Tensor, distance: float, top_k: int) -> Tensor:
    z = y + distance * streams.normal("distance", *y.shape[1:])
    if shape != "heavy":
        return z
    # the token halfway down the tail rises to a twentieth of the mass
    place = y.argsort(-1, descending=True)[..., (top_k + y.shape[-1]) // 2, None]
    return z.scatter(-1, place, (z.logsumexp(-1) - np.log(20.0))[..., None])


def run(cell: Cell, seeds: range) -> pd.DataFrame:
    """Sums of errors of each estimator, of each seed, for tokens in and out of the list."""
    size = int(cell["vocab_size"]) * int(cell["batch"])
    parts = [_batch(cell, batch) for batch in in_batches(seeds, size)]
    return pd.concat(parts, ignore_index=True)


def _batch(cell: Cell, seeds: range) -> pd.DataFrame:
    shape, top_k, vocab = str(cell["shape"]), int(cell["top_k"]), int(cell["vocab_size"])
    batch, streams = int(cell["batch"]), Streams(seeds, "estimator-bias")
    y = logits_of(shape, streams, batch, vocab)
    z = _moved(shape, streams, y, float(cell["distance"]), top_k)
    log_mu = torch.log_softmax(y, -1)
    rows = _drawn(log_mu, streams, batch, top_k)
    full = {"name": "kl", "partition": "full", "behavior_logits": rows.log_mu}
    coarse = {
        "name": "kl",
        "partition": "topk",
        "behavior_logprobs": rows.log_mu_k,
        "topk_ids": rows.topk_ids,
        "topk_logprobs": rows.topk_logprobs,
    }

    def asked(**arguments: Any) -> Tensor:
        return torch_eager.coefficient(z, rows.tokens, compute_dtype=torch.float64, **arguments)

    d = divergence_of(rows, z, "kl", "full")
    lost = divergence_of(rows, z, "kl", "topk") - d
    c = asked(**full)
    found = {name: asked(tail=name, **coarse) for name in ESTIMATORS}
    low, high = (x.reshape(c.shape) for x in _interval(rows, z))
    listed = (rows.topk_ids == rows.tokens[..., None]).any(-1)
    certain = found["aggregated"].sign() * found["uniform"].sign() > 0
    sure = (low > 0) | (high < 0)
    frames = []
    for place, among in (("listed", listed), ("tail", ~listed)):
        for name in ESTIMATORS:
            error = found[name] - c
            frames.append(
                _sums(
                    seeds,
                    among,
                    place=place,
                    estimator=name,
                    error=error,
                    error_square=error**2,
                    square=c**2,
                    wrong=(found[name].sign() != c.sign()).double(),
                    wrong_coarse=(found[name].sign() != found["exact"].sign()).double(),
                    d=d,
                    d_error=lost,
                    d_error_square=lost**2,
                    d_square=d**2,
                    width=(found["uniform"] - found["aggregated"]).abs(),
                    size=c.abs(),
                    certain=certain.double(),
                    certainly_wrong=(
                        certain & (found["exact"].sign() != found["uniform"].sign())
                    ).double(),
                    sure=sure.double(),
                    surely_wrong=((c < low - _slack(c)) | (c > high + _slack(c))).double(),
                    above=(lost > _slack(d)).double(),
                )
            )
    return pd.concat(frames, ignore_index=True)


def _slack(x: Tensor) -> Tensor:
    """What float64 sums of V terms may lose."""
    return 2.0**-40 * x.abs().clamp_min(2.0**-10)


def _drawn(log_mu: Tensor, streams: Streams, batch: int, top_k: int) -> Rollout:
    """Half of the tokens drawn from mu, half from its tail."""
    ids = log_mu.topk(top_k, -1).indices
    tail = log_mu.scatter(-1, ids, -torch.inf)
    source = torch.where((torch.arange(batch) < batch // 2)[:, None], log_mu, tail)
    tokens = sample(source, streams.uniform("tokens", batch))
    contexts = torch.arange(batch).expand_as(tokens)
    return rollout(contexts, tokens, log_mu, torch.ones_like(log_mu[..., 0]), top_k)


def _interval(rows: Rollout, z: Tensor) -> tuple[Tensor, Tensor]:
    """What the top-K view says of the full coefficient, flattened."""
    count = rows.tokens.numel()
    flat = Rows(
        index=np.zeros((count, 2), dtype=np.int64),
        tokens=rows.tokens.reshape(-1).numpy(),
        advantages=np.ones(count),
        vocab_size=z.shape[-1],
        logits=z.reshape(count, -1).numpy(),
        behavior_logits=None,
        logprobs=None,
        behavior_logprobs=rows.log_mu_k.reshape(-1).numpy(),
        topk_ids=rows.topk_ids.reshape(count, -1).numpy(),
        topk_logprobs=rows.topk_logprobs.reshape(count, -1).numpy(),
        dtype="fp64",
        logprob_dtype="fp64",
    )
    low, high = coefficient_interval(flat, build(flat, "topk"))
    return torch.from_numpy(low), torch.from_numpy(high)


def _sums(seeds: range, among: Tensor, **columns: Any) -> pd.DataFrame:
    summed = {
        name: torch.where(among, x, 0.0).sum(-1) if isinstance(x, Tensor) else x
        for name, x in columns.items()
    }
    return per_seed(seeds, tokens=among.sum(-1), **summed)


def _over(part: pd.DataFrame, top: str, bottom: str) -> Estimate:
    of_seed = part.groupby("seed")[list({top, bottom})].sum()
    return share(of_seed[top].to_numpy(), of_seed[bottom].to_numpy())


def _per_token(part: pd.DataFrame, name: str) -> float:
    return float(part[name].sum() / part["tokens"].sum())


def _rmse(part: pd.DataFrame, square: str, of: str) -> str:
    found = _over(part, square, of)
    return "-" if np.isnan(found.value) else f"{100 * found.value**0.5:.3g}"


def _bias(part: pd.DataFrame) -> str:
    """Mean error over the mean size of C, %."""
    found = _over(part, "error", "size")
    if np.isnan(found.value):
        return "-"
    return f"{100 * found.value:+.2g} [{100 * found.low:+.2g}, {100 * found.high:+.2g}]"


def _variance_share(part: pd.DataFrame) -> str:
    """Standard deviation of the error over the root mean square of C, %."""
    tokens, square = part["tokens"].sum(), part["square"].sum()
    if not tokens or not square:
        return "-"
    mean = part["error"].sum() / tokens
    variance = max(part["error_square"].sum() / tokens - mean**2, 0.0)
    return f"{100 * (variance / (square / tokens)) ** 0.5:.3g}"


def summarize(frame: pd.DataFrame) -> Summary:
    """Errors of C and D, sign errors, brackets."""
    largest = int(frame["vocab_size"].max())
    near = frame[frame["distance"] == BASE["distance"]]
    tables = []
    for place in ("listed", "tail"):
        rows = []
        for shape in SHAPES:
            for top_k in sorted(near["top_k"].unique()):
                part = matching(near, shape=shape, top_k=top_k, vocab_size=largest, place=place)
                for name in ESTIMATORS:
                    one = matching(part, estimator=name)
                    rows.append(
                        [
                            shape,
                            str(top_k),
                            name,
                            _bias(one),
                            _variance_share(one),
                            _rmse(one, "error_square", "square"),
                            _over(one, "wrong", "tokens").percent,
                            _over(one, "wrong_coarse", "tokens").percent,
                        ]
                    )
        where = "in the list" if place == "listed" else "outside of the list"
        tables.append(
            Table(
                f"C, sampled token {where}, V = {largest:,} (in % of the size of the full C)",
                ["tail", "K>", "estimator", "bias>", "sd>", "RMSE>", "sign errors>",
                 "against top-K C>"],
                rows,
                ["sign errors: against the coefficient of the full divergence; the last column"
                 " against that of the top-K divergence under the true motion (exact tail)"],
            )
        )  # fmt: skip
    tables.append(_of_d(near))
    tables.append(_certificates(near))
    tables.append(_by_distance(frame))
    return Summary(_finding(near, largest), tables, _plots(near, largest))


def _of_d(near: pd.DataFrame) -> Table:
    rows = []
    for shape in SHAPES:
        for top_k in sorted(near["top_k"].unique()):
            for size in sorted(near["vocab_size"].unique()):
                part = matching(near, shape=shape, top_k=top_k, vocab_size=size, estimator="exact")
                if len(part):
                    seen = _over(part, "d_error", "d")
                    rows.append(
                        [shape, str(top_k), f"{size:,}", f"{_per_token(part, 'd'):.2g}",
                         seen.percent, _rmse(part, "d_error_square", "d_square")]
                    )  # fmt: skip
    return Table(
        "The top-K divergence against the full one",
        ["tail", "K>", "V>", "mean D>", "bias, % of D>", "RMSE, %>"],
        rows,
    )


def _certificates(near: pd.DataFrame) -> Table:
    rows = []
    for shape in SHAPES:
        for top_k in sorted(near["top_k"].unique()):
            for size in sorted(near["vocab_size"].unique()):
                part = matching(near, shape=shape, top_k=top_k, vocab_size=size, estimator="exact")
                if len(part):
                    rows.append(
                        [shape, str(top_k), f"{size:,}", _over(part, "width", "size").percent,
                         _over(part, "certain", "tokens").percent,
                         _over(part, "sure", "tokens").percent]
                    )  # fmt: skip
    return Table(
        "Certificates from the top-K view alone",
        ["tail", "K>", "V>", "bracket width, % of C>", "bracket certain, %>",
         "full sign certain, %>"],
        rows,
        ["bracket: both ends say the same sign of the top-K coefficient; full sign: the"
         " rearrangement interval of the full coefficient, which also knows the trainer's pi"],
    )  # fmt: skip


def _by_distance(frame: pd.DataFrame) -> Table:
    rows = []
    base = frame[(frame["top_k"] == BASE["top_k"]) & (frame["vocab_size"] == BASE["vocab_size"])]
    for shape in SHAPES:
        for distance in sorted(base["distance"].unique()):
            part = matching(base, shape=shape, distance=distance)
            rows.append(
                [shape, f"{distance:g}",
                 *(_over(matching(part, estimator=name), "wrong", "tokens").percent
                   for name in ESTIMATORS)]
            )  # fmt: skip
    return Table(
        f"Sign errors by distance, K = {BASE['top_k']}, V = {BASE['vocab_size']:,}, %",
        ["tail", "distance>", *(f"{name}>" for name in ESTIMATORS)],
        rows,
    )


def _finding(near: pd.DataFrame, largest: int) -> str:
    part = matching(near, vocab_size=largest, top_k=20)

    def wrong(name: str, **more: Any) -> str:
        return _over(matching(part, estimator=name, **more), "wrong", "tokens").percent

    zipf = matching(part, shape="zipf-1", estimator="exact")
    heavy = matching(near, shape="heavy")
    return (
        f"At V = {largest:,} and K = 20, over all tails, the aggregated tail has the sign of the"
        f" full coefficient wrong on {wrong('aggregated')} % of tokens, the uniform tail on"
        f" {wrong('uniform')} %, the exact tail on {wrong('exact')} %; on a Zipf tail of exponent 1"
        f" on {wrong('aggregated', shape='zipf-1')}, {wrong('uniform', shape='zipf-1')} and"
        f" {wrong('exact', shape='zipf-1')} %.  So the aggregated tail is the one that errs; but"
        " what a top-K view cannot see is D: the top-K divergence differs from the full one by"
        f" {_over(zipf, 'd_error', 'd').percent} % on that Zipf tail."
        f"  With one heavy token in the tail that the training policy likes, uniform is wrong on"
        f" {_over(matching(heavy, estimator='uniform'), 'wrong', 'tokens').percent} % and exact on"
        f" {_over(matching(heavy, estimator='exact'), 'wrong', 'tokens').percent} %, over all K"
        f" and V.  No certificate was wrong: {int(near['certainly_wrong'].sum())} of the brackets,"
        f" {int(near['surely_wrong'].sum())} of the intervals."
    )


def _plots(near: pd.DataFrame, largest: int) -> list[Plot]:
    def signs(axes: Any) -> None:
        tops = sorted(near["top_k"].unique())
        width = 0.8 / (len(ESTIMATORS) * len(tops))
        for i, name in enumerate(ESTIMATORS):
            for j, top_k in enumerate(tops):
                found = [
                    _over(
                        matching(near, shape=s, top_k=top_k, vocab_size=largest, estimator=name),
                        "wrong",
                        "tokens",
                    )
                    for s in SHAPES
                ]
                x = np.arange(len(SHAPES)) + (i * len(tops) + j - 4) * width
                axes.bar(
                    x, [100 * e.value for e in found], width, color=f"C{i}",
                    alpha=(0.4, 0.7, 1.0)[j], label=f"{name}, K = {top_k}",
                )  # fmt: skip
        axes.set_xticks(range(len(SHAPES)), SHAPES)
        axes.set_ylabel("sign errors, %")

    def brackets(axes: Any) -> None:
        for shape in SHAPES:
            part = matching(near, shape=shape, estimator="exact", vocab_size=largest)
            tops = sorted(part["top_k"].unique())
            found = [_over(matching(part, top_k=k), "certain", "tokens") for k in tops]
            axes.plot(tops, [100 * e.value for e in found], marker="o", label=shape)
        axes.set_xscale("log")
        axes.set_xlabel("K")
        axes.set_ylabel("signs certified by the bracket, %")

    return [
        Plot("sign-errors.png", f"Sign errors of C, V = {largest:,}", signs),
        Plot("certified.png", f"Certified by the bracket, V = {largest:,}", brackets),
    ]


def violations(frame: pd.DataFrame) -> list[str]:
    """Coarsening loses divergence, brackets and intervals hold the truth."""
    said = {
        "above": "tokens whose top-K divergence exceeds the full one",
        "certainly_wrong": "certified signs that are not those of the top-K coefficient",
        "surely_wrong": "full coefficients outside of their interval",
    }
    counts = {name: int(frame[name].sum()) for name in said}
    return [f"{counts[name]} {text}" for name, text in said.items() if counts[name]]


STUDY = Study(
    name="estimator-bias",
    title="Estimator bias: what a top-K view costs",
    question="How far are the top-K estimators of D and C off, and how often in sign?",
    design=(
        "Behavior policies with a flat tail, Zipf tails, or a Zipf tail with one token that the"
        " training policy gives a twentieth of its mass; the training policy differs by Gaussian"
        " noise on the logits (standard deviation: the distance).  Half of the tokens are drawn"
        " from the behavior policy, half from its tail, and reported apart.  Forward KL;"
        " estimators with the aggregated, uniform and exact tail, against the full coefficient."
    ),
    cells=cells,
    run=run,
    summarize=summarize,
    violations=violations,
    seeds={"quick": 8, "full": 16},
)
