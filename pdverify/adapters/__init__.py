"""Released RL frameworks as targets of `pdverify check`.

An adapter is a function of the target protocol that hands its inputs on to ONE function of a
released package and returns what that says; it adds no mathematics.  `ADAPTERS` lists them, each
with what to install and what it is judged as; `python -m pdverify.tools.frameworks` runs them all.

No framework is imported before an adapter is called, and a missing one is an `ImportError` that
says what to install.
"""

from pdverify.adapters import areal, liger, openrlhf, skyrl, trl, trl_dppo, verl
from pdverify.adapters.entries import ADAPTERS, Adapter, Framework

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Framework",
    "areal",
    "liger",
    "openrlhf",
    "skyrl",
    "trl",
    "trl_dppo",
    "verl",
]
