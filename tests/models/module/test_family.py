"""A user's own module is trained without a description: structure, stages, initial values, loss, packing, errors,
proofs.

Modules that would train something else unnoticed are refused before processes start; others of odd kinds train.
"""

from __future__ import annotations

import importlib
import math
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.cli.plan_page import page
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.resolve import notes_of
from meshwright.config.schema import RunConfig
from meshwright.config.source import to_toml
from meshwright.data.loader import IGNORED_TARGET
from meshwright.errors import ConfigError, LayoutError, MeshwrightError
from meshwright.models.contract.build_module import build_part
from meshwright.models.contract.model_facts import Computed, Constant, Normal, Part, Uniform
from meshwright.models.contract.task import SimpleBatch
from meshwright.models.foreign import stage as stage_module
from meshwright.models.foreign.origin import COMPUTED, build_recorded
from meshwright.models.foreign.structure import FillFacts
from meshwright.models.module.family import FAMILY
from meshwright.models.module.origin import own_loss
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.prove.record.reference_run import build_reference, fill_tensors
from meshwright.prove.report import render
from meshwright.prove.spec import as_proof
from tests.gangs.gang import GangPool
from tests.helpers import alternatives, quick_and_slow
from tests.models.hf.faults import proof_of
from tests.models.module import modules, odd_modules
from tests.prove.proofs import SOURCE
from tests.train.jobs import Pieces, job_of, make_task, pieces

HERE = modules.__name__
SETTINGS = ("train.seq_len=32", "train.global_batch=8", f"data.source={SOURCE}")


def module_config(name: str, *words: str) -> RunConfig:
    """The configuration of a run of a module of this folder."""
    return load("module-tiny", [f"model.builder={HERE}:{name}", *SETTINGS, *words])


def test_initial_values_are_the_constructors() -> None:
    config = module_config("Model")
    f, family = run_facts(config), config.family
    bound = 1 / math.sqrt(32)
    assert family.initial(f, "table.weight") == Normal(0.05)
    assert family.initial(f, "layers.1.norm.weight") == Constant(1.0)
    found = family.initial(f, "layers.1.out.weight")
    assert isinstance(found, Uniform) and found.bound == pytest.approx(bound)
    scale, angles = family.initial(f, "scale"), family.initial(f, "angles")
    assert isinstance(scale, Computed) and isinstance(angles, Computed)
    torch.testing.assert_close(scale.compute(), torch.linspace(0.5, 1.5, 32))
    torch.testing.assert_close(angles.compute(), torch.arange(32).float().cos())


def test_parts_are_where_they_run() -> None:
    config = module_config("Model")
    facts = config.family.describe(run_facts(config))
    names = [[p.name for end in ends for p in end.parameters] for ends in (facts.first, facts.last)]
    assert names == [["scale", "table.weight"], ["norm.weight", "norm.bias", "head.weight"]]
    assert facts.last[0].parameters[-1].tied_to == "table.weight"


def test_a_loss_of_ones_own_is_summed_over_the_tokens_that_count() -> None:
    loss = own_loss(f"{HERE}:token_losses")
    assert loss is not None
    logits, targets = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    targets[0, :3] = IGNORED_TARGET
    expected = 2 * F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss.sum(logits, targets), expected)
    assert loss.unit.metric("loss") == "loss_per_token" and loss.unit.words(2.0) == "2.000 per token"


def test_a_loss_that_is_a_mean_is_refused() -> None:
    loss = own_loss(f"{HERE}:mean_loss")
    assert loss is not None
    with pytest.raises(ConfigError, match=r"returns a tensor \[\] for targets \[2, 5\]"):
        loss.sum(torch.randn(2, 5, 7), torch.zeros(2, 5, dtype=torch.long))


@pytest.mark.slow
def test_documents_are_packed_where_positions_keep_them_apart() -> None:
    for length, name in ((32, "ApartModel"), (64, "ApartModel"), (32, "RescaledModel")):
        module_config(name, "data.packing=documents", f"train.seq_len={length}")
    refused = (32, "TogetherModel", "packed beside"), (32, "Model", "takes no position_ids"), (
        64, "RescaledModel", "packed beside")  # fmt: skip
    for length, name, says in refused:
        with pytest.raises(ConfigError, match=says):
            module_config(name, "data.packing=documents", f"train.seq_len={length}")


def test_roles_follow_from_what_the_forward_does() -> None:
    config = module_config("ManyTables")
    found = {name: str(one.role) for name, one in model_facts(config).named_parameters()}
    expected = {
        "table.weight": "embedding", "rows": "embedding", "positions": "vector", "scale": "vector",
        "norm.weight": "vector", "norm.bias": "vector",
    }  # fmt: skip
    in_layer = {
        "qkv.weight": "matrix", "qkv.bias": "vector", "out.weight": "matrix", "out.bias": "vector",
        "norm.weight": "vector", "norm.bias": "vector", "conv.weight": "vector", "conv.bias": "vector",
        "decay": "vector", "query": "vector", "heads": "experts", "joined": "matrix", "plain": "matrix",
        "first": "matrix", "second": "matrix",
    }  # fmt: skip
    layers = {f"layers.{layer}.{name}": role for layer in range(2) for name, role in in_layer.items()}
    assert found == expected | layers


