"""Head and loss by chunks in whole models: proved on layouts, with the losses of all logits, without a tensor of tokens
× vocabulary, and with the memory and the collectives that plans say."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.config.schema import RunConfig
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import stage_costs
from meshwright.plan.rules import load
from meshwright.prove.record.evidence import RankRecord
from meshwright.prove.spec import as_proof
from meshwright.train.forward_only import PipelineForward, validate
from meshwright_bench.private import LiveBytes
from tests.gangs.gang import GangPool
from tests.helpers import covering_pairs, quick_and_slow
from tests.models.hf.folders import write_model
from tests.prove import proofs
from tests.prove.proofs import record_on_rank
from tests.train.jobs import job_of, make_task, run_on

EXAMPLE = Path(__file__).parents[3] / "docs/examples/own_model"
HF = ("hf-tiny", "train.seq_len=16", "train.global_batch=8")
OWN = (str(EXAMPLE / "gpt.toml"), "model.num_layers=2", "model.dim=32", "model.ffn_dim=48", *proofs.STEP)
MODELS: dict[str, tuple[str, ...]] = {
    "llama": ("llama-tiny", *proofs.SMALL),
    "moe": ("moe-tiny", *proofs.SMALL_EXPERTS, "model.z_loss=0.01"),
    **{f"hf {name}": (*HF, f"model.config={name}") for name in ("qwen3", "gemma2", "cohere")},
    "module": ("module-tiny", "model.builder=tests.features.head_loss.models:Capped", *proofs.STEP),
    "own family": OWN,
}
"""A soft cap, in gemma2 and the module; a scale, in cohere."""


@contextmanager
def importable() -> Iterator[None]:
    """The example can be imported: a rank that lives on doesn't know it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))


def config_of(model: str, *words: str) -> RunConfig:
    """A small run in float64."""
    preset, *sizes = MODELS[model]
    with importable():
        return as_proof(load(preset, [*sizes, f"data.source={proofs.SOURCE}", *words]))


# ---- proofs

AXES = {
    "dp_shard": "mesh.dp_shard=2",
    "tp": "mesh.tp=2",
    "tp, whole sequences": "mesh.tp=2 mesh.sequence_parallel=false mesh.dp_replicate=2",
    "zb-v": "mesh.pp=2 pipeline.schedule=zb-v train.num_microbatches=4",
    "tp, zb-h1": "mesh.pp=2 mesh.tp=2 mesh.sequence_parallel=false pipeline.schedule=zb-h1 train.num_microbatches=4",
    "cp": "mesh.cp=2",
}
MORE = {
    "": "",
    "two micro-batches": "train.num_microbatches=2",
    "documents": "data.packing=documents",
    "tied": "model.tie_embeddings=true",
    "frozen": "train.freeze=['*head*']",
    "lora": "lora.rank=2",
}
DESCRIBED = ("llama", "moe", "own family")


def is_possible(model: str, axes: str, more: str) -> bool:
    return {
        "tied": model in ("llama", "moe"),
        "frozen": model not in ("hf gemma2", "hf cohere", "own family"),  # whose head is the embedding
        "documents": model != "module",
        "lora": model.startswith("hf"),
        "two micro-batches": "pp" not in AXES[axes],
        "": True,
    }[more] and {"tp": model in ("llama", "moe"), "cp": model in DESCRIBED}.get(axes, True)


QUICK = [("llama", "tp", "two micro-batches")]
LAYOUTS = covering_pairs([case for case in product(MODELS, AXES, MORE) if is_possible(*case)], first=QUICK)


def record(rank: int, world_size: int, model: str, words: list[str]) -> RankRecord:
    with importable():
        return record_on_rank(rank, world_size, config_of(model, *words), steps=proofs.FEW_STEPS)


@pytest.mark.parametrize(("model", "axes", "more"), quick_and_slow(LAYOUTS, quick=QUICK))
def test_a_layout_is_proved(gang: GangPool, documents: str, model: str, axes: str, more: str) -> None:
    words = ["train.loss_chunk=7", *AXES[axes].split(), *MORE[more].split()]
    words += [documents] if more == "documents" else []
    words += ["model.num_layers=4"] if model in DESCRIBED and "zb-v" in axes else []
    config = config_of(model, *words)
    records = gang(config.mesh.axes().num_ranks()).run(record, model, words, timeout_s=300)
    with importable():
        proofs.assert_proved(gang, config, records)


