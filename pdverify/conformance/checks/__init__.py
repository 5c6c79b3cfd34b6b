"""The checks on a target: small functions with stable dotted ids, each one entry in `CHECKS`.

A check yields questions; asking, judging, shrinking and naming the cause are the same for all.
Ids are ``group.name``; `pdverify explain ID` prints what an entry says of itself.
"""

from pdverify.conformance.checks import calls, cells, decisions, losses, shapes, values
from pdverify.conformance.checks.entry import CHECKS, Check, in_order

__all__ = [
    "CHECKS",
    "Check",
    "calls",
    "cells",
    "decisions",
    "in_order",
    "losses",
    "shapes",
    "values",
]
