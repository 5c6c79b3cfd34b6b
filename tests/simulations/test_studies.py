"""Each study: cells, results, page, and what theory guarantees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pdverify.definitions import masks
from pdverify.definitions.masks import MASKS
from simulations.bandit import variants
from simulations.pages import factors, page
from simulations.runner import described, read
from simulations.studies import STUDIES, direction, estimator_bias, training
from simulations.studies.study import matching, varied

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/studies"
NAMES = list(STUDIES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", ["quick", "full"])
def test_at_least_thirty_cells_all_different_with_the_same_factors(name, level):
    cells = STUDIES[name].cells(level)
    assert len(cells) >= 30
    assert len({tuple(cell.items()) for cell in cells}) == len(cells)
    assert len({tuple(cell) for cell in cells}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_is_the_same_for_any_batch_of_seeds(name):
    study = STUDIES[name]
    cell = study.cells("quick")[-1]
    together = study.run(cell, range(3))
    alone = study.run(cell, range(1, 2))
    assert not set(together.columns) & set(cell) - {"seed"}
    own = together[together["seed"] == 1].reset_index(drop=True)
    pd.testing.assert_frame_equal(own, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_of_full_runs(name):
    least = {"unsafe-keep": 61, "training": 20}.get(name, 10)
    assert STUDIES[name].seeds["full"] >= least


def test_a_new_mask_appears_in_training(monkeypatch):
    monkeypatch.setattr(MASKS, "_entries", dict(MASKS._entries))
    masks._add("predictive-kl-twin", "for this test", "predictive", "kl")
    twins = {name for name in variants() if name.startswith("predictive-kl-twin")}
    assert len(twins) == 5
    cells = training.STUDY.cells("full")
    assert twins <= {cell["mask"] for cell in cells}
    cell = next(c for c in training.STUDY.cells("quick") if c["mask"] in twins)
    own = training.STUDY.run(cell, range(2))
    plain = cell | {"mask": cell["mask"].replace("-twin", "")}
    pd.testing.assert_frame_equal(own, training.STUDY.run(plain, range(2)))


def test_theory_is_asserted_of_directions():
    """A direction that is wrong on free logits is reported, whatever else it does."""
    cell = direction.BASE | {"sharing": "free", "reach": direction.VANISHING, "batch": 16}
    frame = direction.run(cell, range(4))
    for name, value in cell.items():
        frame[name] = value
    own = (frame["prediction"] == "full") & (frame["view"] == "full")
    assert not [x for x in direction.violations(frame) if x.startswith("free, full")]
    frame.loc[own, "agreed"] -= 1
    assert [x for x in direction.violations(frame) if x.startswith("free, full")]


def test_theory_is_asserted_of_estimators():
    frame = pd.DataFrame({"above": [0.0], "certainly_wrong": [1.0], "surely_wrong": [0.0]})
    (line,) = estimator_bias.violations(frame)
    assert "certified signs" in line


@pytest.mark.parametrize("shape", estimator_bias.SHAPES)
def test_shapes_of_tails(shape):
    from simulations.bandit import Streams

    y = estimator_bias.logits_of(shape, Streams(range(2), "shape"), 4, 2_000)
    p = np.exp(y.numpy())
    p /= p.sum(-1, keepdims=True)
    top = np.sort(p, -1)[..., -20:].sum(-1).mean()
    exponent = {"flat": 0.0, "heavy": 1.2}.get(shape)
    exponent = float(shape[5:]) if exponent is None else exponent
    ranks = np.arange(1, 2_001) ** -exponent
    # noise of half a nat on every token spreads the mass by a factor of e^(1/2) at most
    assert ranks[:20].sum() / ranks.sum() / 1.7 < top < 1.7 * ranks[:20].sum() / ranks.sum() + 0.05


def test_varied_has_no_repetition():
    found = varied({"a": 1, "b": 2}, {"a": (1, 3)}, {"a": (3,), "b": (2, 4)})
    assert found == [{"a": 1, "b": 2}, {"a": 3, "b": 2}, {"a": 3, "b": 4}]


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_page_is_that_of_its_results(name):
    study = STUDIES[name]
    results = PAGES / name / "results.parquet"
    said, frame = described(results), read(results)
    assert said["level"] == "full"
    cells = int(frame.groupby(factors(study, said), sort=False).ngroups)
    assert cells == len(study.cells("full"))
    assert study.violations(frame) == []
    written = page(study, study.summarize(frame), said, cells, name)
    assert (PAGES / f"{name}.md").read_text() == written
    for plot in study.summarize(frame).plots:
        assert (PAGES / name / plot.name).stat().st_size


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_page_makes_its_numbers(name):
    """A cell of the full run, for its first seeds, again."""
    study = STUDIES[name]
    frame = read(PAGES / name / "results.parquet")
    cells = study.cells("full")
    cell = cells[len(cells) // 3]
    seeds = range(2)
    again = study.run(cell, seeds)
    kept = matching(frame, **cell)
    kept = kept[kept["seed"].isin(seeds)].drop(columns=list(cell)).reset_index(drop=True)
    assert len(kept) == len(again)
    # other processors round sums differently; a chaotic training run carries it further
    pd.testing.assert_frame_equal(
        kept.sort_values(list(_labels(kept))).reset_index(drop=True),
        again.sort_values(list(_labels(again))).reset_index(drop=True),
        rtol=1e-6,
        atol=1e-9,
    )


def _labels(frame):
    return [c for c in frame.columns if c == "seed" or frame[c].dtype.kind not in "fiu"]