def test_a_matrix_of_three_dims_that_is_no_stack_has_no_owner() -> None:
    with pytest.raises(ConfigError, match=r"joined has role matrix and 3 dims, but muon updates whole") as found:
        module_config("ManyTables", "train.optimizer=muon")
    assert found.value.fix == "train.optimizer=adamw"


def test_conversations_that_a_module_cannot_keep_apart_are_refused_with_a_way_on() -> None:
    with pytest.raises(ConfigError, match="data.chat_field = messages: .* takes no position_ids") as caught:
        module_config("Model", "data.packing=documents", "data.chat_field=messages")
    [texts] = alternatives(caught.value.fix)
    module_config("Model", "data.packing=documents", "data.chat_field=messages", *texts)


ERRORS = {
    "model.builder=": "model.builder is not set",
    "model.builder=Model": "model.builder = Model",
    "model.builder=no_such_module:Model": "module not found: no_such_module",
    f"model.builder={HERE}:Modle": "has no Modle",
    f"model.builder={HERE}:no_module": "returns a int",
    f"model.builder={HERE}:no_layers": "no torch.nn.ModuleList of layers",
    f"model.builder={HERE}:SharedLayers": "layers holds one module more than once",
    "model.arguments.widht=8": "unexpected keyword argument 'widht'",
    "model.arguments=8": "model.arguments = 8 is not allowed here",
    "model.layer_list=layer": "no list of modules layer",
    "model.styles.layers.*.up=column": "no module with parameters has such a path",
    "model.styles.layers.*.out=sideways": "'sideways' is no style",
    "model.styles.layers.*.qkv=column": "a forward with shards of the matrices fails at modules.py:",
    f"model.loss={HERE}:los": "has no los",
    "model.loss=loss": "model.loss = loss",
}


@pytest.mark.parametrize("word", ERRORS)
def test_what_is_wrong_is_said_before_a_run_starts(word: str) -> None:
    with pytest.raises(MeshwrightError) as found:
        module_config("Model", "mesh.tp=2", word)
    assert ERRORS[word] in found.value.what
    assert found.value.where and found.value.rule and found.value.fix
    assert ("view(b, t, -1, head_dim)" in found.value.fix) is ("a forward with" in found.value.what)


def test_a_length_that_the_module_does_not_take_has_a_fix_that_works() -> None:
    words = ["train.seq_len=1024", f"data.source={SOURCE}"]
    with pytest.raises(ConfigError, match="fails for 1024 tokens") as found:
        load("module-tiny", words)
    assert found.value.fix == "train.seq_len=512"
    load("module-tiny", [*words, "train.seq_len=512"])


def test_tables_are_written_and_read(tmp_path: Path) -> None:
    config = module_config("Model", "model.arguments={width=16, depth=6}", "model.styles.layers.*.out=replicated")
    config = config.with_keys({})
    written = to_toml(config)
    assert tomllib.loads(written)["model"]["styles"] == {"layers.*.out": "replicated"}
    (tmp_path / "run.toml").write_text(written, "utf-8")
    again = load(str(tmp_path / "run.toml"), ["model.arguments.depth=2"])
    assert dict(again.model.model_dump()["arguments"]) == {"width": 16, "depth": 2}
    assert len(again.family.describe(run_facts(again)).layers) == 2


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("module-tiny", "mesh.tp=2"), ["  tp shards 50 % of the parameters, and the rest is replicated"]),
        (("module-tiny",), []),
        (("llama-tiny", "mesh.tp=2"), []),
    ],
)
def test_a_plan_says_which_share_tp_shards(words: tuple[str, ...], shown: list[str]) -> None:
    config = load(words[0], words[1:])
    assert [line for line in page(config.name, make_plan(config)) if "tp shards" in line] == shown


SMALL = ("train.seq_len=16", "train.global_batch=8", "train.num_microbatches=2", f"data.source={SOURCE}")
HEADS = ("model.styles.blocks.*.[qkv]=column", "model.styles.blocks.*.out=row")
FEED_FORWARD = ("model.styles.blocks.*.up=column", "model.styles.blocks.*.down=row")
ENDS = ("model.styles.tokens=vocabulary", "model.styles.head.1=head")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [("mesh.tp=2", *HEADS, *FEED_FORWARD, *ENDS), ("mesh.tp=2",)],
    ids=["tp by glob", "tp by shapes"],
)
def test_the_example_is_proved(gang: GangPool, layout: tuple[str, ...]) -> None:
    config = as_proof(load("module-tiny", [*SMALL, *layout]))
    result = proof_of(gang, config)
    assert result.passed, "\n".join(render(result))


