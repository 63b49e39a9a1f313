"""Costs of plans are those of real micro-batches on the CPU: operations exactly, kernels and bytes within a twentieth.

`FlopCounterMode` counts all pairs of queries and keys, so plans are compared as if all were visible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.models.contract.operators import OperatorKind, Rerun
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.plan.costs import CostModel, Costs, PartCosts, costs_of_stage, costs_of_step
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import LayerSpec, PlannedOperator, RunPlan
from meshwright_bench.recompute.live_bytes import inputs_of_last_block
from tests.models.real_costs import Measured, Passes, count_flops, measure
from tests.train.jobs import load_words, make_job, make_task

LLAMA, MOE, DIT = ("llama-tiny",), ("moe-tiny",), ("dit-digits", "data.source=digits")
WINDOWS = (*LLAMA, "model.num_kv_heads=2", "model.window=16", "model.global_every=2", "model.tie_embeddings=true")
SHARED = (*MOE, "model.num_shared_experts=1")
SIGMOID = (*MOE, "model.score=sigmoid", "model.normalize=false", "model.z_loss=0.1", "model.top_k=3")
GROUPS = (*MOE, "model.num_experts=8", "model.num_groups=2", "model.balance_bias=true", "model.balance_loss=0")
CAPACITY = (*MOE, "model.drop=over-capacity", "model.capacity_factor=1.5")
VIDEO = ("dit-digits-video", "data.source=digits-video", "model.dim=64", "model.num_heads=2")
CASES = [LLAMA, WINDOWS, MOE, SHARED, SIGMOID, GROUPS, CAPACITY, DIT, VIDEO]
BF16 = "bfloat16"


class MicroBatch:
    """A micro-batch of a plan, and of the same model built for real."""

    def __init__(self, words: Sequence[str], policy: RecomputePolicy, *, dtype: str = "float32") -> None:
        words = [*words, f"recompute.policy={policy}"]
        job, step = make_job(0, 1, words)
        self.plan = all_pairs(make_plan(load_words([*words, f"train.precision={dtype}"])))
        self._task, self._module = make_task(load_words(words)), job.parts()[0].module.to(getattr(torch, dtype))
        batch = step.pipeline.tokens.localize(self._task.batch(range(self.plan.batch.samples)))
        self._inputs = [_cast(one, dtype) for one in (batch.inputs, *batch.conditions)]
        self._targets = batch.targets

    @property
    def block(self) -> LayerSpec:
        """The kind of the last block."""
        return self.plan.kind(self.plan.stages[0].kinds[-1])

    def of_model(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Passes of the model and its loss."""
        self._module.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        return (
            lambda: losses.append(self._task.loss_sum(self._module(*self._inputs), self._targets)),
            lambda: losses[0].backward(),
        )

    def of_block(self, *, trained: bool = True) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Passes of the last block."""
        block, inputs = inputs_of_last_block(self._module, *self._inputs)
        block.zero_grad(set_to_none=True)
        block.requires_grad_(trained)
        is_float = [isinstance(one, Tensor) and one.is_floating_point() for one in inputs]
        leaves = [one.detach().requires_grad_() if able else one for one, able in zip(inputs, is_float, strict=True)]
        outputs: list[Tensor] = []
        return lambda: outputs.append(block(*leaves)), lambda: outputs[0].backward(torch.ones_like(outputs[0]))


def _cast(value: Any, dtype: str) -> Any:
    return value.to(getattr(torch, dtype)) if isinstance(value, Tensor) and value.is_floating_point() else value


def all_pairs(plan: RunPlan) -> RunPlan:
    """The plan with operations of attention for all pairs, and of none where a window makes it an operator that
    `FlopCounterMode` can't look into."""

    def of_kind(kind: LayerSpec) -> LayerSpec:
        layer = kind.attention
        if layer is None:
            return kind
        pairs = plan.batch.tokens**2 if layer.mask.window is None else 0
        flops = 4 * pairs * layer.num_heads * layer.head_dim
        operators = (replace(one, attention_flops=flops) if one.attention_flops else one for one in kind.operators)
        return replace(kind, operators=tuple(operators))

    return replace(plan, kinds=tuple(of_kind(kind) for kind in plan.kinds))


def wrong(costs: Costs, found: Measured) -> list[str]:
    """What of the costs is wrong: operations must be equal, kernels and bytes agree within a twentieth."""
    exact = [] if costs.flops == found.flops else ["flops"]
    pairs = {"launches": (costs.launches, found.launches), "num_bytes": (costs.num_bytes, found.num_bytes)}
    return exact + [name for name, (ours, real) in pairs.items() if ours != pytest.approx(real, rel=0.05)]


def flops(passes: Passes) -> list[int]:
    return [count_flops(run) for run in passes()]


def data_of(words: Sequence[str], corpus: Sequence[str]) -> list[str]:
    return [*words] if any(word.startswith("data.source") for word in words) else [*words, *corpus]


