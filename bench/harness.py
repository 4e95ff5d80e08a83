"""How a benchmark runs: every contender checked against an oracle, then all of them timed in turn, round after round.

A machine's speed drifts, so numbers taken one after the other don't compare. Here a round times the roofline, each peer
and ours once, in an order that shifts from round to round, and a ratio is taken within a round before any median is.
pytest-benchmark drives the rounds: what it times is ours, and its setup times the others.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from quiet import wait_until_quiet

FULL = os.environ.get("ZENFLOW_BENCH_FULL", "") not in {"", "0"}
ROUNDS = int(os.environ.get("ZENFLOW_BENCH_ROUNDS", "21"))
WARMUP = 1

#: Before each call, until the threads of the one before have parked: OpenMP's spin on their cores for some while.
PAUSE = 0.02

ROOFLINE = "roofline"
OURS = "zenflow"

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One contender in one benchmark, over all rounds. ``ratio`` is its time over ours: above 1, ours is faster."""

    name: str
    ms: tuple[float, float, float]
    ns_per_element: float
    gb_per_s: float
    of_roofline: float | None
    ratio: tuple[float, float, float]
    #: CPU seconds over wall seconds: below the number of threads where the machine was shared (or time lost waiting).
    cores: float


@dataclass(frozen=True)
class Report:
    """A finished benchmark."""

    name: str
    numel: int
    bytes_per_element: float
    rows: list[Row]


#: All benchmarks timed in this session, for the table at its end.
REPORTS: list[Report] = []


@dataclass
class Times:
    """Wall and CPU seconds of one contender, a pair a round."""

    call: Call
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self.call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)


def contest(
    benchmark: BenchmarkFixture,
    name: str,
    *,
    numel: int,
    bytes_per_element: float,
    ours: Call,
    peers: Mapping[str, Call],
    roofline: Call | None = None,
    ours_name: str = OURS,
    rounds: int = ROUNDS,
) -> Report | None:
    """Times all contenders; None where pytest-benchmark is disabled, and each has run once.

    Args:
        benchmark: pytest-benchmark's fixture.
        name: the benchmark's name in the table.
        numel: elements worked on.
        bytes_per_element: bytes that the work can't but move, whoever does it: each array read or written once.
        ours: the call that pytest-benchmark times.
        peers: the others, by name.
        roofline: a pass with the same streams; see ``zenflow._core.roofline``.
        ours_name: what ours is called in the table.
        rounds: how many, at most ``ZENFLOW_BENCH_ROUNDS``.
    """
    others = {**({} if roofline is None else {ROOFLINE: roofline}), **peers}
    times = {known: Times(call) for known, call in {**others, ours_name: ours}.items()}
    pause = 0.0 if benchmark.disabled else PAUSE
    order = list(others)

    def setup() -> None:
        if not benchmark.disabled:
            wait_until_quiet()
        for other in order:
            time.sleep(pause)
            times[other]()
        order.append(order.pop(0))
        time.sleep(pause)

    benchmark.pedantic(times[ours_name], setup=setup, rounds=min(rounds, ROUNDS), warmup_rounds=WARMUP)
    if benchmark.disabled:
        return None
    for timed in times.values():
        del timed.wall[:WARMUP], timed.cpu[:WARMUP]
    shown = [known for known in (ROOFLINE, ours_name, *peers) if known in times]
    rows = [_row(known, times, ours_name, numel, bytes_per_element) for known in shown]
    report = Report(name, numel, bytes_per_element, rows)
    benchmark.extra_info.update(_as_json(report))
    REPORTS.append(report)
    return report


def _row(name: str, times: Mapping[str, Times], ours: str, numel: int, bytes_per_element: float) -> Row:
    wall = times[name].wall
    median = statistics.median(wall)
    of_roofline = None
    if ROOFLINE in times:
        of_roofline = statistics.median(a / b for a, b in zip(times[ROOFLINE].wall, wall, strict=True))
    return Row(
        name=name,
        ms=spread([1e3 * seconds for seconds in wall]),
        ns_per_element=1e9 * median / numel,
        gb_per_s=1e-9 * numel * bytes_per_element / median,
        of_roofline=of_roofline,
        ratio=spread([a / b for a, b in zip(wall, times[ours].wall, strict=True)]),
        cores=sum(times[name].cpu) / sum(wall),
    )


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile."""
    if len(values) == 1:
        return (values[0],) * 3
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return statistics.median(values), deciles[0], deciles[-1]


def _as_json(report: Report) -> dict[str, Any]:
    contenders = {
        row.name: {
            **dict(zip(("ms_median", "ms_p10", "ms_p90"), row.ms, strict=True)),
            "ns_per_element": row.ns_per_element,
            "gb_per_s": row.gb_per_s,
            "share_of_roofline": row.of_roofline,
            **dict(zip(("ratio_median", "ratio_p10", "ratio_p90"), row.ratio, strict=True)),
            "cores": row.cores,
        }
        for row in report.rows
    }
    return {
        "elements": report.numel,
        "bytes_per_element": report.bytes_per_element,
        "contenders": contenders,
    }
