"""Prices of a few small stages, by which those of any stage follow: each has two or three blocks of a kind, or an end.

What a block adds to a stage's time and memory is the difference between stages with three and with two of them. The
stages are a plan, made for a division of work inside blocks (`Inner`) and priced by the same functions as a run's;
other numbers of shards and replicas only change its mesh and its units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.stacks import MESHWRIGHT
from meshwright.config.schema import RunConfig
from meshwright.mesh.axes import Axes
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.pipeline.actions import Action, ActionKind
from meshwright.pipeline.simulate import PeakBytes
from meshwright.plan.cuda_memory import end_gradient_bytes, kept_weight_bytes
from meshwright.plan.make_plan import StageParts, make_stages
from meshwright.plan.memory import rank_bytes, stage_bytes
from meshwright.plan.run_plan import EXPERTS, LayerSpec, Mesh, RunPlan, Unit
from meshwright.plan.search.layout import Inner, Layout
from meshwright.plan.time.communication import Communication
from meshwright.plan.time.kernel_times import KernelTimes
from meshwright.plan.time.stage_times import StagePricer
from meshwright.plan.time.step_time import at_end

MOST_MICROBATCHES = 8
"""Micro-batches of a probe's schedule, at most: more change the share of passes that gather weights by little."""


class Times(NamedTuple):
    """Times of a rank in µs, per micro-batch but for the last."""

    forward: float
    backward_input: float
    """With recomputation."""
    backward_weight: float
    at_end: float
    """After the last backward."""


