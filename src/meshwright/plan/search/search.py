"""Search for the fastest layouts of a run on a number of devices, keeping why others are excluded.

Candidates are enumerated from the outside in: first the divisions inside blocks that the configuration's own rules
allow, then those of layers and samples that divide evenly, then schedules and micro-batches that fit into memory. They
are priced in the order of the least time that they can take, so that those that can be neither among the fastest nor on
the Pareto front are never priced. The fastest of each mesh are then planned, verified and simulated as a run would be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.cluster.hardware import Cluster
from meshwright.config.schema import RunConfig
from meshwright.errors import MeshwrightError
from meshwright.mesh.axes import Axes
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import MemoryEstimate, predict_memory
from meshwright.plan.rules import violations
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.search.layout import Inner, Layout, agrees
from meshwright.plan.search.price import Pricer
from meshwright.plan.search.schedules import SPLIT, choices
from meshwright.plan.time.step_time import StepTime, predict_step
from meshwright.plan.verify import verify
from meshwright.settings.violation import Violation, divisors

MOST_TP = 64
"""Most ranks of tp."""
FEWEST_TOKENS = 1024
"""Tokens of a sample on a rank, at least, for more than two ranks of cp."""
NEAR = 1.02
"""Ratio of times, and of bytes, that the front doesn't tell apart."""
MORE_FINALISTS = 2
"""Meshes that are planned besides those asked for, in case simulation puts them first."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its prices."""

    layout: Layout
    us: float
    num_bytes: float


@dataclass(frozen=True)
class Finalist:
    """A layout that was planned, verified and simulated."""

    layout: Layout
    config: RunConfig
    plan: RunPlan
    step: StepTime
    memory: MemoryEstimate
    num_bytes: float


@dataclass(frozen=True)
class Misfit:
    """The layout among those that don't fit that takes the least memory."""

    layout: Layout
    memory: MemoryEstimate
    place: int
    """Place of the rank in the pipeline."""
    num_bytes: float


@dataclass
class Found:
    """Result of a search."""

    base: RunConfig
    cluster: Cluster
    num_devices: int
    capacity: float
    """Bytes that a rank may take."""
    best: list[Finalist] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    """Layouts than which none is both faster and smaller, the fastest first; prices in closed form."""
    by_mesh: dict[tuple[Axes, int], Candidate] = field(default_factory=dict)
    """Fastest layout of each mesh that was priced."""
    excluded: Counter[str] = field(default_factory=Counter)
    """Number of layouts that each rule excludes; a rule that excludes a mesh counts once for it."""
    num_fitting: int = 0
    num_priced: int = 0
    smallest: Misfit | None = None
    dropped: list[tuple[Layout, str]] = field(default_factory=list)
    """Finalists that turned out not to fit, and why."""


