"""Operators on partial values that are done another way: numbers, and what is taken from a number."""

from __future__ import annotations

from itertools import product

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshwright.reshard.dtensor import for_dtensor
from meshwright.reshard.fallback import replicate_fallback
from tests.reshard.placing import numbers, place

CONTEXTS = {"for_dtensor": for_dtensor, "replicate_fallback": lambda: replicate_fallback(warn="error")}
READERS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.max()),
    "bool": lambda x: bool((x > -100).all()),
    "is_nonzero": lambda x: x.sum().is_nonzero(),
    "int": lambda x: int((x > 0).sum()),
    "of one row": lambda x: x[:1, :1].item(),
}


def read(rank, world_size):
    """By context and reader, with and without inference mode: the difference from a plain tensor's."""
    found = {}
    plain = numbers(7, 6)
    x = place(plain, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    for context, enter in CONTEXTS.items():
        for name, reader in READERS.items():
            for is_inference in {False, name != "of one row"}:  # PyTorch views no DTensor made outside inference mode
                with torch.inference_mode(is_inference), enter():
                    found[context, name, is_inference] = abs(float(reader(x)) - float(reader(plain))) < 1e-5
    return found


def test_numbers_of_parts_are_those_of_the_whole(gang):
    for found in gang(4).run(read):
        assert {key for key, same in found.items() if not same} == set()


def printed(rank, world_size):
    plain = numbers(3, 2)
    x = place(plain, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    with replicate_fallback(warn="error"):
        return x.tolist() == plain.tolist(), f"{x.sum():.3f}" == f"{plain.sum():.3f}"


def test_what_is_printed(gang):
    assert gang(4).run(printed) == [(True, True)] * 4


DIFFERENCES = {
    "1 - x": lambda x, y: 1 - x,
    "rsub of numbers": lambda x, y: torch.rsub(x, 2.5, alpha=3),
    "rsub": lambda x, y: torch.ops.aten.rsub.Tensor(x, y),
    "rsub, alpha": lambda x, y: torch.ops.aten.rsub.Tensor(x, y, alpha=2),
    "integers": lambda x, y: 1 - (x > 0).sum(0),
}


def differences(rank, world_size):
    found = {}
    mesh = init_device_mesh("cpu", (world_size,))
    x, y = numbers(8, 6), numbers(8, 6, seed=1)
    for context, enter in CONTEXTS.items():
        for placements in product((Partial(), Shard(0), Replicate()), repeat=2):
            placed = [place(t, mesh, [p]) for t, p in zip((x, y), placements, strict=True)]
            for name, call in DIFFERENCES.items():
                with enter():
                    got = call(*placed)
                found[context, name, *map(str, placements)] = torch.allclose(got.full_tensor(), call(x, y), atol=1e-5)
    return found


def test_differences_are_those_of_the_whole(gang):
    for found in gang(4).run(differences, timeout_s=60.0):
        assert {key for key, same in found.items() if not same} == set()


def alone(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    ones = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    return place(numbers(8, 6), mesh, [Shard(0)]).sum().item(), (1 - ones).full_tensor().tolist()


def test_dtensor_alone_answers_with_parts(gang):
    """Why the layer is there: where this fails, PyTorch has mended it."""
    found = gang(4).run(alone)
    assert len({number for number, _ in found}) == 4
    assert all(difference == [0.0, 0.0] for _, difference in found), "and not -3"
