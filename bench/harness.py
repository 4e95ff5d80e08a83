"""How a benchmark runs: every contender checked against an oracle, then all of them timed in turn, round after round.

A machine's speed drifts, so numbers taken one after the other don't compare. Here a round times the roofline, each peer
and ours once, in an order that shifts from round to round, and a ratio is taken within a round before any median is.
pytest-benchmark drives the rounds: what it times is ours, and its setup times the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from zenflow.cli.bench.contest import OURS, PAUSE, ROOFLINE, WARMUP, Call, Row, Times, contest_rows, rotate
from zenflow.cli.bench.quiet import wait_until_quiet
from zenflow.cli.bench.setting import Setting
from zenflow.cli.bench.works import WORKS

FULL = os.environ.get("ZENFLOW_BENCH_FULL", "") not in {"", "0"}
ROUNDS = int(os.environ.get("ZENFLOW_BENCH_ROUNDS", "21"))


@dataclass(frozen=True)
class Report:
    """A finished benchmark."""

    name: str
    numel: int
    bytes_per_element: float
    rows: list[Row]


#: All benchmarks timed in this session, for the table at its end.
REPORTS: list[Report] = []


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
        rotate(order)
        time.sleep(pause)

    benchmark.pedantic(times[ours_name], setup=setup, rounds=min(rounds, ROUNDS), warmup_rounds=WARMUP)
    if benchmark.disabled:
        return None
    for timed in times.values():
        timed.forget_warmup()
    seconds = {known: (timed.wall, timed.cpu) for known, timed in times.items()}
    rows = contest_rows(seconds, numel, bytes_per_element, ours_name)
    report = Report(name, numel, bytes_per_element, rows)
    benchmark.extra_info.update(_as_json(report))
    REPORTS.append(report)
    return report


def compete(benchmark: BenchmarkFixture, work: str, setting: Setting) -> Report | None:
    """:func:`contest` of a work of ``zenflow bench``; every peer in ``setting`` has to be able to take part."""
    built = WORKS[work].build(setting)
    try:
        assert not built.failed
        calls = dict(built.calls)
        roofline, ours = calls.pop(ROOFLINE), calls.pop(OURS)
        return contest(
            benchmark,
            work,
            numel=built.numel,
            bytes_per_element=WORKS[work].bytes_per_element,
            ours=ours,
            peers=calls,
            roofline=roofline,
        )
    finally:
        built.close()


def _as_json(report: Report) -> dict[str, Any]:
    contenders = {
        row.name: {
            **dict(zip(("ms_median", "ms_p10", "ms_p90"), row.ms, strict=True)),
            "ns_per_element": row.ns_per_element,
            "gb_per_s": row.gb_per_s,
            "share_of_roofline": row.roofline_share,
            **dict(zip(("ratio_median", "ratio_p10", "ratio_p90"), row.ratio or (), strict=True)),
            "cores": row.cores,
        }
        for row in report.rows
    }
    return {
        "elements": report.numel,
        "bytes_per_element": report.bytes_per_element,
        "contenders": contenders,
    }
