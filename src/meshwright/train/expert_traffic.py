"""Bytes that expert parallelism really sends in training steps, against those predicted from routing."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.distributed import ProcessGroup

from meshwright.comm.collective_log import group_record
from meshwright.nn.step_handles import LoadCounter, load_counters
from meshwright.parallel.expert_dispatch import AllToAllDispatcher
from meshwright.plan.block_layers import ExpertLayer
from meshwright.plan.expert_traffic import RankLoad, counted_load, sent_by_layer
from meshwright.train.build_job import Job
from meshwright.train.record.reporter import ExpertBytes


class ExpertTraffic(AbstractContextManager[None]):
    """Context of training steps that counts what this rank's dispatches send."""

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
        self._groups: set[ProcessGroup] = {d.group for d in dispatchers if isinstance(d, AllToAllDispatcher)}
        self._sent = self._before = self._steps = 0
        self._first: list[torch.Tensor | None] = []
        """Values of the load counters before the first step."""

    def __enter__(self) -> None:
        if not self._steps:
            self._first = [None if counter is None else counter.value.clone() for _, counter in self._layers]
        self._before = self._now()

    def __exit__(self, *raised: object) -> None:
        self._sent += self._now() - self._before
        self._steps += 1

    def _now(self) -> int:
        return sum(group_record(group).all_to_all_bytes for group in self._groups)

    def total(self) -> ExpertBytes | None:
        """Return the bytes of all steps, or None if no experts are sharded or no step ran."""
        if not self._layers or not self._steps:
            return None
        uniform = sum(self._predicted(layer, None) for layer, _ in self._layers)
        counted = sum(self._predicted(layer, self._load(at)) for at, (layer, _) in enumerate(self._layers))
        return ExpertBytes(self._sent, uniform * self._steps, counted * self._steps)

    def _predicted(self, layer: ExpertLayer, load: RankLoad | None) -> int:
        plan, rank = self._job.plan, self._job.context.rank
        return sum(one.num_bytes for one in sent_by_layer(plan, rank, layer, load))

    def _load(self, at: int) -> RankLoad | None:
        """Return the load of ep's ranks that a layer's counts imply; None if it has no counter, or the load is known
        before the run."""
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
