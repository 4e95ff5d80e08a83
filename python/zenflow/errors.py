"""The one family of exceptions that zenflow raises on purpose.

Every class also derives from the built-in that torch raises in like cases, so that ``except ValueError`` keeps working.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "EngineClosedError",
    "EngineFailedError",
    "ForkedProcessError",
    "HostMemoryError",
    "ZenFlowError",
]


class ZenFlowError(Exception):
    """Base of everything zenflow raises on purpose."""


class ArgumentError(ZenFlowError, ValueError):
    """An argument, a parameter or a gradient is not what the call accepts. Nothing was changed.

    The message names the argument, the value it got and what is accepted.
    """


class HostMemoryError(ZenFlowError, MemoryError):
    """The system refused host memory. The message says how many bytes were wanted, and for what."""


class EngineClosedError(ZenFlowError, RuntimeError):
    """The optimizer was closed before this call."""


class EngineFailedError(ZenFlowError, RuntimeError):
    """A failure inside a step left states that can't be trusted. Load a checkpoint into a new optimizer."""


class ForkedProcessError(ZenFlowError, RuntimeError):
    """A forked child used an optimizer whose threads live in its parent."""
