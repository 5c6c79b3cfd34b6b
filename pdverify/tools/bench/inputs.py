"""What contestants are given: tensors as a trainer holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdverify.backends.bound_torch import DTYPES
from pdverify.batch import Batch
from pdverify.tools.bench.workloads import Size, Workload

NOISE = 0.3
"""Standard deviation of the difference of the two policies' logits (nats): D of some 0.05."""

BLOCK = 2**23
"""Logits made at a time: few temporaries, so that a fresh process stays small."""


@dataclass(frozen=True)
class Inputs:
    """One sequence of `T` tokens; `[1, T]`, `[1, T, V]`, `[1, T, K]`, and `[V, d]` for the head."""

    tokens: Tensor
    advantages: Tensor
    behavior_logprobs: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor
    logits: Any = None
    behavior_logits: Any = None
    hidden: Any = None
    head: Any = None

    def behavior(self, workload: Workload) -> dict[str, Any]:
        """What a mask is given of the behavior policy, by argument name."""
        names = ["behavior_logits"]
        if workload.view != "full":
            names = ["behavior_logprobs", "topk_ids", "topk_logprobs"]
        return {name: getattr(self, name) for name in names}

    def read(self, workload: Workload) -> list[Tensor]:
        """The large tensors that a workload reads."""
        if workload.kind == "head":
            return [self.hidden, self.head]
        return [self.logits, self.behavior_logits] if workload.view == "full" else [self.logits]

    def rows(self, rows: slice | Tensor) -> Inputs:
        """A few tokens, on the same head."""
        taken = {name: x[:, rows] for name, x in vars(self).items() if x is not None}
        return replace(self, **taken | {"head": self.head})


def from_batch(batch: Batch, device: str) -> Inputs:
    """The valid tokens of a batch that carries a top-K list."""
    rows = batch.rows()
    form = DTYPES[batch.dtype]

    def tensor(x: Any, dtype: torch.dtype | None = None) -> Any:
        return None if x is None else torch.as_tensor(x, dtype=dtype, device=device)[None]

    return Inputs(
        tokens=tensor(rows.tokens),
        advantages=tensor(rows.advantages, torch.float32),
        behavior_logprobs=tensor(rows.behavior_logprobs),
        topk_ids=tensor(rows.topk_ids),
        topk_logprobs=tensor(rows.topk_logprobs),
        logits=tensor(rows.logits, form),
        behavior_logits=tensor(rows.behavior_logits, form),
    )


def make_inputs(workload: Workload, size: Size, dtype: str, device: str, seed: int) -> Inputs:
    """Random inputs of a size: a few strong logits over a bulk, near-equal policies.

    Raises:
        KeyError: an unknown format.
    """
    with torch.device(device):
        source = torch.Generator(device).manual_seed(seed)
        return _make(workload, size, DTYPES[dtype], source)


def _make(workload: Workload, size: Size, form: torch.dtype, source: torch.Generator) -> Inputs:
    count, vocab = size.tokens, size.vocab
    made: dict[str, Tensor] = {
        "tokens": torch.empty(count, dtype=torch.int64),
        "advantages": torch.randn(count, generator=source),
        "behavior_logprobs": torch.empty(count),
        "topk_ids": torch.empty(count, size.top_k, dtype=torch.int64),
        "topk_logprobs": torch.empty(count, size.top_k),
    }
    head = None
    if workload.kind == "head":
        # standard deviation 1 and 3 / sqrt(d): logits of standard deviation 3
        made["hidden"] = torch.randn(count, size.hidden, generator=source).to(form)
        head = torch.randn(vocab, size.hidden, generator=source)
        head = head.mul_(3 / size.hidden**0.5).to(form)
    else:
        made["logits"] = torch.empty(count, vocab, dtype=form)
        if workload.view == "full":
            made["behavior_logits"] = torch.empty(count, vocab, dtype=form)
    step = max(1, BLOCK // vocab)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        if head is not None:
            z = made["hidden"][rows].float() @ head.float().T
        else:
            z = _logits(rows.stop - start, vocab, source).to(form)
            made["logits"][rows] = z
        y = (z.float() + NOISE * torch.randn(z.shape, generator=source)).to(form)
        if "behavior_logits" in made:
            made["behavior_logits"][rows] = y
        log_mu = torch.log_softmax(y.double(), -1).float()
        made["topk_logprobs"][rows], made["topk_ids"][rows] = log_mu.topk(size.top_k, -1)
        race = log_mu - torch.empty_like(log_mu).exponential_(generator=source).log_()
        k = race.argmax(-1)
        made["tokens"][rows] = k
        made["behavior_logprobs"][rows] = log_mu.gather(-1, k[:, None])[:, 0]
    return Inputs(**{name: x[None] for name, x in made.items()}, head=head)


def _logits(count: int, vocab: int, source: torch.Generator) -> Tensor:
    """Like a language model's: N(0, 1.5^2), and one token in a thousand up to 12 nats higher."""
    z = torch.randn(count, vocab, generator=source).mul_(1.5)
    strong = torch.randint(vocab, (count, max(1, vocab // 1000)), generator=source)
    return z.scatter_add_(-1, strong, 12 * torch.rand(strong.shape, generator=source))


def as_batch(inputs: Inputs, dtype: str) -> Batch:
    """`inputs` as the oracle reads them; logits behind a head are a float64 product."""
    logits = inputs.logits
    if logits is None:
        logits, dtype = inputs.hidden.double() @ inputs.head.double().T, "fp64"
    behavior = inputs.behavior_logits
    small = ("tokens", "advantages", "behavior_logprobs", "topk_ids", "topk_logprobs")
    return Batch(
        **{name: getattr(inputs, name).cpu().numpy() for name in small},
        response_mask=np.ones(tuple(inputs.tokens.shape), dtype=bool),
        vocab_size=logits.shape[-1],
        logits=logits.double().cpu().numpy(),
        behavior_logits=None if behavior is None else behavior.double().cpu().numpy(),
        dtype=dtype,
    )
