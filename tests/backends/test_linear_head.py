"""The linear-head backend against the definitions on the logits that its heads make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pdverify.backends import linear_head, torch_eager
from pdverify.backends.engine import Engine
from pdverify.backends.exact_heads import exact_heads, exact_products
from pdverify.backends.head_logits import LinearHead, Tiles, local, slices
from pdverify.backends.linear_head import LinearHeadEngine
from pdverify.backends.masks import TorchBackend
from pdverify.batch import Batch
from pdverify.budgets import CHAIN, KAPPA, SLACK, Budgets
from pdverify.cases import build as family
from pdverify.definitions import masks
from pdverify.definitions.cells import build
from pdverify.definitions.divergences import DIVERGENCES
from pdverify.definitions.masks import MASKS
from tests.backends.test_torch_eager import BEHAVIOR, TAILS, behavior, check_values, inputs

UNITS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SIZE, FEATURES = 211, 24

# neither 13 tokens nor 50 columns divide what the tests use
TILES = {"small": (13, 50), "one column": (64, 1), "whole": (64, 512)}

FORMS = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"softcap": 3.0},
    "temperature": {"temperature": 0.7},
    "padded": {"vocab_size": 190},
    "all": {"bias": True, "softcap": 3.0, "temperature": 0.7, "vocab_size": 190},
}


def head(
    form: str, rows: int = 40, dtype: torch.dtype = torch.float32, seed: int = 0
) -> LinearHead:
    options = dict(FORMS[form])
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = normal(SIZE, FEATURES) * FEATURES**-0.5 * 2
    # padding holds what a product must never see
    weight[options.get("vocab_size", SIZE) :] = torch.nan
    bias = normal(SIZE).to(dtype) if options.pop("bias", False) else None
    return LinearHead(normal(rows, FEATURES).to(dtype), weight.to(dtype), bias, **options)


def near(x: LinearHead, distance: float = 2.0**-6) -> LinearHead:
    """A behavior policy close by: the same head on other hidden states."""
    generator = torch.Generator().manual_seed(1)
    moved = torch.randn(x.hidden.shape, generator=generator) * distance
    return replace(x, hidden=(x.hidden.double() + moved).to(x.hidden.dtype))


def eager(x: LinearHead) -> torch.Tensor:
    """The logits in float64, by the documented formula; differentiable."""
    used = slice(None, x.vocab_size)
    z = x.hidden.double() @ x.weight[used].double().mT
    if x.bias is not None:
        z = z + x.bias[used].double()
    if x.softcap is not None:
        z = x.softcap * torch.tanh(z / x.softcap)
    padding = z.new_full((*z.shape[:-1], len(x.weight) - z.shape[-1]), -torch.inf)
    return torch.cat([z / x.temperature, padding], -1)


def logit_error(x: LinearHead, unit: float) -> torch.Tensor:
    """How far a computed logit may lie from `eager`, float64 `[T, V]`.

    A dot product of d terms in any order errs by at most `d u |h| . |w|`, the bias adds one
    rounding; the cap (slope at most 1) is a division, a tanh and a product, the temperature one
    more.  Padding is exact.
    """
    used = slice(None, x.vocab_size)
    size = x.hidden.double().abs() @ x.weight[used].double().abs().mT
    if x.bias is not None:
        size = size + x.bias[used].double().abs()
    z = eager(x)[:, used].abs()
    error = (FEATURES + 2) * unit * size / x.temperature + (KAPPA + 4) * unit * z
    return torch.nn.functional.pad(error, (0, len(x.weight) - error.shape[-1]))


def batch_of(x: LinearHead, y: LinearHead, top_k: int = 6) -> Batch:
    """Both policies in float64, with an advantage of either sign."""
    z, log_mu = eager(x)[None], eager(y).log_softmax(-1)[None]
    rng = np.random.default_rng(2)
    tokens = torch.as_tensor(rng.integers(0, x.used, size=z.shape[:2]))
    # half of the sampled tokens are the likeliest
    tokens[:, ::2] = log_mu.argmax(-1)[:, ::2]
    top = log_mu.topk(top_k)
    return Batch(
        tokens=tokens.numpy(),
        advantages=rng.normal(size=tokens.shape),
        response_mask=np.ones(tokens.shape, dtype=bool),
        vocab_size=len(x.weight),
        logits=z.numpy(),
        behavior_logits=eager(y)[None].numpy(),
        behavior_logprobs=log_mu.gather(-1, tokens[..., None])[..., 0].numpy(),
        topk_ids=top.indices.numpy(),
        topk_logprobs=top.values.numpy(),
        dtype="fp64",
        logprob_dtype="fp64",
    )


def budgets(batch: Batch, x: LinearHead, y: LinearHead, partition: str, unit: float) -> Budgets:
    """Budgets with the error of the products in the unit roundoff.

    Logits off by `e` move a log-prob by at most `2 e`; a budget lets it err by `u E` at least,
    `E >= KAPPA + 2`.
    """
    e = max(logit_error(x, unit).max().item(), logit_error(y, unit).max().item())
    unit = unit + 2 * e / (KAPPA + 2)
    return Budgets(batch.rows(), partition, "append", unit, "complement")


def backend(tiles: str = "small", epilogue: Engine | None = None) -> TorchBackend:
    return TorchBackend(LinearHeadEngine(*TILES[tiles], epilogue=epilogue))


def given(batch: Batch, partition: str, y: LinearHead | None) -> dict[str, object]:
    """What a call on `[T]` rows is told of the behavior policy, its logits as a head or not."""
    found = {name: x[0] for name, x in behavior(batch).items()}
    if y is not None:
        found["behavior_logits"] = y
    return found | {"partition": partition}


def check(value: torch.Tensor, mine: np.ndarray, budget: np.ndarray) -> None:
    off = np.abs(value.double().numpy() - mine)
    assert (off <= budget).all(), (off[~(off <= budget)], budget[~(off <= budget)])


def multiplied(x: LinearHead | torch.Tensor, dtype: torch.dtype, step: int) -> torch.Tensor:
    """Logits from tiles of `step` columns, float64; what follows the columns is -inf."""
    rows, size = x.shape
    buffer = Tiles.buffer(rows, step, dtype, torch.device("cpu")).fill_(torch.nan)
    tiles, parts = Tiles(x, slice(0, rows), dtype), []
    for columns in slices(size, step):
        z, width = tiles.make(columns, buffer), columns.stop - columns.start
        assert z.is_contiguous()
        assert z.shape[1] > width
        assert torch.isneginf(z[:, width:]).all()
        parts.append(z[:, :width].to(torch.float64, copy=True))
    return torch.cat(parts, -1)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_logits_within_the_bound_of_a_dot_product(form, dtype, tiles):
    x = head(form, dtype=dtype)
    engine = LinearHeadEngine(*TILES[tiles])
    ids = torch.arange(SIZE).expand(40, -1)
    unit = UNITS[x.dtype_of(torch.float32)]
    right, bound = eager(x), logit_error(x, unit)
    found = engine.gather(x, ids)
    for z in (found, multiplied(x, x.dtype_of(torch.float32), TILES[tiles][1])):
        assert torch.equal(torch.isneginf(z), torch.isneginf(right))
        finite = torch.isfinite(right)
        assert ((z - right).abs()[finite] <= bound[finite]).all()


def test_ids_of_other_columns_point_to_the_padding_of_a_tile():
    ids = torch.tensor([[0, 3, 4, 6, 7, 9]])
    assert local(ids, slice(4, 7)).tolist() == [[3, 3, 0, 2, 3, 3]]
    z = torch.arange(50.0).reshape(5, 10)
    assert torch.equal(multiplied(z, torch.float32, 3), z.double())


@pytest.mark.parametrize("compute", UNITS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("partition", TAILS)
def test_every_divergence_and_tail_within_budget(partition, form, compute):
    x = head(form)
    y = near(x)
    batch = batch_of(x, y)
    cells, k = build(batch.rows(), partition), torch.as_tensor(batch.tokens[0])
    # the definitions round too, in float64
    allowed = budgets(batch, x, y, partition, UNITS[compute] + UNITS[torch.float64])
    options = given(batch, partition, y) | {"compute_dtype": compute}
    with np.errstate(all="ignore"):
        for name in DIVERGENCES:
            d = backend().divergence(x, k, name=name, **options)
            check(d, masks.divergence(cells, name), allowed.divergence(name))
            for tail in TAILS[partition]:
                c = backend().coefficient(x, k, name=name, tail=tail, **options)
                check(c, masks.coefficient(cells, name, tail), allowed.coefficient(name, tail))


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_operands_keep_the_float32_product(dtype, tiles):
    x = head("all", dtype=dtype)
    y = near(x)
    batch = batch_of(x, y)
    k = torch.as_tensor(batch.tokens[0])
    for partition in TAILS:
        cells, options = build(batch.rows(), partition), given(batch, partition, y)
        allowed = budgets(batch, x, y, partition, UNITS[torch.float32])
        d = backend(tiles).divergence(x, k, name="tv", **options)
        check(d, masks.divergence(cells, "tv"), allowed.divergence("tv"))
        c = backend(tiles).coefficient(x, k, name="kl", **options)
        check(c, masks.coefficient(cells, "kl", TAILS[partition][-1]), allowed.coefficient("kl"))
    log_pi = backend(tiles).log_prob(x, k)
    right = eager(x).log_softmax(-1).gather(-1, k[:, None])[:, 0]
    # log-probs err by 2 e and the budget of the softmax
    allowed = budgets(batch, x, y, "full", UNITS[torch.float32]).log_ratio()
    check(log_pi, right.numpy(), allowed)


def test_behavior_logits_may_be_a_tensor():
    x = head("padded")
    y = near(x)
    batch = batch_of(x, y)
    k = torch.as_tensor(batch.tokens[0])
    as_head, as_tensor = (given(batch, "full", z) for z in (y, None))
    allowed = budgets(batch, x, y, "full", UNITS[torch.float32])
    for name in ("kl", "tv"):
        a, b = (backend().divergence(x, k, name=name, **o) for o in (as_head, as_tensor))
        check(a, b.double().numpy(), 2 * allowed.divergence(name))


def test_padding_of_one_policy_alone_is_a_probability_of_zero():
    x = head("padded")
    y = replace(head("plain"), weight=torch.randn(SIZE, FEATURES))
    k = torch.zeros(40, dtype=torch.int64)
    for other in (y, eager(y)):
        forward = backend().divergence(x, k, name="kl", partition="full", behavior_logits=other)
        assert torch.isposinf(forward).all()
    reverse = backend().divergence(x, k, name="reverse-kl", partition="full", behavior_logits=y)
    assert torch.isfinite(reverse).all()


@pytest.mark.parametrize("mask", ["predictive-kl", "predictive-tv", "dppo-topk-kl", "ppo-clip"])
def test_masks_are_those_of_the_logits(mask):
    x = head("all", dtype=torch.float64)
    batch = batch_of(x, near(x, 0.25))
    arguments = torch.as_tensor(batch.tokens[0]), torch.as_tensor(batch.advantages[0])
    known = given(batch, "topk", None)
    del known["partition"]
    differ = set()
    for view in MASKS[mask].views():
        for tail in masks.TAILS if MASKS[mask].needs_tail(view) else (None,):
            rule = MASKS[mask].rule(view=view, tail=tail, delta=2.0**-8)
            options = {"rule": rule, "compute_dtype": torch.float64, **known}
            kept = backend().keep_mask(x, *arguments, **options)
            right = torch_eager.keep_mask(eager(x), *arguments, **options)
            assert torch.equal(kept, right)
            differ |= set(kept.tolist())
    assert differ == {True, False}


def test_log_probs_come_from_the_behavior_head_where_none_are_stored():
    x = head("all", dtype=torch.float64)
    y, k, advantages = near(x, 0.25), torch.arange(40), torch.ones(40)
    rule = MASKS["dppo-binary-kl"].rule(delta=2.0**-12)
    options = {"rule": rule, "compute_dtype": torch.float64}
    kept = backend().keep_mask(x, k, advantages, behavior_logits=y, **options)
    right = torch_eager.keep_mask(eager(x), k, advantages, behavior_logits=eager(y), **options)
    assert torch.equal(kept, right)
    assert set(kept.tolist()) == {True, False}


def leaves(x: LinearHead) -> list[torch.Tensor]:
    return [t for t in (x.hidden, x.weight, x.bias) if t is not None]


def differentiable(x: LinearHead) -> LinearHead:
    bias = None if x.bias is None else x.bias.clone().requires_grad_()
    hidden, weight = x.hidden.clone(), x.weight.clone()
    return replace(x, hidden=hidden.requires_grad_(), weight=weight.requires_grad_(), bias=bias)


def named(x: LinearHead) -> dict[str, torch.Tensor]:
    return {n: t for n in ("hidden", "weight", "bias") if (t := getattr(x, n)) is not None}


def gradient_bounds(
    x: LinearHead, k: torch.Tensor, weight: torch.Tensor, unit: float
) -> list[torch.Tensor]:
    """Bounds of the gradients of `sum_t weight_t log pi_k`, at the columns that are used.

    The slope at a product is `S = weight (1[k] - pi) cap' / temperature`.  Logits off by `e` move
    log pi by `2 e`, its evaluation by `u (2 spread + KAPPA (1 + log V) + CHAIN + KAPPA)`; they
    move `cap' = 1 - tanh^2` by twice the change of tanh; `S` takes ten roundings more.  Sums of
    products, in any order, err by their number of terms times `u` times their size.
    """
    z, e = eager(x)[:, : x.used].detach(), logit_error(x, unit).max()
    pi = z.softmax(-1)
    spread = z.amax() - z.amin()
    relative = 2 * e + unit * (2 * spread + KAPPA * (2 + np.log(x.used)) + CHAIN)
    inner = (torch.nn.functional.one_hot(k, x.used) - pi).abs()
    moved = 0.0 if x.softcap is None else 2 * e * x.temperature / x.softcap
    scale = SLACK * weight.abs()[:, None] / x.temperature
    slope, error = scale * inner, scale * (pi * relative + inner * (moved + 10 * unit))
    by_column, by_row = error + x.used * unit * slope, error + len(z) * unit * slope
    bounds = [by_column @ x.weight[: x.used].double().abs(), by_row.mT @ x.hidden.double().abs()]
    return bounds if x.bias is None else [*bounds, by_row.sum(0)]


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_eager_autograd(form, dtype, tiles):
    x = differentiable(head(form, dtype=dtype))
    k = torch.arange(40) * 7 % x.used
    weight = torch.linspace(-1, 1, 40, dtype=torch.float64)
    compute = x.dtype_of(torch.float32)
    log_pi = backend(tiles).log_prob(x, k, compute_dtype=compute)
    found = torch.autograd.grad((log_pi * weight.to(compute)).sum(), leaves(x))
    wide = differentiable(replace(x, **{n: t.detach().double() for n, t in named(x).items()}))
    right = eager(wide).log_softmax(-1).gather(-1, k[:, None])[:, 0]
    truth = torch.autograd.grad((right * weight).sum(), leaves(wide))
    with torch.no_grad():
        # the reference rounds too
        bounds = gradient_bounds(x, k, weight, UNITS[compute] + UNITS[torch.float64])
    stored = torch.finfo(dtype).eps / 2
    for grad, true, bound in zip(found, truth, bounds, strict=True):
        assert grad.dtype == dtype
        used = slice(len(bound))
        off = (grad.double() - true)[used].abs()
        assert (off <= bound + stored * true[used].abs()).all()
        assert (grad[len(bound) :] == 0).all()


def loss_inputs(x: LinearHead) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    batch = batch_of(x, near(x, 0.25))
    known = given(batch, "topk", None)
    del known["partition"], known["behavior_logits"]
    arguments = torch.as_tensor(batch.tokens[0]), torch.as_tensor(batch.advantages[0])
    return arguments, known | {"delta": 2.0**-8, "compute_dtype": torch.float64}


def test_the_masked_loss_is_that_of_the_logits():
    x = differentiable(head("all", dtype=torch.float64))
    with torch.no_grad():
        arguments, options = loss_inputs(x)
    kept = backend().predictive_mask(x, *arguments, **options)
    assert set(kept.tolist()) == {True, False}
    loss = backend().predictive_policy_loss(x, *arguments, **options)
    right = torch_eager.predictive_policy_loss(eager(x), *arguments, **options)
    slopes = [torch.autograd.grad(y, leaves(x)) for y in (loss, right)]
    with torch.no_grad():
        tokens, advantages = arguments
        log_pi = eager(x).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        ratio = (log_pi - options["behavior_logprobs"]).exp()
        weight = advantages * ratio * kept / len(tokens)
        unit = 2 * UNITS[torch.float64]
        bounds = gradient_bounds(x, tokens, weight, unit)
        # the ratio errs as log pi does
        e = 2 * logit_error(x, unit).max() + unit * (CHAIN + 4 * KAPPA * (2 + log_pi.abs().max()))
        assert (loss - right).abs() <= SLACK * e * (weight.abs() * (1 + log_pi.abs())).sum()
        for mine, true, bound in zip(*slopes, bounds, strict=True):
            off = (mine - true)[: len(bound)].abs()
            assert (off <= 2 * bound + e * mine[: len(bound)].abs() + e * bound.max()).all()
    assert slopes[0][0][~kept].eq(0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e38])
def test_dropped_tokens_contribute_exactly_nothing(poison):
    x = head("all")
    arguments, options = loss_inputs(x)
    valid = torch.arange(40) % 3 != 0
    gradients = []
    for value in (0.0, poison):
        hidden = x.hidden.clone()
        hidden[~valid] = value
        y = differentiable(replace(x, hidden=hidden))
        loss = backend().predictive_policy_loss(y, *arguments, response_mask=valid, **options)
        gradients.append((loss, *torch.autograd.grad(loss, leaves(y))))
    for clean, poisoned in zip(*gradients, strict=True):
        assert torch.equal(clean, poisoned)
        assert torch.isfinite(poisoned).all()
    assert (gradients[1][1][~valid] == 0).all()
    assert (gradients[1][1] != 0).any()


def test_nothing_kept_gives_no_gradient():
    x = differentiable(head("all"))
    nothing = torch.zeros(40)
    loss = backend().policy_loss(
        x, torch.arange(40), nothing, nothing, torch.zeros(40, dtype=torch.bool)
    )
    assert all((g == 0).all() for g in torch.autograd.grad(loss, leaves(x)))


def test_torch_func():
    x = head("all")
    arguments, options = loss_inputs(x)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        y = replace(x, **dict(zip(named(x), tensors, strict=True)))
        return backend().predictive_policy_loss(y, *arguments, **options)

    y = differentiable(x)
    right = torch.autograd.grad(loss(*leaves(y)), leaves(y))
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*leaves(x))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_second_derivatives_are_refused():
    x = differentiable(head("plain"))
    log_pi = backend().log_prob(x, torch.arange(40)).sum()
    (slope,) = torch.autograd.grad(log_pi, x.hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives"):
        torch.autograd.grad(slope.sum(), x.hidden)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.found = max(self.found, x.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_held(dtype):
    rows = 1600
    x, y = (head("all", rows, dtype, seed) for seed in (0, 1))
    k, lead = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    with Largest() as largest:
        eager(x)
    assert largest.found >= rows * SIZE
    x, y = differentiable(x), differentiable(y)
    engine = TorchBackend(LinearHeadEngine(16, 32))
    with Largest() as largest:
        engine.coefficient(x, k, name="tv", partition="full", behavior_logits=y)
        engine.predictive_policy_loss(x, k, lead + 1, behavior_logits=y).backward()
    # what is largest is a buffer of the epilogue
    assert largest.found < rows * SIZE // 2


def test_what_autograd_keeps_is_one_number_a_token():
    x = differentiable(head("all"))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        backend().log_prob(x, torch.arange(40))
    extra = [t for t in kept if all(t.data_ptr() != y.data_ptr() for y in leaves(x))]
    # tokens, log-probs, normalizers in two parts
    assert sum(t.numel() for t in extra) <= 4 * 40


class Counting(Engine):
    """Plain torch that counts the tiles it is given."""

    tiles = 0

    def tail(self, *arguments: object) -> object:
        self.tiles += 1
        return super().tail(*arguments)


def test_an_epilogue_takes_the_sums_of_every_tile():
    x = head("plain")
    batch = batch_of(x, near(x))
    k, options = torch.as_tensor(batch.tokens[0]), given(batch, "topk", None)
    epilogue = Counting()
    c = backend("small", epilogue).coefficient(x, k, name="kl", **options)
    assert torch.equal(c, backend("small").coefficient(x, k, name="kl", **options))
    # 40 rows by 13, 211 columns by 50
    assert epilogue.tiles == 4 * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3)}, r"hidden\.shape = \(2, 3\)"),
        ({"hidden": torch.zeros(())}, r"hidden\.shape = \(\)"),
        ({"bias": torch.zeros(3)}, r"bias\.shape"),
        ({"softcap": 0.0}, "softcap = 0"),
        ({"softcap": float("nan")}, "softcap = nan"),
        ({"temperature": 0.0}, "temperature = 0"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"vocab_size": SIZE + 1}, "vocab_size = 212"),
    ],
)
def test_bad_heads_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(head("all"), **change)


def test_any_leading_shape():
    x = head("all")
    k = torch.arange(40)
    shaped = replace(x, hidden=x.hidden.reshape(4, 10, FEATURES))
    assert shaped.shape == (4, 10, SIZE)
    found = backend().log_prob(shaped, k.reshape(4, 10))
    assert torch.equal(found.flatten(), backend().log_prob(x, k))
    with pytest.raises(ValueError, match=r"logits\.shape"):
        backend().log_prob(shaped, k)


@pytest.mark.parametrize(
    ("rows", "size", "features"), [(3, 1, 4), (3, 5, 1), (0, 5, 4), (3, 50, 4)]
)
def test_small_shapes(rows, size, features):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, features, generator=generator, dtype=torch.float64) for n in (rows, size)
    )
    x = differentiable(LinearHead(hidden, weight))
    z = eager(x).detach()
    k = torch.arange(rows) % size
    options = {"behavior_logits": z, "compute_dtype": torch.float64}
    for name in ("kl", "tv"):
        d = backend().divergence(x, k, name=name, partition="full", **options)
        assert (d.abs() <= 64 * UNITS[torch.float64]).all()
    loss = backend().predictive_policy_loss(x, k, torch.ones(rows), **options)
    right = torch.nn.functional.cross_entropy(eager(x), k, reduction="sum") / max(rows, 1)
    for a, b in zip(*(torch.autograd.grad(y, leaves(x)) for y in (loss, right)), strict=True):
        # sums of at most fifty terms, of size 4
        assert ((a - b).abs() <= 2**10 * UNITS[torch.float64]).all()


@pytest.mark.parametrize("k", [-1, SIZE])
def test_ids_outside_the_vocabulary_are_named(k):
    x = head("plain")
    tokens = torch.full((40,), k)
    with pytest.raises(IndexError, match=f"must be 0 to {SIZE - 1}"):
        backend().log_prob(x, tokens)
    with pytest.raises(IndexError, match=f"ids = {k}"):
        backend().divergence(x, tokens, name="kl", partition="full", behavior_logits=x)


def test_operands_of_different_dtypes_and_strides():
    x = head("all")
    k = torch.arange(40)
    mixed = replace(x, weight=x.weight.bfloat16(), bias=x.bias.half())
    widened = replace(x, weight=mixed.weight.float(), bias=mixed.bias.float())
    strided = replace(
        widened, hidden=x.hidden.mT.contiguous().mT, weight=widened.weight.mT.contiguous().mT
    )
    assert not strided.weight.is_contiguous()
    right = backend().log_prob(widened, k)
    assert torch.equal(backend().log_prob(mixed, k), right)
    assert ((backend().log_prob(strided, k) - right).abs() <= 2**8 * UNITS[torch.float32]).all()


EXACT = ["peaked", "padding", "training-neg-inf", "top-p-both"]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_exact_heads_make_the_very_logits(name, dtype):
    batch = family(name, sequences=3, vocab_size=67, top_k=8, dtype=dtype)
    flat = [torch.as_tensor(getattr(batch, n)).flatten(0, 1) for n in ("logits", BEHAVIOR[0])]
    seen = torch.zeros(len(flat[0]), dtype=torch.int64)
    for rows, heads in exact_heads(*flat):
        seen[rows] += 1
        for x, z in zip(heads, flat, strict=True):
            found = multiplied(x, torch.float32, 67)
            assert torch.equal(found.nan_to_num(nan=9e9), z[rows].double().nan_to_num(nan=9e9))
    assert (seen == 1).all()


@pytest.mark.parametrize("name", EXACT)
def test_exact_products_are_judged_as_logits(name, monkeypatch):
    batch = family(name, sequences=2, vocab_size=67, top_k=8)
    monkeypatch.setattr(linear_head, "_backend", None)
    for function in ("divergence", "coefficient", "keep_mask"):
        monkeypatch.setattr(torch_eager, function, getattr(exact_products, function))
    for partition in TAILS:
        check_values(batch, partition)


def test_exact_products_have_the_gradient_of_the_logits():
    batch = family("training-neg-inf", sequences=3, vocab_size=67, top_k=8, dtype="fp32")
    kept = torch.as_tensor(batch.advantages > 0)
    found = []
    for module in (exact_products, torch_eager):
        logits, tokens = inputs(batch)
        logits = logits.double().requires_grad_()
        loss = module.policy_loss(
            logits,
            tokens,
            torch.as_tensor(batch.advantages),
            torch.as_tensor(batch.behavior_logprobs),
            kept,
            response_mask=torch.as_tensor(batch.response_mask),
            aggregation="sequence-mean",
            compute_dtype=torch.float64,
        )
        found.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    for mine, right in zip(*found, strict=True):
        # the products are exact: what differs is the order of sums
        bound = 2 * UNITS[torch.float64] * (67 + CHAIN) * (1 + right.abs().max())
        assert ((mine - right).abs() <= bound).all()
