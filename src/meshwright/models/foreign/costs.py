"""Measure what a model's layers and ends save for the backward and compute, each in one forward.

Shapes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.contract.model_facts import Saved
from meshwright.models.foreign import private
from meshwright.models.foreign.origin import Origin

BEFORE, AFTER = "before", "after"
Place = int | str
"""Index of a layer, or an end."""


def count_flops(model: nn.Module, layers: list[nn.Module], seq_len: int, origin: Origin) -> dict[Place, float]:
    """Return the forward operations per token of one sample by place, with scores of all pairs of tokens."""
    found, counter, before = dict[Place, float](), FlopCounterMode(display=False), [0.0]

    def leave(place: Place) -> None:
        total = counter.get_total_flops()
        found[place] = found.get(place, 0.0) + (total - before[0]) / seq_len
        before[0] = total

    with counter:
        _forward(model, layers, seq_len, leave, origin)
    return found


def measure_saved(model: nn.Module, layers: list[nn.Module], seq_len: int, origin: Origin) -> dict[Place, Saved]:
    """Return the elements per token of one sample that a model of bfloat16 saves, by place.

    Elements in bfloat16 are those of the compute dtype; wider ones are computed in float32 whatever the compute dtype.
    A tensor that several layers save, such as a mask, is counted once, where it is saved first.
    """
    found, new = dict[Place, Saved](), [Saved()]
    seen = {private.storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: list[Tensor] = []  # the storage of a tensor that is freed could be that of another

    def pack(tensor: Tensor) -> Tensor:
        if private.storage_id(tensor) not in seen:
            seen.add(private.storage_id(tensor))
            kept.append(tensor)
            new[0] += _saved(tensor, seq_len)
        return tensor

    def leave(place: Place) -> None:
        found[place] = found.get(place, Saved()) + new[0]
        new[0] = Saved()

    with saved_tensors_hooks(pack, lambda tensor: tensor), _FusedAttention():
        _forward(model, layers, seq_len, leave, origin)
    return found


def final_modules(
    model: nn.Module, layers: list[nn.Module], seq_len: int, paths: Iterable[str], origin: Origin
) -> set[str]:
    """Return those of these modules inside layers after which their layer saves nothing: recomputation ends before the
    reduction of their output."""
    found, num_saved, after = set[str](), [0], dict[str, int]()

    def pack(tensor: Tensor) -> Tensor:
        num_saved[0] += 1
        return tensor

    def note(path: str) -> Any:
        return lambda *_: after.update({path: num_saved[0]})

    def leave(place: Place) -> None:
        found.update(path for path, number in after.items() if number == num_saved[0])
        after.clear()

    handles = [model.get_submodule(path).register_forward_hook(note(path)) for path in paths]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        _forward(model, layers, seq_len, leave, origin)
    for handle in handles:
        handle.remove()
    return found


def _forward(
    model: nn.Module, layers: list[nn.Module], seq_len: int, leave: Callable[[Place], None], origin: Origin
) -> None:
    """Run a model on one sample, and call `leave` with each place as its part of the forward ends."""
    ids = torch.zeros((1, seq_len), dtype=torch.long, device=next(model.parameters()).device)
    with _at_layers(layers, leave):
        origin.call(model, ids)
    leave(AFTER)


@contextmanager
def _at_layers(layers: list[nn.Module], leave: Callable[[Place], None]) -> Iterator[None]:
    place: list[Place] = [BEFORE]

    def move(to: Place) -> Any:
        def hook(*_: Any) -> None:
            leave(place[0])
            place[0] = to

        return hook

    handles = [layer.register_forward_pre_hook(move(index)) for index, layer in enumerate(layers)]
    handles.append(layers[-1].register_forward_hook(move(AFTER)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _FusedAttention(TorchFunctionMode):
    """Mode in which attention on the meta device saves what fused kernels do. PyTorch itself would save all scores
    there, as it does on the CPU if keys and values differ in width or the mask is learned."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        return (_attention if func is scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    named: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    is_learned = attn_mask is not None and attn_mask.requires_grad
    if not query.is_meta or query.shape[-1] != value.shape[-1] or is_learned:
        return scaled_dot_product_attention(query, key, value, **named, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        named["attn_mask"] = torch.zeros_like(attn_mask, dtype=query.dtype)  # each call converts its mask
    out: Tensor = private.fused_attention()(query, key, value, **named)[0]
    return out


def _saved(tensor: Tensor, seq_len: int) -> Saved:
    elements = tensor.untyped_storage().nbytes() / tensor.element_size() / seq_len
    if not tensor.is_floating_point():
        return Saved(fixed_bytes=elements * tensor.element_size())
    return Saved(full=elements) if tensor.element_size() <= 2 else Saved(wide_full=elements)


def saved_by_kind(values: Mapping[Place, Saved], layers: list[int]) -> Saved:
    """Return what a layer of a kind saves on average: windows have masks, and the first saves what all share. A layer
    that isn't called saves nothing."""
    parts = [vars(values.get(layer, Saved())) for layer in layers]
    return Saved(**{name: sum(part[name] for part in parts) / len(parts) for name in parts[0]})
