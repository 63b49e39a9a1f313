"""Bytes that all-to-alls of experts and of context parallelism really send in training steps, against predictions.

Predictions are of two kinds: before training ran, and from the experts' counts and the documents of its steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from meshwright.comm.collective_log import ALL_TO_ALL, group_record
from meshwright.features.contract import OnRank, RunFeature
from meshwright.nn.attention.mask_spec import Documents, TokenLayout
from meshwright.nn.step_handles import LoadCounter, load_counters
from meshwright.parallel.context_attention import HeadsAttention, RingAttention
from meshwright.parallel.expert_dispatch import AllToAllDispatcher
from meshwright.plan.context.layers import sent_by_attention
from meshwright.plan.expert_traffic import RankLoad, counted_load, sent_by_layer
from meshwright.plan.run_plan import ExpertLayer, Stage
from meshwright.plan.traffic import Purpose, context_bytes
from meshwright.train.build_job import Job
from meshwright.train.pipeline_stages import Pipeline
from meshwright.train.record.reporter import CountedBytes


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


class ContextTraffic:
    """Predictions of what this rank's attention sends."""

    purpose = Purpose.CONTEXT

    def __init__(self, job: Job) -> None:
        self._plan, self._rank = job.plan, job.context.rank
        self.basis = "documents" if job.plan.batch.packed else ""
        cores = (getattr(module, "core", None) for module in job.model.modules())
        self.groups: set[ProcessGroup] = {c.group for c in cores if isinstance(c, RingAttention | HeadsAttention)}
        self._in_step, self._explained = False, 0
        for part in job.parts().values() if self.groups and self._plan.batch.packed else ():
            part.module.register_forward_pre_hook(self._hook(part.stage))

    def start_step(self) -> None:
        """Prepare for a step."""
        self._in_step = True

    def end_step(self) -> None:
        """Finish a step."""
        self._in_step = False

    def predicted(self, num_steps: int) -> int:
        """Return the bytes of so many steps, as if each sample were one document."""
        return num_steps * context_bytes(self._plan, self._rank)

    def explained(self, num_steps: int) -> int:
        """Return the bytes of the steps that ran, as their documents imply."""
        return self._explained if self._plan.batch.packed else self.predicted(num_steps)

    def _hook(self, stage: Stage) -> Any:
        def add(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            layout = next((one for one in inputs if isinstance(one, TokenLayout)), None)
            if self._in_step and layout is not None:
                self._explained += self._sent(stage, layout.documents)

        return add

    def _sent(self, stage: Stage, documents: Documents | None) -> int:
        """Return the bytes of a micro-batch on a stage."""
        return sum(
            layers * num_bytes
            for name, layers in Counter(stage.kinds).items()
            for _, num_bytes in sent_by_attention(self._plan, self._rank, self._plan.kind(name), documents)
        )


class _Sources:
    """Senders that use the same groups."""

    def __init__(self, senders: tuple[ExpertTraffic | ContextTraffic, ...]) -> None:
        self._senders = senders
        self.groups: set[ProcessGroup] = set().union(*(one.groups for one in senders))
        self._sent = 0

    def start_step(self) -> None:
        self._sent -= self._now()
        for one in self._senders:
            one.start_step()

    def end_step(self) -> None:
        self._sent += self._now()
        for one in self._senders:
            one.end_step()

    def _now(self) -> int:
        return sum(group_record(group).sent[ALL_TO_ALL] for group in self.groups)

    def counted(self, num_steps: int) -> CountedBytes:
        predicted = sum(one.predicted(num_steps) for one in self._senders)
        explained = sum(one.explained(num_steps) for one in self._senders)
        purposes, bases = (one.purpose for one in self._senders), (one.basis for one in self._senders)
        return CountedBytes(" and ".join(purposes), self._sent, predicted, explained, " and ".join(filter(None, bases)))


class AllToAllsOnRank(OnRank):
    """Counts what this rank sends in all-to-alls of training steps."""

    def __init__(self, job: Job) -> None:
        self._job, self._steps = job, 0
        self._sources: list[_Sources] = []

    def attach(self, pipeline: Pipeline) -> None:
        experts, context = ExpertTraffic(self._job), ContextTraffic(self._job)
        # Bytes in a group that both use can't be told apart.
        joined = experts.groups & context.groups
        found = [_Sources((experts, context))] if joined else [_Sources((experts,)), _Sources((context,))]
        self._sources = [one for one in found if one.groups]

    @contextmanager
    def counting(self) -> Iterator[None]:
        for one in self._sources:
            one.start_step()
        yield
        for one in self._sources:
            one.end_step()
        self._steps += 1

    def all_to_alls(self) -> tuple[CountedBytes, ...]:
        return tuple(one.counted(self._steps) for one in self._sources if self._steps)


class AllToAllsInRuns(RunFeature):
    def start(self, job: Job) -> OnRank:
        return AllToAllsOnRank(job)


FEATURE = AllToAllsInRuns()
