"""Bytes that stay alive between the forward and the backward of a block, of whatever keeps them alive."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright_bench.private import TorchDispatchMode, tree_leaves

LOOK_S, QUIET_LOOKS = 0.002, 25
"""Time between looks at what is alive, and how many in a row find the same where nothing is let go any more."""


class _NewStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Weak references to the storages that operators create, and to those that they take."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, _Seen] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on plain tensors, and record what it creates."""
        own = [one for one in types if one.__torch_dispatch__ is not Tensor.__torch_dispatch__]
        if any(hasattr(one, "__tensor_flatten__") for one in own):
            return NotImplemented
        if own:
            return func(*args, **(kwargs or {}))  # fake tensors
        for x in _plain((args, kwargs)):
            self._record(x, is_new=False)
        out = func(*args, **(kwargs or {}))
        for x in _plain(out):
            self._record(x, is_new=True)
        return out

    def _record(self, x: Tensor, *, is_new: bool) -> None:
        """Record a storage unless it is known. Addresses of data don't tell: FSDP2 resizes storages that stay alive."""
        storage = x.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._seen.setdefault(reference.cdata, _Seen(reference, storage.nbytes(), is_new))

    def alive(self) -> int:
        """Return the bytes of the new storages that are alive."""
        return sum(seen.num_bytes for seen in self._seen.values() if seen.is_new and not seen.is_freed())


class _Seen(NamedTuple):
    reference: StorageWeakRef
    num_bytes: int
    is_new: bool

    def is_freed(self) -> bool:
        """Return True if no tensor has the storage any more."""
        return bool(self.reference.expired())  # type: ignore[no-untyped-call]


def _plain(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if type(x) in (Tensor, nn.Parameter)]


def live_bytes(block: Callable[..., Any], inputs: tuple[Any, ...]) -> int:
    """Return the bytes that a forward of `block` leaves for its backward, including its first input.

    Parameters and other inputs, which blocks share, are not counted, nor is the output.
    """
    detached = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    first = detached[0].requires_grad_()
    with _NewStorages() as storages:
        x = first.clone()  # counted if the block keeps it
        out = block(x, *detached[1:])
    graph = out.grad_fn
    del x, out
    gc.collect()
    found = _settled(storages)
    assert graph is not None, "the block's backward has something to do"
    return found


def _settled(storages: _NewStorages) -> int:
    """Return the bytes that stay alive: gloo's threads keep a collective's buffers a moment longer."""
    found, repeats = storages.alive(), 0
    while repeats < QUIET_LOOKS:  # nothing is made meanwhile, so they only become fewer
        time.sleep(LOOK_S)
        now = storages.alive()
        found, repeats = now, repeats + 1 if now == found else 0
    return found


def inputs_of_last_block(module: nn.Module, *inputs: Any, blocks: str = "blocks") -> tuple[Any, tuple[Any, ...]]:
    """Return the last of a stage's `blocks`, and what a forward of the stage passes to it by position."""
    *_, block = module.get_submodule(blocks).children()
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = block.register_forward_pre_hook(lambda _, *passed: seen.append(passed), with_kwargs=True)
    with torch.no_grad():
        module(*inputs)
    hook.remove()
    args, named = seen[0]
    return functools.partial(block, **named) if named else block, args
