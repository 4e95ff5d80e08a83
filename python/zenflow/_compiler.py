"""Keeps ``torch.compile`` away from what it can't trace, without importing the compiler.

``torch.compiler.disable`` imports it when it decorates, which takes longer than importing torch. What torch's own
optimizers are decorated with does so at the first call under the compiler only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["uncompiled"]

_F = TypeVar("_F", bound=Callable[..., object])


def uncompiled(function: _F) -> _F:
    """``function``, run as it is wherever the compiler meets it."""
    lazy = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    disabled: _F = lazy(function)
    return disabled
