"""`meshwright plan`: a page that fits a terminal, figures for programs, files, differences; and no torch."""

from __future__ import annotations

import json
import math

import pytest

from meshwright.cli.plan_page import COLUMNS, nodes_of_gpus, optimizer_groups, page
from meshwright.config.facts_for_family import model_facts
from meshwright.config.source import preset_names
from meshwright.plan.compare import hashes
from meshwright.plan.context.layers import explain_method, imbalance_of_ranks
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import predict_process_memory
from meshwright.plan.rules import load
from meshwright.plan.serialize import from_json
from meshwright.plan.traffic import context_bytes, predict_traffic
from meshwright.units import format_bytes, format_count
from tests.helpers import meshwright, shown_error

LAYOUTS = [
    *((name, []) for name in preset_names()),
    ("llama3-70b", ["mesh.dp_shard=8", "mesh.tp=8"]),
    ("llama3-405b", ["mesh.pp=16", "mesh.dp_shard=128", "train.global_batch=2048", "train.num_microbatches=16",
                     "comm.ranks_per_node=8"]),
    ("dit-digits-video", ["mesh.pp=2", "mesh.dp_shard=2", "mesh.dp_replicate=2", "comm.gradients=loco4",
                          "recompute.policy=full", "train.freeze=blocks.0.*"]),
    ("llama-tiny", ["mesh.pp=2", "pipeline.schedule=zb-v", "model.tie_embeddings=true", "train.num_microbatches=4"]),
    ("llama-tiny", ["mesh.cp=8", "mesh.tp=2", "data.packing=documents", "recompute.policy=full"]),
    ("llama3-8b", ["mesh.cp=16", "train.freeze=blocks.1.*", "model.window=256", "model.global_every=4"]),
    ("moe-tiny", ["mesh.cp=4", "mesh.ep=2", "mesh.cp_method=ring"]),
    ("llama3-8b", ["float8.recipe=delayed", "float8.keep_last=1"]),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "words"), LAYOUTS, ids=[f"{p} {' '.join(w)}" for p, w in LAYOUTS])
def test_a_page_fits_80_columns_and_breaks_no_number(here, preset, words):
    config = load(preset, words)
    done = here("plan", preset, *words, torch=config.family.derives)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines) <= 45, done.stdout
    for line in lines:  # a figure and its unit stand together
        last = line.split()[-1]
        assert not last.isdigit() and last not in ("×", "·", "="), line
        assert not line.strip().startswith(("GiB", "MiB", "KiB", "B ")), line
    made = make_plan(config)
    found = hashes(make_plan(config, nodes=nodes_of_gpus(made)))
    assert f"model {found.model} · layout {found.layout} · plan {found.fingerprint}" in done.stdout


@pytest.mark.parametrize(
    ("words", "fits", "between_nodes"),
    [
        (["llama3-70b"], "fits H200, B200, GB200; not H100 (80.0 GiB)", {"weights", "gradients"}),
        (["llama3-70b", "comm.ranks_per_node=64"], "fits H200, B200, GB200; not H100 (80.0 GiB)", set()),
        (["llama3-405b", "train.seq_len=16384"], "fits no known GPU: the largest is GB200 (186 GiB)",
         {"weights", "gradients"}),
        (["llama-tiny", "mesh.dp_shard=8"], "fits A100-40, A100-80, H100, H200, B200, GB200", set()),
    ],
)  # fmt: skip
def test_a_page_names_the_gpus_and_their_nodes(here, words, fits, between_nodes):
    lines = [line.strip() for line in here("plan", *words).stdout.splitlines()]
    assert fits in lines
    assert {line.split()[0] for line in lines if line.endswith("between nodes")} == between_nodes


def test_a_page_says_how_much_is_trained(here):
    text = here("plan", "llama-tiny", "train.freeze=blocks.*").stdout
    plan = make_plan(load("llama-tiny", ["train.freeze=blocks.*"]))
    parameters = [parameter for stage in plan.stages for _, _, parameter in plan.parameters(stage)]
    trained = sum(math.prod(one.shape) for one in parameters if one.trained)
    share = 100 * trained / sum(math.prod(one.shape) for one in parameters)
    assert text.splitlines()[0] == f"llama-tiny · 0.85 M parameters, {format_count(trained)} trained ({share:.2g} %)"


