"""Rolling out: `k ~ mu` from an engine, and the training policy on the same prefixes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdverify.formats import FORMATS
from pdverify.tools.lm import Workbench
from pdverify.tools.top_lists import Candidate, ids_of_list, mend

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Rollout:
    """`B` responses: prompts, sampled tokens, and what the engine said of each token.

    Attributes:
        prompt_indices: which entry of `prompts.prompt` each response answers.
        prompts, tokens: `B` lists of ids.
        behavior_logits: `B` arrays `[L_b, V]`, rounded to the stored format; None where the
            engine returns lists only, and then the next three are given.
        behavior_logprobs: `B` arrays `[L_b]` float32 (nats), of the sampled tokens.
        topk_ids, topk_logprobs: `B` arrays `[L_b, K]`, int64 and float32 (nats).
        raw_lists: the engine's own list at each token, text -> log-prob.
        candidates: the engine's (id, text, log-prob) of the best ids and the sampled one.
    """

    prompt_indices: list[int]
    prompts: list[list[int]]
    tokens: list[list[int]]
    behavior_logits: list[NDArray[np.float32]] | None = None
    behavior_logprobs: list[NDArray[np.float32]] | None = None
    topk_ids: list[NDArray[np.int64]] | None = None
    topk_logprobs: list[NDArray[np.float32]] | None = None
    raw_lists: list[list[dict[str, float]]] | None = None
    candidates: list[list[list[Candidate]]] | None = None


RollOut = Callable[[Workbench, Sequence[int], np.random.Generator, int, str, int], Rollout]
"""`(bench, lengths, rng, top_k, dtype, first_prompt) -> Rollout`."""


def log_softmax(logits: Float64) -> Float64:
    """`z - logsumexp(z)` over the last axis, float64 (nats); -inf stays -inf."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def draw(logits: Float64, rng: np.random.Generator) -> NDArray[np.int64]:
    """`k ~ softmax(logits)` for each row of `[B, V]`, by inversion; never an id of mass 0."""
    p = np.exp(log_softmax(logits))
    cdf = np.cumsum(p, axis=-1)
    u = rng.random(len(p)) * cdf[:, -1]
    picked = [int(np.searchsorted(c, x, side="right")) for c, x in zip(cdf, u, strict=True)]
    last = p.shape[1] - 1 - np.argmax(p[:, ::-1] > 0, axis=1)
    return np.asarray(np.minimum(picked, last), dtype=np.int64)


def round_logits(logits: Any, dtype: str) -> Float64:
    """A torch tensor of logits in the values that the format `dtype` can hold, as float64."""
    return FORMATS[dtype].round(logits.double().numpy())


def generate(
    bench: Workbench,
    model: Any,
    lengths: Sequence[int],
    rng: np.random.Generator,
    dtype: str,
    first_prompt: int,
    warp: Callable[[Float64], Float64] | None = None,
) -> Rollout:
    """Sample one response per entry of `lengths` from a transformers model.

    Args:
        bench: tokenizer and stop id.
        model: the behavior model.
        lengths: tokens wanted of each response; one ends early after the stop id.
        rng: draws the tokens.
        dtype: format the logits are rounded to before they are drawn from, and kept in.
        first_prompt: index of the first response's prompt.
        warp: what the sampler does to the rounded logits `[B, V]` before it draws (its result is
            rounded again and kept); -inf removes a token.
    """
    import torch
    import transformers

    prompts = [bench.encode(first_prompt + i) for i in range(len(lengths))]
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[bench.stop] * (width - len(p)) + p for p in prompts])
    attended = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    position = (attended.cumsum(dim=1) - 1).clamp(min=0)
    cache = {_cache_argument(model): transformers.DynamicCache()}
    tokens: list[list[int]] = [[] for _ in lengths]
    kept: list[list[NDArray[np.float32]]] = [[] for _ in lengths]
    with torch.no_grad():
        for _ in range(max(lengths)):
            out = model(
                input_ids=ids,
                attention_mask=attended,
                position_ids=position,
                use_cache=True,
                logits_to_keep=1,
                **cache,
            )
            logits = round_logits(out.logits[:, -1], dtype)
            if warp:
                logits = FORMATS[dtype].round(warp(logits))
            drawn = draw(logits, rng)
            for b, limit in enumerate(lengths):
                if len(tokens[b]) < limit and tokens[b][-1:] != [bench.stop]:
                    tokens[b].append(int(drawn[b]))
                    kept[b].append(logits[b].astype(np.float32))
            ids = torch.tensor(drawn)[:, None]
            attended = torch.cat([attended, torch.ones_like(ids)], dim=1)
            position = position[:, -1:] + 1
    first = [first_prompt + i for i in range(len(lengths))]
    return Rollout(first, prompts, tokens, [np.stack(rows) for rows in kept])


