"""No decision flips outside its certificate, at any stage; one that is too small shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdverify.cases import build
from pdverify.oracle import Judge
from pdverify.precision import study
from pdverify.precision.certify import Estimate
from pdverify.precision.evaluate import Arithmetic, Evaluation
from pdverify.precision.forms import FORMS
from pdverify.precision.records import Options
from pdverify.precision.stages import STAGES, source_of
from pdverify.tools import low_precision

FAMILIES = ("peaked", "flat", "zipf", "near-equal", "near-one-hot", "training-tail")


def small(family: str, seed: int = 0) -> study.Source:
    batch = build(family, seed, sequences=2, length=12, vocab_size=129, top_k=12, dtype="fp32")
    return source_of(family, batch, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage_and_format_holds(family):
    options = Options(divergences=("kl", "reverse-kl", "tv"), level="quick")
    found = study.study(small(family), options, lambda *_: None)
    assert {x.row.stage for x in found} == {n for n, stage in STAGES.items() if not stage.model}
    assert sum(x.decisions for x in found) > 1000
    assert sum(x.close for x in found) > 200
    assert [x.row for x in found if x.row.wrong] == []


def test_a_certificate_that_is_too_small_is_refuted(monkeypatch):
    def small_bound(self):
        return np.asarray((self.noise + self.rounding) / 200)

    monkeypatch.setattr(Estimate, "bound", property(small_bound))
    found = study.study(small("peaked"), Options(stages=("softmax",)), lambda *_: None)
    assert sum(x.row.wrong for x in found) > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["peaked", "near-equal"])
def test_running_bounds_of_every_form_hold(family, form):
    rows = build(family, 1, sequences=2, length=16, vocab_size=300, top_k=20, dtype="fp32").rows()
    judge, entry = Judge(rows), FORMS[form]
    orders = ("pairwise", "naive", "blocked", "compensated")
    kinds = [Arithmetic("fp32", f, order) for f in ("fp32", "bf16", "fp16") for order in orders]
    for kind in (
        *kinds,
        Arithmetic("bf16", "bf16"),
        Arithmetic("tf32"),
        Arithmetic("fp64", "fp64"),
    ):
        evaluation = Evaluation(rows, kind)
        for name in entry.divergences:
            for part, tail in study.VIEWS:
                if part not in entry.partitions:
                    continue
                c = evaluation.coefficient(name, part, tail, form)
                estimate = Estimate(c.value, np.zeros(len(rows)), c.bound)
                assert not estimate.beyond(judge.coefficient(name, part, tail)).any(), (kind, name)


def test_bits_follow_the_formats():
    source = small("flat")
    options = Options(stages=("softmax",), divergences=("kl",))
    bits = {
        x.row.format: x.row.bits
        for x in study.study(source, options, lambda *_: None)
        if x.row.partition == "full"
    }
    assert bits["fp32"] > bits["fp16"] > bits["bf16"]
    assert 4 < bits["bf16"] < 12
    assert 18 < bits["fp32"] < 28


def test_run_counts_what_it_judged_and_the_seed_decides():
    options = Options(inputs=("flat",), stages=("softmax",), formats=("bf16",))
    first, again = (low_precision.run(options, lambda *_: None) for _ in range(2))
    assert first.wrong == 0
    assert first.decisions == again.decisions > 0
    assert first.rows == again.rows
    other = low_precision.run(replace(options, seed=1), lambda *_: None)
    assert other.rows != first.rows
