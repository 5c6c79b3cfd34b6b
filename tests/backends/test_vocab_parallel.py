"""The vocab-parallel backend against the definitions: in threads, and in real gloo processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pdverify.backends import torch_eager, vocab_parallel
from pdverify.backends.masks import TorchBackend
from pdverify.backends.shard_threads import Threads, in_threads, uneven
from pdverify.backends.shards import Communicator, Shard
from pdverify.backends.torch_eager import TorchEager
from pdverify.backends.vocab_parallel import VocabParallel, in_process
from pdverify.budgets import CHAIN
from pdverify.cases import FAMILIES
from pdverify.cases import build as family
from pdverify.definitions import masks
from pdverify.definitions.cells import build
from tests.backends import rank_processes as ranks
from tests.backends.test_torch_eager import (
    TAILS,
    UNITS,
    behavior,
    certain_sign,
    check_values,
    inputs,
)
from tests.definitions.helpers import StrictBudgets

ROOT = Path(__file__).parents[2]
WORLDS = (2, 4)


@pytest.fixture(scope="module", params=WORLDS)
def processes(request, tmp_path_factory):
    """What each rank of a gloo group found."""
    world = request.param
    folder = tmp_path_factory.mktemp(f"ranks-{world}")
    command = [sys.executable, "-m", "tests.backends.rank_processes", str(folder)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(world)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * world, "\n".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("name", ranks.FAMILIES)
def test_processes_get_the_same_bits(processes, name):
    for found in processes[1:]:
        assert found[name].keys() == processes[0][name].keys()
        for key, value in processes[0][name].items():
            assert key[0] == "gradient" or same(found[name][key], value), key


@pytest.mark.parametrize("name", ranks.FAMILIES)
def test_processes_are_within_budget(processes, name, monkeypatch):
    found = processes[0][name]

    def divergence(*_: Any, name: str, partition: str, compute_dtype: Any, **__: Any) -> Any:
        return found["divergence", name, partition, compute_dtype]

    def coefficient(
        *_: Any, name: str, partition: str, tail: Any, compute_dtype: Any, **__: Any
    ) -> Any:
        return found["coefficient", name, partition, tail, compute_dtype]

    monkeypatch.setattr(torch_eager, "divergence", divergence)
    monkeypatch.setattr(torch_eager, "coefficient", coefficient)
    for partition in TAILS:
        check_values(ranks.batch_of(name), partition)


@pytest.mark.parametrize("name", ranks.FAMILIES)
def test_processes_mask_as_the_definitions(processes, name):
    batch, checked = ranks.batch_of(name), 0
    for rule in ranks.rules():
        mine = masks.keep(batch.rows(), rule)
        theirs = processes[0][name]["mask", rule].numpy()
        differ = theirs[batch.response_mask] != mine
        certain = certain_sign(batch, rule)
        assert not (differ & certain).any(), rule
        assert not theirs[~batch.response_mask].any()
        checked += certain.sum()
    assert checked > 100


@pytest.mark.parametrize("name", ranks.FAMILIES)
def test_processes_have_the_log_probs_losses_and_gradients_of_the_whole(processes, name):
    batch = ranks.batch_of(name)
    whole, tokens = inputs(batch)
    found, world = processes[0][name], len(processes)
    for compute, unit in UNITS.items():
        right = torch_eager.log_prob(whole, tokens, compute_dtype=torch.float64)
        close(found["log_prob", compute], right, unit)
    for dtype in {key[-1] for key in found if key[0] == "loss"}:
        for loss, options in ranks.loss_options(batch).items():
            logits = whole.to(dtype).clone().requires_grad_()
            function = getattr(torch_eager, loss.split()[0])
            right = function(logits, tokens, compute_dtype=torch.float64, **options)
            right.sum().backward()
            assert right.detach().abs().sum() > 0
            close(found["loss", loss, dtype], right.detach(), UNITS[torch.float64])
            unit = max(torch.finfo(dtype).eps, UNITS[torch.float64])
            for rank, of_rank in enumerate(processes):
                start, stop = ranks.LAYOUTS[world][rank]
                gradient = of_rank[name]["gradient", loss, dtype]
                assert gradient.dtype == dtype
                assert (gradient[..., stop - start :] == 0).all()
                close(gradient[..., : stop - start], logits.grad[..., start:stop], unit)


def close(found: torch.Tensor, right: torch.Tensor, unit: float) -> None:
    """Within the rounding of sums over the vocabulary, taken in another order."""
    found, right = found.double(), right.double()
    bound = 2 * unit * (ranks.SIZE + CHAIN) * (1 + right.abs())
    equal = (found == right) | (found.isnan() & right.isnan())
    wrong = ~(equal | (right.isfinite() & ((found - right).abs() <= bound)))
    assert not wrong.any(), (found[wrong], right[wrong])


def test_processes_all_say_what_is_wrong(processes):
    for case, message in ranks.BROKEN.items():
        for view in ("full", "binary"):
            said = {found["broken"].get((case, view), "nothing") for found in processes}
            if (case, view) == ("behavior", "binary"):
                assert said == {"nothing"}
            else:
                assert len(said) == 1
                assert said.pop().startswith(message), (case, view)


def test_a_group_of_some_processes(processes):
    whole, tokens = inputs(ranks.batch_of("sampled-outside"))
    right = torch_eager.log_prob(whole, tokens, compute_dtype=torch.float64)
    close(processes[0]["pair"], right, UNITS[torch.float64])
    assert same(processes[0]["pair"], processes[1]["pair"])
    for outsider in processes[2:]:
        assert outsider["outsider"] == "group: this process is not a member"


# every divergence from its own cells, as the budgets have it
CELLS = in_threads(TorchBackend(VocabParallel(TorchEager())))


@pytest.mark.parametrize("partition", ["full", "topk"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_within_budget(name, partition, monkeypatch):
    # forward KL of two policies that are one token each cancels in its moments, not in its cells
    functions = CELLS if (name, partition) == ("near-one-hot", "full") else in_process
    for function in ("divergence", "coefficient", "keep_mask"):
        monkeypatch.setattr(torch_eager, function, getattr(functions, function))
    dtype = "bf16" if partition == "full" else "fp32"
    check_values(family(name, sequences=2, vocab_size=64, top_k=8, dtype=dtype), partition)


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(5, 24),
    places=st.lists(st.floats(0, 1), max_size=4),
    padding=st.integers(0, 4),
    name=st.sampled_from(["peaked", "training-neg-inf", "far-apart"]),
    seed=st.integers(0, 3),
)
def test_any_layout(size, places, padding, name, seed):
    batch = family(name, seed, sequences=1, length=4, vocab_size=size, top_k=4)
    cuts = [0, *sorted(int(x * size) for x in places), size]
    functions = in_threads(TorchBackend(VocabParallel()), lambda _: cuts, padding)
    rows, valid = batch.rows(), batch.response_mask
    for partition, tails in TAILS.items():
        cells = build(rows, partition)
        with np.errstate(all="ignore"):
            budgets = StrictBudgets(rows, partition, "append", 2.0**-53, "complement", cells)
        options = {"compute_dtype": torch.float64, "partition": partition, **behavior(batch)}
        for divergence in ("reverse-kl", "tv", "chi2"):
            d = functions.divergence(*inputs(batch), name=divergence, **options).numpy()[valid]
            with np.errstate(all="ignore"):
                # both sides round: twice the budget
                off = np.abs(d - masks.divergence(cells, divergence))
                bad = np.isfinite(off) & ~(off <= 2 * budgets.divergence(divergence))
            assert not bad.any()
            for tail in tails:
                c = functions.coefficient(*inputs(batch), name=divergence, tail=tail, **options)
                with np.errstate(all="ignore"):
                    off = np.abs(c.numpy()[valid] - masks.coefficient(cells, divergence, tail))
                    bad = np.isfinite(off) & ~(off <= 2 * budgets.coefficient(divergence, tail))
                assert not bad.any()
    whole, tokens = inputs(batch)
    slopes = []
    for module in (functions, torch_eager):
        logits = whole.double().clone().requires_grad_()
        value = module.log_prob(logits, tokens, compute_dtype=torch.float64)
        slopes.append(torch.autograd.grad(value.masked_fill(value.isinf(), 0.0).sum(), logits)[0])
    close(*slopes, UNITS[torch.float64])


def test_the_shards_are_uneven_and_may_be_empty():
    assert uneven(1) == (0, 0, 0, 1)
    assert uneven(64) == (0, 10, 42, 64)


@dataclass
class Counting:
    """A communicator that adds up what goes through another."""

    inner: Communicator
    numbers: list[int] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        self.numbers.append(x.numel() * x.element_size())
        return self.inner.maximum(x)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        self.numbers.append(x.numel() * x.element_size())
        return self.inner.total(x)


TOKENS, TOP_K, RANKS = 12, 5, 3


def traffic(call: Any, size: int) -> list[int]:
    """Bytes of each reduction of `call(logits, behavior logits)`, and nothing backward."""
    bounds = uneven(size)

    def one(comm: Communicator) -> list[int]:
        counting, local = Counting(comm), []
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            whole = torch.randn(TOKENS, size, generator=generator)
            part = whole[:, bounds[comm.rank] : bounds[comm.rank + 1]]
            local.append(Shard(part.clone().requires_grad_(), bounds[comm.rank], size, counting))
        found = call(*local)
        sent = list(counting.numbers)
        if found.requires_grad:
            found.sum().backward()
        assert counting.numbers == sent
        return sent

    counts = Threads(RANKS).run(one)
    assert all(x == counts[0] for x in counts)
    return counts[0]


def test_bytes_are_those_of_the_formula():
    k = torch.arange(TOKENS) % 3
    ids = torch.arange(TOP_K).expand(TOKENS, -1) * 7
    stored = {"behavior_logprobs": torch.full((TOKENS,), -1.5)}
    listed = {**stored, "topk_ids": ids, "topk_logprobs": torch.full((TOKENS, TOP_K), -2.0)}
    one = torch.ones(TOKENS)

    def view(name: str, partition: str, **options: Any) -> Any:
        return lambda z, y: vocab_parallel.coefficient(
            z, k, name=name, partition=partition, **options
        )

    def full(name: str) -> Any:
        return lambda z, y: vocab_parallel.divergence(
            z, k, name=name, partition="full", behavior_logits=y
        )

    top_k, one_k = 8 * (TOP_K + 5) * TOKENS + 32 * RANKS, 8 * (1 + 5) * TOKENS + 32 * RANKS
    moments = 96 * TOKENS + 56 * RANKS
    rule = masks.MASKS["dppo-binary-kl"].rule(delta=0.1)
    expected = [
        (view("chi2", "topk", **listed), top_k, 2),
        (view("kl", "binary", **stored), one_k, 2),
        (full("kl"), moments, 2),
        (full("reverse-kl"), moments, 2),
        (full("tv"), moments + 24 * TOKENS, 3),
        (lambda z, y: vocab_parallel.log_prob(z, k), one_k, 3),
        (lambda z, y: vocab_parallel.policy_loss(z, k, one, one, one > 0), one_k, 3),
        (lambda z, y: vocab_parallel.predictive_policy_loss(z, k, one, **listed), top_k, 2),
        (
            lambda z, y: vocab_parallel.predictive_policy_loss(z, k, one, behavior_logits=y),
            moments,
            2,
        ),
        (
            lambda z, y: vocab_parallel.keep_mask(z, k, one, rule=rule, behavior_logits=y),
            2 * one_k,
            5,
        ),
    ]
    for call, number, reductions in expected:
        for size in (40, 4000):
            sent = traffic(call, size)
            assert (sum(sent), len(sent)) == (number, reductions)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes outside the memory of `inputs`."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.found, self.known = 0, {x.untyped_storage().data_ptr() for x in inputs}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.found = max(self.found, x.numel())
        return out


class Alone:
    """The only rank."""

    rank, size = 0, 1

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_nothing_of_the_size_of_a_shard_is_made_but_its_gradient():
    rows, columns = 64, 5000
    engine = TorchBackend(VocabParallel(vocab_parallel.TorchChunked(block=2 * columns)))
    local = [Shard(torch.randn(rows, columns, requires_grad=True), 0, 4800, Alone()) for _ in "zy"]
    k = torch.arange(rows)
    with Largest(*(x.logits for x in local)) as largest:
        for name in ("kl", "tv"):
            engine.coefficient(local[0], k, name=name, partition="full", behavior_logits=local[1])
        loss = engine.predictive_policy_loss(
            local[0], k, torch.ones(rows), behavior_logits=local[1]
        )
    assert largest.found < rows * columns // 4
    with Largest(*(x.logits for x in local)) as largest:
        loss.backward()
    assert largest.found == rows * columns
    assert (local[0].logits.grad[:, 4800:] == 0).all()


def test_there_is_no_second_derivative():
    logits = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    value = vocab_parallel.log_prob(Shard(logits, 0, 8, Alone()), torch.arange(3))
    (slope,) = torch.autograd.grad(value.sum(), logits, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives"):
        slope.sum().backward()


def test_an_error_on_one_thread_reaches_the_caller():
    def fail(comm: Communicator) -> torch.Tensor:
        if comm.rank == 2:
            raise OverflowError("rank 2")
        return comm.total(torch.ones(1))

    before = set(threading.enumerate())
    with pytest.raises(OverflowError, match="rank 2"):
        Threads(3).run(fail)
    assert set(threading.enumerate()) <= before


def test_threads_that_differ_are_told():
    class Odd:
        def divergence(self, logits: Shard, tokens: torch.Tensor) -> torch.Tensor:
            return torch.full((1,), float(logits.group.rank == 1))

        def __getattr__(self, name: str) -> Any:
            return None

    with pytest.raises(RuntimeError, match=r"rank 1 returned tensor\(\[1\.\]\), rank 0"):
        in_threads(Odd()).divergence(torch.zeros(1, 6), torch.zeros(1).long())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": -1}, "start = -1"),
        ({"size": 0}, "size = 0"),
        ({"logits": torch.zeros(())}, r"logits\.shape = \(\)"),
    ],
)
def test_bad_shards_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Shard(**({"logits": torch.zeros(1, 2), "start": 0, "size": 2} | change))


def test_bad_arguments_are_named_before_anything_is_sent():
    counting = Counting(Alone())
    shard = Shard(torch.zeros(2, 4), 0, 4, counting)
    k = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(TypeError, match="logits: expected a Shard, got Tensor"):
        vocab_parallel.log_prob(torch.zeros(2, 4), k)
    with pytest.raises(TypeError, match="behavior_logits: expected a Shard, got Tensor"):
        vocab_parallel.divergence(
            shard, k, name="kl", partition="full", behavior_logits=torch.zeros(2, 4)
        )
    with pytest.raises(ValueError, match=r"logits\.shape = \(2, 4\): expected \(3, 4\)"):
        vocab_parallel.log_prob(shard, torch.zeros(3, dtype=torch.int64))
    other = Shard(torch.zeros(2, 4), 0, 5, counting)
    with pytest.raises(ValueError, match=r"behavior_logits\.shape = \(2, 5\): expected \(2, 4\)"):
        vocab_parallel.divergence(shard, k, name="kl", partition="full", behavior_logits=other)
    assert counting.numbers == []