class Search:
    """Search for layouts of a run."""

    def __init__(
        self, base: RunConfig, cluster: Cluster, num_devices: int, *, fixed: Mapping[str, Any] | None = None
    ) -> None:
        self.base, self.cluster, self.num_devices = base, cluster, num_devices
        self.fixed = fixed or {}
        self.pricer = Pricer(base, cluster)
        self.found = Found(base, cluster, num_devices, self.pricer.capacity)
        self._front: list[tuple[float, float, Layout]] = []
        self._fastest: list[float] = []

    def run(self, *, top: int = 3) -> Found:
        """Search, and plan the fastest layouts of different meshes."""
        found, groups = self.found, list[tuple[float, int, Layout, float]]()
        for layout, size in self._groups():
            # Recomputation only adds work.
            plain = replace(layout, inner=replace(layout.inner, recompute="none"))
            groups.append((self.pricer.least_time(plain), len(groups), layout, size))
        for least, _, layout, size in sorted(groups, key=lambda one: one[:2]):
            if not self._is_late(least, layout, size, top):
                self._price(layout, top)
        found.num_priced = self.pricer.num_priced
        found.front = [Candidate(layout, us, size) for us, size, layout in self._front]
        self._plan(top)
        return found

    def fits(self) -> bool:
        """Return whether any layout fits."""
        return next(self._groups(), None) is not None

    def _groups(self) -> Iterator[tuple[Layout, float]]:
        """Yield layouts that keep all rules and fit with all replicas as shards, and their bytes then."""
        for inner in self.inner_meshes():
            ranks = self.num_devices // (inner.tp * inner.cp)
            for pp in divisors(ranks):
                yield from self._piped(inner, pp, ranks // pp)

    def inner_meshes(self) -> Iterator[Inner]:
        """Yield the divisions inside blocks that the rules allow; samples and recomputation are left open."""
        for tp in self._values("mesh.tp", divisors(self.num_devices)):
            if tp > MOST_TP:
                break
            for cp in self._values("mesh.cp", divisors(self.num_devices // tp) if self.num_devices % tp == 0 else []):
                if cp > 2 and self.pricer.facts().tokens < cp * FEWEST_TOKENS and "mesh.cp" not in self.fixed:
                    self.found.excluded[TOKENS_RULE] += 1
                    continue
                for ep in self._values("mesh.ep", self._expert_sizes()):
                    inner = Inner(tp, cp, ep, sequence_parallel=tp > 1)
                    broken = self.violation(inner)
                    if broken is not None and tp > 1 and broken.key == "mesh.sequence_parallel":
                        inner = replace(inner, sequence_parallel=False)
                        broken = self.violation(inner)
                    if broken is None:
                        yield inner
                    else:
                        self.found.excluded[broken.rule] += 1

    def _expert_sizes(self) -> list[int]:
        counts = [kind.experts.num_experts for kind in self.pricer.facts().kinds if kind.experts is not None]
        return divisors(min(counts)) if counts else [1]

    def violation(self, inner: Inner, layout: Layout | None = None) -> Violation | None:
        """Return the first rule that a division inside blocks violates, with as few samples and shards as it takes."""
        ranks = inner.fewest_shards
        config = Layout(inner, dp_shard=ranks).configured(self.base).with_keys({"train.global_batch": ranks})
        return next(violations(config, None), None)

    def _values(self, key: str, values: Sequence[int]) -> Sequence[int]:
        return [value for value in values if key not in self.fixed or value == self.fixed[key]]

    def _piped(self, inner: Inner, pp: int, replicas: int) -> Iterator[tuple[Layout, float]]:
        batch, layers = self.base.train.global_batch, self.pricer.facts(inner.tp).num_layers
        broken = self.division(inner, pp, replicas)
        if broken:
            self.found.excluded[broken] += 1
            return
        shards = replicas
        if "mesh.dp_shard" in self.fixed or "mesh.dp_replicate" in self.fixed:
            shards = next((one for one in divisors(replicas)[::-1] if self._has_shards(inner, one, replicas // one)), 0)
        for schedule, chunks in choices(pp):
            if pp * chunks > layers:
                self.found.excluded[LAYERS_RULE] += 1
            elif schedule in SPLIT and self.pricer.facts(inner.tp).undeferred:
                self.found.excluded[DEFER_RULE] += 1
            elif shards:
                for policy, compiled in self._block_choices(schedule in SPLIT):
                    own = replace(inner, recompute=policy, compiled=compiled)
                    layout = Layout(own, pp, replicas // shards, shards, 1, schedule, chunks)
                    yield from self._sampled(layout, batch // replicas)

    def _sampled(self, layout: Layout, samples: int) -> Iterator[tuple[Layout, float]]:
        """Yield a layout with each size of a micro-batch that fits, given the samples of a rank per step."""
        is_full = False
        for each in divisors(samples):
            number = samples // each
            one = replace(layout, inner=replace(layout.inner, samples=each), num_microbatches=number)
            if layout.schedule == "dualpipe-v" and number < 2 * layout.pp:
                self.found.excluded[DUALPIPE_RULE] += 1
            elif is_full and number > 1:  # a single micro-batch doesn't accumulate gradients
                self.found.excluded[MEMORY_RULE] += 1
            elif self._is_free(one):
                size = self._bytes(one)
                if size > self.pricer.capacity:
                    is_full = True
                    self._misfit(one, size)
                else:
                    yield one, size

    def _has_shards(self, inner: Inner, shards: int, replicas: int) -> bool:
        keys = {"mesh.dp_shard": shards, "mesh.dp_replicate": replicas}
        wanted = all(self.fixed.get(key, value) == value for key, value in keys.items())
        return wanted and (shards * inner.cp) % inner.ep == 0

    def _is_free(self, layout: Layout) -> bool:
        """Return whether a layout has the values that were asked for, but of keys that its group leaves open."""
        opened = ("mesh.dp_shard", "mesh.dp_replicate", "mesh.reshard_after_forward")
        return agrees(layout, {key: value for key, value in self.fixed.items() if key not in opened})

    def division(self, inner: Inner, pp: int, replicas: int) -> str:
        """Return the rule by which layers, samples or experts aren't divided evenly; empty if they are."""
        if pp > self.pricer.facts(inner.tp).num_layers:
            return LAYERS_RULE
        if self.base.train.global_batch % replicas:
            return BATCH_RULE
        if (replicas * inner.cp) % inner.ep:
            return EXPERTS_RULE
        return ""

    def _block_choices(self, splits: bool) -> list[tuple[str, bool]]:
        """Return the policies of recomputation, and whether blocks are compiled: where they can be, compiled ones take
        less time and memory."""
        if not hasattr(self, "_compiles"):
            self._compiles = {
                policy: next(
                    violations(
                        self.base.with_keys(
                            {**Layout(Inner(recompute=policy, compiled=True)).keys(), "train.global_batch": 1}
                        ),
                        None,
                    ),
                    None,
                )
                is None
                for policy in map(str, RecomputePolicy)
            }
        wanted = self.fixed.get("train.compile", True)
        return [(policy, bool(wanted) and able and not splits) for policy, able in self._compiles.items()]

    def _fitting(self, layout: Layout) -> Iterator[tuple[Layout, float]]:
        """Yield the ways to shard and replicate a layout's parameters that fit, with their bytes."""
        ranks, inner = layout.data_parallel, layout.inner
        for shards in divisors(ranks)[::-1]:
            if not self._has_shards(inner, shards, ranks // shards):
                continue
            one = replace(layout, dp_shard=shards, dp_replicate=ranks // shards)
            kept = [replace(one, reshard=False)] if shards > 1 or inner.cp > 1 else []
            sizes = [(way, self._bytes(way)) for way in (one, *kept)]
            fits = [(way, size) for way, size in sizes if size <= self.pricer.capacity]
            self.found.excluded[MEMORY_RULE] += len(sizes) - len(fits)
            yield from (pair for pair in fits if agrees(pair[0], _only(self.fixed, "mesh.reshard_after_forward")))
            if not fits:
                break  # fewer shards are larger ones

    def _bytes(self, layout: Layout) -> float:
        return self.pricer.num_bytes(layout)

    def _misfit(self, layout: Layout, size: float) -> None:
        self.found.excluded[MEMORY_RULE] += 1
        if self.found.smallest is None or size < self.found.smallest.num_bytes:
            self.found.smallest = Misfit(layout, *self.pricer.memory(layout), size)

    def _is_late(self, least: float, layout: Layout, size: float, top: int) -> bool:
        """Return whether a layout of at least so much time and memory is neither among the fastest of their meshes nor
        on the front."""
        fastest, own = self._fastest, self.found.by_mesh.get(layout.mesh)
        is_slow = len(fastest) == top + MORE_FINALISTS and least > fastest[-1]
        return (is_slow or (own is not None and own.us <= least)) and self._is_dominated(least, size)

    def _price(self, group: Layout, top: int) -> None:
        """Price the layouts of a group that can still be among the fastest, or on the front."""
        by_mesh, least = self.found.by_mesh, self.pricer.least_time(group)
        for layout, size in self._fitting(group):
            self.found.num_fitting += 1
            if self._is_late(least, layout, size, top):
                continue
            us = self.pricer.time(layout)
            own = by_mesh.get(layout.mesh)
            if own is None or us < own.us:
                by_mesh[layout.mesh] = Candidate(layout, us, size)
                self._fastest = sorted(one.us for one in by_mesh.values())[: top + MORE_FINALISTS]
            if not self._is_dominated(us, size):
                self._front = [one for one in self._front if one[0] < us or one[1] < size]
                at = bisect_right(self._front, us, key=lambda one: one[0])
                self._front.insert(at, (us, size, layout))

    def _is_dominated(self, us: float, size: float) -> bool:
        """Return whether a layout on the front is as fast, and as small but for `NEAR`."""
        at = bisect_right(self._front, us * NEAR, key=lambda one: one[0])
        return at > 0 and self._front[at - 1][1] <= size * NEAR

    def _plan(self, top: int) -> None:
        """Plan the fastest layouts of different meshes, and keep those that are fastest when simulated."""
        found = self.found
        order = sorted(found.by_mesh.values(), key=lambda one: one.us)
        for one in order:
            if len(found.best) == top + MORE_FINALISTS:
                break
            try:
                found.best.append(self.finalist(one.layout))
            except MeshwrightError as error:
                found.dropped.append((one.layout, error.what))
        found.best = sorted(found.best, key=lambda one: one.step.total)[:top]

    def finalist(self, layout: Layout) -> Finalist:
        """Plan and verify a layout as a run would, and predict its step and memory.

        Raises:
            MeshwrightError: it violates a rule, or doesn't fit.
        """
        config = layout.configured(self.base)
        if (broken := next(violations(config, None), None)) is not None:
            raise broken.kind(broken.what, where=broken.key, rule=broken.rule)
        plan = make_plan(config, nodes=self.cluster.devices_per_node)
        verify(plan, where=config.name)
        memory = predict_cuda_memory(plan) if self.pricer.on_cuda else predict_memory(plan)
        size = self.pricer.total(memory)
        if size > self.pricer.capacity:
            raise MeshwrightError(f"{size:.0f} bytes on the fullest rank", rule=MEMORY_RULE)
        return Finalist(layout, config, plan, predict_step(plan, self.cluster), memory, size)


TOKENS_RULE = f"more than two ranks share a sample only if each has {FEWEST_TOKENS} tokens, unless mesh.cp is given"
LAYERS_RULE = "every stage has a layer"
BATCH_RULE = "the global batch is a multiple of dp_replicate × dp_shard × num_microbatches"
EXPERTS_RULE = "ep divides dp_shard × cp"
DUALPIPE_RULE = "dualpipe-v needs two micro-batches per rank to fill its pipeline from both ends"
DEFER_RULE = "a split backward needs layers that can defer the gradients of their matrices"
MEMORY_RULE = "a rank fits into its device's memory"


def _only(fixed: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return {key: fixed[key]} if key in fixed else {}
