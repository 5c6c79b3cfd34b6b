"""Importing one module of a framework, with placeholders for what it never calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pdverify.adapters.entries import Framework
from pdverify.adapters.loading import load

FRAMEWORK = Framework(
    name="madeup",
    package="made-up",
    version="1.0",
    imports="madeup_framework",
    requirements=("left==1.0",),
    placeholders=("madeup_engine",),
    bare=("madeup_framework.deep",),
)
MODULE = "madeup_framework.deep.losses"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    deep = tmp_path / "madeup_framework" / "deep"
    deep.mkdir(parents=True)
    (deep.parent / "__init__.py").write_text("")
    (deep / "__init__.py").write_text("raise RuntimeError('the heavy half was imported')")
    (deep / "helper.py").write_text("SEVEN = 7")
    (deep / "losses.py").write_text(
        "import madeup_engine\n"
        "from madeup_engine.config import Config\n"
        "from .helper import SEVEN\n"
        "READY = madeup_engine.is_initialized()\n"
        "@madeup_engine.remote\n"
        "def plain(config: Config | None = None): return SEVEN\n"
        "@madeup_engine.remote(cpus=1)\n"
        "class Actor(madeup_engine.Base): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield deep
    for name in [n for n in sys.modules if n.startswith("madeup_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_a_module_comes_without_its_package_and_engine() -> None:
    module = load(FRAMEWORK, MODULE)
    assert module.plain() == 7
    assert not module.READY
    assert isinstance(module.Actor, type)
    assert load(FRAMEWORK, MODULE) is module


@pytest.mark.usefixtures("package")
def test_nothing_else_sees_the_placeholders() -> None:
    finders = list(sys.meta_path)
    load(FRAMEWORK, MODULE)
    assert sys.meta_path == finders
    assert not [name for name in sys.modules if name.startswith("madeup_engine")]
    assert "madeup_framework.deep" not in sys.modules
    with pytest.raises(ImportError):
        import madeup_engine  # noqa: F401


@pytest.mark.usefixtures("package")
def test_a_package_that_is_not_bare_runs() -> None:
    with pytest.raises(RuntimeError, match="heavy half"):
        load(replace(FRAMEWORK, bare=()), MODULE)


@pytest.mark.usefixtures("package")
def test_a_missing_requirement_is_named() -> None:
    with pytest.raises(ImportError, match=r"No module named 'madeup_engine'.*left==1\.0"):
        load(replace(FRAMEWORK, placeholders=()), MODULE)
    assert "madeup_framework.deep" not in sys.modules


def test_a_missing_framework_says_what_to_install() -> None:
    with pytest.raises(ImportError, match="madeup_framework is not installed: pip install made-up"):
        load(FRAMEWORK, MODULE)
