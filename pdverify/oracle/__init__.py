"""The judge: ball arithmetic, and decisions with certificates."""

from pdverify.oracle.divergences import ORACLE_DIVERGENCES, OracleDivergence
from pdverify.oracle.judge import STATUSES, Decisions, Enclosure, Judge

__all__ = ["ORACLE_DIVERGENCES", "STATUSES", "Decisions", "Enclosure", "Judge", "OracleDivergence"]
