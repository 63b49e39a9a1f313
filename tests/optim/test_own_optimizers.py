"""What is wrong with an optimizer of the user's own is said before training."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.config.facts_for_family import model_facts
from meshwright.errors import ConfigError
from meshwright.optim.catalogue import find_optimizer
from meshwright.optim.contract import Slot
from meshwright.optim.role import Role
from meshwright.optim.trial import SETTINGS, ShardedDim, Tried, try_optimizer
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_memory
from meshwright.plan.rules import load
from meshwright.train.own_optimizer import check_optimizer
from tests.helpers import clean_environment, shown_error, small_corpus
from tests.train.runs import metrics

HERE = "tests.optim.own"
EXAMPLE = Path(__file__).parents[2] / "docs/examples/own_optimizer.py"
BOTH = (ShardedDim(0, ("dp_shard",), has_empty=True), ShardedDim(1, ("tp",)))
MATRIX, STACK = Tried(Role.MATRIX, 2, BOTH), Tried(Role.EXPERTS, 3, BOTH)

WRONG = {
    "NoOptimizer": "of type NoOptimizer, not an Optimizer",
    "NoRoles": "it has no roles",
    "UnknownRole": "its roles have tensor, which is none",
    "DottedState": "has a name that is no identifier",
    "UnknownDtype": "has dtype float7",
    "DimsOutOfOrder": "has dims (1, 0), which are not in ascending order",
    "NoState": "is of type int, not State",
    "NoMapping": "states(matrix) is of type list",
    "RaisesWhenMade": "raises RuntimeError('no licence')",
    "WholeVectors": "its roles have others than matrix and experts",
    "Missing": "has no Missing",
}
TRIED = {
    "Raises": "raises KeyError('total')",
    "DoesNothing": "update leaves a parameter with role matrix and 2 dims as it was",
    "AsksForGrad": "(it has gradient, parameter, role, name, state, shape)",
    "WholeNorm": "half of a parameter with role matrix and 2 dims, along dim 0, is not updated as in the whole: its",
    "WholeState": "values of the state total differ",
    "ReplacesState": "replaces the state total",
    "AddsState": "adds the state more",
    "ResizesState": "replaces the state total",
    "NotFinite": "not finite",
    "CountsItself": "is updated differently a second time: it keeps something outside of states(role)",
    "DividesByNumber": "is updated differently together with another parameter",
    "LargestFirst": "max(): Expected reduction dim",
    "Rows": "half of a parameter with role matrix and 2 dims, along dim 1",
    "TogetherNormed": "transform of two matrices differs from that of each by itself",
    "Transposes": "transform gives shape [2, 8, 6] for matrices [2, 6, 8]",
    "PreparesRows": "prepare gives shape [8] for a shard [6, 8]",
    "lacks_a_state": "raises KeyError('exp_avg_sq')",
    "PreparesItself": "prepare gives a state or the parameter itself",
    "PreparesByNorm": "along dim 0, is not updated as in the whole",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_an_optimizer_says_of_itself_is_checked(name):
    with pytest.raises(ConfigError) as caught:
        find_optimizer(f"{HERE}:{name}")
    assert WRONG[name] in caught.value.what and caught.value.where == "train.optimizer"


@pytest.mark.parametrize("name", TRIED)
def test_an_optimizer_is_tried_on_shards(name):
    with pytest.raises(ConfigError) as caught:
        try_optimizer(find_optimizer(f"{HERE}:{name}"), name, [MATRIX])
    assert TRIED[name] in caught.value.what


OWN = [f"{HERE}:{name}" for name in ("Plain", "Whole", "adagrad", "Dataclass", "NarrowState")]


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", *OWN])
def test_a_right_optimizer_passes(name):
    try_optimizer(find_optimizer(name), name, [MATRIX, STACK])


@pytest.mark.parametrize("name", ["WholeNorm", "WholeState"])
def test_whole_parameters_need_no_trial_of_shards(name):
    words = ["model.num_layers=1", f"train.optimizer={HERE}:{name}"]
    check_optimizer(make_plan(load("llama-tiny", words)))
    with pytest.raises(ConfigError, match="along dim 0"):
        check_optimizer(make_plan(load("llama-tiny", [*words, "mesh.dp_shard=2"])))


def test_states_that_parameters_cannot_have_are_named():
    with pytest.raises(ConfigError) as caught:
        load("llama-tiny", [f"train.optimizer={HERE}:ColumnsOfVectors"])
    assert "norm.weight has role vector and 1 dim" in caught.value.what and "adamw" in caught.value.fix


def test_unknown_names_suggest_one():
    with pytest.raises(ConfigError) as caught:
        load("llama-tiny", ["train.optimizer=Mun"])
    assert caught.value.fix == "train.optimizer=muon"


@pytest.mark.parametrize(
    ("name", "kept"),
    [("adamw", lambda n, rows: 2 * n), ("sgd", lambda n, rows: n), (f"{HERE}:Plain", lambda n, rows: n),
     (f"{HERE}:Rows", lambda n, rows: rows)],
)  # fmt: skip
def test_memory_counts_the_states(name, kept):
    config = load("llama-tiny", ["model.num_layers=1", f"train.optimizer={name}"])
    memory = predict_memory(make_plan(config))
    rows = 4 * sum(one.shape[0] for _, one in model_facts(config).named_parameters())
    assert memory.optimizer == kept(memory.parameters, rows)


def test_the_axes_that_shard_a_dim_are_named():
    words = ["model.num_layers=1", f"train.optimizer={HERE}:Rows"]
    check_optimizer(make_plan(load("llama-tiny", [*words, "mesh.dp_shard=2"])))
    with pytest.raises(ConfigError) as caught:
        check_optimizer(make_plan(load("llama-tiny", [*words, "mesh.dp_shard=2", "mesh.tp=2"])))
    assert "tp shards that dim" in caught.value.rule and "tp shards no dim 1" in caught.value.fix


def test_empty_shards_are_tried_where_a_layout_has_them():
    words = ["model.num_layers=1", "model.num_experts=4", "train.global_batch=6",
             f"train.optimizer={HERE}:LargestFirst"]  # fmt: skip
    check_optimizer(make_plan(load("moe-tiny", [*words, "mesh.dp_shard=2"])))
    with pytest.raises(ConfigError, match="Expected reduction dim"):
        check_optimizer(make_plan(load("moe-tiny", [*words, "mesh.dp_shard=3"])))  # 4 rows of a router on 3 ranks


def test_an_optimizer_of_pytorchs_takes_its_own_steps():
    theirs, ours = (torch.linspace(-1, 1, 12).view(3, 4) for _ in range(2))
    state = {"step": torch.zeros(()), "sum": torch.zeros(3, 4)}
    parameter = torch.nn.Parameter(theirs)
    adagrad = torch.optim.Adagrad([parameter], SETTINGS.lr)
    for number in range(3):
        gradient = torch.full((3, 4), 0.5 + number)
        parameter.grad = gradient
        adagrad.step()
        slot = Slot("w", Role.MATRIX, (3, 4), ours, gradient, state)
        find_optimizer(f"{HERE}:adagrad").update([slot], SETTINGS)
    assert torch.equal(parameter.detach(), ours) and torch.equal(adagrad.state[parameter]["sum"], state["sum"])
    assert state["step"] == 3


@pytest.mark.slow
def test_the_example_is_proved_runs_and_resumes_on_another_layout_from_outside(forked_meshwright, tmp_path):
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 60
    shutil.copy(EXAMPLE, tmp_path)
    sizes = ["model.num_layers=2", "train.global_batch=4", "train.seq_len=32", "train.lr=1e-3"]
    sizes += [*small_corpus(tmp_path), "train.sample_tokens=0", "train.validation_samples=8"]
    words = [*sizes, "train.optimizer=own_optimizer:RowScaled"]
    environment = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(tmp_path))

    def ran(*arguments):
        return forked_meshwright(*arguments, env=environment, cwd=tmp_path)

    proved = ran("prove", "llama-tiny", *words, "mesh.dp_shard=2")
    assert proved.returncode == 0 and "PROVED" in proved.stdout, proved.stdout + proved.stderr
    for steps, layout in ((2, ["mesh.dp_shard=2"]), (4, ["mesh.pp=2", "train.num_microbatches=2"])):
        done = ran("run", "llama-tiny", *words, *layout, f"train.steps={steps}", "--out", tmp_path / "run",
                   *(["--resume", "auto"] if steps == 4 else []))  # fmt: skip
        assert done.returncode == 0, done.stderr
    found = metrics(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3, 4] and np.isfinite([line["loss"] for line in found]).all()
    refused = ran("run", tmp_path / "run", "mesh.pp=1", "mesh.tp=2", "train.steps=6")
    assert "along dim 1" in shown_error(refused.stderr)["error"]
    other = ran("run", tmp_path / "run", "train.optimizer=adamw", "train.steps=6")
    assert shown_error(other.stderr)["fix"] == "train.optimizer=own_optimizer:RowScaled"
