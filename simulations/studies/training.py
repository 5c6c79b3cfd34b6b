"""Study `training`: return, stability and divergence of policies trained under each mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from pdverify.report.tables import Plot, Table
from simulations.bandit import Behavior, Setting, train, variants
from simulations.bandit.learning import MULTIPLES, masked_by
from simulations.statistics import holm, mean, paired
from simulations.studies.study import Cell, Level, Study, Summary, matching, per_seed, varied

PRECISIONS: Mapping[str, tuple[Behavior, str]] = {
    "fp32": (Behavior("fp32", "fp32"), "fp32"),
    "bf16 rollout": (Behavior("bf16", "bf16"), "fp32"),
    "fp8 rollout": (Behavior("fp8-row", "bf16"), "fp32"),
    "fp8 end to end": (Behavior("fp8-row", "bf16"), "fp8-row"),
}
"""Precision -> (the rollout engine's numbers, format of the trainer's weights)."""

MAIN = (
    "none",
    "ppo-clip",
    "ppo-clip/higher",
    "dppo-binary-tv",
    "dppo-binary-kl",
    "dppo-topk-kl",
    "predictive-kl/topk/aggregated",
    "predictive-kl/topk/uniform",
    "predictive-kl/topk/exact",
    "predictive-kl/full",
    "predictive-kl-second-order/topk/exact",
)
"""Masks that every setting is run with; the base setting has all of the registry."""

BASE: Cell = {
    "mask": "none",
    "width": 32,
    "precision": "fp32",
    "staleness": 8,
    "rate": 0.05,
    "reward": "chances",
    "rollouts": 60,
}
DELTA = 0.15
ETA = 0.1
"""Step size that the second-order mask reckons with."""

TESTED = (
    ("ppo-clip", "none"),
    ("dppo-topk-kl", "none"),
    ("dppo-topk-kl", "ppo-clip"),
    ("predictive-kl/topk/aggregated", "dppo-topk-kl"),
    ("predictive-kl/topk/uniform", "dppo-topk-kl"),
    ("predictive-kl/topk/exact", "dppo-topk-kl"),
    ("predictive-kl/full", "dppo-topk-kl"),
    ("predictive-kl/topk/exact", "ppo-clip"),
    ("predictive-kl-second-order/topk/exact", "predictive-kl/topk/exact"),
)
COLLAPSED = 0.8
"""A run collapsed whose last tenth earns less than this share of its best tenth."""


def cells(level: Level) -> list[Cell]:
    """Every mask at the base; the main ones with one factor changed, and at the corners."""
    if level == "quick":
        return varied(BASE | {"rollouts": 8}, {"mask": tuple(variants())})
    main: dict[str, Any] = {"mask": MAIN}
    return varied(
        BASE,
        {"mask": tuple(variants())},
        {"width": (8, 128)} | main,
        {"precision": tuple(PRECISIONS)} | main,
        {"staleness": (0, 32)} | main,
        {"rate": (0.01, 0.1)} | main,
        {"reward": ("sparse", "dense")} | main,
        {"width": (8, 128), "precision": ("fp32", "fp8 end to end"), "staleness": (0, 32)} | main,
    )


def run(cell: Cell, seeds: range) -> pd.DataFrame:
    """What came of each seed."""
    behavior, trainer = PRECISIONS[str(cell["precision"])]
    setting = Setting(
        width=int(cell["width"]),
        behavior=behavior,
        trainer=trainer,
        staleness=int(cell["staleness"]),
        rate=float(cell["rate"]),
        reward=str(cell["reward"]),
        rollouts=int(cell["rollouts"]),
        delta=DELTA,
    )
    variant = variants()[str(cell["mask"])]
    history = train(setting, masked_by(variant.rule(delta=DELTA, eta=ETA)), seeds, "training")
    tenths = torch.stack([x.mean(-1) for x in history.reward.tensor_split(10, -1) if x.numel()], -1)
    last, best = tenths[:, -1], tenths.amax(-1)
    return per_seed(
        seeds,
        final=last,
        area=history.reward.mean(-1),
        collapsed=((last < COLLAPSED * best) | ~last.isfinite()).double(),
        divergence=history.divergence.mean(-1),
        outside=history.beyond[..., MULTIPLES.index(1.0)].mean(-1),
        dropped=history.dropped.mean(-1),
        effective=history.effective.mean(-1),
        entropy=history.entropy[:, -1],
    )


SHOWN = ("final", "area", "collapsed", "divergence", "outside", "dropped", "effective")
HEADINGS = ("final return>", "mean return>", "collapsed, %>", "mean D>", "outside, %>",
            "dropped, %>", "effective samples, %>")  # fmt: skip
SHARES = ("collapsed", "outside", "dropped", "effective")


def _values(part: pd.DataFrame, name: str) -> Any:
    return part.sort_values("seed")[name].to_numpy()


def _row(part: pd.DataFrame) -> list[str]:
    found = {name: mean(_values(part, name)) for name in SHOWN}
    return [e.percent if name in SHARES else str(e) for name, e in found.items()]


def _settings(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Label -> results of one setting, all masks."""
    factors = [name for name in BASE if name != "mask"]
    base = dict(BASE) | {"rollouts": int(frame["rollouts"].iloc[0])}
    found = {}
    for key, part in frame.groupby(factors, sort=False):
        changed = [
            f"{name} {value}"
            for name, value in zip(factors, key, strict=True)
            if value != base[name]
        ]
        found[", ".join(changed) or "base"] = part
    return found


