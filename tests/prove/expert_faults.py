"""Seeded faults of layers with experts: of their dispatches, routers, handles and reductions.

Each function damages a built job before its first step, never the reference; the tables say on which layouts, and what
the proof must say.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from meshwright.mesh.local_shards import to_local
from meshwright.nn.experts import router as router_module
from meshwright.nn.experts.grouped_linear import RowMap
from meshwright.nn.experts.layer import Experts, MixtureOfExperts
from meshwright.nn.experts.router import ExpertLoad, Router, drop_over_capacity
from meshwright.nn.step_handles import AuxiliaryLoss
from meshwright.train import optimizer as optimizer_module
from tests.prove.seeded_faults import (
    Fault,
    OwnChunk,
    after_backward,
    each,
    giving,
    on,
    replacing,
    taking,
    wrapping,
    wrapping_each,
)

NUM_EXPERTS = 8


def position(job):
    """This rank's position in its group of ep ranks."""
    return job.data_index % job.config.mesh.ep


# ---- experts: their rows and weights

computing = partial(wrapping_each, Experts, "forward")


def weighing(change):
    """Change the routing weights of rows."""
    return computing(taking(lambda job, rows, groups, weights: (rows, groups, change(weights))))


def without_last_rows(job, real):
    """The groups end one row early: the last row of each stays zero."""

    def forward(rows, groups, weights):
        last = groups.ends_e[groups.sizes_e > 0].long() - 1
        keep = torch.ones(rows.shape[0], 1, dtype=rows.dtype).index_fill(0, last, 0.0)
        return real(rows, groups, weights) * keep

    return forward


weights_twice = computing(lambda job, real: lambda rows, groups, w: real(rows, groups, w) * w[:, None])


# ---- dispatches


def dispatching(name, change):
    """Replace a method of every dispatch."""
    started = giving(lambda job, dispatch: (replacing(dispatch, name, change)(job, None), dispatch)[1])
    return wrapping_each(MixtureOfExperts, "dispatcher.start", started)


def combining(change):
    """Change the outputs that are returned to the tokens' ranks."""
    return dispatching("combine", taking(lambda job, rows, out: (rows, change(job, rows, out))))


def sources(rows):
    """Position of the rank that sent each row, by where it stands among the rows received."""
    by_row, _, received = rows.origin
    return torch.bucketize(by_row.index_m, torch.tensor(received).cumsum(0), right=True)


dropping_tokens_of_1 = combining(lambda job, rows, out_rd: out_rd * (sources(rows) != 1)[:, None])
"""What goes back to the rank at position 1 is zero."""


def of_own(job, rows, x_rd):
    """Rows without gradients, except for those of the rank's own tokens."""
    return torch.where((sources(rows) == position(job))[:, None], x_rd, x_rd.detach())


def to_next_token(job, real):
    """Each returned row is added to the token after its own."""

    def finish():
        tokens = real.__self__._tokens
        real.__self__._tokens = RowMap((tokens.index_m + 1) % tokens.num_sources, tokens.num_sources)
        return real()

    return finish


def stale_outputs():
    """A micro-batch is given the outputs that the one before it was to get: two of each, by two layers."""
    last = []

    def change(job, found):
        given = last[-2] if len(last) % 4 >= 2 else found.detach()
        last.append(found.detach().clone())
        # The values of another buffer in the graph of this one.
        return found * 0.0 + given + found - found.detach()

    return giving(change)


def routed(change):
    """Change what the dispatcher is told."""
    arguments = taking(lambda job, x, routing, cache: (x, change(job, routing), cache))
    return wrapping_each(MixtureOfExperts, "dispatcher.start", arguments)


def to_expert(shift):
    """The rank that holds an expert is computed from an index that is off."""
    return routed(lambda job, r: replace(r, experts_nk=(r.experts_nk + shift) % NUM_EXPERTS))


def weights_of_local_experts(job, routing):
    """The weights' gradients are not sent back."""
    is_local = routing.experts_nk // (NUM_EXPERTS // job.config.mesh.ep) == position(job)
    return replace(routing, weights_nk=torch.where(is_local, routing.weights_nk, routing.weights_nk.detach()))


# ---- routers and their handles


def configured(change):
    """Routers have other settings."""
    return each(Router, lambda job, one: setattr(one, "config", replace(one.config, **change(job, one.config))))


def choosing(change):
    """Change what routers choose: experts, whether they have a slot, and counts for the balance loss."""
    return wrapping_each(Router, "_choose", lambda job, real: lambda scores: change(real.__self__, *real(scores)))


