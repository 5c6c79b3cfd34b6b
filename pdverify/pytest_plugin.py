"""``pytest --pdverify module:function --pdverify-args "--mask ..."``: one test per check.

Installed with the package, and loaded by every run of pytest: nothing is imported before the
option is used.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import os

    from pdverify.conformance.target_run import TargetSession


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--pdverify`` and ``--pdverify-args``."""
    group = parser.getgroup("pdverify", "trust-region masks")
    group.addoption(
        "--pdverify",
        action="append",
        default=[],
        metavar="TARGET",
        help="judge this function (module:function or path/to/file.py:function), one test per "
        "check; without paths, nothing else is collected; may be given more than once",
    )
    group.addoption(
        "--pdverify-args",
        default="",
        metavar="OPTIONS",
        help='options of `pdverify check` in one word: "--mask predictive-kl --tail exact"',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave out the folder's own tests where the targets alone were asked for."""
    explicit = config.args_source is pytest.Config.ArgsSource.ARGS
    if config.getoption("pdverify") and not explicit:
        config.args = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add one item per check of each target, before other plugins select among the items."""
    for target in session.config.getoption("pdverify"):
        name = f"pdverify::{target}"
        collector = TargetCollector.from_parent(session, name=name, nodeid=name)
        report = collector.ihook.pytest_make_collect_report(collector=collector)
        collector.ihook.pytest_collectreport(report=report)
        items.extend(report.result or ())


class TargetCollector(pytest.Collector):
    """The checks of one target; its name is ``pdverify::TARGET``."""

    def collect(self) -> Iterator[pytest.Item]:
        """One item per check.

        Raises:
            CollectError: the target cannot be judged; the message says why.
        """
        from pdverify.cli.options import plugin_options
        from pdverify.conformance.target_run import TargetSession

        target = self.name.removeprefix("pdverify::")
        try:
            words = shlex.split(self.config.getoption("pdverify_args"))
            session = TargetSession(target, plugin_options(target, words))
        except (ValueError, LookupError, OSError) as error:
            raise self.CollectError(f"--pdverify {target}: {error}") from error
        for id in session.ids:
            yield CheckItem.from_parent(self, name=id, checks=session)


class CheckItem(pytest.Item):
    """One check of one target."""

    def __init__(self, *, checks: TargetSession, **rest: Any) -> None:
        super().__init__(**rest)
        self._checks = checks

    def runtest(self) -> None:
        """Run the check."""
        from pdverify.testing import require

        require(self._checks.run(self.name))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The readable text of a failed check alone; the traceback of anything else."""
        if excinfo.errisinstance(AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """Where the check is reported."""
        return "pdverify", None, self.nodeid
