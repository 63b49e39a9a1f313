"""Head and loss by chunks: the same loss and gradients as of all logits, in every dtype, without the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.config.facts_for_family import run_facts
from meshwright.config.schema import RunConfig
from meshwright.features.head_loss.apply import Columns, LossHead, cross_entropy_
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import stage_costs
from meshwright.plan.rules import load
from meshwright.prove.spec import as_proof
from meshwright.train.build_job import build_job
from meshwright.train.forward_only import PipelineForward, validate
from meshwright.train.pipeline_stages import Pipeline
from meshwright.train.train_step import TrainStep
from meshwright_bench.private import LiveBytes
from tests.gangs.gang import GangPool
from tests.helpers import open_data, rank_context
from tests.prove import proofs
from tests.prove.proofs import small_config, small_expert_config

IGNORED = -100


def made(dtype: torch.dtype, *, chunk: int = 7, tokens: int = 12) -> tuple[LossHead, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    head = LossHead(16, 50, bias=True, chunk=chunk).to(dtype)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw).to(dtype)
    x = torch.randn(2, tokens, 16, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(50, (2, tokens), generator=draw)
    targets[0, :3] = IGNORED
    return head, x, targets


def of_all_logits(head: LossHead, x: Tensor, targets: Tensor) -> Tensor:
    logits = head(x).flatten(0, 1)
    logits = logits.float() if logits.dtype is torch.bfloat16 else logits
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("chunk", "tokens"), [(7, 12), (5, 5), (64, 12), (1, 3)])
def test_loss_and_gradients_are_those_of_all_logits(dtype: torch.dtype, limit: float, chunk: int, tokens: int) -> None:
    head, x, targets = made(dtype, chunk=chunk, tokens=tokens)
    with head.computing_loss_of(targets):
        found = head(x)
    due = of_all_logits(head, x, targets)
    assert found.dim() == 0 and found.dtype == due.dtype
    torch.testing.assert_close(found, due, rtol=limit, atol=0.0)
    inputs = (x, *head.parameters())
    for one, right in zip(torch.autograd.grad(found / 7, inputs), torch.autograd.grad(due / 7, inputs), strict=True):
        assert float((one - right).norm() / right.norm()) <= limit and one.dtype == right.dtype


def test_gradients_of_chunks_are_summed_in_float32() -> None:
    """A sum of many rounded terms is as exact as one product."""
    head, x, targets = made(torch.bfloat16, chunk=1, tokens=200)
    wide = head.weight.detach().double().requires_grad_(), head.bias.detach().double().requires_grad_()
    exact = F.linear(x.detach().double(), *wide).flatten(0, 1)
    F.cross_entropy(exact, targets.flatten(), ignore_index=IGNORED, reduction="sum").backward()
    with head.computing_loss_of(targets):
        chunked = torch.autograd.grad(head(x), (head.weight, head.bias))
    at_once = torch.autograd.grad(of_all_logits(head, x, targets), (head.weight, head.bias))
    for found, plain, parameter in zip(chunked, at_once, wide, strict=True):
        errors = [float((one.double() - parameter.grad).norm()) for one in (found, plain)]
        assert errors[0] <= 1.1 * errors[1]


def test_one_chunk_lives_at_a_time() -> None:
    head = LossHead(1, 4096, chunk=8).to(torch.bfloat16)
    head.weight.requires_grad_(False)
    x, targets = torch.ones(1, 64, 1, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1, 64, dtype=torch.long)
    with head.computing_loss_of(targets), LiveBytes() as live:
        head(x)
    assert live.peak <= 1.1 * 8 * 4096 * (4 + 2), "logits in float32, and once more in bfloat16"


def test_what_needs_no_gradient_gets_none() -> None:
    head, x, targets = made(torch.float64)
    head.weight.requires_grad_(False)
    with head.computing_loss_of(targets):
        torch.autograd.backward(head(x))
        with torch.no_grad():
            validation = head(x)
    assert head.weight.grad is None and head.bias.grad is not None and x.grad is not None
    assert not validation.requires_grad and float(validation) == pytest.approx(of_all_logits(head, x, targets).item())


def columns_of_rank(rank: int, world_size: int) -> tuple[float, Tensor]:
    """One rank's columns of the loss and its gradient."""
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 5, 6, 11, IGNORED, 3, 7, 2, 8])
    own = logits.chunk(world_size, 1)[rank].clone()
    group = None if world_size == 1 else torch.distributed.group.WORLD
    return float(cross_entropy_(own, targets, Columns(rank * own.shape[1], group))), own


def test_columns_of_ranks_add_up(gang: GangPool) -> None:
    loss, gradient = columns_of_rank(0, 1)
    (first, a), (second, b) = gang(2).run(columns_of_rank)
    assert first == second == pytest.approx(loss, rel=1e-14)
    torch.testing.assert_close(torch.cat([a, b], 1), gradient, rtol=1e-13, atol=1e-15)


