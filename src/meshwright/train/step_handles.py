"""Per-step work requested by modules: scaling and collecting auxiliary losses, and updating buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.collectives import all_reduce_sum
from meshwright.errors import LayoutError
from meshwright.nn.step_handles import AuxiliaryLoss, StepBuffer, auxiliary_losses, step_buffers
from meshwright.plan.mesh_views import Atoms
from meshwright.plan.run_plan import Auxiliary, Kind
from meshwright.train.build_job import Job


class StepHandles:
    """Step handles of the modules in a rank's stages, with their entries in the plan."""

    def __init__(self, job: Job) -> None:
        self._job = job
        plan = job.plan
        self._losses: list[tuple[AuxiliaryLoss, int, int]] = []
        """Auxiliary losses, each with the number of ranks that it is partial over but the task's loss replicated, and
        the number of ranks that each add an equal share of it."""
        self._buffers: list[tuple[StepBuffer, Atoms]] = []
        for part in job.parts().values():
            held = list(plan.held(part.stage))
            summed = {kind.full_name(one.name, layer): one.summed for kind, layer in held for one in kind.buffers}
            for path, loss in auxiliary_losses(part.module):
                planned = _auxiliary(held, path, loss.name)
                num_parts = plan.mesh.size(*(axis for axis in planned.work if axis in plan.loss.equal))
                num_shares = plan.mesh.size(*plan.mesh.view("tp")) if planned.in_region else 1
                self._losses.append((loss, num_parts, num_shares))
            for name, buffer in step_buffers(part.module):
                self._buffers.append((buffer, summed[f"{name}.value"]))

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
    def settle(self, *, taken: bool) -> None:
        """End a step: update buffers from the samples of all ranks, unless the step was skipped."""
        for buffer, axes in self._buffers if taken else ():
            total = buffer.pending()
            for axis in axes:
                assert self._job.mesh is not None, "a sum over an axis needs a mesh"
                all_reduce_sum(total, group=self._job.mesh.get_group(axis))
            buffer.commit(total)
        for handle in (*(loss for loss, *_ in self._losses), *(buffer for buffer, _ in self._buffers)):
            handle.discard()


def _auxiliary(held: list[tuple[Kind, int | None]], path: str, name: str) -> Auxiliary:
    """Return the plan's entry for the auxiliary loss `name` of the module at `path`."""
    blocks = [kind for kind, layer in held if layer is not None and path.startswith(kind.full_name("", layer) + ".")]
    kinds = blocks or [kind for kind, layer in held if layer is None]
    found = [one for kind in kinds for one in kind.auxiliary if one.name == name]
    if not found:
        raise LayoutError(
            f"{path} computes the auxiliary loss {name}, but the plan lists no such loss for it",
            where="plan, kinds",
            rule="a run does what its plan says",
            fix="regenerate the plan: meshwright plan … -o FILE",
        )
    return found[0]
