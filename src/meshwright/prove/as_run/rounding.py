"""How much rounding and codecs change the reference of a step.

The plain module is evaluated in the precision of the run, at parameters perturbed by up to one rounding unit: the
deviations from float64, per tensor, are what a right layout may deviate by (TTrace, arXiv 2506.09280). Products of
sharded matrices are rounded shard by shard and summed, as tensor-parallel ranks do: partial sums that cancel may be
much larger than what they sum to.

A plain quantiser makes the errors of a lossy codec, by its definition, on the shards that ranks send: it tells how
large the errors of gradients may be, and how they grow with and without error feedback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.compression.catalogue import GROUP, Method, find_method
from meshwright.comm.compression.codecs import BETA
from meshwright.config.schema import RunConfig
from meshwright.nn.experts.router import Router
from meshwright.nn.step_handles import step_buffers
from meshwright.plan.run_plan import RunPlan, Unit
from meshwright.prove.record.evidence import DTYPE
from meshwright.prove.record.reference_run import (
    Contributions,
    PlainModel,
    StepReference,
    TensorsByName,
    build_reference,
    cells_of,
    forward_backward,
    set_weights,
)

ROTATED = 32
"""Elements that a rotation mixes."""


@dataclass(frozen=True)
class SentUnit:
    """Parameters that are sent together, with the method."""

    method: Method
    names: tuple[str, ...]
    num_shards: int
    """Number of tensor-parallel ranks, each of which sends its shards."""
    dims: Mapping[str, int]
    """Dim that is sharded over them, of parameters that are."""

    def shards(self, tensors: TensorsByName, batch_dims: int = 0) -> Iterator[TensorsByName]:
        """Yield each tensor-parallel rank's shards of the unit's parameters; theirs are the dims after `batch_dims`."""
        for rank in range(self.num_shards):
            yield {
                n: tensors[n].chunk(self.num_shards, batch_dims + self.dims[n])[rank] if n in self.dims else tensors[n]
                for n in self.names
                if n in tensors
            }

    def full(self, shards: list[TensorsByName]) -> TensorsByName:
        """Return the full tensors."""
        first = shards[0]
        return {n: torch.cat([one[n] for one in shards], self.dims[n]) if n in self.dims else first[n] for n in first}


def sent_units(plan: RunPlan, method_of: Callable[[Unit], str], num_ranks: int) -> list[SentUnit]:
    """Return the units that `num_ranks` ranks send with a lossy method."""
    found: list[SentUnit] = []
    for stage in plan.stages if num_ranks > 1 else ():
        members: dict[tuple[int | None, str, str], list[str]] = {}
        methods, dims, tp = {}, dict[str, int](), plan.mesh.size(*plan.mesh.view("tp"))
        for kind, layer, parameter in plan.parameters(stage):
            unit = plan.unit_of(stage, kind, parameter)
            key = (None, "", "") if unit is stage.root else (layer, kind.name, unit.name)
            name = kind.key(parameter, layer)
            members.setdefault(key, []).append(name)
            methods[key] = find_method(method_of(unit))
            dims.update((name, shard.dim) for shard in parameter.used if "tp" in shard.axes and tp > 1)
        lossy = {key: names for key, names in members.items() if methods[key].is_lossy}
        found += [SentUnit(methods[key], tuple(names), tp, dims) for key, names in lossy.items()]
    return found


def flatten(tensors: list[Tensor], num_ranks: int) -> Tensor:
    """Return one row per rank with its rows of all tensors, in order; a tensor's rows are padded with zeros."""
    return torch.cat([_rows(tensor, num_ranks) for tensor in tensors], dim=1)


