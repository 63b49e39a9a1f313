"""Tensor parallel: each matrix product divided over the ranks of `tp` (Shoeybi et al. 2019), by PyTorch's DTensor.

Optionally with sequence parallel (Korthikanti et al. 2022): between the products, activations are divided along
the sequence, and the all-reduce becomes a reduce-scatter and an all-gather.

The plan says the style of each module. Every parameter becomes a DTensor on the tp mesh, replicated ones too, so that
one rule counts copies and one mesh carries the optimizer's state.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.comm.collectives import all_reduce_sum
from meshwright.errors import LayoutError
from meshwright.mesh.local_shards import to_local
from meshwright.models.contract.tp_styles import Style, StyleKind
from meshwright.parallel.private import parameters_of
from meshwright.plan.run_plan import Kind, RunPlan, Stage


class Replicated(ParallelStyle):
    """A module whose parameters and activations are replicated over the axis."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh)
        module.register_forward_pre_hook(
            lambda module, inputs: tuple(DTensor.from_local(x, device_mesh, [Replicate()]) for x in inputs)
        )
        module.register_forward_hook(lambda module, inputs, output: output.to_local())
        return module


class Divided(ParallelStyle):
    """Replicated parameters applied to a rank's part of what a column has divided: their gradients are partial.

    The module computes on plain tensors. Each forward takes the parameters as they are then, gathered by FSDP2 or not.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh)
        forward, parameters = module.forward, parameters_of(module)

        def on_local(*inputs: Any, **named: Any) -> Any:
            own = dict(parameters)
            try:
                for name, parameter in own.items():
                    if isinstance(parameter, DTensor):
                        parameters[name] = parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)
                return forward(*inputs, **named)
            finally:
                parameters.update(own)

        module.forward = on_local
        return module


def apply_styles(module: nn.Module, mesh: DeviceMesh, plan: RunPlan, stage: Stage) -> None:
    """Divide a stage's module over the one-axis mesh `mesh`, by the styles of its kinds.

    An output head's logits come out as a DTensor sharded over the vocabulary, which the loss is computed on without
    gathering. Modules that no style names are replicated.
    """
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    dims = [shard.dim for shard in plan.edge.shards if set(shard.axes) & set(plan.mesh.view("tp"))]
    stream = Shard(dims[0] + 1) if dims else Replicate()  # with the batch dim
    for kind, layer in plan.held(stage):
        root = module.get_submodule(kind.full_name("", layer))
        _check_paths(root, kind)
        parallelize_module(root, mesh, {path: _style(style, stream) for path, style in kind.styles})
    for inner in module.modules():
        if any(not isinstance(parameter, DTensor) for parameter in inner.parameters(recurse=False)):
            parallelize_module(inner, mesh, Replicated())
    for name in frozen:  # PyTorch's SequenceParallel makes its parameters anew, and trained (2.13)
        module.get_parameter(name).requires_grad_(False)


def _check_paths(root: nn.Module, kind: Kind) -> None:
    """PyTorch passes over a path that no module has, and that module's gradients would be wrong.

    Raises:
        LayoutError: there is such a path.
    """
    paths = [path for path, _ in root.named_modules()]
    for glob, style in kind.styles:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise LayoutError(
                f"the style {style.kind.value} is for {glob}, and {kind.name} has no such module",
                where=f"Family.styles, {kind.described}, {glob}",
                rule="a style is for modules by their paths inside the kind; * stands for any part of a name",
                fix=f"one of {', '.join(path for path in paths if path)}",
            )


def _style(style: Style, stream: Shard | Replicate) -> ParallelStyle:
    """PyTorch's style for one of ours, where the stream has this placement."""
    full = Replicate()
    if style.kind is StyleKind.COLUMN:
        return ColwiseParallel()
    if style.kind is StyleKind.ROW:
        return RowwiseParallel(output_layouts=stream)
    if style.kind is StyleKind.VOCABULARY:
        return RowwiseParallel(input_layouts=full, output_layouts=stream)
    if style.kind is StyleKind.HEAD:
        return ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    if style.kind is StyleKind.GATHER:
        others = (None,) * (style.num_inputs - 1)
        return PrepareModuleInput(input_layouts=(stream, *others), desired_input_layouts=(full, *others))
    if style.kind is StyleKind.DIVIDED:
        return Divided()
    assert style.kind is StyleKind.STREAM, f"no style {style.kind}"
    return SequenceParallel(sequence_dim=stream.dim) if isinstance(stream, Shard) else Replicated()


def sync_partial_gradients(model: nn.Module) -> None:
    """Bring every gradient into its parameter's layout, after the last backward.

    Under sequence parallel a norm's weight is replicated but its gradient is only that of the rank's tokens,
    a partial sum. FSDP2 reduces such gradients itself; without FSDP2 nobody does, and the loss still looks fine.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


@torch.no_grad()
def average_copies(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all copies of a parameter that is replicated over `tp` the mean of their gradients.

    A codec rounds an element by its neighbours, and those are other pieces of matrices on other ranks of tp. Without
    this the copies get different gradients where gradients or weights were sent in fewer bits, and drift apart.

    Args:
        model: after the last backward, with gradients reduced.
        mesh: with the axis `tp`.
    """
    copies = [to_local(p.grad) for p in model.parameters() if p.grad is not None and _is_replicated(p)]
    if not copies:
        return
    mean = torch.cat([copy.flatten() for copy in copies])
    all_reduce_sum(mean, group=mesh.get_group("tp")).div_(mesh["tp"].size())
    for copy, piece in zip(copies, torch.split(mean, [copy.numel() for copy in copies]), strict=True):
        copy.copy_(piece.view_as(copy))


def _is_replicated(parameter: nn.Parameter) -> bool:
    """Whether all ranks of `tp` have the same."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in axes and parameter.placements[axes.index("tp")].is_replicate()


def await_lookups(module: nn.Module, plan: RunPlan, stage: Stage) -> None:
    """Have embeddings pass on a tensor that has arrived, for compiled blocks and for a stage without blocks.

    Their output is a tensor still under way (`AsyncCollectiveTensor`), and a compiled graph that takes one loses the
    way back to its gradient (seen on torch 2.13); nor can one be sent. A copy waits, and is differentiable.
    """
    for name in stage.before:
        for path, style in plan.kind(name).styles:
            if style.kind is StyleKind.VOCABULARY:
                module.get_submodule(path).register_forward_hook(lambda module, inputs, output: output.clone())
