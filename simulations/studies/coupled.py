"""Study `coupled`: divergence growth against surrogate gain, by who decides what is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pdverify.report.tables import Plot, Table
from simulations.bandit import COUPLED, Streams, Update, divergence
from simulations.bandit.predictions import Step, coefficient, ratio
from simulations.statistics import Estimate, holm, mean, paired, share
from simulations.studies.scenes import Plan, Scene, scene
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

BASE: Cell = vars(Plan(sharing="network", mismatch="stale", distance=16.0, reach=1e-2)) | {
    "delta": 0.15
}
DELTAS = (0.02, 0.05, 0.15)
STEPS = {"sgd": 1e-2, "adam": 3e-3}
"""Optimizer -> step size, `reach` of a plan."""

SHARINGS = ("free", "linear-64", "linear-16", "network", "table")
LEVELS = (0.25, 0.5, 0.75)
"""Shares of the tokens outside that a rule drops, those first that it scores highest."""

OWN, ALL = "own", "1"
"""Level: what the rule itself drops, by sign; and all of the tokens outside."""

RULES = ("random", "ratio", "local", *COUPLED, "coupled-iterated")
MAIN = "predictive-kl-coupled"
Frame: TypeAlias = pd.DataFrame


def cells(level: Level) -> list[Cell]:
    """Sharing x optimizer x delta, then by step size, staleness and batch."""
    found = [
        BASE | {"sharing": sharing, "optimizer": optimizer, "reach": reach, "delta": delta}
        for sharing in SHARINGS
        for optimizer, reach in STEPS.items()
        for delta in DELTAS
    ]
    if level == "quick":
        return [c | {"batch": 32} for c in found]
    for sharing, delta in (("linear-16", 0.05), ("network", 0.15)):
        base = BASE | {"sharing": sharing, "delta": delta}
        found += varied(
            base,
            {"reach": (1e-3, 0.1)},
            {"optimizer": ("adam",), "reach": (1e-4, 1e-3, 1e-2)},
            {"distance": (8.0, 24.0, 64.0)},
            {"batch": (256,)},
            {"optimizer": ("adam",), "reach": (STEPS["adam"],), "batch": (256,)},
        )[1:]
    return found


def run(cell: Cell, seeds: range) -> Frame:
    """What each rule's step does to the tokens outside, of each seed, at each level."""
    rest = dict(cell)
    delta = float(rest.pop("delta"))
    plan = Plan(**rest)
    batches = in_batches(seeds, plan.batch * plan.vocab_size)
    return pd.concat([_batch(plan, delta, batch) for batch in batches], ignore_index=True)


def _batch(plan: Plan, delta: float, seeds: range) -> Frame:
    made = scene(plan, seeds, "coupled")
    update = made.update(resumed=True)
    d = divergence(made.rows, update.logits)
    outside = d > delta
    scores = _scores(made, update, d, delta, seeds)
    first = scores[MAIN] > 0
    frames = [_measured(made, seeds, d, outside, torch.ones_like(outside), rule="none", level="0")]
    frames.append(_measured(made, seeds, d, outside, ~outside, rule="all", level=ALL))
    for rule, score in scores.items():
        scope = torch.ones_like(outside) if rule.endswith("/any") else outside
        for level in (OWN, *LEVELS):
            if level == OWN:
                dropped = scope & (score > 0) & outside.any(-1, keepdim=True)
            else:
                dropped = _highest(score, scope, (float(level) * outside.sum(-1)).round().long())
            same = (outside & ((score > 0) == first)).sum(-1)
            frames.append(
                _measured(made, seeds, d, outside, ~dropped, rule=rule, level=str(level), same=same)
            )
    return pd.concat(frames, ignore_index=True)


