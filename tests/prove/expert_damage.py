"""Damage to layers with experts: their dispatches, routers, handles and reductions.

Each function damages a built job before its first step, never the reference; `expert_faults` says what must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright.mesh.local_shards import to_local
from meshwright.nn.experts.balance import drop_over_capacity
from meshwright.nn.experts.dispatcher import Dispatch, ExpertRows
from meshwright.nn.experts.layer import Experts, MixtureOfExperts
from meshwright.nn.experts.router import Router, Routing
from meshwright.nn.experts.row_map import RowMap
from meshwright.nn.step_handles import AuxiliaryLoss, StepBuffer
from meshwright.prove.record.layout_run import Tamper
from meshwright.train import optimizer as optimizer_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import OwnChunk

NUM_EXPERTS = 8


def modules(job: Job, kind: type[Any]) -> Iterator[Any]:
    """All modules of a kind on this rank."""
    return (m for part in job.parts().values() for m in part.module.modules() if isinstance(m, kind))


def position(job: Job) -> int:
    """This rank's position in its group of ep ranks."""
    return job.data_index % job.config.mesh.ep


# ---- experts: their rows and weights


def computing(change: Callable[[Experts, Callable[..., Tensor]], Callable[..., Tensor]]) -> Tamper:
    """Replace the forward of all experts."""

    def tamper(job: Job, step: TrainStep) -> None:
        for experts in modules(job, Experts):
            experts.forward = change(experts, experts.forward)

    return tamper


