"""Trust-region masks through a C++ kernel on CPUs: ``native``.

Must agree with `pdverify.definitions`.  The first call compiles `native.cpp` with $CXX, g++ or
clang++, into `pdverify` in $XDG_CACHE_HOME or ~/.cache.  Logits in bf16 or the compute dtype are
read where they lie, others are copied a few rows at a time.  The gradient, and the second sweep of
divergences other than total variation, are those of `Engine`, in plain torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdverify.backends.engine import CPU_BLOCK, Engine
from pdverify.backends.losses import aggregate as aggregate
from pdverify.backends.masks import TorchBackend
from pdverify.backends.moments import FullMoments, TailMoments

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=fast -pthread -w"
KERNELS = ("tail", "full", "tv")
FEW = 2**16  # logits that are not worth a second thread


def _compiler() -> list[str] | None:
    """The command of a C++ compiler."""
    commands = [os.environ.get("CXX", "").split(), ["g++"], ["clang++"]]
    return next((x for x in commands if x and shutil.which(x[0])), None)


def unavailable() -> str | None:
    """Why it cannot be used here, or None."""
    return None if _compiler() else "native needs a C++ compiler: apt install g++, or set CXX"


def devices() -> tuple[str, ...]:
    """Where it can run."""
    return ("cpu",)


def _compile(*options: str) -> str:
    if reason := unavailable():
        raise RuntimeError(reason)
    command = [*(_compiler() or []), *options, str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = "\n".join(done.stderr.splitlines()[:8])
        raise RuntimeError(f"{' '.join(command)} failed:\n{lines}")
    return done.stdout


@cache
def load(flags: str = FLAGS) -> ctypes.CDLL:
    """The kernels, compiled unless they are in the cache; RuntimeError where they cannot be."""
    # predefined macros tell compilers, their versions and instruction sets apart
    key = SOURCE.read_text() + flags + _compile(*flags.split(), "-dM", "-E")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdverify"
    built = folder / f"native-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # the name appears with a whole file behind it: another process may be at it too
        with tempfile.TemporaryDirectory(dir=folder) as room:
            made = Path(room) / built.name
            _compile(*flags.split(), "-fPIC", "-shared", "-o", str(made))
            made.replace(built)
    return ctypes.CDLL(str(built))


class NativeEngine(Engine):
    """One kernel for each sum; torch's number of threads share the rows."""

    def _run(self, kernel: str, compute: torch.dtype, fields: int, **given: Tensor) -> Tensor:
        """The sums of a kernel, float64 `[fields, T]`."""
        z, run, wide = given["z"].detach(), load().run, compute == torch.float64
        none = z.new_empty(len(z), 0, dtype=compute)
        y, ids, norms = (given.get(name, none).detach() for name in ("y", "ids", "norms"))
        out = torch.zeros(len(z), fields, dtype=torch.float64)
        if any(x.device.type != "cpu" for x in (z, y, ids, norms)):
            raise ValueError(f"logits are on {z.device}: the native backend reads CPU tensors")

        direct = all(x.dtype in (compute, torch.bfloat16) and x.stride(-1) == 1 for x in (z, y))
        threads = torch.get_num_threads() if z.numel() > FEW else 1
        step = max(1, len(z) if direct else 4 * threads * CPU_BLOCK // z.shape[1])
        given_rows = (torch.split(x, step) for x in (z, y, ids, norms, out))
        for part in zip(*given_rows, strict=True):
            held = part if direct else [*(x.to(compute).contiguous() for x in part[:2]), *part[2:]]
            task = [n for x in held for n in (x.data_ptr(), x.stride(0), x.itemsize == 2)]
            task += len(part[0]), z.shape[1], ids.shape[1], KERNELS.index(kernel)
            run((ctypes.c_int64 * len(task))(*task), wide, threads)
        return out.T

    def tail(self, logits: Any, ids: Tensor, excluded: Tensor, compute: torch.dtype) -> TailMoments:
        ids = ids.masked_fill(~excluded, logits.shape[-1]).sort(-1).values.contiguous()
        return TailMoments(*self._run("tail", compute, 4, z=logits, ids=ids))

    def full(self, logits: Any, behavior: Any, tokens: Tensor, compute: torch.dtype) -> FullMoments:
        ids = tokens[:, None]
        return FullMoments(*self._run("full", compute, 10, z=logits, y=behavior, ids=ids))

    def cell_sums(
        self,
        logits: Any,
        behavior: Any,
        tokens: Tensor,
        norm: Tensor,
        behavior_norm: Tensor,
        name: str,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if name != "tv":
            return super().cell_sums(logits, behavior, tokens, norm, behavior_norm, name, compute)
        given = {"ids": tokens[:, None], "norms": torch.cat([norm, behavior_norm], -1)}
        return tuple(self._run(name, compute, 3, z=logits, y=behavior, **given))


_backend = TorchBackend(NativeEngine())
divergence, coefficient, keep_mask = _backend.divergence, _backend.coefficient, _backend.keep_mask
predictive_mask, log_prob = _backend.predictive_mask, _backend.log_prob
policy_loss, predictive_policy_loss = _backend.policy_loss, _backend.predictive_policy_loss