@pytest.mark.parametrize("policy", RecomputePolicy)
@pytest.mark.parametrize("words", CASES)
def test_operations_are_exact(corpus, words, policy):
    batch = MicroBatch(data_of(words, corpus), policy)
    costs = costs_of_stage(batch.plan, batch.plan.stages[0])
    assert [costs.forward.flops, costs.backward().flops] == flops(batch.of_model)
    step = costs_of_step(batch.plan)
    assert step.backward().flops == batch.plan.batch.num_microbatches * costs.backward().flops


@pytest.mark.parametrize("words", [LLAMA, SHARED, DIT])
def test_operations_of_gradients_are_exact(corpus, words):
    batch = MicroBatch(data_of(words, corpus), RecomputePolicy.NONE)
    costs = CostModel.of(batch.plan).of_kind(batch.block)
    assert [costs.forward.flops, costs.input_gradient.flops] == flops(lambda: batch.of_block(trained=False))
    assert costs.backward().flops == flops(batch.of_block)[1]
    assert costs.weight_gradient.flops == costs.backward().flops - costs.input_gradient.flops > 0


QUICK = [(LLAMA, "none", BF16), (SHARED, "selective", BF16), (DIT, "full", "float32")]
SLOW = [
    (words, policy, dtype)
    for words in CASES
    for policy in RecomputePolicy
    for dtype in ("float32", BF16)
    if (words, policy, dtype) not in QUICK
]


@pytest.mark.parametrize(
    ("words", "policy", "dtype"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_kernels_and_their_bytes(corpus, words, policy, dtype):
    batch = MicroBatch(data_of(words, corpus), RecomputePolicy(policy), dtype=dtype)
    for costs, passes in (
        (CostModel.of(batch.plan).of_kind(batch.block), batch.of_block),
        (costs_of_stage(batch.plan, batch.plan.stages[0]), batch.of_model),
    ):
        forward, backward = measure(passes)
        assert not wrong(costs.forward, forward), (costs.forward, forward)
        assert not wrong(costs.backward(), backward), (costs.backward(), backward)


Fault = Callable[[tuple[PlannedOperator, ...]], tuple[PlannedOperator, ...]]


def omitted(name: str, kind: OperatorKind) -> Fault:
    return lambda operators: tuple(one for one in operators if (one.name, one.kind) != (name, kind))


def changed(name: str, **values: Any) -> Fault:
    return lambda operators: tuple(replace(one, **values) if one.name == name else one for one in operators)


PRODUCT, GROUPED, MEMORY = OperatorKind.PRODUCT, OperatorKind.GROUPED, OperatorKind.MEMORY
FAULTS = {
    "a product omitted": (omitted("attention.wv", PRODUCT), {"flops"}),
    "experts omitted": (omitted("moe.experts.up", GROUPED), {"flops"}),
    "too few rows": (changed("moe.experts.down", rows=64), {"flops"}),
    "wrong columns": (changed("moe.router.gate", columns=3), {"flops"}),
    "no gradient of a weight": (changed("attention.wo", weights=0), {"flops"}),
    "no gradient of an input": (changed("moe.shared.up", inputs=0), {"flops"}),
    "a kept product runs again": (changed("attention.wq", rerun=Rerun.ALWAYS), {"flops"}),
    "a norm omitted": (omitted("ffn_norm", MEMORY), {"launches", "num_bytes"}),
    "the dispatch omitted": (omitted("moe.dispatch", MEMORY), {"launches"}),
    "the experts' activation omitted": (omitted("moe.experts", MEMORY), {"launches"}),
}


@pytest.fixture(scope="module")
def real_block(tmp_path_factory):
    """A micro-batch with selective recomputation, and what its last block costs."""
    from tests.helpers import small_corpus

    words = (*SHARED, *small_corpus(tmp_path_factory.mktemp("text")))
    batch = MicroBatch(words, RecomputePolicy.SELECTIVE)
    return batch, measure(batch.of_block)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(real_block, fault):
    batch, (forward, backward) = real_block
    change, expected = FAULTS[fault]

    def found(operators: tuple[PlannedOperator, ...]) -> set[str]:
        costs = CostModel.of(batch.plan).of_kind(replace(batch.block, operators=operators))
        return {*wrong(costs.forward, forward), *wrong(costs.backward(), backward)}

    assert not found(batch.block.operators)
    assert expected <= found(change(batch.block.operators))


def test_parts_add_up(corpus):
    plan = make_plan(load_words([*SHARED, *corpus, "recompute.policy=full"]))
    model, stage = CostModel.of(plan), plan.stages[0]
    kinds = (model.of_kind(kind) for kind, _ in plan.held(stage))
    total = reduce(PartCosts.__add__, kinds)
    assert total == costs_of_stage(plan, stage)
    assert total.recomputation.flops < total.forward.flops < total.backward().flops