class State(NamedTuple):
    """Bytes of a rank that don't depend on its micro-batches' size."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    errors: float
    kept: float
    """Gathered weights that are kept until the backward."""
    end_gradients: float
    """Gradients of the ends after the blocks."""


class Activations(NamedTuple):
    """Bytes of a micro-batch on a rank, as in `memory.StageBytes`."""

    saved: float
    running: float
    output: float
    stream: float


@dataclass(frozen=True)
class Held:
    """Contents of a rank: blocks by kind, ends, and the number of stages."""

    blocks: tuple[int, ...]
    has_first: bool = True
    has_last: bool = True
    num_stages: int = 1


T = TypeVar("T", Times, State, Activations)
Amounts = tuple[float, ...]


@dataclass(frozen=True)
class Prices(Generic[T]):
    """Amounts of a rank by what it holds."""

    kind: type[T]
    stage: Amounts
    """What a stage has, however many blocks it holds."""
    blocks: tuple[Amounts, ...]
    """What a block of each kind adds."""
    first: Amounts
    last: Amounts

    def of(self, held: Held) -> T:
        """Return the amounts of a rank. Each of its stages takes time, but state is gathered for one at a time."""
        stages = held.num_stages if self.kind is Times else 1
        terms = [(stages, self.stage), *zip(held.blocks, self.blocks, strict=True)]
        terms += [(1, self.first)] * held.has_first + [(1, self.last)] * held.has_last
        return self.kind(*(sum(count * one[at] for count, one in terms) for at in range(len(self.stage))))


class Probe:
    """Prices for a division of work inside blocks."""

    def __init__(self, base: RunConfig, facts: ModelFacts, inner: Inner, cluster: Cluster) -> None:
        ranks = inner.fewest_shards
        keys = {"train.global_batch": inner.samples * ranks, "comm.ranks_per_node": None}
        self._config = Layout(inner, dp_shard=ranks).configured(base).with_keys(keys)
        self._inner, self._cluster, self._facts = inner, cluster, facts
        self._kinds = kinds = tuple(dict.fromkeys(facts.layers))
        self._layer = [facts.layers.index(name) for name in kinds]
        """A layer of each kind."""
        self._ends = kinds.index(facts.layers[0]), kinds.index(facts.layers[-1])
        """Kinds of the first and the last layer."""

    @cached_property
    def _stages(self) -> RunPlan:
        """Plan of stages as in a pipeline: with the first ends, without any, with the last ends."""
        first, last = (self._layer[kind] for kind in self._ends)
        middle = [((layer,) * count, False, False) for layer in self._layer for count in (2, 3)]
        return self._plan([((first,) * 2, True, False), *middle, ((last,) * 2, False, True)])

    @cached_property
    def _alone(self) -> tuple[RunPlan, ...]:
        """Plans of a single stage with all ends: of two blocks of the first kind, then with another of each kind."""
        two = (self._layer[self._ends[0]],) * 2
        return tuple(self._plan([(layers, True, True)]) for layers in (two, *((*two, one) for one in self._layer)))

    def _plan(self, parts: Sequence[StageParts]) -> RunPlan:
        return make_stages(self._config, parts, self._facts, nodes=self._cluster.devices_per_node)

    @cached_property
    def edge(self) -> float:
        """Time of a transfer between stages."""
        plan = self._on_mesh(self._stages, Layout(self._inner, dp_shard=self._inner.fewest_shards))
        latency, bandwidth, num_bytes = Communication(plan, self._cluster).edge(0)
        return latency + num_bytes / bandwidth

    def work(self, layout: Layout) -> Prices[Times]:
        """Return the times of kernels and of the operators' communication alone."""
        performance = self._cluster.performance
        plan = self._on_mesh(self._stages if layout.pp > 1 else self._alone[-1], layout)
        sent = Communication(plan, self._cluster)
        kernels = KernelTimes(self._cluster.device, performance, MESHWRIGHT)

        def of(name: str) -> Amounts:
            kind = plan.kind(name)
            work = kernels.of_kind(kind, samples=plan.batch.samples, tokens=plan.batch.tokens)
            forward, backward, again = (sum(one.values()) for one in sent.of_kind(kind))
            rest = work.backward_input.on_device + work.recompute.on_device + backward + again
            return work.forward.on_device + forward, rest, work.backward_weight.on_device, 0.0

        described = {plan.kind(name).described: name for stage in plan.stages for name in stage.kinds}
        blocks = tuple(of(described[name]) if name in described else (0.0,) * 4 for name in self._kinds)
        first, last = plan.stages[0].before, plan.stages[-1].after
        ends = (tuple(map(sum, zip((0.0,) * 4, *map(of, names), strict=True))) for names in (first, last))
        return Prices(Times, (0.0,) * 4, blocks, *ends)

    def times(self, layout: Layout) -> Prices[Times]:
        """Return the times with a layout's shards and replicas."""
        performance = self._cluster.performance
        host = performance.host.action_us if layout.pp > 1 else 0.0

        def priced(plan: RunPlan) -> Iterator[Times]:
            sent = Communication(plan, self._cluster)
            kernels = KernelTimes(self._cluster.device, performance, MESHWRIGHT)
            pricer = StagePricer(plan, kernels, sent, performance, MESHWRIGHT, captured=False)
            times = tuple(pricer.times(number) for number in range(len(plan.stages)))
            for number, one in enumerate(times):
                after = sum(at_end(plan, self._cluster, sent, number, times).values())
                backward = one.backward_input + one.recompute + host
                yield Times(one.forward + host, backward, one.backward_weight, after)

        return self._prices(Times, priced, layout)

    def state(self, layout: Layout) -> Prices[State]:
        """Return the bytes of state with a layout's shards and replicas."""

        def priced(plan: RunPlan) -> Iterator[State]:
            ranks = plan.mesh.num_ranks() // len(plan.stages)
            for number, stage in enumerate(plan.stages):
                one = rank_bytes(plan, number * ranks, PeakBytes())
                kept, ends = kept_weight_bytes(plan, stage), end_gradient_bytes(plan, stage)
                yield State(one.parameters, one.gradients, one.optimizer, one.gathered, one.errors, kept, ends)

        return self._prices(State, priced, layout)

    def activations(self, layout: Layout) -> Prices[Activations]:
        """Return the bytes of a micro-batch."""
        on_cuda = self._cluster.performance.is_async

        def priced(plan: RunPlan) -> Iterator[Activations]:
            for stage in plan.stages:
                one = stage_bytes(plan, stage, on_cuda=on_cuda)
                yield Activations(one.saved, one.running, one.output, one.stream)

        return self._prices(Activations, priced, layout)

    def _prices(self, kind: type[T], priced: Callable[[RunPlan], Iterator[T]], layout: Layout) -> Prices[T]:
        none = (0.0,) * len(kind.__annotations__)
        if layout.pp == 1:
            two, *more = (next(priced(self._on_mesh(plan, layout))) for plan in self._alone)
            blocks = tuple(_minus(one, two) for one in more)
            return Prices(kind, _minus(two, blocks[self._ends[0]], 2), blocks, none, none)
        found = list(priced(self._on_mesh(self._stages, layout)))
        middle, (first, last) = found[1:-1], self._ends
        blocks = tuple(_minus(three, two) for two, three in zip(middle[::2], middle[1::2], strict=True))
        stage = _minus(middle[2 * first], blocks[first], 2)
        ends = _minus(found[0], middle[2 * first]), _minus(found[-1], middle[2 * last])
        return Prices(kind, stage, blocks, *ends)

    def _on_mesh(self, plan: RunPlan, layout: Layout) -> RunPlan:
        """Return a plan of stages with a layout's shards and replicas, and a schedule of computations."""
        number = min(layout.num_microbatches, 2 if layout.reshard else MOST_MICROBATCHES)
        axes = Axes(len(plan.stages), layout.dp_replicate, layout.dp_shard, self._inner.cp, self._inner.tp)
        mesh = Mesh.of(axes, ep=self._inner.ep, nodes=self._cluster.devices_per_node)

        def unit(one: Unit) -> Unit:
            own = mesh.view("ep") if one.name == EXPERTS else ()
            sharded = tuple(axis for axis in mesh.view("fsdp") if axis not in own)
            freed = layout.reshard if one.freed is True else one.freed
            return replace(one, sharded=sharded, replicas=mesh.view("replicas"), freed=freed)

        def kind(one: LayerSpec) -> LayerSpec:
            policy = RecomputePolicy(layout.inner.recompute) if one.is_block else one.recompute
            return replace(one, units=tuple(map(unit, one.units)), recompute=policy)

        keeps = layout.pp > 1 and not layout.reshard
        rows = tuple(tuple(_actions(stage, number, keeps)) for stage in range(len(plan.stages)))
        return replace(
            plan,
            mesh=mesh,
            kinds=tuple(map(kind, plan.kinds)),
            stages=tuple(replace(one, root=unit(one.root)) for one in plan.stages),
            batch=replace(
                plan.batch,
                num_microbatches=number,
                global_batch=self._inner.samples * number * layout.data_parallel,
            ),
            schedule=replace(plan.schedule, num_microbatches=number, actions=rows),
        )


def _minus(one: Amounts, other: Amounts, times: float = 1.0) -> Amounts:
    return tuple(mine - times * its for mine, its in zip(one, other, strict=True))


def _actions(stage: int, number: int, keeps: bool) -> Iterator[Action]:
    if keeps:
        yield Action(ActionKind.UNSHARD, stage)
    for microbatch in range(number):
        yield Action(ActionKind.FORWARD, stage, microbatch)
        yield Action(ActionKind.BACKWARD, stage, microbatch)
