"""Restore what warm-up and capturing change: gradients, random number generators, buffers, step handles, amaxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.capture.run.call import flatten
from meshwright.nn.deferred_weight_gradients import WeightGradStore
from meshwright.nn.step_handles import StepHandle


@contextmanager
def unchanged(modules: Iterable[nn.Module], stores: Iterable[WeightGradStore] = ()) -> Iterator[None]:
    """Context that leaves no trace in modules and generators, however it ends.

    Gradients, values of buffers and of other tensors that modules hold in plain objects (such as the amax of float8
    layers), what step handles got, deferred weight gradients, and the state of the CPU's and the devices' random number
    generators are put back. Gradients are set aside, not copied.
    """
    modules, stores = list(modules), list(stores)
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    tensors = {id(t): t for module in modules for one in module.modules() for t in _held(one)}.values()
    handles = {id(h): h for module in modules for h in module.modules() if isinstance(h, StepHandle)}.values()
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    contributions = [(handle, handle.take_contribution()) for handle in handles]
    deferred = [(store, store.take()) for store in stores]
    generators = _generator_states()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in values:
                tensor.detach().copy_(value)
        for handle, contribution in contributions:
            handle.take_contribution()
            if contribution is not None:
                handle.add_contribution(contribution)
        for store, entries in deferred:
            store.take()
            store.defers = False
            for entry in entries:
                store.put(entry.parameter, entry.compute, *entry.tensors)
        _restore_generators(generators)


def _held(module: nn.Module) -> list[Tensor]:
    """Return the tensors that a module itself holds, except parameters."""
    return [one for one in flatten(dict(vars(module)))[1] if not isinstance(one, nn.Parameter)]


def _generator_states() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _restore_generators(states: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
