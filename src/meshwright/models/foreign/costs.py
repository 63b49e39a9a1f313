"""Measure what a model's layers and ends save for the backward and compute, in one forward.

Shapes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.contract.model_facts import Saved
from meshwright.models.foreign import private
from meshwright.models.foreign.origin import Origin

BEFORE, AFTER = "before", "after"


class Costs:
    """Saved elements and forward operations per token, by layer index or end."""

    def __init__(self) -> None:
        self.saved: dict[int | str, Saved] = {}
        self.flops: dict[int | str, float] = {}


def measure_costs(model: nn.Module, layers: list[nn.Module], seq_len: int, origin: Origin) -> Costs:
    """Run a model of bfloat16 on one sample of `seq_len` tokens.

    Elements in bfloat16 are those of the compute dtype; wider ones are computed in float32 whatever the compute dtype.
    A tensor that several layers save, such as a mask, is counted once, where it is saved first.
    """
    found, place = Costs(), list[int | str]([BEFORE])
    counter = FlopCounterMode(display=False)
    seen, flops = {private.storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}, [0.0]

    def pack(tensor: Tensor) -> Tensor:
        if private.storage_id(tensor) not in seen:
            seen.add(private.storage_id(tensor))
            found.saved[place[0]] = found.saved.get(place[0], Saved()) + _saved(tensor, seq_len)
        return tensor

    def move(to: int | str) -> None:
        found.flops[place[0]] = found.flops.get(place[0], 0.0) + (counter.get_total_flops() - flops[0]) / seq_len
        place[0], flops[0] = to, counter.get_total_flops()

    ids = torch.zeros((1, seq_len), dtype=torch.long, device=next(model.parameters()).device)
    with _at_layers(layers, move), saved_tensors_hooks(pack, lambda tensor: tensor), counter:
        origin.call(model, ids)
        move(AFTER)
    return found


@contextmanager
def _at_layers(layers: list[nn.Module], move: Any) -> Iterator[None]:
    """Call `move` with each layer's index as it starts, and with the end after the last layer."""

    def start(index: int) -> Any:
        return lambda *_: move(index)

    handles = [layer.register_forward_pre_hook(start(index)) for index, layer in enumerate(layers)]
    handles.append(layers[-1].register_forward_hook(lambda *_: move(AFTER)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _saved(tensor: Tensor, seq_len: int) -> Saved:
    elements = tensor.untyped_storage().nbytes() / tensor.element_size() / seq_len
    if not tensor.is_floating_point():
        return Saved(fixed_bytes=elements * tensor.element_size())
    return Saved(full=elements) if tensor.element_size() <= 2 else Saved(wide_full=elements)


def saved_by_kind(values: Mapping[int | str, Saved], layers: list[int]) -> Saved:
    """Return what a layer of a kind saves, as the last of them does: the first also saves what all share."""
    return values.get(layers[-1], Saved())
