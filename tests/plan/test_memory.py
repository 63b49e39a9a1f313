"""Predicted memory, compared with the actual memory of a job."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from meshwright.mesh.local_shards import to_local
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.parallel.private import unsharded_parameters
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import (
    COMPILER,
    HOLES,
    LIBRARIES,
    TRACER,
    by_pipeline_rank,
    library_bytes,
    predict_memory,
    predict_process_memory,
)
from meshwright.plan.rules import load
from meshwright.plan.run_plan import RunPlan
from meshwright.train.record.record_files import read_events
from tests.helpers import meshwright, small_corpus
from tests.train.jobs import load_words, make_job, run_on

DIT = ["dit-digits", "data.source=digits"]
UNEVEN = ["model.ffn_dim=50", "model.vocab_size=262"]
LAYOUTS = [
    (1, ["model.tie_embeddings=true"]),
    pytest.param(1, ["train.precision=float64"], marks=pytest.mark.slow),
    pytest.param(2, ["mesh.dp_replicate=2"], marks=pytest.mark.slow),
    pytest.param(2, ["mesh.tp=2"], marks=pytest.mark.slow),
    pytest.param(2, ["mesh.dp_shard=2", "train.precision=bfloat16"], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.dp_replicate=2", "mesh.dp_shard=2", "model.tie_embeddings=true"], marks=pytest.mark.slow),
    (2, ["mesh.dp_shard=2", *UNEVEN]),
    pytest.param(1, DIT, marks=pytest.mark.slow),
    pytest.param(4, [*DIT, "mesh.tp=2", "mesh.dp_shard=2", "model.num_classes=12"], marks=pytest.mark.slow),
    (2, ["moe-tiny", "mesh.dp_shard=2", "mesh.ep=2", "model.balance_bias=true"]),
    pytest.param(4, ["moe-tiny", "mesh.dp_shard=2", "mesh.ep=2", "mesh.tp=2"], marks=pytest.mark.slow),
    (2, [*DIT, "mesh.dp_shard=2", "train.freeze=['label_embed*','*.wq.*']"]),
    # Frozen by its name in the whole model, which its copy on the last stage does not have.
    (2, ["mesh.pp=2", "train.num_microbatches=2", "model.num_layers=4", "pipeline.layers_per_stage=[1,3]",
         "model.tie_embeddings=true", "train.freeze=embed.*"]),
]  # fmt: skip


def planned(name, words=()):
    return make_plan(load(name, words))


def planned_words(words):
    return make_plan(load_words(words))


def num_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in map(to_local, tensors))


def held(rank, world_size, words):
    """Bytes of parameters and buffers, gradients, and optimizer state after a step's backward."""
    job, step = make_job(rank, world_size, ["model.num_layers=1", *words])
    step.accumulate(1)
    parameters = list(job.model.parameters())
    moments = [one for state in job.optimizer.state.values() for one in state.values() if one.dim()]
    stored = [*parameters, *(buffer for _, buffer in job.model.named_buffers())]
    return num_bytes(stored), num_bytes(p.grad for p in parameters if p.grad is not None), num_bytes(moments)


@pytest.mark.parametrize(("world_size", "words"), LAYOUTS)
def test_what_is_stored_between_steps_is_exact(gang, corpus, world_size, words):
    """Compare the rank with the highest total, if ranks differ."""
    predicted = predict_memory(planned_words(["model.num_layers=1", *words]))
    most = tuple(map(max, zip(*run_on(gang, world_size, held, [*corpus, *words]), strict=True)))
    assert most == (predicted.parameters, predicted.gradients, predicted.optimizer)


def kept_errors(rank, world_size, words):
    """Return the bytes of a rank's error feedback, and of the copies made during a step."""
    job, step = make_job(rank, world_size, words)
    step(1)
    states = [part.state_dict() for part in job.features["compression"]._parts.values()]
    return 2 * sum(num_bytes([x]) for state in states for key, x in state.items() if key.endswith("error"))


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (2, ["mesh.dp_shard=2"]),
        pytest.param(4, ["mesh.dp_shard=4", "comm.ranks_per_node=2"], marks=pytest.mark.slow),
        pytest.param(4, ["mesh.dp_shard=2", "mesh.dp_replicate=2"], marks=pytest.mark.slow),
        pytest.param(4, ["mesh.pp=2", "mesh.dp_shard=2", "train.num_microbatches=2"], marks=pytest.mark.slow),
    ],
)
def test_error_feedback_is_exact(gang, corpus, world_size, words):
    words = ["comm.gradients=loco4", *words]
    assert predict_memory(planned_words(words)).errors in run_on(gang, world_size, kept_errors, [*corpus, *words])
    assert predict_memory(planned_words([*words, "comm.gradients=int4"])).errors == 0


