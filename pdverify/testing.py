"""A target's checks as pytest tests: one decorated function becomes one test per check."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pdverify.conformance.records import CheckRecord
    from pdverify.conformance.target_run import TargetSession

Test = TypeVar("Test", bound=Callable[..., Any])


class BoundCheck:
    """One check on one target.

    Attributes:
        id: of the check; `pdverify explain ID` says what it means.
    """

    def __init__(self, session: TargetSession, id: str, *, expected_to_fail: bool = False) -> None:
        self.id = id
        self._session = session
        self._expected_to_fail = expected_to_fail

    def __call__(self) -> None:
        """Run the check.

        Raises:
            AssertionError: it failed; the text says what was expected, what came and on which
                input.
            pytest.skip.Exception: it does not apply, or its failure is an accepted convention.
        """
        __tracebackhide__ = True
        require(self.run(), expected_to_fail=self._expected_to_fail)

    def run(self) -> CheckRecord:
        """Run the check and return its record, whatever the outcome."""
        return self._session.run(self.id)

    def __repr__(self) -> str:
        return f"<check {self.id}>"


def require(record: CheckRecord, *, expected_to_fail: bool = False) -> None:
    """Pass, skip or fail the running test by `record`.

    A check that is expected to fail has to be judged: where it is skipped, the expectation is
    out of date, and the test fails.
    """
    __tracebackhide__ = True
    import pytest

    from pdverify.report.target_console import failure_text, skip_reason

    if record.status == "failed":
        raise AssertionError(failure_text(record))
    reason = skip_reason(record)
    if reason is None:
        return
    if expected_to_fail:
        pytest.fail(f"expected to fail, but {reason}: it no longer belongs to expected_failures")
    pytest.skip(reason)


def parametrize_checks(
    target: str | Callable[..., Any],
    mask: str,
    *,
    expected_failures: Mapping[str, str] | None = None,
    **options: Any,
) -> Callable[[Test], Test]:
    """Make a test with one argument, `check`, into one test per check of `target`.

    ::

        @parametrize_checks(keep, "predictive-kl", tail="exact")
        def test_keep(check):
            check()

    Args:
        target: a function, or its name (``module:function``, ``path/to/file.py:function``).
        mask: what it is, as `pdverify list` names it.
        expected_failures: check id -> reason.  These have to fail: strict xfail.
        options: those of `pdverify check`, with underscores.

    Raises:
        ValueError: an expected failure that is no check of this target, or has no reason.
        TargetError, InputError, UnknownName: the target cannot be judged.
    """
    import pytest

    from pdverify import _options
    from pdverify.conformance.target_run import TargetSession

    session = TargetSession(target, _options(mask, options))
    expected = dict(expected_failures or {})
    for id, reason in expected.items():
        if id not in session.ids:
            close = difflib.get_close_matches(id, session.ids, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(close)}?" if close else f"known: {session.ids}"
            raise ValueError(f"expected_failures: {id!r} is no check of this target; {hint}")
        if not reason.strip():
            raise ValueError(f"expected_failures: {id!r} needs a reason")
    cases = []
    for id in session.ids:
        marks = []
        if id in expected:
            # a Failed exception, unlike an AssertionError, is no expected failure
            marks = [pytest.mark.xfail(reason=expected[id], strict=True, raises=AssertionError)]
        check = BoundCheck(session, id, expected_to_fail=id in expected)
        cases.append(pytest.param(check, id=id, marks=marks))
    return pytest.mark.parametrize("check", cases)
