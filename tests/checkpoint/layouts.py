"""Layouts that the store's tests save from and load onto, and tensors laid out on them.

Every body here runs in a gang. What a tensor must hold is made by `distribute_tensor` or by `fully_shard` from the
full values, so it does not depend on the arithmetic of offsets that is under test.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshwright.checkpoint import save_load
from meshwright.errors import CheckpointError

SHAPES = {
    "model.even": (8, 4),
    "model.uneven": (7, 5),
    "model.short": (3,),
    "model.single": (1, 6),
    "model.empty": (0, 3),
    "model.deep": (4, 3, 5),
    "optimizer.step": (),
}


@dataclass(frozen=True)
class MeshLayout:
    """A mesh, and for each of its axes the tensor dim that it divides (None: replicas)."""

    mesh: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def num_ranks(self):
        return torch.Size(self.mesh).numel()

    def __str__(self):
        kinds = ("copies" if dim is None else f"dim{dim}" for dim in self.dims)
        return "x".join(f"{size}{kind}" for size, kind in zip(self.mesh, kinds, strict=True))


ALONE = MeshLayout((1,), (None,))
LAYOUTS = (
    ALONE,
    MeshLayout((2,), (0,)),
    MeshLayout((4,), (0,)),
    MeshLayout((2, 2), (None, 0)),
    MeshLayout((2, 2), (0, 1)),
    MeshLayout((2, 2), (0, 0)),
    MeshLayout((2, 1, 2), (None, 0, 1)),
)


def values(dtype=torch.float32, seed=1):
    """The full tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def lay_out(full, layout):
    """The full tensors as DTensors on the layout; scalars, which no axis can divide, stay plain."""
    mesh = init_device_mesh("cpu", layout.mesh, mesh_dim_names=tuple("abc"[: len(layout.mesh)]))
    laid_out = {}
    for name, tensor in full.items():
        dims = [Replicate() if dim is None or dim >= tensor.dim() else Shard(dim) for dim in layout.dims]
        laid_out[name] = distribute_tensor(tensor, mesh, dims) if tensor.dim() else tensor.clone()
    return laid_out


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_laid_out(rank, world_size, root, layout, step=1):
    return save_load.save(root, step, lay_out(values(), layout), model={}, run={}, keep=9)


def load_laid_out(rank, world_size, path, layout):
    """Names of the tensors that are not what they should be after a load onto `layout`."""
    wanted = lay_out(values(), layout)
    found = {name: torch.full_like(tensor, float("nan")) for name, tensor in wanted.items()}
    save_load.load(path, found)
    return [name for name in wanted if not torch.equal(local(found[name]), local(wanted[name]))]


class Block(nn.Module):
    """Two matrices that tensor parallel divides by rows and by columns, and a norm that it leaves whole."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6, bias=True)
        self.norm = nn.RMSNorm(6)


def build_block(dp_replicate, dp_shard, tp, seed):
    """A block with FSDP2 (HSDP when replicated) around tensor parallel, its parameters random by `seed`."""
    torch.manual_seed(seed)
    block = Block()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    mesh = init_device_mesh("cpu", (dp_replicate, dp_shard, tp), mesh_dim_names=("replicate", "shard", "tp"))
    if tp > 1:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["replicate", "shard"] if dp_replicate > 1 else mesh["shard"])
    return block


def full_block(seed):
    """The values of `build_block`'s parameters."""
    torch.manual_seed(seed)
    block = Block()
    with torch.no_grad():
        return {name: parameter.normal_().clone() for name, parameter in block.named_parameters()}


def save_block(rank, world_size, root, degrees):
    block = build_block(*degrees, seed=1)
    return save_load.save(root, 1, dict(block.named_parameters()), model={}, run={}, keep=9)


def load_block(rank, world_size, path, degrees):
    """Names of the parameters that are not what they should be after a load, and whether they are the same objects."""
    wanted = dict(build_block(*degrees, seed=1).named_parameters())
    block = build_block(*degrees, seed=2)
    before = dict(block.named_parameters())
    save_load.load(path, before)
    same = all(before[name] is parameter for name, parameter in block.named_parameters())
    return [name for name in wanted if not torch.equal(local(before[name]), local(wanted[name]))], same


def save_replicas(rank, world_size, root):
    """Many plain tensors, the same on all ranks, and one that only rank 1 has."""
    tensors = {f"w{i}": torch.full((100,), float(i)) for i in range(16)}
    if rank == 1:
        tensors["only.here"] = torch.arange(3)
    return save_load.save(root, 1, tensors, model={}, run={}, keep=1)


def save_shard_like_name(rank, world_size, root):
    """A tensor by rows, and on rank 0 one with the name that its first row has in the file."""
    mesh = init_device_mesh("cpu", (world_size,))
    w = distribute_tensor(torch.randn(2, 2, generator=torch.Generator().manual_seed(0)), mesh, [Shard(0)])
    try:
        tensors = {"w": w} | ({"w[0:1,0:2]": torch.ones(3)} if rank == 0 else {})
        save_load.save(root, 1, tensors, model={}, run={}, keep=1)
    except CheckpointError as error:
        return error.what
    return None


def save_different_replicas(rank, world_size, root):
    """Save replicas that are equal, and replicas of which one bit differs, or the order; returns the warnings."""
    mesh = init_device_mesh("cpu", (world_size,))
    same = {"a": torch.arange(5.0), "b": torch.full((3, 4), float("nan")), "none": torch.zeros(0, 3)}
    other = {"a": torch.arange(5.0), "b": torch.zeros(3, 4), "c": torch.tensor([1, 2]), "d": torch.ones(3)}
    if rank == 1:
        other |= {"b": -torch.zeros(3, 4), "c": torch.tensor([2, 1]), "d": torch.tensor([1, 1, 1 + 2**-20])}
    other["d"] = DTensor.from_local(other["d"], mesh, [Replicate()], run_check=False)
    found = []
    for tensors in (same, other):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
        logging.getLogger("meshwright").addHandler(handler)
        save_load.save(root, 1, tensors, model={}, run={}, keep=1)
        logging.getLogger("meshwright").removeHandler(handler)
        found.append(lines)
    return found


def save_short(rank, world_size, root):
    """A tensor of fewer elements than ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    w = distribute_tensor(torch.arange(3), mesh, [Shard(0)])
    return save_load.save(root, 1, {"w": w}, model={}, run={}, keep=1)


def save_on_subgroup(rank, world_size, root):
    """Ranks 1 and 2 save without the others."""
    group = dist.new_group([1, 2])
    if rank not in (1, 2):
        return None
    path = save_load.save(root, 1, {"w": torch.arange(4)}, model={}, run={}, keep=1, group=group)
    found = {"w": torch.zeros(4, dtype=torch.int64)}
    save_load.load(path, found, group=group)
    return found["w"].tolist()
