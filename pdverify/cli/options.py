"""The options of `pdverify check`: which there are, and where each value comes from.

A flag wins over the environment, which wins over pyproject.toml (`pdverify.config`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdverify.cli.common import Parser, UsageError, natural, positive

if TYPE_CHECKING:
    from pdverify.config import Kind
    from pdverify.conformance.options import Options

_GLOBS: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "GLOB"}
_NUMBER: dict[str, Any] = {"type": float, "metavar": "X"}

SHARED: dict[str, dict[str, Any]] = {
    "level": {"choices": ("quick", "full"), "help": "default: quick"},
    "seed": {"type": natural, "metavar": "N", "help": "default: 0"},
    "json": {"metavar": "FILE", "help": "also write the report to FILE"},
    "precision": {"metavar": "FORMAT", "help": "of the arithmetic; default: fp32"},
    "select": _GLOBS
    | {"help": "judge only checks, or entries backend/mask/view[/tail], that match"},
    "deselect": _GLOBS | {"help": "leave out checks or entries that match"},
    "mask": {"metavar": "NAME", "help": "what TARGET is; without TARGET, only this mask"},
    "view": {"choices": ("full", "topk"), "help": "with TARGET default: topk"},
    "tail": {"metavar": "NAME", "help": "tail estimator"},
    "delta": _NUMBER | {"help": "threshold of D; default: varied"},
}
"""Options of `check` with and without TARGET."""

BUILTIN: dict[str, dict[str, Any]] = {
    "input": {
        "metavar": "auto|model|recording|FILE.safetensors",
        "help": "real tokens: sampled from the model, the recording that ships with the package, "
        "or a recording of yours; auto takes the model if it is installed",
    },
    "tokens": {"type": positive, "metavar": "N", "help": "real tokens to sample from the model"},
}
"""Options of `check` without TARGET."""

TARGET: dict[str, dict[str, Any]] = {
    "support": {"metavar": "append|replace", "help": "how a missing sampled token gets retained"},
    "top-k": {"type": positive, "metavar": "K", "help": "default: varied"},
    "delta-low": _NUMBER | {"help": "threshold for A < 0"},
    "delta-high": _NUMBER | {"help": "threshold for A > 0"},
    "clip-low": _NUMBER | {"help": "of ppo-clip"},
    "clip-high": _NUMBER | {"help": "of ppo-clip"},
    "ratio-cap": _NUMBER | {"help": "upper bound of the importance ratio in the loss"},
    "eta": _NUMBER | {"help": "step size of the second-order mask"},
    "aggregation": {"metavar": "NAME", "help": "how a scalar loss is reduced: token-mean, ..."},
    "accept": {
        "nargs": "+",
        "action": "extend",
        "metavar": "ID",
        "help": "conventions that TARGET follows on purpose",
    },
    "no-neg-inf": {"action": "store_true", "help": "leave out inputs that hold -inf"},
    "time-limit": {"type": float, "metavar": "S", "help": "seconds for one call; default: 8"},
    "emit-test": {"metavar": "FILE.py", "help": "write a pytest file with each counterexample"},
    "junit": {"metavar": "FILE.xml", "help": "write a JUnit report"},
}
"""Options of `check TARGET`."""

OUTPUTS = ("json", "junit", "emit_test")
"""Files that `check TARGET` writes, by argument."""


@dataclass(frozen=True)
class Given:
    """What was asked for: `values` by argument (only what was given), `origins` of each."""

    values: dict[str, Any]
    origins: dict[str, str]

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Say in an error about a value which ones were not on the command line.

        Raises:
            UsageError: in place of an error about a value, where some come from elsewhere.
        """
        from pdverify.batch import InputError
        from pdverify.registry import UnknownName

        try:
            yield
        except (UsageError, InputError, UnknownName) as error:
            set_elsewhere = [x for name, x in self.origins.items() if x != f"--{_dashes(name)}"]
            if not set_elsewhere:
                raise
            raise UsageError(f"{error} (also set: {'; '.join(set_elsewhere)})") from error

    def refuse(self, options: dict[str, Any], why: str) -> None:
        """Raise `UsageError` if one of `options` was given."""
        for flag in options:
            name = flag.replace("-", "_")
            if name in self.values:
                raise UsageError(f"{self.origins[name]} {why}")


def options_parser() -> Parser:
    """TARGET and every option; what is not given is absent from the result."""
    parser = Parser(
        prog="pdverify check",
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="your function, module:function or path/to/file.py:function; "
        "without one, every built-in backend",
    )
    groups = (
        (parser, SHARED),
        (parser.add_argument_group("options without TARGET"), BUILTIN),
        (parser.add_argument_group("options with TARGET"), TARGET),
    )
    for group, options in groups:
        for flag, settings in options.items():
            group.add_argument(f"--{flag}", **settings)
    return parser


def complete(arguments: dict[str, Any]) -> Given:
    """`arguments` of the command line, and under them those of environment and pyproject.toml.

    Raises:
        ConfigError, UsageError: a setting that means nothing, by its origin.
    """
    from pdverify.config import read_config

    parser = options_parser()
    values = dict(arguments)
    origins = {name: f"--{_dashes(name)}" for name in arguments}
    for flag, setting in read_config(Path.cwd(), os.environ, _kinds()).items():
        name = flag.replace("-", "_")
        if name in values:
            continue
        words = [f"--{flag}={value}" for value in setting.values] or [f"--{flag}"]
        try:
            parsed = parser.parse_args([*setting.values] if flag == "target" else words)
        except UsageError as error:
            raise UsageError(f"{setting.origin}: {error}") from error
        values[name] = getattr(parsed, name)
        origins[name] = setting.origin
    return Given(values, origins)


def target_options(given: Given) -> Options:
    """The options of `check TARGET` that say how to judge; the defaults are those of `Options`.

    Raises:
        UsageError, InputError, UnknownName: naming the option.
    """
    from pdverify.conformance.options import Options

    given.refuse(BUILTIN, "is for the built-in backends; leave it out with a TARGET")
    chosen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.values.items()
        if name not in ("target", *OUTPUTS)
    }
    if chosen.pop("no_neg_inf", False):
        chosen["neg_inf"] = False
    with given.blaming():
        if "mask" not in chosen:
            raise UsageError("TARGET needs --mask: the mask that it is; `pdverify list` shows them")
        return Options(**chosen)


def plugin_options(target: str, words: Sequence[str]) -> Options:
    """The options of ``pytest --pdverify TARGET --pdverify-args "WORDS"``.

    Raises:
        ConfigError, UsageError, InputError, UnknownName: naming the option.
    """
    arguments = vars(options_parser().parse_args(words))
    if "target" in arguments:
        raise UsageError(f"--pdverify-args: {arguments['target']!r} is no option")
    for name in OUTPUTS:
        if name in arguments:
            raise UsageError(f"--pdverify-args: --{_dashes(name)} belongs to `pdverify check`")
    return target_options(complete({"target": target} | arguments))


def _kinds() -> dict[str, Kind]:
    kinds: dict[str, Kind] = {"target": "value"}
    for flag, settings in (SHARED | BUILTIN | TARGET).items():
        action = settings.get("action")
        kinds[flag] = {"extend": "values", "store_true": "switch"}.get(action, "value")  # type: ignore[assignment, arg-type]
    return kinds


def _dashes(name: str) -> str:
    return name.replace("_", "-")
