"""Corrected operators on partial values: reading scalars, filling, and lookups."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.operator_context import for_dtensor
from meshwright.reshard.dtensor.redistribute import redistribute
from tests.reshard.placing import numbers, place

F = torch.nn.functional
CONTEXTS = {"for_dtensor": for_dtensor, "replicate_fallback": lambda: replicate_fallback(warn=False)}
READERS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.max()),
    "bool": lambda x: bool((x > -100).all()),
    "is_nonzero": lambda x: x.sum().is_nonzero(),
    "int": lambda x: int((x > 0).sum()),
    "of one row": lambda x: x[:1, :1].item(),
}


def read(rank, world_size):
    """Compare, by context and reader, with and without inference mode, scalars with those of a plain tensor."""
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
    for found in gang(4).run(read, timeout_s=120.0):
        assert {key for key, same in found.items() if not same} == set()


def printed(rank, world_size):
    plain = numbers(3, 2)
    x = place(plain, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    with replicate_fallback(warn="error"):
        return x.tolist() == plain.tolist(), f"{x.sum():.3f}" == f"{plain.sum():.3f}"


def test_what_is_printed(gang):
    assert gang(4).run(printed, timeout_s=120.0) == [(True, True)] * 4


PARTS = {
    "sum": [Partial(), Shard(0)],
    "two sums": [Partial(), Partial()],
    "average": [Partial("avg"), Replicate()],
    "largest": [Shard(1), Partial("max")],
    "product": [Partial("product"), Shard(0)],
    "no parts": [Shard(0), Shard(0)],
}
FILLS = {
    "fill_": lambda x: x.fill_(2.5),
    "a view": lambda x: x[1:3].fill_(2.5),
    "hinge": lambda x: x.copy_(F.hinge_embedding_loss(x, torch.ones_like(x), margin=2.5, reduction="none")),
}


def filled(rank, world_size):
    """Compare, by context, placements and fill, the values with those of a plain tensor."""
    found, mesh = {}, init_device_mesh("cpu", (2, 2))
    for context, enter in CONTEXTS.items():
        for parts, placements in PARTS.items():
            for name, fill in FILLS.items():
                if name == "hinge" and context == "for_dtensor":
                    continue  # it also clamps partial values in place, which takes a gather
                plain = numbers(8, 6).abs()
                x = redistribute(place(plain, mesh, [Replicate()] * 2), placements)
                alias = x.detach()
                with enter():
                    fill(x)
                fill(plain)
                found[context, parts, name] = torch.allclose(alias.full_tensor(), plain, atol=1e-5)
    return found


@pytest.mark.slow
def test_partial_values_are_filled(gang):
    for found in gang(4).run(filled, timeout_s=120.0):
        assert {key for key, same in found.items() if not same} == set()


LOOKUPS = {
    "rows": lambda table, index: F.embedding(index, table),
    "one row": lambda table, index: F.embedding(index[0, 0], table),
    "gather": lambda table, index: torch.gather(table, 0, index[:1] @ index.new_ones(4, 6).long()),
}


def looked_up(rank, world_size):
    """Check, by context and lookup, two live results, each used twice, and the gradient."""
    found, mesh = {}, init_device_mesh("cpu", (world_size,))
    plain = numbers(10, 6).requires_grad_()
    indices = [torch.arange(12).view(3, 4) % n for n in (5, 7)]
    for context, enter in CONTEXTS.items():
        for name, look in LOOKUPS.items():
            table = place(plain.detach(), mesh, [Shard(0)]).requires_grad_()
            plain.grad = None
            with enter():
                pairs = []
                for x in (plain, table):
                    whole = [i if x is plain else place(i, mesh, [Replicate()]) for i in indices]
                    a, b = (look(x, i) for i in whole)
                    total = (a * a + b).sum() + (b * 2).sum()
                    total.backward()
                    pairs.append([t if x is plain else t.full_tensor() for t in (a, b, total, x.grad)])
            found[context, name] = all(torch.allclose(p, q, atol=1e-5) for p, q in zip(*pairs, strict=True))
    return found


@pytest.mark.slow
def test_what_was_looked_up_can_be_used_again(gang):
    for found in gang(4).run(looked_up, timeout_s=120.0):
        assert {key for key, same in found.items() if not same} == set()


def alone(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    parts = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    return place(numbers(8, 6), mesh, [Shard(0)]).sum().item(), parts.fill_(2.0).full_tensor().tolist()


def test_dtensor_alone_gets_them_wrong(gang):
    """Justify the layer: if this fails, PyTorch has fixed the operators."""
    found = gang(4).run(alone, timeout_s=120.0)
    assert len({number for number, _ in found}) == 4
    assert all(values == [8.0, 8.0] for _, values in found)
