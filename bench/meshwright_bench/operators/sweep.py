"""Run all operators that have PyTorch samples on DTensors over real ranks, and compare the results with plain tensors.

Ranks exchange the outcome of each operator through a store, not with a collective: if an operator fails on only some
ranks, the others may wait in a collective until it times out. The process group is then recreated.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright.dtensor_ops.fallback import replicate_fallback
from meshwright.dtensor_ops.run_replicated import ImpureOperatorError, OperatorError
from meshwright.mesh.process_groups import process_group
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.operators.cases import InputPlacement, Outcome, Side, SweepTask, begin_line, end_line
from meshwright_bench.private import TorchDispatchMode, operators, tree_leaves, tree_map_only

CPU = torch.device("cpu")
UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that return uninitialized memory."""

GRADIENT_TOLERANCE = 1e-5
"""Of a gradient's largest value: the backward of attention on large scores, for one, is off by as much in float32."""

CaseOutcome = tuple[Outcome, str]
"""Outcome of a case on one rank, with a note."""


@dataclass(frozen=True)
class Sample:
    """Operator with arguments and its result on plain tensors."""

    name: str
    operator: Callable[..., Any]
    inputs: Any
    expected: Any
    is_defined: bool
    """True if repeated calls return the same values."""
    of_largest: float | None = None
    """Tolerance relative to a result's largest value; PyTorch's tolerances of the dtype if None."""

    def run(self, inputs: Any) -> Any:
        """Return the operator's result for other inputs, with the same seed."""
        _seed(1)
        first, args, kwargs = inputs
        return self.operator(first, *args, **kwargs)


class RandomnessDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that detects the use of random numbers, even if the generator state is restored afterwards."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self.seen = self.seen or not torch.equal(before, torch.get_rng_state())
        return result


def run_sweep(context: RankContext, task: SweepTask) -> None:
    """Run the cases that are not done yet; rank 0 records each."""
    warnings.simplefilter("ignore")
    outcomes = dist.FileStore(f"{context.store_path}-outcomes", context.num_ranks)  # type: ignore[attr-defined]
    group, num_groups = ExitStack(), 0
    mesh = sample = None
    entries = [entry for entry in operators() if not task.names or name_of(entry) in task.names]
    cases = ((entry, placed) for entry in entries for placed in task.placements)
    for number, (entry, placed) in enumerate(cases):
        if number < task.num_done:
            continue
        if mesh is None:
            num_groups += 1
            path = f"{context.store_path}-{num_groups}"
            group.enter_context(process_group(rank=context.rank, num_ranks=context.num_ranks, device=CPU,
                                              timeout_s=task.timeout_s, store_path=path))  # fmt: skip
            mesh = init_device_mesh("cpu", (context.num_ranks,))
        if context.rank == 0:
            begin_line(task.lines, name_of(entry), placed)
        if placed is task.placements[0] or sample is None:
            sample = find_sample(entry, gradients=task.gradients)
        local = run_case(sample, placed, task.side, mesh)
        outcomes.set(f"{number}/{context.rank}", "\t".join(local))
        outcome, note = combine_outcomes(
            [_parse(outcomes.get(f"{number}/{rank}")) for rank in range(context.num_ranks)]
        )
        if context.rank == 0:
            end_line(task.lines, outcome, note)
        if outcome in (Outcome.WRONG, Outcome.OTHER_ERROR):
            group.close()
            mesh = None
    group.close()


