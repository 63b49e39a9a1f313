"""Adapter for private PyTorch APIs: the flight recorder's last collective, the shard group of an FSDP2 module, the
collectives that FSDP2 and DTensor call, and objects that autograd's threads inherit.

This is the only file of the package that uses private PyTorch names: `_dump_fr_trace_json` and `_resolve_process_group`
of `torch._C._distributed_c10d`, `_get_backend` of process groups and `options._timeout` of their backends, the module
of functional collectives with its `_resolve_group` (`_resolve_group_name` before 2.13), FSDP2's
`FSDPModule._get_fsdp_state`, `_fsdp_param_group`, `_is_hsdp` and `_reduce_scatter_process_group`, and `_is_key_in_tls`,
`_get_obj_in_tls`, `_stash_obj_in_tls` and `_remove_obj_from_tls` of `torch._C`. Checked on 2.13 with gloo.
`last_collective` returns None if a version records less.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

TASK_KEY = "meshwright.comm.overlap"
COLLECTIVES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor", "all_gather_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}
"""Names of the collectives, in `torch.distributed` and among the functional ones; PyTorch 2.13 renamed some."""


def last_collective() -> tuple[str, list[int], str] | None:
    """Return the last collective that this process entered, the ranks of its group and its tensors, in words.

    None if PyTorch recorded none.
    """
    try:
        entries = json.loads(c10d._dump_fr_trace_json(True, False))["entries"]  # type: ignore[attr-defined]
        last = max(entries, key=lambda entry: int(entry["record_id"]))
        name = last["profiling_name"].partition(":")[2]
        number = last["p2p_seq_id"] if last["is_p2p"] else last["collective_seq_id"]
        shapes = ", ".join(f"{dtype.lower()} {size}" for dtype, size in
                           zip(last["input_dtypes"], last["input_sizes"], strict=False))  # fmt: skip
        ranks = dist.get_process_group_ranks(c10d._resolve_process_group(last["process_group"][0]))
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return None
    return f"{name}, sequence number {number}", ranks, f", of {shapes}" if shapes else ""


def group_name(group: ProcessGroup | None) -> str:
    """Return the name of a group (the default group if None), by which operators refer to it."""
    group = group if group is not None else dist.group.WORLD
    assert group is not None, "a collective of several ranks has a group"
    return str(group.group_name)


def group_of_name(name: str) -> ProcessGroup:
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]


@contextmanager
def replaced_collectives(replace: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the functions that FSDP2 and DTensor look up at each call of a collective, within the context.

    Args:
        replace: function from a key of `COLLECTIVES` and the original function to the new one.
    """
    found = [
        (module, name, op, getattr(module, name))
        for module in (dist, functional)
        for op, names in COLLECTIVES.items()
        for name in names
        if hasattr(module, name)
    ]
    for module, name, op, original in found:
        setattr(module, name, replace(op, original))
    try:
        yield
    finally:
        for module, name, _, original in found:
            setattr(module, name, original)


def group_of(group: Any) -> ProcessGroup:
    """Return the group that a functional collective takes: a group, its name, or a mesh and its dim; None for all."""
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        resolve = getattr(functional, "_resolve_group", None)
        group = resolve(group) if resolve is not None else functional._resolve_group_name(group, "")
    return group if isinstance(group, ProcessGroup) else group_of_name(str(group))


def message_timeout(device: torch.device, group: ProcessGroup | None) -> timedelta | None:
    """Return the timeout to wait with for a message; None on CUDA, where waiting does not block.

    Gloo's messages have the timeout with which their group was created, even after it was changed.
    """
    if device.type != "cpu":
        return None
    group = group if group is not None else dist.group.WORLD
    assert group is not None, "messages of several ranks have a group"
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def shard_group(module: FSDPModule) -> ProcessGroup | None:
    """Return the group that an FSDP2 module's gradients are reduce-scattered over.

    None for a module that manages no parameters itself, and for HSDP.
    """
    param_group = module._get_fsdp_state()._fsdp_param_group
    return None if param_group is None or param_group._is_hsdp else param_group._reduce_scatter_process_group


def current_task() -> Any:
    """Return the current task of this thread, or of the thread that called the backward this thread runs; or None."""
    tls = torch._C
    return tls._get_obj_in_tls(TASK_KEY) if tls._is_key_in_tls(TASK_KEY) else None


def set_current_task(task: object) -> None:
    """Set the current task of this thread, and of the backwards that it calls."""
    before = sys.getrefcount(task)
    torch._C._stash_obj_in_tls(TASK_KEY, task)
    if sys.getrefcount(task) == before:  # PyTorch 2.11 takes no reference to it, and yet releases one
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def clear_current_task() -> None:
    remove = getattr(torch._C, "_remove_obj_from_tls", None)
    if remove is not None:
        remove(TASK_KEY)
    else:  # earlier versions can only replace an object
        set_current_task(None)