def test_figures_are_the_library_s(here, tmp_path):
    words = ["mesh.dp_shard=2", "mesh.pp=2", "train.num_microbatches=4", "comm.gradients=loco4"]
    done = here("plan", "llama-tiny", *words, "--json", "-")
    found, plan = json.loads(done.stdout), make_plan(load("llama-tiny", words))
    memory, traffic = predict_cuda_memory(plan), predict_traffic(plan)
    total = memory.total()
    reserved = [total, int(1.25 * total)]
    on_cpu = predict_process_memory(plan)
    assert found["memory"] == {**vars(memory), "total": total, "reserved": reserved, "on_cpu": on_cpu}
    assert found["traffic"].pop("total") == traffic.sent().total()
    assert found["traffic"] == {str(entry.purpose): entry.sent.total() for entry in traffic.entries}
    assert found["fingerprint"] == hashes(plan).fingerprint and found["ranks"] == 4
    here("plan", "llama-tiny", *words, "--json", tmp_path / "a.json", "-o", tmp_path / "plan.json")
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads(done.stdout)
    assert from_json((tmp_path / "plan.json").read_text(), where="x") == plan


def test_a_warm_up_that_does_not_end_is_said(here):
    said = here("plan", "llama-tiny", "train.steps=5").stdout
    assert "train.warmup_steps = 40 exceeds train.steps = 5" in " ".join(said.split())
    assert "warmup" not in here("plan", "llama-tiny").stdout


def test_a_plan_in_a_file_is_shown_and_compared(here, tmp_path):
    here("plan", "llama-tiny", "mesh.dp_shard=2", "-o", tmp_path / "plan.json")
    shown = here("plan", tmp_path / "plan.json")
    assert shown.returncode == 0 and "dp_shard 2 = 2 ranks" in shown.stdout
    same = here("plan", tmp_path / "plan.json", "--diff", "llama-tiny mesh.dp_shard=2")
    assert same.stdout == "0 fields differ\n"
    other = here("plan", tmp_path / "plan.json", "--diff", "llama-tiny mesh.dp_shard=2 recompute.policy=full")
    assert other.stdout == 'kinds[block].recompute\n  "none"\n  "full"\n1 field differs\n'


def test_words_that_can_t_be_meant(here, tmp_path):
    path = tmp_path / "plan.json"
    here("plan", "llama-tiny", "-o", path)
    for words, what, where in (
        ([path, "mesh.tp=2"], "mesh.tp=2 together with a plan file", "command line"),
        ([path, "--diff", "foo 'bar"], "No closing quotation", "command line, --diff"),
        ([path, "--diff", "no.json"], "can't read no.json", "command line, --diff"),
    ):
        error = shown_error(here("plan", *words).stderr)
        assert what in error["error"] and error["where"] == where and error["fix"]


def test_a_wrong_plan_is_refused(here, tmp_path):
    path = tmp_path / "plan.json"
    here("plan", "llama-tiny", "mesh.dp_shard=2", "mesh.tp=2", "-o", path)
    tree = json.loads(path.read_text())
    tree["sums"] = []
    path.write_text(json.dumps(tree))
    error = shown_error(here("plan", path).stderr)
    assert "attention_norm.weight" in error["error"] and "tp" in error["error"] and error["fix"]


def test_it_needs_no_torch(no_torch):
    done = meshwright("plan", "llama3-70b", "mesh.dp_shard=8", "mesh.tp=8", env=no_torch)
    assert done.returncode == 0, done.stderr


WINDOWS = ["mesh.cp=4", "train.seq_len=1024", "model.window=64", "model.global_every=2", "model.num_kv_heads=4"]


