"""Times of a stage per micro-batch: its kernels, the operators' communication, and what gathers of FSDP units add.

Rules of what hides what: kernels of a device run beside the host that launches them, so an action takes the longer of
both, unless the device is the host's CPU. Collectives of operators wait for their input and are waited for, and take
their whole time, but for the share that a stack hides. A unit's gather starts with the work of the block before it,
as FSDP2's do; reductions follow each block of the last backward. Both share the links, so that one waits for the other,
and what is left after the last block is exposed; what is hidden slows the work beside it, if a stack says so. On a
CPU nothing hides anything, as gloo's threads and the kernels share cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from meshwright.cluster.performance import Performance
from meshwright.cluster.stacks import Stack
from meshwright.pipeline.actions import BACKWARDS, ActionKind
from meshwright.plan.run_plan import LayerSpec, RunPlan, Stage
from meshwright.plan.stage_sizes import UnitSizes, unit_sizes
from meshwright.plan.time.communication import Communication, Times, added
from meshwright.plan.time.kernel_times import KernelTimes, KindWork, Work
from meshwright.plan.traffic import Purpose, count_gathers

PARTS = ("products", "attention", "memory")


@dataclass(frozen=True)
class StageTimes:
    """Times of a stage in µs."""

    forward: float
    """Per micro-batch, as all four."""
    backward_input: float
    backward_weight: float
    recompute: float
    parts: Mapping[str, float] = field(hash=False)
    """What the four consist of: `products`, `attention`, `memory`, `recompute`, `host`, and exposed communication by
    purpose, such as `tensor` or `weights`."""
    at_end: Mapping[str, float] = field(hash=False)
    """Reductions after the last backward that nothing hides, by purpose."""
    flops: float = 0.0
    """Operations of the model per micro-batch, without recomputation."""

    @property
    def per_microbatch(self) -> float:
        return self.forward + self.backward_input + self.backward_weight + self.recompute


@dataclass(frozen=True)
class _Step:
    """A kind of a stage in the order of its forward, with its FSDP units."""

    kind: LayerSpec
    work: KindWork
    sent: tuple[Times, Times, Times]
    calls: tuple[int, int]
    gather: tuple[float, float]
    """Time of its units' gathers per forward and per backward."""
    reduce: tuple[float, float]
    num_units: int

    def of_pass(self, *, backward: bool) -> tuple[Work, Work, Times]:
        """Return the work of a forward or a full backward, what it recomputes before, and its communication."""
        work = self.work
        if backward:
            return work.backward_input + work.backward_weight, work.recompute, added(*self.sent[1:])
        return work.forward, Work(), self.sent[0]


@dataclass(frozen=True)
class _Placed:
    """A kind's work in a pass, and when it starts."""

    step: _Step
    work: Work
    again: Work
    sent: Times
    gather: tuple[float, float]
    """Start and end of its units' gathers, and of their reductions."""
    reduce: tuple[float, float]
    waited: float
    """Time for which the device waits for them, or is slower beside them."""
    started: float
    beside: float

    @property
    def ended(self) -> float:
        on_device = self.work.on_device + self.again.on_device + self.beside
        return self.started + on_device + sum(self.sent.values())


class Lane(StrEnum):
    """What runs beside what on a rank."""

    COMPUTE = "computation"
    OPERATORS = "operators' communication"
    UNITS = "gathers and reductions"


@dataclass(frozen=True)
class StageSpan:
    """Something that a rank does, in µs from the start of a micro-batch's forward."""

    lane: Lane
    name: str
    """Pass or purpose."""
    kind: str
    start: float
    end: float


