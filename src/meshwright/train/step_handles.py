"""What a model's modules ask to be done once a step: auxiliary losses are scaled and collected, buffers updated."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.collectives import all_reduce_sum
from meshwright.errors import LayoutError
from meshwright.nn.step_handles import AuxiliaryLoss, StepBuffer, auxiliary_losses, step_buffers
from meshwright.plan.mesh_views import Atoms
from meshwright.plan.run_plan import Kind
from meshwright.train.build_job import Job


class OncePerStep:
    """The handles in a rank's stages, and what the plan says of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        plan = job.plan
        self._losses: list[tuple[AuxiliaryLoss, int]] = []
        """With the number of ranks that have a part of it each, where others have the same loss."""
        self._buffers: list[tuple[StepBuffer, Atoms]] = []
        for part in job.parts().values():
            held = list(plan.held(part.stage))
            summed = {kind.full_name(one.name, layer): one.summed for kind, layer in held for one in kind.buffers}
            for path, loss in auxiliary_losses(part.module):
                parts = set(_work(held, path, loss.name)) & set(plan.loss.equal)
                self._losses.append((loss, plan.mesh.size(*parts)))
            for name, buffer in step_buffers(part.module):
                self._buffers.append((buffer, summed[f"{name}.value"]))

    def begin(self, global_batch: int) -> None:
        """Start a step: auxiliary losses are means over its samples."""
        for loss, _ in self._losses:
            loss.scale = 1.0 / global_batch

    def auxiliary_losses(self) -> list[Tensor]:
        """This rank's part of the batch's auxiliary losses, as its part of the task's loss: equal over tp."""
        found = ((loss.take(), num_parts) for loss, num_parts in self._losses)
        # Where ranks of tp have different tokens their sums are parts, and not the same loss again.
        return [value * num_parts for value, num_parts in found if value is not None]

    @torch.no_grad()
    def settle(self, *, taken: bool) -> None:
        """End a step: buffers take what all ranks' samples add to them, or nothing of a step that is skipped."""
        for buffer, axes in self._buffers if taken else ():
            total = buffer.pending()
            for axis in axes:
                assert self._job.mesh is not None, "what is summed over an axis is on a mesh"
                all_reduce_sum(total, group=self._job.mesh.get_group(axis))
            buffer.commit(total)
        for handle in (*(loss for loss, _ in self._losses), *(buffer for buffer, _ in self._buffers)):
            handle.discard()


def _work(held: list[tuple[Kind, int | None]], path: str, name: str) -> Atoms:
    """The atoms over which ranks have parts of the auxiliary loss of this name in the module at `path`."""
    blocks = [kind for kind, layer in held if layer is not None and path.startswith(kind.full_name("", layer) + ".")]
    kinds = blocks or [kind for kind, layer in held if layer is None]
    found = [one.work for kind in kinds for one in kind.auxiliary if one.name == name]
    if not found:
        raise LayoutError(
            f"{path} computes the auxiliary loss {name}, and the plan has none of this name there",
            where="plan, kinds",
            rule="a run does what its plan says",
            fix="a plan that is made again (meshwright plan … -o FILE)",
        )
    return found[0]
