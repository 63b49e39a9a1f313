"""PyTorch's own samples of operators that trainings use: one of each, laid out in several ways, with gradients."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright_bench.operators.sweep import RandomnessDetector
from meshwright_bench.private import operators, tree_leaves, tree_map_only

GROUPS = {
    "losses": (
        "nn.functional.mse_loss", "nn.functional.cross_entropy", "nn.functional.nll_loss", "nn.functional.huber_loss",
        "nn.functional.smooth_l1_loss", "nn.functional.binary_cross_entropy_with_logits", "nn.functional.kl_div",
        "nn.functional.binary_cross_entropy", "nn.functional.hinge_embedding_loss", "nn.functional.soft_margin_loss",
        "nn.functional.cosine_embedding_loss",
    ),
    "layers": (
        "nn.functional.linear", "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d",
        "nn.functional.embedding", "nn.functional.layer_norm", "nn.functional.rms_norm", "nn.functional.group_norm",
        "nn.functional.gelu", "nn.functional.silu", "nn.functional.softplus", "nn.functional.avg_pool2d",
        "nn.functional.adaptive_avg_pool2d", "nn.functional.scaled_dot_product_attention",
    ),
    "sums and products": (
        "matmul", "addmm", "addmv", "bmm", "einsum", "sum", "mean", "var", "std", "norm", "cumsum",
        "softmax", "log_softmax", "linalg.det", "linalg.vector_norm", "prod", "quantile", "amax", "aminmax",
    ),
    "places": (
        "gather", "scatter", "scatter_add", "scatter_reduce.sum", "scatter_reduce.mean", "index_add", "index_copy",
        "index_put", "index_select", "take_along_dim", "sort", "topk", "cat", "stack", "split", "chunk", "squeeze",
        "unsqueeze", "view", "reshape", "unflatten", "transpose", "permute", "narrow", "masked_fill", "masked_select",
        "where", "flip", "roll", "tril", "nn.functional.pad.constant", "nn.functional.pad.reflect", "unfold", "expand",
    ),
}  # fmt: skip
LAID = {
    "second dim": lambda number, x: Shard(min(1, x.dim() - 1)),
    "first tensor": lambda number, x: Shard(0) if number == 0 else Replicate(),
    "other tensors": lambda number, x: Replicate() if number == 0 else Shard(0),
    "parts": lambda number, x: Partial() if number == 0 and x.is_floating_point() else Replicate(),
}
"""Besides all along the first dim, as the benchmark of operators lays them."""
OF_SEVERAL = {"first tensor", "other tensors"}


def seed():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def sample_of(entry):
    seed()
    first = next(iter(entry.sample_inputs_func(entry, "cpu", torch.float32, False)))
    return first.input, first.args, first.kwargs


def laid(inputs, way, mesh):
    """The tensors as DTensors, each one once."""
    numbers = {}

    def of(x):
        number = numbers.setdefault(id(x), len(numbers))
        placement = LAID[way](number, x) if x.dim() else Replicate()
        whole = DTensor.from_local(x.detach().clone(), mesh, [Replicate()], run_check=False)
        if placement.is_partial():
            own = x.detach() / mesh.size()
            return DTensor.from_local(own, mesh, [placement], run_check=False, shape=x.shape, stride=x.stride())
        return whole.redistribute(placements=[placement])

    return tree_map_only(Tensor, of, inputs)


def results(entry, inputs, num_gradients):
    """What an operator returns, and gradients of a sum of it for the first so many tensors."""
    floats = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
    for x in floats[:num_gradients]:
        x.requires_grad_()
    seed()
    first, args, kwargs = inputs
    out = entry(first, *args, **kwargs)
    found = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    into = [x for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.requires_grad]
    total = sum((x * weights(x)).sum() for x in found if x.requires_grad and x.is_floating_point())
    gradients = torch.autograd.grad(total, into, allow_unused=True) if isinstance(total, Tensor) else ()
    return [*found, *(x for x in gradients if x is not None)]


def weights(x):
    """Different ones for neighbours, so that a gradient that goes elsewhere shows."""
    plain = (torch.arange(x.numel()) % 7 - 2.5).view(x.shape)
    if not isinstance(x, DTensor):
        return plain
    return DTensor.from_local(plain, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)


def expected_of(entry, inputs):
    """The same for plain tensors, with as many gradients as the operator has; None if it draws random numbers."""
    for num_gradients in (9, 1, 0):
        try:
            with RandomnessDetector() as draws:
                found = results(entry, tree_map_only(Tensor, Tensor.clone, inputs), num_gradients)
        except RuntimeError:
            if not num_gradients:
                raise
        else:
            return None if draws.seen else (found, num_gradients)
    return None


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def by_operator(rank, world_size, names):
    """By operator and way to lay its first sample: what differs from plain tensors."""
    warnings.simplefilter("ignore")
    mesh, found, count = init_device_mesh("cpu", (world_size,)), {}, 0
    entries = {f"{e.name}.{e.variant_test_name}".rstrip("."): e for e in operators()}
    for name in names:
        inputs = sample_of(entries[name])
        of_plain = expected_of(entries[name], inputs)
        if of_plain is None:
            continue
        expected, num_gradients = of_plain
        shapes = [tuple(x.shape) for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        for way in LAID:
            if len(shapes) == 1 and way in OF_SEVERAL:
                continue
            with replicate_fallback(warn=False):
                got = [whole(x) for x in results(entries[name], laid(inputs, way, mesh), num_gradients)]
            count += 1
            close = len(got) == len(expected) and all(
                torch.allclose(a, b, atol=1e-4, rtol=1e-4, equal_nan=True) for a, b in zip(got, expected, strict=True)
            )
            if not close:
                found[name, way] = shapes
    return found, count


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_samples_are_right_with_their_gradients(gang, group):
    for found, count in gang(3).run(by_operator, GROUPS[group], timeout_s=400.0):
        assert found == {} and count >= 2 * len(GROUPS[group])