def saved_for_backward(rank, world_size, words):
    """Return the bytes that autograd saves in a forward, without parameters, and the tensors of the output's size that
    live at once in the loss's backward: three, or four of sharded logits (`tests/features/head_loss/test_layouts.py`
    measures it)."""
    job, step = make_job(rank, world_size, words)
    parameters = {to_local(p).untyped_storage().data_ptr() for p in job.model.parameters()}
    kept = {}

    def pack(tensor):
        local = to_local(tensor)
        storage = getattr(local, "elem", local).untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = step.pipeline.tokens.localize(step._task.batch(step.samples(1)[0]))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = job.parts()[0].module(batch.inputs, *batch.conditions)
    live, out = 3 + isinstance(out, DTensor), to_local(out)
    for module in fsdp_modules(job.model):  # gathered weights are not activations
        for _, gathered in unsharded_parameters(module):
            kept.pop(to_local(gathered).untyped_storage().data_ptr(), None)
    return sum(kept.values()) + live * out.numel() * max(4, out.element_size())


@pytest.mark.parametrize(
    ("world_size", "words"),
    [
        (1, ["train.precision=float64", "model.num_layers=6", "train.seq_len=128", "train.num_microbatches=4"]),
        (2, ["mesh.tp=2"]),
        (2, ["mesh.tp=2", "mesh.sequence_parallel=false"]),
        (1, DIT),
        pytest.param(2, [*DIT, "mesh.tp=2"], marks=pytest.mark.slow),
        (1, ["moe-tiny", "model.drop=over-capacity", "model.capacity_factor=2.0"]),
        pytest.param(1, ["moe-tiny", "model.num_shared_experts=1"], marks=pytest.mark.slow),
        pytest.param(2, ["moe-tiny", "mesh.tp=2"], marks=pytest.mark.slow),
    ],
)
def test_activations_of_a_stage_are_right_within_a_twentieth(gang, corpus, world_size, words):
    predicted = predict_memory(planned_words(words)).activations
    for found in run_on(gang, world_size, saved_for_backward, [*corpus, *words]):
        assert predicted == pytest.approx(found, rel=0.05)


KEPT = ["train.seq_len=128", "mesh.reshard_after_forward=false"]
RING, HEADS = "mesh.cp_method=ring", "mesh.cp_method=heads"


def activations(gang, corpus, words):
    """Measured bytes on the rank with the most, and predicted ones."""
    predicted = predict_memory(planned_words(words))
    ranks = planned_words(words).mesh.num_ranks()
    return max(run_on(gang, ranks, saved_for_backward, [*corpus, *words])), predicted.activations


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        (["mesh.cp=2", RING], "float32"),
        (["mesh.cp=2", HEADS], "bfloat16"),
        pytest.param(["mesh.cp=4", RING], "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_what_context_parallelism_keeps(gang, corpus, words, precision):
    """What a rank keeps besides its share of the activations, as data-parallel ranks have it too; and all of it."""
    kept, ranks = [*KEPT, f"train.precision={precision}"], planned_words(words).mesh.num_ranks()
    share, predicted_share = activations(gang, corpus, [*kept, f"mesh.dp_shard={ranks}"])
    found, predicted = activations(gang, corpus, [*kept, *words])
    assert predicted - predicted_share == pytest.approx(found - share, rel=0.05)
    if precision == "float32":
        assert predicted == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "llama3-405b"])
def test_presets_fit_the_devices_they_are_for(name):
    """Published recipes train these sizes on 80 GB devices."""
    predicted = predict_memory(planned(name))
    assert all(value >= 0 for value in vars(predicted).values())
    assert predicted.parameters + predicted.gradients + predicted.optimizer < 80e9


def test_weights_that_neighbours_keep_take_their_part():
    """Blocks that are neither in use nor freed keep secondary shards."""
    words = ["mesh.dp_shard=8", "model.num_layers=6", "train.global_batch=8"]
    freed, whole, halves, quarters = (
        predict_memory(planned(None, [*words, *more])).gathered
        for more in ([], ["mesh.reshard_after_forward=false"], ["comm.secondary_shards=2"], ["comm.secondary_shards=4"])
    )
    assert whole - freed == 2 * (halves - freed) == 4 * (quarters - freed) > 0


def test_larger_runs_take_more():
    base = predict_memory(planned(None, ["mesh.dp_shard=2"]))
    for word in ("train.global_batch=64", "train.seq_len=1024", "model.num_layers=16", "train.precision=float64",
                 "mesh.reshard_after_forward=false"):  # fmt: skip
        assert predict_memory(planned(None, ["mesh.dp_shard=2", word])).total() > base.total(), word


