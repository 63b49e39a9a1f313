"""Bytes that all-to-alls of experts and of context parallelism really send in training steps, against predictions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

from torch.distributed import ProcessGroup

from meshwright.comm.collective_log import group_record
from meshwright.train.build_job import Job
from meshwright.train.context_traffic import ContextTraffic
from meshwright.train.expert_traffic import ExpertTraffic
from meshwright.train.record.reporter import CountedBytes


@dataclass(frozen=True)
class _Sources:
    """Senders that use the same groups."""

    of: tuple[ExpertTraffic | ContextTraffic, ...]

    @cached_property
    def groups(self) -> set[ProcessGroup]:
        return set().union(*(one.groups for one in self.of))

    def now(self) -> int:
        return sum(group_record(group).all_to_all_bytes for group in self.groups)

    def start_step(self) -> None:
        for one in self.of:
            one.start_step()

    def end_step(self) -> None:
        for one in self.of:
            one.end_step()

    def counted(self, sent: int, num_steps: int) -> CountedBytes:
        predicted = sum(one.predicted(num_steps) for one in self.of)
        explained = sum(one.explained(num_steps) for one in self.of)
        purposes, bases = (one.purpose for one in self.of), (one.basis for one in self.of)
        return CountedBytes(" and ".join(purposes), sent, predicted, explained, " and ".join(filter(None, bases)))


class AllToAllTraffic(AbstractContextManager[None]):
    """Context of training steps that counts what this rank sends in all-to-alls."""

    def __init__(self, job: Job) -> None:
        experts, context = ExpertTraffic(job), ContextTraffic(job)
        # Bytes in a group that both use can't be told apart.
        joined = experts.groups & context.groups
        found = [_Sources((experts, context))] if joined else [_Sources((experts,)), _Sources((context,))]
        self._sources = [one for one in found if one.groups]
        self._sent, self._steps = [0] * len(self._sources), 0

    def __enter__(self) -> None:
        for one in self._sources:
            one.start_step()
        self._sent = [sent - one.now() for sent, one in zip(self._sent, self._sources, strict=True)]

    def __exit__(self, *raised: object) -> None:
        self._sent = [sent + one.now() for sent, one in zip(self._sent, self._sources, strict=True)]
        for one in self._sources:
            one.end_step()
        self._steps += 1

    def total(self) -> tuple[CountedBytes, ...]:
        """Return the bytes of all steps, by purpose; nothing if no step ran."""
        pairs = zip(self._sources, self._sent, strict=True)
        return tuple(one.counted(sent, self._steps) for one, sent in pairs if self._steps)
