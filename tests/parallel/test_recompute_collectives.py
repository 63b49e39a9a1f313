"""Under selective recomputation a step runs the collectives of one without it, and computes the same bits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.mesh.local_shards import to_local
from meshwright.nn.recompute import recompute
from meshwright.nn.recompute_policy import RecomputePolicy
from tests.parallel.expert_layers import Case, keep_experts, make
from tests.train.jobs import make_job

LOCAL = {"meshwright::dropout_add", "meshwright::block_attention", "meshwright::block_attention_backward"}
"""Operators of this package that communicate nothing."""


class Collectives(TorchDispatchMode):
    """Calls of collectives, also of those inside DTensor's operators."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(one, "__tensor_flatten__") for one in types) or DTensor in types:
            return NotImplemented
        name = func.name()
        is_wait = "wait" in name or "monitored_barrier" in name
        is_collective = name.startswith(("c10d::", "_c10d_functional::", "meshwright::")) and name not in LOCAL
        if is_collective and not is_wait:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def count_on_rank(rank, world_size, words):
    """Collectives of a step by policy, and the gradients."""
    calls, gradients = {}, {}
    for policy in RecomputePolicy:
        job, step = make_job(rank, world_size, [*words, f"recompute.policy={policy}"])
        with Collectives() as mode:
            step.accumulate(1)
        calls[policy] = mode.calls
        gradients[policy] = {n: to_local(p.grad) for n, p in job.model.named_parameters() if p.grad is not None}
    return calls, gradients


DIT = ("dit-digits", "data.source=digits", "model.zero_init=false", "mesh.sequence_parallel=false")
CASES = {
    "tp, whole sequences, dropout": ("mesh.tp=2", "mesh.sequence_parallel=false", "train.dropout=0.2"),
    "ep, shared, capacity": ("moe-tiny", "mesh.dp_shard=2", "mesh.ep=2", "model.num_shared_experts=1",
                             "model.drop=over-capacity", "model.capacity_factor=1.5"),
    "dit, tp": (*DIT, "mesh.tp=2"),
    "dp_shard, bfloat16": ("mesh.dp_shard=2", "train.precision=bfloat16"),
    "cp, ring": ("mesh.cp=2", "mesh.cp_method=ring", "train.dropout=0.2"),
    "ep over cp, heads": ("moe-tiny", "mesh.cp=2", "mesh.ep=2", "mesh.cp_method=heads"),
}  # fmt: skip
REPEATED = {"tp", "cp"}
"""Words of cases whose blocks communicate through operators that full recomputation repeats."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_communicated_twice(gang, corpus, name):
    words = [*CASES[name], *(() if "dit" in name else corpus)]
    for calls, gradients in gang(2).run(count_on_rank, words):
        expected = calls[RecomputePolicy.NONE]
        assert calls[RecomputePolicy.SELECTIVE] == expected and expected.total() > 0
        more = (calls[RecomputePolicy.FULL] - expected).total()
        is_repeated = not REPEATED.isdisjoint(name.replace(",", "").split())
        assert (more > 0) is is_repeated, "full recomputation repeats collectives inside blocks, but not dispatches"
        for policy in (RecomputePolicy.SELECTIVE, RecomputePolicy.FULL):
            assert gradients[policy].keys() == gradients[RecomputePolicy.NONE].keys()
            for key, gradient in gradients[RecomputePolicy.NONE].items():
                assert torch.equal(gradients[policy][key], gradient), (policy, key)


class Between(nn.Module):
    """Experts in the middle of a block: its backward needs what the experts return."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x_btd):
        return self.layer(self.layer(x_btd).tanh()).tanh().square()


def experts_on_rank(rank, world_size, case):
    """Collectives of forward and backward, and the gradients, by policy."""
    found = []
    for policy in RecomputePolicy:
        layer, x_btd = make(case, rank)
        keep_experts(layer, rank, world_size)
        block = Between(layer)
        recompute(block, policy)
        x_btd.requires_grad_()
        with Collectives() as mode:
            block(x_btd).sum().backward()
        found.append((mode.calls, [x_btd.grad, *(p.grad for p in block.parameters())]))
    return found


@pytest.mark.parametrize("case", [Case(), Case(capacity_factor=2.0)], ids=["rows", "slots"])
def test_rows_that_experts_return_travel_once(gang, case):
    for (calls, expected), (selective, kept), (full, again) in gang(2).run(experts_on_rank, case):
        assert selective == calls and full.total() > calls.total()
        for gradients in (kept, again):
            assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
