"""What is the native backend's own; `test_engines` has its sums."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdverify.backends import BACKENDS, native
from pdverify.backends.engine import Engine

needs_compiler = pytest.mark.skipif(native.unavailable() is not None, reason="no C++ compiler")

USE = """
import torch
from pdverify.backends import native
z = torch.randn(4, 500)
print(native.log_prob(z[None], torch.zeros(1, 4, dtype=torch.int64)).shape)
"""


def test_it_is_small():
    files = native.SOURCE, Path(native.__file__)
    assert sum(len(x.read_text().splitlines()) for x in files) <= 300


def test_without_a_compiler_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "apt install g++" in BACKENDS["native"].unavailable()
    native.load.cache_clear()
    with pytest.raises(RuntimeError, match=r"apt install g\+\+"):
        native.load()


@needs_compiler
def test_what_the_compiler_says_is_in_the_error(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="no-such-option"):
        native.load("--no-such-option")


@needs_compiler
def test_two_processes_may_build_it_at_once(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", USE], env=environment, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [x.communicate()[0].split()[0] for x in both] == [b"torch.Size([1,"] * 2
    (built,) = (tmp_path / "pdverify").iterdir()
    assert built.suffix == ".so"


@needs_compiler
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-24), (torch.float64, 2.0**-53)])
def test_exponentials_over_their_range(dtype, unit):
    # two tokens: the largest, whose weight is 1, and x below it
    x = torch.linspace(0, 86, 20_011, dtype=torch.float64).to(dtype)
    z = torch.stack([torch.zeros_like(x), -x], 1)
    nothing = torch.zeros(len(x), 1, dtype=torch.int64)
    m = native._backend.engine.tail(z, nothing, nothing == 1, dtype)
    # the others are summed apart from the largest
    weight, right = m.s1 - 1, torch.exp(-x.double())
    # 1 + e^-x is a float64
    assert ((weight - right).abs() <= 3 * unit * right + 2.0**-52).all()


@needs_compiler
def test_threads_do_not_change_a_bit():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(64, 5000, generator=generator)
    y, k = z + 0.1, torch.arange(64)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(native._backend.engine.full(z, y, k, torch.float32))
    finally:
        torch.set_num_threads(before)
    for name, want in vars(found[0]).items():
        assert all(torch.equal(getattr(x, name), want) for x in found[1:]), name


def test_tensors_of_another_device_are_refused():
    if native.unavailable():
        pytest.skip("no C++ compiler")
    z = torch.zeros(2, 8, device="meta")
    ids = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="logits are on meta"):
        native._backend.engine.tail(z, ids, ids == 0, torch.float32)


def test_divergences_without_a_kernel_are_those_of_the_plain_engine(monkeypatch):
    called = []
    monkeypatch.setattr(Engine, "cell_sums", lambda *_: called.append(1))
    native._backend.engine.cell_sums(*[None] * 5, "chi2", torch.float32)
    assert called == [1]
