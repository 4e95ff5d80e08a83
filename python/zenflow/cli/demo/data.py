"""Text that every Python already has, or the user's own, as bytes in a training and a held-out part."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zenflow.cli.common import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Corpus", "draw", "files", "language_reference", "standard_library"]

_HELD_OUT = 0.1


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to validate on, both ``[n]``, uint8."""

    description: str
    training: Tensor
    held_out: Tensor

    @classmethod
    def split(cls, name: str, text: bytes) -> Corpus:
        """Hold the last tenth of ``text`` out, in one piece, so that no training sequence overlaps it."""
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        cut = len(text) - int(len(text) * _HELD_OUT)
        digest = hashlib.sha256(text).hexdigest()[:16]
        return cls(f"{name}, {len(text)} bytes, sha256 {digest}", data[:cut], data[cut:])


def draw(part: Tensor, generator: torch.Generator, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Draw ``batch`` random sequences from ``part``.

    Returns:
        inputs and targets, both ``[batch, context]``, int64; targets are one byte ahead.

    """
    starts = torch.randint(len(part) - context, (batch, 1), generator=generator)
    sequences = part[starts + torch.arange(context + 1)].long()
    return sequences[:, :-1], sequences[:, 1:]


def _smallest(context: int) -> int:
    """Bytes that a corpus needs, so that even its held-out part has some sequences to draw from."""
    return int(2 * (context + 1) / _HELD_OUT)


def standard_library(limit: int) -> Corpus:
    """Python's standard library: the first ``limit`` bytes of its top-level modules, in order of name.

    Raises:
        UsageError: this Python comes without them.

    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < min(limit, 100_000):
        raise UsageError(
            f"the source of Python's standard library, {folder}/*.py, has {len(text)} bytes; "
            f"accepted: a Python that was installed with it"
        )
    return Corpus.split("standard library", text[:limit])


def language_reference() -> Corpus:
    """Return the Python language reference, as ``help()`` has it.

    Raises:
        UsageError: this Python comes without it.

    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError("this Python has no pydoc_data.topics; name a text with --data FILE") from None
    return Corpus.split("language reference", "\n\n".join(topics[name] for name in sorted(topics)).encode())


def files(paths: Sequence[Path], context: int) -> Corpus:
    """Return the bytes of ``paths``, one after another.

    Raises:
        UsageError: one can't be read, or together they are too small for sequences of ``context`` bytes.

    """
    text = b"".join(_read(path) for path in paths)
    smallest = _smallest(context)
    if len(text) < smallest:
        names = ", ".join(repr(str(path)) for path in paths)
        raise UsageError(
            f"argument --data: {names}: {len(text)} bytes; accepted: at least {smallest} bytes together"
        )
    return Corpus.split(", ".join(path.name for path in paths), text)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"argument --data: {str(path)!r}: {error.strerror}; accepted: readable files"
        ) from None