def _cache_argument(model: Any) -> str:
    """transformers renamed the argument that takes a key-value cache."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def teacher_forced(model: Any, rollout: Rollout) -> Iterator[Any]:
    """Logits `[L_b, V]` (torch) of `model` at each response token, given the same prefix.

    One right-padded pass: attention is causal, so padding on the right changes nothing.
    """
    import torch

    rows = [p + t for p, t in zip(rollout.prompts, rollout.tokens, strict=True)]
    width = max(len(r) for r in rows)
    hidden = model.model(
        input_ids=torch.tensor([r + [0] * (width - len(r)) for r in rows]),
        use_cache=False,
    ).last_hidden_state
    for b, (prefix, row) in enumerate(zip(rollout.prompts, rows, strict=True)):
        yield model.lm_head(hidden[b, len(prefix) - 1 : len(row) - 1])


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """The responses of all rollouts in one."""

    def all_of(name: str) -> Any:
        parts = [getattr(r, name) for r in rollouts]
        return None if parts[0] is None else [row for part in parts for row in part]

    return Rollout(**{name: all_of(name) for name in Rollout.__dataclass_fields__})


def generate_llama_cpp(
    bench: Workbench,
    lengths: Sequence[int],
    rng: np.random.Generator,
    top_k: int,
    dtype: str,
    first_prompt: int,
) -> Rollout:
    """Sample from llama.cpp through its completion interface, at temperature 1, untruncated.

    The top lists are what the interface returns, keyed by text; ids and the entries that shared
    texts lost come from the engine's own logits.  `dtype` is not used: the engine's logits never
    leave it.
    """
    import llama_cpp

    def load() -> Any:
        return llama_cpp.Llama(
            str(bench.path),
            n_ctx=256,
            n_threads=1,
            n_threads_batch=1,
            logits_all=True,
            verbose=False,
            seed=bench.seed,
        )

    engine = bench.once("llama.cpp", load)
    prompts, tokens, first = [], [], []
    own, ids, values = [], [], []
    raw_lists: list[list[dict[str, float]]] = []
    candidates: list[list[list[Candidate]]] = []
    for i, length in enumerate(lengths):
        prefix = bench.encode(first_prompt + i)
        engine.reset()
        answer = engine.create_completion(
            prefix,
            # One more than wanted, because only tokens that were fed back have their ids kept.
            max_tokens=length + 1,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            logprobs=top_k,
            seed=int(rng.integers(2**31)),
        )["choices"][0]
        lists = answer["logprobs"]["top_logprobs"]
        start = len(prefix)
        response = [int(t) for t in engine.input_ids[start : engine.n_tokens]][:length]
        response = response[: len(lists)]
        if not response:
            continue
        scores = engine.scores[start - 1 : start - 1 + len(response)]
        logprobs = llama_cpp.Llama.logits_to_logprobs(scores)
        rows = [_candidates(engine, response, j, logprobs[j], top_k) for j in range(len(response))]
        raw = [{text: float(x) for text, x in entry.items()} for entry in lists[: len(response)]]
        mended = [mend(ids_of_list(r, c), top_k) for r, c in zip(raw, rows, strict=True)]
        first.append(first_prompt + i)
        prompts.append(prefix)
        tokens.append(response)
        own.append(logprobs[np.arange(len(response)), response])
        ids.append(np.stack([m[0] for m in mended]))
        values.append(np.stack([m[1] for m in mended]))
        raw_lists.append(raw)
        candidates.append(rows)
    return Rollout(first, prompts, tokens, None, own, ids, values, raw_lists, candidates)


def _candidates(
    engine: Any, response: Sequence[int], j: int, logprobs: NDArray[np.float32], k: int
) -> list[Candidate]:
    """Every id at least as likely as the `k`-th best, ties included, and the sampled token."""
    border = np.sort(logprobs)[-k]
    ids = {int(i) for i in np.flatnonzero(logprobs >= border)} | {response[j]}
    return [
        (i, _text(engine, i, response[:j]), float(logprobs[i]))
        for i in sorted(ids, key=lambda i: (-float(logprobs[i]), i))
    ]


def _text(engine: Any, token: int, before: Sequence[int]) -> str:
    piece = engine.detokenize([token], prev_tokens=list(before))
    return str(piece.decode("utf-8", errors="ignore"))
