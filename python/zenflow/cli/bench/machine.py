"""The machine under the benchmark: what it is, and what about it makes numbers doubtful."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from zenflow import __version__, _core

__all__ = [
    "available_memory",
    "cpus",
    "describe",
    "last_level_cache",
    "sharing_cpus",
    "transparent_huge_pages",
]

_CPUS = Path("/sys/devices/system/cpu")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpus() -> list[int]:
    """Return the logical CPUs that this process may use: one of every physical core, then those that share one."""
    cores = list(_core.all_cores())
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return cores + [cpu for cpu in allowed if cpu not in cores]


def sharing_cpus(chosen: list[int], root: Path = _CPUS) -> list[list[int]]:
    """Return those of the CPUs in ``chosen`` that share a physical core, a list a core (Linux only)."""
    cores: dict[str, list[int]] = {}
    for cpu in chosen:
        siblings = _read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu{cpu}"
        cores.setdefault(siblings, []).append(cpu)
    return [shared for shared in cores.values() if len(shared) > 1]


def last_level_cache(root: Path = _CPUS) -> int | None:
    """Return the bytes of the largest cache of the first CPU; None where the system doesn't say."""
    sizes = []
    for file in sorted((root / "cpu0" / "cache").glob("index*/size")):
        found = re.fullmatch(r"([0-9]+)([KMG])", _read(file))
        if found:
            sizes.append(int(found[1]) * _UNITS[found[2]])
    return max(sizes, default=None)


def transparent_huge_pages() -> str:
    """Return the system's setting: always, madvise, never; unknown where it doesn't say."""
    found = re.search(r"\[(\w+)\]", _read(_HUGE_PAGES))
    return found[1] if found else "unknown"


def available_memory() -> int | None:
    """Return the bytes that can be allocated without swapping; None where the system doesn't say."""
    found = re.search(r"MemAvailable: +([0-9]+) kB", _read(Path("/proc/meminfo")))
    return int(found[1]) << 10 if found else None


def describe() -> dict[str, Any]:
    """Return what the numbers depend on."""
    model = re.search(r"model name\s*: (.*)", _read(Path("/proc/cpuinfo")))
    return {
        "platform": platform.platform(),
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "logical_cpus": os.cpu_count(),
        "cores": len(_core.all_cores()),
        "isa": _core.isas()[0],
        "last_level_cache_bytes": last_level_cache(),
        "transparent_huge_pages": transparent_huge_pages(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "zenflow": __version__,
    }


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