def test_predicting_needs_no_torch_and_no_time():
    code = (
        "import sys; from meshwright.plan.rules import load; from meshwright.plan.make_plan import make_plan; "
        "from meshwright.plan.memory import predict_memory; "
        "predict_memory(make_plan(load('llama3-405b'))); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("words", "is_held"), [
    (["mesh.dp_shard=2"], True), (["mesh.dp_shard=2", "mesh.pp=2"], True), (["mesh.tp=2"], False), ([], False),
    (["mesh.dp_replicate=2"], False), (["mesh.dp_replicate=2", "mesh.dp_shard=2"], True),
])  # fmt: skip
def test_unsharded_gradients_of_all_blocks_are_held_between_micro_batches(words, is_held):
    """FSDP2 reduces gradients with the last micro-batch, so that those of all blocks are unsharded until then; replicas
    have no others, which `gradients` counts."""
    one, four = (planned(None, [*words, "model.num_layers=8", f"train.num_microbatches={number}"]) for number in (1, 4))
    [block] = [kind for kind in four.kinds if kind.is_block]
    others = 8 // four.mesh.size("pp") - 2
    found = predict_memory(four).gathered - predict_memory(one).gathered
    assert found == others * block.num_elements * 4 * is_held


def test_a_process_on_a_cpu_holds_more_than_tensors():
    one, two = planned(None, []), planned(None, ["mesh.dp_shard=2"])
    assert predict_process_memory(one) == LIBRARIES + predict_memory(one).total()
    memory = predict_memory(two)
    holes = memory.gathered + int(HOLES * (memory.gradients + memory.activations))
    assert memory.gathered and predict_process_memory(two) == LIBRARIES + TRACER + memory.total() + holes


@pytest.mark.parametrize(("words", "more"), [
    ([], 0), (["mesh.pp=2"], 0), (["mesh.tp=2"], TRACER), (["mesh.dp_replicate=2", "mesh.pp=2"], TRACER),
    (["recompute.policy=selective"], TRACER), (["train.compile=true"], TRACER + COMPILER),
])  # fmt: skip
def test_layouts_import_what_they_use(words, more):
    assert library_bytes(planned(None, words)) == LIBRARIES + more


@pytest.mark.parametrize("words", [[], ["mesh.tp=2"]])
def test_libraries_of_a_family_are_counted_and_bring_the_tracer(monkeypatch, words):
    config = load("llama-tiny", [*words, "train.seed=47"])  # plans of equal configurations are made once
    monkeypatch.setattr(type(config.family), "library_bytes", TRACER + 1)
    assert library_bytes(make_plan(config)) == LIBRARIES + TRACER + 1


LARGER = ["model.dim=512", "model.num_heads=8", "model.ffn_dim=1536", "model.num_layers=8", "train.global_batch=8"]


@pytest.mark.slow
def test_a_process_holds_what_was_predicted(tmp_path):
    """Peak resident memory, of the rank with the most; docs/planning.md has more layouts. Ranks that do the same differ
    by up to 7 %."""
    words = [*LARGER, "mesh.dp_shard=2", *small_corpus(tmp_path), "train.device=cpu", "train.steps=2"]
    words += ["train.validation_samples=0", "train.sample_tokens=0"]
    done = meshwright("run", "llama-tiny", *words, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    [measured] = [event for event in read_events(tmp_path / "run") if event["event"] == "measured"]
    peak = max(rank["peak"] for rank in measured["memory"])
    assert predict_process_memory(planned("llama-tiny", words)) == pytest.approx(peak, rel=0.17)


@pytest.mark.parametrize(("ep", "of_experts"), [(2, True), (4, False)])
def test_gradients_of_experts_that_only_this_rank_has_are_not_gathered_too(ep: int, of_experts: bool) -> None:
    """With several micro-batches, what is reduced at the end is unsharded until then, in all blocks but two."""
    words = ["mesh.dp_shard=4", f"mesh.ep={ep}"]
    plans = [make_plan(load("moe-tiny", [*words, f"train.num_microbatches={number}"])) for number in (1, 2)]
    one, two = (predict_memory(plan).gathered for plan in plans)
    kind = plans[0].kind("moe_block")
    experts = sum(math.prod(p.shape) for p in kind.parameters if p.name.startswith("moe.experts."))
    unsharded = kind.num_elements - experts + (experts // ep if of_experts else 0)
    assert two - one == 2 * unsharded * 4


def stored(plan):
    """Bytes of the parameters on all places of the pipeline."""
    return sum(one.parameters for one in by_pipeline_rank(plan))


def test_all_stages_are_in_the_memory_of_their_ranks(monkeypatch):
    """Also where a rank has several; that of a missing one is found."""
    whole = stored(planned("llama-tiny", ["model.num_layers=8"]))
    words = ["model.num_layers=8", "mesh.pp=4", "pipeline.schedule=interleaved", "pipeline.chunks=2"]
    plan = planned("llama-tiny", [*words, "train.num_microbatches=8"])
    assert stored(plan) == whole
    right = RunPlan.stages_of
    monkeypatch.setattr(RunPlan, "stages_of", lambda plan, rank: right(plan, rank)[1:])
    assert stored(plan) < 0.6 * whole
