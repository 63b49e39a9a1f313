"""Seeded faults of layers with experts: of their dispatches, routers, handles and reductions.

Each function damages a built job before its first step, never the reference; the tables say on which layouts, and what
the proof must say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright.mesh.local_shards import to_local
from meshwright.nn.experts.grouped_linear import RowMap
from meshwright.nn.experts.layer import Dispatch, ExpertRows, Experts, MixtureOfExperts
from meshwright.nn.experts.router import Router, Routing, drop_over_capacity
from meshwright.nn.step_handles import AuxiliaryLoss, StepBuffer
from meshwright.prove.record.layout_run import Tamper
from meshwright.train import optimizer as optimizer_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import Fault, OwnChunk, after_backward

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


def without_bias(router: Router, best: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Choose experts by scores alone."""

    def chosen(found: Tensor) -> Tensor:
        bias, router.load.bias = router.load.bias, None
        try:
            return best(found)
        finally:
            router.load.bias = bias

    return chosen


def bias_in_weights(job: Job, router: Router) -> None:
    scores, best = router._scores, router.best

    def biased(logits: Tensor) -> tuple[Tensor, Tensor]:
        found, probabilities = scores(logits)
        return found + router.load.bias, probabilities  # type: ignore

    router._scores, router.best = biased, without_bias(router, best)  # type: ignore


def bias_not_used(job: Job, router: Router) -> None:
    router.best = without_bias(router, router.best)  # type: ignore


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


LAYOUT = ("mesh.dp_shard=4", "mesh.ep=2")
PAIR = ("mesh.dp_shard=2", "mesh.ep=2")
TWICE = (*PAIR, "train.num_microbatches=2")
BIAS = ("model.balance_bias=true", "model.bias_rate=0.05", "model.score=sigmoid")
CAPACITY = ("model.drop=over-capacity", "model.capacity_factor=1.0")
DOWN = "blocks.1.moe.experts.down"
ROUTER = "blocks.0.moe.router.gate.weight"
LOAD = "blocks.0.moe.router.load"

