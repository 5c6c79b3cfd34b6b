"""The study as a whole, and rollouts in low precision."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pdverify.cases import build
from pdverify.definitions.cells import build as cells_of
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.formats import SCALED, storage
from pdverify.precision.records import Options
from pdverify.precision.stages import Setting, exact_rows, source_of
from pdverify.tools import low_precision
from pdverify.tools.lm import why_unavailable


def _nothing(*_):
    return None


def test_weights_and_activations_go_through_the_format():
    import torch

    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 130, bias=False).requires_grad_(False)
    model = SimpleNamespace(model=SimpleNamespace(layers=torch.nn.ModuleList([layer])))
    x = torch.randn(3, 5, 256)
    for recipe in SCALED:
        of_x = storage("fp8-group" if recipe == "fp8-block" else recipe)
        w = storage(recipe).store(layer.weight.numpy()).values
        rounded = of_x.store(x.reshape(15, 256).numpy()).values.reshape(3, 5, 256)
        for activations, here in ((False, x.double().numpy()), (True, rounded)):
            found = low_precision.quantized(model, recipe, activations=activations)
            got = found.model.layers[0](x).numpy()
            assert np.allclose(got, here @ w.T, rtol=0, atol=2e-5), recipe
    assert not np.allclose(layer(x).numpy(), x.double().numpy() @ w.T, atol=1e-3)


def test_a_bf16_accumulator_rounds_after_every_term():
    import torch

    # 256 + 1 is not a bf16 number: the ones get lost
    hidden, weight = torch.ones(1, 101), torch.ones(1, 101)
    hidden[0, 0] = 256
    assert low_precision._one_by_one(hidden, weight).item() == 256
    hidden[0, 0] = 1
    assert low_precision._one_by_one(hidden, weight).item() == 101


def test_rollout_rows_are_those_of_the_definitions():
    batch = build("peaked", 0, sequences=4, length=16, vocab_size=200, top_k=20, dtype="fp32")
    source = source_of("real", batch)
    rng = np.random.default_rng(0)
    moved = source.behavior_logits + 0.3 * rng.standard_normal(source.behavior_logits.shape)
    source.rollouts["rollout", "bf16"] = moved
    rows = list(low_precision.rollout_rows(source, 0))
    assert [(x.training, x.recipe) for x in rows] == [
        ("the same weights", "rollout bf16"),
        ("a few steps ahead", "fp32"),
        ("a few steps ahead", "rollout bf16"),
    ]
    cells = cells_of(exact_rows(source, Setting()), "full")
    d = DIVERGENCES["kl"].cell(cells.mu, cells.pi).sum(-1)
    assert rows[1].median == pytest.approx(np.median(d))
    assert rows[1].outside.count == (d > low_precision.DELTA).sum()
    for row in rows:
        rates = {x.mask: x.rate for x in row.drops}
        assert rates["none"].count == 0
        assert 0 < rates["predictive-kl:full"].count <= row.outside.count
        off = {x.mask: x.rate.count for x in row.disagreements}
        assert off["exact"] <= off["ratio"]


def test_the_seed_decides_and_decisions_are_counted():
    options = Options(
        inputs=("flat",), stages=("softmax", "stored-logits"), formats=("bf16",), tokens=24
    )
    first, again = (low_precision.run(options, _nothing) for _ in range(2))
    assert first.rows == again.rows
    assert first.decisions == sum(first.by_vocab.values()) > 0
    assert first.close >= first.decisions / 5
    assert any("lm-head" in note for note in first.notes)
    assert first.command == (
        "pdverify precision --level quick --seed 0 --input flat --format bf16"
        " --stage softmax stored-logits --tokens 24"
    )


@pytest.mark.model
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_real_rollouts_hold_their_certificates():
    options = Options(
        inputs=("real",),
        formats=("bf16",),
        stages=("lm-head", "lm-head-sums", "rollout"),
        tokens=6,
    )
    report = low_precision.run(options, _nothing)
    assert report.wrong == 0
    assert report.decisions > 0
    assert {x.stage for x in report.rows} == set(options.stages)
    recipes = [x.recipe for x in report.rollouts if x.training == "the same weights"]
    assert recipes == ["lm-head bf16", "lm-head-sums bf16", "rollout bf16"]
    sums, product = (
        next(x.median for x in report.rollouts if x.recipe == name)
        for name in ("lm-head-sums bf16", "lm-head bf16")
    )
    assert sums > 10 * product
