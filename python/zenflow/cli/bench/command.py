"""The subcommand ``zenflow bench``: its arguments, and the order of its work."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zenflow.cli.bench.arguments import format_size, listed, one_of, size
from zenflow.cli.common import UsageError, integer, require_packages

if TYPE_CHECKING:
    from zenflow.cli.bench.session import Plan
    from zenflow.cli.common import Subparsers

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Time the kernels of the CPU optimizer against the optimizers of other packages and against the machine's
own memory. Every contender is checked against float64 before it is timed. A round times the roofline,
every peer and ours once, and ratios are taken within rounds. Every work runs in several fresh processes,
because where memory happens to lie decides more than most changes of code."""

_NUMEL = 128 << 20
_PROCESSES, _ROUNDS = 5, 7

#: Share of the memory available that the arrays may take.
_MEMORY_SHARE = 0.9


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of ``zenflow bench``."""
    parser = subparsers.add_parser(
        "bench",
        help="time the CPU optimizer's kernels against other optimizers and the memory roofline",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    # Names are checked in `run`: what there is stands in modules that import torch.
    parser.add_argument("--work", type=listed(str), metavar="NAME,...", help="works to time (all)")
    parser.add_argument(
        "--peers",
        type=listed(str),
        metavar="NAME,...",
        help="packages to compare with, of torch, deepspeed, bitsandbytes and torchao (all; none for no peers)",
    )
    parser.add_argument(
        "--numel",
        type=listed(size),
        default=[_NUMEL],
        metavar="N,...",
        help=f"elements to work on, with Ki, Mi or Gi for powers of 1024 ({format_size(_NUMEL)})",
    )
    parser.add_argument(
        "--threads",
        type=listed(integer(1)),
        metavar="N,...",
        help="threads to work with (one a physical core)",
    )
    parser.add_argument(
        "--processes",
        type=integer(1, 1000),
        default=_PROCESSES,
        metavar="N",
        help=f"fresh processes of each work ({_PROCESSES})",
    )
    parser.add_argument(
        "--rounds",
        type=integer(1, 100_000),
        default=_ROUNDS,
        metavar="N",
        help=f"rounds of each process, after one that doesn't count ({_ROUNDS})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/bench"),
        metavar="DIR",
        help="where the chart, bench.png, goes (./out/bench)",
    )
    parser.add_argument("--worker", metavar="JOB", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its results; 0 when it is finished, 1 when one of its processes failed.

    Raises:
        UsageError: an argument can't be used, or a package is missing.

    """
    if args.worker is not None:
        from zenflow.cli.bench.worker import Job, work_off

        return work_off(Job.from_json(args.worker))

    require_packages("rich", "matplotlib")
    from zenflow.cli.bench.session import WorkerError

    plan, packages = _prepare(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"argument --out: {str(args.out)!r}: {error.strerror}; accepted: a directory, new or old"
        ) from None
    try:
        return _run(args, plan, packages)
    except WorkerError as error:
        print(f"zenflow: {error}", file=sys.stderr)
        return 1


def _prepare(args: argparse.Namespace) -> tuple[Plan, list[str]]:
    """Return the plan, and the packages that were asked for."""
    from zenflow import _core
    from zenflow.cli.bench.machine import available_memory, cpus
    from zenflow.cli.bench.peers import PACKAGES, names_of
    from zenflow.cli.bench.session import Plan
    from zenflow.cli.bench.works import WORKS

    works = _names("--work", args.work or list(WORKS), list(WORKS))
    packages = (
        [] if args.peers == ["none"] else _names("--peers", args.peers or list(PACKAGES), list(PACKAGES))
    )
    machine, cores = cpus(), len(_core.all_cores())
    threads = args.threads or [cores]
    if max(threads) > len(machine):
        raise UsageError(
            f"argument --threads: {max(threads)}; accepted: 1 to {len(machine)}, the CPUs this process may use"
        )
    memory = available_memory()
    for numel in args.numel:
        needed = max(int(numel * WORKS[work].memory) for work in works)
        if memory is not None and needed > _MEMORY_SHARE * memory:
            raise UsageError(
                f"argument --numel: {format_size(numel)} take {needed / 2**30:.1f} GiB of arrays; accepted: "
                f"what fits the {memory / 2**30:.1f} GiB that are available"
            )
    plan = Plan(
        works=works,
        numels=args.numel,
        threads=threads,
        cpus=machine,
        cores=cores,
        peers=names_of(packages),
        rounds=args.rounds,
        processes=args.processes,
    )
    return plan, packages


def _names(argument: str, chosen: list[str], known: list[str]) -> list[str]:
    try:
        return [one_of(known)(name) for name in chosen]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"argument {argument}: {error}") from None


def _run(args: argparse.Namespace, plan: Plan, packages: list[str]) -> int:
    from rich.console import Console

    from zenflow.cli.bench.doubts import doubts_after, doubts_before
    from zenflow.cli.bench.machine import describe
    from zenflow.cli.bench.plot import draw_figure
    from zenflow.cli.bench.progress import Bar
    from zenflow.cli.bench.report import as_json, as_tables, lines_of, peers_of
    from zenflow.cli.bench.session import plan_jobs, run_all

    warnings = doubts_before(plan)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with Bar(len(plan_jobs(plan)), plan.processes, plan.rounds) as bar:
        results = run_all(plan, bar.begin, bar.advance)
    later = doubts_after(results)
    for warning in later:
        print(f"warning: {warning}", file=sys.stderr)
    lines, peers = lines_of(results), peers_of(plan, packages, results)
    picture = args.out / "bench.png"
    draw_figure(picture, lines)
    if args.json:
        print(json.dumps(as_json(describe() | {"processes": plan.processes}, lines, peers, warnings + later)))
        print(f"plot: {picture}", file=sys.stderr)
    else:
        Console().print(as_tables(lines, peers, warnings + later))
        print(f"plot: {picture}")
    return 0