@pytest.mark.slow
def test_a_loss_of_ones_own_and_packed_documents_are_proved(gang: GangPool) -> None:
    importlib.import_module(modules.__name__)
    words = [f"model.builder={modules.__name__}:ApartModel", f"model.loss={modules.__name__}:token_losses"]
    config = as_proof(load("module-tiny", [*SMALL, *words, "data.packing=documents", "mesh.pp=2", "mesh.dp_shard=2"]))
    result = proof_of(gang, config)
    assert result.passed, "\n".join(render(result))


KINDS = ("Model", "TimeFirst", "Scaled", "FixedTable", "Chunked", "ReadsDevice", "OutsideResiduals", "Listing")


def two_stages(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that two stages compute one after the other, and those of the plain module."""
    config = as_proof(module_config(kind, "mesh.pp=2"))
    f, tokens = run_facts(config), torch.arange(64).view(2, 32)
    weights = dict(build_reference(config).named_parameters(remove_duplicate=False))
    stream = tokens
    for number in range(2):
        part = Part(range(2 * number, 2 * number + 2), number, 2)
        module = build_part(FAMILY, f, dtype=torch.float64, part=part).to_empty(device="cpu")
        module.load_state_dict({name: weights[name].detach() for name, _ in module.named_parameters()}, strict=False)
        fill_tensors(module.named_buffers(), FAMILY, f)
        stream = FAMILY.run(module, stream, SimpleBatch(tokens, ()))
    plain = getattr(modules, kind)().double()
    plain.load_state_dict({name: weights[name].detach() for name, _ in plain.named_parameters()}, strict=False)
    return stream, plain(tokens)


@pytest.mark.parametrize(
    "kind", quick_and_slow(zip(KINDS), [("Model",), ("TimeFirst",), ("Chunked",), ("OutsideResiduals",), ("Listing",)])
)
def test_two_stages_compute_what_the_module_does(kind: str) -> None:
    found, expected = two_stages(kind)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_is_computed_between_layers_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: the stage that receives the stream applies it again."""
    monkeypatch.setattr(stage_module, "_receive", lambda *_: lambda args, kwargs: (args, kwargs))
    found, expected = two_stages("Scaled")
    assert (found - expected).abs().max() > 1e-3


def test_a_layer_that_reads_an_earlier_one_is_refused_for_pp() -> None:
    with pytest.raises(LayoutError, match="depends on more than the stream"):
        module_config("Skipping", "mesh.pp=2")
    module_config("Skipping")


def test_an_output_that_depends_on_more_than_the_last_layer_is_refused_for_pp() -> None:
    with pytest.raises(LayoutError, match="the output depends on layer 0 by more than the stream"):
        module_config("Averaged", "mesh.pp=2")
    module_config("Averaged")


def test_the_last_operator_that_writes_a_whole_tensor_says_what_its_values_are() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.normal = nn.Parameter(nn.init.normal_(torch.empty(4, 4), std=0.5))
        model.shifted = nn.Parameter(nn.init.normal_(torch.empty(4, 4), mean=1.0))
        model.drawn, model.halved = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4) / 2)
        model.uniform = nn.Parameter(nn.init.uniform_(torch.empty(4), -0.25, 0.25))
        model.one_sided = nn.Parameter(torch.empty(4).uniform_())
        model.full, model.ones = nn.Parameter(torch.full((4,), 3.0)), nn.Parameter(torch.ones(4))
        model.in_part = nn.Parameter(torch.zeros(4, 4))
        model.in_part.data[1].fill_(2.0)
        model.over = nn.Parameter(nn.init.constant_(nn.init.normal_(torch.empty(4)), 7.0))
        model.register_buffer("count", torch.zeros(3, dtype=torch.long))
        return model

    found = build_recorded(build)[1]
    assert found == {
        "normal": FillFacts("normal", 0.5), "shifted": COMPUTED, "drawn": FillFacts("normal", 1.0),
        "halved": COMPUTED, "uniform": FillFacts("uniform", 0.25), "one_sided": COMPUTED,
        "full": FillFacts("constant", 3.0), "ones": FillFacts("constant", 1.0), "in_part": COMPUTED,
        "over": FillFacts("constant", 7.0), "count": COMPUTED,
    }  # fmt: skip


ODD_SETTINGS = ("train.seq_len=32", "train.global_batch=8", "train.num_microbatches=2", f"data.source={SOURCE}")


def odd_config(name: str, *words: str) -> RunConfig:
    """The configuration of a run of an odd module."""
    return load("module-tiny", [f"model.builder={odd_modules.__name__}:{name}", *ODD_SETTINGS, *words])


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
