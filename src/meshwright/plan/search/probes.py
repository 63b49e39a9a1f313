"""Amounts of a few small stages, by which those of any stage follow: each has two or three blocks of a kind, or an end.

What a block adds to a stage is the difference between stages with three and with two of them. The stages are a plan,
made for a division of work inside blocks (`Inner`) and counted by the same functions as a run's; other numbers of
shards and replicas only change its mesh and its units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from meshwright.cluster.hardware import Cluster
from meshwright.cluster.stacks import MESHWRIGHT
from meshwright.config.schema import RunConfig
from meshwright.features.contract import KindPart
from meshwright.mesh.axes import Axes
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.pipeline.simulate import PeakBytes
from meshwright.plan.cuda_memory import end_gradient_bytes, kept_weight_bytes
from meshwright.plan.make_plan import StageParts, make_stages
from meshwright.plan.memory import gathered_bytes, rank_bytes, stage_bytes
from meshwright.plan.run_plan import EXPERTS, LayerSpec, Mesh, RunPlan, Stage, Unit
from meshwright.plan.search.layout import Inner, Layout
from meshwright.plan.stage_sizes import unit_sizes
from meshwright.plan.time.communication import Communication
from meshwright.plan.time.kernel_times import KernelTimes


class Passes(NamedTuple):
    """Times of a micro-batch on a rank in µs, but for gathers of weights."""

    forward: float
    backward_input: float
    """With recomputation."""
    backward_weight: float
    host_forward: float
    host_backward: float
    """Host's time of both parts of the backward."""


class Shards(NamedTuple):
    """Times of the FSDP units of a rank in µs."""

    gather: float
    first: float
    """Gathers of what a forward starts with, beside which nothing runs."""
    last: float
    """Gathers of what a backward starts with."""
    reduce: float
    sums: float
    """Sums outside units after the last backward."""


class State(NamedTuple):
    """Bytes of a rank that don't depend on its micro-batches' size."""

    parameters: float
    gradients: float
    optimizer: float
    errors: float
    gathered: float
    accumulated: float
    """What several micro-batches add to what is gathered."""
    retained: float
    """What weights that are kept until the backward add."""
    root: float
    """Weights that are kept in any case."""
    kept: float
    """All weights that are kept then."""
    end_gradients: float
    """Gradients of the ends after the blocks."""
    num_parameters: float


class Activations(NamedTuple):
    """Bytes of a micro-batch on a rank, as in `memory.StageBytes`."""

    saved: float
    running: float
    output: float
    stream: float


class Held(NamedTuple):
    """Contents of a rank: blocks by kind, ends, and the number of stages."""

    blocks: tuple[int, ...]
    has_first: bool = True
    has_last: bool = True
    num_stages: int = 1
    uneven: float = 1.0
    """Blocks per micro-batch that it holds, over the mean of its stages: the first ones hold more micro-batches."""


T = TypeVar("T", Passes, Shards, State, Activations)
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
        stages = held.num_stages if self.kind in (Passes, Shards) else 1
        terms = [(stages, self.stage), *zip(held.blocks, self.blocks, strict=True)]
        terms += [(1, self.first)] * held.has_first + [(1, self.last)] * held.has_last
        return self.kind(*map(sum, zip(*([count * amount for amount in one] for count, one in terms), strict=True)))


