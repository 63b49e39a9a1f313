"""Recorder for any PyTorch training script: what each rank read, computed and updated, without any collective.

It takes shards and their offsets from DTensor and FSDP2 themselves, so that a script needs a few lines only. Without
`meshwright prove script`, which sets an environment variable, its methods do nothing.
"""

from __future__ import annotations

import gc
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
from torch.distributed.tensor import DTensor, Placement
from torch.utils.data import DistributedSampler

from meshwright.errors import InputError
from meshwright.mesh.local_shards import local_box, to_local
from meshwright.prove.record.evidence import RankRecord, ShardsByName, digests, local_shards
from meshwright.prove.script.layout_choice import FOLDER, REFERENCE, SEED, STEPS, record_path

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Parts of a parameter's name that `torch.compile`, activation checkpointing and FSDP add."""
NO_OPTIONS = ("params", "param_names", "initial_lr")
"""What parameter groups have besides options; the last is set by schedules."""
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
        self._name = names if callable(names) else lambda name: (names or {}).get(name, name)
        self._num_steps = int(os.environ[STEPS])
        self._record = ScriptRecord()
        self._describe()
        self._record.initial = self._weights()
        if seed := int(os.environ.get(SEED, "0")):
            found = torch.load(record_path(Path(os.environ[REFERENCE]), _rank()), weights_only=True, mmap=True)
            _perturb(dict(self._parameters()), seed=seed, unit=rounding_unit(found["computed_in"]))
        self._start = self._weights() if seed else self._record.initial
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
        number, step = len(self._record.steps), self._record.steps[-1]
        if number == 1 and step["microbatches"]:
            self._see_between()
        elif number == 2 and not step["microbatches"]:
            self._record.uncleared = [name for name, (_, value) in self._gradients().items() if bool(value.any())]
        step["samples"] += hash_rows(values)
        step["targets"].append(count_targets(values))
        step["microbatches"] += microbatches

    def loss(self, value: Any) -> None:
        """Record the loss of the step: of the global batch, or of this rank's samples. Several values are averaged."""
        if self._folder:
            self._record.steps[-1]["loss"].append(_number(value, "loss"))

    def gradients(self) -> None:
        """Record the gradients of step 1; call it when they are complete, before they are clipped."""
        if not self._folder:
            return
        step = self._record.steps[-1]
        step["options"] = [
            {key: numbers for key, value in group.items() if key not in NO_OPTIONS and (numbers := _numbers(value))}
            for group in self._groups
        ]
        if len(self._record.steps) == 1:
            step["gradients"] = self._gradients()
            partial = {name: _dims(one.grad, Placement.is_partial) for name, one in self._parameters()}
            self._record.partial = {name: dims for name, dims in partial.items() if dims}

    def norm(self, value: Any) -> None:
        """Record the global norm of the gradients, before clipping."""
        if self._folder:
            self._record.steps[-1]["grad_norm"].append(_number(value, "norm"))

    def step(self) -> None:
        """Record the parameters; call it after the optimizer's step, and before gradients are cleared if it can be.

        Raises:
            RecordingComplete: this was the last step to record.
        """
        if not self._folder:
            return
        number = len(self._record.steps)
        if number in (1, self._num_steps):
            self._record.steps[-1]["weights"] = self._weights()
        if number == 1:
            self._record.scaled = self._gradient_factor()
            for hook in self._hooks:
                hook.remove()
            self._record.computed_in = _coarsest(self._dtypes)
        if number >= self._num_steps:
            self._finish(Path(self._folder))
        self._begin_step()

    def _begin_step(self) -> None:
        series: dict[str, Any] = {name: [] for name in ("samples", "targets", "loss", "grad_norm", "options")}
        self._record.steps.append({**series, "microbatches": 0, "gradients": {}, "weights": {}})

    def _see_between(self) -> None:
        """Record gradients between two micro-batches, and whether weights have changed already."""
        record, left = self._record, self._gradients()
        for name, (offset, value) in left.items():
            lost = record.before_microbatches.get(name)
            record.before_microbatches[name] = offset, value if lost is None else value + lost[1]
        record.before_last = left
        pairs = [(value, self._start[name][1]) for name, (_, value) in self._weights().items() if name in self._start]
        # A parameter that FSDP2 keeps unsharded between micro-batches can't be compared.
        pairs = [(value, start) for value, start in pairs if (value.shape, value.dtype) == (start.shape, start.dtype)]
        record.is_stepped_between |= any(not torch.equal(value, start) for value, start in pairs)

    def _see_dtypes(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._dtypes |= {tensor.dtype for tensor in tensors_of(output)}

    def _finish(self, folder: Path) -> None:
        """Save the record and wait for those of the other ranks, which may still need this one's process group."""
        samplers = [one for one in gc.get_objects() if issubclass(type(one), DistributedSampler)]
        self._record.fixed_samplers = sum(one.shuffle and one.epoch == 0 for one in samplers)
        path = record_path(folder, _rank())
        torch.save(vars(self._record), path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)  # under its name only once it is complete
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
                yield self._name(".".join(parts)), parameter

    def _weights(self) -> ShardsByName:
        return local_shards(dict(self._parameters()))

    def _gradients(self) -> ShardsByName:
        return local_shards({name: one.grad for name, one in self._parameters() if one.grad is not None})

    def _describe(self) -> None:
        """Record shapes, meshes, tied parameters, and which ones the optimizer holds."""
        record, parameters = self._record, dict(self._parameters())
        held = {id(parameter) for group in self._groups for parameter in group["params"]}
        own = {id(parameter) for parameter in parameters.values()}
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
                sharded |= set(_dims(parameter, lambda one: not (one.is_replicate() or one.is_partial())))
        record.tied = [names for names in tied.values() if len(names) > 1]
        record.sharded, record.num_foreign = sorted(sharded), len(held - own)
        record.dtype = _coarsest(parameter.dtype for parameter in parameters.values())

    def _gradient_factor(self) -> list[float]:
        """Return the factor between the recorded gradients and those that the optimizer used, if they are one."""
        products, squares, gradients = 0.0, 0.0, self._record.steps[0]["gradients"]
        for name, (_, value) in self._gradients().items():
            if name in gradients:
                before = gradients[name][1].double()
                products += float((before * value.double()).sum())
                squares += float((before * before).sum())
        return [products / squares] if squares > 0.0 and products > 0.0 else []


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _coarsest(dtypes: Iterable[torch.dtype]) -> str:
    """Return the name of the floating-point dtype that rounds most, or an empty string."""
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return str(max(floats, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.") if floats else ""


def rounding_unit(dtype: str) -> float:
    """Return the rounding unit of a dtype, given its name; 0 for an empty string."""
    return torch.finfo(getattr(torch, dtype)).eps if dtype else 0.0


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


def _dims(tensor: Tensor | None, has: Callable[[Placement], bool]) -> list[str]:
    """Return the mesh dims of a DTensor along which its placement has a property."""
    if not isinstance(tensor, DTensor):
        return []
    return [name for name, placement in zip(_dim_names(tensor), tensor.placements, strict=True) if has(placement)]


def _numbers(option: Any) -> list[float]:
    """Return an optimizer's option as numbers; an empty list if it has none."""
    values = option if isinstance(option, list | tuple) else [option]
    values = [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in values]
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
        if local.data_ptr() in done or not local.is_floating_point():
            continue
        done.add(local.data_ptr())
        text = f"{seed} {name} {local_box(parameter).offset}"
        draw = torch.Generator().manual_seed(zlib.crc32(text.encode()))
        units = torch.randint(-1, 2, local.shape, generator=draw).to(local.device, local.dtype)
        local.add_(local * units * max(unit, torch.finfo(local.dtype).eps))


IGNORED = -100
"""Target that PyTorch's cross-entropy ignores unless told otherwise."""


@dataclass
class ScriptRecord(RankRecord):
    """What one rank of a script did; only numbers, text and tensors, for `torch.load` with `weights_only=True`.

    Each of `steps` has `samples` (digests, in order), `microbatches` (their number) and, per call of the recorder,
    `targets` (number of those that are not ignored, -1 where there are no integers), `loss` and `grad_norm`;
    `options` of each parameter group, such as the learning rate; the first also `gradients`, and the first and the last
    `weights`.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Full shape of each parameter."""
    before_microbatches: ShardsByName = field(default_factory=dict)
    """Sum of the gradients at the start of each micro-batch of step 1: what an overwritten gradient has lost."""
    before_last: ShardsByName = field(default_factory=dict)
    """Gradients at the start of the last micro-batch of step 1."""
    is_stepped_between: bool = False
    """Whether weights changed between micro-batches of step 1."""
    uncleared: list[str] = field(default_factory=list)
    """Parameters that still had a gradient when step 2 began."""
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
    dtype: str = ""
    """Dtype of the parameters, the coarsest of all."""
    computed_in: str = ""
    """Dtype of the outputs of modules in step 1, the coarsest of all."""


def hash_rows(values: tuple[Any, ...]) -> list[str]:
    """Return a digest of each sample of a batch: the row of every tensor, with its dtype and shape.

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
    return ["".join(parts) for parts in zip(*map(digests, tensors), strict=True)]


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