def test_context_parallelism_is_explained(here):
    """Per kind of block: the method, and what either sends; and how well the work is balanced."""
    lines = here("plan", "llama-tiny", *WINDOWS, "mesh.tp=1").stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("attention over cp"))
    plan = make_plan(load("llama-tiny", WINDOWS))
    slowest = imbalance_of_ranks(plan)
    assert (
        1.0 <= slowest <= 1.05 and lines[at] == f"attention over cp, slowest rank {slowest:.3f} × the mean of its work"
    )
    text = " ".join(line.strip() for line in lines[at + 1 : lines.index("hashes")])
    for kind, method in (("window_block", "ring"), ("block", "heads")):
        assert f"{kind} × 2 · {method}: " in text and explain_method(plan, plan.kind(kind)) in text
    sent = next(line for line in lines if line.startswith("  context "))
    most = max(context_bytes(plan, rank) for rank in range(4))
    assert format_bytes(most) in sent, "the busiest rank"
    chosen = here("plan", "llama-tiny", *WINDOWS, "mesh.cp_method=ring").stdout
    assert "block × 2 · ring, as requested; auto takes heads: " in " ".join(chosen.split())


def test_float8_layers_are_listed(here):
    done = here("plan", "llama-tiny", "float8.recipe=delayed", "float8.modules=*.ffn.*", "float8.keep_first=1")
    assert done.returncode == 0, done.stderr
    assert (
        """
linear layers in float8
  block × 1 · none
  block.2 × 3 · delayed scaling · amax over 16 steps
    casts not fused without train.compile · ffn.gate · ffn.up · ffn.down
"""
        in done.stdout
    )


def test_packed_documents_are_priced_as_one(here, tmp_path):
    words = ["llama-tiny", "mesh.cp=2", "data.packing=documents"]
    done = here("plan", *words, "-o", tmp_path / "plan.json", "--json", tmp_path / "figures.json")
    assert "as if each sample were one document; packed ones send less or more" in done.stdout
    assert "of one document, and never more than packed documents need; heads" in " ".join(done.stdout.split())
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["traffic"]["context"] == context_bytes(make_plan(load(words[0], words[1:])), 0) > 0
    other = here("plan", tmp_path / "plan.json", "--diff", " ".join([*words, "mesh.cp_method=heads"]))
    assert other.stdout == 'kinds[block].attention.method\n  "ring"\n  "heads"\n1 field differs\n'
    assert "one document" not in here("plan", *words[:2]).stdout


WORDS = ("train.optimizer=muon", 'train.parameter_groups=["embedding:lr=0.01","*.wo.weight:weight_decay=0"]')


@pytest.mark.parametrize("layout", [(), ("mesh.pp=2", "train.num_microbatches=2"), ("mesh.dp_shard=2", "mesh.tp=2")])
def test_each_parameter_is_in_one_group(layout: tuple[str, ...]) -> None:
    config = load("llama-tiny", [*WORDS, *layout])
    groups, facts = optimizer_groups(make_plan(config), config.train), model_facts(config)
    assert sorted(name for group in groups for name in group["parameters"]) == sorted(facts.parameter_names())
    assert sum(group["elements"] for group in groups) == facts.num_params()
    found = {(one["optimizer"], one["role"], one["lr"], one["weight_decay"]): len(one["parameters"]) for one in groups}
    lr, decay = config.train.lr, config.train.weight_decay
    assert found == {
        ("muon", "matrix", lr, decay): 6 * 4,
        ("muon", "matrix", lr, 0.0): 4,
        ("adamw", "embedding", 0.01, decay): 1,
        ("adamw", "head", lr, decay): 1,
        ("adamw", "vector", lr, 0.0): 9,
    }


def test_the_page_lists_them() -> None:
    config = load("llama-tiny", WORDS)
    lines = list(page(config.name, make_plan(config), config=config))
    start = lines.index("optimizer groups")
    assert lines[start + 1 : start + 6] == [
        "  matrix · muon · 24 parameters, 721 k · decay 0.1",
        "  matrix · muon · 4 parameters, 65.5 k · no decay",
        "  embedding · adamw · 1 parameter, 32.8 k · decay 0.1 · lr 0.01",
        "  head · adamw · 1 parameter, 32.8 k · decay 0.1",
        "  vector · adamw · 9 parameters, 1.15 k · no decay",
    ]
    assert all(len(line) <= COLUMNS for line in lines)
    from_file = list(page(config.name, make_plan(config)))  # without the configuration
    assert "  matrix · muon · 28 parameters, 786 k" in from_file