def _scores(
    made: Scene, update: Update, d: Tensor, delta: float, seeds: range
) -> dict[str, Tensor]:
    """Rule -> `[S, B]`, the higher, the sooner a token is dropped; positive: dropped by itself."""
    outside = (d > delta).double()
    now = Step(made.policy, made.params, made.params, made.rows, made.rate)
    scores = {
        "random": Streams(seeds, "coupled random").normal("order", d.shape[-1]),
        "ratio": ratio(now),
        "local": now.weights * coefficient(now, "full", None),
    }
    for name, entry in COUPLED.items():
        weight = outside * (d - delta) if entry.hinge else outside
        scores[name] = entry.score(update, weight)
    # the update that was predicted is not the one that is made: look again where that one leads
    dropped = (outside > 0) & (scores[MAIN] > 0)
    after = made.step(_keeping(~dropped), resumed=True)
    moved = replace(update, params=after.after, logits=after.logits(after.after))
    scores["coupled-iterated"] = COUPLED[MAIN].score(moved, outside)
    return scores


def _keeping(kept: Tensor) -> Callable[[Update], Tensor]:
    return lambda update: kept


def _highest(score: Tensor, scope: Tensor, count: Tensor) -> Tensor:
    """The `count` `[S]` highest scores `[S, B]` within the scope."""
    order = score.where(scope, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    places = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1]).expand_as(order)
    )
    return scope & (places < count[:, None])


def _measured(
    made: Scene, seeds: range, d: Tensor, outside: Tensor, kept: Tensor, **columns: Any
) -> Frame:
    step = made.step(_keeping(kept), resumed=True)
    after = step.logits(step.after)
    change = torch.where(outside, divergence(step.rows, after) - d, 0.0)
    at_k = step.rows.tokens[..., None]
    log_pi = torch.log_softmax(after, -1).gather(-1, at_k)[..., 0]
    surrogate = step.rows.advantages * (log_pi - step.rows.log_mu_k).exp()
    return per_seed(
        seeds,
        **({"same": -1} | columns),
        tokens=outside.shape[-1],
        outside=outside.sum(-1),
        kept=kept.sum(-1),
        before=torch.where(outside, d, 0.0).sum(-1),
        change=change.sum(-1),
        rising=(outside & (change > 0)).sum(-1),
        gain=(surrogate - step.weights).mean(-1),
    )


def _growth(part: Frame) -> Any:
    """Relative change of the divergence outside, by seed; NaN where nothing is outside."""
    own = part.sort_values("seed")
    return (own["change"] / own["before"].where(own["before"] > 0)).to_numpy()


def _gain(part: Frame, none: Frame) -> Any:
    """Surrogate gain by seed, in units of the mean gain without a mask."""
    return part.sort_values("seed")["gain"].to_numpy() / none["gain"].mean()


def _share(part: Frame, top: str, bottom: str) -> Estimate:
    own = part.sort_values("seed")
    return share(own[top].to_numpy(), own[bottom].to_numpy())


def _label(cell: dict[str, Any], shown: Sequence[str]) -> str:
    named = {"reach": "h", "distance": "stale"}
    return ", ".join(
        f"{named.get(n, n)} {cell[n]:g}" if not isinstance(cell[n], str) else str(cell[n])
        for n in shown
    )


def _groups(frame: Frame) -> dict[str, tuple[dict[str, Any], Frame]]:
    factors = [n for n in BASE if frame[n].nunique() > 1]
    found = {}
    for key, part in frame.groupby(list(BASE), sort=False):
        cell = dict(zip(BASE, key, strict=True))
        found[_label(cell, factors)] = (cell, part)
    return found


def _where(frame: Frame, optimizer: str) -> Frame:
    """The base setting, under one optimizer."""
    size = {"batch": int(frame["batch"].iloc[0])}
    return matching(
        frame, **(dict(BASE) | size | {"optimizer": optimizer, "reach": STEPS[optimizer]})
    )


