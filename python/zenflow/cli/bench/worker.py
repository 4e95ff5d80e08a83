"""One fresh process of a benchmark: sets up one contest, or the bare passes, and times its rounds.

Memory is placed anew in each process, and some places are slower than others for as long as it lives; so a work is
timed in several. ``zenflow bench`` starts this as ``python -m zenflow.cli bench --worker JOB`` and reads JSON lines
from its stdout: ``{"done": n}`` after each round, and the outcome last. Whatever else is printed, such as by the
compilation of a peer, goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zenflow.cli.bench.contest import Times

__all__ = ["PASSES", "Job", "Outcome", "work_off"]

#: The work that is the bare passes.
PASSES = "passes"


@dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        work: of ``WORKS``, or :data:`PASSES`.
        numel: elements.
        cores: the CPUs to run on, one a thread.
        peers: contenders besides ours.
        rounds: that count.
        passes: for :data:`PASSES`: names of streams, each with the numbers of threads to make its pass on.

    """

    work: str
    numel: int
    cores: list[int]
    peers: list[str]
    rounds: int
    passes: dict[str, list[int]]

    def to_json(self) -> str:
        """Return the job as an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that :meth:`to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Outcome:
    """What one process found.

    Attributes:
        numel: elements worked on; of many small tensors, a whole number of them.
        times: wall and CPU seconds of each contender, a pair a round.
        notes: what the contenders' calls are.
        failed: peers that didn't take part, and why.
        huge_share: share of the memory in huge pages, where the system says.
        isa: of our kernels.

    """

    numel: int
    times: dict[str, tuple[list[float], list[float]]]
    notes: dict[str, str]
    failed: dict[str, str]
    huge_share: float | None
    isa: str


def work_off(job: Job) -> int:
    """Do ``job``, and tell the process at the other end of stdout."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as results:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _tell(results, {"outcome": asdict(_run(job, results))})
    return 0


def _tell(results: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=results, flush=True)


def _run(job: Job, results: TextIO) -> Outcome:
    import torch

    from zenflow import _core
    from zenflow.cli.bench.contest import time_rounds
    from zenflow.cli.bench.memory import huge_share
    from zenflow.cli.bench.setting import Setting
    from zenflow.cli.bench.works import WORKS

    rounds_done = 0

    def done() -> None:
        nonlocal rounds_done
        rounds_done += 1
        _tell(results, {"done": rounds_done})

    torch.set_num_threads(len(job.cores))
    pool = _core.Pool(job.cores)
    if job.work == PASSES:
        calls = _passes(job)
        times = time_rounds(calls, job.rounds, done)
        return Outcome(job.numel, _seconds(times), {}, {}, huge_share(), pool.isa)
    contest = WORKS[job.work].build(Setting(job.numel, pool, job.cores, job.peers))
    try:
        times = time_rounds(contest.calls, job.rounds, done)
        return Outcome(contest.numel, _seconds(times), contest.notes, contest.failed, huge_share(), pool.isa)
    finally:
        contest.close()


def _passes(job: Job) -> dict[str, Any]:
    """Return the passes, by name and number of threads."""
    from zenflow import _core
    from zenflow.cli.bench.memory import Memory
    from zenflow.cli.bench.streams import Passes
    from zenflow.cli.bench.works import streams_of

    memory = Passes(Memory(), job.numel)
    counts = sorted({threads for counts in job.passes.values() for threads in counts})
    pools = {threads: _core.Pool(job.cores[:threads]) for threads in counts}
    return {
        f"{name} {threads}": memory.call(pools[threads], streams_of(name))
        for name, counts in job.passes.items()
        for threads in counts
    }


def _seconds(times: Mapping[str, Times]) -> dict[str, tuple[list[float], list[float]]]:
    return {name: (timed.wall, timed.cpu) for name, timed in times.items()}
