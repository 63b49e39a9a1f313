"""Per-step work requested by modules: auxiliary losses are scaled and collected, buffers updated, and the counts of all
load counters gathered."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from meshwright.comm.collectives import all_reduce_sum
from meshwright.errors import LayoutError
from meshwright.nn.step_handles import AuxiliaryLoss, LoadCounter, StepBuffer, auxiliary_losses, step_buffers
from meshwright.plan.run_plan import Auxiliary, LayerSpec, Site
from meshwright.plan.serialize import REGENERATE_FIX
from meshwright.plan.stage_sizes import buffer_sums, load_rows
from meshwright.train.build_job import Job


class StepHandles:
    """Step handles of the modules in a rank's stages, with their entries in the plan."""

    def __init__(self, job: Job) -> None:
        self._job = job
        plan = job.plan
        self._losses: list[tuple[AuxiliaryLoss, int, int]] = []
        """Auxiliary losses, each with the number of ranks that it is partial over but the task's loss replicated, and
        the number of ranks that each add an equal share of it."""
        self._buffers: dict[Site, StepBuffer] = {}
        self._sums = buffer_sums(plan, job.context.rank)
        self._rows = load_rows(plan)
        self._counts: Tensor | None = None
        """Counts of all load counters in the last step, concatenated."""
        for part in job.parts().values():
            held = list(plan.held(part.stage))
            for path, loss in auxiliary_losses(part.module):
                planned = _auxiliary(held, path, loss.name)
                num_parts = plan.mesh.size(*(axis for axis in planned.work if axis in plan.loss.equal))
                num_shares = plan.mesh.size(*plan.mesh.view("tp")) if planned.in_region else 1
                self._losses.append((loss, num_parts, num_shares))
            for name, buffer in step_buffers(part.module):
                self._buffers[part.number, f"{name}.value"] = buffer

    def begin(self, global_batch: int) -> None:
        """Start a step: scale auxiliary losses to means over the step's samples."""
        for loss, _, num_shares in self._losses:
            loss.scale = 1.0 / (global_batch * num_shares)

    def auxiliary_losses(self) -> list[Tensor]:
        """Return this rank's contribution to the batch's auxiliary losses, scaled like the task's loss over tp."""
        taken = ((loss.take(), num_parts) for loss, num_parts, _ in self._losses)
        # If tp ranks hold different tokens, their sums are partial rather than replicated.
        return [value * num_parts for value, num_parts in taken if value is not None]

    @torch.no_grad()
    def end_step(self, *, applied: bool) -> None:
        """End a step: update buffers from the samples of all ranks, unless the step was skipped."""
        self._counts = None
        if applied:
            totals = self._totals()
            for site, buffer in self._buffers.items():
                buffer.commit(totals[site])
            self._counts = self._gather_counts()
        for handle in (*(loss for loss, *_ in self._losses), *self._buffers.values()):
            handle.discard()

    def load_counts(self) -> list[list[int]] | None:
        """Return the tokens per expert in the last step, per layer with a load counter, equal on all ranks.

        Waits for the device. None if the step was skipped or the model has no load counters.
        """
        if self._counts is None:
            return None
        counts = iter(self._counts.tolist())
        return [list(islice(counts, row.num_experts)) for row in self._rows]

    def _totals(self) -> dict[Site, Tensor]:
        """Return the updates of this rank's buffers, summed over ranks as the plan says."""
        totals = {site: buffer.pending() for site, buffer in self._buffers.items()}
        for one in self._sums:
            parts = [totals[site] for site in one.buffers]
            flat = torch.cat([part.flatten() for part in parts])
            for axis in one.axes:
                self._sum_over(axis, flat)
            pieces = flat.split_with_sizes([part.numel() for part in parts])
            for site, part, piece in zip(one.buffers, parts, pieces, strict=True):
                totals[site] = piece.view_as(part)
        return totals

    def _gather_counts(self) -> Tensor | None:
        """Return the last counts of all load counters, concatenated, on all ranks; None without load counters."""
        if not self._rows:
            return None
        # Each pipeline rank fills in its stages' rows, so their sum over pp is the whole.
        counts = torch.zeros(sum(row.num_experts for row in self._rows), dtype=torch.int64, device=self._job.device)
        for row, out in zip(self._rows, counts.split_with_sizes([row.num_experts for row in self._rows]), strict=True):
            counter = self._buffers.get(row.site)
            if isinstance(counter, LoadCounter) and counter.latest is not None:
                out.copy_(counter.latest)
        if self._job.axes.pp > 1:
            self._sum_over("pp", counts)
        return counts

    def _sum_over(self, axis: str, x: Tensor) -> None:
        assert self._job.mesh is not None, "a sum over an axis needs a mesh"
        all_reduce_sum(x, group=self._job.mesh.get_group(axis))


def _auxiliary(held: list[tuple[LayerSpec, int | None]], path: str, name: str) -> Auxiliary:
    """Return the plan's entry for the auxiliary loss `name` of the module at `path`."""
    blocks = [kind for kind, layer in held if layer is not None and path.startswith(kind.full_name("", layer) + ".")]
    kinds = blocks or [kind for kind, layer in held if layer is None]
    found = [one for kind in kinds for one in kind.auxiliary if one.name == name]
    if not found:
        raise LayoutError(
            f"{path} computes the auxiliary loss {name}, but the plan lists no such loss for it",
            where="plan, kinds",
            rule="a run does what its plan says",
            fix=REGENERATE_FIX,
        )
    return found[0]
