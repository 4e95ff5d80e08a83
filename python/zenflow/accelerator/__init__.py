"""The device seam: the few things the pipeline needs of an accelerator, and the rooms behind it."""

from .base import Accelerator, Event, Stream
from .host import HostAccelerator

__all__ = ["Accelerator", "Event", "HostAccelerator", "Stream", "accelerator_for"]


def accelerator_for(device_type: str) -> Accelerator | None:
    """The accelerator for parameters on this type of device; None where there is none yet."""
    return HostAccelerator() if device_type == "cpu" else None
