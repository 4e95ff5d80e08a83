"""Waiting for others to be done, on a machine that isn't ours alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["busy_seconds", "wait_until_quiet"]

#: Seconds to wait, at most and before each round, for a machine that does nothing else.
PATIENCE = float(os.environ.get("ZENFLOW_BENCH_PATIENCE", "0"))

_STAT = Path("/proc/stat")
_LOOK = 0.1
#: Share of one CPU that others may use meanwhile.
_NOISE = 0.15


def wait_until_quiet(patience: float = PATIENCE) -> bool:
    """Waits until the whole machine is all but idle (Linux only); False if ``patience`` seconds didn't see it so."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = busy_seconds()
        time.sleep(_LOOK)
        if busy_seconds() - before <= _NOISE * _LOOK:
            return True
    return False


def busy_seconds() -> float:
    """Return the CPU seconds that all processes of the machine have used since boot; 0 where the system doesn't say."""
    if not _STAT.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
        int, _STAT.read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
