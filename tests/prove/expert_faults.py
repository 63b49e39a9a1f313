"""Seeded faults of layers with experts: of their dispatches, routers, handles and reductions.

Each function damages a built job before its first step, never the reference; the tables say on which layouts, and what
the proof must say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.mesh.local_shards import to_local
from meshwright.nn.experts.grouped_linear import RowMap
from meshwright.nn.experts.layer import Dispatch, ExpertRows, Experts, MixtureOfExperts
from meshwright.nn.experts.router import Router, Routing, drop_over_capacity
from meshwright.nn.step_handles import AuxiliaryLoss, StepBuffer
from meshwright.prove.record.layout_run import Tamper
from meshwright.train import optimizer as optimizer_module
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.prove.seeded_faults import Fault, OwnChunk, after_backward, modules, replacing, wrapping

NUM_EXPERTS = 8


def position(job: Job) -> int:
    """This rank's position in its group of ep ranks."""
    return job.data_index % job.config.mesh.ep


# ---- experts: their rows and weights


def computing(change: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Tamper:
    """Replace the forward of all experts."""
    return lambda job, step: [setattr(one, "forward", change(one.forward)) for one in modules(job, Experts)] and None


def without_last_rows(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The groups end one row early: the last row of each stays zero."""

    def forward(rows: Tensor, groups: Any, weights: Tensor) -> Tensor:
        last = groups.ends_e[groups.sizes_e > 0].long() - 1
        keep = torch.ones(rows.shape[0], 1, dtype=rows.dtype).index_fill(0, last, 0.0)
        return real(rows, groups, weights) * keep

    return forward


# ---- dispatches


class Damaged(Dispatch):
    """A dispatch of which parts are damaged."""

    def __init__(self, real: Any, *, receive: Any = None, combine: Any = None, finish: Any = None) -> None:
        self.real, self._receive, self._combine, self._finish = real, receive, combine, finish

    def send(self) -> None:
        self.real.send()

    def receive(self) -> ExpertRows:
        rows = self.real.receive()
        return self._receive(rows) if self._receive else rows

    def combine(self, rows: ExpertRows, out_rd: Tensor) -> None:
        self.real.combine(rows, self._combine(rows, out_rd) if self._combine else out_rd)

    def finish(self) -> Tensor:
        return self._finish(self.real) if self._finish else self.real.finish()


def dispatching(*, group: int | None = None, **changes: Callable[..., Any]) -> Tamper:
    """Damage every dispatch, or only those of one group of ranks; changes take the job first."""

    def tamper(job: Job, step: TrainStep) -> None:
        for layer in modules(job, MixtureOfExperts):
            if group is None or job.data_index // job.config.mesh.ep == group:
                real, bound = layer.dispatcher.start, {name: partial(change, job) for name, change in changes.items()}
                layer.dispatcher.start = lambda *args, real=real, bound=bound: Damaged(real(*args), **bound)

    return tamper


def combining(change: Callable[[Job, ExpertRows, Tensor], Tensor], *, group: int | None = None) -> Tamper:
    """Change the outputs that are returned to the tokens' ranks."""
    return dispatching(group=group, combine=change)


def sources(rows: ExpertRows) -> Tensor:
    """Position of the rank that sent each row, by where it stands among the rows received."""
    by_row, _, received = rows.origin
    return torch.bucketize(by_row.index_m, torch.tensor(received).cumsum(0), right=True)


def without_tokens_of_1(job: Job, rows: ExpertRows, out_rd: Tensor) -> Tensor:
    """What goes back to the rank at position 1 is zero."""
    return out_rd * (sources(rows) != 1)[:, None]


def of_own(job: Job, rows: ExpertRows, x_rd: Tensor) -> Tensor:
    """Rows without gradients, except for those of the rank's own tokens."""
    return torch.where((sources(rows) == position(job))[:, None], x_rd, x_rd.detach())


def to_next_token(job: Job, real: Any) -> Tensor:
    """Each returned row is added to the token after its own."""
    tokens = real._tokens
    real._tokens = RowMap((tokens.index_m + 1) % tokens.num_sources, tokens.num_sources)
    return real.finish()


def stale_outputs() -> Callable[[Job, Any], Tensor]:
    """A micro-batch is given the outputs that the one before it was to get: two of each, by two layers."""
    last: list[Tensor] = []

    def finish(job: Job, real: Any) -> Tensor:
        found: Tensor = real.finish()
        given = last[-2] if len(last) % 4 >= 2 else found.detach()
        last.append(found.detach().clone())
        # The values of another buffer in the graph of this one.
        return found * 0.0 + given + found - found.detach()

    return finish


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


def weights_of_local_experts(job: Job, routing: Routing) -> Routing:
    """The weights' gradients are not sent back."""
    is_local = routing.experts_nk // (NUM_EXPERTS // job.config.mesh.ep) == position(job)
    return replace(routing, weights_nk=torch.where(is_local, routing.weights_nk, routing.weights_nk.detach()))


# ---- routers and their handles


def routers(change: Callable[[Job, Router], None]) -> Tamper:
    return lambda job, step: [change(job, router) for router in modules(job, Router)] and None


def choosing(change: Callable[[Router, tuple[Tensor, ...]], tuple[Tensor, ...]]) -> Tamper:
    """Change what routers choose: experts, whether they have a slot, and counts for the balance loss."""

    def wrap(job: Job, router: Router) -> None:
        real = router._choose
        router._choose = lambda scores: change(router, real(scores))

    return routers(wrap)


def capacity_of_microbatch(router: Router, choice: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    experts, _, counts = choice
    b, t, k = experts.shape
    kept = drop_over_capacity(experts.reshape(1, b * t, k), NUM_EXPERTS, b * router.config.capacity(t))
    return experts, kept.view(b, t, k), counts


def stale_choices(job: Job, router: Router) -> None:
    """A cache that is not cleared: every second micro-batch is routed as the one before."""
    real, kept = router.chosen.recall, []

    def recall(compute: Callable[[], Any]) -> Any:
        if kept:
            return kept.pop()
        kept.append(real(compute))
        return kept[0]

    router.chosen.recall = recall


def without_bias(router: Router) -> Callable[[Tensor], Tensor]:
    """Choose experts by scores alone."""
    best = router.best

    def chosen(found: Tensor) -> Tensor:
        bias, router.load.bias = router.load.bias, None
        try:
            return best(found)
        finally:
            router.load.bias = bias

    return chosen


def bias_in_weights(job: Job, router: Router) -> None:
    scores = router._scores

    def biased(logits: Tensor) -> tuple[Tensor, Tensor]:
        found, probabilities = scores(logits)
        return found + router.load.bias, probabilities

    router._scores, router.best = biased, without_bias(router)


def bias_kept(job: Job, router: Router) -> None:
    real, load = router.load.commit, router.load

    def commit(total: Tensor) -> None:
        before = load.bias.clone()
        real(total)
        load.bias.copy_(before)

    load.commit = commit  # type: ignore[method-assign]


def bias_moved_twice(job: Job, router: Router) -> None:
    """As in a forward and its recomputation."""
    load, real = router.load, router.load.commit

    def commit(total: Tensor) -> None:
        real(total)
        load.bias.sub_((total * total.numel() - total.sum()).sign().to(load.bias.dtype), alpha=load.bias_rate)

    load.commit = commit


def counting(before: Callable[[Any], None]) -> Callable[[Job, Router], None]:
    """Change a router's load before each micro-batch's counts are added."""
    return lambda job, router: setattr(
        router.load, "add", lambda delta, load=router.load: (before(load), StepBuffer.add(load, delta))[1]
    )


def count_recomputed(job: Job, router: Router) -> None:
    """Experts are chosen again in the recomputed forward, and counted again."""
    router.chosen.recall = lambda compute: compute()
    counting(lambda load: setattr(load, "recomputing", False))(job, router)


def auxiliary_times(factor: Callable[[Job], float]) -> Tamper:
    """Scale auxiliary losses, with their gradients."""

    def tamper(job: Job, step: TrainStep) -> None:
        for loss in modules(job, AuxiliaryLoss):
            loss.weight *= factor(job)

    return tamper


# ---- reductions and the norm


def on_expert_units(change: Callable[[Any], None]) -> Tamper:
    """Change the reduction of experts' gradients only."""
    return lambda job, step: [change(experts) for experts in modules(job, Experts)] and None


def lose_expert_5(job: Job) -> None:
    if position(job) == 1:
        to_local(job.model.get_parameter("blocks.1.moe.experts.up").grad)[1].zero_()


def counting_experts(job: Job, real: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    """The weight of an expert's shard in the norm is that of one that every ep rank holds."""
    return lambda tensor: real(tensor) * (job.config.mesh.ep if tensor.dim() == 3 else 1)


def lose_shared(job: Job, step: TrainStep) -> None:
    for layer in modules(job, MixtureOfExperts):
        layer.shared.down.register_forward_hook(lambda module, inputs, out: out * 0.0)


def both(*tampers: Tamper) -> Tamper:
    return lambda job, step: [tamper(job, step) for tamper in tampers] and None


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
        "experts' gradients are not summed over the ranks that hold them": Fault(on_expert_units(lambda unit:
            unit.set_custom_reduce_scatter(OwnChunk())), LAYOUT,
        ("the sum over the ranks that hold the same experts (2) is missing",), DOWN),
    "an expert's gradient is lost": Fault(after_backward(lose_expert_5), PAIR, ("zero for expert 5 (ep rank 1)",),
        "blocks.1.moe.experts.up"),
    "tokens of one rank are dropped at combine": Fault(combining(without_tokens_of_1, group=0), LAYOUT,
        ("rows are dropped at combine", "only on rank 1"), ROUTER),
    "tokens of a rank of every group are dropped at combine": Fault(combining(without_tokens_of_1), LAYOUT,
        ("rows are dropped at combine", "only on ranks 1 and 3"), ROUTER),
    "one rank returns zeros": Fault(combining(lambda job, rows, out: out * float(position(job) != 1)), PAIR,
        ("no outputs of experts 4…7 (ep rank 1)", "rows from ep rank 1"), DOWN),
    "routing weights are applied twice": Fault(computing(lambda real: lambda rows, groups, w: real(rows, groups,
        w) * w[:, None]), PAIR, ("routing weights are applied twice",), ROUTER),
    "routing weights are not applied": Fault(computing(lambda real: lambda rows, groups, w: real(rows, groups,
        torch.ones_like(w))), PAIR, ("routing weights are not applied",), ROUTER),
    "the last row of each expert is missing": Fault(computing(without_last_rows), PAIR,
        ("offsets of the groups of rows are off by one",), DOWN),
    "experts of two ranks are swapped": Fault(to_expert(NUM_EXPERTS // 2), PAIR,
        ("the experts of ep ranks 0 and 1 are swapped",), DOWN),
    "the index of an expert is off by one": Fault(to_expert(1), PAIR,
        ("the offset of the experts' indices is wrong by 1",), DOWN),
    "rows are returned to the next token": Fault(dispatching(finish=to_next_token), PAIR,
        ("rows are combined into the wrong tokens",), ROUTER),
    "a micro-batch gets the previous one's rows": Fault(dispatching(finish=stale_outputs()), TWICE,
        ("micro-batch 1 has the value of micro-batch 0", "stale"), ROUTER),
    "a micro-batch is routed as the previous one": Fault(routers(stale_choices), TWICE, ("stale routing",), DOWN),
    "routers get gradients of local experts only": Fault(routed(weights_of_local_experts), PAIR,
        ("the router's gradient comes from each rank's own experts only",), ROUTER),
    "experts get gradients of local tokens only": Fault(combining(of_own), PAIR,
        ("experts get gradients of their own rank's tokens only",), DOWN),
    "the balance loss counts the micro-batch": Fault(choosing(lambda router, c: (c[0], c[1], c[2].double().mean(0,
        keepdim=True).expand(c[2].shape))), TWICE,
        ("counts the load of each rank's micro-batch instead of each sample's",), ROUTER),
    "tokens get gradients of local experts only": Fault(dispatching(receive=lambda job, rows: replace(rows,
        rows_rd=of_own(job, rows, rows.rows_rd))), PAIR, ("gradients of rows are not returned",),
        "blocks.0.ffn_norm.weight"),
    "the load of the global batch is not summed": Fault(routers(lambda job, router: setattr(router.batch_counts,
        "reduce", lambda counts: counts)), (*PAIR, "model.balance_scope=global-batch"),
        ("counts the load of each rank's micro-batch instead of the global batch's",), ROUTER),
    "the balance loss is summed over tp": Fault(wrapping("step._handles._losses", lambda job, real: [(loss, parts,
        1) for loss, parts, _ in real]), ("mesh.tp=2",),
        ("the balance loss of blocks.1.moe.router has 2.000 × its weight", "summed over"), ROUTER),
    "the balance loss is summed over ep": Fault(auxiliary_times(lambda job: job.config.mesh.ep), PAIR,
        ("the balance loss of blocks.1.moe.router has 2.000 × its weight", "multiplied by ep (2 ranks)"), ROUTER),
    "the balance loss of an inner stage is missing": Fault(auxiliary_times(lambda job: float(job.pipeline_rank != 0)),
        ("mesh.pp=2", "train.num_microbatches=2"), ("the balance loss of blocks.0.moe.router is missing",), ROUTER),
    "tokens over capacity are computed": Fault(routers(lambda job, one: setattr(one, "config", replace(one.config,
        capacity_factor=None))), (*PAIR, *CAPACITY),
        ("tokens over an expert's capacity are computed instead of dropped",), DOWN),
    "capacity is that of a micro-batch": Fault(choosing(capacity_of_microbatch), (*PAIR, *CAPACITY),
        ("capacity is counted over each rank's micro-batch",), DOWN),
    "shared experts are left out": Fault(lose_shared, (*PAIR, "model.num_shared_experts=1"),
        ("shared experts are left out",), ROUTER),
    "the bias enters the weights": Fault(routers(bias_in_weights), (*PAIR, *BIAS),
        ("the balancing bias enters the routing weights",), DOWN),
    "the bias is not used": Fault(routers(lambda job, router: setattr(router, "best", without_bias(router))), (*PAIR,
        *BIAS), ("not added to the scores that experts are chosen by",), DOWN),
    "the bias stays": Fault(routers(bias_kept), (*PAIR, *BIAS), ("the bias is not updated",), f"{LOAD}.bias"),
    "the bias moves twice a step": Fault(routers(bias_moved_twice), (*PAIR, *BIAS, "recompute.policy=full"),
        ("the bias changes by 2 × its step", "as in a forward and its recomputation"), f"{LOAD}.bias"),
    "a recomputed forward counts again": Fault(routers(count_recomputed), (*PAIR, "recompute.policy=full"),
        ("2.000 × the reference", "recomputed forwards count their tokens again"), f"{LOAD}.value"),
    "only the last micro-batch counts": Fault(routers(counting(lambda load: load.discard())), (*TWICE, *BIAS),
        ("counts include only the last micro-batch (1)", "replace those of the one before it"), f"{LOAD}.value"),
    "counts are not summed over ranks": Fault(wrapping("step._handles._sums", lambda job, real: ()), (*LAYOUT, *BIAS),
        ("counts include only each rank's own tokens", "not summed over the data-parallel ranks"), f"{LOAD}.value"),
    "routing weights are off by one row": Fault(computing(lambda real: lambda rows, groups, w: real(rows, groups,
        w.roll(1))), PAIR, ("each row has the routing weight of the row before it on each ep rank",), ROUTER),
    "routing weights are not normalised": Fault(routers(lambda job, one: setattr(one, "config", replace(one.config,
        normalize=False))), PAIR, ("routing weights are not normalised over a token's 2 experts",), ROUTER),
    "capacity is divided by ep": Fault(routers(lambda job, one: setattr(one, "config", replace(one.config,
        capacity_factor=one.config.capacity_factor / job.config.mesh.ep))), (*PAIR, *CAPACITY),
        ("2 slots per sample instead of 4, as with a capacity divided by ep (2)",), DOWN),
    "rows get no gradient": Fault(computing(lambda real: lambda rows, groups, w: real(rows.detach(), groups, w)), PAIR,
        ("no gradient reaches the layer's input through the experts' rows",), "blocks.0.ffn_norm.weight"),
    "losses are means over a cp rank's tokens": Fault(routers(lambda job, one: setattr(one.sample_counts, "num_parts",
        1)), ("mesh.cp=2",), ("means are over each cp rank's own tokens",), ROUTER),
    "experts count ep times in the norm": Fault(replacing(optimizer_module, "num_shards", counting_experts), LAYOUT,
        ("counted ep (2) times: experts",)),
}  # fmt: skip


UNKNOWN_FAULTS: dict[str, Fault] = {
    "routing weights are a tenth too small": Fault(computing(lambda real: lambda rows, groups, w: real(rows, groups,
        0.9 * w)), PAIR, ("0.900 × the right one",), ROUTER),
    "two faults at once": Fault(both(computing(lambda real: lambda rows, groups, w: real(rows, groups, w) * w[:, None]),
        dispatching(finish=to_next_token)), PAIR, ("the output of blocks.0.moe", "so the fault is in it"), ROUTER),
}  # fmt: skip
"""Faults that no variant has: no cause may be named."""
