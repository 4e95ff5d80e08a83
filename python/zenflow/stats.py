"""What an optimizer has done so far, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stats"]


@dataclass(frozen=True)
class Stats:
    """A snapshot of counters; see :meth:`zenflow.ZenFlowAdamW.stats`.

    Seconds are wall-clock. ``stall_share`` is ``stall_seconds / wall_seconds``.
    """

    #: Steps that changed the state.
    steps: int
    #: Steps that were void: inf or NaN in their gradients.
    skipped_steps: int
    #: Steps between two moves of a deferred element.
    update_interval: int
    #: Forwards that a move is late by: 0 or 1.
    staleness: int
    #: Share of the offloaded elements that the device moves at every step.
    selected_share: float
    #: Elements whose states live on the host.
    offloaded_numel: int
    #: Elements of small and 1-D parameters, updated on the device.
    device_numel: int
    #: Seconds in which a gate or ``step()`` waited for the host.
    stall_seconds: float
    #: Seconds from the start of the first step to the end of the last.
    wall_seconds: float
    #: Bytes of gradients and masters sent to the host.
    bytes_down: int
    #: Bytes of new weights and states sent to the device.
    bytes_up: int
    #: Bytes of host memory for masters and moments.
    host_bytes: int
    #: Bytes of staging memory, both directions.
    staging_bytes: int
    #: Seconds in which the host worker computed.
    host_seconds: float
    #: Elements whose moments the host updated.
    host_elements: int
    #: Instruction set of the kernels.
    isa: str
    #: Threads of the host worker's pool.
    threads: int
    #: Name of the accelerator.
    accelerator: str

    @property
    def stall_share(self) -> float:
        """Share of the wall-clock time in which the device waited for the host."""
        return self.stall_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0
