"""Name -> entry tables.

Masks, tails, divergences, backends, number formats, input families and checks are each ONE
entry in ONE `Registry`.  Commands, tests and pages iterate over the registries, so a new entry
is picked up everywhere without further edits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

Entry = TypeVar("Entry")

SHORT = 20
"""Entries that an error message still lists."""


class UnknownName(LookupError):
    """A name that is in no registry; the message lists the close ones."""


class Registry(Generic[Entry]):
    """An insertion-ordered table of named entries.

    Adding a name twice raises ``ValueError``; looking up an unknown one raises `UnknownName`
    with the close names.  Names are lower-case words joined by hyphens.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> Entry:
        """Register `entry` under `name` and return it."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            close = difflib.get_close_matches(name, self._entries, n=3, cutoff=0.4)
            hint = "`pdverify list` shows them"
            if close:
                hint = f"did you mean {', '.join(close)}"
            elif len(self) <= SHORT:
                hint = f"known: {', '.join(self._entries)}"
            raise UnknownName(f"unknown {self.kind} {name!r}; {hint}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterator[tuple[str, Entry]]:
        """Pairs of (name, entry) in the order of registration."""
        return iter(self._entries.items())