def name_of(entry: Any) -> str:
    """Return the name of an operator, such as `linalg.norm`, or `norm.inf` with a variant."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def run_case(sample: Sample | str, placed: InputPlacement, side: Side, mesh: DeviceMesh) -> CaseOutcome:
    """Run one operator, unless it has no sample, and return its outcome on this rank."""
    if isinstance(sample, str):
        return Outcome.LEFT_OUT, sample
    try:
        with replicate_fallback(warn=False) if side is Side.FALLBACK else nullcontext():
            result = sample.run(tree_map_only(Tensor, lambda x: _place(x, placed, mesh), sample.inputs))
            full = tree_map_only(DTensor, lambda x: x.full_tensor(), result)
    except ImpureOperatorError as error:
        return Outcome.REFUSED, error.what
    except OperatorError as error:
        return Outcome.OTHER_ERROR, error.what
    except NotImplementedError as error:
        return Outcome.NOT_IMPLEMENTED, str(error)
    except Exception as error:
        return Outcome.OTHER_ERROR, f"{type(error).__name__}: {error}"
    difference = _difference(full, sample)
    if difference:
        return Outcome.WRONG, difference
    return (Outcome.RIGHT if sample.is_defined else Outcome.UNDEFINED), ""


def combine_outcomes(by_rank: list[CaseOutcome]) -> CaseOutcome:
    """Return the common outcome of all ranks; if they differ, wrong if any rank is wrong, else other error."""
    outcomes = {outcome for outcome, _ in by_rank}
    if len(outcomes) == 1:
        return by_rank[0]
    outcome = Outcome.WRONG if Outcome.WRONG in outcomes else Outcome.OTHER_ERROR
    return outcome, "; ".join(f"rank {rank}: {outcome} {note}" for rank, (outcome, note) in enumerate(by_rank))


def _parse(text: bytes) -> CaseOutcome:
    outcome, _, note = text.decode().partition("\t")
    return Outcome(outcome), note


def find_sample(entry: Any, *, gradients: bool = False) -> Sample | str:
    """Return the operator with its first sample, or the reason to leave it out.

    Args:
        entry: entry of PyTorch's operator database.
        gradients: let the operator return the gradients of its inputs too, where it has them.
    """
    gradients = gradients and entry.supports_autograd
    try:
        _seed(0)
        # Avoid `sample_inputs`, which searches the whole stack for the calling test and takes 100 ms.
        first = next(iter(entry.sample_inputs_func(entry, "cpu", torch.float32, gradients)))
        inputs = (first.input, first.args, first.kwargs)
        operator = _with_gradients(entry, first.output_process_fn_grad) if gradients else entry
        if any(x.layout is not torch.strided for x in tree_leaves(inputs) if isinstance(x, Tensor)):
            return "sparse inputs"
        _seed(1)
        copied, args, kwargs = tree_map_only(Tensor, Tensor.clone, inputs)
        with RandomnessDetector() as randomness:  # type: ignore[no-untyped-call]
            expected = operator(copied, *args, **kwargs)
    except Exception as error:
        return f"plain tensors: {type(error).__name__}: {error}"
    is_defined = not randomness.seen and entry.name not in UNSET
    return Sample(
        name_of(entry), operator, inputs, expected, is_defined, of_largest=GRADIENT_TOLERANCE if gradients else None
    )


def _with_gradients(operator: Callable[..., Any], differentiable: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that returns an operator's results and the gradients of their squares.

    Args:
        operator: the operator.
        differentiable: PyTorch's choice of the results that are functions of the inputs, such as no signs of vectors.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        copied = tree_map_only(Tensor, Tensor.clone, args[0])  # in-place operators don't write to leaves
        results = differentiable(operator(copied, *args[1:], **kwargs))
        outputs = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
        total = torch.stack([(x.abs() if x.is_complex() else x).square().sum() for x in outputs]).sum()
        return results, *torch.autograd.grad(total, leaves, allow_unused=True)

    return run


def _seed(seed: int) -> None:
    """Seed the three random generators used by samples, equally on all ranks."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _place(x: Tensor, placed: InputPlacement, mesh: DeviceMesh) -> Tensor:
    dim = {InputPlacement.SHARD: 0, InputPlacement.SHARD_LAST: x.dim() - 1}.get(placed)
    placement = Replicate() if dim is None or not x.dim() else Shard(dim)
    replicated = DTensor.from_local(x.detach().clone(), mesh, [Replicate()], run_check=False)
    return replicated.redistribute(mesh, [placement]).detach().requires_grad_(x.requires_grad)


def _tolerances(expected: Tensor, of_largest: float | None) -> dict[str, Any]:
    if of_largest is None or not (expected.is_floating_point() or expected.is_complex()):
        return {}
    largest = torch.nan_to_num(expected.abs(), posinf=0.0).max().item() if expected.numel() else 0.0
    return {"rtol": of_largest, "atol": of_largest * max(1.0, largest)}


def _difference(result: Any, sample: Sample) -> str:
    """Describe the difference between a result and that of plain tensors; empty if none."""
    found, expected = tree_leaves(result), tree_leaves(sample.expected)
    if len(found) != len(expected):
        return f"results: {len(found)}, expected {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor) and not sample.is_defined:
            if not isinstance(one, Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
                return f"shape or dtype differs: {one}, expected {other}"
        elif isinstance(other, Tensor):
            try:
                torch.testing.assert_close(one, other, equal_nan=True, **_tolerances(other, sample.of_largest))
            except AssertionError as error:
                return str(error)
        elif sample.is_defined and one != other and one == one:
            return f"{one}, expected {other}"
    return ""
