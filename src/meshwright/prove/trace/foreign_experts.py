"""Explain wrong outputs of transformers' experts: each is a sum of what experts return for a token, whose weights tell
which of them computed it.

Shapes: n tokens, d features, e experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from meshwright.nn.experts.layer import Experts
from meshwright.prove.judge.tensors import Array
from meshwright.prove.placement import ExpertPlacement
from meshwright.prove.trace.expert_parts import LOST, misrouted
from meshwright.prove.trace.first_difference import LocalValue, Trace
from meshwright.prove.trace.module_parts import FLOAT32
from meshwright.prove.trace.relations import close, token_factors


@torch.no_grad()
def explain_experts(value: LocalValue, trace: Trace, placement: ExpertPlacement) -> str | None:
    """Return the cause of wrong outputs on a rank, or None if it is not recognised."""
    name, experts, x = value.module, trace.module(value.module), trace.at(value, f"input of {value.module}")
    is_stack = any(parameter.startswith(f"{name}.") for parameter in placement.parameters)
    if value.what != "output" or not is_stack or experts is None or isinstance(experts, Experts):
        return None
    if x is None or x.ndim != 2:
        return None
    gate_ed = getattr(trace.module(f"{name.rpartition('.')[0]}.gate"), "weight", None)
    if isinstance(gate_ed, Tensor):
        probability_ne = (torch.from_numpy(x) @ gate_ed.to(torch.float64).T).softmax(-1).numpy()
        if words := _other_normalisation(value, probability_ne):
            return words
    x_nd, num = torch.from_numpy(x), len(next(experts.parameters()))
    one_n1 = torch.ones(len(x), 1, dtype=torch.int64)
    outs_nde = torch.stack([experts(x_nd, e * one_n1, one_n1.to(x_nd.dtype)) for e in range(num)], -1)
    due_ne, found_ne = (_weights(outs_nde, values) for values in (value.expected, value.observed))
    if num > x.shape[1] or not close((outs_nde.numpy() @ found_ne[..., None])[..., 0], value.observed, FLOAT32):
        return None
    tables = _other_weights(due_ne, placement, tp=trace.axes.size("tp"))
    cause = next((cause for cause, table_ne in tables if close(found_ne, table_ne, FLOAT32)), None)
    return cause or _next_experts(due_ne, found_ne, placement)


def _other_normalisation(value: LocalValue, probability_ne: Array) -> str | None:
    """Explain a factor of each token by the sum of its best probabilities."""
    factor_n1 = token_factors(value.observed, value.expected)
    if not close(value.observed, factor_n1 * value.expected):
        return None
    best_ne = np.sort(probability_ne)[:, ::-1].cumsum(-1)
    for num in range(2, best_ne.shape[1] + 1):
        for word, due_n1 in (("not ", best_ne[:, num - 1 : num]), ("", 1 / best_ne[:, num - 1 : num])):
            if close(factor_n1, due_n1, FLOAT32):
                return f"routing weights are {word}normalised over a token's {num} experts"
    return None


def _weights(outs_nde: Tensor, values_nd: Array) -> Array:
    """Return the weights with which outputs of experts add up to values."""
    found: Array = torch.linalg.lstsq(outs_nde, torch.from_numpy(values_nd)[..., None]).solution[..., 0].numpy()
    return found


def _other_weights(due_ne: Array, placement: ExpertPlacement, *, tp: int) -> Iterator[tuple[str, Array]]:
    """Yield what may be wrong, and the weights of each expert then."""
    num = due_ne.shape[1]
    yield "routing weights are applied twice", due_ne**2
    yield "routing weights are not applied", (np.abs(due_ne) > FLOAT32 * np.abs(due_ne).max()).astype(np.float64)
    for cause, other in misrouted(placement):
        yield cause, due_ne[:, np.argsort(other)]
    owners = np.arange(num) // placement.num_local
    for at in range(placement.size if placement.size > 1 else 0):
        held = placement.describe(placement.held(at))
        yield f"rows from ep rank {at} are {LOST}; no outputs of {held}", due_ne * (owners != at)
    if tp > 1 and num % tp == 0:
        first_ne = due_ne.copy()
        own = due_ne.reshape(len(due_ne), tp, -1).sum(-1)
        first_ne[:, :: num // tp] += due_ne.sum(-1, keepdims=True) - own
        words = "each tp rank's first expert also computes the choices of other ranks' experts"
        yield f"{words}, with their routing weights", first_ne


def _next_experts(due_ne: Array, found_ne: Array, placement: ExpertPlacement) -> str | None:
    """Recognise rows of an expert that the one beside it on its rank computes."""
    moved_ne = (found_ne - due_ne).cumsum(-1)  # what each expert hands to the next one, negative
    least = FLOAT32 * np.abs(due_ne).max()
    is_moved = np.abs(moved_ne) > least
    source_ne = np.where(moved_ne < 0, due_ne, np.roll(due_ne, -1, 1))
    ends = np.arange(1, due_ne.shape[1] + 1) % placement.num_local == 0
    if is_moved[:, ends].any() or not (np.abs(np.abs(moved_ne) - source_ne)[is_moved] < least).all():
        return None
    number = int(is_moved.sum(0).max())
    off = "off by one" if number == 1 else f"off by {number}"
    return f"rows at the end of an expert's are computed by the next expert on its rank: numbers of rows are {off}"
