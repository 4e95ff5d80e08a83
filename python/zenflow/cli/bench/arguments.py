"""Sizes and lists on the command line."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["format_size", "listed", "one_of", "size"]

T = TypeVar("T")

_SIZE = re.compile(r"([0-9]+)(Ki|Mi|Gi)?")
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

#: More elements than any machine has memory for.
_MOST = 1 << 48


def size(text: str) -> int:
    """Return the number of elements that ``text`` names: digits, and Ki, Mi or Gi after them for powers of 1024."""
    found = _SIZE.fullmatch(text)
    numel = int(found[1]) * _UNITS[found[2] or ""] if found else 0
    if not 1 <= numel <= _MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r}; accepted: a number of elements, such as 1000000, 512Ki, 128Mi or 1Gi"
        )
    return numel


def format_size(numel: int) -> str:
    """Return the shortest text of which :func:`size` makes ``numel``."""
    for unit in ("Gi", "Mi", "Ki"):
        if numel and numel % _UNITS[unit] == 0:
            return f"{numel // _UNITS[unit]}{unit}"
    return str(numel)


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return an argument type that takes one of ``names``."""

    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r}; accepted: {', '.join(names)}")
        return text

    return convert


def listed(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return an argument type that takes what ``convert`` takes, once or more with commas between; no value twice."""

    def convert_all(text: str) -> list[T]:
        return list(dict.fromkeys(convert(part.strip()) for part in text.split(",")))

    return convert_all
