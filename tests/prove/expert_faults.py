"""Seeded faults of experts: on which layouts, and what the proof must say about them."""

from __future__ import annotations

import torch

from meshwright.prove.record.layout_run import Tamper
from tests.prove.expert_damage import (
    NUM_EXPERTS,
    DropsTokensOf1,
    NextToken,
    auxiliary_times,
    bias_in_weights,
    bias_moved_twice,
    bias_not_used,
    capacity_of_microbatch,
    choosing,
    computing,
    count_experts_on_each_rank,
    count_last_microbatch,
    count_own_batch,
    count_own_tokens,
    count_recomputed,
    dispatching,
    drop_edp_sum,
    gradients_of_local_rows,
    keeps_gradients_of,
    lose_expert_5,
    lose_shared,
    on_expert_units,
    position,
    returns_zeros,
    routed,
    routers,
    stale_choices,
    stale_outputs,
    to_expert,
    weights_of_local_experts,
    whole_loss_on_each_tp_rank,
    without_capacity,
    without_last_rows,
)
from tests.prove.seeded_faults import Fault, after_backward

LAYOUT = ("mesh.dp_shard=4", "mesh.ep=2")
PAIR = ("mesh.dp_shard=2", "mesh.ep=2")
TWICE = (*PAIR, "train.num_microbatches=2")
BIAS = ("model.balance_bias=true", "model.bias_rate=0.05", "model.score=sigmoid")
CAPACITY = ("model.drop=over-capacity", "model.capacity_factor=1.0")
DOWN = "blocks.1.moe.experts.down"
ROUTER = "blocks.0.moe.router.gate.weight"
LOAD = "blocks.0.moe.router.load"

