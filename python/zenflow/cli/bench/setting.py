"""What a work is set up with."""

from __future__ import annotations

from dataclasses import dataclass, field

from zenflow import _core
from zenflow.cli.bench.memory import Memory

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """Size, threads and company of a contest.

    Attributes:
        numel: elements to work on.
        pool: the threads of ours and of the roofline.
        cores: the CPUs that they are pinned to, for works that start threads of their own.
        peers: the contenders besides ours, as :func:`~zenflow.cli.bench.peers.names` calls them.
        memory: where arrays come from.

    """

    numel: int
    pool: _core.Pool
    cores: list[int]
    peers: list[str]
    memory: Memory = field(default_factory=Memory)
