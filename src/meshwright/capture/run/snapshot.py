"""Restore what warm-up and capturing change: gradients, random number generators, buffers, step handles, amaxes."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
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


def host_state(module: nn.Module) -> Any:
    """Return a template of what the forwards of a module may keep on the host, which a graph has baked in.

    That are attributes, variables of the class, of closures and of the file that a forward names, and the state of
    Python's and NumPy's random number generators.
    """
    found: dict[str, Any] = {
        "Python's random numbers": hash(random.getstate()),
        "NumPy's random numbers": repr(list(np.random.get_state())[2:]),
    }
    for name, one in module.named_modules():
        forward = inspect.unwrap(type(one).forward)
        variables = inspect.getclosurevars(forward) if inspect.isfunction(forward) else None
        named = {} if variables is None else {**variables.globals, **variables.nonlocals}
        plain = {k: v for k, v in {**vars(type(one)), **named}.items() if isinstance(v, _PLAIN)}
        found[name] = _by_value(plain) | _by_value(vars(one))
    return flatten(found)[0]


_PLAIN = (bool, int, float, complex, str, tuple, list, dict, set, deque, count)


def _by_value(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace containers that a template would hold by identity by their text."""
    unseen = (set, deque, count, dict)
    return {k: repr(v) if isinstance(v, unseen) and type(v) is not dict else v for k, v in values.items()}


def _held(module: nn.Module) -> list[Tensor]:
    """Return the tensors that a module itself holds, except parameters."""
    return [one for one in flatten(dict(vars(module)))[1] if not isinstance(one, nn.Parameter)]


def _generator_states() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _restore_generators(states: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
