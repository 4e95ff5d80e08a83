"""A contest: contenders for one work, each checked against an oracle before it may take part, then timed in turn.

A machine's speed drifts, so numbers taken one after the other don't compare. Here a round times every contender once,
in an order that shifts from round to round, and a ratio is taken within a round before any median is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "OURS",
    "PAUSE",
    "ROOFLINE",
    "WARMUP",
    "Call",
    "Contest",
    "Row",
    "Times",
    "contest_rows",
    "rotate",
    "spread",
    "time_rounds",
]

OURS = "zenflow"
ROOFLINE = "roofline"

#: Rounds whose times don't count.
WARMUP = 1

#: Seconds before each call, until the threads of the one before have parked: OpenMP's spin on their cores for a while.
PAUSE = 0.02

Call = Callable[[], Any]


class Contest:
    """The contenders for one work on one set of arrays.

    Args:
        numel: elements worked on.
        reset: sets the arrays to what every contender starts from.
        check: compares the arrays with the oracle, given the contender's name and what its call returned; raises
            :class:`~zenflow.cli.bench.oracle.WrongResultError`.
        roofline: a pass over the same streams, see ``zenflow._core.roofline``; None for none.
        close: gives back what garbage collection doesn't.

    """

    def __init__(
        self,
        numel: int,
        reset: Call,
        check: Callable[[str, Any], None],
        roofline: Call | None = None,
        close: Call = lambda: None,
    ) -> None:
        self.numel = numel
        self.close = close
        #: All that takes part, by name.
        self.calls: dict[str, Call] = {} if roofline is None else {ROOFLINE: roofline}
        #: What their calls are, where the name doesn't say.
        self.notes: dict[str, str] = {}
        #: Peers that don't take part, and why.
        self.failed: dict[str, str] = {}
        self._reset = reset
        self._check = check

    def enter(self, name: str, call: Call, note: str = "") -> None:
        """Run ``call`` once from the start, check what it gives, and let it take part as ``name``."""
        self._reset()
        self._check(name, call())
        self.calls[name] = call
        if note:
            self.notes[name] = note

    def enter_peer(self, name: str, make: Callable[[], Call], note: str = "") -> None:
        """:meth:`enter` what ``make`` returns; one that can't be set up or gives wrong numbers is in :attr:`failed`."""
        try:
            self.enter(name, make(), note)
        # Whatever is wrong with other people's code doesn't end the benchmark of ours.
        except Exception as error:  # noqa: BLE001
            self.failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@dataclass
class Times:
    """Wall and CPU seconds of one contender, a pair a round."""

    call: Call
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        """Call and take the time."""
        cpu, wall = time.process_time(), time.perf_counter()
        self.call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def forget_warmup(self) -> None:
        """Drop the rounds that don't count."""
        del self.wall[:WARMUP], self.cpu[:WARMUP]


def rotate(order: list[str]) -> None:
    """Let the first of ``order`` be the last of the next round."""
    order.append(order.pop(0))


def time_rounds(
    calls: Mapping[str, Call], rounds: int, done: Callable[[], None], pause: float = PAUSE
) -> dict[str, Times]:
    """Time all ``calls`` in ``rounds`` rounds, after those of the warm-up; ``done`` is called after each round."""
    times = {name: Times(call) for name, call in calls.items()}
    order = list(times)
    for _ in range(WARMUP + rounds):
        for name in order:
            time.sleep(pause)
            times[name]()
        rotate(order)
        done()
    for timed in times.values():
        timed.forget_warmup()
    return times


@dataclass(frozen=True)
class Row:
    """One contender over all rounds.

    Attributes:
        name: of the contender.
        ms: milliseconds of a call: median, 10th and 90th percentile.
        ns_per_element: median.
        gb_per_s: bytes that the work can't but move, whoever does it, over the median time.
        roofline_share: the roofline's time over its own within a round, median; None without a roofline.
        ratio: its time over ours within a round, median, 10th and 90th percentile; above 1, ours is faster. None where
            ours didn't take part.
        cores: CPU seconds over wall seconds: below the number of threads where the machine was shared, or time was lost
            waiting.
        rounds: how many.

    """

    name: str
    ms: tuple[float, float, float]
    ns_per_element: float
    gb_per_s: float
    roofline_share: float | None
    ratio: tuple[float, float, float] | None
    cores: float
    rounds: int


def contest_rows(
    times: Mapping[str, tuple[list[float], list[float]]],
    numel: int,
    bytes_per_element: float,
    ours: str = OURS,
    names: list[str] | None = None,
) -> list[Row]:
    """Return a row for each of ``names``, by default for all: the roofline, ours, and then the others.

    Args:
        times: wall and CPU seconds of each contender, a pair a round; round ``i`` of one is round ``i`` of all.
        numel: elements worked on.
        bytes_per_element: bytes that the work can't but move: each array read or written once.
        ours: whose time ratios are taken by.
        names: in which order.

    """
    first = [name for name in (ROOFLINE, ours) if name in times]
    names = names or [*first, *(name for name in times if name not in first)]
    return [_row(name, times, numel, bytes_per_element, ours) for name in names]


def _row(
    name: str,
    times: Mapping[str, tuple[list[float], list[float]]],
    numel: int,
    bytes_per_element: float,
    ours: str,
) -> Row:
    wall, cpu = times[name]
    median = statistics.median(wall)
    share = None
    if ROOFLINE in times:
        share = statistics.median(a / b for a, b in zip(times[ROOFLINE][0], wall, strict=True))
    return Row(
        name=name,
        ms=spread([1e3 * seconds for seconds in wall]),
        ns_per_element=1e9 * median / numel,
        gb_per_s=1e-9 * numel * bytes_per_element / median,
        roofline_share=share,
        ratio=spread([a / b for a, b in zip(wall, times[ours][0], strict=True)]) if ours in times else None,
        cores=sum(cpu) / sum(wall),
        rounds=len(wall),
    )


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the median, the 10th and the 90th percentile."""
    if len(values) == 1:
        return (values[0],) * 3
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return statistics.median(values), deciles[0], deciles[-1]
