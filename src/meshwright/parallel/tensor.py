"""Tensor parallel: each matrix product divided over the ranks of `tp` (Shoeybi et al. 2019), by PyTorch's DTensor.

Optionally with sequence parallel (Korthikanti et al. 2022): between the products, activations are divided along
the sequence, and the all-reduce becomes a reduce-scatter and an all-gather.

The plan goes by building blocks, not by model. Every parameter becomes a DTensor on the tp mesh, also
those that stay whole, so that one rule counts copies and one mesh carries the optimizer's state.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.comm.collectives import all_reduce_sum
from meshwright.mesh.shards import to_local
from meshwright.nn.block import Block, TransformerBlock
from meshwright.nn.dit_block import DiTBlock

SEQUENCE_DIM = 1


class Replicated(ParallelStyle):
    """A module whose parameters and activations are whole on every rank of the axis."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh)
        module.register_forward_pre_hook(
            lambda module, inputs: tuple(DTensor.from_local(x, device_mesh, [Replicate()]) for x in inputs)
        )
        module.register_forward_hook(lambda module, inputs, output: output.to_local())
        return module


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Divide a model, or a part of it, over the one-axis mesh `mesh`: its blocks, and a vocabulary's two ends.

    The logits come out as a DTensor sharded over the vocabulary, which the loss is computed on without gathering.
    Modules that no plan names stay whole.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    stream = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel(sequence_dim=SEQUENCE_DIM) if sequence_parallel else Replicated()
    for block in model.modules():
        if isinstance(block, TransformerBlock):
            parallelize_module(block, mesh, _block_plan(stream, norm))
        elif isinstance(block, DiTBlock):
            assert not sequence_parallel, "patches attend to all others, and their condition is the whole sample's"
            parallelize_module(block, mesh, _dit_block_plan())
        else:
            assert not isinstance(block, Block), f"no plan for {type(block).__name__}"
    ends: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    present = dict(model.named_children())
    if not isinstance(present.get("embed"), nn.Embedding):
        del ends["embed"]  # patches, not a vocabulary
    parallelize_module(model, mesh, {name: style for name, style in ends.items() if name in present})
    for module in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            parallelize_module(module, mesh, Replicated())
    for name in frozen:  # PyTorch's SequenceParallel makes its parameters anew, and trained (2.13)
        model.get_parameter(name).requires_grad_(False)


def sync_partial_gradients(model: nn.Module) -> None:
    """Bring every gradient into its parameter's layout, after the last backward.

    Under sequence parallel a norm's weight is whole on each rank but its gradient is only that of the rank's tokens,
    a partial sum. FSDP2 adds such sums up on its way; without FSDP2 nobody does, and the loss still looks fine.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def average_copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all copies of a parameter that is whole on each rank of `tp` the mean of their gradients.

    A codec rounds an element by its neighbours, and those are other pieces of matrices on other ranks of tp. Without
    this the copies get different gradients where gradients or weights were sent in fewer bits, and drift apart.

    Args:
        model: after the last backward, with gradients reduced.
        mesh: with the axis `tp`.
    """
    copies = [to_local(p.grad) for p in model.parameters() if p.grad is not None and _is_whole(p)]
    if not copies:
        return
    mean = torch.cat([copy.flatten() for copy in copies])
    all_reduce_sum(mean, group=mesh.get_group("tp")).div_(mesh["tp"].size())
    for copy, piece in zip(copies, torch.split(mean, [copy.numel() for copy in copies]), strict=True):
        copy.copy_(piece.view_as(copy))


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether all ranks of `tp` have the same of it."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in axes and parameter.placements[axes.index("tp")].is_replicate()


def await_embedding(model: nn.Module) -> None:
    """Have the embedding hand on a tensor that has arrived, for compiled blocks and for a stage without blocks.

    Its output is a tensor still under way (`AsyncCollectiveTensor`), and a compiled graph that takes one loses the
    way back to its gradient (seen on torch 2.13); nor can one be sent. A copy waits, and is differentiable.
    """
    model.get_submodule("embed").register_forward_hook(lambda module, inputs, output: output.clone())


def _block_plan(stream: Shard | Replicate, norm: ParallelStyle) -> dict[str, ParallelStyle]:
    whole = Replicate()
    return {
        "attention_norm": norm,
        "attention": PrepareModuleInput(input_layouts=(stream, None, None), desired_input_layouts=(whole, None, None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=stream),
        "ffn_norm": norm,
        "ffn": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=stream),
    }


def _dit_block_plan() -> dict[str, ParallelStyle]:
    whole = Replicate()
    return {
        "attention": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(),
    }
