"""Verification and simulation suite for trust-region masks in RL training of language models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdverify.conformance.options import Options
    from pdverify.conformance.records import TargetReport

__version__ = "0.1.0"


def check(target: str | Callable[..., Any], mask: str, **options: Any) -> TargetReport:
    """Judge `target`, as ``pdverify check TARGET --mask MASK`` does.

    Args:
        target: a function, or its name (``module:function``, ``path/to/file.py:function``).
        mask: what it is, as `pdverify list` names it.
        options: those of the command, with underscores (``tail="exact"``, ``neg_inf=False``);
            pyproject.toml and the environment are not read.

    Raises:
        TypeError: an option that does not exist.
        TargetError, InputError, UnknownName: the target cannot be judged.
    """
    from pdverify.conformance.target_run import check_target

    return check_target(target, _options(mask, options))


def _options(mask: str, given: dict[str, Any]) -> Options:
    from pdverify.conformance.options import Options

    for name in ("select", "deselect", "accept"):
        if name in given:
            value = given[name]
            given[name] = (value,) if isinstance(value, str) else tuple(value)
    return Options(mask=mask, **given)
