"""Expert parallelism of transformers' mixtures: what is known of their experts, which are refused, and that ranks
compute what one process does, and send what the plan says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import LayoutError
from meshwright.models.contract.model_facts import ExpertFacts, Role
from meshwright.models.foreign.experts import why_not_dispatched
from meshwright.models.foreign.origin import ForeignModel
from meshwright.plan.make_plan import make_plan
from meshwright.plan.run_plan import Shard
from meshwright.prove.spec import as_proof
from tests.gangs.gang import GangPool
from tests.helpers import alternatives
from tests.models.hf.runs import hf_config, hf_structure
from tests.prove.proofs import assert_proved
from tests.train.jobs import job_of

pytest.importorskip("transformers")

EP = "mesh.dp_shard=2 mesh.ep=2"


def test_experts_are_found_by_their_calls() -> None:
    found = hf_structure("deepseek_v3")
    kinds = {block.name: block.experts for block in found.blocks}
    experts = ExpertFacts("mlp.experts", "mlp.experts", num_experts=4, top_k=2, width=64)
    assert [kinds[name] for name in found.layers] == [None, experts, experts, experts]
    assert not found.not_expert_parallel and hf_structure("qwen3").not_expert_parallel == ""


def test_all_that_is_stacked_by_expert_is_sharded_and_biases_are_vectors() -> None:
    plan = make_plan(hf_config("gpt_oss", *EP.split()))
    kind = next(kind for kind in plan.kinds if kind.is_block)
    stacked = {one.name.rpartition(".")[2]: one for one in kind.parameters if one.name.startswith("mlp.experts.")}
    assert {name: one.role for name, one in stacked.items()} == {
        "gate_up_proj": Role.EXPERTS, "gate_up_proj_bias": Role.VECTOR,
        "down_proj": Role.EXPERTS, "down_proj_bias": Role.VECTOR,
    }  # fmt: skip
    assert {one.used for one in stacked.values()} == {(Shard(0, plan.mesh.view("ep")),)}
    assert not any(one.used for one in kind.parameters if one not in stacked.values())


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        ("qwen3", EP, "mesh.ep = 2 for a model without experts"),
        ("llama4_text", EP, "mesh.ep = 2: model.layers.1.feed_forward.experts doesn't take tokens"),
        pytest.param(
            "dbrx", EP, "transformer.blocks.0.ffn.experts has parameters in modules of its own", marks=pytest.mark.slow
        ),
        ("mixtral", "mesh.dp_shard=8 mesh.ep=8", "mesh.ep = 8 does not divide 4 experts"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_reason(model: str, words: str, says: str) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        hf_config(model, *words.split())
    for fix in alternatives(caught.value.fix):
        hf_config(model, *words.split(), *fix)


class Experts(nn.Module):
    """Experts of a linear map each; with `mixes`, of the difference to the mean of their rows."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.num_experts, self.mixes = 4, mixes
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x_nd: Tensor, experts_nk: Tensor, weights_nk: Tensor) -> Tensor:
        x_nd = x_nd - x_nd.mean(0) if self.mixes else x_nd
        table_ne = torch.zeros(len(x_nd), self.num_experts + 1, dtype=x_nd.dtype).scatter_add(1, experts_nk, weights_nk)
        return torch.einsum("nd,efd,ne->nf", x_nd, self.weight, table_ne[:, :-1])


class Small(ForeignModel):
    """A model of nothing but experts, two for each token."""

    def __init__(self, *, mixes: bool) -> None:
        self._mixes = mixes

    def build(self) -> nn.Module:
        return nn.ModuleDict({"table": nn.Embedding(32, 8), "experts": Experts(mixes=self._mixes)})

    def call(self, model: Any, ids: Tensor, layout: Any = None) -> Tensor:
        x_nd = model["table"](ids).flatten(0, 1)
        best = (x_nd[:, :4] - 0.5).topk(2, -1)
        out: Tensor = model["experts"](x_nd, best.indices, best.values)
        return out

    def stacked_experts(self, model: nn.Module) -> Iterator[str]:
        yield "experts"

    layers_path = fills = styles = not_packed = None  # type: ignore[assignment]


def test_experts_whose_rows_depend_on_each_other_are_told() -> None:
    assert not why_not_dispatched(Small(mixes=False), length=16)
    assert why_not_dispatched(Small(mixes=True), length=16).startswith(
        "what experts computes for tokens is not the sum"
    )


QUICK = [("gpt_oss", f"{EP} recompute.policy=selective")]
SIX = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "olmoe")
LAYOUTS = [f"{EP} mesh.pp=2 recompute.policy=full", f"{EP} mesh.tp=2", f"{EP} mesh.cp=2"]
SLOW = [
    *zip(SIX, LAYOUTS * 2, strict=True),
    ("nemotron_h", EP), ("mixtral", "mesh.dp_replicate=2 mesh.dp_shard=2 mesh.ep=2 lora.rank=4"),
    ("gpt_oss", f"{EP} train.optimizer=muon"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)])
def test_layouts_are_proved(gang: GangPool, model: str, layout: str) -> None:
    assert_proved(gang, as_proof(hf_config(model, *layout.split())))


def counts(rank: int, world_size: int, words: list[str]) -> list[Any]:
    """Gang body: tokens of each layer's experts in two steps."""
    _, step = job_of(hf_config(*words, "train.precision=float64"), rank, world_size)
    found = []
    for number in (1, 2):
        step(number)
        found.append(step.load_counts())
    return found


@pytest.mark.parametrize(
    "layout", [f"{EP} recompute.policy=full", pytest.param("mesh.tp=2 recompute.policy=full", marks=pytest.mark.slow)]
)
def test_tokens_are_counted_once_on_any_layout(gang: GangPool, layout: str) -> None:
    (alone,) = gang(1).run(counts, ["deepseek_v3"])
    assert [[sum(layer) for layer in step] for step in alone] == [[8 * 32 * 2] * 3] * 2
    assert gang(2).run(counts, ["deepseek_v3", *layout.split()]) == [alone] * 2


def sent_in_steps(rank: int, world_size: int, words: list[str]) -> tuple[int, int]:
    """Gang body: bytes that a rank sends between experts in two steps, and the plan's."""
    job, step = job_of(hf_config(*words), rank, world_size)
    traffic = job.features["all_to_alls"]
    for number in (1, 2):
        with traffic.counting():
            step(number)
    (found,) = traffic.all_to_alls()
    return found.sent, found.predicted


@pytest.mark.slow
def test_ranks_send_what_the_plan_says(gang: GangPool, tmp_path: Path) -> None:
    """Each token has all experts, so that the plan knows whom it goes to."""
    fields = {"model_type": "mixtral", "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2,
              "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 256, "num_local_experts": 4,
              "num_experts_per_tok": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields), "utf-8")
    for found, predicted in gang(2).run(sent_in_steps, [str(tmp_path), *EP.split(), "train.precision=bfloat16"]):
        assert found == predicted > 0
