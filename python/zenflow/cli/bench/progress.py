"""Progress of a benchmark on stderr: a bar on a terminal, a line a process elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zenflow.cli.bench.arguments import format_size
from zenflow.cli.bench.contest import WARMUP

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from zenflow.cli.bench.worker import Job

__all__ = ["Bar"]


class Bar:
    """One bar over all rounds of all processes.

    Args:
        jobs: how many there are.
        processes: of each.
        rounds: of each process, without the warm-up.

    """

    def __init__(self, jobs: int, processes: int, rounds: int) -> None:
        self._processes = processes
        self._rounds = WARMUP + rounds
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
            speed_estimate_period=120,
        )
        self._task = self._progress.add_task("rounds", total=jobs * processes * self._rounds)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, job: Job, process: int) -> None:
        """Say what comes next."""
        threads = len(job.cores)
        text = f"{job.work}, {format_size(job.numel)}, {threads} thread{'s' * (threads > 1)}"
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(
                f"process {process + 1} of {self._processes}: {text}", highlight=False, soft_wrap=True
            )

    def advance(self) -> None:
        """Move on by one round."""
        self._progress.advance(self._task)
