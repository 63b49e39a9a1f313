"""Prices of layouts in closed form: memory of the fullest rank, and time of a step, from amounts of small stages.

Nothing here makes a plan of a run. State, activations and times are counted once for all layouts that share what they
depend on (`Probe`), and the schedule's idle time and micro-batches in flight have formulas (`schedules`). What hides
what is as in `time.stage_times`: a gather runs beside the work of the unit before, a reduction beside the rest of the
backward, and kernels beside the host, unless the device is a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from operator import mul
from typing import TypeVar

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import RESERVE
from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.features.contract import KindPart
from meshwright.features.registry import plan_features
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.pipeline.split_layers import balance_layers, layer_ranges
from meshwright.plan.cuda_memory import WORKSPACES
from meshwright.plan.memory import MemoryEstimate, process_memory
from meshwright.plan.search.layout import Inner, Layout
from meshwright.plan.search.probes import Activations, Held, Passes, Prices, Probe, Shards, State
from meshwright.plan.search.schedules import Work, held, span, spread, stages_of
from meshwright.plan.time.step_time import update_us

T = TypeVar("T", Passes, Shards, State, Activations)
NO_SHARDS = Shards(0.0, 0.0, 0.0, 0.0, 0.0)
MORE_IN_CHUNKS = 1.004
"""Ratio by which several chunks per rank take more memory than the closed form says, at most, among those tested."""
FAR = 64
"""Ratio of two numbers of shards between which state is interpolated."""


class Pricer:
    """Prices of layouts of a run on a cluster."""

    def __init__(self, base: RunConfig, cluster: Cluster) -> None:
        self.base, self.cluster = base, cluster
        self.on_cuda = cluster.performance.is_async
        self.capacity = cluster.device.memory_bytes * (1 - RESERVE)
        """Bytes that a rank may take."""
        self.num_priced = 0
        """Layouts whose times were priced."""
        self.facts, self.num_bytes = cache(self._facts), cache(self._num_bytes)
        self._contents, self._parts = cache(self._make_contents), cache(self._make_parts)
        self._probe, self._template = cache(self._make_probe), cache(self._make_template)
        self._output = cache(lambda inner: self._probe(inner).output(inner.samples, self._ends(inner)))
        self._edge = cache(lambda inner: self._probe(inner).edge(inner.samples))
        self._prices: dict[object, object] = {}
        self._found: dict[object, list[object]] = {}

    def _facts(self, tp: int = 1) -> ModelFacts:
        """Return the model's description, which may depend on tp."""
        return model_facts(self.base.with_keys({"mesh.tp": tp}) if self.base.family.derives else self.base)

    def _make_template(self, inner: Inner) -> Probe:
        return Probe(self.base, self.facts(inner.tp), inner, self.cluster)

    def _make_probe(self, inner: Inner) -> Probe:
        """Return the probe of a division. The samples of a micro-batch may change whether features do something in the
        ends, such as a loss by chunks."""
        own, samples = self._ends(inner).keys(), 1
        while self._ends(inner._replace(samples=samples)).keys() != own:
            samples += 1
        return self._template(inner._replace(recompute="none", samples=samples))

    def _ends(self, inner: Inner) -> dict[str, tuple[KindPart, ...]]:
        """Return what features add to the model's ends, by the name of the end; neither recomputation nor compilation
        changes that."""
        return self._parts(Inner(*inner[:5]))

    def _make_parts(self, inner: Inner) -> dict[str, tuple[KindPart, ...]]:
        """Return what features add to the model's ends, by the name of the end."""
        ranks = inner.fewest_shards
        config = Layout(inner, dp_shard=ranks).configured(self.base)
        config = config.with_keys({"train.global_batch": inner.samples * ranks})
        facts, features = self.facts(inner.tp), plan_features(config=config)
        ends = (*facts.first, *facts.last)
        made = {kind.name: [one.make(config, facts, kind, None) for one in features] for kind in ends}
        return {name: tuple(one for one in parts if one is not None) for name, parts in made.items() if any(parts)}

    def _make_contents(self, p: int, v: int, schedule: str) -> tuple[tuple[Held, int], ...]:
        """Return what ranks hold, each different content once, with the first rank that holds it."""
        facts = self.facts()
        split = balance_layers(
            [facts.kind_of(layer).flops for layer in range(facts.num_layers)], p * v,
            before=sum(kind.flops for kind in facts.first), after=sum(kind.flops for kind in facts.last),
        )  # fmt: skip
        ranges, kinds, found = layer_ranges(split), tuple(dict.fromkeys(facts.layers)), dict[Held, int]()
        for rank in range(p):
            stages, weights = stages_of(schedule, p, v, rank), spread(schedule, p, v, rank)
            names = [facts.layers[layer] for stage in stages for layer in ranges[stage]]
            counts = [len(ranges[stage]) for stage in stages]
            weighted = sum(map(mul, counts, weights)) * len(counts) / max(1.0, sum(weights) * sum(counts))
            blocks = tuple(map(names.count, kinds))
            found.setdefault(Held(blocks, 0 in stages, p * v - 1 in stages, len(stages), weighted), rank)
        return tuple(found.items())

    def contents(self, layout: Layout) -> tuple[tuple[Held, int], ...]:
        """Return what a layout's ranks hold, each different content once, with the first rank that holds it."""
        return self._contents(layout.pp, layout.chunks, "zb-v" if layout.is_v_shaped else "interleaved")

    def _of(self, key: object, layout: Layout, make: Callable[[], Prices[T]]) -> list[T]:
        """Return the amounts of each content of a layout's ranks, counted once."""
        whole = key, layout.pp, layout.chunks, layout.is_v_shaped
        if whole not in self._found:
            if key not in self._prices:
                self._prices[key] = make()
            prices: Prices[T] = self._prices[key]  # type: ignore[assignment]
            alike = {content[:4]: content for content, _ in self.contents(layout)}  # they may differ in `uneven`
            found = {key: prices.of(content) for key, content in alike.items()}
            self._found[whole] = [found[content[:4]] for content, _ in self.contents(layout)]
        return self._found[whole]  # type: ignore[return-value]

    def _places(self, layout: Layout) -> int:
        """Return the places of a pipeline whose bytes are counted: a lone stage has those of the first and the last
        together, unless their parameters are tied."""
        is_tied = any(parameter.tied_to for kind in self.facts(layout.inner.tp).last for parameter in kind.parameters)
        return layout.pp if is_tied else 2

    def _activations(self, layout: Layout) -> list[Activations]:
        """Return the bytes of a micro-batch: all but the output's are proportional to its samples."""
        inner, probe, number = layout.inner, self._probe(layout.inner), layout.inner.samples
        plain = Layout(inner._replace(samples=1), self._places(layout), dp_shard=inner.fewest_shards)
        sizes = self._of((probe, inner.recompute, plain.pp > 1), layout, lambda: probe.activations(plain))
        output = self._output(inner._replace(recompute="none"))
        return [
            Activations(number * one.saved, number * one.running, output * content.has_last, number * one.stream)
            for one, (content, _) in zip(sizes, self.contents(layout), strict=True)
        ]

    def _state(self, layout: Layout) -> list[State]:
        """Return the bytes of state. What is sharded is inverse to the number of shards, but for experts, of which a
        rank has a whole one, at least."""
        one, shards = layout.inner, layout.dp_shard
        inner = Inner(one.tp, one.cp, one.ep, one.sequence_parallel)
        few = max(inner.fewest_shards, 1 if inner.cp > 1 else 2)

        def at(number: int) -> list[State]:
            plain = Layout(inner, self._places(layout), dp_shard=number)
            key = "state", inner, number, plain.pp > 1
            return self._of(key, layout, lambda: self._probe(inner).state(plain))

        if shards <= few or any(kind.experts is not None for kind in self.facts(inner.tp).kinds):
            return at(shards)
        key = "state", inner, shards, layout.pp, layout.chunks, layout.is_v_shaped
        if key not in self._found:
            share = (few / shards - 1 / FAR) / (1 - 1 / FAR)
            pairs = zip(at(few), at(FAR * few), strict=True)
            self._found[key] = [
                State(*(far + share * (near - far) for near, far in zip(*pair, strict=True))) for pair in pairs
            ]
        return self._found[key]  # type: ignore[return-value]

    def _passes(self, layout: Layout) -> list[Passes]:
        key = "passes", layout.inner
        return self._of(key, layout, lambda: self._probe(layout.inner).passes(layout))

    def _shards(self, layout: Layout) -> list[Shards]:
        one = layout.inner
        inner = Inner(one.tp, one.cp, one.ep, one.sequence_parallel)
        plain = layout._replace(inner=inner, num_microbatches=1)
        key = "shards", inner, layout.dp_replicate, layout.dp_shard, layout.pp > 1
        return self._of(key, layout, lambda: self._probe(inner).shards(plain))

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
        peak, buffers = self._peak(layout, content, rank, sizes)
        most = MemoryEstimate(
            int(state.parameters), int(state.gradients), int(state.optimizer), int(_gathered(layout, state)),
            int(peak), int(buffers), int(state.errors), WORKSPACES if self.on_cuda else 0,
        )  # fmt: skip
        if not self.on_cuda or layout.pp > 1 or layout.num_microbatches > 1:
            return [most]
        every, kept = sizes.saved // max(1, sum(content.blocks)), state.root if layout.reshard else state.kept
        loss = replace(most, gradients=0, gathered=int(kept), activations=int(sizes.saved + sizes.output))
        last = replace(most, gradients=int(state.end_gradients), activations=int(sizes.saved + sizes.running))
        return [loss, last, replace(most, activations=int(every + sizes.running))]

    def _peak(self, layout: Layout, content: Held, rank: int, sizes: Activations) -> tuple[float, float]:
        """Return the bytes of activations, and of receive buffers, that a rank holds at its peak."""
        if layout.pp == 1:
            return sizes.saved + max(sizes.running, sizes.output), 0.0
        count = held(layout.schedule, layout.pp, layout.chunks, layout.num_microbatches, rank)
        received = count * layout.chunks if rank or layout.chunks > 1 else 0.0
        # ZB-H1 keeps outputs for deferred gradients; in other schedules, the last stage holds one micro-batch.
        saved, output = sizes.saved * content.uneven, sizes.output
        if layout.schedule == "zb-h1":
            saved, output = saved + output, 0.0
        return count * saved + max(sizes.running, output), (received + 1) * sizes.stream

    def _num_bytes(self, layout: Layout) -> float:
        """Return the bytes of the rank with the most."""
        if layout.pp == 1 or not self.on_cuda:
            return self.total(self.memory(layout)[0])
        most = 0.0
        for (content, rank), state, sizes in zip(
            self.contents(layout), self._state(layout), self._activations(layout), strict=True
        ):
            peak, buffers = self._peak(layout, content, rank, sizes)
            most = max(most, sum(state[:4]) + _gathered(layout, state) + peak + buffers)
        return (most + WORKSPACES) * (MORE_IN_CHUNKS if layout.chunks > 1 else 1.0)

    def time(self, layout: Layout) -> float:
        """Return the time of a step in µs."""
        self.num_priced += 1
        shards = self._shards(layout)
        ranks = zip(self.contents(layout), self._passes(layout), shards, strict=True)
        works, ends = [], []
        for (content, _), passes, units in ranks:
            work, left = self._with_units(layout, content, passes, units)
            works.append(work)
            ends.append(left)
        after = max(left + self._at_end(state) for left, state in zip(ends, self._state(layout), strict=True))
        return self._span(layout, works) + after

    def least_time(self, layout: Layout) -> float:
        """Return a time that a layout's step can't be under: that of its kernels and its operators' communication."""
        ranks = zip(self.contents(layout), self._passes(layout), strict=True)
        works = [self._with_units(layout, content, passes, NO_SHARDS)[0] for (content, _), passes in ranks]
        return self._span(layout, works)

    def _with_units(self, layout: Layout, content: Held, work: Passes, units: Shards) -> tuple[Work, float]:
        """Return a rank's work per micro-batch with gathers of weights, and what is left of reductions at the end."""
        share, back = (1.0, 1.0) if layout.reshard else (1 / layout.num_microbatches, 0.0)
        forward, backward = work.forward, work.backward_input + work.backward_weight
        if self.on_cuda:
            # Nothing runs beside the first gathers of a pass, nor beside the last reduction, which is of those units.
            left = max(units.reduce * units.first / max(units.gather, 1e-9), units.reduce - backward)
            forward = max(forward + units.first * share, units.gather * share, work.host_forward)
            backward = max(backward + units.last * back, units.gather * back, work.host_backward)
        else:
            left = units.reduce
            forward += units.gather * share + work.host_forward
            backward += units.gather * back + work.host_backward
        action = self.cluster.performance.host.action_us * content.num_stages if layout.pp > 1 else 0.0
        rest = Work(forward + action, backward - work.backward_weight + action, work.backward_weight)
        return rest, left + units.sums

    def _at_end(self, state: State) -> float:
        """Return what a rank does last: an update that reads parameter, gradient and states,
        and writes all but the gradient, which the norm and clipping read and write besides."""
        moved = 6 * state.gradients + 2 * state.optimizer
        return self.cluster.performance.host.step_us + update_us(self.cluster, moved, state.num_parameters)

    def _span(self, layout: Layout, works: list[Work]) -> float:
        slowest, every = max(works, key=lambda one: one.total), self._sum_of_ranks(layout, works)
        edge = self._edge(layout.inner) if layout.pp > 1 else 0.0
        found = span(
            layout.schedule, layout.pp, layout.chunks, layout.num_microbatches, slowest=slowest, every=every, edge=edge
        )
        if not (cores := self.cluster.performance.cores):
            return found
        ranks = layout.data_parallel * layout.inner.cp * layout.inner.tp
        nodes = -(-ranks * layout.pp // self.cluster.devices_per_node)
        return max(found, layout.num_microbatches * every * ranks / nodes / cores)

    def _sum_of_ranks(self, layout: Layout, works: list[Work]) -> float:
        """Return the sum of the work of all ranks, as if those between the first and the last were alike."""
        contents = self.contents(layout)
        is_end = [one.has_first or one.has_last for one, _ in contents]
        ends = [one.total for one, end in zip(works, is_end, strict=True) if end]
        middle = max((one.total for one, end in zip(works, is_end, strict=True) if not end), default=0.0)
        return sum(ends) + (layout.pp - len(ends)) * middle


def _gathered(layout: Layout, state: State) -> float:
    """Return the bytes of gathered weights and of unsharded gradients."""
    several = layout.num_microbatches > 1 or layout.splits_backward
    return state.gathered + state.accumulated * several + (0.0 if layout.reshard else state.retained)
