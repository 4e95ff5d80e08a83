# The compiled core. Internal: its face may change between versions.
from collections.abc import Sequence
from typing import Any, TypeAlias, final

from torch import Tensor

__all__ = [
    "AdamTensors",
    "Engine",
    "Found",
    "HostArray",
    "ParameterTable",
    "Pool",
    "__version__",
    "accumulate",
    "all_cores",
    "default_cores",
    "grad_stats",
    "isas",
    "roofline",
]

__version__: str

_Hyper: TypeAlias = tuple[float, float, float, float, float]
_Row: TypeAlias = tuple[int, int, int | None, bool]

@final
class Pool:
    def __new__(
        cls,
        cores: Sequence[int] | None = None,
        *,
        threads: int | None = None,
        pin: bool = True,
        isa: str | None = None,
    ) -> Pool: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...

@final
class AdamTensors:
    def __new__(
        cls,
        weights: Sequence[Tensor],
        masters: Sequence[Tensor | None],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
    ) -> AdamTensors: ...
    def step(
        self,
        pool: Pool,
        indices: Sequence[int],
        grads: Sequence[Tensor],
        steps: Sequence[int],
        groups: Sequence[tuple[_Hyper, float, bool]],
        group_of: Sequence[int],
    ) -> None: ...

@final
class Found:
    @property
    def unusual(self) -> list[tuple[int, int, int]]: ...
    @property
    def params(self) -> list[Tensor]: ...
    def put(self, position: int, grad: Tensor) -> None: ...
    def stats(self, pool: Pool) -> tuple[float, bool]: ...

@final
class ParameterTable:
    def __new__(cls) -> ParameterTable: ...
    def register(
        self,
        param: Tensor,
        weight: Tensor,
        master: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: Tensor,
        k: int,
    ) -> None: ...
    def count(self, param: Tensor) -> int: ...
    def stamp(self, param: Tensor) -> tuple[int, int]: ...
    def find(self, groups: Sequence[list[Tensor]]) -> Found: ...
    def step(
        self, pool: Pool, found: Found, groups: Sequence[tuple[_Hyper, float, bool]]
    ) -> bool: ...

@final
class HostArray:
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

@final
class Engine:
    def __new__(
        cls,
        cores: Sequence[int] | None = None,
        *,
        threads: int | None = None,
        pin: bool = True,
        chunk: int = 262144,
        capacity: int = 4096,
        delay: float = 0.0,
        isa: str | None = None,
    ) -> Engine: ...
    def add_parameter(self, numel: int, state_dtype: str = "float32") -> int: ...
    def arrays(self, parameter: int) -> tuple[HostArray, HostArray | None, HostArray | None]: ...
    def read_moments(self, parameter: int, exp_avg: Tensor, exp_avg_sq: Tensor) -> None: ...
    def write_moments(self, parameter: int, exp_avg: Tensor, exp_avg_sq: Tensor) -> None: ...
    def add_bucket(self, segments: Sequence[tuple[int, int, int]]) -> int: ...
    def add_slot(self, memory: Tensor) -> int: ...
    def add_upload(self, memory: Tensor) -> int: ...
    def ring(self, slot: int, scale: float = 1.0, *, void: bool = False) -> None: ...
    def submit(
        self,
        bucket: int,
        slot: int,
        upload: int | None,
        actions: bytes,
        grad_dtype: str,
        out_dtype: str,
        hyper: _Hyper,
    ) -> bool: ...
    def poll(self) -> list[_Row]: ...
    def wait(self, timeout: float) -> list[_Row]: ...
    def drain(self, timeout: float) -> bool: ...
    def progress(self, bucket: int) -> list[tuple[int, float, float]]: ...
    def set_progress(self, bucket: int, progress: Sequence[tuple[int, float, float]]) -> None: ...
    def gather_columns(
        self, parameter: int, cols: int, columns: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
    ) -> None: ...
    def scatter_columns(self, parameter: int, cols: int, columns: Tensor, master: Tensor) -> None: ...
    def stats(self) -> dict[str, float]: ...
    def check(self) -> None: ...
    def poison(self, cause: str) -> None: ...
    def close(self) -> None: ...

def grad_stats(pool: Pool, grads: Sequence[Tensor]) -> tuple[float, bool]: ...
def accumulate(pool: Pool, total: Tensor, grad: Tensor, *, first: bool = False) -> tuple[float, bool]: ...
def roofline(pool: Pool, read: Tensor, updates: Sequence[Tensor], write: Tensor | None = None) -> None: ...
def isas() -> list[str]: ...
def all_cores() -> list[int]: ...
def default_cores() -> list[int]: ...
