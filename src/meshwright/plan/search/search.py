"""Search for the fastest layouts of a run on a number of devices, keeping why others are excluded.

Candidates are enumerated from the outside in: first the divisions inside blocks that the configuration's own rules
allow, then those of layers and samples that divide evenly, then schedules and micro-batches. They are taken in the
order of the least time that they can need, so that those that can be neither among the fastest nor on the Pareto front
are never priced. The fastest of each mesh are then planned and simulated as a run would be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from meshwright.cluster.hardware import Cluster
from meshwright.config.schema import RunConfig
from meshwright.errors import MeshwrightError
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.memory import MemoryEstimate
from meshwright.plan.rules import violations
from meshwright.plan.search.finalist import Finalist, finalist
from meshwright.plan.search.layout import Inner, Layout
from meshwright.plan.search.price import Pricer
from meshwright.plan.search.schedules import SPLIT, choices
from meshwright.settings.violation import Violation, divisors

MOST_TP = 64
"""Most ranks of tp."""
FEWEST_TOKENS = 1024
"""Tokens of a sample on a rank, at least, for more than two ranks of cp."""
NEAR = 1.02
"""Ratio of times, and of bytes, that the front doesn't tell apart."""
SLOWEST = 1.5
"""Ratio of a time on the front to the fastest, at most."""
TOKENS_RULE = f"more than two ranks share a sample only if each has {FEWEST_TOKENS} tokens, unless mesh.cp is given"
RANKS_RULE = "the devices are a multiple of pp × dp_replicate × dp_shard × cp × tp"
LAYERS_RULE = "every stage has a layer"
BATCH_RULE = "the global batch is a multiple of dp_replicate × dp_shard × num_microbatches"
EXPERTS_RULE = "ep divides dp_shard × cp"
DUALPIPE_RULE = "dualpipe-v needs two micro-batches per rank to fill its pipeline from both ends"
DEFER_RULE = "a split backward needs layers that can defer the gradients of their matrices"
COMPILE_RULE = "a compiled block can't defer the gradients of its weights"
MEMORY_RULE = "a rank fits into its device's memory"
SHARDS = ("mesh.dp_shard", "mesh.dp_replicate", "mesh.reshard_after_forward")
"""Keys that a group of layouts leaves open, beside recomputation."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its prices."""

    layout: Layout
    us: float
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
    by_mesh: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    """Fastest layout of each mesh that was priced."""
    excluded: Counter[str] = field(default_factory=Counter)
    """Number of layouts that each rule excludes; a rule that excludes a mesh counts once for it."""
    num_groups: int = 0
    """Layouts that keep all rules, but for memory; those that differ in recomputation and shards count once."""
    num_priced: int = 0
    smallest: Misfit | None = None