def _compare(
    groups: dict[str, tuple[dict[str, Any], Frame]], first: str, second: str, level: str
) -> list[tuple[str, Estimate, float, Estimate, float]]:
    """(setting, growth: first - second, p, gain: first - second, p), p adjusted over settings."""
    found = []
    for label, (_, part) in groups.items():
        none = matching(part, rule="none")
        one, two = (matching(part, rule=r, level=level) for r in (first, second))
        growth = paired(_growth(one), _growth(two))
        gain = paired(_gain(one, none), _gain(two, none))
        found.append((label, *growth, *gain))
    growths, gains = holm([f[2] for f in found]), holm([f[4] for f in found])
    return [(f[0], f[1], p, f[3], q) for f, p, q in zip(found, growths, gains, strict=True)]


def summarize(frame: Frame) -> Summary:
    """Each mask by itself at the base; then differences at equal shares dropped."""
    groups = _groups(frame)
    tables = [_masks(frame, optimizer) for optimizer in ("sgd", "adam")]
    found = _compare(groups, MAIN, "ratio", "0.5")
    local = _compare(groups, "local", "ratio", "0.5")
    apart = _compare(groups, MAIN, "local", "0.5")
    layer = _compare(groups, f"{MAIN}/last-layer", MAIN, "0.5")
    for title, tests in (
        ("Coupled against ratio, half of the tokens outside dropped by each", found),
        ("Local predictive against ratio, half dropped by each", local),
        ("Coupled against local predictive, half dropped by each", apart),
        ("Last layer alone against all layers, half dropped by each", layer),
    ):
        tables.append(
            Table(
                title,
                ["setting", "growth of D outside: difference, points>", "p (Holm)>",
                 "gain: difference, points>", "p (Holm)>"],
                [[x[0], _points(x[1]), _p(x[2]), _points(x[3]), _p(x[4])] for x in tests],
                ["growth: of the sum of D over the tokens outside, % of it; gain: of the surrogate,"
                 " % of the gain without a mask"],
            )
        )  # fmt: skip
    plots = [
        Plot(f"front-{o}.png", f"Base setting, {o}: divergence growth against gain",
             _front(_where(frame, o)))
        for o in ("sgd", "adam")
    ]  # fmt: skip
    return Summary(_finding(frame, found, local, apart), tables, plots)


def _points(gap: Estimate) -> str:
    return str(Estimate(100 * gap.value, 100 * gap.low, 100 * gap.high))


def _p(p: float) -> str:
    return "-" if p != p else f"{p:.2g}"


def _masks(frame: Frame, optimizer: str) -> Table:
    part = _where(frame, optimizer)
    none = matching(part, rule="none")
    rows = []
    for rule in ("none", *RULES, "all"):
        level = {"none": "0", "all": ALL}.get(rule, OWN)
        own = matching(part, rule=rule, level=level)
        same = "-" if (own["same"] < 0).any() else _share(own, "same", "outside").percent
        rows.append(
            [
                rule,
                _share(own, "kept", "tokens").percent,
                _share(own, "change", "before").percent,
                _share(own, "rising", "outside").percent,
                mean(_gain(own, none)).percent,
                same,
            ]
        )
    return Table(
        f"Base setting, {optimizer}: each mask by its own sign",
        ["mask", "kept, %>", "growth of D outside, %>", "tokens outside that rise, %>",
         "gain, % of none's>", "same decision as coupled, %>"],
        rows,
        ["random drops half of the tokens outside; all drops all of them"],
    )  # fmt: skip


def _front(part: Frame) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        none, everything = matching(part, rule="none"), matching(part, rule="all")
        for place, rule in enumerate(RULES):
            own = [matching(part, rule=rule, level=str(x)) for x in LEVELS]
            ends = [none, *own] if rule.endswith("/any") else [none, *own, everything]
            x = [100 * np.mean(_gain(p, none)) for p in ends]
            y = [100 * _share(p, "change", "before").value for p in ends]
            axes.plot(x, y, marker="osd^v<>P*"[place], markersize=5, label=rule,
                      color=f"C{place}", linestyle=("-", "--")[place % 2])  # fmt: skip
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlabel("surrogate gain, % of that without a mask")
        axes.set_ylabel("growth of D outside, %")
        axes.annotate("no mask", (100, 100 * _share(none, "change", "before").value))

    return draw


