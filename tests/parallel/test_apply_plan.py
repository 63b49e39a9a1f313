"""Parallelized models: parameter placements, gradients, and number of collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.parallel.data_parallel import fsdp_modules
from tests.helpers import small_corpus
from tests.train.jobs import make_job, pieces, run_on

TIED = "model.tie_embeddings=true"
LAYOUTS = [
    pytest.param(2, ["mesh.tp=2"], marks=pytest.mark.slow),
    (2, ["mesh.tp=2", "mesh.sequence_parallel=false"]),
    pytest.param(2, ["mesh.tp=2", TIED], marks=pytest.mark.slow),
    pytest.param(2, ["mesh.dp_shard=2", "train.num_microbatches=2"], marks=pytest.mark.slow),
    (2, ["mesh.dp_shard=2", "train.num_microbatches=2", TIED]),
    pytest.param(4, ["mesh.tp=2", "mesh.dp_shard=2", "train.num_microbatches=2"], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.tp=2", "mesh.dp_replicate=2", TIED], marks=pytest.mark.slow),
    pytest.param(4, ["mesh.dp_replicate=2", "mesh.dp_shard=2"], marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return [*small_corpus(tmp_path_factory.mktemp("parallel")), "train.precision=float64", "model.num_layers=1"]


def gradients(rank, world_size, words):
    job, step = make_job(rank, world_size, words)
    step.accumulate(1)
    return pieces(job, gradients=True)


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_every_gradient_is_that_of_one_process(gang, corpus, world_size, layout):
    expected = gradients(0, 1, [*corpus, *(word for word in layout if word == TIED)])
    for found in run_on(gang, world_size, gradients, [*corpus, *layout]):
        assert found.keys() == expected.keys()
        for name, piece in found.items():
            whole = expected[name].values
            assert (piece.values - piece.of(whole)).abs().max() <= 1e-12 * whole.abs().max(), name


def frozen(rank, world_size, words):
    job, _ = make_job(rank, world_size, words)
    return [name for name, parameter in job.model.named_parameters() if not parameter.requires_grad]


@pytest.mark.parametrize("whole", ["true", "false"])
def test_what_is_frozen_stays_so_under_tensor_parallel(gang, corpus, whole):
    words = [*corpus, "mesh.tp=2", f"mesh.sequence_parallel={whole}", "train.freeze=['*norm*','embed.*']"]
    expected = ["embed.weight", "blocks.0.attention_norm.weight", "blocks.0.ffn_norm.weight", "norm.weight"]
    assert gang(2).run(frozen, words) == [expected] * 2


def structure(rank, world_size, words):
    job, _ = make_job(rank, world_size, words)
    placements = {name: str(p.placements) for name, p in job.model.named_parameters() if isinstance(p, DTensor)}
    units = [name for name, module in job.parts()[0].module.named_modules() if isinstance(module, FSDPModule)]
    return len(list(job.model.parameters())), placements, units


def test_what_tensor_parallel_divides(gang, corpus):
    count, placements, units = gang(2).run(structure, [*corpus, "mesh.tp=2"])[0]
    assert len(placements) == count and not units
    by_columns = ("wo.weight", "down.weight")
    for name, found in placements.items():
        whole = "Replicate()" if "norm" in name else f"Shard(dim={1 if name.endswith(by_columns) else 0})"
        assert found == f"({whole},)", name


@pytest.mark.parametrize(
    ("vocab_size", "tied", "by_itself"), [(256, "false", False), (4096, "false", True), (4096, "true", False)]
)
def test_what_fsdp_gathers_together(gang, corpus, vocab_size, tied, by_itself):
    """An embedding has its own FSDP unit if it is larger than a block and not tied to the head."""
    words = [*corpus, "mesh.dp_shard=2", f"model.tie_embeddings={tied}", f"model.vocab_size={vocab_size}"]
    count, placements, units = gang(2).run(structure, words)[0]
    assert len(placements) == count and set(placements.values()) == {"(Shard(dim=0),)"}
    assert {"", "blocks.0"} <= set(units) and ("embed" in units) is by_itself


def reductions(rank, world_size, words):
    """Count the gradient-reducing collectives of a step."""
    job, step = make_job(rank, world_size, words)
    with torch.profiler.profile() as profile:
        step.accumulate(1)
    names = Counter(event.name for event in profile.events())
    return {name: n for name, n in names.items() if name.startswith("c10d::") and "reduce" in name}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["mesh.dp_shard=2"], marks=pytest.mark.slow),
        ["mesh.dp_replicate=2"],
        pytest.param(["mesh.dp_replicate=2", "mesh.dp_shard=2"], marks=pytest.mark.slow),
    ],
)
def test_gradients_are_reduced_once_a_step_not_once_a_part(gang, corpus, layout):
    world_size = 2 ** len(layout)
    found = [
        gang(world_size).run(reductions, [*corpus, *layout, f"train.num_microbatches={parts}"])[0] for parts in (1, 2)
    ]
    assert found[0] == found[1] and sum(found[0].values()) > 0


def test_a_plain_model_has_no_units(corpus):
    job, _ = make_job(0, 1, corpus)
    assert fsdp_modules(job.model) == [] and job.mesh is None
    assert all(type(p) is torch.nn.Parameter for p in job.model.parameters())
