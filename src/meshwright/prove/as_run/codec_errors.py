"""What a lossy codec may do to gradients: the contributions of the reference, sent through a plain quantiser.

Error feedback is invisible in the error of a step. Its purpose is that errors don't add up over the steps: the sum of
the decoded gradients stays as near to the sum of the true ones as a few steps' errors. Without feedback the distance
grows. Both growths are measured with the plain quantiser, and the layout's must be the one with feedback.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import GROUP, Method, find_method
from meshwright.comm.compression.error_feedback import BETA
from meshwright.config.schema import RunConfig
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.as_run.rounded_reference import relative_error
from meshwright.prove.record.reference_run import TensorsByName


@dataclass(frozen=True)
class CompressedUnit:
    """Parameters whose gradients are sent together with a lossy method."""

    method: Method
    names: tuple[str, ...]


def compressed_units(plan: RunPlan) -> list[CompressedUnit]:
    """Return the units of a plan that send gradients with a lossy method."""
    found = []
    if plan.mesh.size(*plan.mesh.view("fsdp"), *plan.mesh.view("replicas")) == 1:
        return []
    for stage in plan.stages:
        members: dict[tuple[int | None, str, str], list[str]] = {}
        methods = {}
        for kind, layer, parameter in plan.parameters(stage):
            unit = plan.unit_of(stage, kind, parameter)
            key = (None, "", "") if unit is stage.root else (layer, kind.name, unit.name)
            members.setdefault(key, []).append(kind.key(parameter, layer))
            methods[key] = find_method(unit.gradients)
        found += [CompressedUnit(methods[key], tuple(names)) for key, names in members.items() if methods[key].is_lossy]
    return found


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
    _errors: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)

    def reduce(self, contributions: TensorsByName) -> TensorsByName:
        """Return decoded gradients, given contributions [data_parallel, num_microbatches, *shape] by name."""
        found = {name: value.sum((0, 1)) for name, value in contributions.items()}
        for number, unit in enumerate(compressed_units(self.plan)):
            found |= self._reduce_unit(number, unit, contributions)
        return found

    def _reduce_unit(self, number: int, unit: CompressedUnit, contributions: TensorsByName) -> TensorsByName:
        names = [name for name in unit.names if name in contributions]
        axes, method = self.config.mesh.axes(), unit.method
        again = axes.dp_replicate > 1 or self.plan.mesh.num_ranks() > (self.config.comm.ranks_per_node or 2**30)
        total: Tensor | float = 0.0
        for replica in range(axes.dp_replicate):
            group: Tensor | float = 0.0
            for rank in range(replica * axes.dp_shard, (replica + 1) * axes.dp_shard):
                sent = self._flat([contributions[name][rank].sum(0) for name in names])
                group = group + self._send(sent, method, (number, rank, "first"))
            total = total + (self._send(group, method, (number, replica, "replicas")) if again else group)
        if again:
            total = self._send(total, method, (number, 0, "sum"))
        return self._unflat(total, {name: contributions[name].shape[2:] for name in names})

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        """Return one row per rank that holds a shard: its rows of all tensors, in order, padded with zeros."""
        return torch.cat([self._rows(tensor) for tensor in tensors], dim=1)

    def _rows(self, tensor: Tensor) -> Tensor:
        num = self.config.mesh.dp_shard
        size = -(-tensor.shape[0] // num)
        padded = tensor.new_zeros((num * size, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        return padded.reshape(num, -1)

    def _unflat(self, flat: Tensor | float, shapes: dict[str, torch.Size]) -> TensorsByName:
        assert isinstance(flat, Tensor)
        found, at = {}, 0
        for name, shape in shapes.items():
            size = self._rows(torch.empty(shape, device="meta")).shape[1]
            full = flat[:, at : at + size].reshape(-1, *shape[1:])
            found[name], at = full[: shape[0]], at + size
        return found

    def _send(self, value: Tensor | float, method: Method, key: tuple[int, int, str]) -> Tensor:
        assert isinstance(value, Tensor)
        if not method.codec.is_quantised:
            return value.bfloat16().double()
        old = self._errors.get(key, torch.zeros_like(value)) if method.feedback and self.feedback else 0.0
        sent = quantise(value + old, method.codec.bits)
        self._errors[key] = BETA * old + (1 - BETA) * (value + old - sent)
        return sent


def quantise(x: Tensor, bits: int) -> Tensor:
    """Round each group of a row to integers times a scale, by which the largest element is one of the integers."""
    width = -x.shape[-1] % GROUP
    groups = torch.nn.functional.pad(x, (0, width)).reshape(len(x), -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True) / 2 ** (bits - 1)
    rounded: Tensor = (groups / scale.clamp_min(1e-300)).round() * scale
    return rounded.reshape(len(x), -1)[:, : x.shape[-1]]


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


def codec_errors(decoded: TensorsByName, exact: TensorsByName) -> dict[str, float]:
    """Return the relative error of each decoded gradient."""
    return {name: relative_error(value, exact[name]) for name, value in decoded.items()}
