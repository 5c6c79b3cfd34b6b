"""The divergences by name; each formula is generated in `_formulas` from its derivation."""

from __future__ import annotations

from pdverify.definitions import _formulas
from pdverify.definitions._formulas import Formula
from pdverify.registry import Registry

DIVERGENCES: Registry[Formula] = Registry("divergence")
for _name, _formula in _formulas.DIVERGENCES.items():
    DIVERGENCES.add(_name, _formula)
