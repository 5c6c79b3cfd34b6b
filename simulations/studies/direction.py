"""Study `direction`: which prediction agrees with what the step really does to the divergence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from pdverify.report.tables import Plot, Table
from simulations.bandit import PREDICTIONS, divergence
from simulations.statistics import Estimate, share
from simulations.studies.scenes import MISMATCHES, SHARING, Plan, scene
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

REACHES = (1e-6, 1e-3, 1e-2, 0.1, 1.0)
VANISHING = REACHES[0]
BASE: Cell = vars(Plan())
RESOLVED = 2.0**-40
"""A change below this share of D (or of 1, where D is larger) is lost in its rounding."""


def cells(level: Level) -> list[Cell]:
    """Sharing x step size; then one factor after the other, from free logits to a network."""
    sizes = {"free", "linear-16", "network"}
    found = varied(BASE, {"sharing": tuple(SHARING), "reach": REACHES})
    if level == "quick":
        return [c | {"batch": 32} for c in found]
    for name in SHARING:
        base = BASE | {"sharing": name}
        if name in sizes:
            found += varied(
                base,
                {"distance": (0.03, 0.1, 1.0, 2.0)},
                {"spread": (0.5, 3.0, 5.0)},
                {"top_k": (1, 5, 50)},
                {"vocab_size": (32, 1_000, 10_000)},
                {"mismatch": MISMATCHES},
            )[1:]
            found += varied(base, {"mismatch": ("stale",), "distance": (8.0, 24.0, 64.0)})[1:]
        if name not in ("free", "table"):
            found += varied(base, {"optimizer": ("adam",), "reach": (1e-4, 1e-3, 1e-2)})[1:]
    return [c for i, c in enumerate(found) if c not in found[:i]]


def run(cell: Cell, seeds: range) -> pd.DataFrame:
    """Tokens, and agreements of each prediction, of each seed."""
    plan = Plan(**cell)
    if plan.mismatch == "stale" and plan.distance < 1:
        plan = Plan(**(cell | {"distance": 24.0}))
    batches = in_batches(seeds, plan.batch * plan.vocab_size)
    return pd.concat([_batch(plan, batch) for batch in batches], ignore_index=True)


def _batch(plan: Plan, seeds: range) -> pd.DataFrame:
    step = scene(plan, seeds, "direction").step()
    rows, before, after = step.rows, step.logits(step.before), step.logits(step.after)
    said = {name: entry.predict(step).sign() for name, entry in PREDICTIONS.items()}
    found = []
    for view in ("full", "topk"):
        d = divergence(rows, before, "kl", view)
        change = divergence(rows, after, "kl", view) - d
        resolved = change.abs() > RESOLVED * d.clamp_max(1.0)
        resolved &= (rows.advantages != 0) & d.isfinite()
        for name, entry in PREDICTIONS.items():
            if entry.partition not in (None, view):
                continue
            right = resolved & (said[name] == change.sign())
            differs = resolved & (said[name] != said["ratio"])
            found.append(
                per_seed(
                    seeds,
                    view=view,
                    prediction=name,
                    tokens=resolved.sum(-1),
                    unresolved=(~resolved).sum(-1),
                    agreed=right.sum(-1),
                    differs=differs.sum(-1),
                    right_where_differs=(right & differs).sum(-1),
                    divergence=d.mean(-1),
                )
            )
    return pd.concat(found, ignore_index=True)


def agreement(frame: pd.DataFrame) -> Estimate:
    """Share of tokens whose change of the divergence was predicted in sign."""
    of_seed = frame.groupby("seed")[["agreed", "tokens"]].sum()
    return share(of_seed["agreed"].to_numpy(), of_seed["tokens"].to_numpy())


def _where_differs(frame: pd.DataFrame) -> tuple[Estimate, int]:
    of_seed = frame.groupby("seed")[["right_where_differs", "differs"]].sum()
    found = share(of_seed["right_where_differs"].to_numpy(), of_seed["differs"].to_numpy())
    return found, int(of_seed["differs"].sum())


def _own(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows of a prediction on the divergence that it is about."""
    return matching(frame, prediction=name, view=PREDICTIONS[name].partition or "full")


