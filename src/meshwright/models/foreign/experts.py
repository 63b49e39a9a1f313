"""Experts of a foreign model: what their calls show of them, and whether rows may be computed apart from each other.

Expert parallelism gives a module's own function the rows of a rank's experts (`nn/experts/dispatched.py`). In a small
model, two ranks in turn must compute what the module computes for all tokens, with the same gradients.

Shapes: n tokens, k experts per token, d model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.models.contract.model_facts import BufferFacts, ExpertFacts, Part
from meshwright.models.foreign.origin import ForeignModel
from meshwright.models.foreign.packing import Float64Mode, float64_model, random_tokens
from meshwright.models.foreign.structure import Structure
from meshwright.nn.experts.dispatched import count_tokens, dispatch_tokens
from meshwright.nn.experts.layer import LocalDispatcher

TOLERANCE = 1e-12
INPUTS = 3
"""Inputs of experts: tokens [n, d], the indices of each token's experts, and their weights [n, k]."""
Call = tuple[Any, ...]


@contextmanager
def noted_calls(model: nn.Module, paths: Iterable[str]) -> Iterator[dict[str, Call]]:
    """Yield the inputs by which modules of a model are called last while the context lasts."""
    found = dict[str, Call]()

    def note(path: str) -> Any:
        return lambda module, args: found.update({path: args})

    handles = [model.get_submodule(path).register_forward_pre_hook(note(path)) for path in paths]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def expert_facts(model: nn.Module, layers_path: str, calls: Mapping[str, Call]) -> tuple[dict[int, ExpertFacts], str]:
    """Return the experts of each layer that has some, and why tokens can't be sent to them; empty if they can."""
    found = dict[int, ExpertFacts]()
    for path, call in calls.items():
        layer, _, inside = path.removeprefix(f"{layers_path}.").partition(".")
        if not (path.startswith(f"{layers_path}.") and layer.isdigit() and inside):
            return {}, f"{path} is outside the layers"
        if int(layer) in found:
            return {}, f"{path} is the second module of experts in its layer"
        shapes = [[*x.shape] if isinstance(x, Tensor) else [] for x in call]
        if len(shapes) != INPUTS or len(shapes[0]) != 2 or shapes[1] != shapes[2] or shapes[1][:-1] != shapes[0][:1]:
            return {}, f"{path} takes {shapes}, not tokens [n, d], the indices of their experts [n, k], and weights"
        num_experts = next(model.get_submodule(path).parameters()).shape[0]
        found[int(layer)] = ExpertFacts(inside, inside, num_experts, shapes[1][1], shapes[0][1])
    return found, ""


def load_facts(experts: ExpertFacts) -> BufferFacts:
    """Return the counter of tokens that a layer's experts get."""
    shape = (experts.num_experts,)
    return BufferFacts(f"{experts.module}.load.value", shape, "int64", saved=False, updated=True, load=True)


def prepare_experts(model: nn.Module, structure: Structure, part: Part, *, ep: int) -> None:
    """Let the experts of a stage's layers count their tokens and, with ranks of ep, dispatch them, in place."""
    by_name = {block.name: block.experts for block in structure.blocks}
    for layer in part.layers:
        if (facts := by_name[structure.layers[layer]]) is not None:
            module = model.get_submodule(f"{structure.layers_path}.{layer}.{facts.module}")
            count_tokens(module, facts.num_experts)
            if ep > 1:
                dispatch_tokens(module)


def why_not_dispatched(small: ForeignModel, *, length: int) -> str:
    """Return why ranks would compute other values than a small model's modules of experts, or an empty string."""
    model = float64_model(small)
    try:
        with noted_calls(model, small.stacked_experts(model)) as calls, torch.no_grad(), Float64Mode():
            small.call(model, random_tokens(length))
        if not calls:
            return "no experts are called in a small model, to try it"
        for path, call in calls.items():
            whole, sent = _whole_and_sent(model.get_submodule(path), call)
            if error := max(_error(a, b) for a, b in zip(sent, whole, strict=True)):
                what = f"what {path} computes for tokens is not the sum of what it computes for each of their experts"
                return f"{what} (relative error {error:.1e})"
    except Exception as error:  # whatever their functions raise for few tokens
        return f"experts fail for some of the tokens: {type(error).__name__}: {str(error)[:150]}"
    return ""


def _whole_and_sent(module: nn.Module, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a module computes for tokens, with its gradients, and the same by ranks that hold a part of it."""
    x_nd, experts_nk, weights_nk = call
    x_nd, weights_nk = x_nd.clone().requires_grad_(), weights_nk.clone().requires_grad_()
    gradient = torch.randn(x_nd.shape, generator=torch.Generator().manual_seed(0), dtype=x_nd.dtype)
    parameters = dict(module.named_parameters())

    def with_gradients(out_nd: Tensor) -> list[Tensor]:
        inputs = [x_nd, weights_nk, *parameters.values()]
        return [out_nd, *torch.autograd.grad(out_nd, inputs, gradient)]

    with Float64Mode():
        whole = with_gradients(module(x_nd, experts_nk, weights_nk))
        dispatch_tokens(module)
        num_experts = len(next(iter(parameters.values())))
        num_local = num_experts // 2 if num_experts % 2 == 0 else 1
        cast("Any", module).dispatcher = LocalDispatcher(num_local)
        out_nd = torch.zeros_like(x_nd)
        for first in range(0, num_experts, num_local):
            own = {name: parameter[first : first + num_local] for name, parameter in parameters.items()}
            is_local = (experts_nk >= first) & (experts_nk < first + num_local)
            local_nk = torch.where(is_local, experts_nk - first, num_local)
            out_nd = out_nd + functional_call(module, own, (x_nd, local_nk, weights_nk))
        return whole, with_gradients(out_nd)


def _error(found: Tensor, due: Tensor) -> float:
    """Return the largest difference relative to the largest value, or 0 within rounding."""
    found, due = found.detach(), due.detach()
    error = float((found - due).abs().max()) / max(1.0, float(due.abs().max()))
    return error if not error <= TOLERANCE else 0.0
