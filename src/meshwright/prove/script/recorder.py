"""Recorder for any PyTorch training script: what each rank read, computed and updated, without any collective.

It takes shards and their offsets from DTensor and FSDP2 themselves, so that a script needs a few lines only. Without
`meshwright prove script`, which sets an environment variable, its methods do nothing.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from meshwright.errors import InputError
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.prove.script.layout_choice import FOLDER, SEED, STEPS, UNIT, record_path, unit_path

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of a parameter's name that `torch.compile`, activation checkpointing and FSDP add."""
FINISH_S = 60.0
"""How long a rank waits for the records of the others before it ends the script."""
Names = Callable[[str], str] | Mapping[str, str]


class RecordingComplete(SystemExit):
    """Raised by `Recorder.step` after the last recorded step, to end the script with exit code 0."""


class Recorder:
    """Records a training script for `meshwright prove script`; does nothing in any other run.

    Args:
        model: the model as trained: wrapped, sharded, or the module or modules of this rank's pipeline stages.
        optimizer: the optimizer, or several.
        names: from a parameter's name on this rank to its name in the whole model, where a pipeline stage renumbers its
            layers; names that a mapping lacks stay.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Any = None,
        *,
        names: Names | None = None,
    ) -> None:
        self._folder = os.environ.get(FOLDER)
        if not self._folder:
            return
        self._models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = () if optimizer is None else optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
        self._groups = [group for one in optimizers for group in one.param_groups]
        self._names, self._num_steps = names, int(os.environ[STEPS])
        self._record = RankRecord()
        self._describe()
        self._record.initial = self._shards(lambda parameter: parameter)
        unit, seed = float(os.environ.get(UNIT, "0")), int(os.environ.get(SEED, "0"))
        _perturb(dict(self._parameters()), seed=seed, unit=unit)
        self._start = self._shards(lambda parameter: parameter) if seed else self._record.initial
        self._dtypes: set[torch.dtype] = set()
        modules = dict.fromkeys(module for model in self._models for module in model.modules())
        self._hooks = [module.register_forward_hook(self._see_dtypes) for module in modules]
        self._begin_step()

    def batch(self, *values: Any, microbatches: int = 1) -> None:
        """Record the content of a micro-batch: tensors, or nested lists and dicts of tensors, with samples along dim 0.

        Args:
            microbatches: number of micro-batches that a pipeline's schedule splits these samples into.
        """
        if not self._folder:
            return
        if len(self._record.samples) == 1 and self._record.microbatches[-1]:
            self._see_between()
        elif len(self._record.samples) == 2 and not self._record.microbatches[-1]:
            left = self._shards(lambda parameter: parameter.grad)
            self._record.uncleared = [name for name, (_, value) in left.items() if bool(value.any())]
        self._record.samples[-1] += hash_rows(values)
        self._record.targets[-1].append(count_targets(values))
        self._record.microbatches[-1] += microbatches

    def loss(self, value: Any) -> None:
        """Record the loss of the step: of the global batch, or of this rank's samples. Several values are averaged."""
        if self._folder:
            self._record.losses[-1].append(_number(value, "loss"))

    def gradients(self) -> None:
        """Record the gradients of step 1; call it when they are complete, before they are clipped."""
        if not self._folder:
            return
        self._record.learning_rates.append([float(group["lr"]) for group in self._groups])
        if len(self._record.samples) > 1:
            return
        self._record.gradients = self._shards(lambda parameter: parameter.grad)
        for name, parameter in self._parameters():
            if dims := _partial_dims(parameter.grad):
                self._record.partial[name] = dims

    def norm(self, value: Any) -> None:
        """Record the global norm of the gradients, before clipping."""
        if self._folder:
            self._record.norms[-1].append(_number(value, "norm"))

    def step(self) -> None:
        """Record the parameters; call it after the optimizer's step, and before gradients are cleared if it can be.

        Raises:
            RecordingComplete: this was the last step to record.
        """
        if not self._folder:
            return
        num_done = len(self._record.samples)
        if num_done == 1:
            self._record.after_first = self._shards(lambda parameter: parameter)
            self._record.scaled = self._gradient_factor()
            for hook in self._hooks:
                hook.remove()
            self._record.unit, self._record.computed_in = _coarsest(self._dtypes)
        if num_done >= self._num_steps:
            self._finish(Path(self._folder))
        self._begin_step()

    def _see_between(self) -> None:
        """Record gradients between two micro-batches, and whether weights have changed already."""
        record, left = self._record, self._shards(lambda parameter: parameter.grad)
        for name, (offset, value) in left.items():
            lost = record.before_microbatches.get(name)
            record.before_microbatches[name] = offset, value if lost is None else value + lost[1]
        record.before_last = left
        squares = sum(float(value.double().square().sum()) for _, value in left.values())
        record.norms_between.append(squares**0.5)
        now = self._shards(lambda parameter: parameter)
        # A parameter that FSDP2 keeps unsharded between micro-batches can't be compared.
        pairs = [(value, self._start[name][1]) for name, (_, value) in now.items() if name in self._start]
        pairs = [(value, start) for value, start in pairs if (value.shape, value.dtype) == (start.shape, start.dtype)]
        record.is_stepped_between |= any(not torch.equal(value, start) for value, start in pairs)

    def _see_dtypes(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._dtypes |= {tensor.dtype for tensor in tensors_of(output)}

    def _begin_step(self) -> None:
        record = self._record
        for series in (record.samples, record.losses, record.norms, record.targets):
            series.append([])
        record.microbatches.append(0)

    def _finish(self, folder: Path) -> None:
        """Save the record and wait for those of the other ranks, which may still need this one's process group."""
        self._record.parameters = self._shards(lambda parameter: parameter)
        samplers = [one for one in gc.get_objects() if issubclass(type(one), DistributedSampler)]
        self._record.fixed_samplers = sum(one.shuffle and one.epoch == 0 for one in samplers)
        rank = int(os.environ.get("RANK", "0"))
        unit_path(folder, rank).write_text(str(self._record.unit))
        self._record.save(record_path(folder, rank))
        missing = [record_path(folder, rank) for rank in range(int(os.environ.get("WORLD_SIZE", "1")))]
        deadline = time.monotonic() + FINISH_S
        while (missing := [path for path in missing if not path.exists()]) and time.monotonic() < deadline:
            time.sleep(0.005)
        raise RecordingComplete(0)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters under their names in the whole model; a tied one under each of its names."""
        for model in self._models:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                parts = [part for part in name.split(".") if part not in WRAPPERS]
                while parts[0] == "module" and len(parts) > 1:
                    parts = parts[1:]
                plain = ".".join(parts)
                if callable(self._names):
                    plain = self._names(plain)
                elif self._names is not None:
                    plain = self._names.get(plain, plain)
                yield plain, parameter

    def _shards(self, value: Callable[[nn.Parameter], Tensor | None]) -> ShardsByName:
        found = {name: value(parameter) for name, parameter in self._parameters()}
        return {
            name: (local_box(tensor).offset, to_local(tensor.detach()).cpu().clone())
            for name, tensor in found.items()
            if tensor is not None
        }

    def _describe(self) -> None:
        """Record shapes, meshes, tied parameters, and which ones the optimizer holds."""
        record, parameters = self._record, dict(self._parameters())
        held = {id(parameter) for group in self._groups for parameter in group["params"]}
        own = {id(parameter) for parameter in parameters.values()}
        record.options = [
            {key: numbers for key, value in group.items() if key != "lr" and (numbers := _numbers(value))}
            for group in self._groups
        ]
        tied, sharded = defaultdict(list), set()
        for name, parameter in parameters.items():
            record.shapes[name] = tuple(parameter.shape)
            record.trainable[name] = parameter.requires_grad
            if self._groups:
                record.optimized[name] = id(parameter) in held
            pointer = to_local(parameter.detach()).data_ptr()
            tied[pointer or id(parameter)].append(name)
            if isinstance(parameter, DTensor):
                record.lines |= mesh_lines(parameter)
                sharded |= {
                    dim
                    for dim, placement in zip(_dim_names(parameter), parameter.placements, strict=True)
                    if not (placement.is_replicate() or placement.is_partial())
                }
        record.tied = [names for names in tied.values() if len(names) > 1]
        record.sharded, record.num_foreign = sorted(sharded), len(held - own)
        record.eps, record.dtype = _coarsest({parameter.dtype for parameter in parameters.values()})

    def _gradient_factor(self) -> list[float]:
        """Return the factor between the recorded gradients and those that the optimizer used, if they are one."""
        products = squares = 0.0
        for name, parameter in self._parameters():
            if parameter.grad is None or name not in self._record.gradients:
                continue
            before = self._record.gradients[name][1].double()
            products += float((before * to_local(parameter.grad.detach()).cpu().double()).sum())
            squares += float((before * before).sum())
        return [products / squares] if squares > 0.0 and products > 0.0 else []


def _coarsest(dtypes: set[torch.dtype]) -> tuple[float, str]:
    """Return the largest rounding unit of some dtypes, and which has it."""
    found = [(torch.finfo(dtype).eps, str(dtype).removeprefix("torch.")) for dtype in dtypes if dtype.is_floating_point]
    return max(found, default=(0.0, ""))


def mesh_lines(tensor: DTensor) -> dict[str, list[int]]:
    """Return the ranks along each dim of a DTensor's mesh, through this rank."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is on the mesh of its parameters"
    lines = {}
    for at, name in enumerate(_dim_names(tensor)):
        index = tuple(slice(None) if dim == at else position for dim, position in enumerate(coordinate))
        lines[name] = [int(rank) for rank in mesh.mesh[index]]
    return lines


def _dim_names(tensor: DTensor) -> tuple[str, ...]:
    mesh = tensor.device_mesh
    return tuple(mesh.mesh_dim_names or (f"dim {at}" for at in range(mesh.ndim)))


def _partial_dims(gradient: Tensor | None) -> list[str]:
    if not isinstance(gradient, DTensor):
        return []
    names = zip(_dim_names(gradient), gradient.placements, strict=True)
    return [name for name, placement in names if placement.is_partial()]


def _numbers(option: Any) -> list[float]:
    """Return an optimizer's option as numbers; an empty list if it has none."""
    values = option if isinstance(option, list | tuple) else [option]
    return [float(value) for value in values] if all(isinstance(value, bool | int | float) for value in values) else []


def _number(value: Any, what: str) -> float:
    """Convert a loss or norm to a number.

    Raises:
        InputError: it is a DTensor that still has to be reduced.
    """
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise InputError(
                f"recorder.{what} was given a partial DTensor",
                where=f"Recorder.{what}",
                rule="a recorder uses no collectives, so it can't reduce a value",
                fix=f"recorder.{what}(value.full_tensor())",
            )
        value = value.to_local()
    return float(value.detach() if isinstance(value, Tensor) else value)


@torch.no_grad()
def _perturb(parameters: dict[str, nn.Parameter], *, seed: int, unit: float) -> None:
    """Change weights by up to one rounding unit, replicas alike, to measure what rounding does to the results."""
    done: set[int] = set()
    for name, parameter in parameters.items():
        local = to_local(parameter.detach())
        if not seed or local.data_ptr() in done or not local.is_floating_point():
            continue
        done.add(local.data_ptr())
        text = f"{seed} {name} {local_box(parameter).offset}"
        draw = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        units = torch.randint(-1, 2, local.shape, generator=draw).to(local.device, local.dtype)
        local.add_(local * units * max(unit, torch.finfo(local.dtype).eps))


IGNORED = -100
"""Target that PyTorch's cross-entropy ignores unless told otherwise."""
ShardsByName = dict[str, tuple[tuple[int, ...], Tensor]]
"""Per parameter: offset and value of the local shard."""


@dataclass
class RankRecord:
    """What one rank did; only numbers, text and tensors, for `torch.load` with `weights_only=True`."""

    samples: list[list[int]] = field(default_factory=list)
    """[step]: hashes of the samples of the step, in order."""
    microbatches: list[int] = field(default_factory=list)
    """[step]: number of micro-batches."""
    losses: list[list[float]] = field(default_factory=list)
    """[step]: values given to `loss`."""
    norms: list[list[float]] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    """[step][parameter group]"""
    options: list[dict[str, list[float]]] = field(default_factory=list)
    """Per parameter group: numbers that the optimizer was given, such as betas, except the learning rate."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Full shape of each parameter."""
    initial: ShardsByName = field(default_factory=dict)
    gradients: ShardsByName = field(default_factory=dict)
    before_microbatches: ShardsByName = field(default_factory=dict)
    """Sum of the gradients at the start of each micro-batch of step 1: what an overwritten gradient has lost."""
    before_last: ShardsByName = field(default_factory=dict)
    """Gradients at the start of the last micro-batch of step 1."""
    norms_between: list[float] = field(default_factory=list)
    """Norm of this rank's gradients at the start of each micro-batch of step 1, but for the first."""
    is_stepped_between: bool = False
    """Whether weights changed between micro-batches of step 1."""
    uncleared: list[str] = field(default_factory=list)
    """Parameters that still had a gradient when step 2 began."""
    targets: list[list[int]] = field(default_factory=list)
    """[step][batch]: number of targets that are not ignored; -1 where there are no integers."""
    after_first: ShardsByName = field(default_factory=dict)
    parameters: ShardsByName = field(default_factory=dict)
    partial: dict[str, list[str]] = field(default_factory=dict)
    """Mesh dims over which a recorded gradient is a partial sum, per parameter; absent for complete gradients."""
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Per mesh dim: the ranks along it, through this rank."""
    sharded: list[str] = field(default_factory=list)
    """Mesh dims over which a parameter is sharded."""
    trainable: dict[str, bool] = field(default_factory=dict)
    optimized: dict[str, bool] = field(default_factory=dict)
    """Whether the optimizer holds the parameter; empty if the recorder was given no optimizer."""
    num_foreign: int = 0
    """Number of tensors in the optimizer that are no parameters of the model."""
    tied: list[list[str]] = field(default_factory=list)
    """Names that share one tensor."""
    scaled: list[float] = field(default_factory=list)
    """Factor between `gradients` and the optimizer's step in step 1, such as a clipping factor; empty if not known."""
    fixed_samplers: int = 0
    """Number of shuffling `DistributedSampler`s whose epoch was never set."""
    eps: float = 0.0
    """Rounding unit of the parameters' dtype, the largest of all."""
    dtype: str = ""
    unit: float = 0.0
    """Rounding unit of the outputs of modules in step 1, the largest of all."""
    computed_in: str = ""
    """Dtype of these outputs."""

    def save(self, path: Path) -> None:
        """Save the record; it appears under its name only once it is complete."""
        temporary = path.with_suffix(".tmp")
        torch.save(vars(self), temporary)
        temporary.rename(path)

    @staticmethod
    def load(path: Path) -> RankRecord:
        """Load a record."""
        return RankRecord(**torch.load(path, weights_only=True))


def hash_rows(values: tuple[Any, ...]) -> list[int]:
    """Hash each sample of a batch: the row of every tensor, with its dtype and shape.

    Raises:
        InputError: there are no tensors, or their first dims differ.
    """
    tensors = list(tensors_of(values))
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1:
        raise InputError(
            f"recorder.batch was given tensors with {sorted(sizes)} rows" if sizes else "recorder.batch has no tensors",
            where="Recorder.batch",
            rule="all tensors of a batch have one row per sample, in the same order",
            fix="recorder.batch(inputs, targets), both with the samples along dim 0",
        )
    digests = [hashlib.blake2b(digest_size=8) for _ in range(sizes.pop())]
    for tensor in tensors:
        kind = f"{tensor.dtype}{tuple(tensor.shape[1:])}".encode()
        rows = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
        for digest, row in zip(digests, rows.view(torch.uint8).numpy(), strict=True):
            digest.update(kind + row.tobytes())
    return [int.from_bytes(digest.digest(), "big", signed=True) for digest in digests]


def count_targets(values: tuple[Any, ...]) -> int:
    """Return how many targets a loss counts: those of the last tensor of integers that are not ignored, -1 if none."""
    integers = [tensor for tensor in tensors_of(values) if not (tensor.is_floating_point() or tensor.is_complex())]
    return int((integers[-1] != IGNORED).sum()) if integers else -1


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch that have rows."""
    if isinstance(value, Tensor):
        if value.dim():
            yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_of(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
