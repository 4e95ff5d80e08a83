"""Sizes, the pool, and the table at the end."""

from __future__ import annotations

import pytest

from harness import FULL, REPORTS, ROUNDS
from zenflow import _core
from zenflow.cli.bench.contest import Row
from zenflow.cli.bench.machine import describe
from zenflow.cli.bench.memory import Memory


@pytest.fixture(scope="session")
def pool() -> _core.Pool:
    """One thread on each core this process may use, as CPUAdamW takes by default."""
    return _core.Pool()


@pytest.fixture
def memory() -> Memory:
    """Arrays of one benchmark."""
    return Memory()


@pytest.fixture
def numel() -> int:
    """Elements: 64 Mi, or few and an odd number."""
    return 64 << 20 if FULL else 70_001


COLUMNS = (
    ("contender", 30),
    ("ms", 9),
    ("p10 - p90", 17),
    ("ns/elem", 8),
    ("GB/s", 6),
    ("roof", 5),
    ("x ours", 7),
    ("p10 - p90", 13),
    ("cores", 5),
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of all that was timed."""
    if not REPORTS:
        return
    write = terminalreporter.write_line
    terminalreporter.write_sep("=", "zenflow benchmarks")
    write(f"{machine()}; medians of up to {ROUNDS} interleaved rounds")
    write(
        "roof: share of the roofline's speed, measured in the same rounds; x ours: time over ours, above 1 is slower"
    )
    for report in REPORTS:
        write("")
        write(f"{report.name}: {report.numel:,} elements, {report.bytes_per_element:g} B each")
        write("  " + "  ".join(_cell(title, width, i) for i, (title, width) in enumerate(COLUMNS)).rstrip())
        for row in report.rows:
            write("  " + "  ".join(_cells(row)).rstrip())


def _cell(text: str, width: int, position: int) -> str:
    return text.ljust(width) if position == 0 else text.rjust(width)


def _cells(row: Row) -> list[str]:
    texts = (
        row.name,
        f"{row.ms[0]:.2f}",
        f"{row.ms[1]:.2f} - {row.ms[2]:.2f}",
        f"{row.ns_per_element:.3f}",
        f"{row.gb_per_s:.1f}",
        "" if row.roofline_share is None else f"{row.roofline_share:.2f}",
        f"{row.ratio[0]:.2f}" if row.ratio else "",
        f"{row.ratio[1]:.2f} - {row.ratio[2]:.2f}" if row.ratio else "",
        f"{row.cores:.2f}",
    )
    return [_cell(text, width, i) for i, (text, (_, width)) in enumerate(zip(texts, COLUMNS, strict=True))]


def machine() -> str:
    """Processor, cores, instruction set, huge pages, versions."""
    found = describe()
    return ", ".join(
        (
            found["cpu"],
            f"{found['logical_cpus']} CPUs",
            f"{found['cores']} threads",
            found["isa"],
            f"huge pages {found['transparent_huge_pages']}",
            f"torch {found['torch']}",
            f"zenflow {found['zenflow']}",
        )
    )
