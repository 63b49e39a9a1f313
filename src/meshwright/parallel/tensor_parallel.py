"""Tensor parallelism (Shoeybi et al. 2019) with PyTorch's DTensor: matrix products are sharded over the ranks of `tp`.

With optional sequence parallelism (Korthikanti et al. 2022), activations between the products are sharded along the
sequence, and each all-reduce becomes a reduce-scatter and an all-gather.

The plan defines the style of each module. All parameters become DTensors on the tp mesh, including replicated ones, so
that gradient norms and optimizer state are handled uniformly.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
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

from meshwright.errors import LayoutError
from meshwright.models.contract.tp_styles import Style, StyleKind
from meshwright.nn.step_handles import StepHandle
from meshwright.nn.zero_gradients import depending_on
from meshwright.parallel.local_shards import compute_on_local_shards, shard_parameter
from meshwright.parallel.private import HeadParallel
from meshwright.plan.run_plan import LayerSpec, RunPlan, Stage


class Replicated(ParallelStyle):
    """Style of a module whose parameters and activations are replicated over the axis."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh)
        module.register_forward_pre_hook(
            lambda module, inputs: tuple(DTensor.from_local(x, device_mesh, [Replicate()]) for x in inputs)
        )
        module.register_forward_hook(lambda module, inputs, output: output.to_local())
        return module


class LocalShards(ParallelStyle):
    """Style of a module that computes with local shards of its parameters; the gradients of those that are replicated
    are partial."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self._style, self._dims = style, dict(style.dims)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        partial: dict[str, float] = {}
        for name, _ in list(module.named_parameters(recurse=False)):
            placement = Shard(self._dims[name]) if name in self._dims else Replicate()
            shard_parameter(module, name, device_mesh, [placement])
            if name not in self._dims:
                partial[name] = 1 / device_mesh.size() if self._style.reduced_output else 1.0
        compute_on_local_shards(module, partial=partial)
        if self._style.summed_input:
            module.register_forward_pre_hook(
                lambda module, inputs: (with_partial_gradient(inputs[0], device_mesh), *inputs[1:])
            )
        if self._style.reduced_output:
            module.register_forward_hook(lambda module, inputs, output: reduced(output, device_mesh))
        return module


class ReplicatedLocally(ParallelStyle):
    """Style of a module that computes with local replicas of its own parameters."""

    def __init__(self, partial_tail: int, reader: nn.Module | None) -> None:
        super().__init__()
        self._tail, self._reader = partial_tail, reader

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _replicate_own(module, device_mesh)
        compute_on_local_shards(self._reader or module, owner=module)

        def sum_tail(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            head, tail = torch.split(output, [output.shape[-1] - self._tail, self._tail], dim=-1)
            return torch.cat([head, with_partial_gradient(tail, device_mesh)], dim=-1)

        if self._tail:
            module.register_forward_hook(sum_tail)
        return module


class ShardedExperts(ParallelStyle):
    """Style of experts of which each rank holds some, and computes what they add to the output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            shard_parameter(module, name, device_mesh, [Shard(0)])
        compute_on_local_shards(module)
        num_local = cast("int", module.num_experts) // device_mesh.size()
        module.num_experts = num_local  # type: ignore[assignment]
        first = num_local * device_mesh.get_local_rank()

        def local(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.is_floating_point():
                return with_partial_gradient(value, device_mesh)
            index = value - first
            # The number of experts stands for no expert; transformers' grouped products leave such rows uninitialised.
            return torch.where((index >= 0) & (index < num_local), index, num_local)

        def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return tuple(map(local, inputs)), {name: local(value) for name, value in named.items()}

        def after(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
            if not output.requires_grad:  # no token was for this rank's experts
                own = [cast("DTensor", parameter).to_local() for parameter in module.parameters(recurse=False)]
                output = depending_on(output, *(x for x in (*inputs, *named.values(), *own) if isinstance(x, Tensor)))
            return reduced(output, device_mesh)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)
        return module


def _replicate_own(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a module's own parameters DTensors."""
    for name, _ in list(module.named_parameters(recurse=False)):
        shard_parameter(module, name, mesh, [Replicate()])


def with_partial_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated tensor whose gradient is partial, and is reduced in the backward."""
    full = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return full.to_local(grad_placements=[Partial()])


def reduced(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of a partial tensor over the ranks, replicated."""
    partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


class Region(ParallelStyle):
    """Style of a module that gathers its input from the stream and computes a partial output on local tensors."""

    def __init__(self, stream: Shard | Replicate) -> None:
        super().__init__()
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [self._stream], run_check=False)
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]), *inputs[1:]

        def reduce(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            partial = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=[self._stream]).to_local()

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(reduce)
        return module