def without_last_rows(experts: Experts, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The groups end one row early: the last row of each stays zero."""

    def forward(rows: Tensor, groups: Any, weights: Tensor) -> Tensor:
        last = groups.ends_e[groups.sizes_e > 0].long() - 1
        keep = torch.ones(rows.shape[0], 1, dtype=rows.dtype).index_fill(0, last, 0.0)
        return real(rows, groups, weights) * keep

    return forward


# ---- dispatches


class Damaged(Dispatch):
    """A dispatch of which one part is damaged."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def send(self) -> None:
        self.real.send()

    def receive(self) -> ExpertRows:
        return self.real.receive()

    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        self.real.combine(rows, out_rd)

    def finish(self) -> Tensor:
        return self.real.finish()


def sources(rows: ExpertRows) -> Tensor:
    """Position of the rank that sent each row, by where it stands among the rows received."""
    by_row, _, received = rows.origin
    ends = torch.tensor(received).cumsum(0)
    return torch.bucketize(by_row.index_m, ends, right=True)


class DropsTokensOf1(Damaged):
    """What goes back to the rank at position 1 is zero."""

    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        super().combine(rows, out_rd * (sources(rows) != 1)[:, None])


def returns_zeros(job: Job) -> type[Damaged]:
    """The rank at position 1 returns zeros to all."""

    class Zeros(Damaged):
        def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
            super().combine(rows, out_rd * float(position(job) != 1))

    return Zeros


def keeps_gradients_of(own: int) -> type[Damaged]:
    """The combine's backward brings no gradients from other ranks."""

    class KeepsOwn(Damaged):
        def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
            super().combine(rows, torch.where((sources(rows) == own)[:, None], out_rd, out_rd.detach()))

    return KeepsOwn


class NextToken(Damaged):
    """Each returned row is added to the token after its own."""

    def finish(self) -> Tensor:
        tokens = self.real._tokens
        self.real._tokens = RowMap((tokens.index_m + 1) % tokens.num_sources, tokens.num_sources)
        return super().finish()


def dispatching(damaged: Callable[[Job], type[Damaged]], *, group: int | None = None) -> Tamper:
    """Damage every dispatch, or only those of one group of ranks."""

    def tamper(job: Job, step: TrainStep) -> None:
        for layer in modules(job, MixtureOfExperts):
            if group is None or job.data_index // job.config.mesh.ep == group:
                real = layer.dispatcher.start
                layer.dispatcher.start = lambda *args, real=real: damaged(job)(real(*args))

    return tamper


def stale_outputs(job: Job, step: TrainStep) -> None:
    """A micro-batch is given the outputs that the one before it was to get."""
    for layer in modules(job, MixtureOfExperts):
        real, last = layer.dispatcher.start, []

        class Stale(Damaged):
            last: list[Tensor]

            def finish(self) -> Tensor:
                found = super().finish()
                given = self.last[-1] if len(self.last) % 2 else found.detach()
                self.last.append(found.detach().clone())
                # The values of another buffer in the graph of this one.
                return found * 0.0 + given + found - found.detach()

        Stale.last = last
        layer.dispatcher.start = lambda *args, real=real, kind=Stale: kind(real(*args))


def routed(change: Callable[[Job, Routing], Routing]) -> Tamper:
    """Change what the dispatcher is told."""

    def tamper(job: Job, step: TrainStep) -> None:
        for layer in modules(job, MixtureOfExperts):
            real = layer.dispatcher.start
            layer.dispatcher.start = lambda x, routing, cache, real=real: real(x, change(job, routing), cache)

    return tamper


def to_expert(shift: int) -> Tamper:
    """The rank that holds an expert is computed from an index that is off."""
    return routed(lambda job, r: replace(r, experts_nk=(r.experts_nk + shift) % NUM_EXPERTS))


def _is_local(job: Job, routing: Routing) -> Tensor:
    return routing.experts_nk // (NUM_EXPERTS // job.config.mesh.ep) == position(job)


def weights_of_local_experts(job: Job, routing: Routing) -> Routing:
    """The weights' gradients are not sent back."""
    weights = torch.where(_is_local(job, routing), routing.weights_nk, routing.weights_nk.detach())
    return replace(routing, weights_nk=weights)


# ---- routers and their handles


def routers(change: Callable[[Job, Router], None]) -> Tamper:
    return lambda job, step: [change(job, router) for router in modules(job, Router)] and None


def choosing(change: Callable[[Router, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Tamper:
    """Change what routers choose: experts, whether they have a slot, and counts for the balance loss."""

    def wrap(job: Job, router: Router) -> None:
        real = router._choose
        router._choose = lambda scores: change(router, real(scores))  # type: ignore

    return routers(wrap)


def without_capacity(job: Job, router: Router) -> None:
    """Drop nothing."""
    router.config = replace(router.config, capacity_factor=None)


def capacity_of_microbatch(router: Router, choice: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    experts, _, counts = choice
    b, t, k = experts.shape
    kept = drop_over_capacity(experts.reshape(1, b * t, k), NUM_EXPERTS, b * router.config.capacity(t))  # type: ignore
    return experts, kept.view(b, t, k), counts


def stale_choices(job: Job, router: Router) -> None:
    """A cache that is not cleared: every second micro-batch is routed as the one before."""
    real, kept = router.chosen.recall, []

    def recall(compute: Callable[[], Any]) -> Any:
        if kept:
            return kept.pop()
        kept.append(real(compute))
        return kept[0]

    router.chosen.recall = recall  # type: ignore


def bias_in_weights(job: Job, router: Router) -> None:
    scores, best = router._scores, router.best

    def biased(logits: Tensor) -> tuple[Tensor, Tensor]:
        found, probabilities = scores(logits)
        return found + router.load.bias, probabilities  # type: ignore

    def chosen(found: Tensor) -> Tensor:
        bias, router.load.bias = router.load.bias, None
        try:
            return best(found)
        finally:
            router.load.bias = bias

    router._scores, router.best = biased, chosen  # type: ignore


def bias_not_used(job: Job, router: Router) -> None:
    best = router.best

    def chosen(found: Tensor) -> Tensor:
        bias, router.load.bias = router.load.bias, None
        try:
            return best(found)
        finally:
            router.load.bias = bias

    router.best = chosen  # type: ignore


def bias_moved_twice(job: Job, router: Router) -> None:
    """As in a forward and its recomputation."""
    load, real = router.load, router.load.commit

    def commit(total: Tensor) -> None:
        count, rate = load.value.clone(), load.bias_rate
        real(total)
        load.bias.sub_((total * total.numel() - total.sum()).sign().to(load.bias.dtype), alpha=rate)  # type: ignore
        assert bool((load.value - count == total).all())

    load.commit = commit  # type: ignore


def count_recomputed(job: Job, router: Router) -> None:
    """Experts are chosen again in the recomputed forward, and counted again."""
    router.chosen.recall = lambda compute: compute()  # type: ignore
    load = router.load

    def add(delta: Tensor) -> None:
        load.recomputing = False
        StepBuffer.add(load, delta)

    load.add = add  # type: ignore


def count_last_microbatch(job: Job, router: Router) -> None:
    load = router.load

    def add(delta: Tensor) -> None:
        load.discard()
        StepBuffer.add(load, delta)

    load.add = add  # type: ignore


def count_own_batch(job: Job, router: Router) -> None:
    """The load of the global batch is that of the rank's own samples."""
    router.batch_counts.reduce = lambda counts: counts


def gradients_of_local_rows(job: Job, step: TrainStep) -> None:
    """The dispatch's backward brings no gradients from other ranks."""

    class KeepsOwn(Damaged):
        def receive(self) -> ExpertRows:
            rows = super().receive()
            is_own = (sources(rows) == position(job))[:, None]
            return replace(rows, rows_rd=torch.where(is_own, rows.rows_rd, rows.rows_rd.detach()))

    dispatching(lambda job: KeepsOwn)(job, step)


def count_own_tokens(job: Job, step: TrainStep) -> None:
    """The counts are not summed over ranks."""
    step._handles._sums = ()


def auxiliary_times(factor: Callable[[Job, str], float]) -> Tamper:
    """Scale auxiliary losses, with their gradients."""

    def tamper(job: Job, step: TrainStep) -> None:
        for path, loss in ((p, m) for part in job.parts().values() for p, m in part.module.named_modules()):
            if isinstance(loss, AuxiliaryLoss):
                loss.weight *= factor(job, path)

    return tamper


def whole_loss_on_each_tp_rank(job: Job, step: TrainStep) -> None:
    step._handles._losses = [(loss, parts, 1) for loss, parts, _ in step._handles._losses]


# ---- reductions and the norm


def on_expert_units(change: Callable[[FSDPModule], None]) -> Tamper:
    """Change the reduction of experts' gradients only."""

    def tamper(job: Job, step: TrainStep) -> None:
        for experts in modules(job, Experts):
            assert isinstance(experts, FSDPModule)
            change(experts)

    return tamper


def drop_edp_sum(unit: FSDPModule) -> None:
    unit.set_custom_reduce_scatter(OwnChunk())


def lose_expert_5(job: Job) -> None:
    gradient: Any = job.model.get_parameter("blocks.1.moe.experts.up").grad
    if position(job) == 1:
        to_local(gradient)[1].zero_()


def count_experts_on_each_rank(job: Job, step: TrainStep) -> None:
    """The weight of an expert's shard in the norm is that of one that every ep rank holds."""
    real = optimizer_module.num_shards
    ep = job.config.mesh.ep
    optimizer_module.num_shards = lambda tensor: real(tensor) * (ep if tensor.dim() == 3 else 1)


def lose_shared(job: Job, step: TrainStep) -> None:
    for layer in modules(job, MixtureOfExperts):
        layer.shared.down.register_forward_hook(lambda module, inputs, out: out * 0.0)
