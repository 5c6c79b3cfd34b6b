"""Verdicts on small targets: each kind of difference gets its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdverify.batch import InputError
from pdverify.conformance.checks import CHECKS
from pdverify.conformance.options import Options
from pdverify.conformance.records import CheckRecord, TargetReport
from pdverify.conformance.target_run import TargetSession, applicable_checks, check_target
from pdverify.conformance.targets import TargetError, load_target
from pdverify.registry import UnknownName
from tests.conformance import sample_targets as samples

HERE = Path(__file__).parent


def full(**changes: Any) -> Options:
    return Options(mask="predictive-kl", view="full", **changes)


def failed(report: TargetReport) -> dict[str, CheckRecord]:
    return {check.id: check for check in report.failed}


def test_a_right_mask_conforms() -> None:
    report = check_target(samples.full_kl, full())
    assert report.conforms
    assert report.outputs == ("keep", "divergence", "coefficient")
    assert report.decisions.wrong == 0
    assert report.decisions.determined > 500
    bits = report.effective_bits
    assert bits is not None
    assert bits.low is not None
    assert bits.high is not None
    assert bits.low <= 24 <= bits.high + 1


@pytest.mark.parametrize("style", ["full_kl_keep", "defaults_and_kwargs"])
def test_other_ways_to_answer(style: str) -> None:
    report = check_target(getattr(samples, style), full())
    assert report.conforms
    assert report.outputs == ("keep",)
    assert report.effective_bits is not None


def test_a_documented_convention_is_named_and_can_be_accepted() -> None:
    report = check_target(samples.ratio_direction, full())
    assert not report.conforms
    assert report.convention == "ratio-direction"
    wrong = failed(report)["mask.direction"]
    assert wrong.kind == "convention"
    example = wrong.counterexample
    assert example is not None
    assert example.shrunk
    assert len(example.inputs["logits"][0][0]) <= 4
    accepted = check_target(samples.ratio_direction, full(accept=("ratio-direction",)))
    assert accepted.conforms
    assert {c.status for c in accepted.checks if c.id == "mask.direction"} == {"accepted"}


def test_the_counterexample_shows_the_fault_by_itself() -> None:
    wrong = failed(check_target(samples.ratio_direction, full()))["mask.direction"]
    example = wrong.counterexample
    assert example is not None
    given = {
        name: torch.tensor(value, dtype=getattr(torch, example.dtypes[name]))
        if example.dtypes[name] != "number"
        else value
        for name, value in example.inputs.items()
    }
    assert example.place is not None
    right = samples.full_kl(**given)["keep"][example.place]
    got = samples.ratio_direction(**given)[example.place]
    assert ("kept" if right else "dropped") == example.expected
    assert ("kept" if got else "dropped") == example.got


@pytest.mark.parametrize(
    ("target", "id", "kind"),
    [
        (samples.raises_on_one_token, "size.single", "raised"),
        (samples.hangs_on_large_vocabularies, "size.large-vocabulary", "time-out"),
        (samples.not_a_number, "value.divergence", "not-a-number"),
        (samples.modifies, "input.unmodified", "modified"),
        (samples.coarse_arithmetic, "value.divergence", "precision"),
        (samples.flattened, "output.form", "form"),
        (samples.float_mask, "output.form", "form"),
        (samples.unknown_key, "output.form", "form"),
    ],
)
def test_each_kind_of_fault_has_its_verdict(target: Callable[..., Any], id: str, kind: str) -> None:
    report = check_target(target, full(time_limit=2.0))
    assert not report.conforms
    wrong = failed(report)[id]
    assert wrong.kind == kind
    assert wrong.message
    assert wrong.cause
    assert id in wrong.rerun


def test_after_a_time_out_nothing_else_is_run() -> None:
    report = check_target(samples.hangs, full(time_limit=0.2))
    assert [check.id for check in report.failed] == ["output.form"]
    others = {c.status for c in report.checks if c.id != "output.form"}
    assert others == {"not-run"}


def test_a_declared_precision_is_what_counts() -> None:
    assert check_target(samples.coarse_arithmetic, full(precision="bf16")).conforms
    report = check_target(samples.full_kl, full(precision="fp64"))
    assert "value.divergence" in failed(report)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (samples.raises, full(), "raised RuntimeError: no kernel"),
        (samples.no_delta, full(), "--delta"),
        (samples.unknown_parameter, full(), "unknown parameter 'temperature'"),
        (samples.binary_tv, full(), "must take logits or support_logprobs"),
        (samples.mean_loss, Options(mask="dppo-binary-tv"), "--aggregation"),
        (samples.full_kl, full(select=("no.such",)), "leave no check"),
        (samples.full_kl, full(select=("loss.*",)), "nothing was checked"),
        (samples.full_kl, full(accept=("inverted-mask",)), "a bug, not a convention"),
        (samples.full_kl, full(delta_low=0.1, delta_high=0.2), "one delta"),
        ("no_such_module:f", full(), "does not import"),
        ("nowhere/file.py:f", full(), "no file"),
        ("just-a-name", full(), "module:function"),
        (f"{HERE}/sample_targets.py:absent", full(), "has no 'absent'"),
    ],
)
def test_what_cannot_be_judged_says_why(target: Any, options: Options, words: str) -> None:
    with pytest.raises(TargetError, match=words.replace("(", r"\(")):
        check_target(target, options)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"mask": "predictive-kl"}, InputError, "tail"),
        ({"mask": "predictiv-kl"}, UnknownName, "did you mean"),
        ({"mask": "none", "view": "half"}, InputError, "view"),
        ({"mask": "none", "time_limit": 0.0}, InputError, "time_limit"),
        ({"mask": "none", "delta": -1.0}, InputError, "delta"),
        ({"mask": "none", "ratio_cap": 0.0}, InputError, "ratio_cap"),
        ({"mask": "none", "top_k": 0}, InputError, "top_k"),
        ({"mask": "none", "precision": "fp31"}, UnknownName, "fp31"),
    ],
)
def test_bad_options_are_named(changes: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Options(**changes)


def test_a_target_is_found_by_file() -> None:
    target = load_target(f"{HERE}/sample_targets.py:binary_tv")
    assert target.parameters == ("logprobs", "behavior_logprobs", "advantages", "delta")


def test_a_fixed_threshold_is_met_by_moving_the_policies() -> None:
    report = check_target(samples.no_delta, full(delta=0.05))
    assert report.conforms
    assert report.effective_bits is None
    assert "threshold is fixed" in report.bits_note
    other = check_target(samples.no_delta, full(delta=0.0502))
    assert "mask.boundary" in failed(other)


def test_losses() -> None:
    options = Options(mask="dppo-binary-tv")
    assert check_target(samples.binary_tv_loss, options).conforms
    surrogate = check_target(samples.surrogate_loss, options)
    assert surrogate.convention == "ratio-gradient-uncapped"
    accepted = Options(mask="dppo-binary-tv", accept=("ratio-gradient-uncapped",))
    assert check_target(samples.surrogate_loss, accepted).conforms
    mean = Options(mask="dppo-binary-tv", aggregation="token-mean")
    assert check_target(samples.mean_loss, mean).conforms
    other = Options(mask="dppo-binary-tv", aggregation="sequence-mean")
    assert list(failed(check_target(samples.mean_loss, other))) == ["loss.aggregation"]


def test_checks_apply_where_they_mean_something() -> None:
    ids = applicable_checks(samples.binary_tv, Options(mask="dppo-binary-tv"))
    assert "mask.boundary" in ids
    assert not [id for id in ids if id.startswith(("support.", "loss.", "value."))]
    session = TargetSession(samples.binary_tv, Options(mask="dppo-binary-tv"))
    for id in set(CHECKS) - set(ids):
        assert session.run(id).status == "not-applicable"
        assert session.run(id).message


def test_every_check_explains_itself() -> None:
    for id, check in CHECKS.items():
        assert check.id == id
        assert check.summary
        assert len(check.meaning.split()) > 5
        assert check.formula
        assert check.bug