def apply_styles(module: nn.Module, mesh: DeviceMesh, plan: RunPlan, stage: Stage) -> None:
    """Parallelize a stage's module over the 1D mesh `mesh`, using the styles of its kinds.

    The output head returns logits as a DTensor sharded over the vocabulary; the loss is computed without gathering
    them. Modules without a style are replicated.
    """
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    dims = [shard.dim for shard in plan.edge.shards if set(shard.axes) & set(plan.mesh.view("tp"))]
    stream = Shard(dims[0] + 1) if dims else Replicate()  # a sample's dim, plus one for the batch
    for kind, layer in plan.held(stage):
        root = module.get_submodule(kind.full_name("", layer))
        _check_paths(root, kind)
        experts = kind.experts.experts if kind.experts is not None and kind.experts.axes else None  # already placed
        styles = {path: style for path, style in kind.styles if experts is None or not fnmatchcase(experts, path)}
        parallelize_module(root, mesh, {path: _style(style, stream, root) for path, style in styles.items()})
        for path in (path for path, style in styles.items() if style.cloned):
            root.get_submodule(path).register_forward_hook(lambda module, inputs, output: output.clone())
    for inner in module.modules():
        if any(not isinstance(parameter, DTensor) for parameter in inner.parameters(recurse=False)):
            parallelize_module(inner, mesh, Replicated())
    for handle in module.modules():  # styles replicate buffers, whose updates are local and summed by the training step
        for name, buffer in handle.named_buffers(recurse=False) if isinstance(handle, StepHandle) else ():
            if isinstance(buffer, DTensor):
                setattr(handle, name, buffer.to_local())
    for name in frozen:  # PyTorch's SequenceParallel replaces parameters with trainable ones (2.13)
        module.get_parameter(name).requires_grad_(False)


def _check_paths(root: nn.Module, kind: LayerSpec) -> None:
    """Check that each style matches a module; PyTorch ignores unknown paths, which would cause wrong gradients.

    Raises:
        LayoutError: a style matches no module.
    """
    paths = [path for path, _ in root.named_modules()]
    for glob, style in kind.styles:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise LayoutError(
                f"style {style.kind.value} is for {glob}, but {kind.name} has no such module",
                where=f"Family.styles, {kind.described}, {glob}",
                rule="a style applies to modules by their paths within the kind; * matches any part of a name",
                fix=f"use one of {', '.join(path for path in paths if path)}",
            )


def _style(style: Style, stream: Shard | Replicate, root: nn.Module) -> ParallelStyle:
    """Convert a style of a module in `root` to PyTorch's, given the placement of the residual stream."""
    full = Replicate()
    if style.kind is StyleKind.COLUMN:
        return ColwiseParallel(output_layouts=full) if style.gathered else ColwiseParallel()
    if style.kind is StyleKind.ROW:
        return RowwiseParallel(input_layouts=full if style.gathered else Shard(-1), output_layouts=stream)
    if style.kind is StyleKind.VOCABULARY:
        return RowwiseParallel(input_layouts=full, output_layouts=stream)
    if style.kind is StyleKind.HEAD:
        return HeadParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    if style.kind is StyleKind.GATHER:
        others = (None,) * (style.num_inputs - 1)
        return PrepareModuleInput(input_layouts=(stream, *others), desired_input_layouts=(full, *others))
    if style.kind is StyleKind.REGION:
        return Region(stream)
    if style.kind in (StyleKind.LOCAL, StyleKind.DIVIDED):
        return LocalShards(style)
    if style.kind is StyleKind.REPLICATED:
        read_by = None if style.read_by is None else root.get_submodule(style.read_by)
        return ReplicatedLocally(style.partial_tail, read_by)
    if style.kind is StyleKind.EXPERTS:
        return ShardedExperts()
    assert style.kind is StyleKind.STREAM, f"no style {style.kind}"
    return SequenceParallel(sequence_dim=stream.dim) if isinstance(stream, Shard) else Replicated()


def wait_for_embeddings(module: nn.Module, plan: RunPlan, stage: Stage) -> None:
    """Make embeddings wait for their output, for compiled blocks and for stages without blocks.

    The output is a pending `AsyncCollectiveTensor`, which cannot be sent. A compiled graph with such an input loses its
    gradient (seen on torch 2.13). Cloning waits for the tensor, and is differentiable.
    """
    for name in stage.before:
        for path, style in plan.kind(name).styles:
            if style.kind is StyleKind.VOCABULARY:
                module.get_submodule(path).register_forward_hook(lambda module, inputs, output: output.clone())
