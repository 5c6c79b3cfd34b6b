"""Stages: which numbers they round, and that the radii hold the exact ones."""

from __future__ import annotations

import numpy as np
import pytest

from pdverify.batch import InputError
from pdverify.cases import build
from pdverify.definitions.cells import log_softmax
from pdverify.precision.stages import (
    STAGES,
    TEMPERATURE,
    Setting,
    Source,
    exact_rows,
    prepare,
    source_of,
    together,
)

CELLS = [(name, f) for name, stage in STAGES.items() for f in stage.formats if not stage.model]


def source(family: str = "peaked", seed: int = 0) -> Source:
    batch = build(family, seed, sequences=2, length=16, vocab_size=257, top_k=20, dtype="fp32")
    return source_of(family, batch)


@pytest.mark.parametrize(("stage", "number_format"), CELLS)
@pytest.mark.parametrize("family", ["peaked", "flat", "near-one-hot"])
def test_radii_hold_the_exact_numbers(stage, number_format, family):
    here = source(family)
    setting = together(stage, number_format)
    exact, found = exact_rows(here, setting), prepare(here, setting)

    def held(stored, radius, true):
        radius = np.zeros_like(stored) if radius is None else radius
        with np.errstate(invalid="ignore"):
            off = np.where(stored == true, 0.0, np.abs(stored - true))
        return bool((off <= radius).all())

    assert held(found.rows.logits, found.radii.logits, exact.logits)
    assert held(found.rows.behavior_logits, found.radii.behavior_logits, exact.behavior_logits)
    log_mu = log_softmax(exact.behavior_logits)
    listed = np.take_along_axis(log_mu, found.rows.topk_ids, axis=-1)
    assert held(found.rows.topk_logprobs, found.radii.logprobs, listed)
    own = np.take_along_axis(log_mu, here.tokens[:, None], axis=-1)[:, 0]
    assert held(found.rows.behavior_logprobs, found.radii.sampled, own)


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3"])
def test_the_band_holds_every_token_that_may_belong_to_the_list_or_not(name):
    here = source("flat")
    found = prepare(here, Setting(selection=name))
    exact = exact_rows(here, Setting())
    size = here.vocab_size
    for ids, true, band in zip(found.rows.topk_ids, exact.topk_ids, found.band, strict=True):
        differ = np.isin(np.arange(size), ids) != np.isin(np.arange(size), true)
        assert not (differ & ~band).any()
    assert (found.rows.topk_ids != exact.topk_ids).any()


def test_nothing_is_rounded_without_a_stage():
    here = source()
    found = prepare(here, Setting())
    assert (found.rows.logits == here.logits).all()
    assert all(x is None for x in vars(found.radii).values())


def test_the_temperature_divides_before_or_after_the_upcast():
    here = source()
    exact = exact_rows(here, together("temperature-after", "bf16"))
    assert (exact.logits == here.logits / TEMPERATURE).all()
    before = prepare(here, together("temperature-before", "bf16")).rows.logits
    after = prepare(here, together("temperature-after", "bf16")).rows.logits
    off = [np.abs(x - exact.logits).max() for x in (before, after)]
    assert off[1] < off[0]


def test_stages_combine():
    both = together("stored-logits+softmax", "bf16")
    assert (both.logits, both.arithmetic.elementwise) == ("bf16", "bf16")


def test_a_rollout_replaces_the_behavior_policy():
    here = source()
    moved = here.behavior_logits + 0.01
    rolled = Source(**{**vars(here), "rollouts": {("rollout", "bf16"): moved}})
    found = prepare(rolled, Setting(rollout=("rollout", "bf16")))
    assert (found.rows.behavior_logits == moved).all()
    assert (found.radii.behavior_logits >= np.abs(moved - here.behavior_logits)).all()
    with pytest.raises(InputError, match="fp8-row: peaked has rollouts: none"):
        prepare(here, Setting(rollout=("rollout", "fp8-row")))


def test_two_rollouts_at_once_are_refused():
    with pytest.raises(InputError, match="a rollout runs once: lm-head or rollout"):
        together("lm-head+softmax+rollout", "bf16")
