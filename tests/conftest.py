"""What all tests share: seeds, hypothesis settings, and optimizers that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from zenflow import ZenFlowAdamW

settings.register_profile(
    "zenflow",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("zenflow")

# torch's threads spin at the end of every parallel region: on a machine with few cores and other work to do, tiny
# tensors take seconds that way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20240521)


@pytest.fixture
def zenflow_adamw() -> Iterator[Callable[..., ZenFlowAdamW]]:
    """A factory of :class:`ZenFlowAdamW` that offloads everything it can, in small buckets, and closes them all."""
    made: list[ZenFlowAdamW] = []

    def make(params: Any, **options: Any) -> ZenFlowAdamW:
        optimizer = ZenFlowAdamW(params, **{"min_offload_numel": 1, "bucket_numel": 1024, **options})
        made.append(optimizer)
        return optimizer

    yield make
    for optimizer in made:
        optimizer.close()