def counts_of_microbatch(router, experts, kept, counts):
    return experts, kept, counts.double().mean(0, keepdim=True).expand(counts.shape)


def capacity_of_microbatch(router, experts, kept, counts):
    b, t, k = experts.shape
    kept = drop_over_capacity(experts.reshape(1, b * t, k), NUM_EXPERTS, b * router.config.capacity(t))
    return experts, kept.view(b, t, k), counts


def stale_choices(job, real):
    """A cache that is not cleared: every second micro-batch is routed as the one before."""
    kept = []

    def recall(compute):
        if kept:
            return kept.pop()
        kept.append(real(compute))
        return kept[0]

    return recall


def without_bias(job, router):
    """Choose experts by scores alone."""
    best = router.best

    def chosen(found):
        bias, router.load.bias = router.load.bias, None
        try:
            return best(found)
        finally:
            router.load.bias = bias

    router.best = chosen


def bias_in_weights(job, router):
    scores = router._scores

    def biased(logits):
        found, probabilities = scores(logits)
        return found + router.load.bias, probabilities

    router._scores = biased
    without_bias(job, router)


def of_shifted(job, real):
    return lambda logits, **named: real(logits - logits.amax(-1, keepdim=True).detach(), **named)


def follow_the_load_so_far(job, real):
    """The balancing bias follows the counts since the first step."""
    load = real.__self__

    def commit(total):
        bias = load.bias.clone()
        real(total)
        surplus = load.value * load.value.numel() - load.value.sum()
        load.bias.copy_(bias - load.bias_rate * surplus.sign().to(bias.dtype))

    return commit


def bias_kept(job, real):
    def commit(total):
        before = real.__self__.bias.clone()
        real(total)
        real.__self__.bias.copy_(before)

    return commit


def bias_moved_twice(job, real):
    """As in a forward and its recomputation."""

    def commit(total):
        real(total)
        load = real.__self__
        load.bias.sub_((total * total.numel() - total.sum()).sign().to(load.bias.dtype), alpha=load.bias_rate)

    return commit


def counting(before):
    """Change a router's load before each micro-batch's counts are added."""
    change = lambda job, real: lambda delta: (before(real.__self__), real(delta))[1]  # noqa: E731
    return wrapping_each(Router, "load.add", change)


def auxiliary_times(factor):
    """Scale auxiliary losses, with their gradients."""
    return each(AuxiliaryLoss, lambda job, loss: setattr(loss, "weight", loss.weight * factor(job)))


# ---- reductions and the norm


def lose_expert_5(job):
    if position(job) == 1:
        to_local(job.model.get_parameter("blocks.1.moe.experts.up").grad)[1].zero_()


def counting_experts(job, real):
    """The weight of an expert's shard in the norm is that of one that every ep rank holds."""
    return lambda tensor: real(tensor) * (job.config.mesh.ep if tensor.dim() == 3 else 1)


def both(*tampers):
    return lambda job, step: [tamper(job, step) for tamper in tampers] and None


recounting = both(
    wrapping_each(Router, "chosen.recall", lambda job, real: lambda compute: compute()),
    counting(lambda load: setattr(load, "recomputing", False)),
)
"""Experts are chosen again in the recomputed forward, and counted again."""


LAYOUT = ("mesh.dp_shard=4", "mesh.ep=2")
PAIR = ("mesh.dp_shard=2", "mesh.ep=2")
TWICE = (*PAIR, "train.num_microbatches=2")
BIAS = ("model.balance_bias=true", "model.bias_rate=0.05", "model.score=sigmoid")
CAPACITY = ("model.drop=over-capacity", "model.capacity_factor=1.0")
DOWN = "blocks.1.moe.experts.down"
ROUTER = "blocks.0.moe.router.gate.weight"
LOAD = "blocks.0.moe.router.load"