def _finding(frame: Frame, found: list[Any], local: list[Any], apart: list[Any]) -> str:
    def at(optimizer: str, rule: str) -> str:
        part = _where(frame, optimizer)
        own = matching(part, rule=rule, level="0.5")
        gain = mean(_gain(own, matching(part, rule="none"))).percent
        return f"{_share(own, 'change', 'before').percent} % (gain {gain} %)"

    def tally(tests: list[Any]) -> str:
        lower = sum(t[2] < 0.05 and t[1].value < 0 for t in tests)
        higher = sum(t[2] < 0.05 and t[1].value > 0 for t in tests)
        less = sum(t[4] < 0.05 and t[3].value < 0 for t in tests)
        more = sum(t[4] < 0.05 and t[3].value > 0 for t in tests)
        both = sum(t[2] < 0.05 and t[1].value < 0 and not (t[4] < 0.05 and t[3].value < 0)
                   for t in tests)  # fmt: skip
        return (
            f"grows less in {lower} and more in {higher} of {len(tests)} settings, at a gain that"
            f" is smaller in {less} and larger in {more}; less growth without a smaller gain in"
            f" {both}"
        )

    return (
        "When each rule drops half of the tokens outside, the divergence outside changes in a"
        f" network by {at('sgd', MAIN)} under the coupled direction, {at('sgd', 'ratio')} under"
        f" the ratio, {at('sgd', 'local')} under the local predictive direction,"
        f" {at('sgd', 'random')} at random (gradient descent); with Adam {at('adam', MAIN)},"
        f" {at('adam', 'ratio')}, {at('adam', 'local')}, {at('adam', 'random')}.  Coupled against"
        f" ratio (paired, Holm, 5 %): D {tally(found)}.  Local against ratio: D {tally(local)}."
        f"  Coupled against local: D {tally(apart)}."
    )


def violations(frame: Frame) -> list[str]:
    """With free logits and gradient descent the coupled direction is the predictive one."""
    found = []
    free = matching(frame, sharing="free", optimizer="sgd", level=OWN)
    one, two = (
        matching(free, rule=r).sort_values(["delta", "seed"])["kept"].to_numpy()
        for r in (MAIN, "local")
    )
    if (one != two).any() or not len(one):
        found.append(
            f"free logits: coupled and local keep differently in {(one != two).sum()} runs"
        )
    own = frame[frame["rule"].isin(RULES) & (frame["level"] == "0.5")]
    if (own["tokens"] - own["kept"] != (own["outside"] * 0.5).round()).any():
        found.append("a rule does not drop half of the tokens outside")
    return found


STUDY = Study(
    name="coupled",
    title="The coupled direction: drop what pushes the whole region outside further",
    question=(
        "Outside the trust region, is the divergence held down better, and at what loss of the"
        " surrogate's gain, when a token is judged by what its part of the step does to all tokens"
        " outside, instead of to itself?"
    ),
    design=(
        "A rollout of a stale policy (16 Adam updates on normal rewards behind) and one step, plain"
        " gradient descent or Adam with both moments of those 16 updates.  Every rule scores each"
        " token: the ratio `A log r`, the local coefficient `A r C` of the full forward KL, the"
        " coupled masks (`simulations/bandit/coupled.py`: all layers, last layer, weighed by the"
        " excess over delta, tokens inside droppable too, total variation), the coupled one a"
        " second time where its first decision leads (iterated), and chance.  A rule drops a"
        " quarter, half or three quarters of the tokens outside, those with the highest scores"
        " first, or by its own sign; then the step is made, and the change of the forward KL summed"
        " over the tokens outside (the same for every rule) and the surrogate's gain are measured."
        "  Base: a"
        " network, 64 tokens, V = 100, delta = 0.15; 64 batches, one a seed."
    ),
    cells=cells,
    run=run,
    summarize=summarize,
    violations=violations,
    seeds={"quick": 8, "full": 64},
)
