"""Judging the built-ins: selection, thresholds, tables, and that nothing is judged silently."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdverify.backends import BACKENDS
from pdverify.cases import build
from pdverify.cases.recordings import default_recording, load_recording
from pdverify.conformance import builtin
from pdverify.conformance.builtin import NothingSelected, check_builtins, list_entries
from pdverify.conformance.truth import distance, excused, over_budget
from pdverify.definitions.masks import MASKS
from pdverify.oracle import Enclosure
from pdverify.registry import UnknownName


def check(families=("zipf",), real=None, **options):
    return check_builtins(real or {}, "none", families=families, workers=1, **options)


def test_every_mask_view_and_tail_of_every_backend_is_an_entry():
    names = [entry.name for entry in list_entries()]
    assert len(names) == len(set(names)) == len(BACKENDS) * (6 + 8 * 5)
    assert "torch-eager/predictive-tv/topk/bracket" in names
    assert "numpy/predictive-kl-second-order/full" in names
    assert {entry.mask for entry in list_entries()} == set(MASKS)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"mask": "predictive-kl", "view": "full"}, {"predictive-kl/full"}),
        ({"select": ["*/dppo-topk-kl/*"]}, {"dppo-topk-kl/topk"}),
        (
            {"mask": "predictive-kl", "deselect": ["*/full", "*/bracket", "*/exact"]},
            {"predictive-kl/topk/aggregated", "predictive-kl/topk/uniform"},
        ),
        ({"mask": "predictive-tv", "tail": "exact"}, {"predictive-tv/topk/exact"}),
    ],
)
def test_filters(options, left):
    names = {entry.name.split("/", 1)[1] for entry in list_entries(**options)}
    assert names == left


def test_nothing_left_is_an_error():
    with pytest.raises(NothingSelected, match="no entry to judge"):
        list_entries(select=["torch-lazy/*"])


def test_an_unknown_mask_or_family_lists_the_close_ones():
    with pytest.raises(UnknownName, match="predictive-kl"):
        list_entries(mask="predictive-kll")
    with pytest.raises(UnknownName, match="zipf"):
        check(families=["zipff"])


def test_right_backends_conform_and_every_decision_is_counted():
    report = check(families=["zipf", "sampled-outside"])
    assert report.conforms
    judged = [entry for entry in report.entries if entry.unavailable is None]
    assert {entry.backend for entry in judged} >= {"numpy", "torch-eager", "vocab-parallel"}
    assert all(entry.passed and entry.message == "conforms" for entry in judged)
    assert sum(entry.decisions.wrong for entry in judged) == 0
    for entry in judged:
        assert 0 < entry.decisions.determined <= entry.decisions.total
        for error in (entry.divergence_error, entry.coefficient_error, entry.loss_error):
            assert error is None or 0 <= error <= 1
    tokens = sum(given.tokens for given in report.inputs)
    none = next(entry for entry in report.entries if entry.mask == "none")
    assert none.decisions.total == tokens


def test_the_number_of_processes_changes_nothing():
    options = {"families": ["zipf", "ties"], "mask": "predictive-kl", "view": "full"}
    one = check_builtins({}, "none", workers=1, **options)
    two = check_builtins({}, "none", workers=2, **options)
    assert one.entries == two.entries
    assert one.inputs == two.inputs


def test_the_callers_threshold_is_the_only_one():
    few = check(mask="dppo-topk-kl", delta=0.1)
    many = check(mask="dppo-topk-kl")
    assert few.entries[0].decisions.total * 5 == many.entries[0].decisions.total


def test_precision_fp64_is_taken_where_a_backend_has_it():
    report = check(mask="predictive-kl", tail="exact", precision="fp64")
    assert {entry.precision for entry in report.entries} == {"fp64"}
    assert report.conforms


def test_progress_reports_every_batch():
    seen = []
    check(mask="none", progress=lambda name, done, total: seen.append((done, total)))
    assert seen == [(1, 1)]


def test_designed_rows_give_the_bits_of_plain_fp32():
    entries = tuple(list_entries(mask="predictive-kl", view="full"))
    (job,) = builtin._designed_jobs(entries, "quick", 0, None)
    result = builtin._judge(job)
    records = {e.backend: builtin._record(e, result.tallies[e]) for e in entries}
    bits = records["torch-eager"].bits
    assert bits is not None
    assert bits.low <= 24 <= bits.high + 1
    assert records["numpy"].bits.at_least > 26


def test_a_batch_without_the_full_view_is_left_out_of_full_entries():
    batch = build("zipf", vocab_size=64)
    topk_only = replace(batch, behavior_logits=None)
    report = check(families=[], real={"lists": topk_only}, mask="predictive-kl")
    judged = [entry for entry in report.entries if entry.unavailable is None]
    full = [entry for entry in judged if entry.view == "full"]
    assert full
    assert all(not e.passed and e.message.startswith("no input carries") for e in full)
    assert all(e.passed for e in judged if e.view == "topk")
    assert not report.directions
    assert {record.certificate for record in report.certificates} == {"bracket"}


def test_real_tokens_get_direction_and_certificate_tables_without_a_wrong_certificate():
    real = load_recording(default_recording())
    report = check(families=[], real=real, mask="none")
    everything = {d.estimator: d for d in report.directions if d.source == "all real tokens"}
    assert set(everything) == {"ratio", "aggregated", "uniform", "exact"}
    for record in everything.values():
        assert record.disagree.trials + record.undecided == 16
        assert 0 <= record.disagree.low <= record.disagree.high <= 1
    for record in report.certificates:
        assert record.wrong.successes == 0


def test_an_entry_that_raises_is_judged_and_named(monkeypatch):
    from pdverify.backends import torch_eager

    def broken(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch_eager, "keep_mask", broken)
    report = check(mask="predictive-kl", tail="exact")
    verdicts = {entry.backend: entry for entry in report.entries}
    assert not report.conforms
    assert verdicts["numpy"].passed
    assert "no kernel" in verdicts["torch-eager"].message


def test_distance_and_ratio():
    truth = Enclosure(np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 2.0]))
    assert distance(np.array([1.5, 2.5, np.nan]), truth).tolist() == [0.0, 0.5, np.inf]
    ratio = over_budget(np.array([0.0, 1.0, np.inf, 1.0]), np.array([0.0, 2.0, np.inf, 0.0]))
    assert ratio.tolist() == [0.0, 0.5, 0.0, np.inf]


def test_rounding_excuses_a_keep_only_if_every_keeping_test_is_near():
    from pdverify.conformance.truth import Allowance
    from pdverify.oracle import Judge

    rows = build("zipf", seed=3, vocab_size=64).rows()
    rule = MASKS["predictive-kl"].rule(view="full", delta=0.05)
    right = Judge(rows).decide(rule)
    count = len(rows)
    none = Allowance(np.zeros(count), np.zeros(count))
    everything = Allowance(np.full(count, np.inf), np.full(count, np.inf))
    near_c = Allowance(np.zeros(count), np.full(count, np.inf))
    args = ([right.direction], rows.advantages)
    moved = rows.advantages != 0
    assert not excused(rule, right, [none], *args).any()
    assert (excused(rule, right, [everything], *args) == moved).all()
    inside = right.keep & (right.divergence.high <= 0.05)
    assert not excused(rule, right, [near_c], *args)[inside].any()
    assert excused(rule, right, [near_c], *args)[~right.keep].all()