EXPERT_FAULTS: dict[str, Fault] = {
    "experts' gradients are multiplied by ep": Fault(each(Experts, lambda job, unit: unit.set_gradient_divide_factor(
        0.5)), LAYOUT, ("2.000 × the reference", "multiplied by ep (2)"), DOWN),
    "experts' gradients are averaged over ep": Fault(each(Experts, lambda job, unit: unit.set_gradient_divide_factor(
        2.0)), LAYOUT, ("0.500 × the reference", "averaged over ep (2 ranks)"), DOWN),
    "experts' gradients are not summed over the ranks that hold them": Fault(each(Experts, lambda job, unit:
        unit.set_custom_reduce_scatter(OwnChunk())), LAYOUT,
        ("the sum over the ranks that hold the same experts (2) is missing",), DOWN),
    "an expert's gradient is lost": Fault(after_backward(lose_expert_5), PAIR, ("zero for expert 5 (ep rank 1)",),
        "blocks.1.moe.experts.up"),
    "tokens of one rank are dropped at combine": Fault(on(lambda job: job.data_index < 2, dropping_tokens_of_1), LAYOUT,
        ("rows are dropped at combine", "only on rank 1"), ROUTER),
    "tokens of a rank of every group are dropped at combine": Fault(dropping_tokens_of_1, LAYOUT,
        ("rows are dropped at combine", "only on ranks 1 and 3"), ROUTER),
    "one rank returns zeros": Fault(combining(lambda job, rows, out: out * float(position(job) != 1)), PAIR,
        ("no outputs of experts 4…7 (ep rank 1)", "rows from ep rank 1"), DOWN),
    "routing weights are applied twice": Fault(weights_twice, PAIR, ("routing weights are applied twice",), ROUTER),
    "routing weights are not applied": Fault(weighing(torch.ones_like), PAIR, ("routing weights are not applied",),
        ROUTER),
    "the last row of each expert is missing": Fault(computing(without_last_rows), PAIR,
        ("offsets of the groups of rows are off by one",), DOWN),
    "experts of two ranks are swapped": Fault(to_expert(NUM_EXPERTS // 2), PAIR,
        ("the experts of ep ranks 0 and 1 are swapped",), DOWN),
    "the index of an expert is off by one": Fault(to_expert(1), PAIR,
        ("the offset of the experts' indices is wrong by 1",), DOWN),
    "rows are returned to the next token": Fault(dispatching("finish", to_next_token), PAIR,
        ("rows are combined into the wrong tokens",), ROUTER),
    "a micro-batch gets the previous one's rows": Fault(dispatching("finish", stale_outputs()), TWICE,
        ("micro-batch 1 has the value of micro-batch 0", "stale"), ROUTER),
    "a micro-batch is routed as the previous one": Fault(wrapping_each(Router, "chosen.recall", stale_choices), TWICE,
        ("stale routing",), DOWN),
    "routers get gradients of local experts only": Fault(routed(weights_of_local_experts), PAIR,
        ("the router's gradient comes from each rank's own experts only",), ROUTER),
    "experts get gradients of local tokens only": Fault(combining(of_own), PAIR,
        ("experts get gradients of their own rank's tokens only",), DOWN),
    "the balance loss counts the micro-batch": Fault(choosing(counts_of_microbatch), TWICE,
        ("counts the load of each rank's micro-batch instead of each sample's",), ROUTER),
    "tokens get gradients of local experts only": Fault(dispatching("receive", giving(lambda job, rows: replace(rows,
        rows_rd=of_own(job, rows, rows.rows_rd)))), PAIR, ("gradients of rows are not returned",),
        "blocks.0.ffn_norm.weight"),
    "the load of the global batch is not summed": Fault(wrapping_each(Router, "batch_counts.reduce",
        lambda job, real: lambda counts: counts), (*PAIR, "model.balance_scope=global-batch"),
        ("counts the load of each rank's micro-batch instead of the global batch's",), ROUTER),
    "the balance loss is summed over tp": Fault(wrapping("step._handles._losses", lambda job, real: [(loss, parts,
        1) for loss, parts, _ in real]), ("mesh.tp=2",),
        ("the balance loss of blocks.1.moe.router has 2.000 × its weight", "summed over"), ROUTER),
    "the balance loss is summed over ep": Fault(auxiliary_times(lambda job: job.config.mesh.ep), PAIR,
        ("the balance loss of blocks.1.moe.router has 2.000 × its weight", "multiplied by ep (2 ranks)"), ROUTER),
    "the balance loss of an inner stage is missing": Fault(auxiliary_times(lambda job: float(job.pipeline_rank != 0)),
        ("mesh.pp=2", "train.num_microbatches=2"), ("the balance loss of blocks.0.moe.router is missing",), ROUTER),
    "tokens over capacity are computed": Fault(configured(lambda job, one: {"capacity_factor": None}), (*PAIR,
        *CAPACITY), ("tokens over an expert's capacity are computed instead of dropped",), DOWN),
    "capacity is that of a micro-batch": Fault(choosing(capacity_of_microbatch), (*PAIR, *CAPACITY),
        ("capacity is counted over each rank's micro-batch",), DOWN),
    "shared experts are left out": Fault(each(MixtureOfExperts,
        lambda job, layer: layer.shared.down.register_forward_hook(lambda module, inputs, out: out * 0.0)), (*PAIR,
        "model.num_shared_experts=1"), ("shared experts are left out",), ROUTER),
    "the bias enters the weights": Fault(each(Router, bias_in_weights), (*PAIR, *BIAS),
        ("the balancing bias enters the routing weights",), DOWN),
    "the bias is not used": Fault(each(Router, without_bias), (*PAIR, *BIAS),
        ("not added to the scores that experts are chosen by",), DOWN),
    "the bias stays": Fault(wrapping_each(Router, "load.commit", bias_kept), (*PAIR, *BIAS),
        ("the bias is not updated",), f"{LOAD}.bias"),
    "the bias moves twice a step": Fault(wrapping_each(Router, "load.commit", bias_moved_twice), (*PAIR, *BIAS,
        "recompute.policy=full"), ("the bias changes by 2 × its step", "as in a forward and its recomputation"),
        f"{LOAD}.bias"),
    "a recomputed forward counts again": Fault(recounting, (*PAIR, "recompute.policy=full"), ("2.000 × the reference",
        "recomputed forwards count their tokens again"), f"{LOAD}.value"),
    "only the last micro-batch counts": Fault(counting(lambda load: load.discard()), (*TWICE, *BIAS),
        ("counts include only the last micro-batch (1)", "replace those of the one before it"), f"{LOAD}.value"),
    "counts are not summed over ranks": Fault(wrapping("step._handles._sums", lambda job, real: ()), (*LAYOUT, *BIAS),
        ("counts include only each rank's own tokens", "not summed over the data-parallel ranks"), f"{LOAD}.value"),
    "routing weights are off by one row": Fault(weighing(lambda w: w.roll(1)), PAIR,
        ("each row has the routing weight of the row before it on each ep rank",), ROUTER),
    "routing weights are not normalised": Fault(configured(lambda job, one: {"normalize": False}), PAIR,
        ("routing weights are not normalised over a token's 2 experts",), ROUTER),
    "capacity is divided by ep": Fault(configured(lambda job, one: {
        "capacity_factor": one.capacity_factor / job.config.mesh.ep}), (*PAIR, *CAPACITY),
        ("2 slots per sample instead of 4, as with a capacity divided by ep (2)",), DOWN),
    "rows get no gradient": Fault(computing(taking(lambda job, rows, groups, w: (rows.detach(), groups, w))), PAIR,
        ("no gradient reaches the layer's input through the experts' rows",), "blocks.0.ffn_norm.weight"),
    "losses are means over a cp rank's tokens": Fault(each(Router, lambda job, one: setattr(one.sample_counts,
        "num_parts", 1)), ("mesh.cp=2",), ("means are over each cp rank's own tokens",), ROUTER),
    "the z-loss takes shifted logits": Fault(replacing(router_module, "z_loss", of_shifted), ("mesh.dp_shard=2",
        "model.z_loss=0.1"), ("the z-loss takes logits from which their maximum is subtracted",), ROUTER),
    "the balance loss takes scores as they are": Fault(wrapping_each(Router, "_scores", lambda job, real:
        lambda logits: (real(logits)[0], logits.sigmoid())), ("mesh.dp_shard=2", "model.score=sigmoid"),
        ("the balance loss takes scores that are not divided by their sum",), ROUTER),
    "the bias follows the load so far": Fault(wrapping_each(ExpertLoad, "commit", follow_the_load_so_far),
        ("mesh.dp_shard=2", *BIAS), ("the bias follows the counts of all steps so far",)),
    "experts count ep times in the norm": Fault(replacing(optimizer_module, "num_shards", counting_experts), LAYOUT,
        ("counted ep (2) times: experts",)),
}  # fmt: skip


REPLACED = (router_module,)
UNKNOWN_FAULTS: dict[str, Fault] = {
    "routing weights are a tenth too small": Fault(weighing(lambda w: 0.9 * w), PAIR, ("0.900 × the right one",),
        ROUTER),
    "two faults at once": Fault(both(weights_twice, dispatching("finish", to_next_token)), PAIR,
        ("the output of blocks.0.moe", "so the fault is in it"), ROUTER),
}  # fmt: skip
"""Faults that no variant has: no cause may be named."""
