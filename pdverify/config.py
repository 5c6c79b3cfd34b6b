"""Options of `pdverify check` from pyproject.toml and from the environment.

Precedence: flag, then environment (``PDVERIFY_MASK``), then the table ``[tool.pdverify]`` of the
nearest pyproject.toml.  Every key is a flag without its dashes; ``target`` is a key too.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

PREFIX = "PDVERIFY_"
NO_OPTIONS = ("PDVERIFY_TRACEBACK",)
"""Variables with the prefix that are no options of `check`."""

Kind: TypeAlias = Literal["value", "values", "switch"]
"""What a flag takes: one value, several, or none."""


class ConfigError(ValueError):
    """A setting that means nothing; the message names the file or variable, and the key."""


@dataclass(frozen=True)
class Setting:
    """`values` of one flag as text (none for a switch that is on) and where they come from."""

    values: tuple[str, ...]
    origin: str


def read_config(
    start: Path, environ: Mapping[str, str], flags: Mapping[str, Kind]
) -> dict[str, Setting]:
    """The settings of the environment and, below them, of the pyproject.toml nearest to `start`.

    Args:
        start: folder in which, and above which, pyproject.toml is looked for.
        environ: the environment variables.
        flags: every flag that may be set, by name with dashes, and what it takes.

    Raises:
        ConfigError: an unknown key, listing the close ones; a value that the flag cannot take;
            a pyproject.toml that is no TOML.
        OSError: the file cannot be read.
    """
    return _from_file(start, flags) | _from_environment(environ, flags)


def _from_file(start: Path, flags: Mapping[str, Kind]) -> dict[str, Setting]:
    folders = start.resolve(), *start.resolve().parents
    path = next((x for x in (f / "pyproject.toml" for f in folders) if x.is_file()), None)
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML ({error})") from error
    tools = document.get("tool", {})
    table = tools.get("pdverify", {}) if isinstance(tools, dict) else {}
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.pdverify is no table")
    found: dict[str, Setting] = {}
    for key, value in table.items():
        origin = f"{path}: [tool.pdverify] {key}"
        name = _flag(key.replace("_", "-"), origin, flags)
        if name in found:
            raise ConfigError(f"{origin}: given twice, with dashes and with underscores")
        values = _texts(value, flags[name], origin)
        if values is not None:
            found[name] = Setting(values, origin)
    return found


def _from_environment(environ: Mapping[str, str], flags: Mapping[str, Kind]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for key, text in environ.items():
        if not key.startswith(PREFIX) or key in NO_OPTIONS:
            continue
        name = _flag(key.removeprefix(PREFIX).lower().replace("_", "-"), key, flags)
        kind = flags[name]
        if kind == "switch":
            values = _switch(text, key)
        else:
            values = tuple(text.split()) if kind == "values" else (text,)
        if values is not None:
            found[name] = Setting(values, key)
    return found


def _flag(name: str, origin: str, flags: Mapping[str, Kind]) -> str:
    if name in flags:
        return name
    close = difflib.get_close_matches(name, flags, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}" if close else f"known: {', '.join(flags)}"
    raise ConfigError(f"{origin}: unknown option {name!r}; {hint}")


def _texts(value: Any, kind: Kind, origin: str) -> tuple[str, ...] | None:
    """A TOML value as the words of the command line; None where it leaves a switch off."""
    if kind == "switch":
        if not isinstance(value, bool):
            raise ConfigError(f"{origin} = {value!r}: expected true or false")
        return () if value else None
    items = value if kind == "values" and isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            expected = (
                "text, a number or a list of them" if kind == "values" else "text or a number"
            )
            raise ConfigError(f"{origin} = {value!r}: expected {expected}")
    return tuple(map(str, items))


def _switch(text: str, origin: str) -> tuple[str, ...] | None:
    if text.lower() in ("1", "true", "yes", "on"):
        return ()
    if text.lower() in ("", "0", "false", "no", "off"):
        return None
    raise ConfigError(f"{origin} = {text!r}: expected 1 or 0")
