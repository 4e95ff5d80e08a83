"""What every subcommand shares: the one error a user sees, the parser, argument types, optional packages."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    # The name exists only for type checkers: argparse keeps the class private.
    Subparsers = argparse._SubParsersAction["Parser"]

__all__ = ["Parser", "UsageError", "integer", "require_packages"]


class UsageError(Exception):
    """The input can't be used. The message is one line: the argument, its value, what is accepted."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are a :class:`UsageError`, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        """Raise ``message`` for ``main`` to print."""
        raise UsageError(message)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return an argument type that takes integers of ``low`` or more, and of ``high`` at most."""
    accepted = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r}; accepted: {accepted}")
        return value

    return convert


def require_packages(*names: str) -> None:
    """Check that the optional packages ``names`` are installed.

    Raises:
        UsageError: some are not. The message says how to install them.

    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UsageError(f'this command needs {" and ".join(missing)}: pip install "torch-zenflow[cli]"')