@pytest.mark.parametrize("axes", ["dp_shard", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_a_head_that_computes_a_loss_of_its_own_is_proved(gang: GangPool, axes: str) -> None:
    words = ["model.kind=tests.features.head_loss.own_head:Own", *AXES[axes].split(), "model.num_layers=4"]
    config = config_of("own family", *words)
    records = gang(2).run(record, "own family", words, timeout_s=300)
    with importable():
        proofs.assert_proved(gang, config, records)


# ---- what is allocated


class Largest(LiveBytes):
    """Records what operators allocate, of local tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # until it has become what is really computed
        return super().__torch_dispatch__(func, types, args, kwargs)


def elements(rank: int, world_size: int, model: str, words: list[str]) -> tuple[int, int, int]:
    """Elements of the largest tensors of a training step and of a validation, and of a micro-batch's logits."""
    with importable():
        job, step = job_of(config_of(model, *words), rank, world_size)
        step(1)
        with Largest() as training:
            step(2)
        with Largest() as validation:
            validate(step.pipeline, make_task(job.config))
    output = next(kind.output_elements for kind in job.plan.kinds if kind.output_elements)
    return training.largest // 8, validation.largest // 8, job.plan.batch.samples * output


SIZES = ("train.seq_len=32", "train.validation_samples=8")


@pytest.mark.parametrize(
    ("model", "world_size"),
    quick_and_slow(product(MODELS, (1, 2)), quick=[("llama", 1), ("llama", 2)]),
)
def test_no_tensor_holds_all_logits(gang: GangPool, model: str, world_size: int) -> None:
    is_described = model in ("llama", "moe")
    words = [*SIZES, *(["mesh.tp=2", f"mesh.sequence_parallel={is_described}".lower()] if world_size > 1 else [])]
    for *largest, logits in run_on(gang, world_size, elements, model, [*words, "train.loss_chunk=16"]):
        assert max(largest) < logits, "of tokens × vocabulary"
    for *largest, logits in run_on(gang, world_size, elements, model, [*words, "train.loss_chunk=0"]):
        assert min(largest) >= logits, "as plain logits are"


def losses(model: str, chunk: int, *, steps: int) -> list[float]:
    with importable():
        step = job_of(config_of(model, f"train.loss_chunk={chunk}"), 0, 1)[1]
        return [step(number).loss for number in range(1, 1 + steps)]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_losses_of_twenty_steps_are_those_of_all_logits(model: str) -> None:
    plain, chunked = (losses(model, chunk, steps=20) for chunk in (0, 5))
    assert chunked == pytest.approx(plain, rel=1e-10) and chunked != plain


@pytest.mark.parametrize("model", ["llama", pytest.param("hf gemma2", marks=pytest.mark.slow)])
def test_validation_computes_losses_and_sampling_logits(model: str) -> None:
    found, outputs = [], []
    for chunk in (0, 5):
        job, step = job_of(config_of(model, *SIZES, f"train.loss_chunk={chunk}"), 0, 1)
        task, pipeline = make_task(job.config), step.pipeline
        found.append(validate(pipeline, task))
        with PipelineForward(pipeline).evaluating(1, 2) as forward:
            outputs += forward(task.validation(batch_size=2, data_parallel=1, data_index=0)[:1])
        assert validate(pipeline, task) == found[-1], "after sampling, too"
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.0, atol=0.0)


def peak_bytes(rank: int, world_size: int, words: list[str]) -> tuple[int, int]:
    """The most bytes that the tensors of a step's micro-batches take, and the plan's activations and output."""
    job, step = job_of(load(words[0], words[1:]), rank, world_size)
    step(1)
    with Largest() as live:
        step.accumulate(2)
    return live.peak, stage_costs(job.plan, job.plan.stages[0]).activation_bytes


TP = "mesh.tp=2 mesh.sequence_parallel=false"
SAVINGS = [
    *[(model, "") for model in ("llama", "qwen3", "gemma2", "cohere", "beam")],
    *[(model, more) for model in ("llama", "gemma2") for more in (TP, "mesh.dp_shard=2 train.precision=bfloat16")],
]


@pytest.mark.parametrize(("model", "more"), quick_and_slow(SAVINGS, quick=[("llama", ""), ("qwen3", "")]))
def test_the_plan_saves_what_a_step_saves(gang: GangPool, tmp_path: Path, model: str, more: str) -> None:
    words = [f"data.source={proofs.SOURCE}", "train.seq_len=256", "train.global_batch=4", *more.split()]
    if model == "llama":
        words = ["llama-tiny", *proofs.SMALL, *words, "model.vocab_size=8192"]
    else:
        folder = write_model(tmp_path, model, weights=False, tokenizer=False, vocab_size=8192)
        words = ["hf-tiny", *words, f"model.config={folder}"]
    sides = (run_on(gang, 2 if more else 1, peak_bytes, [*words, f"train.loss_chunk={chunk}"])[0] for chunk in (0, 64))
    (plain, due_plain), (chunked, due_chunked) = sides
    assert plain - chunked == pytest.approx(due_plain - due_chunked, rel=0.1)


# ---- what is sent


class Calls(TorchDispatchMode):
    """Calls of collectives, and the elements that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # until it has become what is really sent
        op = OPS.get(func.overloadpacket.__name__)
        if op is not None:
            *_, x = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.found[op, x.numel()] += 1
        return func(*args, **(kwargs or {}))


OPS = {"allreduce_": "all_reduce", "all_reduce": "all_reduce"}


def calls(rank: int, world_size: int, words: list[str]) -> Counter[tuple[str, int]]:
    """All-reduces of the micro-batches of a step, by their elements."""
    step = job_of(config_of("llama", *words), rank, world_size)[1]
    step(1)
    with Calls() as mode:
        step.accumulate(2)
    return mode.found


@pytest.mark.parametrize("chunk", [0, 20])
def test_a_plan_has_the_calls_of_a_step(gang: GangPool, chunk: int) -> None:
    """Where tp ranks have whole sequences, no gradient is summed over tp."""
    words = ["mesh.tp=2", "mesh.sequence_parallel=false", f"train.loss_chunk={chunk}", "train.num_microbatches=2"]
    plan = make_plan(config_of("llama", *words))
    tokens, due = plan.batch.samples * plan.rank_tokens, Counter[tuple[str, int]]()
    assert tokens % 20, "so that the last chunk is smaller"
    for kind, _ in plan.held(plan.stages[0]):
        for one in kind.collectives:
            sizes = [min(one.tokens or tokens, tokens - start) for start in range(0, tokens, one.tokens or tokens)]
            assert len(sizes) == one.num_calls(tokens)
            for size in sizes:
                due[one.op, size * one.elements // plan.rank_tokens] += 2 * (one.forward + one.backward)
    assert run_on(gang, 2, calls, words) == [due, due]