def unflatten(flat: Tensor, shapes: dict[str, torch.Size]) -> TensorsByName:
    """Return the tensors of `flatten`."""
    found, at = {}, 0
    for name, shape in shapes.items():
        size = -(-shape[0] // len(flat)) * shape[1:].numel()
        full = flat[:, at : at + size].reshape(-1, *shape[1:])
        found[name], at = full[: shape[0]], at + size
    return found


def _rows(tensor: Tensor, num_ranks: int) -> Tensor:
    padded = tensor.new_zeros((num_ranks * -(-tensor.shape[0] // num_ranks), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded.reshape(num_ranks, -1)


def quantise(x: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    """Round each group of a row to integers times a scale, by which the element largest in size is the lowest integer.

    Returns:
        The rounded elements, and the squares of their errors: at least those expected of an element that may be
        anywhere between two integers, and more where an element is larger than the highest integer.
    """
    if not method.codec.is_quantised:
        return x.bfloat16().to(x.dtype), (x * torch.finfo(torch.bfloat16).eps).square() / 12
    width, lowest = -x.shape[-1] % GROUP, -(2 ** (method.codec.bits - 1))
    groups = _rotated(torch.nn.functional.pad(x, (0, width)).reshape(len(x), -1, GROUP), method)
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / lowest
    codes = (groups / torch.where(scale == 0, 1, scale)).round().clamp(lowest, -lowest - 1)
    square = torch.maximum((codes * scale - groups).square(), scale.square() / 12)
    if method.rotate:  # errors spread over the elements that are rotated together
        parts = square.reshape(len(x), -1, ROTATED)
        square = parts.mean(-1, keepdim=True).expand_as(parts)
    rounded = _rotated(codes * scale, method).reshape(len(x), -1)
    return rounded[:, : x.shape[-1]], square.reshape(len(x), -1)[:, : x.shape[-1]]


def _rotated(groups: Tensor, method: Method) -> Tensor:
    """Return rotated groups, if the method rotates; the rotation is its own inverse."""
    if not method.rotate:
        return groups
    rotated: Tensor = groups.reshape(len(groups), -1, ROTATED) @ _rotation().to(groups.dtype)
    return rotated.reshape(groups.shape)


@cache
def _rotation() -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < ROTATED:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return matrix / math.sqrt(ROTATED)


def compressed_units(plan: RunPlan) -> list[SentUnit]:
    """Return the units of a plan whose gradients are sent with a lossy method."""
    num_ranks = plan.mesh.size(*plan.mesh.view("fsdp"), *plan.mesh.view("replicas"))
    return sent_units(plan, lambda unit: unit.gradients, num_ranks)


_Key = tuple[tuple[int, int], int, str]
"""Unit and tensor-parallel rank, sender, and what is sent."""


@dataclass
class PlainCodec:
    """Reduces the reference's contributions with a plain quantiser.

    Args:
        config: configuration of the run.
        plan: plan of the run.
        feedback: whether to carry errors from step to step where the method does.
    """

    config: RunConfig
    plan: RunPlan
    feedback: bool = True
    _errors: dict[_Key, Tensor] = field(default_factory=dict)

    def reduce(self, contributions: TensorsByName) -> tuple[TensorsByName, TensorsByName]:
        """Return decoded gradients and the squares of their errors, expected of elements that fall anywhere between the
        codec's values.

        Args:
            contributions: by name, [data_parallel, num_microbatches, *shape].
        """
        found = {name: value.sum((0, 1)) for name, value in contributions.items()}
        squares: TensorsByName = {}
        for number, unit in enumerate(compressed_units(self.plan)):
            sent = {name: contributions[name].sum(1) for name in unit.names if name in contributions}
            if not sent:  # all frozen
                continue
            parts: list[tuple[TensorsByName, TensorsByName]] = []
            for rank, shards in enumerate(unit.shards(sent, batch_dims=1)):
                flats = self._reduce_unit((number, rank), unit.method, list(shards.values()))
                shapes = {name: value.shape[1:] for name, value in shards.items()}
                parts.append((unflatten(flats[0], shapes), unflatten(flats[1], shapes)))
            found |= unit.full([total for total, _ in parts])
            squares |= unit.full([square for _, square in parts])
        return found, squares

    def _reduce_unit(self, number: tuple[int, int], method: Method, sent: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the decoded sum of what data-parallel ranks send, and the expected squares of its errors."""
        axes = self.config.mesh.axes()
        again = axes.dp_replicate > 1 or self.plan.mesh.num_ranks() > (self.config.comm.ranks_per_node or 2**30)
        groups, square = [], torch.zeros(())
        for replica in range(axes.dp_replicate):
            parts = []
            for rank in range(replica * axes.dp_shard, (replica + 1) * axes.dp_shard):
                flat = flatten([tensor[rank] for tensor in sent], axes.dp_shard)
                if self.plan.mesh.view("fsdp"):
                    flat, error = self._send(flat, method, (number, rank, "first"))
                    square = square + error
                parts.append(flat)
            group = torch.stack(parts).sum(0)
            if again:
                group, error = self._send(group, method, (number, replica, "replicas"), axes.dp_replicate)
                square = square + error
            groups.append(group)
        total = torch.stack(groups).sum(0)
        if again:
            total, error = self._send(total, method, (number, 0, "sum"), axes.dp_replicate)
            square = square + error
        return total, square

    def _send(self, value: Tensor, method: Method, key: _Key, num_pieces: int = 1) -> tuple[Tensor, Tensor]:
        """Return rows as they arrive, each sent in pieces, and the expected squares of their errors."""
        old, width = self._errors.get(key, torch.zeros_like(value)), -value.shape[1] % num_pieces
        pieces = torch.nn.functional.pad(value + old, (0, width)).view(len(value) * num_pieces, -1)
        sent, square = (x.reshape(len(value), -1)[:, : value.shape[1]] for x in quantise(pieces, method))
        if method.feedback and self.feedback:
            self._errors[key] = BETA * old + (1 - BETA) * (value + old - sent)
        return sent, square + old.square()


@dataclass
class Growth:
    """Distance between the sums of decoded and true gradients, over the error of one step."""

    _sum: dict[str, Tensor] = field(default_factory=dict)
    _steps: list[float] = field(default_factory=list)

    def add(self, decoded: TensorsByName, true: TensorsByName, names: set[str]) -> None:
        """Add a step."""
        square = 0.0
        for name in sorted(names & decoded.keys() & true.keys()):
            error = decoded[name] - true[name]
            self._sum[name] = self._sum.get(name, 0.0) + error
            square += float(error.square().sum())
        self._steps.append(square)

    def value(self) -> float:
        """Return the growth over all steps so far."""
        total = sum(float(error.square().sum()) for error in self._sum.values())
        mean = sum(self._steps) / max(1, len(self._steps))
        return (total / mean) ** 0.5 if mean else 0.0


def relative_codec_errors(errors: TensorsByName, squares: TensorsByName, exact: TensorsByName) -> dict[str, float]:
    """Return the relative error of each decoded gradient: the larger of the plain quantiser's own, as of elements and
    ranks that are alike and rounded alike, and the one expected of elements anywhere between two integers, given its
    squares; with few elements, it may be larger by chance."""
    found = {}
    for name, square in squares.items():
        norm = float(exact[name].norm())
        error = math.sqrt(float(square.sum())) * (1 + max(1, square.numel()) ** -0.5)
        error = max(error, float(errors[name].norm()))
        found[name] = error / norm if norm else math.inf
    return found


PERTURBATIONS = ((0.0, 1.0), (1.0, 2.0**0.5))
"""Evaluations per step: the largest change of a parameter in rounding units, and the scale of the loss in the backward.
The first rounds as the run does, if it divides the loss alike: where many values are nearly equal, they are rounded in
the same direction."""
TIE_UNITS = 2.0
"""Rounding units by which the scores of a token's last chosen and next best expert may differ in a tie."""


@dataclass(frozen=True)
class Rounded:
    """A step of the reference in the precision of the run, and relative deviations from float64, the largest of all
    evaluations."""

    contributions: TensorsByName
    """Per parameter, [data_parallel, num_microbatches, *shape], at perturbed parameters."""
    gradients: dict[str, float]
    """Per parameter: norm of the deviation over the norm of the gradient."""
    loss: float
    choices: dict[str, float]
    """Deviations of gradients if choices of experts that are near ties are turned; empty without experts."""


class RoundedReference:
    """Evaluates steps of a reference, perturbed, in the precision of the run.

    Args:
        exact: the reference in float64.
        plan: plan of the run, for the weights that are sent with a lossy method.
    """

    def __init__(self, exact: PlainModel, plan: RunPlan) -> None:
        self._exact, self._config = exact, exact.config
        self._num_shards = plan.mesh.size(*plan.mesh.view("fsdp"))
        self._sent_units = sent_units(plan, lambda unit: unit.weights, self._num_shards)
        self._dtype = getattr(torch, self._config.train.precision)
        self._rounded = _in_precision(build_reference(self._config, exact.device), self._dtype)
        multiply_by_shards(self._rounded, plan)
        for feature in exact.features:
            feature.apply(self._rounded)
        self._generator = torch.Generator().manual_seed(self._config.train.seed)

    def step(self, step: int, weights: Mapping[str, Tensor], due: StepReference) -> Rounded:
        """Evaluate a step at the layout's full parameters and buffers, of which `due` is the reference in float64."""
        errors: dict[str, float] = {}
        losses, contributions = [], TensorsByName()
        for units, scale in PERTURBATIONS:
            found = self._evaluate(self._rounded, self._sent(self._perturbed(weights, units)), step, scale)
            contributions = {name: value.to(DTYPE) for name, value in found.gradients.items()}
            losses.append(abs(float(found.losses.sum()) / due.loss - 1))
            for name, error in self._errors(contributions, due).items():
                errors[name] = max(errors.get(name, 0.0), error)
        return Rounded(contributions, errors, max(losses), self._choices(step, weights, due))

    @staticmethod
    def _errors(contributions: TensorsByName, due: StepReference) -> dict[str, float]:
        return {n: relative_error(value.sum((0, 1)), due.gradients[n]) for n, value in contributions.items()}

    def _choices(self, step: int, weights: Mapping[str, Tensor], due: StepReference) -> dict[str, float]:
        """Return the relative deviations of gradients if all choices of experts that are near ties are turned."""
        if not has_choices(self._exact.module):
            return {}
        with turned_ties(self._exact.module, torch.finfo(self._dtype).eps):
            return self._errors(self._evaluate(self._exact.module, weights, step).gradients, due)

    def _evaluate(
        self, model: nn.Module, weights: Mapping[str, Tensor], step: int, scale: float = 1.0
    ) -> Contributions:
        set_weights(model, weights)
        for feature in self._exact.features:
            feature.begin(step)
        cells, train = cells_of(self._config, self._exact.batch(step)), self._config.train
        found = forward_backward(model, self._config, self._exact.samples, cells, train.num_microbatches, scale)
        for _, buffer in step_buffers(model):
            buffer.discard()
        return found

    def _perturbed(self, weights: Mapping[str, Tensor], units: float) -> TensorsByName:
        unit = max([torch.finfo(self._dtype).eps, *(feature.perturbation for feature in self._exact.features)])
        limit, found = units * unit, dict(weights)
        for name in self._exact.roles if limit else ():
            noise = torch.rand(weights[name].shape, generator=self._generator, dtype=DTYPE) * 2 - 1
            found[name] = weights[name].to(DTYPE) * (1 + limit * noise)
        return found

    def _sent(self, weights: TensorsByName) -> TensorsByName:
        """Return parameters as ranks receive them, if a lossy method gathers them."""
        found = dict(weights)
        for unit in self._sent_units:
            parts = []
            for shards in unit.shards(weights):
                flat = flatten([value.to(DTYPE) for value in shards.values()], self._num_shards)
                parts.append(unflatten(quantise(flat, unit.method)[0], {n: x.shape for n, x in shards.items()}))
            found |= unit.full(parts)
        return found


def _in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let a model compute in `dtype`, with buffers at least in float32, and return float64."""
    wide = torch.promote_types(dtype, torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(wide))

    def cast(_: nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    model.register_forward_pre_hook(cast)
    model.register_forward_hook(lambda _, __, out: out.to(DTYPE))
    return model


def multiply_by_shards(model: nn.Module, plan: RunPlan) -> None:
    """Let layers multiply by each shard of a matrix that is sharded over tp by itself, so that the sum over the shards
    of outputs, or in the backward of gradients of inputs, is of rounded ones."""
    num_ranks = plan.mesh.size(*plan.mesh.view("tp"))
    if num_ranks == 1:
        return
    kinds = (parameter for stage in plan.stages for parameter in plan.parameters(stage))
    dims = {
        kind.key(parameter, layer): shard.dim
        for kind, layer, parameter in kinds
        for shard in parameter.used
        if "tp" in shard.axes
    }
    names = {parameter: name for name, parameter in model.named_parameters()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, dim = modules[name.rpartition(".")[0]], dims.get(names[parameter])
        is_linear = isinstance(module, nn.Linear)
        multiplies = is_linear or any(one.__name__ == "Conv1D" for one in type(module).__mro__)
        if name.endswith(".weight") and dim is not None and multiplies:
            module.forward = partial(_product, module, num_ranks, is_linear, (dim == 1) == is_linear)


def _product(module: Any, num_ranks: int, is_linear: bool, over_inputs: bool, x: Tensor) -> Tensor:
    matrix_de = module.weight.mT if is_linear else module.weight
    shards = matrix_de.tensor_split(num_ranks, 0 if over_inputs else 1)
    if over_inputs:
        parts = zip(x.tensor_split(num_ranks, -1), shards, strict=True)
        out: Tensor = reduce(torch.add, [part @ shard for part, shard in parts])
    else:
        out = torch.cat([x @ shard for shard in shards], -1)
    return out if module.bias is None else out + module.bias


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected tensor; infinity if either is not finite."""
    error = float((found - expected).norm() / expected.norm()) if bool(expected.any()) else float(bool(found.any()))
    return error if error == error else float("inf")


def has_choices(model: nn.Module) -> bool:
    """Return whether a model chooses experts by scores."""
    return any(isinstance(module, Router) and not module.config.uniform for module in model.modules())


@contextmanager
def turned_ties(model: nn.Module, unit: float) -> Iterator[None]:
    """Within the context, give each token at a tie the next best expert instead of its last.

    Args:
        model: the plain model.
        unit: rounding unit of the run's precision.
    """
    best = {module: module.best for module in model.modules() if isinstance(module, Router)}
    for router, real in best.items():
        router.best = _turned(real, TIE_UNITS * unit)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for router, real in best.items():
            router.best = real  # type: ignore[method-assign]


def _turned(best: Callable[[Tensor], Tensor], tie: float) -> Callable[[Tensor], Tensor]:
    def choose(scores: Tensor) -> Tensor:
        chosen = best(scores)
        last = chosen[..., -1:]
        others = best(scores.scatter(-1, last, -torch.inf))
        score, next_score = scores.gather(-1, last), scores.gather(-1, others[..., -1:])
        return torch.where((score - next_score).abs() <= tie * score.abs(), others, chosen)

    return choose