def summarize(frame: pd.DataFrame) -> Summary:
    """Every mask at the base, the main ones by setting, and the differences."""
    settings = _settings(frame)
    base = settings["base"]
    everything = Table(
        "Base setting, every mask",
        ["mask", *HEADINGS],
        [[name, *_row(matching(base, mask=name))] for name in dict.fromkeys(base["mask"])],
    )
    tables = [everything]
    if len(settings) > 1:
        shown = [name for name in MAIN if name in set(frame["mask"])]
        tables.append(
            Table(
                "Final return by setting",
                ["setting", *(f"{name}>" for name in shown)],
                [
                    [label, *(str(mean(_values(matching(part, mask=n), "final"))) for n in shown)]
                    for label, part in settings.items()
                ],
            )
        )
        tables.append(
            Table(
                "Collapsed runs by setting, %",
                ["setting", *(f"{name}>" for name in shown)],
                [
                    [
                        label,
                        *(
                            f"{100 * _values(matching(part, mask=n), 'collapsed').mean():.0f}"
                            for n in shown
                        ),
                    ]
                    for label, part in settings.items()
                ],
            )
        )
    tests = _tests(settings)
    tables.append(_compared(tests))
    return Summary(_finding(base, tests, len(settings)), tables, _plots(settings))


def _tests(settings: dict[str, pd.DataFrame]) -> list[tuple[str, str, str, Any, float, float]]:
    """(setting, first, second, difference, p, adjusted p) of the final return."""
    found = []
    for label, part in settings.items():
        for first, second in TESTED:
            pair = [_values(matching(part, mask=name), "final") for name in (first, second)]
            gap, p = paired(*pair)
            found.append((label, first, second, gap, p))
    adjusted = holm([p for *_, p in found])
    return [(*one, a) for one, a in zip(found, adjusted, strict=True)]


def _compared(tests: list[tuple[str, str, str, Any, float, float]]) -> Table:
    rows = []
    for first, second in TESTED:
        own = [t for t in tests if t[1:3] == (first, second)]
        better = [t[0] for t in own if t[5] < 0.05 and t[3].value > 0]
        worse = [t[0] for t in own if t[5] < 0.05 and t[3].value < 0]
        at_base = next(t for t in own if t[0] == "base")
        rows.append(
            [
                first,
                second,
                f"{at_base[3]}",
                f"{at_base[5]:.2g}" if at_base[5] == at_base[5] else "-",
                f"{len(better)} of {len(own)}",
                f"{len(worse)} of {len(own)}",
                "; ".join([*better, *(f"worse: {x}" for x in worse)]) or "-",
            ]
        )
    return Table(
        "Differences of the final return, paired by seed",
        ["mask", "against", "at the base>", "p (Holm)>", "better>", "worse>", "where"],
        rows,
        [f"significant at 5 % after Holm's correction for all {len(tests)} tests"],
    )


