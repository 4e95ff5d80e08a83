"""torch-zenflow: AdamW with its states in host memory, without stalls and never late.

>>> from zenflow import ZenFlowAdamW
>>> optimizer = ZenFlowAdamW(model, lr=2e-5, topk_ratio=0.1, update_interval=4)
"""

from zenflow._identity import check_identity

check_identity()

from zenflow._core import __version__  # noqa: E402
from zenflow.cpu_adamw import CPUAdamW  # noqa: E402
from zenflow.errors import (  # noqa: E402
    ArgumentError,
    EngineClosedError,
    EngineFailedError,
    ForkedProcessError,
    HostMemoryError,
    ZenFlowError,
)
from zenflow.optimizer import ZenFlowAdamW  # noqa: E402
from zenflow.stats import Stats  # noqa: E402

__all__ = [
    "ArgumentError",
    "CPUAdamW",
    "EngineClosedError",
    "EngineFailedError",
    "ForkedProcessError",
    "HostMemoryError",
    "Stats",
    "ZenFlowAdamW",
    "ZenFlowError",
    "__version__",
]
