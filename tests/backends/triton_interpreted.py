"""The Triton kernels in triton's interpreter; run in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdverify.backends import torch_eager, triton_backend
from pdverify.backends.engine import Engine
from pdverify.backends.masks import TorchBackend
from pdverify.backends.moments import FullMoments, TailMoments
from pdverify.backends.triton_kernels import TritonEngine
from pdverify.budgets import CHAIN, KAPPA
from pdverify.cases import FAMILIES
from pdverify.cases import build as family
from pdverify.definitions import losses
from tests.backends import test_torch_eager as eager
from tests.definitions.helpers import one_token

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
DTYPES += [torch.float8_e5m2, torch.float8_e4m3fn]
TILE = 512
"""Columns of a tile of one warp in the full view; twice as many in the top-K view."""

SIZES = [1, 5, TILE - 1, TILE, TILE + 1, 2 * TILE + 1, 8 * TILE + 1]
NEG_INF = float("-inf")


@pytest.fixture(autouse=True)
def judged(monkeypatch):
    """The tests of eager torch judge the kernels."""
    monkeypatch.setattr(eager, "torch_eager", triton_backend)


class Once(TritonEngine):
    """Takes every sum of a batch once, however often it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[Any, ...], Any] = {}

    def full(self, *arguments: Any) -> FullMoments:
        return self._once(super().full, arguments, "full", arguments[-1])

    def tail(self, *arguments: Any) -> TailMoments:
        return self._once(super().tail, arguments, "tail", arguments[-1])

    def cell_sums(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._once(super().cell_sums, arguments, *arguments[-2:])

    def _once(self, function: Any, arguments: tuple[Any, ...], *key: Any) -> Any:
        if key not in self.found:
            self.found[key] = function(*arguments)
        return self.found[key]


@pytest.mark.parametrize("partition", ["full", "topk", "binary"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_within_budget(name, partition, monkeypatch):
    monkeypatch.setattr(eager, "torch_eager", TorchBackend(Once()))
    monkeypatch.setattr(eager, "UNITS", {torch.float32: 2.0**-24})
    dtype = "bf16" if partition == "full" else "fp32"
    eager.check_values(family(name, sequences=1, vocab_size=64, top_k=8, dtype=dtype), partition)


@pytest.mark.parametrize("partition", ["full", "topk"])
@pytest.mark.parametrize("name", ["far-apart", "near-equal", "training-neg-inf"])
def test_float64_within_budget(name, partition, monkeypatch):
    monkeypatch.setattr(eager, "torch_eager", TorchBackend(Once()))
    monkeypatch.setattr(eager, "UNITS", {torch.float64: 2.0**-53})
    eager.check_values(family(name, sequences=1, vocab_size=64, top_k=8), partition)


@pytest.mark.parametrize("tokens", [1, 2])
def test_mass_on_tokens_other_than_k(tokens, monkeypatch):
    # nearly equal policies: C is the difference of sums that agree to many digits
    monkeypatch.setattr(eager, "torch_eager", TorchBackend(Once()))
    monkeypatch.setattr(eager, "UNITS", {torch.float32: 2.0**-24})
    rng = np.random.default_rng(5)
    size, count = 24, 8
    z = rng.normal(size=(1, count, size)) - rng.uniform(12, 20, size=(1, count, 1))
    y = z + rng.normal(size=z.shape) * 2.0**-9
    z[..., 1 : 1 + tokens], y[..., 1 : 1 + tokens] = 0.0, 0.0
    blank = np.zeros((1, count))
    batch = replace(
        one_token(),
        tokens=np.zeros((1, count), dtype=np.int64),
        advantages=np.ones((1, count)),
        response_mask=np.ones((1, count), dtype=bool),
        vocab_size=size,
        logits=z.astype(np.float32),
        behavior_logits=y.astype(np.float32),
        behavior_logprobs=blank,
        topk_ids=None,
        topk_logprobs=None,
        dtype="fp32",
    )
    eager.check_values(batch, "full")


def rows(count: int, size: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Both policies' logits, all negative and all positive, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    z, y = (torch.randn(count, size, generator=generator) * 3 for _ in range(2))
    tokens = torch.randint(size, (count,), generator=generator)
    return (z - 20).to(dtype), (y + 20).to(dtype), tokens


def wide(x: Tensor) -> Tensor:
    return x.float().double() if x.element_size() == 1 else x.double()


def check_moments(found: Any, right: Any, sizes: dict[str, Tensor], bound: Tensor) -> None:
    """Each sum off by at most `bound` times the size of its terms; infinite where it must be."""
    for name in type(right).__dataclass_fields__:
        value, truth = getattr(found, name), getattr(right, name)
        infinite = ~truth.isfinite()
        assert (value[infinite] == truth[infinite]).all(), name
        size = sizes.get(name, truth.abs())
        off = (value - truth).abs()
        assert (off <= bound * size)[~infinite].all(), (name, off, bound * size)


def check_full(z: Tensor, y: Tensor, k: Tensor, compute: torch.dtype, engine: Engine) -> None:
    z64, y64 = wide(z).to(compute).double(), wide(y).to(compute).double()
    right = Engine().full(z64, y64, k, torch.float64)
    a, b = (x.scatter(-1, k[:, None], NEG_INF) for x in (z64, y64))
    a, b = a - right.top_z[:, None], b - right.top_y[:, None]
    p, q, d = a.exp(), b.exp(), (a - b).nan_to_num(0, 0, 0).abs()
    sizes = {
        "f": (q * d).sum(-1),
        "e1": (p * d).sum(-1),
        "e2": (p * p * d).sum(-1),
    }
    check_moments(engine.full(z, y, k, compute), right, sizes, bound(a, b, compute))


def bound(a: Tensor, b: Tensor, compute: torch.dtype) -> Tensor:
    """Relative error of a sum of products of up to four factors, `[T]`."""
    visible = [torch.where(x > -100, x.abs(), 0).amax(-1) for x in (a, b)]
    return eager.UNITS[compute] * (CHAIN + 4 * (KAPPA + torch.maximum(*visible)))


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_full_moments(size, dtype, compute):
    check_full(*rows(2, size, dtype), compute, TritonEngine())


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_tail_moments(size, dtype, compute):
    z, _, _ = rows(2, size, dtype)
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(size, (2, 6), generator=generator)
    ids[:, 3] = ids[:, 0]  # twice, once left out and once not
    excluded = torch.rand(2, 6, generator=generator) < 0.7
    excluded[:, 0], excluded[:, 3] = True, False
    right = Engine().tail(wide(z).to(compute), ids, excluded, torch.float64)
    a = wide(z) - right.top[:, None]
    check_moments(TritonEngine().tail(z, ids, excluded, compute), right, {}, bound(a, a, compute))


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_holes(dtype):
    # e4m3fn has no infinity, and triton's interpreter takes that of e5m2 for a number
    size = 2 * TILE + 5
    z, y, k = rows(8, size, dtype)
    z[1, :700] = y[2, :700] = z[3, 700:] = y[3, 700:] = NEG_INF  # one policy, the other, both
    z[4] = z[5] = y[5] = NEG_INF  # one policy without any token, both
    z[6, ::2] = y[6, ::3] = NEG_INF
    z[7, k[7]] = y[7, k[7]] = NEG_INF
    check_full(z, y, k, torch.float32, TritonEngine())
    ids, all_of_them = k[:, None], torch.ones(8, 1, dtype=torch.bool)
    right = Engine().tail(wide(z), ids, all_of_them, torch.float64)
    a = wide(z) - right.top[:, None]
    found = TritonEngine().tail(z, ids, all_of_them, torch.float32)
    check_moments(found, right, {}, bound(a, a, torch.float32))


def test_nothing_left():
    z, y, k = rows(2, 1, torch.float32)
    check_full(z, y, k, torch.float32, TritonEngine())
    found = TritonEngine().tail(z, k[:, None], torch.ones(2, 1, dtype=torch.bool), torch.float32)
    assert (torch.stack([found.top, found.s1, found.s2, found.s3]) == 0).all()


@pytest.mark.parametrize("values", [1, 8])
@pytest.mark.parametrize("warps", [1, 2])
def test_any_tiles(values, warps):
    check_full(*rows(2, 700, torch.bfloat16), torch.float32, TritonEngine(values, warps))


@pytest.mark.parametrize("layout", ["row stride", "column stride", "unaligned"])
def test_strided_rows(layout):
    size = TILE + 16
    z, y, k = rows(3, size, torch.bfloat16)

    def moved(x: Tensor) -> Tensor:
        if layout == "column stride":
            return x.t().contiguous().t()
        room = torch.full((3, size + 32), 9.0, dtype=x.dtype)
        start = 16 if layout == "row stride" else 3
        room[:, start : start + size] = x
        return room[:, start : start + size]

    check_full(moved(z), moved(y), k, torch.float32, TritonEngine())
    norm = torch.tensor([[-14.0, 2.0]] * 3, dtype=torch.float64)
    gradients = [
        TritonEngine().softmax_gradient(x, norm, torch.tensor([1.0, 0.0, -2.0]))
        for x in (z, moved(z))
    ]
    assert torch.equal(*gradients)


def test_narrow_and_broad_logits_together():
    z, _, k = rows(2, TILE + 1, torch.bfloat16)
    _, y, _ = rows(2, TILE + 1, torch.float32)
    check_full(z, y, k, torch.float32, TritonEngine())


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_gradient(dtype, compute):
    z, _, _ = rows(3, TILE + 3, dtype)
    norm = torch.stack([wide(z).amax(-1), torch.tensor([0.5, 3.0, 7.0])], -1)
    grad = torch.tensor([0.75, -3.0, 0.0], dtype=compute)
    found = TritonEngine().softmax_gradient(z, norm, grad)
    slope = -grad[:, None] * (wide(z) - norm.sum(-1)[:, None]).exp()
    assert found.dtype == dtype
    assert (found[2].float() == 0).all()
    unit = max(eager.UNITS[compute], torch.finfo(dtype).eps / 2)
    off = (wide(found) - slope).abs()
    top, rest = norm.T[..., None]
    # z - top, then minus rest, then exp; fp64 logits and tops are rounded before
    spread = (wide(z) - top).abs() + rest.abs() + (wide(z) - top - rest).abs()
    spread += (wide(z).abs() + top.abs()) * (dtype == torch.float64)
    subnormal = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert (off <= unit * (KAPPA + 2 + spread) * slope.abs() + subnormal).all()


@pytest.mark.parametrize("compute", eager.UNITS)
@pytest.mark.parametrize("cap", [20.0, 0.75])
def test_policy_loss(cap, compute):
    eager.test_loss_and_gradient_are_the_definitions(losses.AGGREGATIONS[-1], cap, compute)


@pytest.mark.parametrize("ratio", [1000.0, NEG_INF])
@pytest.mark.parametrize("kept", [True, False])
def test_overflowing_tokens(ratio, kept):
    eager.test_overflowing_tokens(ratio, kept)


@pytest.mark.parametrize("view", ["full", "topk"])
@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_predictive_policy_loss(view, divergence):
    batch = family("far-apart", sequences=1, length=6, vocab_size=64, top_k=8)
    options = eager.behavior(batch)
    if view == "full":
        options |= {"topk_ids": None, "topk_logprobs": None}
    found = []
    for backend in (triton_backend, torch_eager):
        logits, tokens = eager.inputs(batch)
        logits.requires_grad_()
        loss = backend.predictive_policy_loss(
            logits,
            tokens,
            torch.as_tensor(batch.advantages),
            response_mask=torch.as_tensor(batch.response_mask),
            divergence=divergence,
            delta=0.05,
            aggregation="none",
            compute_dtype=torch.float64,
            **options,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        found.append((loss.detach(), gradient))
    for value, right in zip(*found, strict=True):
        assert (right != 0).any()
        size = right.abs().max()
        # both round: twice a dozen roundings
        assert ((value - right).abs() <= 2.0**-53 * 64 * size).all()


def test_keep_masks():
    eager.test_masks_agree_with_the_definitions("predictive-kl", "far-apart")
    eager.test_non_contiguous_inputs()
    eager.test_padding_may_hold_any_id()


def test_no_tokens():
    z, y, k = rows(0, 8, torch.float32)
    assert TritonEngine().full(z, y, k, torch.float32).s1.shape == (0,)