class Search:
    """Search for layouts of a run."""

    def __init__(
        self, base: RunConfig, cluster: Cluster, num_devices: int, *, fixed: Mapping[str, Any] | None = None
    ) -> None:
        self.base, self.cluster, self.num_devices = base, cluster, num_devices
        self.fixed = fixed or {}
        self.pricer = Pricer(base, cluster)
        self.found = Found(base, cluster, num_devices, self.pricer.capacity)
        self._shown = 3
        self._front: list[tuple[float, float, Layout]] = []
        self._fastest: list[float] = []

    def run(self, *, top: int = 3) -> Found:
        """Search, and plan the fastest layouts of different meshes."""
        found, self._shown = self.found, top
        groups = sorted((self.pricer.least_time(one), one) for one in self._groups())
        found.num_groups = len(groups)
        for least, group in groups:
            if least > self._limit() * SLOWEST and least > self._slowest():
                break  # as are all that follow
            self._price(group, least)
        found.num_priced = self.pricer.num_priced
        found.front = [Candidate(layout, us, size) for us, size, layout in self._front if us <= self._limit() * SLOWEST]
        self._plan()
        return found

    def fits(self) -> bool:
        """Return whether any layout fits."""
        return any(any(self._fitting(one)) for group in self._groups() for one in self._recomputed(group))

    def _limit(self) -> float:
        """Return the least time that was found."""
        return self._fastest[0] if self._fastest else inf

    def _slowest(self) -> float:
        """Return the time from which on a layout of another mesh isn't among the fastest."""
        return self._fastest[-1] if len(self._fastest) == self._shown else inf

    def _groups(self) -> Iterator[Layout]:
        """Yield layouts that keep all rules, with all replicas as shards and without recomputation."""
        wanted = 1
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            wanted *= self.fixed.get(f"mesh.{axis}", 1)
        if self.num_devices % wanted:
            self.found.excluded[RANKS_RULE] += 1
            return
        for inner in self.inner_meshes():
            ranks = self.num_devices // (inner.tp * inner.cp)
            for pp in self._values("mesh.pp", divisors(ranks)):
                yield from self._piped(inner, pp, ranks // pp)

    def inner_meshes(self) -> Iterator[Inner]:
        """Yield the divisions inside blocks that the rules allow; samples and recomputation are left open."""
        for tp in self._values("mesh.tp", divisors(self.num_devices)):
            if tp > MOST_TP:
                break
            for cp in self._values("mesh.cp", divisors(self.num_devices // tp)):
                if cp > 2 and self.pricer.facts().tokens < cp * FEWEST_TOKENS and "mesh.cp" not in self.fixed:
                    self.found.excluded[TOKENS_RULE] += 1
                    continue
                for ep in self._values("mesh.ep", self._expert_sizes()):
                    yield from self._allowed(Inner(tp, cp, ep, sequence_parallel=tp > 1))

    def _allowed(self, inner: Inner) -> Iterator[Inner]:
        """Yield a division if the rules allow it, without sequence_parallel if they don't allow it with."""
        if self.fixed.get("mesh.sequence_parallel", True) is False:
            inner = inner._replace(sequence_parallel=False)
        broken = self.violation(inner)
        if broken is not None and inner.sequence_parallel and broken.key == "mesh.sequence_parallel":
            inner = inner._replace(sequence_parallel=False)
            broken = self.violation(inner)
        if broken is None:
            yield inner
        else:
            self.found.excluded[f"{broken.what}: {broken.rule}"] += 1

    def _expert_sizes(self) -> list[int]:
        counts = [kind.experts.num_experts for kind in self.pricer.facts().kinds if kind.experts is not None]
        return divisors(min(counts)) if counts else [1]

    def violation(self, inner: Inner) -> Violation | None:
        """Return the first rule that a division inside blocks violates, with as few samples and shards as it takes."""
        ranks = inner.fewest_shards
        config = Layout(inner, dp_shard=ranks).configured(self.base).with_keys({"train.global_batch": ranks})
        return next(violations(config, None), None)

    def _values(self, key: str, values: Sequence[int]) -> Sequence[int]:
        """Return the values of a key, or the one that was asked for, whether it is among them or not."""
        return [self.fixed[key]] if key in self.fixed else values

    def _piped(self, inner: Inner, pp: int, replicas: int) -> Iterator[Layout]:
        broken = self._division(inner, pp, replicas)
        if broken:
            self.found.excluded[broken] += 1
            return
        facts = self.pricer.facts(inner.tp)
        shards = next((one for one in divisors(replicas)[::-1] if self._has_shards(inner, one, replicas // one)), 0)
        for schedule, chunks in choices(pp):
            compiled = self._compiled(schedule in SPLIT)
            if pp * chunks > facts.num_layers:
                self.found.excluded[LAYERS_RULE] += 1
            elif schedule in SPLIT and facts.undeferred:
                self.found.excluded[DEFER_RULE] += 1
            elif schedule in SPLIT and self.fixed.get("train.compile", False):
                self.found.excluded[COMPILE_RULE] += 1
            elif shards:
                own = inner._replace(compiled=compiled)
                layout = Layout(own, pp, replicas // shards, shards, 1, schedule, chunks)
                yield from self._sampled(layout, self.base.train.global_batch // replicas)

    def _compiled(self, splits: bool) -> bool:
        """Return whether blocks are compiled: where they can be, compiled ones take less time and memory."""
        return bool(self.fixed.get("train.compile", True)) and self._compiles["none"] and not splits

    def _sampled(self, layout: Layout, samples: int) -> Iterator[Layout]:
        """Yield a layout with each size of a micro-batch, given the samples of a rank per step."""
        opened = {key: value for key, value in self.fixed.items() if key not in (*SHARDS, "recompute.policy")}
        for each in divisors(samples):
            number = samples // each
            one = layout._replace(inner=layout.inner._replace(samples=each), num_microbatches=number)
            if layout.schedule == "dualpipe-v" and number < 2 * layout.pp:
                self.found.excluded[DUALPIPE_RULE] += 1
            elif not opened or one.agrees(opened):
                if not self._may_fit(one) and number > 1:  # a single micro-batch doesn't accumulate gradients
                    break  # nor do larger ones
                yield one

    def _may_fit(self, layout: Layout) -> bool:
        """Return whether a layout with all replicas as shards fits with all or the given recomputation."""
        policy = self.fixed.get("recompute.policy", "full")
        full = layout._replace(inner=layout.inner._replace(recompute=policy))
        size = self.pricer.num_bytes(full)
        if size > self.pricer.capacity:
            self._misfit(full, size)
        return size <= self.pricer.capacity

    def _has_shards(self, inner: Inner, shards: int, replicas: int) -> bool:
        keys = {"mesh.dp_shard": shards, "mesh.dp_replicate": replicas}
        wanted = all(self.fixed.get(key, value) == value for key, value in keys.items())
        return wanted and (shards * inner.cp) % inner.ep == 0

    def _division(self, inner: Inner, pp: int, replicas: int) -> str:
        """Return the rule by which layers, samples or experts aren't divided evenly; empty if they are."""
        if inner.tp * inner.cp * pp * replicas != self.num_devices:
            return RANKS_RULE
        if pp > self.pricer.facts(inner.tp).num_layers:
            return LAYERS_RULE
        if self.base.train.global_batch % replicas:
            return BATCH_RULE
        return EXPERTS_RULE if (replicas * inner.cp) % inner.ep else ""

    @cached_property
    def _compiles(self) -> dict[str, bool]:
        """Whether blocks can be compiled under each policy of recomputation."""
        found = {}
        for policy in map(str, RecomputePolicy):
            keys = {**Layout(Inner(recompute=policy, compiled=True)).keys(), "train.global_batch": 1}
            found[policy] = next(violations(self.base.with_keys(keys), None), None) is None
        return found

    def _recomputed(self, group: Layout) -> Iterator[Layout]:
        """Yield a group's layouts with each policy of recomputation."""
        for policy, compiles in self._compiles.items():
            if self.fixed.get("recompute.policy", policy) == policy:
                inner = group.inner._replace(recompute=policy, compiled=group.inner.compiled and compiles)
                yield group._replace(inner=inner)

    def _price(self, group: Layout, least: float) -> None:
        """Price the layouts of a group that can still be among the fastest, or on the front, given the least time."""
        for one in self._recomputed(group):
            size = self.pricer.num_bytes(one)  # any other way to shard takes as much, at least
            if size > self.pricer.capacity:
                self._misfit(one, size)
            elif not self._is_late(least, one, size):
                own = self.pricer.least_time(one)
                for layout, more in () if self._is_late(own, one, size) else self._fitting(one):
                    if not self._is_late(own, layout, more):
                        self._add(layout, self.pricer.time(layout), more)

    def _fitting(self, layout: Layout) -> Iterator[tuple[Layout, float]]:
        """Yield the ways to shard and replicate a layout's parameters that fit, with their bytes."""
        ranks, inner = layout.data_parallel, layout.inner
        for shards in divisors(ranks)[::-1]:
            if not self._has_shards(inner, shards, ranks // shards):
                continue
            one = layout._replace(dp_shard=shards, dp_replicate=ranks // shards)
            fits = False
            for way in (one, one._replace(reshard=False))[: 1 + (shards * inner.cp > 1)]:
                if self.fixed.get("mesh.reshard_after_forward", way.reshard) != way.reshard:
                    continue
                size = self.pricer.num_bytes(way)
                if size > self.pricer.capacity:
                    self._misfit(way, size)
                    break  # keeping weights takes more
                fits = True
                yield way, size
            if not fits:
                break  # fewer shards are larger ones

    def _misfit(self, layout: Layout, size: float) -> None:
        self.found.excluded[MEMORY_RULE] += 1
        if self.found.smallest is None or size < self.found.smallest.num_bytes:
            self.found.smallest = Misfit(layout, *self.pricer.memory(layout), size)

    def _is_late(self, least: float, layout: Layout, size: float) -> bool:
        """Return whether a layout of at least so much time and memory is neither among the fastest of their meshes nor
        on the front."""
        own = self.found.by_mesh.get(layout.mesh)
        is_slow = least > self._slowest() or (own is not None and own.us <= least)
        return is_slow and (least > SLOWEST * self._limit() or self._is_dominated(least, size))

    def _add(self, layout: Layout, us: float, size: float) -> None:
        """Keep a priced layout if it is the fastest of its mesh, or on the front."""
        by_mesh = self.found.by_mesh
        own = by_mesh.get(layout.mesh)
        if own is None or us < own.us:
            by_mesh[layout.mesh] = Candidate(layout, us, size)
            self._fastest = sorted(one.us for one in by_mesh.values())[: self._shown]
        if not self._is_dominated(us, size):
            self._front = [one for one in self._front if one[0] < us or one[1] < size]
            self._front.insert(bisect_right(self._front, us, key=lambda one: one[0]), (us, size, layout))

    def _is_dominated(self, us: float, size: float) -> bool:
        """Return whether a layout on the front is as fast, and as small but for `NEAR`."""
        at = bisect_right(self._front, us * NEAR, key=lambda one: one[0])
        return at > 0 and self._front[at - 1][1] <= size * NEAR

    def _plan(self) -> None:
        """Plan the fastest layouts of different meshes, and keep those that are fastest when simulated."""
        found = self.found
        for one in sorted(found.by_mesh.values(), key=lambda one: one.us):
            if len(found.best) == self._shown:
                break
            try:
                found.best.append(finalist(self.base, self.cluster, one.layout, self.pricer))
            except MeshwrightError as error:
                found.excluded[error.what] += 1
        found.best.sort(key=lambda one: one.step.total)
