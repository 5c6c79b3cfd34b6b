"""What is known of each framework and each of its functions, as data."""

from __future__ import annotations

from dataclasses import dataclass

from pdverify.registry import Registry


@dataclass(frozen=True)
class Framework:
    """A released package, and how to get enough of it to call its functions on a CPU.

    Attributes:
        name: short name, that of its adapter module with hyphens.
        package, version: on the Python registry, pinned.
        imports: the package's import name.
        requirements: what is installed beside it, pinned; torch comes from pdverify's own pins.
        no_deps: whether the package is installed without the dependencies it declares, which
            would bring inference engines and compiled kernels that the functions never call.
        placeholders: modules that import time wants and the functions never call; empty ones
            stand in for them while the framework is imported.
        bare: packages of the framework whose ``__init__`` is not run, because it imports far more
            than the module that is wanted.
        notes: paragraphs for the page, written by someone who read each finding twice.
    """

    name: str
    package: str
    version: str
    imports: str
    requirements: tuple[str, ...] = ()
    no_deps: bool = False
    placeholders: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        """The requirement to install, as pip spells it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Adapter:
    """One function of a framework, and what it is judged as.

    Attributes:
        framework: where it lives.
        target: the adapter, as ``module:function``.
        function: the framework's function, dotted.
        file: its file inside the package.
        mask: name in `pdverify.definitions.masks.MASKS`.
        options: further arguments of `pdverify check`.
        settings: how the adapter sets the function's own options, in words.
        gradient_only: whether the loss is judged through its gradient alone (its value is that of
            a surrogate, ``-A r``, where the definition has the score-function form).
        read_as: (convention that a report may name, what the source says instead): answers alone
            do not tell them apart.  The latter is another convention, or None where it is none.
    """

    framework: Framework
    target: str
    function: str
    file: str
    mask: str
    options: tuple[str, ...] = ()
    settings: str = ""
    gradient_only: bool = False
    read_as: tuple[tuple[str, str | None], ...] = ()


ADAPTERS: Registry[Adapter] = Registry("adapter")