def _factor_table(frame: pd.DataFrame, title: str, factor: str, shown: str) -> Table:
    rows = []
    for value in sorted(frame[factor].unique(), key=str if factor == "mismatch" else None):
        part = matching(frame, **{factor: value})
        cells = [agreement(_own(part, name)).percent for name in PREDICTIONS]
        d = _own(part, "full")["divergence"].mean()
        rows.append([f"{value:g}" if factor != "mismatch" else str(value), f"{d:.2g}", *cells])
    return Table(title, [shown, "mean D>", *(f"{name}>" for name in PREDICTIONS)], rows)


def summarize(frame: pd.DataFrame) -> Summary:
    """Agreement by sharing and step size, then by the other factors."""
    base = _base_of(frame)
    grid = matching(frame, **{k: v for k, v in base.items() if k not in ("sharing", "reach")})
    tables = []
    for sharing in SHARING:
        part = matching(grid, sharing=sharing)
        tables.append(
            _factor_table(part, f"{sharing}: agreement with the realized change, %", "reach", "h")
        )
    for factor, shown in (
        ("distance", "distance"),
        ("spread", "spread"),
        ("top_k", "K"),
        ("vocab_size", "V"),
        ("mismatch", "mismatch"),
    ):
        for sharing in ("free", "linear-16", "network"):
            fixed = base | {"sharing": sharing}
            part = matching(frame, **{k: v for k, v in fixed.items() if k != factor})
            if part[factor].nunique() > 1:
                title = f"{sharing}: by {shown} (h = {base['reach']:g})"
                tables.append(_factor_table(part, title, factor, shown))
    stale = matching(frame, mismatch="stale")
    for sharing in ("free", "linear-16", "network"):
        part = matching(stale, sharing=sharing)
        part = part[part["distance"] >= 1]
        if len(part):
            tables.append(
                _factor_table(part, f"{sharing}: by updates of staleness", "distance", "updates")
            )
    adam = matching(frame, optimizer="adam")
    for sharing in SHARING:
        part = matching(adam, sharing=sharing)
        if len(part):
            tables.append(
                _factor_table(part, f"{sharing}: Adam, by learning rate", "reach", "rate")
            )
    tables.append(_disagreements(grid))
    return Summary(_finding(grid), tables, _plots(grid))


def _base_of(frame: pd.DataFrame) -> dict[str, Any]:
    """The base cell at the sizes of these results."""
    return dict(BASE) | {"batch": int(frame["batch"].iloc[0])}


def _disagreements(grid: pd.DataFrame) -> Table:
    rows = []
    for sharing in SHARING:
        for reach in (1e-3, 0.1):
            part = matching(grid, sharing=sharing, reach=reach)
            right, count = _where_differs(_own(part, "full"))
            rows.append([sharing, f"{reach:g}", f"{count:,}", right.percent])
    return Table(
        "Where full and ratio disagree: how often full is right",
        ["sharing", "h>", "tokens>", "full right, %>"],
        rows,
    )


def _finding(grid: pd.DataFrame) -> str:
    def at(sharing: str, name: str, reach: float = 1e-3) -> str:
        part = matching(grid, sharing=sharing, reach=reach)
        return agreement(_own(part, name)).percent

    free = agreement(_own(matching(grid, sharing="free", reach=VANISHING), "full"))
    right, count = _where_differs(_own(matching(grid, sharing="network", reach=1e-3), "full"))
    return (
        f"With free logits and a vanishing step (h = {VANISHING:g}) the coefficient of the full"
        f" divergence agrees with the realized change on {100 * free.value:.2f} % of tokens, the"
        f" ratio on {at('free', 'ratio', VANISHING)} %.  As logits are shared, both fall towards"
        f" chance: at h = 0.001 full and ratio agree on {at('linear-16', 'full')} % and"
        f" {at('linear-16', 'ratio')} % with 16 shared features, {at('network', 'full')} % and"
        f" {at('network', 'ratio')} % in a network, where full is right on {right.percent} % of"
        f" the {count:,} tokens on which the two disagree.  What the other tokens' steps do is"
        f" what is missing: Gram reaches {at('linear-16', 'gram')} % and {at('network', 'gram')} %,"
        f" the update pushed through the policy (JVP) {at('linear-16', 'jvp')} % and"
        f" {at('network', 'jvp')} %."
    )


