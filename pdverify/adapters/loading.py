"""Importing the one module of a framework that holds a mask, and no more than that."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pdverify.adapters.entries import Framework


class _Nothing:
    """What a placeholder's functions return: false, and a decorator that changes nothing."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, decorated: Any) -> Any:
        return decorated


class _Anything:
    """An attribute of a placeholder: a class (annotations, base classes) and a decorator."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options else _Nothing()


class _Placeholder(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Placeholders(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def load(framework: Framework, module: str) -> Any:
    """Module `module` of `framework`.

    Its placeholders and bare packages are in `sys.modules` only while this import runs, so that
    nothing else mistakes them for the real ones.

    Raises:
        ImportError: the framework, or something it needs, is not installed.
    """
    if module in sys.modules:
        return sys.modules[module]
    if importlib.util.find_spec(framework.imports) is None:
        raise ImportError(f"{framework.imports} is not installed: pip install {framework.pin}")
    try:
        with _reduced(framework):
            return importlib.import_module(module)
    except ImportError as error:
        beside = " ".join(framework.requirements) or "nothing"
        raise ImportError(
            f"{framework.imports} is installed but {module} does not import: {error};"
            f" {framework.pin} is used with {beside} beside it"
        ) from error


@contextmanager
def _reduced(framework: Framework) -> Iterator[None]:
    finder = _Placeholders(framework.placeholders)
    sys.meta_path.insert(0, finder)
    bare: dict[str, ModuleType] = {}
    try:
        for name in framework.bare:
            if name in sys.modules:
                continue
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ImportError(f"no package {name}")
            package = ModuleType(name)
            package.__spec__ = spec
            package.__path__ = list(spec.submodule_search_locations or ())
            bare[name] = sys.modules[name] = package
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, package in bare.items():
            if sys.modules.get(name) is package:
                del sys.modules[name]
        for name, module in list(sys.modules.items()):
            if isinstance(module, _Placeholder):
                del sys.modules[name]
