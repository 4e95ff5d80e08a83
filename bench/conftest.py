"""Sizes, the pool, and the table at the end."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import pytest
import torch

from harness import FULL, REPORTS, ROUNDS, Row
from memory import Memory
from zenflow import _core


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
        "" if row.of_roofline is None else f"{row.of_roofline:.2f}",
        f"{row.ratio[0]:.2f}",
        f"{row.ratio[1]:.2f} - {row.ratio[2]:.2f}",
        f"{row.cores:.2f}",
    )
    return [_cell(text, width, i) for i, (text, (_, width)) in enumerate(zip(texts, COLUMNS, strict=True))]


def machine() -> str:
    """Processor, cores, instruction set, huge pages, versions."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = re.search(r"\[(\w+)\]", pages.read_text()) if pages.exists() else None
    return ", ".join(
        (
            found[1] if found else platform.processor() or platform.machine(),
            f"{os.cpu_count()} CPUs",
            f"{len(_core.all_cores())} threads",
            _core.isas()[0],
            f"huge pages {huge[1] if huge else 'unknown'}",
            f"torch {torch.__version__}",
            f"zenflow {_core.__version__}",
        )
    )
