"""What the compiler makes of the Triton kernels: registers, spills, shared memory, loads.

``python -m pdverify.backends.triton_report [CAPABILITY ...]`` compiles every kernel ahead of time
(no GPU is needed) for NVIDIA GPUs of the capabilities given, 90 by default, and prints a table.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdverify.backends import triton_kernels as kernels
from pdverify.backends.cell_functions import STABLE
from pdverify.backends.triton_kernels import REAL, tile

VOCAB = 151_936
LOGITS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
}
COMPUTE = {"fp32": torch.float32, "fp64": torch.float64}
REGISTERS = 65_536
"""Of a multiprocessor."""


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants; `aligned` rows start at multiples of 16 bytes and logits."""

    kernel: str
    logits: str
    compute: str = "fp32"
    divergence: str | None = None
    aligned: bool = True
    capability: int = 90


@dataclass(frozen=True)
class Usage:
    """Of a compiled kernel: per thread registers and bytes of stack and local memory (where
    registers spill to); bytes of shared memory; the widest load, in bytes; its warps."""

    registers: int
    spilled: int
    shared: int
    load: int
    warps: int

    @property
    def resident(self) -> int:
        """Warps of a multiprocessor that registers leave room for."""
        per_warp = -(-self.registers * 32 // 256) * 256
        return min(64, REGISTERS // per_warp // self.warps * self.warps)


def variants(capability: int = 90) -> Iterator[Variant]:
    """Every kernel with the constants it is launched with."""
    for logits in LOGITS:
        if logits == "fp8e4nv" and capability < 89:
            continue
        for compute in COMPUTE:
            for aligned in (True, False):
                fixed = aligned, capability
                for kernel in ("_tail_kernel", "_full_kernel", "_gradient_kernel"):
                    yield Variant(kernel, logits, compute, None, *fixed)
                for divergence in STABLE:
                    yield Variant("_cells_kernel", logits, compute, divergence, *fixed)


def compile_variant(variant: Variant) -> Usage:
    """Compile ahead of time and read the machine code's resources."""
    kernel = getattr(kernels, variant.kernel)
    itemsize = LOGITS[variant.logits].itemsize if variant.aligned else 16
    constants: dict[str, Any] = tile(kernel, VOCAB, itemsize, COMPUTE[variant.compute])
    warps = constants.pop("num_warps")
    constants["REAL"] = REAL[COMPUTE[variant.compute]]
    if variant.divergence is not None:
        constants["NAME"] = variant.divergence
    types, aligned = {}, []
    for place, name in enumerate(kernel.arg_names):
        if name.endswith("_col"):
            constants[name] = 1  # Triton takes the number 1 for a constant
        types[name] = "constexpr" if name in constants else _type(name, variant)
        fits = variant.aligned and (name == "V" or name.endswith("_row"))
        if fits or (types[name].startswith("*") and (variant.aligned or name not in ("z", "y"))):
            aligned.append(place)
    source = ASTSource(
        kernel,
        types,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    target = GPUTarget("cuda", variant.capability, 32)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=target, options=options)
    found = _resources(compiled.asm["cubin"])
    return Usage(
        found["REG"],
        found["STACK"] + found["LOCAL"],
        compiled.metadata.shared,
        _widest_load(compiled.asm["ptx"]),
        warps,
    )


def _type(name: str, variant: Variant) -> str:
    logits = {"z", "y"} | ({"out"} if variant.kernel == "_gradient_kernel" else set())
    if name in logits:
        return f"*{variant.logits}"
    real = {"grad": f"*{variant.compute}", "ids": "*i32", "tokens": "*i64"}
    pointers = dict.fromkeys(("out", "norm", "norm_z", "norm_y"), "*fp64") | real
    return pointers.get(name, "i32")


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    counts = re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout + done.stderr)
    return {name: int(count) for name, count in counts}


def _widest_load(ptx: str) -> int:
    loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    return max(int(count or 1) * int(bits) // 8 for count, bits in loads)


def main() -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    columns = ("kernel", "logits", "compute", "rows", "registers", "warps", "spilled", "shared")
    for capability in [int(x) for x in sys.argv[1:]] or [90]:
        title = f"triton {triton.__version__}, sm_{capability}, V = {VOCAB:,}"
        table = Table(*columns, "load", title=title)
        for x in variants(capability):
            usage = compile_variant(x)
            name = " ".join(filter(None, (x.kernel.strip("_"), x.divergence)))
            rows = "aligned" if x.aligned else "any"
            numbers = (usage.registers, usage.resident, usage.spilled, usage.shared, usage.load)
            table.add_row(name, x.logits, x.compute, rows, *map(str, numbers))
        Console(width=100).print(table)


if __name__ == "__main__":
    main()
