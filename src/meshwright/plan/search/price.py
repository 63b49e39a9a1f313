"""Prices of layouts in closed form: memory of the fullest rank, and time of a step, from those of small stages.

Nothing here makes a plan of a run. State, activations and times are priced once for all layouts that share what they
depend on (`Probe`), and the schedule's idle time and micro-batches in flight have formulas (`schedules`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeVar

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import RESERVE
from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.pipeline.split_layers import balance_layers, layer_ranges
from meshwright.plan.cuda_memory import WORKSPACES
from meshwright.plan.memory import MemoryEstimate, process_memory
from meshwright.plan.search.layout import Inner, Layout
from meshwright.plan.search.probes import Activations, Held, Prices, Probe, State, Times
from meshwright.plan.search.schedules import Work, held, span, stages_of

T = TypeVar("T", Times, State, Activations)


class Pricer:
    """Prices of layouts of a run on a cluster."""

    def __init__(self, base: RunConfig, cluster: Cluster) -> None:
        self.base, self.cluster = base, cluster
        self.on_cuda = cluster.performance.is_async
        self.capacity = cluster.device.memory_bytes * (1 - RESERVE)
        """Bytes that a rank may take."""
        self.num_priced = 0
        """Layouts whose times were priced."""
        self.facts = cache(self._facts)
        self._template, self._contents = cache(self._make_probe), cache(self._make_contents)
        self._found: dict[object, list[object]] = {}

    def _facts(self, tp: int = 1) -> ModelFacts:
        """Return the model's description, which may depend on tp."""
        return model_facts(self.base.with_keys({"mesh.tp": tp}) if self.base.family.derives else self.base)

    def _probe(self, inner: Inner) -> Probe:
        return self._template(inner.template)

    def _make_probe(self, inner: Inner) -> Probe:
        return Probe(self.base, self.facts(inner.tp), inner, self.cluster)

    def _make_contents(self, p: int, v: int, schedule: str) -> tuple[tuple[Held, int], ...]:
        """Return what ranks hold, each different content once, with the first rank that holds it."""
        facts = self.facts()
        split = balance_layers(
            [facts.kind_of(layer).flops for layer in range(facts.num_layers)], p * v,
            before=sum(kind.flops for kind in facts.first), after=sum(kind.flops for kind in facts.last),
        )  # fmt: skip
        ranges, kinds, found = layer_ranges(split), tuple(dict.fromkeys(facts.layers)), dict[Held, int]()
        for rank in range(p):
            stages = stages_of(schedule, p, v, rank)
            names = [facts.layers[layer] for stage in stages for layer in ranges[stage]]
            content = Held(tuple(map(names.count, kinds)), 0 in stages, p * v - 1 in stages, len(stages))
            found.setdefault(content, rank)
        return tuple(found.items())

    def _of(self, key: object, layout: Layout, make: Callable[[], Prices[T]]) -> list[T]:
        """Return the amounts of each content of a layout's ranks, priced once."""
        shape = layout.pp, layout.chunks, layout.is_v_shaped
        whole = key, shape
        if whole not in self._found:
            if key not in self._found:
                self._found[key] = [make()]
            prices: Prices[T] = self._found[key][0]  # type: ignore[assignment]
            self._found[whole] = [prices.of(content) for content, _ in self.contents(layout)]
        return self._found[whole]  # type: ignore[return-value]

    def contents(self, layout: Layout) -> tuple[tuple[Held, int], ...]:
        """Return what a layout's ranks hold, each different content once, with the first rank that holds it."""
        return self._contents(layout.pp, layout.chunks, layout.schedule if layout.is_v_shaped else "1f1b")

    def _activations(self, layout: Layout) -> list[Activations]:
        key = "activations", layout.inner, layout.pp > 1
        return self._of(key, layout, lambda: self._probe(layout.inner).activations(layout))

    def _state(self, layout: Layout) -> list[State]:
        one, several = layout.inner, layout.num_microbatches > 1
        inner = Inner(one.tp, one.cp, one.ep, one.sequence_parallel)
        plain = replace(layout, inner=inner, num_microbatches=1 + several)
        key = "state", inner, layout.dp_replicate, layout.dp_shard, layout.reshard, several, layout.pp > 1
        return self._of(key, layout, lambda: self._probe(inner).state(plain))

    def _times(self, layout: Layout) -> list[Times]:
        number = min(layout.num_microbatches, 2 if layout.reshard else 8)
        key = (
            "times", layout.inner, layout.dp_replicate, layout.dp_shard, layout.reshard, number, layout.pp > 1,
        )  # fmt: skip
        return self._of(key, layout, lambda: self._probe(layout.inner).times(layout))

    def memory(self, layout: Layout) -> tuple[MemoryEstimate, int]:
        """Return the bytes of the rank with the most, by type, and its place in the pipeline."""
        found = zip(self.contents(layout), self._state(layout), self._activations(layout), strict=True)
        ranks = (
            (one, rank)
            for (content, rank), state, sizes in found
            for one in self._rank(layout, content, rank, state, sizes)
        )
        return max(ranks, key=lambda one: self.total(one[0]))

    def total(self, memory: MemoryEstimate) -> float:
        """Return the bytes of a rank, as a process if the device is a CPU."""
        return memory.total() if self.on_cuda else process_memory(memory, num_ranks=2)

    def _rank(self, layout: Layout, content: Held, rank: int, state: State, sizes: Activations) -> list[MemoryEstimate]:
        """Return what a rank holds at its peak, or in each moment that may be the peak (`cuda_memory`)."""
        peak, buffers = self._peak(layout, rank, sizes)
        most = MemoryEstimate(
            int(state.parameters), int(state.gradients), int(state.optimizer), int(state.gathered), int(peak),
            int(buffers), int(state.errors), WORKSPACES if self.on_cuda else 0,
        )  # fmt: skip
        if not self.on_cuda or layout.pp > 1 or layout.num_microbatches > 1:
            return [most]
        every = sizes.saved // max(1, sum(content.blocks))
        loss = replace(most, gradients=0, gathered=int(state.kept), activations=int(sizes.saved + sizes.output))
        last = replace(most, gradients=int(state.end_gradients), activations=int(sizes.saved + sizes.running))
        return [loss, last, replace(most, activations=int(every + sizes.running))]

    def _peak(self, layout: Layout, rank: int, sizes: Activations) -> tuple[float, float]:
        """Return the bytes of activations, and of receive buffers, that a rank holds at its peak."""
        if layout.pp == 1:
            return sizes.saved + max(sizes.running, sizes.output), 0.0
        count = held(layout.schedule, layout.pp, layout.chunks, layout.num_microbatches, rank)
        received = count * layout.chunks if rank or layout.chunks > 1 else 0.0
        return count * sizes.saved + max(sizes.running, sizes.output), (received + 1) * sizes.stream

    def num_bytes(self, layout: Layout) -> float:
        """Return the bytes of the rank with the most."""
        if layout.pp == 1 or not self.on_cuda:
            return self.total(self.memory(layout)[0])
        most = 0.0
        for (_, rank), state, sizes in zip(
            self.contents(layout), self._state(layout), self._activations(layout), strict=True
        ):
            peak, buffers = self._peak(layout, rank, sizes)
            most = max(most, sum(state[:5]) + peak + buffers)
        return most + WORKSPACES

    def time(self, layout: Layout) -> float:
        """Return the time of a step in µs."""
        self.num_priced += 1
        return self._step(layout, self._times(layout))

    def least_time(self, layout: Layout) -> float:
        """Return a time that a layout's step can't be under: that of its kernels and its operators' communication."""
        alone = replace(layout, dp_replicate=1, dp_shard=layout.inner.fewest_shards)
        key = "work", layout.inner, layout.pp > 1
        return self._step(layout, self._of(key, layout, lambda: self._probe(layout.inner).work(alone)))

    def _step(self, layout: Layout, ranks: list[Times]) -> float:
        works = [Work(one.forward, one.backward_input, one.backward_weight) for one in ranks]
        slowest = max(works, key=lambda one: one.total)
        every = self._sum_of_ranks(layout, works)
        edge = self._probe(layout.inner).edge if layout.pp > 1 else 0.0
        found = span(
            layout.schedule, layout.pp, layout.chunks, layout.num_microbatches, slowest=slowest, every=every, edge=edge
        )
        return found + max(one.at_end for one in ranks)

    def _sum_of_ranks(self, layout: Layout, works: list[Work]) -> float:
        """Return the sum of the work of all ranks, as if those between the first and the last were alike."""
        contents = self.contents(layout)
        middle = [
            one.total for one, (held, _) in zip(works, contents, strict=True) if not (held.has_first or held.has_last)
        ]
        ends = [one.total for one, (held, _) in zip(works, contents, strict=True) if held.has_first or held.has_last]
        return sum(ends) + (layout.pp - len(ends)) * (max(middle) if middle else 0.0)
