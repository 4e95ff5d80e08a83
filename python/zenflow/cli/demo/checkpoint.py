"""Checkpoints of a demo in one directory, a file a run, so that an interrupted demo goes on where it was.

A file is replaced as a whole: a reader finds the old one or the new one, never half of either.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from zenflow.cli.common import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from zenflow.cli.demo.settings import Settings

__all__ = ["Store"]


class Store:
    """Saves and loads runs of one demo in ``folder``, which is made if need be.

    Args:
        folder: where the files are, ``NAME.pt`` each.
        settings: of this demo. A checkpoint of other settings would end in other numbers, and is refused.
        every: steps between two checkpoints of a run.

    Raises:
        UsageError: ``folder`` can't be made.

    """

    def __init__(self, folder: Path, settings: Settings, every: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"argument --resume: {str(folder)!r}: {error.strerror}; accepted: a directory, new or old"
            ) from None
        self.every = every
        self._folder = folder
        self._settings = asdict(settings)

    def save(self, name: str, state: dict[str, Any]) -> None:
        """Replace the checkpoint of the run ``name`` by ``state``: plain values and tensors."""
        partial = self._folder / f"{name}.partial"
        with partial.open("wb") as file:
            torch.save({"settings": self._settings, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._folder / f"{name}.pt")

    def load(self, name: str) -> dict[str, Any] | None:
        """Return what was last saved for the run ``name``, or None.

        Raises:
            UsageError: the file isn't a checkpoint, or not one of these settings.

        """
        path = self._folder / f"{name}.pt"
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            settings, state = saved["settings"], saved["state"]
        except FileNotFoundError:
            return None
        except (OSError, EOFError, RuntimeError, LookupError, TypeError, pickle.UnpicklingError) as error:
            raise UsageError(
                f"argument --resume: {str(path)!r} can't be read ({type(error).__name__}); "
                "accepted: a directory whose checkpoints this demo made"
            ) from None
        for key, wanted in self._settings.items():
            if settings.get(key) != wanted:
                raise UsageError(
                    f"argument --resume: {str(path)!r} was made with {key}={settings.get(key)!r}, "
                    f"this demo has {key}={wanted!r}; accepted: the same settings, or another directory"
                )
        result: dict[str, Any] = state
        return result
