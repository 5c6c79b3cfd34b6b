"""What the device allows: the parts that no implementation of a workload can leave out.

Torch's own reduction, `exp` and matrix product, on tensors of the workload's size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdverify.tools.bench.inputs import Inputs
from pdverify.tools.bench.timing import Call
from pdverify.tools.bench.workloads import Workload

CACHED = 2**17
"""Numbers in the buffer whose exponentials are taken again and again: it stays in the cache."""


def read(workload: Workload, inputs: Inputs) -> Call:
    """Read the inputs once; with a gradient at the logits, twice, and write as much."""
    # bf16 pairs are summed as fp32 numbers: a conversion is arithmetic, not reading
    flat = [_as_floats(x) for x in inputs.read(workload)]
    if workload.kind != "loss":
        return lambda: [x.sum() for x in flat]
    written = [torch.empty_like(x) for x in flat]
    return lambda: [(x.sum(), y.copy_(x)) for x, y in zip(flat, written, strict=True)]


def _as_floats(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    if x.element_size() > 2:
        return flat
    return flat[: flat.numel() // 2 * 2].view(torch.float32)


def exponentials(workload: Workload, inputs: Inputs) -> Call:
    """One `exp` of each logit of each policy (two with a gradient), on fp32 in the cache."""
    if workload.kind == "head":
        count = inputs.tokens.numel() * inputs.head.shape[0]
    else:
        count = sum(x.numel() for x in inputs.read(workload))
    count *= 2 if workload.kind == "loss" else 1
    buffer = torch.randn(min(CACHED, count), device=inputs.tokens.device)
    out, repeats = torch.empty_like(buffer), math.ceil(count / len(buffer))

    def call() -> None:
        for _ in range(repeats):
            torch.exp(buffer, out=out)

    return call


def product(workload: Workload, inputs: Inputs) -> Call:
    """The hidden states times the head, in their dtype, into a tensor that is there already."""
    hidden, head = inputs.hidden[0], inputs.head.T
    out = hidden.new_empty(hidden.shape[0], head.shape[1])
    return lambda: torch.mm(hidden, head, out=out)
