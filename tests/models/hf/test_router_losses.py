"""The balance loss of routers of transformers' mixtures is transformers' own for each sample, with its gradients, on
every layout; other losses are refused.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Part
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.foreign import router_loss as router_loss_module
from meshwright.models.foreign.packing import Float64Mode
from meshwright.models.foreign.router_loss import _packed, _unpacked
from meshwright.models.hf import private
from meshwright.models.hf import router_loss as hf_router_loss
from meshwright.nn.step_handles import auxiliary_losses
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory
from meshwright.plan.traffic import predict_traffic
from meshwright.prove.record.reference_run import build_reference, fill_tensors
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from meshwright.train.build_job import Job
from meshwright.train.train_step import TrainStep
from tests.gangs.gang import GangPool
from tests.helpers import alternatives, quick_and_slow
from tests.models.hf.folders import write_model
from tests.models.hf.runs import hf_config, run
from tests.models.hf.test_faults import short_documents
from tests.models.hf.test_memory import live, traffic_words, words_of
from tests.models.hf.tiny_models import random_tokens
from tests.prove.proofs import Seed, assert_proved, proof
from tests.train.jobs import load_words, run_on
from tests.train.test_traffic import all_leaving

pytest.importorskip("transformers")

WEIGHT = 0.05
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routers")


def mixture(folder: Path, model_type: str, **fields: Any) -> str:
    """A folder of a mixture that adds the loss of its routers."""
    made = {"router_aux_loss_coef": WEIGHT, "output_router_logits": True, "vocab_size": 256} | fields
    return str(write_model(folder / model_type, model_type, weights=False, tokenizer=False, **made))


def added_by_transformers(model_folder: str, weights: dict[str, Tensor], tokens: Tensor) -> tuple[Tensor, Gradients]:
    """The mean over samples of what transformers' model adds to the loss of a sample alone, and its gradients."""
    plain = private.read_config(str(model_folder), aloud=False)
    model = private.causal_lm(plain, attention="auto", experts="eager").double().train()
    model.load_state_dict(weights)
    losses = []
    for sample in tokens:
        given = {"input_ids": sample[None], "labels": sample[None], "use_cache": False}
        with Float64Mode():  # they sum in float32 whatever the dtype
            without = model(output_router_logits=False, **given).loss
            losses.append(model(**given).loss - without)
    loss = torch.stack(losses).mean()
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(parameters, found, strict=True))


def added_by_stages(config: RunConfig, weights: dict[str, Tensor], tokens: Tensor, cuts: tuple[int, ...]) -> Any:
    """The same of stages one after the other."""
    f, family, values = run_facts(config), config.family, tokens
    parameters, losses = list[tuple[str, Tensor]](), []
    for number, (start, stop) in enumerate(pairwise(cuts)):
        part = Part(range(start, stop), number, len(cuts) - 1)
        module = build_part(family, f, dtype=torch.float64, part=part).to_empty(device="cpu").train()
        module.load_state_dict({name: weights[name] for name, _ in module.named_parameters()}, strict=False)
        fill_tensors(module.named_buffers(), family, f)
        if number:
            assert values.shape[1:] == torch.Size(model_facts(config).edge.sent)
        parameters += module.named_parameters()
        losses += [loss for _, loss in auxiliary_losses(module)]
        for one in losses:
            one.scale = 1 / len(tokens)
        values = family.run(module, values, SimpleBatch(tokens, ()))
    (values * 0).sum().backward()
    found = Gradients()
    for name, parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = found.get(name, torch.zeros_like(parameter)) + gradient
    (total,) = [one.take() for one in losses]
    return total, found


