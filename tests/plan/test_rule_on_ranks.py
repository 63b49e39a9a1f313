"""The rule of partial gradients against reality: each row of its table, on real ranks, before anybody reduces anything.

Along an axis a gradient that the plan calls sharded is a shard of the whole batch's, one that it calls partial is a
part of a sum, and one that it calls equal is the whole batch's on every rank.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from unittest import mock

import pytest

from meshwright.mesh.local_shards import local_box, to_local
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.plan.run_plan import GradientPlacement
from tests.helpers import quick_and_slow
from tests.train.jobs import job_of

EXAMPLE = Path(__file__).parents[2] / "docs/examples/own_model"
ROWS = str(Path(__file__).with_name("rows.toml"))
RUN = ("train.precision=float64", "train.threads=1", "train.num_microbatches=1", "train.global_batch=8",
       "train.validation_samples=0")  # fmt: skip
SMALL = (*RUN, "model.num_layers=2", "model.dim=16", "model.num_heads=4", "model.ffn_dim=24")  # fmt: skip
TEXT = ("train.seq_len=16", "train.sample_tokens=0")
MODELS = {
    "llama": ("llama-tiny", (*SMALL, *TEXT, "mesh.sequence_parallel=true")),
    "llama, whole stream": ("llama-tiny", (*SMALL, *TEXT, "mesh.sequence_parallel=false")),
    "llama, tied": ("llama-tiny", (*SMALL, *TEXT, "model.tie_embeddings=true", "train.freeze=['*.wq.*','norm.*']")),
    "dit": ("dit-digits", (*SMALL, "model.zero_init=false")),
    "own": (str(EXAMPLE / "gpt.toml"), (*SMALL, *TEXT)),
    "biases": (ROWS, (*RUN, *TEXT)),
    "biases, whole stream": (ROWS, (*RUN, *TEXT, "mesh.sequence_parallel=false")),
}
QUICK = ("llama, whole stream",)
AXES = ("tp", "dp_shard", "dp_replicate")


@pytest.fixture(scope="module", autouse=True)
def importable():
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


def gradients(rank, world_size, source, words, reduced=False):
    """A rank's gradients as its backward leaves them, with the place of what it holds of each parameter.

    No FSDP2 here: the axes of data parallel only divide the samples, so nothing is reduced but by what is patched out.
    """
    with mock.patch("meshwright.train.pipeline_stages.sync_partial_gradients"), on_path():
        job, step = job_of(load(source, words), rank, world_size)
        step.accumulate(1)
        parameters = dict(job.model.named_parameters())
    return {
        name: (local_box(p).slices(), to_local(p.grad).clone()) for name, p in parameters.items() if p.grad is not None
    }


def on_path():
    return mock.patch.object(sys, "path", [str(EXAMPLE), *sys.path])


def of_samples(rank, world_size, source, words, axis):
    """Return gradients as `gradients` does for a data-parallel axis: each rank trains alone on its share of the
    samples."""
    with on_path():
        job, step = job_of(load(source, words), 0, 1)
        with mock.patch.object(step, "samples", lambda number: [range(rank * 4, rank * 4 + 4)]):
            step.accumulate(1)
    trained = ((name, p) for name, p in job.model.named_parameters() if p.grad is not None)
    return {name: (local_box(p).slices(), p.grad.clone()) for name, p in trained}


def words_of(model, corpus, *more):
    source, words = MODELS[model]
    return source, [*words, *(corpus if source != "dit-digits" else ()), *more]


@pytest.mark.parametrize(
    ("model", "axis"),
    quick_and_slow(product(MODELS, AXES), [*((model, "tp") for model in QUICK), ("own", "dp_shard")]),
)
def test_every_gradient_is_what_the_plan_calls_it(gang, corpus, model, axis):
    source, words = words_of(model, corpus)
    whole = gradients(0, 1, source, words)
    plan = make_plan(load(source, [*words, f"mesh.{axis}=2"]))
    if axis == "tp":
        found = gang(2).run(gradients, source, [*words, "mesh.tp=2"])
    else:
        found = [of_samples(rank, 2, source, words, axis) for rank in range(2)]
    seen = {}
    (stage,) = plan.stages
    for kind, layer, parameter in plan.parameters(stage):
        name = kind.key(parameter, layer)
        assert (name in whole) is parameter.trained is all(name in one for one in found), name
        if not parameter.trained:
            continue
        called = parameter.gradient(axis)
        seen[called] = seen.get(called, 0) + 1
        locals_ = [one[name] for one in found]
        check(name, called, whole[name][1], locals_)
    assert sum(seen.values()) == len(whole)
    if axis != "tp":
        assert set(seen) == {GradientPlacement.PARTIAL}, "every rank of data parallel has other samples"
    else:
        assert set(seen) == EXPECTED[model]


EXPECTED = {
    "llama": {GradientPlacement.SHARDED, GradientPlacement.PARTIAL},
    "llama, whole stream": {GradientPlacement.SHARDED, GradientPlacement.EQUAL},
    "llama, tied": {GradientPlacement.SHARDED, GradientPlacement.PARTIAL},
    "dit": {GradientPlacement.SHARDED, GradientPlacement.EQUAL},
    "own": {GradientPlacement.SHARDED, GradientPlacement.PARTIAL, GradientPlacement.EQUAL},
    "biases": {GradientPlacement.SHARDED, GradientPlacement.PARTIAL, GradientPlacement.EQUAL},
    "biases, whole stream": {GradientPlacement.SHARDED, GradientPlacement.PARTIAL, GradientPlacement.EQUAL},
}


def check(name, called, whole, found):
    """Compare the gradients of two ranks with the full batch's gradient."""
    tolerance = 1e-12 * float(whole.abs().max())

    def near(a, b):
        return float((a - b).abs().max()) <= tolerance

    (place, first), (other_place, second) = found
    if called is GradientPlacement.SHARDED:
        assert place != other_place, name
        for at, gradient in found:  # DTensor's lookup gives gradients of all rows, of which a rank's are right
            own = gradient if gradient.shape == whole[at].shape else gradient[at]
            assert near(own, whole[at]), name
    elif called is GradientPlacement.PARTIAL:
        assert near(first + second, whole), name
        assert not near(first, whole) and not near(second, whole), name
    else:
        assert near(first, whole) and near(second, whole), name


