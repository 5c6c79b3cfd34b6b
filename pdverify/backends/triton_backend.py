"""Trust-region masks in Triton kernels, on NVIDIA GPUs: ``triton``.

The functions are those of `pdverify.backends.masks.TorchBackend`; the kernels, and triton itself,
are imported when the first of them is looked up.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch


def unavailable() -> str | None:
    """Why the kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the kernels need triton: pip install triton"
    if not devices():
        return "the kernels need a GPU (TRITON_INTERPRET=1 runs them on the CPU, slowly)"
    return None


def devices() -> tuple[str, ...]:
    """Where the kernels run here: a GPU, or the CPU in triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ("cpu",)
    return ("cuda",) if torch.cuda.is_available() else ()


def __getattr__(name: str) -> Any:
    from pdverify.backends import triton_kernels

    return getattr(triton_kernels, name)