def _plots(grid: pd.DataFrame) -> list[Plot]:
    def against_step(sharing: str) -> Any:
        def draw(axes: Any) -> None:
            part = matching(grid, sharing=sharing)
            for name in PREDICTIONS:
                found = [agreement(_own(matching(part, reach=h), name)) for h in REACHES]
                _line(axes, REACHES, found, name)
            axes.set_xscale("log")
            axes.set_xlabel("step h")
            _percent(axes)

        return draw

    def against_sharing(axes: Any) -> None:
        part = matching(grid, reach=1e-3)
        for name in PREDICTIONS:
            found = [agreement(_own(matching(part, sharing=s), name)) for s in SHARING]
            _line(axes, list(SHARING), found, name)
        axes.set_xlabel("sharing")
        _percent(axes)

    return [
        Plot("sharing.png", "Agreement with the realized change, h = 0.001", against_sharing),
        Plot("steps-free.png", "Free logits", against_step("free")),
        Plot("steps-network.png", "A network", against_step("network")),
    ]


def _line(axes: Any, x: Any, found: list[Estimate], name: str) -> None:
    place = list(PREDICTIONS).index(name)
    y = np.array([e.value for e in found])
    low, high = (np.array([getattr(e, end) for e in found]) for end in ("low", "high"))
    marker = "osd^v<>*"[place % 8]
    axes.errorbar(
        x, y, [y - low, high - y], label=name, marker=marker, markersize=4, capsize=2,
        linestyle="-" if place < 8 else "--",
    )  # fmt: skip


def _percent(axes: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("tokens predicted in sign")


def violations(frame: pd.DataFrame) -> list[str]:
    """Free logits, vanishing step: 100 % for exact coefficients; Gram and JVP: where exact."""
    found = []
    vanishing = matching(frame, reach=VANISHING, optimizer="sgd")
    exact: dict[str, tuple[str, ...]] = {
        "free": ("full", "exact", "second-order", "gram", "jvp"),
    }
    exact |= {name: ("gram", "jvp") for name in SHARING if name not in ("free", "network")}
    exact["network"] = ("jvp",)
    for sharing, names in exact.items():
        for name in names:
            part = _own(matching(vanishing, sharing=sharing), name)
            wrong = int((part["tokens"] - part["agreed"]).sum())
            total = int(part["tokens"].sum())
            # first order is exact only in the limit: tokens whose first order is near 0 may differ
            allowed = 0 if sharing == "free" else total // 1000
            if total == 0 or wrong > allowed:
                found.append(f"{sharing}, {name}: {wrong} of {total} tokens disagree at h -> 0")
    return found


STUDY = Study(
    name="direction",
    title="Direction: what is said of the next change of the divergence",
    question="Which direction criterion agrees with what the step really does to the divergence?",
    design=(
        "Two policies over V arms, a rollout of one, and one real update of the other without a"
        " mask.  For every token: the sign of the realized change of the forward KL, against the"
        " sign that each criterion predicts: the ratio, the top-K coefficient with each tail"
        " (against the change of the top-K divergence), the coefficient of the full divergence,"
        " the same with its second order, and two predictions that see all tokens of the batch:"
        " Gram through the last layer, and the actual update in forward mode (JVP).  Base: V = 100,"
        " K = 20, distance 0.3 nats (standard deviation of the log-ratio) by noise on the"
        " parameters, plain gradient descent that moves a free token's logits by h A r.  Changes"
        " below 2^-40 of the divergence are lost in rounding and left out."
    ),
    cells=cells,
    run=run,
    summarize=summarize,
    violations=violations,
    seeds={"quick": 8, "full": 64},
)
