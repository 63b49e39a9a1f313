"""Plans round-trip through JSON, malformed files are rejected, hashes cover the relevant fields, and differences are
named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.errors import ConfigError, MeshwrightError, ScheduleError
from meshwright.plan.compare import differences, hashes
from meshwright.plan.serialize import REGENERATE_FIX, from_json, to_json
from tests.plan.plans import DIT, LARGEST, LAYOUTS, PLAIN, TIED, fake, plan_of, with_parameter, with_root, with_unit


@pytest.mark.parametrize("words", LAYOUTS)
def test_plans_are_read_back(words):
    plan = plan_of(words)
    text = to_json(plan)
    assert from_json(text, where="plan.json") == plan
    assert to_json(from_json(text, where="plan.json")) == text
    assert hashes(from_json(text, where="plan.json")) == hashes(plan)


def test_other_values_of_the_same_fields():
    plan = fake(tp=2, dp_shard=2)
    plan = with_unit(plan, "block", freed=2)
    plan = replace(plan, mesh=replace(plan.mesh, nodes=(0, 0, 0, 1)), loss=replace(plan.loss, units=7))
    assert from_json(to_json(plan), where="plan.json") == plan


def test_plans_without_libraries_of_a_family_are_as_before_there_were_any():
    plan = plan_of(PLAIN)
    assert "libraries" not in to_json(plan) and not plan.libraries
    other = replace(plan, libraries=7)
    assert from_json(to_json(other), where="plan.json") == other
    assert hashes(other) != hashes(plan)


def test_the_largest_is_small():
    text = to_json(plan_of(LARGEST))
    assert len(text.encode()) < 100_000
    assert max(map(len, text.splitlines())) < 4_000
    assert text.count("\n") > 100


def changed(change, words=TIED):
    """Return a plan's text with a change in its JSON."""
    tree = json.loads(to_json(plan_of(words)))
    change(tree)
    return json.dumps(tree)


def put(*path, value):
    def change(tree):
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return change


def drop(*path):
    def change(tree):
        for key in path[:-1]:
            tree = tree[key]
        del tree[path[-1]]

    return change


REFUSED = {
    "another format": (put("format", value=1), "a plan of format 1", "format"),
    "a format of another type": (put("format", value=True), "a plan of format true", "format"),
    "no format": (drop("format"), "not a plan", "plan.json"),
    "unknown field": (put("capture", value={}), "unknown field capture", "capture"),
    "unknown field inside": (put("kinds", 1, "units", 0, "offloaded", value=True), "unknown field offloaded",
        "kinds[1].units[0].offloaded"),
    "missing field": (drop("kinds", 1, "units", 0, "freed"), "missing field freed", "kinds[1].units[0].freed"),
    "an int as a word": (put("batch", "samples", value="1"), 'samples = "1"', "batch.samples"),
    "a float": (put("batch", "samples", value=1.0), "samples = 1.0", "batch.samples"),
    "a bool as an int": (put("stages", 0, "pp_rank", value=True), "pp_rank = true", "stages[0].pp_rank"),
    "an int as a bool": (put("sequence_parallel", value=1), "sequence_parallel = 1", "sequence_parallel"),
    "null": (put("stages", 0, "root", value=None), "root = null", "stages[0].root"),
    "a union": (put("mesh", "nodes", value="8"), 'nodes = "8"', "mesh.nodes"),
    "a pair of three": (put("stages", 1, "layers", value=[0, 1, 2]), "layers = [0, 1, 2]", "stages[1].layers"),
    "an object as a list": (put("kinds", value={}), "kinds = {}", "kinds"),
    "inside a list": (put("stages", 0, "kinds", 1, value=3), "kinds[1] = 3", "stages[0].kinds[1]"),
    "a word that is none of them": (put("sums", 0, "by", value="nccl"), 'by = "nccl"', "sums[0].by"),
    "a schedule's field": (drop("schedule", "kind"), "missing field kind", "schedule.kind"),
    "a schedule's rows": (put("schedule", "actions", value="0F0"), 'actions = "0F0"', "schedule.actions"),
}  # fmt: skip


@pytest.mark.parametrize("change, what, where", REFUSED.values(), ids=REFUSED)
def test_other_values_are_refused(change, what, where):
    with pytest.raises(ConfigError) as error:
        from_json(changed(change), where="plan.json")
    assert what in error.value.what
    assert error.value.where in (f"plan.json, {where}", where)
    assert error.value.rule
    assert error.value.fix.startswith(REGENERATE_FIX)


def test_what_is_no_json_is_refused():
    for text in ("", "[]", "{", "3", '{"format": 1, "format": 1}', "[" * 100_000):
        with pytest.raises(ConfigError, match="not a plan"):
            from_json(text, where="plan.json")


def test_an_action_that_cannot_be_read():
    def change(tree):
        first, _, rest = tree["schedule"]["actions"][1].partition(" ")
        tree["schedule"]["actions"][1] = f"{first} 1X0 {rest}"

    with pytest.raises(ScheduleError) as error:
        from_json(changed(change), where="plan.json")
    assert error.value.where == "plan.json, schedule.actions[1], action 2"
    assert error.value.fix