def test_a_loss_that_is_not_the_models_own_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A seeded fault: the loss that is tried is a little off."""
    right = hf_router_loss.loss_of
    monkeypatch.setattr(hf_router_loss, "loss_of", lambda *sums: right(*sums) * (1 + 1e-8))
    with pytest.raises(ConfigError, match="it is not their balance loss"):
        hf_config(mixture(tmp_path, "mixtral"), f"data.cache_dir={tmp_path}")


@pytest.mark.parametrize(
    ("model_type", "cuts"),
    quick_and_slow(
        [("mixtral", (0, 1, 3, 4)), ("qwen3_moe", (0, 2, 4)), ("olmoe", (0, 3, 4)), ("gpt_oss", (0, 4))],
        [("mixtral", (0, 1, 3, 4))],
    ),
    ids=str,
)
def test_the_loss_is_transformers_own_for_each_sample(folder: Path, model_type: str, cuts: tuple[int, ...]) -> None:
    words = ["mesh.pp=2"] if len(cuts) > 2 else []
    path, tokens = mixture(folder, model_type), random_tokens(3)
    config = as_proof(hf_config(path, *words))
    weights = {name: one.detach() for name, one in build_reference(config).named_parameters(remove_duplicate=False)}
    weights |= {name: one + 0.3 * torch.randn_like(one) for name, one in weights.items()}  # unbalanced
    due, gradients = added_by_transformers(path, weights, tokens)
    found, ours = added_by_stages(config, weights, tokens, cuts)
    torch.testing.assert_close(found, due, rtol=1e-10, atol=1e-12)
    assert set(ours) == set(gradients)
    assert max(float(one.abs().max()) for one in gradients.values()) > 1e-4
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


LAYOUTS = [
    ("mixtral", "mesh.pp=2 recompute.policy=full"),
    ("mixtral", "mesh.cp=2 recompute.policy=selective"),
    ("qwen3_moe", "mesh.tp=2 mesh.dp_shard=2 recompute.policy=full"),
    ("olmoe", "mesh.dp_shard=2 mesh.ep=2 recompute.policy=selective"),
    ("gpt_oss", "mesh.pp=2 mesh.cp=2 recompute.policy=selective"),
    ("gpt_oss", "mesh.tp=2 mesh.pp=2"),
    ("mixtral", "mesh.dp_shard=2 mesh.ep=2 mesh.pp=2 pipeline.schedule=interleaved recompute.policy=full"),
]


@pytest.mark.parametrize(("model_type", "layout"), quick_and_slow(LAYOUTS, LAYOUTS[:2]))
def test_layouts_are_proved(gang: GangPool, folder: Path, model_type: str, layout: str) -> None:
    assert_proved(gang, as_proof(hf_config(mixture(folder, model_type), *layout.split())))


def test_numbers_survive_the_edge_in_bfloat16_with_their_gradients() -> None:
    sums = torch.rand(3, 2, 8).requires_grad_()
    packed = _packed(sums, torch.zeros(3, 10, 16, dtype=torch.bfloat16), 4)
    assert packed.shape == (3, 10, 4) and packed.dtype == torch.bfloat16
    found = _unpacked(packed, 8)
    torch.testing.assert_close(found, sums, rtol=2**-15, atol=0)
    due = torch.linspace(-1, 1, 8).expand(3, 2, 8)
    (gradient,) = torch.autograd.grad(found, sums, due)
    torch.testing.assert_close(gradient, due, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("data.packing=documents data.text_field=text", "data.packing with a balance loss"),
        ("train.compile=true recompute.policy=full", "but MixtralDecoderLayer has balance"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_fix(folder: Path, words: str, says: str) -> None:
    settings = [mixture(folder, "mixtral"), *words.split()]
    settings += [f"data.source={short_documents(folder)}"] if "packing" in words else []
    with pytest.raises(ConfigError, match=says) as caught:
        hf_config(*settings)
    for fix in alternatives(caught.value.fix):
        if "config.json" not in " ".join(fix):
            hf_config(*settings, *fix)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mesh.pp=2 train.precision=bfloat16", "mesh.pp=2 mesh.cp=2"])
def test_ranks_send_what_the_plan_says(gang: GangPool, folder: Path, layout: str) -> None:
    words = traffic_words((mixture(folder, "mixtral"), *layout.split(), "train.num_microbatches=2"), folder)
    plan = make_plan(load_words(words))
    for rank, found in enumerate(gang(plan.mesh.num_ranks()).run(all_leaving, words)):
        assert predict_traffic(plan, rank=rank).sent().total() == found


@pytest.mark.slow
def test_memory_is_predicted_within_a_tenth(gang: GangPool, folder: Path) -> None:
    words = words_of((mixture(folder, "qwen3_moe", num_experts=32), "mesh.dp_shard=2"), str(folder))
    peak, stored = max(run_on(gang, 2, live, words))
    assert predict_memory(make_plan(load_words(words))).total() == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
def test_metrics_contain_it(gang: GangPool, folder: Path, tmp_path: Path) -> None:
    losses = []
    for name, weight in (("with", 0.5), ("without", 0.0)):
        config = hf_config(mixture(folder / name, "mixtral", router_aux_loss_coef=weight), "mesh.pp=2", "train.steps=1")
        losses.append(run(gang, config, tmp_path / name)[0]["loss_bits_per_byte"])
    added = (losses[0] - losses[1]) * math.log(2)
    assert added == pytest.approx(0.5 * 2, rel=0.1)  # the weight times two experts per token, nearly balanced


def counts_of_the_microbatch(job: Job, step: TrainStep) -> None:
    """Ranks take the mean counts of a micro-batch for each of its samples."""
    loss_of = router_loss_module.loss_of
    router_loss_module.loss_of = lambda sums, counts: loss_of(sums, counts.mean(0, keepdim=True))


def summed_over_tp(job: Job, step: TrainStep) -> None:
    """Each rank of tp adds the loss as if it were its part."""
    for _, loss in (one for part in job.parts().values() for one in auxiliary_losses(part.module)):
        loss.weight *= job.config.mesh.tp


def earlier_stages_without_gradient(job: Job, step: TrainStep) -> None:
    """What earlier stages add up to arrives without its gradient."""
    unpacked = router_loss_module._unpacked
    router_loss_module._unpacked = lambda packed, num_experts: unpacked(packed.detach(), num_experts)


FAULTS = {
    "counts of the micro-batch": counts_of_the_microbatch,
    "the loss is summed over tp": summed_over_tp,
    "earlier stages without gradient": earlier_stages_without_gradient,
}
REPLACED = (router_loss_module,)
SAYS = {
    "counts of the micro-batch": ("mesh.dp_shard=2", 3, "counts the load of each rank's micro-batch"),
    "the loss is summed over tp": ("mesh.tp=2", 3, "has 2.000 × its weight: summed over tp (2 ranks)"),
    "earlier stages without gradient": ("mesh.pp=2", 1, "is missing: it is not added, or doesn't come back"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(gang: GangPool, folder: Path, fault: str) -> None:
    layout, layer, says = SAYS[fault]
    config = as_proof(hf_config(mixture(folder, "mixtral"), layout))
    result = proof(gang, config, Seed(__name__, "FAULTS", fault))
    text = " ".join(" ".join(render(result)).split())
    assert not result.passed and says in text, text
    assert f"the gradient of the output of model.layers.{layer}.mlp.gate" in text
