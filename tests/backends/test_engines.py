"""Every engine against the plain one in float64, and its functions against the definitions."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from pdverify.backends.engine import Engine
from pdverify.cases import FAMILIES
from pdverify.cases import build as family
from pdverify.definitions import losses
from tests.backends.test_torch_eager import UNITS, behavior, check_values, inputs
from tests.definitions.helpers import one_token, padded_batch

NAMES = ("torch_chunked", "torch_compiled", "native")
HOLES = ("none", "both", "training", "behavior", "sampled")
SIZES = (1, 2, 3, 17, 1000, 1023, 1024, 1025, 2049, 5000)


@pytest.fixture(params=NAMES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    found = importlib.import_module(f"pdverify.backends.{request.param}")
    reason = getattr(found, "unavailable", lambda: None)()
    if reason:
        pytest.skip(reason)
    return found


def logits(
    size: int, holes: str, offset: float, rows: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of both policies and tokens; `holes` says where -inf is, on every other row."""
    generator = torch.Generator().manual_seed(size)
    z = torch.randn(rows, size, generator=generator) * 2
    y = z + 0.1 * torch.randn(rows, size, generator=generator)
    k = torch.randint(0, size, (rows,), generator=generator)
    z[2], y[2] = z[2] + 30 * (torch.arange(size) == size // 2), y[2]
    if holes in ("both", "training"):
        z[1::2, ::3] = -torch.inf
    if holes in ("both", "behavior"):
        y[1::2, ::3] = -torch.inf
    if holes == "sampled":
        z[torch.arange(rows), k] = -torch.inf
    return z + offset, y + offset, k


def assert_close(mine: object, right: object, scales: dict[str, torch.Tensor], unit: float) -> None:
    """Fields equal where infinite, and within `unit` times `scales` elsewhere."""
    for name, want in vars(right).items():
        got = getattr(mine, name)
        assert got.dtype == torch.float64, name
        finite = want.isfinite()
        assert torch.equal(got[~finite], want[~finite]), name
        bound = unit * scales.get(name, want.abs())[finite]
        assert ((got - want)[finite].abs() <= bound).all(), name


@pytest.mark.parametrize("compute", UNITS)
@pytest.mark.parametrize("holes", HOLES)
@pytest.mark.parametrize("size", SIZES)
def test_moments_are_those_of_the_plain_engine(module, size, holes, compute):
    engine, plain = module._backend.engine, Engine()
    # the tallest chain is that of a tile; exponents of at most 60 nats are rounded in `compute`
    unit = UNITS[compute] * (200 if compute is torch.float32 else 2000)
    for offset in (0.0, 1e4):
        z, y, k = logits(size, holes, offset)
        exact = plain.full(z.double(), y.double(), k, torch.float64)
        gap = torch.where(torch.isneginf(z) | torch.isneginf(y), 0.0, (z - y).abs()).double()
        worst = gap.amax(-1) + (exact.top_z - exact.top_y).abs() + 1
        scales = {"f": worst * exact.m1, "e1": worst * exact.s1, "e2": worst * exact.s2}
        assert_close(engine.full(z, y, k, compute), exact, scales, unit)
        ids = torch.randint(0, size, (len(k), 5), generator=torch.Generator().manual_seed(1))
        excluded = (ids + k[:, None]) % 3 > 0
        right = plain.tail(z.double(), ids, excluded, torch.float64)
        assert_close(engine.tail(z, ids, excluded, compute), right, {}, unit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype_are_read_exactly(module, dtype):
    engine, plain = module._backend.engine, Engine()
    z, y, k = logits(3000, "none", 0.0)
    z, y = z.to(dtype), y.to(dtype)
    exact = plain.full(z.double(), y.double(), k, torch.float64)
    for compute, unit in UNITS.items():
        if dtype is torch.float64 and compute is torch.float32:
            continue  # logits themselves are rounded then
        worst = (z - y).abs().amax(-1).double() + (exact.top_z - exact.top_y).abs() + 1
        scales = {"f": worst * exact.m1, "e1": worst * exact.s1, "e2": worst * exact.s2}
        factor = 200 if compute is torch.float32 else 2000
        assert_close(engine.full(z, y, k, compute), exact, scales, unit * factor)


def test_strided_rows_one_row_and_no_rows(module):
    engine = module._backend.engine
    z, y, k = logits(1500, "none", 0.0)
    whole = engine.full(z, y, k, torch.float32)
    one = engine.full(z[3:4], y[3:4], k[3:4], torch.float32)
    tails = [
        engine.tail(x, i[:, None], i[:, None] >= 0, torch.float32)
        for x, i in ((z, k), (z[3:4], k[3:4]))
    ]
    for many, single in ((whole, one), tails):
        for name, want in vars(many).items():
            assert torch.allclose(getattr(single, name), want[3:4], rtol=1e-5, atol=1e-5), name
    apart = [torch.stack([x, x], 1)[:, 0] for x in (z, y)]
    across = [x.mT.contiguous().mT for x in (z, y)]
    for other in (apart, across):
        found = engine.full(*other, k, torch.float32)
        for name, want in vars(whole).items():
            assert torch.allclose(getattr(found, name), want, rtol=1e-5, atol=1e-5), name
    none = engine.full(z[:0], y[:0], k[:0], torch.float32)
    assert all(x.shape == (0,) for x in vars(none).values())
    norm = torch.zeros(len(k), 2, dtype=torch.float64)
    for count in (0, 1):
        rows = z[:count], y[:count], k[:count], norm[:count], norm[:count]
        assert [x.shape for x in engine.cell_sums(*rows, "tv", torch.float32)] == [(count,)] * 3


@pytest.mark.parametrize("partition", ["full", "topk"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_within_budget(module, name, partition):
    dtype = "bf16" if partition == "full" else "fp32"
    batch = family(name, sequences=2, vocab_size=130, top_k=8, dtype=dtype)
    check_values(batch, partition, module)


@pytest.mark.parametrize("compute", UNITS)
@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
def test_loss_and_gradient_are_the_definitions(module, aggregation, compute):
    batch = padded_batch()
    keep = np.ones(batch.tokens.shape, dtype=bool)
    keep[2, 0] = False
    z = torch.as_tensor(batch.logits).clone().requires_grad_()
    loss = module.policy_loss(
        z,
        torch.as_tensor(batch.tokens),
        torch.as_tensor(batch.advantages),
        torch.as_tensor(batch.behavior_logprobs),
        torch.as_tensor(keep),
        response_mask=torch.as_tensor(batch.response_mask),
        aggregation=aggregation,
        compute_dtype=compute,
    )
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    right = losses.policy_loss(batch, keep, aggregation=aggregation)
    bound = 64 * UNITS[compute] * np.abs(losses.policy_loss(batch, keep)[0]).sum()
    np.testing.assert_allclose(loss.detach().numpy(), right[0], rtol=0, atol=bound)
    np.testing.assert_allclose(gradient.numpy(), right[1], rtol=0, atol=bound)


@pytest.mark.parametrize("view", ["full", "topk"])
@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_predictive_loss_is_the_masked_loss(module, divergence, view):
    batch = family("near-equal", sequences=3, vocab_size=1100, top_k=8, dtype="fp32")
    given = behavior(batch)
    if view == "full":
        given["topk_ids"] = given["topk_logprobs"] = None
    z, tokens = inputs(batch)
    advantages = torch.as_tensor(batch.advantages)
    valid = torch.as_tensor(batch.response_mask)
    options = {"divergence": divergence, "tail": "uniform", "delta": 0.0, **given}
    keep = module.predictive_mask(z, tokens, advantages, response_mask=valid, **options)
    assert keep[valid].any()
    assert not keep[valid].all()
    one, two = (z.clone().requires_grad_() for _ in range(2))
    loss = module.predictive_policy_loss(one, tokens, advantages, response_mask=valid, **options)
    masked = module.policy_loss(
        two, tokens, advantages, given["behavior_logprobs"], keep, response_mask=valid
    )
    assert torch.allclose(loss, masked, rtol=1e-5, atol=1e-7)
    for value in (loss, masked):
        value.backward()
    assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-7)
    assert (one.grad[~(keep & valid)] == 0).all()


def test_predictive_loss_through_torch_func(module):
    batch = family("near-equal", sequences=2, vocab_size=1100, top_k=8, dtype="fp32")
    z, tokens = inputs(batch)
    advantages = torch.as_tensor(batch.advantages)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return module.predictive_policy_loss(
            x,
            tokens,
            advantages,
            response_mask=torch.as_tensor(batch.response_mask),
            **behavior(batch),
        )

    leaf = z.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(torch.func.grad(loss)(z), leaf.grad)


def test_dropped_tokens_that_overflow_leave_no_trace(module):
    batch = one_token(k=1, ids=(0,))
    batch = replace(batch, behavior_logprobs=np.array([[-1000.0]]))
    z = torch.as_tensor(batch.logits).clone().requires_grad_()
    loss = module.policy_loss(
        z,
        torch.as_tensor(batch.tokens),
        torch.as_tensor(batch.advantages),
        torch.as_tensor(batch.behavior_logprobs),
        torch.zeros(1, 1, dtype=torch.bool),
    )
    loss.backward()
    assert loss == 0
    assert (z.grad == 0).all()


def test_what_autograd_keeps_is_one_number_a_token(module):
    z, _, k = logits(4000, "none", 0.0, rows=9)
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        leaf = z.requires_grad_()
        module.log_prob(leaf, k)
    own = [x for x in held if x.untyped_storage().data_ptr() != z.untyped_storage().data_ptr()]
    assert sum(x.numel() for x in own) <= 4 * len(k)


def test_backends_need_neither_triton_nor_a_compiler():
    code = (
        "import sys, pdverify.backends, pdverify.backends.torch_chunked\n"
        "assert not {'triton', 'torch._inductor', 'pdverify.backends.triton_kernels'}"
        " & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": ""})