@pytest.mark.slow
def test_nothing_else_escapes():
    """Any value in a field is either read as the same plan, or rejected with its path."""
    tree = json.loads(to_json(plan_of(PLAIN)))

    def paths(value, path=()):
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in items:
            yield from paths(one, (*path, key))

    for path in list(paths(tree))[1::31]:
        for value in (None, True, -1, 0.5, "x", [], {}, [[]], [None]):
            try:
                from_json(changed(put(*path, value=value), PLAIN), where="plan.json")
            except MeshwrightError as error:
                assert error.where.startswith("plan.json") and error.fix, path


SAME_MODEL = (
    "mesh.pp=2 train.num_microbatches=2",
    "mesh.pp=2 pipeline.schedule=zb-v train.num_microbatches=4",
    "mesh.tp=2 mesh.dp_shard=2",
    "train.precision=bfloat16 train.freeze=['blocks.*']",
    "recompute.policy=full comm.gradients=int4 mesh.dp_replicate=2",
)


@pytest.mark.parametrize("words", SAME_MODEL)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_one_model_on_many_layouts(words, tied):
    alone, other = (hashes(plan_of(f"llama-tiny model.tie_embeddings={tied} {more}".strip())) for more in ("", words))
    assert alone.model == other.model
    assert alone.layout != other.layout or "recompute" not in words
    assert alone.fingerprint != other.fingerprint


def test_other_models():
    models = ["", "model.num_layers=5", "model.ffn_dim=64", "model.tie_embeddings=true", "model.vocab_size=300"]
    found = {hashes(plan_of(f"llama-tiny {words}".strip())).model for words in models}
    assert len(found) == len(models)
    plan = fake()
    block = plan.kind("block")
    unsaved = replace(plan, kinds=tuple(replace(k, buffers=k.buffers[:1]) for k in plan.kinds))
    without = replace(plan, kinds=tuple(replace(k, buffers=()) for k in plan.kinds))
    assert block.buffers[0].saved and not block.buffers[1].saved
    assert hashes(plan).model == hashes(unsaved).model != hashes(without).model


def test_error_feedback_belongs_to_a_layout():
    base = "llama-tiny mesh.dp_shard=2 mesh.pp=2 comm.gradients=loco4 train.num_microbatches="
    same = (f"{base}4", f"{base}8", f"{base}4 pipeline.schedule=f-then-b", f"{base}4 recompute.policy=full")
    assert len({hashes(plan_of(words)).layout for words in same}) == 1
    assert len({hashes(plan_of(words)).fingerprint for words in same}) == len(same)
    others = ("comm.ranks_per_node=2", "comm.gradients=loco2", "train.freeze=['norm.weight']", "mesh.tp=2",
              "pipeline.layers_per_stage=[1,3]", "pipeline.schedule=zb-v")  # fmt: skip
    assert len({hashes(plan_of(f"{base}4 {words}")).layout for words in ("", *others) if words} | {
        hashes(plan_of(f"{base}4")).layout}) == len(others) + 1  # fmt: skip


def test_the_same_nodes_written_in_two_ways():
    plan = plan_of(PLAIN)
    by_rank = replace(plan, mesh=replace(plan.mesh, nodes=(0, 0, 0, 0)))
    assert hashes(plan).layout == hashes(by_rank).layout
    assert hashes(plan).fingerprint != hashes(by_rank).fingerprint


def test_differences_are_named():
    plan = plan_of(TIED)
    assert differences(plan, plan) == []
    assert [str(d) for d in differences(plan, with_unit(plan, "block", freed=False))] == [
        "kinds[block].units[block].freed: true | false"
    ]
    assert [str(d) for d in differences(plan, with_parameter(plan, "block/ffn_norm.weight", work=("tp",)))] == [
        'kinds[block].parameters[ffn_norm.weight].work: ["dp_replicate","dp_shard","tp"] | ["tp"]'
    ]
    assert [d.path for d in differences(plan, with_root(plan, 1, weights="exact"))] == ["stages[1].root.weights"]


def test_differences_of_runs():
    found = {
        d.path: (d.first, d.second)
        for d in differences(plan_of(PLAIN), plan_of("llama-tiny mesh.tp=4 model.num_kv_heads=4"))
    }
    assert found["mesh.atoms[tp]"] == ("2", "4")
    assert found["sequence_parallel"] == ("false", "true")
    assert found["kinds[block].units[block].sharded"] == ('["dp_shard"]', "[]")
    assert next(iter(found)).startswith("mesh.")
    assert all(len(text) <= 60 for pair in found.values() for text in pair)


def test_differences_of_schedules_and_kinds():
    base = "llama-tiny mesh.pp=2 train.num_microbatches=4"
    one, two = plan_of(base), plan_of(f"{base} pipeline.schedule=f-then-b")
    found = [d for d in differences(one, two) if d.path.startswith("schedule.actions")]
    assert len(found) == 2
    rank, position = 0, int(found[0].path.split("[")[-1][:-1])
    rows = [list(map(str, plan.schedule.actions[rank])) for plan in (one, two)]
    assert (found[0].first, found[0].second) == (rows[0][position], rows[1][position])
    assert rows[0][:position] == rows[1][:position]
    frozen = differences(plan_of("llama-tiny"), plan_of("llama-tiny train.freeze=['blocks.1.*']"))
    assert "kinds[block.2]" in [d.path for d in frozen if d.first == "missing"]
    assert {d.path for d in differences(plan_of(DIT), plan_of("dit-digits"))} >= {"mesh.atoms[pp]", "stages[1]"}
    plan = plan_of(PLAIN)
    reordered = replace(plan, kinds=plan.kinds[::-1])
    assert [d.path for d in differences(plan, reordered)] == ["kinds, order"]