HF = ["train.seq_len=64", "train.global_batch=4", f"data.source={proofs.SOURCE}"]
LARGE = "train.loss_chunk=16"
MODELS: dict[str, tuple[str, list[str]]] = {
    "llama": ("llama-tiny", [*proofs.SMALL, f"data.source={proofs.SOURCE}", "train.seq_len=64"]),
    "moe": ("moe-tiny", [*proofs.SMALL_EXPERTS, f"data.source={proofs.SOURCE}", "train.seq_len=64"]),
    **{f"hf {name}": ("hf-tiny", [*HF, f"model.config={name}"]) for name in ("llama", "mistral", "qwen3")},
    "module": ("module-tiny", [*HF, "model.arguments.width=32"]),
}


def losses_and_largest(config: RunConfig, *, steps: int = 1) -> tuple[list[float], int, int]:
    """Losses of some steps in this process, elements of the largest tensor allocated, and of all logits."""
    plan, device = make_plan(config), torch.device("cpu")
    job = build_job(config, plan, rank_context(), device)
    step = TrainStep(job, config.family.task(run_facts(config), open_data(config), device), lambda: False)
    found = [step(1).loss]
    with LiveBytes() as live:
        found += [step(number).loss for number in range(2, 1 + steps)] if steps > 1 else [step(2).loss]
    output = next(kind.output_elements for kind in plan.kinds if kind.output_elements)
    return found, live.largest // 8, plan.batch.samples * output


@pytest.mark.parametrize(
    "name", [n if n in ("llama", "hf qwen3") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_no_tensor_holds_all_logits(name: str) -> None:
    preset, words = MODELS[name]
    _, largest, logits = losses_and_largest(as_proof(load(preset, [*words, LARGE])))
    assert largest < logits, "of tokens × vocabulary"
    _, largest, logits = losses_and_largest(as_proof(load(preset, [*words, "train.loss_chunk=0"])))
    assert largest >= logits, "as plain logits are"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "moe", "hf mistral"])
def test_losses_of_twenty_steps_are_those_of_all_logits(name: str) -> None:
    preset, words = MODELS[name]
    plain, chunked = (
        losses_and_largest(as_proof(load(preset, [*words, f"train.loss_chunk={chunk}"])), steps=20)[0]
        for chunk in (0, 5)
    )
    assert chunked == pytest.approx(plain, rel=1e-10) and chunked != plain


LAYOUTS = (
    "mesh.dp_shard=2 train.num_microbatches=2",
    "mesh.tp=2",
    "mesh.tp=2 mesh.sequence_parallel=false mesh.dp_replicate=2",
    "mesh.pp=2 pipeline.schedule=zb-v model.num_layers=4 train.num_microbatches=4",
    "mesh.pp=2 mesh.tp=2 pipeline.schedule=zb-h1 train.num_microbatches=4",
    "mesh.cp=2",
    "mesh.pp=2 model.tie_embeddings=true",
    "mesh.dp_shard=2 model.tie_embeddings=true",
    "mesh.dp_shard=2 train.freeze=['head*']",
    "mesh.dp_shard=2 data.packing=documents",
)


@pytest.mark.parametrize(
    "layout", [LAYOUTS[1], *(pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS if one != LAYOUTS[1])]
)
def test_a_layout_is_proved(gang: GangPool, documents: str, layout: str) -> None:
    words = layout.split() + ([documents] if "packing" in layout else [])
    proofs.assert_proved(gang, small_config("train.loss_chunk=7", *words))


@pytest.mark.slow
def test_experts_are_proved_beside_it(gang: GangPool) -> None:
    proofs.assert_proved(gang, small_expert_config("train.loss_chunk=7", "mesh.dp_shard=2", "mesh.ep=2"))


def test_validation_computes_losses_and_sampling_logits() -> None:
    preset, words = MODELS["llama"]
    losses, outputs = [], []
    for chunk in (0, 5):
        config, device = as_proof(load(preset, [*words, f"train.loss_chunk={chunk}"])), torch.device("cpu")
        data, job = open_data(config), build_job(config, make_plan(config), rank_context(), device)
        task, pipeline = config.family.task(run_facts(config), data, device), Pipeline(job)
        batches = task.validation(batch_size=2, data_parallel=1, data_index=0)[:1]
        losses.append(validate(pipeline, task))
        with PipelineForward(pipeline).evaluating(1, 2) as forward:
            outputs += forward(batches)
        assert validate(pipeline, task) == losses[-1], "after sampling, too"
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.0, atol=0.0)


def peak_bytes(config: RunConfig) -> tuple[int, int]:
    """The most bytes that a step's tensors take in this process, and the plan's activations and output."""
    plan, device = make_plan(config), torch.device("cpu")
    job = build_job(config, plan, rank_context(), device)
    step = TrainStep(job, config.family.task(run_facts(config), open_data(config), device), lambda: False)
    step(1)
    with LiveBytes() as live:
        step.accumulate(2)
    return live.peak, stage_costs(plan, plan.stages[0]).activation_bytes


def test_the_plan_saves_what_a_step_saves() -> None:
    words = [*proofs.SMALL, f"data.source={proofs.SOURCE}", "train.seq_len=256", "model.vocab_size=8192"]
    (plain, due_plain), (chunked, due_chunked) = (
        peak_bytes(load("llama-tiny", [*words, f"train.loss_chunk={chunk}"])) for chunk in (0, 64)
    )
    assert plain - chunked == pytest.approx(due_plain - due_chunked, rel=0.1)