def _finding(base: pd.DataFrame, tests: list[Any], count: int) -> str:
    def final(name: str) -> str:
        return str(mean(_values(matching(base, mask=name), "final")))

    def tally(first: str, second: str) -> str:
        own = [t for t in tests if t[1:3] == (first, second)]
        up = sum(t[5] < 0.05 and t[3].value > 0 for t in own)
        down = sum(t[5] < 0.05 and t[3].value < 0 for t in own)
        return f"better in {up} and worse in {down} of {count} settings"

    exact = "predictive-kl/topk/exact"
    return (
        f"Final return at the base: no mask {final('none')}, PPO clip {final('ppo-clip')}, top-K KL"
        f" with the ratio direction {final('dppo-topk-kl')}, with the predictive one"
        f" {final(exact)} (exact tail) and {final('predictive-kl/topk/aggregated')} (aggregated)."
        f"  After correction for multiple comparisons the predictive direction (exact tail) is"
        f" {tally(exact, 'dppo-topk-kl')} against the ratio direction of the same divergence; the"
        f" ratio direction is {tally('dppo-topk-kl', 'none')} against no mask, and PPO clip"
        f" {tally('ppo-clip', 'none')}."
    )


def _plots(settings: dict[str, pd.DataFrame]) -> list[Plot]:
    base = settings["base"]
    shown = [name for name in MAIN if name in set(base["mask"])]

    def returns(axes: Any) -> None:
        found = [mean(_values(matching(base, mask=n), "final")) for n in shown]
        y = np.arange(len(shown))
        values = np.array([e.value for e in found])
        low, high = (np.array([getattr(e, end) for e in found]) for end in ("low", "high"))
        axes.errorbar(values, y, xerr=[values - low, high - values], fmt="o", capsize=3)
        axes.set_yticks(y, shown)
        axes.invert_yaxis()
        axes.set_xlabel("final return")

    def against_ratio(axes: Any) -> None:
        gaps = []
        for part in settings.values():
            pair = [
                _values(matching(part, mask=n), "final")
                for n in ("predictive-kl/topk/exact", "dppo-topk-kl")
            ]
            gaps.append(paired(*pair)[0])
        y = np.arange(len(gaps))
        values = np.array([e.value for e in gaps])
        low, high = (np.array([getattr(e, end) for e in gaps]) for end in ("low", "high"))
        axes.errorbar(values, y, xerr=[values - low, high - values], fmt="o", capsize=3)
        axes.axvline(0, color="black", linewidth=1)
        axes.set_yticks(y, list(settings))
        axes.tick_params(axis="y", labelsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("predictive (exact tail) minus ratio direction, final return")

    return [
        Plot("returns.png", "Final return at the base setting", returns),
        Plot("against-ratio.png", "Predictive against ratio direction, top-K KL", against_ratio),
    ]


def violations(frame: pd.DataFrame) -> list[str]:
    """What holds in every run, whatever the masks do to learning."""
    found = []
    none = matching(frame, mask="none")
    if (none["dropped"] != 0).any():
        found.append("no mask drops tokens")
    shares = frame[["dropped", "outside", "effective", "collapsed"]]
    if ((shares < 0) | (shares > 1 + 1e-12)).to_numpy().any():
        found.append("a share is outside of [0, 1]")
    if (frame["divergence"] < 0).any():
        found.append("a divergence is negative")
    return found


STUDY = Study(
    name="training",
    title="Training: return and stability under each mask",
    question="Do policies train better, and more stably, under a mask, and under which?",
    design=(
        "Softmax bandits trained off-policy: 16 contexts, V = 64, a network with one hidden layer,"
        " Adam, group-normalized advantages (8 prompts, groups of 8), 16 updates on each of 60"
        " rollouts, rewards drawn with chances u^4; rollouts lag 8 updates behind; K = 8,"
        f" delta = {DELTA} for every divergence, importance ratios capped at 10; the second-order"
        f" mask reckons with eta = {ETA}.  One factor at a time around that base, and corners of"
        " size, precision and staleness; common random numbers in all.  Return is exact over all"
        f" contexts; a run collapsed if its last tenth earns less than {COLLAPSED:.0%} of its best."
    ),
    cells=cells,
    run=run,
    summarize=summarize,
    violations=violations,
    seeds={"quick": 4, "full": 32},
)
