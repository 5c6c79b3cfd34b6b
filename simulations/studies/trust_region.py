"""Study `trust-region`: what each mask does to the tail of realized divergences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd

from pdverify.report.tables import Plot, Table
from simulations.bandit import Setting, train, variants
from simulations.bandit.learning import MULTIPLES, QUANTILES, masked_by
from simulations.statistics import Estimate, holm, mean, paired
from simulations.studies.study import Cell, Level, Study, Summary, matching, per_seed, varied
from simulations.studies.training import ETA, MAIN

BASE: Cell = {
    "mask": "none",
    "rate": 0.05,
    "epochs": 4,
    "staleness": 8,
    "delta": 0.15,
    "optimizer": "adam",
    "rollouts": 40,
}


def cells(level: Level) -> list[Cell]:
    """The main masks by learning rate, updates per rollout, staleness, delta and optimizer."""
    main: dict[str, Any] = {"mask": MAIN}
    if level == "quick":
        return varied(BASE | {"rollouts": 6}, {"rate": (0.01, 0.05, 0.1)} | main)
    return varied(
        BASE,
        {"mask": tuple(variants())},
        {"rate": (0.01, 0.1)} | main,
        {"epochs": (1, 8)} | main,
        {"staleness": (0, 32)} | main,
        {"delta": (0.05, 0.5)} | main,
        {"optimizer": ("sgd",), "rate": (1.0, 5.0)} | main,
    )


def run(cell: Cell, seeds: range) -> pd.DataFrame:
    """The distribution of divergences after the updates on each rollout, of each seed."""
    setting = Setting(
        rate=float(cell["rate"]),
        epochs=int(cell["epochs"]),
        staleness=int(cell["staleness"]),
        delta=float(cell["delta"]),
        optimizer=str(cell["optimizer"]),
        rollouts=int(cell["rollouts"]),
    )
    rule = variants()[str(cell["mask"])].rule(delta=setting.delta, eta=ETA)
    history = train(setting, masked_by(rule), seeds, "trust-region")
    beyond = {_beyond(m): history.beyond[..., i].mean(-1) for i, m in enumerate(MULTIPLES)}
    quantiles = {_quantile(q): history.quantiles[..., i].mean(-1) for i, q in enumerate(QUANTILES)}
    return per_seed(
        seeds,
        **beyond,
        **quantiles,
        divergence=history.divergence.mean(-1),
        dropped=history.dropped.mean(-1),
        reward=history.reward.mean(-1),
    )


def _beyond(multiple: float) -> str:
    return f"beyond {multiple:g} delta"


def _quantile(level: float) -> str:
    return f"quantile {level:g}"


def _mean(part: pd.DataFrame, name: str) -> Estimate:
    return mean(part.sort_values("seed")[name].to_numpy())


def _settings(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    factors = [name for name in BASE if name != "mask"]
    base = dict(BASE) | {"rollouts": int(frame["rollouts"].iloc[0])}
    found = {}
    for key, part in frame.groupby(factors, sort=False):
        changed = [
            f"{name} {value}" for name, value in zip(factors, key, strict=True)
            if value != base[name]
        ]  # fmt: skip
        found[", ".join(changed) or "base"] = part
    return found


def summarize(frame: pd.DataFrame) -> Summary:
    """The tail at the base for every mask, by setting for the main ones."""
    settings = _settings(frame)
    base = settings["base"]
    columns = [_beyond(m) for m in MULTIPLES]
    rows = []
    for name in dict.fromkeys(base["mask"]):
        part = matching(base, mask=name)
        rows.append(
            [
                name,
                *(_mean(part, c).percent for c in columns),
                str(_mean(part, _quantile(0.99))),
                _mean(part, "dropped").percent,
                str(_mean(part, "reward")),
            ]
        )
    everything = Table(
        "Base setting: tokens beyond multiples of delta after the updates, %",
        ["mask", *(f"{c}>" for c in columns), "99th percentile, nats>", "dropped, %>",
         "mean return>"],
        rows,
    )  # fmt: skip
    shown = [name for name in MAIN if name in set(frame["mask"])]
    tables = [everything]
    for column in (_beyond(1.0), _beyond(8.0)):
        tables.append(
            Table(
                f"Tokens {column} by setting, %",
                ["setting", *(f"{name}>" for name in shown)],
                [
                    [label, *(_mean(matching(part, mask=n), column).percent for n in shown)]
                    for label, part in settings.items()
                ],
            )
        )
    tests = _tests(settings)
    tables.append(tests[0])
    return Summary(_finding(base, tests[1]), tables, [_plot(base, shown)])


PAIRS = (
    ("ppo-clip", "none"),
    ("dppo-topk-kl", "none"),
    ("predictive-kl/topk/aggregated", "dppo-topk-kl"),
    ("predictive-kl/topk/exact", "dppo-topk-kl"),
    ("predictive-kl/full", "dppo-topk-kl"),
    ("predictive-kl-second-order/topk/exact", "predictive-kl/topk/exact"),
)


def _tests(settings: dict[str, pd.DataFrame]) -> tuple[Table, dict[tuple[str, str], str]]:
    column = _beyond(4.0)
    found = []
    for label, part in settings.items():
        for pair in PAIRS:
            values = [matching(part, mask=n).sort_values("seed")[column].to_numpy() for n in pair]
            found.append((label, pair, *paired(*values)))
    adjusted = holm([one[3] for one in found])
    rows, said = [], {}
    for pair in PAIRS:
        own = [(*one, a) for one, a in zip(found, adjusted, strict=True) if one[1] == pair]
        less = [one[0] for one in own if one[4] < 0.05 and one[2].value < 0]
        more = [one[0] for one in own if one[4] < 0.05 and one[2].value > 0]
        gap = next(one[2] for one in own if one[0] == "base")
        rows.append(
            [*pair, gap.percent, f"{len(less)} of {len(own)}", f"{len(more)} of {len(own)}",
             "; ".join([*less, *(f"more: {x}" for x in more)]) or "-"]
        )  # fmt: skip
        said[pair] = f"fewer in {len(less)} and more in {len(more)} of {len(own)} settings"
    return (
        Table(
            f"Tokens {column}: differences paired by seed, points",
            ["mask", "against", "at the base>", "fewer>", "more>", "where"],
            rows,
            [f"significant at 5 % after Holm's correction for all {len(found)} tests"],
        ),
        said,
    )


def _finding(base: pd.DataFrame, said: dict[tuple[str, str], str]) -> str:
    def tail(name: str, multiple: float) -> str:
        return _mean(matching(base, mask=name), _beyond(multiple)).percent

    exact, ratio = "predictive-kl/topk/exact", "dppo-topk-kl"
    return (
        f"No mask is a bound: they act per token, and tokens move each other.  At the base,"
        f" {tail('none', 1.0)} % of tokens end beyond delta without a mask, {tail('ppo-clip', 1.0)}"
        f" % under PPO clip, {tail(ratio, 1.0)} % under the ratio direction, {tail(exact, 1.0)} %"
        f" under the predictive one (exact tail); beyond 8 delta {tail('none', 8.0)},"
        f" {tail('ppo-clip', 8.0)}, {tail(ratio, 8.0)} and {tail(exact, 8.0)} %.  Beyond 4 delta"
        f" the predictive direction has significantly {said[exact, ratio]} than the ratio"
        f" direction, and the ratio direction {said[ratio, 'none']} than no mask."
    )


def _plot(base: pd.DataFrame, shown: list[str]) -> Plot:
    def draw(axes: Any) -> None:
        for place, name in enumerate(shown):
            part = matching(base, mask=name)
            found = [_mean(part, _beyond(m)) for m in MULTIPLES]
            y = np.array([e.value for e in found])
            axes.plot(MULTIPLES, y, label=name, marker="osd^v<>*ph+"[place], markersize=4,
                      linestyle="-" if place < 6 else "--")  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("multiple of delta")
        axes.set_ylabel("share of tokens beyond")

    return Plot("tail.png", "Tail of the realized divergences, base setting", draw)


def violations(frame: pd.DataFrame) -> list[str]:
    """Shares fall along the multiples, quantiles rise; no mask drops nothing."""
    found = []
    for low, high in itertools.pairwise(MULTIPLES):
        if (frame[_beyond(high)] > frame[_beyond(low)] + 1e-12).any():
            found.append(f"more tokens beyond {high:g} delta than beyond {low:g}")
    for low, high in itertools.pairwise(QUANTILES):
        if (frame[_quantile(high)] < frame[_quantile(low)] - 1e-12).any():
            found.append(f"quantile {high:g} below quantile {low:g}")
    if (matching(frame, mask="none")["dropped"] != 0).any():
        found.append("no mask drops tokens")
    return found


STUDY = Study(
    name="trust-region",
    title="Trust region: what a mask does to the tail of the divergence",
    question="How does each mask shape the distribution of realized divergences beyond delta?",
    design=(
        "The training of study `training` (V = 64, 16 contexts, a network, rollouts 8 updates"
        " stale, 16 updates on each); after the updates on each rollout, the full forward KL"
        " between the policy that sampled it and the trained one, at every token of the rollout:"
        " shares beyond multiples of delta, and quantiles, averaged over rollouts."
    ),
    cells=cells,
    run=run,
    summarize=summarize,
    violations=violations,
    seeds={"quick": 4, "full": 32},
)
