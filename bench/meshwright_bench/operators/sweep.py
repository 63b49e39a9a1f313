"""Every operator that PyTorch has samples of, on DTensors over real ranks, beside the same on plain tensors.

Ranks tell each other what came of each operator through a store and not by a collective: after an operator that
failed on some ranks only, the others may still wait in one, until its time is out, and the group is made anew.
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
from meshwright.dtensor_ops.refused_ops import OperatorError
from meshwright.mesh.process_groups import process_group
from meshwright.train.launch.rank_context import RankContext
from meshwright_bench.operators.cases import Outcome, Placed, Side, SweepTask, begin_line, end_line
from meshwright_bench.private import TorchDispatchMode, operators, tree_leaves, tree_map_only

CPU = torch.device("cpu")
TIMEOUT_S = 5.0
"""For one collective of an operator; after it the ranks that waited go on."""
UNSET = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose values are whatever lay in memory."""
PLACEMENTS = {Placed.SHARD: Shard(0), Placed.COPIES: Replicate()}

Said = tuple[Outcome, str]
"""What came of a case on one rank, with a note."""


@dataclass(frozen=True)
class Sample:
    """An operator, its arguments, and what it returns for plain tensors."""

    name: str
    operator: Callable[..., Any]
    inputs: Any
    expected: Any
    is_defined: bool
    """The same call returns the same values."""

    def run(self, inputs: Any) -> Any:
        """What it returns for other inputs, with the same seed."""
        _seed(1)
        first, args, kwargs = inputs
        return self.operator(first, *args, **kwargs)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether an operator draws random numbers; some set the generator back afterwards."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self.seen = self.seen or not torch.equal(before, torch.get_rng_state())
        return result


def run_sweep(context: RankContext, task: SweepTask) -> None:
    """Go on behind the cases that are done; rank 0 notes each."""
    warnings.simplefilter("ignore")
    said = dist.FileStore(f"{context.store_path}-said", context.num_ranks)  # type: ignore[attr-defined]
    group, num_groups = ExitStack(), 0
    mesh = sample = None
    for number, (entry, placed) in enumerate((entry, placed) for entry in operators() for placed in Placed):
        if number < task.num_done:
            continue
        if mesh is None:
            num_groups += 1
            path = f"{context.store_path}-{num_groups}"
            group.enter_context(process_group(rank=context.rank, num_ranks=context.num_ranks, device=CPU,
                                              timeout_s=TIMEOUT_S, store_path=path))  # fmt: skip
            mesh = init_device_mesh("cpu", (context.num_ranks,))
        if context.rank == 0:
            begin_line(task.lines, name_of(entry), placed)
        sample = sample if placed is not Placed.SHARD and sample is not None else find_sample(entry)
        own = run_case(sample, placed, task.side, mesh)
        said.set(f"{number}/{context.rank}", "\t".join(own))
        outcome, note = agreed([_split(said.get(f"{number}/{rank}")) for rank in range(context.num_ranks)])
        if context.rank == 0:
            end_line(task.lines, outcome, note)
        if outcome in (Outcome.WRONG, Outcome.OTHER_ERROR):
            group.close()
            mesh = None
    group.close()


def name_of(entry: Any) -> str:
    """`linalg.norm`, or with a variant `norm.inf`."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


def run_case(sample: Sample | str, placed: Placed, side: Side, mesh: DeviceMesh) -> Said:
    """Run one operator, unless it has no sample; what came of it on this rank."""
    if isinstance(sample, str):
        return Outcome.LEFT_OUT, sample
    try:
        with replicate_fallback(warn=False) if side is Side.FALLBACK else nullcontext():
            result = sample.run(tree_map_only(Tensor, lambda x: _placed(x, placed, mesh), sample.inputs))
            whole = tree_map_only(DTensor, lambda x: x.full_tensor(), result)
    except OperatorError as error:
        is_refusal = "not a function" in error.what
        return (Outcome.REFUSED if is_refusal else Outcome.OTHER_ERROR), error.what
    except NotImplementedError as error:
        return Outcome.NOT_IMPLEMENTED, str(error)
    except Exception as error:
        return Outcome.OTHER_ERROR, f"{type(error).__name__}: {error}"
    difference = _difference(whole, sample)
    if difference:
        return Outcome.WRONG, difference
    return (Outcome.RIGHT if sample.is_defined else Outcome.UNDEFINED), ""


def agreed(said: list[Said]) -> Said:
    """What all ranks said; where they differ, wrong if it is so on any, else an error that left others waiting."""
    outcomes = {outcome for outcome, _ in said}
    if len(outcomes) == 1:
        return said[0]
    outcome = Outcome.WRONG if Outcome.WRONG in outcomes else Outcome.OTHER_ERROR
    return outcome, "; ".join(f"rank {rank}: {outcome} {note}" for rank, (outcome, note) in enumerate(said))


def _split(text: bytes) -> Said:
    outcome, _, note = text.decode().partition("\t")
    return Outcome(outcome), note


def find_sample(entry: Any) -> Sample | str:
    """The operator with its first sample, or why it is left out."""
    try:
        _seed(0)
        # Not `sample_inputs`: it looks for the test that calls it through the whole stack, 100 ms each.
        first = next(iter(entry.sample_inputs_func(entry, "cpu", torch.float32, False)))
        inputs = (first.input, first.args, first.kwargs)
        if any(x.layout is not torch.strided for x in tree_leaves(inputs) if isinstance(x, Tensor)):
            return "sparse inputs"
        _seed(1)
        copied, args, kwargs = tree_map_only(Tensor, Tensor.clone, inputs)
        with Draws() as draws:  # type: ignore[no-untyped-call]
            expected = entry(copied, *args, **kwargs)
    except Exception as error:
        return f"plain tensors: {type(error).__name__}: {error}"
    return Sample(name_of(entry), entry, inputs, expected, not draws.seen and entry.name not in UNSET)


def _seed(seed: int) -> None:
    """Samples are drawn by all three generators, and all ranks need the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _placed(x: Tensor, placed: Placed, mesh: DeviceMesh) -> DTensor:
    placement = PLACEMENTS[placed] if x.dim() else Replicate()
    whole = DTensor.from_local(x.detach().clone(), mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [placement])


def _difference(result: Any, sample: Sample) -> str:
    """How a result differs from that of plain tensors, in words; nothing if it doesn't."""
    found, expected = tree_leaves(result), tree_leaves(sample.expected)
    if len(found) != len(expected):
        return f"{len(found)} results, not {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, Tensor) and not sample.is_defined:
            if not isinstance(one, Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
                return f"{one} has not the shape and type of {other}"
        elif isinstance(other, Tensor):
            try:
                torch.testing.assert_close(one, other, equal_nan=True)
            except AssertionError as error:
                return str(error)
        elif sample.is_defined and one != other and one == one:
            return f"{one}, not {other}"
    return ""
