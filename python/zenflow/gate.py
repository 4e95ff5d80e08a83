"""Gates: the points just before a module's forward where its new weights must have landed.

A gate is a forward pre-hook on the model, on each block, embedding and head. It holds the optimizer weakly and knows
only which buckets may need it, so a module can be copied, pickled and outlive the optimizer. Other hooks keep state
dicts true: what is pending lands before a model is saved, and is forgotten where weights are loaded over it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ._compiler import uncompiled

__all__ = ["Gate", "GateKeeper", "Gates"]


class GateKeeper(Protocol):
    """What gates ask of the optimizer."""

    def pass_gate(self, gate: Gate) -> None:
        """Lands what must be visible to the gate's module."""

    def show_weights(self) -> None:
        """Lands everything whose time has come."""

    def weights_loaded(self) -> None:
        """Takes weights that were loaded from elsewhere for the new masters."""


def _inert(*_: Any) -> None:
    """What a copy of a hook does: nothing. The copy's weights are nobody's to land."""


class _Hook:
    """A hook of one module that copies and pickles as an inert one, after the original's weights have landed.

    A module's own parameters are copied before its hooks, so those that landed only now are copied again.
    """

    def __init__(self, keeper: GateKeeper, module: nn.Module) -> None:
        self._keeper = weakref.ref(keeper)
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for param in self._show_late():
            if id(param) in memo:
                memo[id(param)].detach().copy_(param.detach())
        return _inert

    def __reduce__(self) -> Any:
        late = self._show_late()
        return _resolve_inert, (late, [param.detach().clone() for param in late])

    def _show_late(self) -> list[Tensor]:
        """Lands, and returns the module's own parameters that this changed."""
        module = self._module()
        before = [] if module is None else [(p, p._version) for p in module.parameters(recurse=False)]
        self._show()
        return [param for param, version in before if param._version != version]

    @uncompiled
    def _show(self, *_: Any) -> None:
        keeper = self._keeper()
        if keeper is not None:
            keeper.show_weights()


def _resolve_inert(late: list[Tensor], weights: list[Tensor]) -> Any:
    for param, weight in zip(late, weights, strict=True):
        param.detach().copy_(weight)
    return _inert


class Gate(_Hook):
    """The forward pre-hook of one module."""

    def __init__(self, keeper: GateKeeper, module: nn.Module, number: int, name: str) -> None:
        super().__init__(keeper, module)
        self.number = number
        self.name = name or "the model"
        #: Buckets that this gate may have to land.
        self.buckets: list[int] = []
        #: Set in every forward, cleared by ``step()``.
        self.fired = False
        #: False once a step found that the gate doesn't stand before the parameters' use.
        self.trusted = True

    @uncompiled
    def __call__(self, *_: Any) -> None:
        """Runs before the module's forward."""
        self.fired = True
        keeper = self._keeper()
        if keeper is not None:
            keeper.pass_gate(self)


class _ShowHook(_Hook):
    """A state-dict pre-hook."""

    @uncompiled
    def __call__(self, *_: Any) -> None:
        self._show()


class _LoadedHook(_Hook):
    """A hook after a module's weights were loaded."""

    @uncompiled
    def __call__(self, *_: Any) -> None:
        keeper = self._keeper()
        if keeper is not None:
            keeper.weights_loaded()


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _gate_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks, embeddings and heads, in the order of registration; nothing inside a block or a compiled module."""
    if _is_compiled(model):
        return
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        listed = isinstance(module, lists)
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            leaf = not any(True for _ in child.children())
            if _is_compiled(child):
                yield path, child
            elif leaf:
                # A head is a Linear of the model itself, no subclass: MultiheadAttention has one of its own that it
                # never calls. Further down, a parent may read a leaf's weight uncalled.
                if isinstance(child, nn.Embedding) or (type(child) is nn.Linear and module is model):
                    yield path, child
            elif listed and not isinstance(child, lists):
                yield path, child
            else:
                yield from walk(child, f"{path}.")

    yield from walk(model, "")


class Gates:
    """All gates of one model, and which of them stand before which parameter."""

    def __init__(self, keeper: GateKeeper, model: nn.Module) -> None:
        self.gates: list[Gate] = []
        self._handles: list[RemovableHandle] = []
        self._owners: dict[int, list[int]] = {}
        for name, module in _gate_modules(model):
            self._add(keeper, name, module, module.parameters())
        rest = [param for param in model.parameters() if id(param) not in self._owners]
        self._add(keeper, "", model, rest)
        for module in model.modules():
            show, loaded = _ShowHook(keeper, module), _LoadedHook(keeper, module)
            self._handles.append(module.register_state_dict_pre_hook(show))
            self._handles.append(module.register_load_state_dict_post_hook(loaded))

    def _add(self, keeper: GateKeeper, name: str, module: nn.Module, params: Iterable[Tensor]) -> None:
        gate = Gate(keeper, module, len(self.gates), name)
        self.gates.append(gate)
        self._handles.append(module.register_forward_pre_hook(gate, prepend=True))
        for param in params:
            self._owners.setdefault(id(param), []).append(gate.number)

    def owners(self, param: Tensor) -> tuple[int, ...]:
        """Numbers of the gates that stand before a use of ``param``; whichever fires first lands it."""
        return tuple(self._owners.get(id(param), ()))

    def remove(self) -> None:
        """Takes every hook off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