class Probe:
    """Amounts for a division of work inside blocks."""

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
        self._works: dict[tuple[str, int, str], Amounts] = {}

    @cached_property
    def _stages(self) -> RunPlan:
        """Plan of stages as in a pipeline: with the first ends, without any, with the last ends."""
        first, last = (self._layer[kind] for kind in self._ends)
        middle = [((layer,) * count, False, False) for layer in self._layer for count in (2, 3)]
        return self._plan([((first,) * 2, True, False), *middle, ((last,) * 2, False, True)])

    @cached_property
    def _alone(self) -> RunPlan:
        """Plan of a single stage with all ends and two blocks of the first kind."""
        return self._plan([((self._layer[self._ends[0]],) * 2, True, True)])

    def _plan(self, parts: Sequence[StageParts]) -> RunPlan:
        return make_stages(self._config, parts, self._facts, nodes=self._cluster.devices_per_node)

    def edge(self, samples: int) -> float:
        """Return the time of a transfer between stages."""
        plan = self._with(self._stages, samples, "none")
        latency, bandwidth, num_bytes = Communication(plan, self._cluster).edge(0)
        return latency + num_bytes / bandwidth

    def passes(self, layout: Layout) -> Prices[Passes]:
        """Return the times of kernels and of the operators' communication."""
        inner, plan = layout.inner, self._stages
        sent = Communication(self._with(plan, inner.samples, inner.recompute), self._cluster)
        kernels = KernelTimes(self._cluster.device, self._cluster.performance, MESHWRIGHT)
        host = self._cluster.performance.host
        none = (0.0,) * 5

        def of(name: str) -> Amounts:
            kind = plan.kind(name)
            key = name, inner.samples, inner.recompute if kind.is_block else "none"
            if key not in self._works:
                kind = _recomputed(kind, inner.recompute)
                work = kernels.of_kind(kind, samples=inner.samples, tokens=plan.batch.tokens)
                forward, backward, again = (sum(one.values()) for one in sent.of_kind(kind))
                calls, own = sent.num_calls(kind), host.block_us * kind.is_block + host.unit_us * bool(kind.units)
                self._works[key] = (
                    work.forward.on_device + forward,
                    work.backward_input.on_device + work.recompute.on_device + backward + again,
                    work.backward_weight.on_device,
                    work.forward.host + own + host.styled_us * calls[0],
                    sum(one.host for one in (work.backward_input, work.backward_weight, work.recompute))
                    + own + host.styled_us * calls[1],
                )  # fmt: skip
            return self._works[key]

        def added(names: Sequence[str]) -> Amounts:
            return tuple(map(sum, zip(none, *map(of, names), strict=True)))

        shared = plan.stages[1].before  # on every stage
        first = [name for name in plan.stages[0].before if name not in shared]
        blocks = tuple(of(stage.kinds[0]) for stage in plan.stages[1:-1:2])
        return Prices(Passes, added(shared), blocks, added(first), added(plan.stages[-1].after))

    def shards(self, layout: Layout) -> Prices[Shards]:
        """Return the times of units with a layout's shards and replicas."""

        def priced(small: RunPlan) -> Iterator[Shards]:
            plan = self._on_mesh(small, layout)
            sent, ranks = Communication(plan, self._cluster), small.mesh.num_ranks() // len(small.stages)
            few = Communication(small, self._cluster)  # sums outside units hardly depend on the number of replicas
            for stage, own in zip(plan.stages, small.stages, strict=True):
                units = unit_sizes(plan, stage) if plan.has_units else []
                gathers = [sent.gather(one)[0] for one in units]  # the root's is the last
                has_own = not stage.after or bool(plan.kind(stage.after[-1]).units)
                first = sum(gathers[:1]) + sum(gathers[1:][-1:])
                last = gathers[-2] if has_own and len(units) > 1 else 0.0
                reduce = sum(sum(sent.reduce(one)) for one in units if one.has_backward)
                sums = sum(few.at_end(own.pp_rank * ranks, [own]).values())
                yield Shards(sum(gathers), first, last, reduce, sums)

        return self._prices(Shards, priced, layout)

    def state(self, layout: Layout) -> Prices[State]:
        """Return the bytes of state with a layout's shards."""

        def priced(plan: RunPlan) -> Iterator[State]:
            plan = self._on_mesh(plan, layout)
            ranks = plan.mesh.num_ranks() // len(plan.stages)
            several = replace(plan, batch=replace(plan.batch, num_microbatches=2))
            keeping = self._on_mesh(plan, layout._replace(reshard=False))
            for number, stage in enumerate(plan.stages):
                one, kept = rank_bytes(plan, number * ranks, PeakBytes()), keeping.stages[number]
                more = gathered_bytes(several, [stage]) - one.gathered
                retained = gathered_bytes(keeping, [kept]) - one.gathered
                trained = sum(parameter.trained for _, _, parameter in plan.parameters(stage))
                yield State(
                    one.parameters, one.gradients, one.optimizer, one.errors, one.gathered, more, retained,
                    kept_weight_bytes(plan, stage), kept_weight_bytes(keeping, kept),
                    end_gradient_bytes(plan, stage), trained,
                )  # fmt: skip

        return self._prices(State, priced, layout)

    def activations(self, layout: Layout) -> Prices[Activations]:
        """Return the bytes of a micro-batch."""
        on_cuda = self._cluster.performance.is_async

        def priced(plan: RunPlan) -> Iterator[Activations]:
            plan = self._with(plan, layout.inner.samples, layout.inner.recompute)
            for stage in plan.stages:
                one = stage_bytes(plan, stage, on_cuda=on_cuda)
                yield Activations(one.saved, one.running, one.output, one.stream)

        return self._prices(Activations, priced, layout)

    def output(self, samples: int, parts: Mapping[str, tuple[KindPart, ...]]) -> float:
        """Return the bytes of the last stage's output per micro-batch, given what features add to the ends."""
        plan = self._with(self._stages, samples, "none")
        kinds = tuple(replace(one, parts=parts.get(one.described, one.parts)) for one in plan.kinds)
        return stage_bytes(replace(plan, kinds=kinds), plan.stages[-1]).output

    def _prices(self, kind: type[T], priced: Callable[[RunPlan], Iterator[T]], layout: Layout) -> Prices[T]:
        none, (first, last) = (0.0,) * len(kind.__annotations__), self._ends
        found = list(priced(self._stages))
        middle = found[1:-1]
        blocks = tuple(_minus(three, two) for two, three in zip(middle[::2], middle[1::2], strict=True))
        if layout.pp == 1:
            return Prices(kind, _minus(next(priced(self._alone)), blocks[first], 2), blocks, none, none)
        stage = _minus(middle[2 * first], blocks[first], 2)
        ends = _minus(found[0], middle[2 * first]), _minus(found[-1], middle[2 * last])
        return Prices(kind, stage, blocks, *ends)

    def _with(self, plan: RunPlan, samples: int, recompute: str) -> RunPlan:
        """Return a plan of stages with micro-batches of another size and another recomputation."""
        total = samples * self._inner.fewest_shards
        batch = replace(plan.batch, samples=samples, global_batch=total)
        return replace(plan, batch=batch, kinds=tuple(_recomputed(one, recompute) for one in plan.kinds))

    def _on_mesh(self, plan: RunPlan, layout: Layout) -> RunPlan:
        """Return a plan of stages with a layout's shards, replicas and micro-batches."""
        axes = Axes(len(plan.stages), layout.dp_replicate, layout.dp_shard, self._inner.cp, self._inner.tp)
        mesh = Mesh.of(axes, ep=self._inner.ep, nodes=self._cluster.devices_per_node)
        number, inner = layout.num_microbatches, layout.inner

        def unit(one: Unit) -> Unit:
            own = mesh.view("ep") if one.name == EXPERTS else ()
            sharded = tuple(axis for axis in mesh.view("fsdp") if axis not in own)
            freed = layout.reshard if one.freed is True else one.freed
            return replace(one, sharded=sharded, replicas=mesh.view("replicas"), freed=freed)

        def kind(one: LayerSpec) -> LayerSpec:
            return replace(_recomputed(one, inner.recompute), units=tuple(map(unit, one.units)))

        def stage(one: Stage) -> Stage:
            return replace(one, root=unit(one.root))

        total = inner.samples * number * layout.data_parallel
        batch = replace(plan.batch, num_microbatches=number, samples=inner.samples, global_batch=total)
        return replace(
            plan, mesh=mesh, kinds=tuple(map(kind, plan.kinds)), stages=tuple(map(stage, plan.stages)), batch=batch
        )


def _recomputed(kind: LayerSpec, policy: str) -> LayerSpec:
    return replace(kind, recompute=RecomputePolicy(policy)) if kind.is_block and kind.recompute != policy else kind


def _minus(one: Amounts, other: Amounts, times: float = 1.0) -> Amounts:
    return tuple(mine - times * its for mine, its in zip(one, other, strict=True))
