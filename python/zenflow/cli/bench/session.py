"""A whole benchmark: every work in fresh processes, one after the other, and their rounds put together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from zenflow.cli.bench.quiet import busy_seconds
from zenflow.cli.bench.worker import PASSES, Job, Outcome

__all__ = ["Plan", "Result", "WorkerError", "plan_jobs", "run_all"]


class WorkerError(Exception):
    """A process of the benchmark failed. The message says which, how, and what it said last."""


@dataclass(frozen=True)
class Plan:
    """What is to be timed.

    Attributes:
        works: names of works.
        numels: elements, each a benchmark of its own.
        threads: numbers of threads, likewise.
        cpus: the logical CPUs, of which ``n`` threads take the first ``n``.
        cores: how many of these are physical cores.
        peers: contenders besides ours.
        rounds: of each process.
        processes: of each work.

    """

    works: list[str]
    numels: list[int]
    threads: list[int]
    cpus: list[int]
    cores: int
    peers: list[str]
    rounds: int
    processes: int


@dataclass
class Result:
    """All processes of one job.

    Attributes:
        job: the job.
        outcomes: one a process.
        others: CPU seconds a second that other processes used meanwhile, the most of all.

    """

    job: Job
    outcomes: list[Outcome] = field(default_factory=list)
    others: float = 0.0

    def times(self) -> dict[str, tuple[list[float], list[float]]]:
        """Return wall and CPU seconds over all rounds of all processes, of contenders that took part in each."""
        names = [
            name for name in self.outcomes[0].times if all(name in outcome.times for outcome in self.outcomes)
        ]
        return {
            name: (
                [seconds for outcome in self.outcomes for seconds in outcome.times[name][0]],
                [seconds for outcome in self.outcomes for seconds in outcome.times[name][1]],
            )
            for name in names
        }


def plan_jobs(plan: Plan) -> list[Job]:
    """Return the jobs, each to be done ``plan.processes`` times: the bare passes of each size, then its works."""
    every = sorted({1, plan.cores, *plan.threads})
    jobs = []
    for numel in plan.numels:
        passes = dict.fromkeys(("read", "copy"), every)
        for work in plan.works:
            # In the others, the work's own contest times the pass.
            elsewhere = [threads for threads in every if threads not in plan.threads]
            if elsewhere:
                passes[work] = elsewhere
        jobs.append(Job(PASSES, numel, plan.cpus[: max(every)], [], plan.rounds, passes))
        jobs.extend(
            Job(work, numel, plan.cpus[:threads], plan.peers, plan.rounds, {})
            for work in plan.works
            for threads in plan.threads
        )
    return jobs


def run_all(plan: Plan, begin: Callable[[Job, int], None], advance: Callable[[], None]) -> list[Result]:
    """Do all jobs in turn, as often as there are processes.

    Args:
        plan: what is to be timed.
        begin: called before each process, with its job and its number from 0.
        advance: called after each round.

    Raises:
        WorkerError: a process failed.

    """
    results = [Result(job) for job in plan_jobs(plan)]
    for process in range(plan.processes):
        for result in results:
            begin(result.job, process)
            started, busy, own = time.monotonic(), busy_seconds(), _own_seconds()
            result.outcomes.append(_run_worker(result.job, advance))
            others = busy_seconds() - busy - (_own_seconds() - own)
            result.others = max(result.others, others / (time.monotonic() - started))
    return results


def _own_seconds() -> float:
    """CPU seconds of this process and of those that it waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@contextmanager
def _affinity(cpus: list[int]) -> Iterator[None]:
    """Let processes that are started within run on ``cpus`` only."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _run_worker(job: Job, advance: Callable[[], None]) -> Outcome:
    command = [sys.executable, "-m", "zenflow.cli", "bench", "--worker", job.to_json()]
    # OpenMP that isn't torch's own, such as that of DeepSpeed's kernel, knows nothing of torch.set_num_threads.
    environment = os.environ | {"OMP_NUM_THREADS": str(len(job.cores))}
    outcome = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # So torch's threads, too, have these CPUs and no others.
        with _affinity(job.cores):
            worker = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        try:
            assert worker.stdout is not None
            for line in worker.stdout:
                message = json.loads(line)
                if "outcome" in message:
                    outcome = Outcome(**message["outcome"])
                else:
                    advance()
            code = worker.wait()
        finally:
            worker.kill()
            worker.wait()
            if worker.stdout is not None:
                worker.stdout.close()
        if code or outcome is None:
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()]
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise WorkerError(
                f"the process of {job.work} with {job.numel} elements {how}: {said[-1] if said else 'it said nothing'}"
            )
    return outcome