class StagePricer:
    """Prices of the stages of a plan; kinds are priced once."""

    def __init__(self, plan: RunPlan, kernels: KernelTimes, sent: Communication, performance: Performance,
                 stack: Stack, *, captured: bool, processes: float = 1,
                 microbatches: int | None = None) -> None:  # fmt: skip
        self._plan, self._kernels, self._sent, self._performance = plan, kernels, sent, performance
        self._stack, self._captured, self._processes = stack, captured, processes
        self._microbatches = microbatches or plan.batch.num_microbatches
        self._works: dict[str, tuple[KindWork, tuple[Times, Times, Times], tuple[int, int]]] = {}

    def times(self, number: int) -> StageTimes:
        """Return the times of a stage."""
        stage = self._plan.stages[number]
        steps = self._steps(stage, number)
        forward, forward_parts = self._pass(steps, backward=False)
        backward, backward_parts = self._pass(steps, backward=True)
        weight = sum((one.work.backward_weight for one in steps), Work())
        again = sum((one.work.recompute for one in steps), Work())
        backward_weight, recompute = self._alone(weight), self._alone(again)
        recompute += sum(sum(one.sent[2].values()) for one in steps)
        return StageTimes(
            forward=forward,
            backward_input=backward - backward_weight - recompute,
            backward_weight=backward_weight,
            recompute=recompute,
            parts=added(forward_parts, backward_parts),
            at_end=self._reductions(steps),
            flops=sum(w.flops for one in steps for w in (one.work.forward, one.work.backward_input)) + weight.flops,
        )

    def _alone(self, work: Work) -> float:
        """Return the time of work that nothing else runs beside."""
        host = 0.0 if self._captured else work.host
        return max(work.on_device, host) if self._performance.is_async else work.on_device + host

    def _steps(self, stage: Stage, number: int) -> list[_Step]:
        units = unit_sizes(self._plan, stage) if self._plan.has_units else []
        gathers = self._gathers(stage, number, units)
        of_unit = list(zip(units, gathers, strict=True))
        root = [one for one in of_unit if one[0].unit is stage.root]
        others = iter(one for one in of_unit if one[0].unit is not stage.root)
        found = []
        for index, (kind, _) in enumerate(self._plan.held(stage)):
            own = [] if index else list(root)
            if units:
                own += [next(others) for unit in kind.units if unit.parameters]
            work, sent, calls = self._of_kind(kind)
            reduced = [self._sent.reduce(one) for one, _ in own if one.has_backward]
            gather = (sum(ahead for _, (ahead, _) in own), sum(back for _, (_, back) in own))
            reduce = (sum(one for one, _ in reduced), sum(one for _, one in reduced))
            found.append(_Step(kind, work, sent, calls, gather, reduce, num_units=len(own)))
        return found

    def _gathers(self, stage: Stage, number: int, units: list[UnitSizes]) -> list[tuple[float, float]]:
        """Return the time of each unit's gathers per forward and per backward, on average over a step."""
        row = self._plan.schedule.actions[stage.pp_rank]
        actions = [one for action in row for one in action.parts() if one.stage == number]
        forwards = sum(one.kind is ActionKind.FORWARD for one in actions)
        backwards = sum(one.kind in BACKWARDS for one in actions)
        found = []
        for one, count in zip(units, count_gathers(actions, units), strict=True):
            among_all, among_secondary = self._sent.gather(one)
            ahead = min(count.among_all, forwards)
            back = (count.among_all - ahead) * among_all + count.among_secondary * among_secondary
            each = forwards if ahead == forwards else self._microbatches  # some gathers are for all of a step
            found.append((ahead * among_all / max(1, each), back / max(1, backwards)))
        return found

    def _of_kind(self, kind: LayerSpec) -> tuple[KindWork, tuple[Times, Times, Times], tuple[int, int]]:
        if kind.name not in self._works:
            batch = self._plan.batch
            work = self._kernels.of_kind(kind, samples=batch.samples, tokens=batch.tokens)
            self._works[kind.name] = work, self._exposed(self._sent.of_kind(kind)), self._sent.num_calls(kind)
        return self._works[kind.name]

    def _exposed(self, sent: tuple[Times, Times, Times]) -> tuple[Times, Times, Times]:
        """Return what is left of an operator's communication beside the work that a stack runs meanwhile."""
        left = 1 - self._stack.hidden_tensor * (1 - self._stack.slower_beside)
        forward, backward, again = (
            {name: us * (left if name == Purpose.TENSOR else 1.0) for name, us in one.items()} for one in sent
        )
        return forward, backward, again

    def _walk(self, steps: Sequence[_Step], *, backward: bool, reduces: bool = False) -> Iterator[_Placed]:
        """Yield the kinds of a pass in their order, with the times at which a micro-batch reaches them.

        Gathers and, in a step's last backward, reductions wait for each other, as they share the links.
        """
        ordered = list(reversed(steps) if backward else steps)
        if not ordered:
            return
        ready, sending = 0.0, ordered[0].gather[backward]
        gather = (0.0, sending)
        for number, one in enumerate(ordered):
            work, again, sent = one.of_pass(backward=backward)
            before, started = ready, max(ready, gather[1])
            on_device = work.on_device + again.on_device
            beside = self._stack.slower_beside * min(max(0.0, one.gather[backward] - (started - before)), on_device)
            ready = started + on_device + beside + sum(sent.values())
            own = gather
            if number + 1 < len(ordered):
                # The next gather starts with this block, if the stack prefetches, and otherwise once it has ended.
                begin = max(sending, started if self._hides() else ready)
                gather = (begin, sending := begin + ordered[number + 1].gather[backward])
            reduce = max(sending, ready)
            sending = reduce + sum(one.reduce) if reduces else sending
            ready = sending if reduces and not self._hides() else ready
            yield _Placed(
                one,
                work,
                again,
                sent,
                own,
                (reduce, sending),
                waited=started - before + beside,
                started=started,
                beside=beside,
            )

    def _pass(self, steps: Sequence[_Step], *, backward: bool) -> tuple[float, Times]:
        """Return the time of a forward or a full backward of a micro-batch, and its parts."""
        on_device = host = 0.0
        parts: list[Times] = []
        for placed in self._walk(steps, backward=backward):
            work, again = placed.work, placed.again
            on_device = placed.ended
            host += work.host + again.host + self._host(placed.step, backward=backward)
            own = {name: getattr(work, name) for name in PARTS} | {"recompute": again.on_device}
            parts += [own, placed.sent, {str(Purpose.WEIGHTS): placed.waited} if placed.waited else {}]
        host = 0.0 if self._captured else host
        waits = max(0.0, host - on_device) if self._performance.is_async else host
        return on_device + waits, added(*parts, {"host": waits})

    def spans(self, number: int) -> list[StageSpan]:
        """Return what a stage does in the forward and the last full backward of a micro-batch, one after the other,
        without waiting for the host."""
        steps, found, begin = self._steps(self._plan.stages[number], number), list[StageSpan](), 0.0
        for backward in (False, True):
            end = begin
            for placed in self._walk(steps, backward=backward, reduces=backward):
                kind, at = placed.step.kind.name, begin + placed.started
                for purpose, (start, stop) in ((Purpose.WEIGHTS, placed.gather), (Purpose.GRADIENTS, placed.reduce)):
                    found.append(StageSpan(Lane.UNITS, str(purpose), kind, begin + start, begin + stop))
                times = {"recompute": placed.again.on_device, ("forward", "backward")[backward]: placed.work.on_device}
                for name, us in (*times.items(), *placed.sent.items()):
                    lane = Lane.COMPUTE if name in times else Lane.OPERATORS
                    found.append(StageSpan(lane, name, kind, at, at + us))
                    at += us
                end = at
            begin = end
        return [one for one in found if one.end > one.start]

    def _hides(self) -> bool:
        return self._stack.prefetches and self._performance.is_async

    def _host(self, one: _Step, *, backward: bool) -> float:
        """Return the host's time for a kind beside launches."""
        host, slower = self._performance.host, self._performance.slower("host", self._processes)
        own = host.block_us * one.kind.is_block + host.styled_us * one.calls[backward] + host.unit_us * one.num_units
        return own * slower

    def _reductions(self, steps: Sequence[_Step]) -> dict[str, float]:
        """Return by how much reductions make the last backward longer, by purpose."""
        names = (Purpose.GRADIENTS, Purpose.REPLICAS)
        total = {str(name): sum(one.reduce[index] for one in steps) for index, name in enumerate(names)}
        left = every = sum(total.values())
        if every and self._hides() and self._stack.hides_reductions:
            (*_, without), (*_, last) = (self._walk(steps, backward=True, reduces=one) for one in (False, True))
            left = max(last.ended, last.reduce[1]) - without.ended
            left += self._stack.slower_beside * (every - left)
        return {purpose: left * us / every for purpose, us in total.items() if us}
