"""AdamW with float32 states: in place, as the offload pass, and on many small tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zenflow import CPUAdamW, _core
from zenflow.cli.bench.adam_arrays import GROUP, AdamArrays, split
from zenflow.cli.bench.contest import OURS, Call, Contest
from zenflow.cli.bench.oracle import HYPER, K
from zenflow.cli.bench.peers import NOTES, UNFUSED, Peer
from zenflow.cli.bench.setting import Setting

__all__ = ["adamw_fp32", "enter_offloading_peers", "many_small", "offload_pass"]

#: Elements of each of many small tensors.
SMALL = 4096


def adamw_fp32(setting: Setting) -> Contest:
    """In place, gradient and weight in float32."""
    arrays = AdamArrays(setting.memory, setting.numel, torch.float32)
    contest = _contest(setting, arrays)
    contest.enter(OURS, _kernel(setting, arrays))

    def make(name: str) -> Call:
        return Peer(name, [arrays.weight], [arrays.exp_avg], [arrays.exp_avg_sq], [arrays.grad]).step

    for name in setting.peers:
        contest.enter_peer(name, partial(make, name), NOTES.get(name, ""))
    return contest


def offload_pass(setting: Setting, dtype: torch.dtype = torch.bfloat16) -> Contest:
    """A 16-bit gradient in, float32 master and 16-bit weight out; peers cast, step and cast."""
    arrays = AdamArrays(setting.memory, setting.numel, dtype)
    contest = _contest(setting, arrays)
    contest.enter(OURS, _kernel(setting, arrays))
    enter_offloading_peers(contest, setting, arrays)
    return contest


def enter_offloading_peers(contest: Contest, setting: Setting, arrays: AdamArrays) -> None:
    """Let the peers compete on ``arrays``, of which the gradient and ``out`` are 16 bits wide: cast, step, cast."""
    out = arrays.out
    assert out is not None

    def make(name: str) -> Call:
        peer = Peer(name, [arrays.weight], [arrays.exp_avg], [arrays.exp_avg_sq], [arrays.grad32])

        def cast_step_cast() -> None:
            arrays.grad32.copy_(arrays.grad)
            peer.step()
            out.copy_(arrays.weight)

        return cast_step_cast

    for name in setting.peers:
        if name not in UNFUSED:
            contest.enter_peer(name, partial(make, name), "copy_ to float32, step(), copy_ to 16 bits")


def many_small(setting: Setting) -> Contest:
    """Tensors of 4,096 elements in float32, in place: whole steps of CPUAdamW, and its kernel alone besides."""
    count = max(1, setting.numel // SMALL)
    arrays = AdamArrays(setting.memory, count * SMALL, torch.float32)
    views = [split(x, count) for x in (arrays.weight, arrays.exp_avg, arrays.exp_avg_sq, arrays.grad)]
    weights, exp_avgs, exp_avg_sqs, grads = views
    optimizer = _at_update_k(weights, grads)
    states = [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]

    def reset() -> None:
        arrays.reset()
        _copy_moments(states, exp_avgs, exp_avg_sqs, back=False)

    def check(name: str, _: Any) -> None:
        if name == OURS:
            _copy_moments(states, exp_avgs, exp_avg_sqs, back=True)
        arrays.check(name)

    contest = Contest(arrays.numel, reset, check, lambda: arrays.roofline(setting.pool))
    contest.enter(OURS, optimizer.step, "CPUAdamW.step()")

    tensors = _core.AdamTensors(weights, [None] * count, exp_avgs, exp_avg_sqs)
    indices, steps, group_of = list(range(count)), [K] * count, [0] * count
    contest.enter(
        f"{OURS} kernel",
        lambda: tensors.step(setting.pool, indices, grads, steps, [GROUP], group_of),
        "the call that CPUAdamW.step() makes",
    )

    def make(name: str) -> Call:
        return Peer(name, weights, exp_avgs, exp_avg_sqs, grads).step

    for name in setting.peers:
        # torchao looks up a compiled function for each tensor at each step.
        if name not in {"bitsandbytes", "torchao"}:
            contest.enter_peer(name, partial(make, name), NOTES.get(name, ""))
    return contest


def _contest(setting: Setting, arrays: AdamArrays) -> Contest:
    return Contest(
        arrays.numel,
        arrays.reset,
        lambda name, _: arrays.check(name),
        lambda: arrays.roofline(setting.pool),
    )


def _kernel(setting: Setting, arrays: AdamArrays) -> Call:
    tensors = arrays.tensors()
    return lambda: tensors.step(setting.pool, [0], [arrays.grad], [K], [GROUP], [0])


def _at_update_k(weights: list[Tensor], grads: list[Tensor]) -> CPUAdamW:
    """Return a CPUAdamW whose next step is update ``K``; its moments are its own."""
    params = [torch.nn.Parameter(weight) for weight in weights]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    lr, beta1, beta2, eps, weight_decay = HYPER
    optimizer = CPUAdamW(params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    zeros = torch.zeros(SMALL)
    state = {
        i: {"step": torch.tensor(float(K - 1)), "exp_avg": zeros, "exp_avg_sq": zeros}
        for i in range(len(params))
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return optimizer


def _copy_moments(
    states: list[Any], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], *, back: bool
) -> None:
    """Copy moments into the states of an optimizer, or back from there."""
    for state, exp_avg, exp_avg_sq in zip(states, exp_avgs, exp_avg_sqs, strict=True):
        for array, kept in ((exp_avg, state["exp_avg"]), (exp_avg_sq, state["exp_avg_sq"])):
            (array if back else kept).copy_(kept if back else array)
