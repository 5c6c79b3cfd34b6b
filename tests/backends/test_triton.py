"""The Triton kernels: in the interpreter, ahead of time, and on a GPU where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from pdverify.backends import BACKENDS, triton_backend
from pdverify.tools.bench.contestants import contestants
from pdverify.tools.bench.gate import Case, judge
from pdverify.tools.bench.inputs import as_batch, make_inputs
from pdverify.tools.bench.workloads import WORKLOADS, Size

pytest.importorskip("triton", reason="needs triton: pip install triton")
INTERPRETED = "tests/backends/triton_interpreted.py"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def python(*arguments: str, interpret: bool = False) -> str:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if interpret else {}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def pytest_of_kernels(*options: str, interpret: bool) -> str:
    fixed = ("-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning")
    return python("-m", "pytest", *fixed, INTERPRETED, *options, interpret=interpret)


def test_in_the_interpreter():
    assert " passed" in pytest_of_kernels(interpret=True)


def test_triton_is_imported_when_a_function_is_looked_up():
    script = """
        import sys
        from pdverify.backends import BACKENDS, triton_backend
        BACKENDS["triton"].unavailable(), BACKENDS["triton"].devices()
        before = "triton" in sys.modules
        triton_backend.keep_mask
        print(before, "triton" in sys.modules)
    """
    assert python("-c", textwrap.dedent(script)).split() == ["False", "True"]


def test_it_says_why_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BACKENDS["triton"].devices() == ()
    assert "TRITON_INTERPRET=1" in triton_backend.unavailable()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_backend.unavailable() is None
    monkeypatch.setattr(triton_backend.importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in triton_backend.unavailable()


@pytest.fixture(scope="module")
def usages():
    """`(variant, usage)` of every kernel on sm_90, and of the KL kernels on others."""
    script = """
        import json
        from dataclasses import asdict
        from pdverify.backends.triton_report import compile_variant, variants

        chosen = list(variants(90))
        for capability in (80, 100):
            chosen += [x for x in variants(capability) if x.kernel != "_cells_kernel" and x.aligned]
        found = []
        for x in chosen:
            usage = compile_variant(x)
            found.append((asdict(x), asdict(usage) | {"resident": usage.resident}))
        print(json.dumps(found))
    """
    return json.loads(python("-c", textwrap.dedent(script)))


def test_no_kernel_spills(usages):
    assert {variant["capability"] for variant, _ in usages} == {80, 90, 100}
    spilling = [variant for variant, usage in usages if usage["spilled"]]
    # tiles are chosen for sm_90; on sm_80 one kernel keeps a few bytes of float64 logits in memory
    assert {(x["capability"], x["logits"]) for x in spilling} <= {(80, "fp64")}


def test_enough_warps_are_resident(usages):
    # float32: a warp of the full view has 2 KiB of bf16 logits in flight and 16 of them cover
    # 4.8 TB/s for 0.8 us on each of 132 multiprocessors.  float64 computes for longer than it
    # waits: two blocks of 4 warps take turns.
    wanted = {"fp32": 16, "fp64": 8}
    few = [x for x in usages if x[1]["resident"] < wanted[x[0]["compute"]]]
    assert few == []


def test_aligned_rows_are_read_16_bytes_at_a_time(usages):
    # a tile of float64 sums has 8 columns of a thread, 8 bytes of fp8
    for variant, usage in usages:
        narrow = variant["compute"] == "fp64" and variant["logits"].startswith("fp8")
        wide = 8 if narrow and variant["kernel"] != "_tail_kernel" else 16
        if variant["aligned"]:
            assert usage["load"] == wide, variant


@pytest.mark.cuda
@needs_gpu
def test_on_a_gpu():
    assert " passed" in pytest_of_kernels("-m", "cuda", interpret=False)


@pytest.mark.cuda
@needs_gpu
def test_offsets_past_32_bits():
    count, size = 16_384, 151_936
    logits = torch.empty(count, size, dtype=torch.bfloat16, device="cuda").normal_(0, 3)
    tokens = torch.randint(size, (count,), device="cuda")
    last = slice(count - 4, None)
    found = []
    for rows in (slice(None), last):
        z = logits[rows].detach().requires_grad_()
        log_pi = triton_backend.log_prob(z, tokens[rows])
        log_pi.sum().backward()
        found.append((log_pi[-4:].detach(), z.grad[-4:]))
        z.grad = None
    for whole, alone in zip(*found, strict=True):
        assert torch.equal(whole, alone)


def check_at_scale(name: str, size: Size, device: str) -> None:
    """First and last rows of a large batch: right, and the same bits as alone."""
    contestant = contestants()[name]
    for workload in (WORKLOADS["full-kl"], WORKLOADS["topk-kl"]):
        inputs = make_inputs(workload, size, "bf16", device, 0)
        whole = contestant.prepare(workload, inputs)()
        for rows in (slice(0, 4), slice(size.tokens - 4, size.tokens)):
            part = inputs.rows(rows)
            alone = contestant.prepare(workload, part)()
            assert all(torch.equal(x[:, rows], alone[field]) for field, x in whole.items())
            gate = judge(contestant, workload, [Case("rows", as_batch(part, "bf16"))], device)
            assert gate.passed, gate.message


def test_at_a_small_scale():
    check_at_scale("torch-eager", Size(tokens=40, vocab=3000), "cpu")


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("name", ["triton", "torch-compiled", "torch-chunked"])
def test_at_full_size(name):
    check_at_scale(name, Size(tokens=8192, vocab=151_936), "cuda")
