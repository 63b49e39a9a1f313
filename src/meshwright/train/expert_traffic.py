"""Bytes that expert parallelism sends in training steps, predicted before they ran and from the experts' counts."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from meshwright.nn.step_handles import LoadCounter, load_counters
from meshwright.parallel.expert_dispatch import AllToAllDispatcher
from meshwright.plan.block_layers import ExpertLayer
from meshwright.plan.collective_bytes import Purpose
from meshwright.plan.expert_traffic import RankLoad, counted_load, sent_by_layer
from meshwright.train.build_job import Job


class ExpertTraffic:
    """Predictions of what this rank's dispatches send."""

    purpose, basis = Purpose.EXPERTS, "load"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._layers: list[tuple[ExpertLayer, LoadCounter | None]] = []
        for part in job.parts().values():
            for kind, layer in job.plan.held(part.stage):
                if kind.experts is not None and kind.experts.axes:
                    module = part.module.get_submodule(kind.full_name(kind.experts.module, layer))
                    counter = next((counter for _, counter in load_counters(module)), None)
                    self._layers.append((kind.experts, counter))
        dispatchers = (getattr(m, "dispatcher", None) for m in job.model.modules())
        self.groups: set[ProcessGroup] = {d.group for d in dispatchers if isinstance(d, AllToAllDispatcher)}
        self._first: list[torch.Tensor | None] | None = None
        """Values of the load counters before the first step."""

    def start_step(self) -> None:
        """Prepare for a step."""
        if self._first is None:
            self._first = [None if counter is None else counter.value.clone() for _, counter in self._layers]

    def end_step(self) -> None:
        """Finish a step."""

    def predicted(self, num_steps: int) -> int:
        """Return the bytes of so many steps, as predicted before the run."""
        return num_steps * sum(self._predicted(layer, None) for layer, _ in self._layers)

    def explained(self, num_steps: int) -> int:
        """Return the bytes of the steps that ran, as their experts' counts imply."""
        return num_steps * sum(self._predicted(layer, self._load(at)) for at, (layer, _) in enumerate(self._layers))

    def _predicted(self, layer: ExpertLayer, load: RankLoad | None) -> int:
        plan, rank = self._job.plan, self._job.context.rank
        return sum(one.num_bytes for one in sent_by_layer(plan, rank, layer, load))

    def _load(self, at: int) -> RankLoad | None:
        """Return the load of ep's ranks that a layer's counts imply; None if it has no counter, or the load is known
        before the run."""
        assert self._first is not None, "a step ran"
        (layer, counter), first = self._layers[at], self._first[at]
        if counter is None or first is None or layer.uniform or layer.capacity is not None:
            return None
        plan = self._job.plan
        return counted_load(
            (counter.value - first).tolist(),
            top_k=layer.top_k,
            num_tokens=plan.rank_tokens,
            num_ranks=plan.mesh.size(*layer.axes),
        )
