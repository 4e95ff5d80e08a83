"""What makes the numbers doubtful, in words."""

from __future__ import annotations

from zenflow.cli.bench.arguments import format_size
from zenflow.cli.bench.machine import last_level_cache, sharing_cpus, transparent_huge_pages
from zenflow.cli.bench.session import Plan, Result
from zenflow.cli.bench.worker import PASSES
from zenflow.cli.bench.works import WORKS

__all__ = ["doubts_after", "doubts_before"]

#: Arrays of fewer times the last-level cache are still there in part when the next round comes.
_CACHES = 4
#: CPUs that others may use.
_NOISE = 0.15
#: Elements from which on the arrays are nearly all of a process's memory.
_LARGE = 32 << 20


def doubts_before(plan: Plan) -> list[str]:
    """Return what is doubtful before anything is timed."""
    doubts = []
    pages = transparent_huge_pages()
    if pages == "never":
        doubts.append(
            "transparent huge pages are off, so memory lies in pages of 4 KiB and every pass is slower: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    for threads in plan.threads:
        shared = sharing_cpus(plan.cpus[:threads])
        if shared:
            pairs = ", ".join("+".join(map(str, cpus)) for cpus in shared)
            doubts.append(
                f"{threads} threads share physical cores (CPUs {pairs}), of which there are {plan.cores}"
            )
    cache = last_level_cache()
    for numel in plan.numels:
        small = [
            work for work in plan.works if cache and numel * WORKS[work].streams.footprint < _CACHES * cache
        ]
        if small and cache:
            doubts.append(
                f"{format_size(numel)} elements are few: the arrays of {', '.join(small)} are less than {_CACHES} "
                f"times the last-level cache of {cache / 2**20:.0f} MiB, so rounds find part of them there"
            )
    return doubts


def doubts_after(results: list[Result]) -> list[str]:
    """Return what showed while things were timed."""
    doubts = []
    outcomes = [outcome for result in results for outcome in result.outcomes]
    if any(outcome.isa == "portable" for outcome in outcomes):
        doubts.append("no vector instructions were found: our kernels ran in their portable form")
    # Of little memory, what Python itself takes is most.
    shares = [
        outcome.huge_share
        for outcome in outcomes
        if outcome.huge_share is not None and outcome.numel >= _LARGE
    ]
    if transparent_huge_pages() != "never" and min(shares, default=1.0) < 0.5:
        doubts.append(
            f"in one process only {min(shares):.0%} of the memory lay in huge pages, the rest in pages of 4 KiB"
        )
    loaded = [result for result in results if result.others > _NOISE]
    if loaded:
        worst = max(loaded, key=lambda result: result.others)
        name = "the bare passes" if worst.job.work == PASSES else worst.job.work
        doubts.append(
            f"other processes were using up to {worst.others:.1f} CPUs (during {name}): look at ratios only"
        )
    return doubts
