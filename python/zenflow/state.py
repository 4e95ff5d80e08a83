"""State dicts in the format of ``torch.optim.AdamW``, and the ways between them and the live state.

Per parameter index: ``step`` (0-dim float32 tensor), ``exp_avg`` and ``exp_avg_sq`` (full fp32 CPU tensors of the
parameter's shape) and, where the weight isn't its own master, ``master_weight`` (fp32). Extra keys are ignored by
``torch.optim.AdamW.load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import ArgumentError

__all__ = ["EXACT_IN_FLOAT32", "check_entry", "load_through", "step_tensor", "update_count"]

StateDict = dict[str, Any]

#: The last update count that float32 holds exactly, with all before it.
EXACT_IN_FLOAT32 = 1 << 24


def step_tensor(k: int) -> Tensor:
    """An update count as torch.optim keeps it; float64 from 2^24 on, where float32 would stand still."""
    return torch.tensor(float(k), dtype=torch.float32 if k <= EXACT_IN_FLOAT32 else torch.float64)


def update_count(step: Any, name: str) -> int:
    """The update count from a tensor, an int or a float."""
    value = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or value % 1 != 0:
        raise ArgumentError(
            f"step of {name} in the state dict is {step!r}; accepted: a whole number of 0 or more"
        )
    return int(value)


def check_entry(entry: Mapping[str, Any], param: Tensor, name: str) -> None:
    """Raises :class:`ArgumentError` unless ``entry`` has AdamW's state for ``param``."""
    update_count(entry.get("step"), name)
    for key in ("exp_avg", "exp_avg_sq", "master_weight"):
        value = entry.get(key)
        if value is None and key == "master_weight":
            continue
        if not isinstance(value, Tensor) or value.shape != param.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
            raise ArgumentError(
                f"{key} of {name} in the state dict is {got}; accepted: a tensor of shape {tuple(param.shape)}"
            )


def load_through(
    optimizer: Optimizer,
    load: Callable[[StateDict], None],
    state_dict: StateDict,
    check: Callable[[StateDict], None],
    fill: Callable[[StateDict], None],
) -> None:
    """Runs ``load`` (torch's own ``load_state_dict``) without letting it touch the state entries.

    Torch's would cast fp32 moments to a 16-bit parameter's dtype and move them to its device. So the entries are
    taken out after the user's pre-hooks, checked by ``check`` before anything is changed, and given to ``fill``
    before the user's post-hooks.
    """
    taken: StateDict = {}

    def take(_: Optimizer, given: StateDict) -> StateDict:
        for key in ("state", "param_groups"):
            if key not in given:
                raise ArgumentError(f"the state dict has no {key!r}; accepted: what state_dict() returns")
        groups = [_loadable(group, optimizer.defaults) for group in given["param_groups"]]
        # As torch does it: which entry is whose says its place among the groups' keys. Distributed checkpoints have
        # parameters' names for keys.
        places = {key: i for i, key in enumerate(chain.from_iterable(group["params"] for group in groups))}
        state = {places.get(key, key): entry for key, entry in given["state"].items()}
        taken.update(given, param_groups=groups, state=state)
        check(taken)
        return {**taken, "state": {}}

    before = optimizer.register_load_state_dict_pre_hook(take)
    after = optimizer.register_load_state_dict_post_hook(lambda _: fill(taken), prepend=True)
    try:
        load(state_dict)
    finally:
        before.remove()
        after.remove()


def _loadable(group: StateDict, defaults: Mapping[str, Any]) -> StateDict:
    """A saved group without torch's ways to run AdamW, which are not ours, and with the keys of later versions."""
    for key in ("lr", "betas", "eps", "weight_decay"):
        if key not in group:
            raise ArgumentError(
                f"a group of the state dict has no {key!r}; accepted: groups of AdamW or Adam"
            )
    later = {key: defaults[key] for key in ("maximize", "decoupled_weight_decay", "amsgrad")}
    ways = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
    return {**later, **group, **ways}
