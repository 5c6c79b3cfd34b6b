"""One rank of a gloo group: runs the vocab-parallel functions on its shard and saves what it got.

python -m tests.backends.rank_processes FOLDER RANK WORLD
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pdverify.backends import vocab_parallel
from pdverify.backends.vocab_parallel import Shard
from pdverify.batch import Batch
from pdverify.cases import build as family
from pdverify.definitions import masks
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS
from pdverify.rules import Rule
from tests.backends.test_torch_eager import DTYPES, TAILS, behavior, inputs

SIZE = 64
PADDING = 3
COMPUTE = (torch.float32, torch.float64)

# by the number of ranks: first column and the one after the last of each rank
LAYOUTS = {2: ((64, 64), (0, 64)), 4: ((50, 64), (0, 7), (7, 7), (7, 50))}

# family -> dtype of the logits that the shards hold
FAMILIES = {"sampled-outside": "bf16", "training-neg-inf": "fp32"}

BROKEN = {
    "overlap": "logits: the ranks hold columns",
    "gap": "logits: the ranks hold columns",
    "size": "size: the ranks have",
    "behavior": "behavior_logits: the ranks hold columns",
    "ids": "tokens or topk_ids: outside of a vocabulary of 64",
}


def batch_of(name: str) -> Batch:
    return family(name, sequences=2, vocab_size=SIZE, top_k=8, dtype=FAMILIES[name])


def rules() -> list[Rule]:
    found = []
    for _, mask in MASKS.items():
        for view in mask.views():
            for tail in masks.TAILS if mask.needs_tail(view) else (None,):
                found.append(mask.rule(view=view, tail=tail, delta=0.1))
    return found


def shard(whole: torch.Tensor, rank: int, world: int, group: Any = None) -> Shard:
    """This rank's columns; those past the vocabulary hold NaN."""
    start, stop = LAYOUTS[world][rank]
    columns = whole[..., start:stop]
    if stop == SIZE:
        columns = torch.nn.functional.pad(columns, (0, PADDING), value=torch.nan)
    return Shard(columns.clone(), start, SIZE, group)


def values(name: str, rank: int, world: int) -> dict[Any, torch.Tensor]:
    """Every function on a family, by what it was asked."""
    batch, found = batch_of(name), {}
    whole, tokens = inputs(batch)
    given = behavior(batch)
    dtype = DTYPES[FAMILIES[name]]
    logits = shard(whole.to(dtype), rank, world)
    given["behavior_logits"] = shard(given["behavior_logits"].to(dtype), rank, world)
    advantages = torch.as_tensor(batch.advantages)
    valid = torch.as_tensor(batch.response_mask)
    for compute in COMPUTE:
        found["log_prob", compute] = vocab_parallel.log_prob(logits, tokens, compute_dtype=compute)
        for partition, tails in TAILS.items():
            for divergence in DIVERGENCES:
                options = {"name": divergence, "compute_dtype": compute, "partition": partition}
                options |= given
                d = vocab_parallel.divergence(logits, tokens, **options)
                found["divergence", divergence, partition, compute] = d
                for tail in tails:
                    c = vocab_parallel.coefficient(logits, tokens, tail=tail, **options)
                    found["coefficient", divergence, partition, tail, compute] = c
    for rule in rules():
        found["mask", rule] = vocab_parallel.keep_mask(
            logits,
            tokens,
            advantages,
            rule=rule,
            response_mask=valid,
            compute_dtype=torch.float64,
            **given,
        )
    return found | losses(name, rank, world)


def losses(name: str, rank: int, world: int) -> dict[Any, torch.Tensor]:
    """Losses and this rank's gradients, in float64 and in the dtype of the logits."""
    batch, found = batch_of(name), {}
    whole, tokens = inputs(batch)
    for dtype in (torch.float64, DTYPES[FAMILIES[name]]):
        for loss, options in loss_options(batch).items():
            local = shard(whole.to(dtype), rank, world)
            local.logits.requires_grad_()
            if "behavior_logits" in options:
                options["behavior_logits"] = shard(options["behavior_logits"], rank, world)
            function = getattr(vocab_parallel, loss.split()[0])
            value = function(local, tokens, compute_dtype=torch.float64, **options)
            value.sum().backward()
            found["loss", loss, dtype] = value.detach()
            found["gradient", loss, dtype] = local.logits.grad
    return found


def loss_options(batch: Batch) -> dict[str, dict[str, Any]]:
    """Arguments of the losses besides logits and tokens, by the function and the view."""
    given = behavior(batch)
    advantages = torch.as_tensor(batch.advantages)
    shared = {"advantages": advantages, "response_mask": torch.as_tensor(batch.response_mask)}
    stored = {name: given[name] for name in ("behavior_logprobs", "topk_ids", "topk_logprobs")}
    return {
        "policy_loss plain": {
            **shared,
            "behavior_logprobs": stored["behavior_logprobs"],
            "keep": advantages > 0,
            "aggregation": "none",
        },
        "predictive_policy_loss topk": {**shared, **stored},
        "predictive_policy_loss full": {**shared, "behavior_logits": given["behavior_logits"]},
    }


def broken(rank: int, world: int) -> dict[Any, str]:
    """What the ranks say of shards that do not fit together, asked in both views."""
    first, last = rank == 0, rank == world - 1
    step = SIZE // world
    start, size = dict.fromkeys(BROKEN, rank * step), dict.fromkeys(BROKEN, SIZE)
    start["overlap"] -= int(last)
    start["gap"] += int(first)
    size["size"] += int(last)
    tokens = torch.zeros(5, dtype=torch.int64)
    logits, told = torch.zeros(5, step), {}
    for case in BROKEN:
        width = step - 1 if case == "gap" and first else step
        mine = Shard(logits[:, :width], start[case], size[case])
        theirs = mine
        if case == "behavior" and first:
            theirs = Shard(logits[:, 1:], 1, SIZE)
        k = tokens.clone()
        k[2] = SIZE if case == "ids" else 0
        for view, options in (
            ("full", {"behavior_logits": theirs}),
            ("binary", {"behavior_logprobs": torch.zeros(5)}),
        ):
            try:
                vocab_parallel.divergence(mine, k, name="kl", partition=view, **options)
            except ValueError as error:
                told[case, view] = str(error)
    return told


def main(folder: str, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    found: dict[str, Any] = {name: values(name, rank, world) for name in FAMILIES}
    found["broken"] = broken(rank, world)
    pair = dist.new_group([0, 1])
    if rank < 2:
        whole, tokens = inputs(batch_of("sampled-outside"))
        local = shard(whole, rank, 2, pair)
        found["pair"] = vocab_parallel.log_prob(local, tokens, compute_dtype=torch.float64)
    elif world > 2:
        try:
            vocab_parallel.log_prob(Shard(torch.zeros(1, 4), 0, 4, pair), torch.zeros(1).long())
        except ValueError as error:
            found["outsider"] = str(error)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
