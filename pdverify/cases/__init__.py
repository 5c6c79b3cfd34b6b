"""Inputs: synthetic families, edge cases with their right values, recordings of real models."""

from pdverify.cases.assemble import as_view, replace_last
from pdverify.cases.designed import designed_rows
from pdverify.cases.edge import BAD_INPUTS, EDGE_CASES, BadInput, Decision, EdgeCase, Right
from pdverify.cases.families import FAMILIES, Family, build

__all__ = [
    "BAD_INPUTS",
    "EDGE_CASES",
    "FAMILIES",
    "BadInput",
    "Decision",
    "EdgeCase",
    "Family",
    "Right",
    "as_view",
    "build",
    "designed_rows",
    "replace_last",
]