EXPERT_FAULTS: dict[str, Fault] = {
    "experts' gradients are multiplied by ep": Fault(on_expert_units(lambda unit: unit.set_gradient_divide_factor(0.5)),
        LAYOUT, ("2.000 × the reference", "multiplied by ep (2)"), DOWN),
    "experts' gradients are averaged over ep": Fault(on_expert_units(lambda unit: unit.set_gradient_divide_factor(2.0)),
        LAYOUT, ("0.500 × the reference", "averaged over ep (2 ranks)"), DOWN),
    "experts' gradients are not summed over the ranks that hold them": Fault(on_expert_units(drop_edp_sum), LAYOUT,
        ("the sum over the ranks that hold the same experts (2) is missing",), DOWN),
    "an expert's gradient is lost": Fault(after_backward(lose_expert_5), PAIR, ("zero for expert 5 (ep rank 1)",),
        "blocks.1.moe.experts.up"),
    "tokens of one rank are dropped at combine": Fault(dispatching(lambda job: DropsTokensOf1, group=0), LAYOUT,
        ("rows are dropped at combine", "for the tokens of data-parallel rank 1 (rank 1)"), ROUTER),
    "tokens of a rank of every group are dropped at combine": Fault(dispatching(lambda job: DropsTokensOf1), LAYOUT,
        ("rows are dropped at combine", "for the tokens of ep rank 1 in every group"), ROUTER),
    "one rank returns zeros": Fault(dispatching(returns_zeros), PAIR,
        ("no outputs of experts 4…7 (ep rank 1)", "rows from ep rank 1"), DOWN),
    "routing weights are applied twice": Fault(
        computing(lambda _, real: lambda rows, groups, w: real(rows, groups, w) * w[:, None]), PAIR,
        ("routing weights are applied twice",), ROUTER),
    "routing weights are not applied": Fault(
        computing(lambda _, real: lambda rows, groups, w: real(rows, groups, torch.ones_like(w))), PAIR,
        ("routing weights are not applied",), ROUTER),
    "the last row of each expert is missing": Fault(computing(without_last_rows), PAIR,
        ("offsets of the groups of rows are off by one",), DOWN),
    "experts of two ranks are swapped": Fault(to_expert(NUM_EXPERTS // 2), PAIR,
        ("the experts of ep ranks 0 and 1 are swapped",), DOWN),
    "the index of an expert is off by one": Fault(to_expert(1), PAIR,
        ("the offset of the experts' indices is wrong by 1",), DOWN),
    "rows are returned to the next token": Fault(dispatching(lambda job: NextToken), PAIR,
        ("rows are combined into the wrong tokens",), ROUTER),
    "a micro-batch gets the previous one's rows": Fault(stale_outputs, TWICE,
        ("rows of the previous micro-batch's dispatch", "stale"), ROUTER),
    "a micro-batch is routed as the previous one": Fault(routers(stale_choices), TWICE, ("stale routing",), DOWN),
    "routers get gradients of local experts only": Fault(routed(weights_of_local_experts), PAIR,
        ("the router's gradient comes from each rank's own experts only",), ROUTER),
    "experts get gradients of local tokens only": Fault(dispatching(lambda job: keeps_gradients_of(position(job))),
        PAIR, ("experts get gradients of their own rank's tokens only",), DOWN),
    "the balance loss counts the micro-batch": Fault(
        choosing(lambda router, c: (c[0], c[1], c[2].double().mean(0, keepdim=True).expand(c[2].shape))), TWICE,
        ("counts the load of each rank's micro-batch instead of each sample's",), ROUTER),
    "tokens get gradients of local experts only": Fault(gradients_of_local_rows, PAIR,
        ("gradients of rows are not returned",), "blocks.0.ffn_norm.weight"),
    "the load of the global batch is not summed": Fault(routers(count_own_batch),
        (*PAIR, "model.balance_scope=global-batch"),
        ("counts the load of each rank's micro-batch instead of the global batch's",), ROUTER),
    "the balance loss is summed over tp": Fault(whole_loss_on_each_tp_rank, ("mesh.tp=2",),
        ("the balance loss has 2.000 × its weight", "summed over"), ROUTER),
    "the balance loss is summed over ep": Fault(auxiliary_times(lambda job, path: job.config.mesh.ep), PAIR,
        ("the balance loss has 2.000 × its weight", "multiplied by ep (2 ranks)"), ROUTER),
    "the balance loss of an inner stage is missing": Fault(
        auxiliary_times(lambda job, path: 0.0 if job.pipeline_rank == 0 else 1.0),
        ("mesh.pp=2", "train.num_microbatches=2"), ("the balance loss of blocks.0.moe.router is missing",), ROUTER),
    "tokens over capacity are computed": Fault(routers(without_capacity), (*PAIR, *CAPACITY),
        ("tokens over an expert's capacity are computed instead of dropped",), DOWN),
    "capacity is that of a micro-batch": Fault(choosing(capacity_of_microbatch), (*PAIR, *CAPACITY),
        ("capacity is counted over each rank's micro-batch",), DOWN),
    "shared experts are left out": Fault(lose_shared, (*PAIR, "model.num_shared_experts=1"),
        ("shared experts are left out",), ROUTER),
    "the bias enters the weights": Fault(routers(bias_in_weights), (*PAIR, *BIAS),
        ("the balancing bias enters the routing weights",), DOWN),
    "the bias is not used": Fault(routers(bias_not_used), (*PAIR, *BIAS),
        ("not added to the scores that experts are chosen by",), DOWN),
    "the bias moves twice a step": Fault(routers(bias_moved_twice), (*PAIR, *BIAS, "recompute.policy=full"),
        ("the bias changes by 2 × its step", "as in a forward and its recomputation"), f"{LOAD}.bias"),
    "a recomputed forward counts again": Fault(routers(count_recomputed), (*PAIR, "recompute.policy=full"),
        ("2.000 × the reference", "recomputed forwards count their tokens again"), f"{LOAD}.value"),
    "only the last micro-batch counts": Fault(routers(count_last_microbatch), (*TWICE, *BIAS),
        ("counts include only the last micro-batch (1)", "replace those of the one before it"), f"{LOAD}.value"),
    "counts are not summed over ranks": Fault(count_own_tokens, (*LAYOUT, *BIAS),
        ("counts include only each rank's own tokens", "not summed over the data-parallel ranks"), f"{LOAD}.value"),
    "experts count ep times in the norm": Fault(count_experts_on_each_rank, LAYOUT, ("counted ep (2) times: experts",)),
}  # fmt: skip


def _both(*tampers: Tamper) -> Tamper:
    return lambda job, step: [tamper(job, step) for tamper in tampers] and None


UNKNOWN_FAULTS: dict[str, Fault] = {
    "routing weights are a tenth too small": Fault(
        computing(lambda _, real: lambda rows, groups, w: real(rows, groups, 0.9 * w)), PAIR, ("not recognised",),
        ROUTER),
    "two faults at once": Fault(
        _both(computing(lambda _, real: lambda rows, groups, w: real(rows, groups, w) * w[:, None]),
              dispatching(lambda job: NextToken)), PAIR, ("not recognised",), ROUTER),
}  # fmt: skip
"""Faults that no variant has: no cause may be named."""
