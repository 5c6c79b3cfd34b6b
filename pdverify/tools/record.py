"""Real tokens: sample from a real language model whose rollout and training sides differ.

Each entry of `MISMATCHES` is one real way in which the behavior policy `mu` of a rollout differs
from the training policy `pi`; `sample_batches` draws `k ~ mu`, evaluates `pi` on the same prefixes
and returns batches, `record` writes them to a file.

What is stored is what is true: logits are rounded to the batch's `dtype` first; the behavior
policy IS the softmax of the rounded behavior logits, its tokens are drawn from that softmax, and
`behavior_logprobs` and `topk_logprobs` are its log-softmax, computed in float64 and rounded to
float32.  `llama.cpp` has the top-K view that the engine returns, mended at the door (see
`top_lists`), with the engine's own float32 log-probs.

Advantages are seeded standard normal rewards, one per sequence, normalized over the batch to mean
0 and standard deviation 1 as group-relative methods do; they carry no meaning.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import pdverify
from pdverify.batch import Batch
from pdverify.cases.recordings import check_target, write_recording
from pdverify.tools.lm import (
    PACKAGE,
    ModelUnavailable,
    Workbench,
    find_model,
    load_workbench,
    one_thread,
    why_unavailable,
)
from pdverify.tools.mismatches import MISMATCHES, Mismatch, advantages_of
from pdverify.tools.prompts import prompt
from pdverify.tools.rollout import (
    Rollout,
    join,
    log_softmax,
    round_logits,
    teacher_forced,
)
from pdverify.tools.top_lists import top_k_of

__all__ = [
    "MISMATCHES",
    "ModelUnavailable",
    "available",
    "real_batches",
    "record",
    "sample_batches",
    "why_unavailable",
]

DTYPES = ("bf16", "fp32")

StoredDtype = Literal["bf16", "fp32"]
Progress = Callable[[str, int, int], None]
"""Called as `progress(what, done, total)`."""

SELECTION = (
    "Of all tokens sampled for a mismatch, these are taken in turn until enough are kept: where"
    " the engine returned raw lists, the token of largest |log-ratio| among those whose list is"
    " the shortest, has K - 1 entries, K entries, K + 1 entries; then, repeatedly, the token of"
    " largest divergence, the token of largest divergence among those whose sampled id is "
    "outside the top-K list, and the token of median divergence in the sequence of the first.  "
    "The divergence is forward KL where both sides are seen in full, |log-ratio| of the sampled"
    " token elsewhere.  Rows keep their sequence and order; the positions between them are left"
    " out."
)


@dataclass(frozen=True)
class _Sample:
    """A batch and the rollout it came from; `index` `[T, 2]` is where its tokens stand in it."""

    batch: Batch
    rollout: Rollout
    index: NDArray[np.int64]


def available() -> list[str]:
    """Names of the mismatches whose engine is installed here."""
    engine = why_unavailable(engine=True) is None
    return [name for name, entry in MISMATCHES.items() if engine or not entry.needs_engine]


def sample_batches(
    *,
    tokens: int,
    mismatches: Sequence[str] | None = None,
    top_k: int = 20,
    seed: int = 0,
    dtype: StoredDtype = "bf16",
    progress: Progress | None = None,
) -> dict[str, Batch]:
    """Real batches, one for each mismatch: `k ~ mu` from the rollout side, `pi` teacher-forced.

    Args:
        tokens: total number of sampled tokens, split evenly over the mismatches.
        mismatches: names of `MISMATCHES`, or None for all that can run here.
        top_k: `K` of the behavior policy's list, 1 <= K < V.
        seed: seeds prompts, sampling, advantages and the training steps.
        dtype: format the logits of both sides are rounded to and stored in.
        progress: called after each mismatch.

    Returns:
        name -> batch.  Logits `[B, L, V]` float32, exactly representable in `dtype`; log-probs
        float32 (nats); zeros on padding.

    Raises:
        ModelUnavailable: the model, or the engine of a mismatch asked for by name, is missing.
        UnknownName: no such mismatch.
        ValueError: fewer tokens than mismatches, an unknown dtype, or K out of range.
    """
    samples = _sample(tokens, mismatches, top_k, seed, dtype, progress)
    return {name: sample.batch for name, sample in samples.items()}


def real_batches(*, tokens: int, seed: int = 0) -> tuple[dict[str, Batch], str]:
    """Real tokens for a check, freshly sampled, and one line saying what they are.

    Args:
        tokens: total number; with fewer tokens than mismatches, the first mismatches are used.
        seed: as for `sample_batches`.

    Raises:
        ModelUnavailable: with the reason; the caller then reads a recording.
    """
    batches = sample_batches(tokens=tokens, mismatches=available()[:tokens], seed=seed)
    return batches, (
        f"{find_model().stem} ({PACKAGE} {importlib.metadata.version(PACKAGE)}), "
        f"{tokens} tokens, seed {seed}: {', '.join(batches)}"
    )


def record(
    path: str | os.PathLike[str],
    *,
    tokens: int = 500,
    mismatches: Sequence[str] | None = None,
    top_k: int = 20,
    seed: int = 0,
    dtype: StoredDtype = "bf16",
    keep: Mapping[str, int] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Batch]:
    """Sample real batches and write them, with their provenance, to a recording.

    Args:
        path: the `.safetensors` file; appears whole or not at all.
        tokens, mismatches, top_k, seed, dtype, progress: as for `sample_batches`.
        keep: mismatch -> how many of its tokens to write, chosen by `SELECTION`; None writes all.
        overwrite: replace an existing file.

    Returns:
        What was written.

    Raises:
        InputError: `path` exists and `overwrite` is not set, or cannot be written.
        ModelUnavailable, UnknownName, ValueError: as `sample_batches`.
    """
    check_target(path, overwrite=overwrite)
    samples = _sample(tokens, mismatches, top_k, seed, dtype, progress)
    if keep is not None:
        samples = {
            name: _select(sample, keep.get(name, 0))
            for name, sample in samples.items()
            if keep.get(name, 0)
        }
    arguments = {
        "tokens": tokens,
        "mismatches": mismatches and list(mismatches),
        "top_k": top_k,
        "seed": seed,
        "dtype": dtype,
        "keep": keep and dict(keep),
    }
    batches = {name: sample.batch for name, sample in samples.items()}
    write_recording(path, batches, _provenance(samples, arguments), overwrite=overwrite)
    return batches


def _sample(
    tokens: int,
    mismatches: Sequence[str] | None,
    top_k: int,
    seed: int,
    dtype: str,
    progress: Progress | None,
) -> dict[str, _Sample]:
    names = available() if mismatches is None else list(mismatches)
    entries = {name: MISMATCHES[name] for name in names}
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype}: known: {', '.join(DTYPES)}")
    if not entries or tokens < len(entries):
        raise ValueError(f"tokens = {tokens}: at least one for each of {len(entries)} mismatches")
    for name, entry in entries.items():
        if entry.needs_engine and (reason := why_unavailable(engine=True)):
            raise ModelUnavailable(f"{name}: {reason}")
    bench = load_workbench(seed=seed)
    if not 1 <= top_k < bench.vocab_size:
        raise ValueError(f"top_k = {top_k}: K lies in [1, V - 1], V = {bench.vocab_size}")
    samples: dict[str, _Sample] = {}
    for done, (name, entry) in enumerate(entries.items()):
        share = tokens // len(entries) + (done < tokens % len(entries))
        with one_thread():
            rollout = _roll_out(bench, name, entry, share, top_k, dtype)
            batch = _batch(bench, rollout, entry.training(bench), top_k, dtype, name)
        samples[name] = _Sample(batch, rollout, batch.rows().index)
        if progress:
            progress(name, done + 1, len(entries))
    return samples


def _roll_out(
    bench: Workbench, name: str, entry: Mismatch, tokens: int, top_k: int, dtype: str
) -> Rollout:
    """Exactly `tokens` sampled tokens: where a stop cut responses short, more are drawn."""
    rng = bench.rng("rollout", name)
    next_prompt = int(rng.integers(1000))
    parts: list[Rollout] = []
    missing = tokens
    while missing:
        lengths = response_lengths(missing, rng)
        parts.append(entry.roll_out(bench, lengths, rng, top_k, dtype, next_prompt))
        next_prompt += len(lengths)
        missing -= sum(len(t) for t in parts[-1].tokens)
    return join(parts)


def response_lengths(tokens: int, rng: np.random.Generator) -> list[int]:
    """Response lengths that sum to `tokens`, and differ where two responses are possible."""
    longest = min(max(tokens // 4, 2), 16)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(int(rng.integers((longest + 1) // 2, longest + 1)), left))
    if len(lengths) > 1 and len(set(lengths)) == 1:
        lengths[0] += 1
        lengths[-1] -= 1
    return [n for n in lengths if n]


def _batch(
    bench: Workbench, rollout: Rollout, training: Any, top_k: int, dtype: str, name: str
) -> Batch:
    import torch

    lengths = [len(t) for t in rollout.tokens]
    shape = (len(lengths), max(lengths))
    mask = np.arange(shape[1]) < np.array(lengths)[:, None]

    def pad(rows: Sequence[Any], kind: type[np.generic]) -> NDArray[Any]:
        out = np.zeros((*shape, *np.shape(rows[0])[1:]), dtype=kind)
        out[mask] = np.concatenate(rows)
        return out

    with torch.no_grad():
        trained = [round_logits(x, dtype) for x in teacher_forced(training, rollout)]
    behavior = rollout.behavior_logits
    if behavior is not None:
        logprobs = [log_softmax(x.astype(np.float64)) for x in behavior]
        ids, values = zip(*(top_k_of(x, top_k) for x in logprobs), strict=True)
        own: Sequence[Any] = [
            x[np.arange(len(t)), t] for x, t in zip(logprobs, rollout.tokens, strict=True)
        ]
    else:
        assert rollout.topk_ids
        assert rollout.topk_logprobs
        assert rollout.behavior_logprobs
        ids, values = tuple(rollout.topk_ids), tuple(rollout.topk_logprobs)
        own = rollout.behavior_logprobs
    advantages = advantages_of(shape[0], bench.rng("advantages", name))[:, None]
    return Batch(
        tokens=pad(rollout.tokens, np.int64),
        advantages=np.where(mask, advantages, 0.0).astype(np.float32),
        response_mask=mask,
        vocab_size=bench.vocab_size,
        logits=pad(trained, np.float32),
        behavior_logits=None if behavior is None else pad(behavior, np.float32),
        behavior_logprobs=pad(own, np.float32),
        topk_ids=pad(ids, np.int64),
        topk_logprobs=pad(values, np.float32),
        dtype=dtype,
    )


def _select(sample: _Sample, count: int) -> _Sample:
    """The `count` tokens that `SELECTION` names, each in its own sequence."""
    rows = sample.batch.rows()
    if not 1 <= count <= len(rows):
        raise ValueError(f"keep = {count}: between 1 and the {len(rows)} tokens sampled")
    assert rows.topk_ids is not None
    top_k = rows.topk_ids.shape[1]
    listed = (rows.topk_ids == rows.tokens[:, None]).any(axis=1)
    gap = _divergence(sample.batch)
    chosen: list[int] = []

    def take(pool: NDArray[np.bool_], *, median: bool = False) -> None:
        pool = pool.copy()
        pool[chosen] = False
        ids = np.flatnonzero(pool)
        if len(ids) and len(chosen) < count:
            ranked = ids[np.argsort(-gap[ids], kind="stable")]
            chosen.append(int(ranked[len(ranked) // 2 if median else 0]))

    if sample.rollout.raw_lists is not None:
        size = np.array([len(sample.rollout.raw_lists[b][j]) for b, j in rows.index])
        for length in dict.fromkeys((int(size.min()), top_k - 1, top_k, top_k + 1)):
            take(size == length)
    everything = np.ones(len(rows), dtype=bool)
    while len(chosen) < count:
        take(everything)
        largest = rows.index[chosen[-1], 0]
        take(~listed)
        take(rows.index[:, 0] == largest, median=True)
    return _keep(sample, np.sort(np.array(chosen)))


def _divergence(batch: Batch) -> NDArray[np.float64]:
    rows = batch.rows()
    assert rows.logits is not None
    assert rows.behavior_logprobs is not None
    trained = log_softmax(rows.logits.astype(np.float64))
    if rows.behavior_logits is None:
        own = trained[np.arange(len(rows)), rows.tokens]
        return np.abs(own - rows.behavior_logprobs.astype(np.float64))
    behavior = log_softmax(rows.behavior_logits.astype(np.float64))
    gap = np.subtract(behavior, trained, where=behavior > -np.inf, out=np.zeros_like(trained))
    return np.asarray((np.exp(behavior) * gap).sum(axis=1))


def _keep(sample: _Sample, chosen: NDArray[np.int64]) -> _Sample:
    """The same batch with only the rows `chosen`, moved to the left of their sequences."""
    batch = sample.batch
    index = batch.rows().index[chosen]
    sequences, row = np.unique(index[:, 0], return_inverse=True)
    column = np.array([int((row[:i] == row[i]).sum()) for i in range(len(row))])
    shape = (len(sequences), int(column.max()) + 1)

    def move(x: NDArray[Any]) -> NDArray[Any]:
        out = np.zeros((*shape, *x.shape[2:]), dtype=x.dtype)
        out[row, column] = x[index[:, 0], index[:, 1]]
        return out

    moved: dict[str, Any] = {
        name: move(x) for name, x in vars(batch).items() if isinstance(x, np.ndarray)
    }
    return replace(sample, batch=replace(batch, **moved), index=index)


def _provenance(samples: Mapping[str, _Sample], arguments: Mapping[str, Any]) -> dict[str, Any]:
    path = find_model()
    packages = ("torch", "transformers", "gguf", "numpy", "llama-cpp-python")
    return {
        "model": {
            "name": path.stem,
            "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "license": "Apache-2.0",
        },
        "versions": {
            "pdverify": pdverify.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            **{name: version for name in packages if (version := _version(name))},
        },
        "command": "pdverify.tools.record.record",
        "arguments": dict(arguments),
        "selection": "every sampled token" if arguments["keep"] is None else SELECTION,
        "advantages": "seeded normal rewards, one per sequence, normalized over the batch",
        "batches": {name: _origin(name, sample) for name, sample in samples.items()},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _origin(name: str, sample: _Sample) -> dict[str, Any]:
    """Where each token of a batch stood when it was sampled, in the order of `Batch.rows`."""
    rollout = sample.rollout
    origin: dict[str, Any] = {
        "mismatch": MISMATCHES[name].summary,
        "tokens": [
            {
                "kind": prompt(rollout.prompt_indices[b])[0],
                "prompt": prompt(rollout.prompt_indices[b])[1],
                "sequence": int(b),
                "position": int(j),
            }
            for b, j in sample.index
        ],
    }
    if rollout.raw_lists is not None and rollout.candidates is not None:
        origin["raw_lists"] = [rollout.raw_lists[b][j] for b, j in sample.index]
        origin["candidates"] = [rollout.candidates[b][j] for b, j in sample.index]
    return origin
