"""Modules that would train something else unnoticed are refused before processes start; others of odd kinds train."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from meshwright.config.facts_for_family import run_facts
from meshwright.config.resolve import notes_of
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.model_facts import Computed
from meshwright.plan.rules import load
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from tests.gangs.gang import GangPool
from tests.models.hf.faults import proof_of
from tests.models.module import odd_modules
from tests.prove.proofs import SOURCE
from tests.train.jobs import Pieces, job_of, make_task, pieces

SETTINGS = ("train.seq_len=32", "train.global_batch=8", "train.num_microbatches=2", f"data.source={SOURCE}")


def odd_config(name: str, *words: str) -> RunConfig:
    """The configuration of a run of an odd module."""
    return load("module-tiny", [f"model.builder={odd_modules.__name__}:{name}", *SETTINGS, *words])


REFUSED = {
    "LastToken": ("returns a tensor [3, 1, 256] for 3 samples of 37 tokens", "logits of every token"),
    "Dropped": ("draws random numbers (aten.", "without dropout"),
    "Counting": ("writes to its buffer steps", "doesn't write to steps"),
    "BatchNormed": ("batch_norm of BatchNormed normalises over the samples of a batch", "LayerNorm"),
    "BatchCentred": ("depend on the other samples of its batch in BatchCentred", "without means, norms or choices"),
    "Scalar": ("factor of Scalar is a scalar", "torch.tensor([…])"),
    "Listed": ("Listed.masks holds tensors", "register_buffer"),
    "InPlace": ("a layer of InPlace writes to its input in place", "x = x + …"),
    "InSequence": ("InSequence has no torch.nn.ModuleList", "model.layer_list=layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_that_do_more_than_compute_logits_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as found:
        odd_config(name)
    what, fix = REFUSED[name]
    assert what in found.value.what
    assert fix in found.value.fix


@pytest.mark.parametrize("name", ["Positions", "LaterPositions"])
def test_a_sample_longer_than_a_table_of_positions_is_refused(name: str) -> None:
    odd_config(name, "train.seq_len=64")
    with pytest.raises(LayoutError, match=r"exceeds the 64 positions") as found:
        odd_config(name, "train.seq_len=65")
    assert found.value.fix == "train.seq_len=64"


def test_what_takes_no_part_is_said() -> None:
    assert list(notes_of(odd_config("SetsAside"))) == [
        "dropout is set aside: layers.*.drop = 0.1",
        "padding_idx of table is set aside: samples have no padding",
        "loss of the forward is set aside: logits alone are used",
    ]
    assert not list(notes_of(odd_config("Float32Constant")))


def test_what_layers_return_besides_the_stream_does_not_reach_other_stages() -> None:
    odd_config("Shares")
    with pytest.raises(LayoutError, match=r"the forward of a stage fails: AttributeError: 'NoneType'"):
        odd_config("Shares", "mesh.pp=2")


def test_layers_may_be_in_a_sequence_that_is_named() -> None:
    config = odd_config("InSequence", "model.layer_list=layers", "mesh.pp=2")
    assert len(config.family.describe(run_facts(config)).layers) == 4


def test_layers_in_another_order_are_trained_but_not_split() -> None:
    config = odd_config("Reversed")
    kinds = config.family.describe(run_facts(config)).kinds
    assert not [p.name for kind in kinds for p in kind.parameters if p.frozen]
    with pytest.raises(LayoutError, match="not called once each, in order"):
        odd_config("Reversed", "mesh.pp=2")


def test_a_module_that_does_not_run_in_bfloat16_alone_is_measured_in_float32() -> None:
    config = odd_config("Float32Constant")
    saved = [kind.saved for kind in config.family.describe(run_facts(config)).kinds]
    assert all(one.wide_full > 0 and one.full == 0 for one in saved)


def test_a_value_given_after_random_ones_is_computed() -> None:
    config = odd_config("Experts")
    found = config.family.initial(run_facts(config), "factor")
    assert isinstance(found, Computed)
    torch.testing.assert_close(found.compute(), torch.tensor([1.5]))


@pytest.mark.slow
def test_experts_without_tokens_have_gradients_of_zeros(gang: GangPool) -> None:
    importlib.import_module(odd_modules.__name__)
    config = as_proof(odd_config("Experts", "mesh.dp_shard=2"))
    result = proof_of(gang, config)
    assert result.passed, "\n".join(render(result))


def gradients_in_bfloat16(rank: int, world_size: int, words: tuple[str, ...]) -> Pieces:
    """Gradients of a first step, this rank's pieces."""
    job, step = job_of(odd_config("Seldom", *words, "train.precision=bfloat16"), rank, world_size)
    step.accumulate(1)
    return pieces(job, gradients=True)


@pytest.mark.slow
def test_what_some_micro_batches_use_has_their_gradients(gang: GangPool) -> None:
    """In bfloat16, where FSDP2 accumulates in float32 what several micro-batches have a gradient of."""
    config = odd_config("Seldom")
    job, _ = job_of(config, 0, 1)
    weights = {name: p.detach().bfloat16().requires_grad_() for name, p in job.model.named_parameters()}
    model, task = odd_modules.Seldom(), make_task(config)
    sums, used = {name: torch.zeros(p.shape) for name, p in weights.items()}, Counter[str]()
    for first in range(0, 8, 2):  # two ranks have two micro-batches each
        batch = task.batch(range(first, first + 2))
        logits = torch.func.functional_call(model, weights, (batch.inputs,))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum") / (8 * 32)
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                sums[name] += gradient.float()
                used[name] += 1
    assert {used[name] for name in weights} & {1, 2, 3} and min(used[name] for name in weights) == 0
    for found in gang(2).run(gradients_in_bfloat16, ("mesh.dp_shard=2",)):
        for name, piece in found.items():
            torch.testing.assert_close(piece.values, piece.of(sums[name]), rtol=1e-4, atol=1e-7)
