"""Operators that DTensor computes incorrectly: correct in the fallback, and still incorrect without it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.torch_version import TorchVersion

from meshwright.dtensor_ops.fallback import CHECKS, is_incorrect, replicate_fallback
from meshwright.dtensor_ops.run_replicated import OpCall
from tests.reshard.placing import numbers, place

F = torch.nn.functional
aten = torch.ops.aten
S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


def gradient(call):
    """Return a function that computes the gradient of `call` with respect to its first input."""

    def of(x, *others):
        x = x.detach().requires_grad_()
        y = call(x, *others)
        y.square().sum().backward()
        return x.grad

    return of


def parts_of_eight_bits(rank, world_size):
    """Multiply with a partial float8 tensor."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, w = (torch.arange(256.0).view(16, 16) % 7).to(torch.float8_e4m3fn), torch.eye(16).to(torch.float8_e4m3fn)
    parts = DTensor.from_local(x if rank == 1 else torch.zeros(16, 16).to(x.dtype), mesh, [P])
    one, other = (place(torch.ones(()), mesh, [R]), DTensor.from_local(w, mesh, [R]).t())
    with replicate_fallback(warn=False):
        y = torch._scaled_mm(parts, other, one, one, out_dtype=torch.float32).full_tensor()
    return torch.equal(y, x.float())


def test_a_product_of_parts_of_eight_bits(gang):
    assert gang(4).run(parts_of_eight_bits, timeout_s=120.0) == [True] * 4


CASES = {
    "kernel cut": ("convolution.default", F.conv1d, (numbers(4, 3, 9), S0), (numbers(8, 3, 3, seed=1), S0)),
    "channels cut": ("convolution.default", F.conv1d, (numbers(4, 8, 9), S1), (numbers(6, 8, 3, seed=1), R)),
    "image cut": ("convolution.default", F.conv2d, (numbers(2, 3, 8, 8), Shard(3)), (numbers(4, 3, 1, 1, seed=1), R)),
    "image cut, gradient": (
        "convolution_backward.default", gradient(lambda x, w: F.conv2d(x, w, padding=1)),
        (numbers(2, 3, 8, 8), Shard(2)), (numbers(4, 3, 3, 3, seed=1), R),
    ),
    "bias cut": (
        "convolution.default", F.conv1d, (numbers(4, 3, 9), R), (numbers(8, 3, 3, seed=1), R), (numbers(8), S0)
    ),
    "kernel cut, gradient": (
        "convolution_backward.default", gradient(F.conv1d), (numbers(4, 3, 9), S0), (numbers(8, 3, 3, seed=1), S0)
    ),
    "partial, gradient": (
        "convolution_backward.default", gradient(F.conv1d), (numbers(4, 3, 9), P), (numbers(8, 3, 3, seed=1), R)
    ),
    "squeezed": ("squeeze_copy.default", torch.squeeze_copy, (numbers(4, 5), S0)),
    "squeezed dim": ("squeeze_copy.dim", lambda x: torch.squeeze_copy(x, 0), (numbers(4, 5), S0)),
    "squeezed dims": ("squeeze_copy.dims", lambda x: torch.squeeze_copy(x, (0, 1)), (numbers(4, 5), S0)),
    "equal shapes": ("equal.default", torch.equal, (numbers(5, 1), S1), (numbers(5), R)),
    "det": ("_linalg_det.default", gradient(torch.linalg.det), (numbers(4, 4).t(), S0)),
    "slogdet": ("_linalg_slogdet.default", gradient(lambda x: torch.linalg.slogdet(x)[1]), (numbers(4, 4).t(), S0)),
    "pooling without a batch": (
        "_adaptive_avg_pool2d_backward.default", gradient(lambda x: F.adaptive_avg_pool2d(x, (5, 5))),
        (numbers(8, 4, 3), S1),
    ),
    "group norm, gradient": (
        "native_group_norm_backward.default", gradient(lambda x, w: F.group_norm(x, 2, w)),
        (numbers(4, 8, 3), S1), (numbers(8, seed=1), S0),
    ),
    "to eight bits": ("_to_copy.default", lambda x: x.to(torch.float8_e4m3fn).float(), (numbers(8, 6) / 256, P)),
    "view of nothing": ("view.default", lambda x: x.view(2, 0, 3), (numbers(6, 0), S0)),
    "reshaped nothing": ("_unsafe_view.default", lambda x: aten._unsafe_view(x, (0, 3, 2)), (numbers(6, 0), S0)),
    "complex number": ("", lambda x: aten.mul.Scalar(x, 1j), (numbers(8, 6), S0)),
    "wrong shape of a piece": ("", torch.addmv, (numbers(1), S0), (numbers(5, 10), S0), (numbers(10), S0)),
    "vector and matrix": ("", lambda x, w: (x @ w) * 1, (numbers(10), S0), (numbers(10, 5), S0)),
    "smallest of nothing": ("", lambda x: torch.aminmax(x, dim=0)[0], (numbers(5, 0, 5), S0)),
}  # fmt: skip
"""By problem: the operator in `CHECKS`, a call of it, and its inputs with their placements."""
WRONG_ALONE = ("kernel cut", "image cut", "partial, gradient", "det", "slogdet", "complex number")
"""Cases that DTensor alone computes incorrectly, or raises for, without leaving other ranks hanging."""


def outcome(call, inputs, context, mesh):
    """Return True if a call gives the same result on DTensors and plain tensors, or the name of its exception."""
    expected = call(*(x for x, _ in inputs))
    try:
        with context:
            got = call(*(place(x, mesh, [p]) for x, p in inputs))
            got = got.full_tensor() if isinstance(got, DTensor) else got
    except Exception as error:
        return type(error).__name__
    if not isinstance(expected, torch.Tensor):
        return abs(got - expected) < 1e-5
    return got.shape == expected.shape and torch.allclose(got, expected, atol=1e-5)


def within(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        name: outcome(call, inputs, replicate_fallback(warn=False), mesh) for name, (_, call, *inputs) in CASES.items()
    }


@pytest.mark.slow
def test_they_are_right_in_the_fallback(gang):
    for found in gang(4).run(within, timeout_s=120.0):
        assert found == dict.fromkeys(CASES, True)


def test_each_check_has_a_case():
    assert {f"aten.{operator}" for operator, *_ in CASES.values() if operator} | {
        "aten.reshape.default",  # as `view`, in inference mode
    } == set(CHECKS)  # fmt: skip


def alone(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    return {name: outcome(CASES[name][1], CASES[name][2:], nullcontext(), mesh) for name in WRONG_ALONE}


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="lists operators that are incorrect in 2.13")
def test_dtensor_alone_gets_them_wrong(gang):
    """Justify the checks: if this fails, PyTorch has fixed one of the operators."""
    results = gang(4).run(alone, timeout_s=120.0)
    assert [name for name in WRONG_ALONE if all(found[name] is True for found in results)] == []


def test_what_draws_by_itself_is_seen_before_it_runs():
    x = torch.empty(2, device="meta")
    attention = aten._scaled_dot_product_flash_attention.default
    assert not is_incorrect(OpCall(attention, (x, x, x)))
    assert not is_incorrect(OpCall(attention, (x, x, x, 0.0)))
    assert is_incorrect(OpCall(attention, (x, x, x, 0.1)))
    assert is_incorrect(OpCall(attention, (x, x, x), {"dropout_p": 0.1}))
    assert is_incorrect(OpCall(aten.multinomial.default, (x, 1)))
    assert not is_incorrect(OpCall(aten.native_dropout.default, (x, 0.5, True))), "DTensor sees to it"
