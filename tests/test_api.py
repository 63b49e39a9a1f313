"""Plan, run and prove from Python: values come back, processes are the functions' own, and no torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

import meshwright
from meshwright import api
from meshwright.errors import ConfigError, LayoutError, RunError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_process_memory
from meshwright.plan.run_plan import RunPlan
from meshwright.plan.serialize import to_json
from tests.helpers import SMALL, clean_environment, small_corpus

WORDS = (*SMALL, "mesh.dp_shard=2", "train.steps=2", "train.threads=1", "train.sample_tokens=0", "train.seq_len=16",
         "train.validation_samples=4", "checkpoint.every=1")  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return meshwright.load_config("llama-tiny", *WORDS, *small_corpus(tmp_path_factory.mktemp("api")))


def test_importing_the_package_is_light_and_its_verbs_need_no_torch(tmp_path):
    program = """
import sys, meshwright
assert not {"torch", "numpy", "pydantic"} & set(sys.modules), "import meshwright"
assert {"plan", "prove", "run", "load_config", "pipeline", "reshard", "comm", "checkpoint"} <= set(dir(meshwright))
config = meshwright.load_config("llama3-70b", "mesh.dp_shard=8", "mesh.tp=8")
import meshwright.plan.run_plan, meshwright.prove.spec
assert isinstance(meshwright.plan(config), meshwright.plan.run_plan.RunPlan)
assert callable(meshwright.prove) and meshwright.pipeline.generate
assert "torch" not in sys.modules, "planning"
try:
    meshwright.plam
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True)
    assert done.stdout == "module 'meshwright' has no attribute 'plam'\n", done.stderr


def test_a_configuration_is_made_and_refused():
    made = meshwright.load_config("llama-tiny", "mesh.tp=2")
    assert made.mesh.tp == 2 and made == meshwright.load_config(None, "mesh.tp=2")
    with pytest.raises(LayoutError) as caught:
        meshwright.load_config("llama-tiny", "mesh.tp=3")
    assert caught.value.fix
    plan = meshwright.plan(made)
    assert isinstance(plan, RunPlan) and plan == make_plan(made)


@pytest.mark.parametrize("verb", ["plan", "run", "prove"])
def test_keys_that_violate_a_rule_are_refused(config, verb):
    with pytest.raises(LayoutError) as caught:
        getattr(meshwright, verb)(config.with_keys({"mesh.tp": 3}))
    assert "mesh.tp = 3" in caught.value.what and caught.value.where == "the configuration, mesh.tp"


def other(plan, **fields):
    """The plan with another unit of its blocks."""
    block = next(kind for kind in plan.kinds if kind.is_block)
    changed = replace(block, units=(replace(block.units[0], **fields),))
    return replace(plan, kinds=tuple(changed if kind is block else kind for kind in plan.kinds))


class Started(Exception):
    """A run got as far as its processes."""


def test_ranks_get_a_verified_plan_its_memory_and_whether_it_was_given(config, tmp_path, monkeypatch):
    def launch(body, spec, **_):
        raise Started(spec)

    def spec_of(name, **words):
        with pytest.raises(Started) as caught:
            meshwright.run(config.with_keys({"train.device": "cpu"}), out=tmp_path / name, **words)
        return caught.value.args[0]

    monkeypatch.setattr(api, "launch", launch)
    plan = meshwright.plan(config)
    made, given, changed = spec_of("a"), spec_of("b", plan=plan), spec_of("c", plan=other(plan, freed=False))
    assert made.plan == given.plan == plan and not made.plan_given and not given.plan_given and changed.plan_given
    assert made.process_bytes == predict_process_memory(plan)
    monkeypatch.setattr(api, "make_plan", lambda *_, **__: replace(plan, loss=replace(plan.loss, units=0)))
    with pytest.raises(LayoutError, match="divided by 0"):
        meshwright.run(config, out=tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.slow
def test_a_run_gives_its_losses_and_goes_on(config, tmp_path):
    plan = other(meshwright.plan(config), freed=False)
    done = meshwright.run(config, out=tmp_path / "run", plan=plan)
    assert done.folder == tmp_path / "run" and done.checkpoint == tmp_path / "run/checkpoints/00000002"
    assert len(done.losses) == 2 and all(loss > 0 for loss in done.losses) and done.validation > 0
    assert done.loss_unit == "bits/byte"
    assert (done.folder / "plan.json").read_text("utf-8") == to_json(plan)
    longer = config.with_keys({"train.steps": 3})
    found = []
    # In another thread, where signals can't be heard.
    thread = threading.Thread(target=lambda: found.append(meshwright.run(longer, out=done.folder, resume="auto")))
    thread.start()
    thread.join()
    assert found[0].losses[:2] == done.losses and len(found[0].losses) == 3


def test_a_proof_is_true_where_it_passed(config):
    proof = meshwright.prove(config, steps=1, plan=other(meshwright.plan(config), freed=False))
    assert proof and proof.passed and str(proof).endswith("\nPROVED") and "PROVED" not in repr(proof.report)
    assert json.loads(json.dumps(proof.report))["num_steps"] == 1
    failed = api.Proof(False, ("why",), {})
    assert not failed and str(failed) == "why\nNOT PROVED"


def test_an_error_that_ends_the_ranks_is_no_proof_but_a_result(config, monkeypatch):
    def launch(*given, **named):
        raise RunError("rank 1 failed in step 1\nTraceback\nValueError: no rows", where="rank 1 of 2, step 1")

    monkeypatch.setattr(api, "launch", launch)
    proof = meshwright.prove(config, steps=1)
    assert not proof and "  cause   ValueError: no rows" in proof.lines and proof.report["passed"] is False
    assert proof.report["causes"][0]["where"] == "rank 1 of 2, step 1" and "set_aside" in proof.report


@pytest.mark.slow
def test_a_proof_says_what_tp_leaves_replicated(tmp_path):
    words = ["mesh.tp=2", "train.seq_len=32", "train.global_batch=4", *small_corpus(tmp_path)]
    proof = meshwright.prove(meshwright.load_config("module-tiny", *words), steps=1)
    assert proof and any(line.startswith("tp shards 50 % of the parameters") for line in proof.lines)


@pytest.mark.parametrize("verb", ["run", "prove"])
def test_a_plan_that_does_not_fit_is_refused_before_any_process(config, tmp_path, verb):
    words = {"out": tmp_path / "run"} if verb == "run" else {}
    other_mesh = meshwright.plan(config.with_keys({"mesh.dp_shard": 4}))
    with pytest.raises(ConfigError, match=r"mesh\.atoms") as caught:
        getattr(meshwright, verb)(config, plan=other_mesh, **words)
    assert caught.value.where == "plan" and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path):
    """Ranks don't import the program that starts them, which would run again."""
    words = (*WORDS, *small_corpus(tmp_path / "corpus"))
    script = tmp_path / "script.py"
    script.write_text(
        "import meshwright\nprint('begins')\n"
        f"done = meshwright.run(meshwright.load_config('llama-tiny', *{words!r}), out={str(tmp_path / 'run')!r})\n"
        "print(len(done.losses), __file__ == __spec__ or __file__)\n"
    )
    done = subprocess.run([sys.executable, script], env=clean_environment(), capture_output=True, text=True)
    assert done.stdout == f"begins\n2 {script}\n", done.stderr