def test_rows_that_the_table_names(corpus):
    """The rows by their names: which parameters are what along tp."""

    def along_tp(model):
        source, words = words_of(model, corpus, "mesh.tp=2")
        plan = make_plan(load(source, words))
        return {kind.full_name(p.name, 0): p.gradient("tp") for kind in plan.kinds for p in kind.parameters}

    sharded, partial, equal = GradientPlacement.SHARDED, GradientPlacement.PARTIAL, GradientPlacement.EQUAL
    with_sp, without, dit, own = map(along_tp, ("llama", "llama, whole stream", "dit", "own"))
    for name in ("blocks.0.attention.wq.weight", "blocks.0.ffn.down.weight", "embed.weight", "head.weight"):
        assert with_sp[name] is without[name] is sharded
    assert with_sp["blocks.0.attention_norm.weight"] is partial and without["norm.weight"] is equal
    assert dit["blocks.0.attention.wq.bias"] is sharded and dit["blocks.0.attention.wo.bias"] is equal
    assert {dit[name] for name in ("time_embed.fc1.weight", "blocks.0.modulation.weight", "final.head.bias")} == {equal}
    assert own["blocks.0.attention.q_norm.weight"] is partial and own["blocks.0.mlp.2.bias"] is equal
    assert own["blocks.0.mlp.0.bias"] is sharded and own["positions.weight"] is equal
    for model in ("biases", "biases, whole stream"):
        found = {name.removeprefix("blocks.0."): what for name, what in along_tp(model).items()}
        assert found["mlp.fc1.bias"] is sharded and found["mlp.fc2.bias"] is equal
        assert found["mlp.group_norm.weight"] is found["mlp.act.weight"] is partial
        assert found["norm.bias"] is (partial if model == "biases" else equal)