EXPERT_FAULTS: dict[str, Fault] = {
    "experts' gradients are multiplied by ep": Fault(
        on_expert_units(lambda unit: unit.set_gradient_divide_factor(0.5)),
        LAYOUT,
        ("2.000 × the reference", "multiplied by ep (2)"),
        DOWN,
    ),
    "experts' gradients are averaged over ep": Fault(
        on_expert_units(lambda unit: unit.set_gradient_divide_factor(2.0)),
        LAYOUT,
        ("0.500 × the reference", "averaged over ep (2 ranks)"),
        DOWN,
    ),
    "experts' gradients are not summed over the ranks that hold them": Fault(
        on_expert_units(drop_edp_sum),
        LAYOUT,
        ("the sum over the ranks that hold the same experts (2) is missing",),
        DOWN,
    ),
    "an expert's gradient is lost": Fault(
        after_backward(lose_expert_5), PAIR, ("zero for expert 5 (ep rank 1)",), "blocks.1.moe.experts.up"
    ),
    "tokens of one rank are dropped at combine": Fault(
        dispatching(lambda job: DropsTokensOf1, group=0),
        LAYOUT,
        ("rows are dropped at combine", "for the tokens of data-parallel rank 1 (rank 1)"),
        ROUTER,
    ),
    "tokens of a rank of every group are dropped at combine": Fault(
        dispatching(lambda job: DropsTokensOf1),
        LAYOUT,
        ("rows are dropped at combine", "for the tokens of ep rank 1 in every group"),
        ROUTER,
    ),
    "one rank returns zeros": Fault(
        dispatching(returns_zeros), PAIR, ("no outputs of experts 4…7 (ep rank 1)", "rows from ep rank 1"), DOWN
    ),
    "routing weights are applied twice": Fault(
        computing(lambda _, real: lambda rows, groups, w: real(rows, groups, w) * w[:, None]),
        PAIR,
        ("routing weights are applied twice",),
        ROUTER,
    ),
    "routing weights are not applied": Fault(
        computing(lambda _, real: lambda rows, groups, w: real(rows, groups, torch.ones_like(w))),
        PAIR,
        ("routing weights are not applied",),
        ROUTER,
    ),
    "the last row of each expert is missing": Fault(
        computing(without_last_rows), PAIR, ("offsets of the groups of rows are off by one",), DOWN
    ),
    "experts of two ranks are swapped": Fault(
        to_expert(NUM_EXPERTS // 2), PAIR, ("the experts of ep ranks 0 and 1 are swapped",), DOWN
    ),
    "the index of an expert is off by one": Fault(
        to_expert(1), PAIR, ("the offset of the experts' indices is wrong by 1",), DOWN
    ),
    "rows are returned to the next token": Fault(
        dispatching(lambda job: NextToken), PAIR, ("rows are combined into the wrong tokens",), ROUTER
    ),
    "a micro-batch gets the previous one's rows": Fault(
        stale_outputs, TWICE, ("rows of the previous micro-batch's dispatch", "stale"), ROUTER
    ),
    "a micro-batch is routed as the previous one": Fault(routers(stale_choices), TWICE, ("stale routing",), DOWN),
    "routers get gradients of local experts only": Fault(
        routed(weights_of_local_experts),
        PAIR,
        ("the router's gradient comes from each rank's own experts only",),
        ROUTER,
    ),
    "experts get gradients of local tokens only": Fault(
        dispatching(lambda job: keeps_gradients_of(position(job))),
        PAIR,
        ("experts get gradients of their own rank's tokens only",),
        DOWN,
    ),
    "the balance loss counts the micro-batch": Fault(
        choosing(lambda router, c: (c[0], c[1], c[2].double().mean(0, keepdim=True).expand(c[2].shape))),
        TWICE,
        ("counts the load of each rank's micro-batch instead of each sample's",),
        ROUTER,
    ),
    "tokens get gradients of local experts only": Fault(
        gradients_of_local_rows, PAIR, ("gradients of rows are not returned",), "blocks.0.ffn_norm.weight"
    ),
    "the load of the global batch is not summed": Fault(
        routers(count_own_batch),
        (*PAIR, "model.balance_scope=global-batch"),
        ("counts the load of each rank's micro-batch instead of the global batch's",),
        ROUTER,
    ),
    "the balance loss is summed over tp": Fault(
        whole_loss_on_each_tp_rank,
        ("mesh.tp=2",),
        ("the balance loss has 2.000 × its weight", "summed over"),
        ROUTER,
    ),
    "the balance loss is summed over ep": Fault(
        auxiliary_times(lambda job, path: job.config.mesh.ep),
        PAIR,
        ("the balance loss has 2.000 × its weight", "multiplied by ep (2 ranks)"),
        ROUTER,
    ),
    "the balance loss of an inner stage is missing": Fault(
        auxiliary_times(lambda job, path: 0.0 if job.pipeline_rank == 0 else 1.0),
        ("mesh.pp=2", "train.num_microbatches=2"),
        ("the balance loss of blocks.0.moe.router is missing",),
        ROUTER,
    ),
    "tokens over capacity are computed": Fault(
        routers(without_capacity),
        (*PAIR, *CAPACITY),
        ("tokens over an expert's capacity are computed instead of dropped",),
        DOWN,
    ),
    "capacity is that of a micro-batch": Fault(
        choosing(capacity_of_microbatch),
        (*PAIR, *CAPACITY),
        ("capacity is counted over each rank's micro-batch",),
        DOWN,
    ),
    "shared experts are left out": Fault(
        lose_shared, (*PAIR, "model.num_shared_experts=1"), ("shared experts are left out",), ROUTER
    ),
    "the bias enters the weights": Fault(
        routers(bias_in_weights), (*PAIR, *BIAS), ("the balancing bias enters the routing weights",), DOWN
    ),
    "the bias is not used": Fault(
        routers(bias_not_used), (*PAIR, *BIAS), ("not added to the scores that experts are chosen by",), DOWN
    ),
    "the bias moves twice a step": Fault(
        routers(bias_moved_twice),
        (*PAIR, *BIAS, "recompute.policy=full"),
        ("the bias changes by 2 × its step", "as in a forward and its recomputation"),
        f"{LOAD}.bias",
    ),
    "a recomputed forward counts again": Fault(
        routers(count_recomputed),
        (*PAIR, "recompute.policy=full"),
        ("2.000 × the reference", "recomputed forwards count their tokens again"),
        f"{LOAD}.value",
    ),
    "only the last micro-batch counts": Fault(
        routers(count_last_microbatch),
        (*TWICE, *BIAS),
        ("counts include only the last micro-batch (1)", "replace those of the one before it"),
        f"{LOAD}.value",
    ),
    "counts are not summed over ranks": Fault(
        count_own_tokens,
        (*LAYOUT, *BIAS),
        ("counts include only each rank's own tokens", "not summed over the data-parallel ranks"),
        f"{LOAD}.value",
    ),
    "experts count ep times in the norm": Fault(count_experts_on_each_rank, LAYOUT, ("counted ep (2) times: experts",)),
}


def _both(*tampers: Tamper) -> Tamper:
    return lambda job, step: [tamper(job, step) for tamper in tampers] and None


UNKNOWN_FAULTS: dict[str, Fault] = {
    "routing weights are a tenth too small": Fault(
        computing(lambda _, real: lambda rows, groups, w: real(rows, groups, 0.9 * w)),
        PAIR,
        ("not recognised",),
        ROUTER,
    ),
    "two faults at once": Fault(
        _both(
            computing(lambda _, real: lambda rows, groups, w: real(rows, groups, w) * w[:, None]),
            dispatching(lambda job: NextToken),
        ),
        PAIR,
        ("not recognised",),
        ROUTER,
    ),
}
"""Faults that no variant has: no cause may be named."""
