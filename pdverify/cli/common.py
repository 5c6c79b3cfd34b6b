"""What the commands share: exit statuses, the parser, numbers on the command line."""

from __future__ import annotations

import argparse
from typing import NoReturn

CONFORMS, FAILS, CANNOT_JUDGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(ValueError):
    """The command line asks for something that cannot be done; the message says how to mend it."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with `message`."""
        raise UsageError(f"{message}; see {self.prog} --help")


def natural(text: str) -> int:
    """An integer >= 0."""
    return _integer(text, 0)


def positive(text: str) -> int:
    """An integer >= 1."""
    return _integer(text, 1)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= {least}")
    return value
