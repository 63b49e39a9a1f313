"""Numbers of partial values are those of the whole, on every rank and at the price of the number."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

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
    "format": lambda x: f"{x.sum():.3f}",
    "not partial": lambda x: x.sum().full_tensor().item(),
}


def read(rank, world_size):
    """By context and reader, with and without inference mode: the difference from a plain tensor's."""
    found = {}
    plain = numbers(7, 6)
    x = place(plain, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    for context, enter in CONTEXTS.items():
        for name, reader in READERS.items():
            for is_inference in (False, True):
                with torch.inference_mode(is_inference), enter():
                    found[context, name, is_inference] = abs(float(reader(x)) - float(reader(plain))) < 1e-5
    return found


def test_numbers_of_parts_are_those_of_the_whole(gang):
    for found in gang(4).run(read):
        assert {key for key, same in found.items() if not same} == set()


def lists(rank, world_size):
    plain = numbers(3, 2)
    x = place(plain, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    with replicate_fallback(warn="error"):
        return x.tolist() == plain.tolist()


def test_lists(gang):
    assert gang(4).run(lists) == [True] * 4


def alone(rank, world_size):
    x = place(numbers(8, 6), init_device_mesh("cpu", (world_size,)), [Shard(0)])
    return x.sum().item()


def test_dtensor_alone_answers_with_parts(gang):
    """Why the layer is there: where this fails, PyTorch has mended it."""
    assert len(set(gang(4).run(alone))) == 4
