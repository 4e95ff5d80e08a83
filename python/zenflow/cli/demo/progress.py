"""Progress of the runs on stderr: bars on a terminal, a line a run elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from zenflow.cli.demo.settings import Recipe

__all__ = ["Bars"]


class Bars:
    """A bar for the whole demo and one for each run, with its loss and the time it still takes.

    Args:
        steps: of all runs together.

    """

    def __init__(self, steps: int) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            speed_estimate_period=60,
        )
        self._whole = self._progress.add_task("whole demo", total=steps, note="")
        self._run = self._whole
        self._label = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, recipe: Recipe, steps: int, done: int) -> None:
        """Add the bar of a run, ``done`` of whose ``steps`` an earlier process made."""
        self._label = recipe.label
        self._run = self._progress.add_task(recipe.label, total=steps, completed=done, note="")
        self._progress.advance(self._whole, done)

    def advance(self, loss: float) -> None:
        """Move on by one step."""
        self._progress.update(self._run, advance=1, note=f"loss {loss:.3f}")
        self._progress.advance(self._whole)

    def end(self, validation_loss: float) -> None:
        """Show the result of the run."""
        note = f"validation loss {validation_loss:.4f}"
        self._progress.update(self._run, note=note)
        if not self._console.is_terminal:
            self._console.print(f"{self._label}: {note}", highlight=False, soft_wrap=True)
