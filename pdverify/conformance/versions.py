"""What a report was made with."""

from __future__ import annotations

import platform
from importlib import metadata


def versions() -> dict[str, str]:
    """Versions of the interpreter and of the packages that judging rests on."""
    names = ("pdverify", "torch", "numpy", "scipy", "python-flint", "ml_dtypes")
    found = {name: metadata.version(name) for name in names}
    return {"python": platform.python_version(), "machine": platform.machine(), **found}
