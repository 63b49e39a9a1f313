"""What a lossy codec may do to gradients: the contributions of the reference, sent through a plain quantiser.

Error feedback is invisible in the error of a step. Its purpose is that errors don't add up over the steps: the sum of
the decoded gradients stays as near to the sum of the true ones as a few steps' errors. Without feedback the distance
grows. Both growths are measured with the plain quantiser, and the layout's must be the one with feedback.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import Method
from meshwright.comm.compression.codecs import BETA
from meshwright.config.schema import RunConfig
from meshwright.plan.run_plan import RunPlan
from meshwright.prove.as_run.plain_quantiser import SentUnit, flatten, quantise, sent_units, unflatten
from meshwright.prove.record.reference_run import TensorsByName


def compressed_units(plan: RunPlan) -> list[SentUnit]:
    """Return the units of a plan whose gradients are sent with a lossy method."""
    num_ranks = plan.mesh.size(*plan.mesh.view("fsdp"), *plan.mesh.view("replicas"))
    return sent_units(plan, lambda unit: unit.gradients, num_ranks)


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

    def reduce(self, contributions: TensorsByName) -> tuple[TensorsByName, TensorsByName]:
        """Return decoded gradients and the squares of their errors, expected of elements that fall anywhere between the
        codec's values.

        Args:
            contributions: by name, [data_parallel, num_microbatches, *shape].
        """
        found = {name: value.sum((0, 1)) for name, value in contributions.items()}
        squares: TensorsByName = {}
        for number, unit in enumerate(compressed_units(self.plan)):
            names = [name for name in unit.names if name in contributions]
            if not names:  # all frozen
                continue
            shapes = {name: contributions[name].shape[2:] for name in names}
            sent = [torch.stack([x.sum(0) for x in contributions[name]]) for name in names]
            total, square = self._reduce_unit(number, unit.method, sent)
            found |= unflatten(total, shapes)
            squares |= unflatten(square, shapes)
        return found, squares

    def _reduce_unit(self, number: int, method: Method, sent: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the decoded sum of what data-parallel ranks send, and the expected squares of its errors."""
        axes = self.config.mesh.axes()
        again = axes.dp_replicate > 1 or self.plan.mesh.num_ranks() > (self.config.comm.ranks_per_node or 2**30)
        groups, square = [], torch.zeros(())
        for replica in range(axes.dp_replicate):
            parts = []
            for rank in range(replica * axes.dp_shard, (replica + 1) * axes.dp_shard):
                flat = flatten([tensor[rank] for tensor in sent], axes.dp_shard)
                decoded, error = self._send(flat, method, (number, rank, "first"))
                parts.append(decoded)
                square = square + error
            group = torch.stack(parts).sum(0)
            if again:
                group, error = self._send(group, method, (number, replica, "replicas"))
                square = square + error
            groups.append(group)
        total = torch.stack(groups).sum(0)
        if again:
            total, error = self._send(total, method, (number, 0, "sum"))
            square = square + error
        return total, square

    def _send(self, value: Tensor, method: Method, key: tuple[int, int, str]) -> tuple[Tensor, Tensor]:
        old = self._errors.get(key, torch.zeros_like(value))
        sent, square = quantise(value + old, method)
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


def relative_codec_errors(squares: TensorsByName, exact: TensorsByName) -> dict[str, float]:
    """Return the expected relative error of each decoded gradient, given the expected squares of its errors."""
    found = {}
    for name, square in squares.items():
        norm = float(exact[name].norm())
        found[name] = math.sqrt(float(square.sum())) / norm if norm else math.inf
    return found
