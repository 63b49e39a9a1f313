"""Tests of `bench plan`: which published runs count, their plans, and that a fault of the prediction moves errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cluster.presets import cluster_preset, preset_on
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.memory import stage_bytes
from meshwright.plan.run_plan import BYTES
from meshwright.plan.time.communication import Communication
from meshwright_bench.published import accuracy, fit, plans, rows
from meshwright_bench.published.accuracy import fits, predict_row
from meshwright_bench.published.benchmark import bench_plan, figures, notes
from meshwright_bench.published.plans import plans_of
from meshwright_bench.published.programs import ALIKE, PROGRAMS, fitted, program_of
from tests.bench.tiny import by_name

QUICK = ("LF-104", "LF-154", "TT-020", "OF-018", "KOR-002", "MT-001")
"""Rows of several sources and devices whose schedules are short."""
BY_ID = {row.id: row for row in rows.read_rows()}


def test_rows_that_state_recomputation_and_a_time_count():
    counting, reasons = rows.counting_rows(), dict(rows.reasons_out())
    assert (len(rows.read_rows()), len(counting), sum(reasons.values())) == (382, 202, 180)
    assert set(QUICK) <= {row.id for row in counting}
    assert all(row.seconds and row.text["recompute"] not in rows.UNSTATED for row in counting)


def test_a_third_of_the_rows_is_held_out_and_never_fitted():
    to_fit = rows.rows_to_fit()
    held = [row for row in rows.counting_rows() if row.is_held_out]
    assert (len(to_fit), len(held)) == (132, 70)
    assert not {row.id for row in to_fit} & {row.id for row in held}
    assert BY_ID["TT-001"].is_held_out and not BY_ID["TT-004"].is_held_out


@pytest.mark.parametrize(("row", "seconds"), [("KOR-001", 1.42), ("TT-004", 2.923), ("NAR-003", 3.696)])
def test_a_time_is_stated_or_follows_from_tokens_or_operations(row, seconds):
    assert BY_ID[row].seconds == pytest.approx(seconds, rel=1e-3)


def test_a_gpt_has_the_parameters_and_operations_that_its_paper_counts():
    """Narayanan et al. 2021, equations 2 and 3, without recomputation and but for the bias of the last norm."""
    made = next(plans_of(BY_ID["NAR-002"]))
    layers, hidden, vocabulary, tokens = 30, 3072, 51200, 2048
    expected = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + tokens) / (12 * layers * hidden))
    tp = made.plan.mesh.size("tp")
    held = [one for _, _, one in made.plan.parameters(made.plan.stages[0])]
    found = sum(made.plan.elements(one) * (tp if one.used else 1) for one in held)
    assert found == pytest.approx(expected, abs=4 * hidden)
    operations = 24 * tokens * layers * hidden**2 * (1 + tokens / (6 * hidden) + vocabulary / (12 * layers * hidden))
    kinds = {kind.name: kind for kind in made.plan.kinds}
    per_sample = layers * sum(one.flops for one in kinds["block"].operators)
    per_sample += sum(one.flops for one in kinds["head"].operators)
    assert tp * per_sample == pytest.approx(operations)


def test_scores_are_recomputed_under_selective_recomputation_only():
    """Korthikanti et al. 2022, section 5: it keeps 34 bytes per token, layer and width, and all else the scores'."""
    made = next(plans_of(BY_ID["KOR-002"]))
    block = next(kind for kind in made.plan.kinds if kind.is_block)
    tokens, hidden, heads, tp = 2048, 6144, 64, 8
    assert block.saved.selective * tp == pytest.approx(34 * tokens * hidden, rel=0.01)
    gathered = 2 * 2 * tokens * hidden * (tp - 1)  # inputs, which Megatron gathers again
    assert (block.saved.none - block.saved.selective) * tp == pytest.approx(5 * heads * tokens**2 + gathered, rel=0.01)
    assert {one.name for one in block.operators if one.rerun.value == "always"} == {"attention", "attention.softmax"}


def test_programs_change_plans():
    """torchtitan runs every second product again; Megatron sums all gradients at once, and llm-foundry in 16 bits."""
    block = next(kind for kind in next(plans_of(BY_ID["TT-026"])).plan.kinds if kind.is_block)
    again = {one.name for one in block.operators if one.rerun.value == "always" and one.rows}
    assert again == {"attention.wk", "attention.wo", "ffn.up"}
    plan = next(plans_of(BY_ID["OF-006"])).plan
    assert not any(kind.units for kind in plan.kinds)
    assert len(plan.stages[0].root.parameters) == sum(len(kind.parameters) for kind in plan.kinds)
    pure = next(plans_of(BY_ID["LF-154"]))
    assert {unit.reduce for kind in pure.plan.kinds for unit in kind.units} == {"bfloat16"} and pure.repeats == 1


def block_of(row):
    return next(kind for kind in next(plans_of(BY_ID[row])).plan.kinds if kind.is_block)


def test_torchtitan_gathers_float8_if_it_is_scaled_by_tensor():
    """Two runs that differ in their scales only: gathers have half the bytes, and casts are of a rank's shards."""
    by_tensor, by_row = block_of("TT-011"), block_of("TT-023")
    tokens, dim, tp = 8192, 8192, 8
    sizes = [{one.elements for one in block.collectives if one.op == "all_gather"} for block in (by_tensor, by_row)]
    assert sizes == [{tokens * dim // 2}, {tokens * dim}]
    scales = [[one for one in block.collectives if one.elements == 1] for block in (by_tensor, by_row)]
    assert [(one.forward, one.backward, one.recomputed) for one in scales[0]] == [(11, 7, 11)] and not scales[1]
    casts = [
        {one.name: one for one in block.operators if one.fused_forward and not one.rows}
        for block in (by_tensor, by_row)
    ]
    ahead = [one["ffn.gate"].fused_forward.num_bytes for one in casts]
    assert ahead == [5 * tokens * dim // tp, 5 * tokens * dim]
    assert [one["ffn.up"].fused_forward.num_bytes for one in casts] == [0, 0]  # shares the cast of its input
    back = [one["ffn.down"].fused_backward.num_bytes for one in casts]
    inner = 28672 // tp
    assert back == [5 * tokens * dim // tp + 2 * tokens * dim, (6 + 4) * tokens * dim + 5 * tokens * inner]


def test_fsdp_casts_shards_of_weights_and_gathers_are_run_again_under_selective_recomputation():
    weights = {one.name: one for one in block_of("TT-031").operators if one.fused_forward and not one.rows}
    assert weights["ffn.gate"].fused_forward.bytes_once == 0
    assert weights["ffn.gate"].fused_backward.bytes_once == 2 * 4096 * 14336
    found = {(one.op, one.forward, one.backward) for one in block_of("TT-026").collectives}
    # Asynchronous tensor parallelism doesn't keep the result of attention's reduce-scatter, either.
    assert found == {
        ("all_gather", 1, 1), ("all_gather", 0, 1), ("reduce_scatter", 0, 1), ("reduce_scatter", 1, 1),
        ("reduce_scatter", 1, 0),
    }  # fmt: skip


def test_casts_between_gathers_and_products_keep_gathers_from_being_hidden():
    """Scaled by row, only reduce-scatters run beside products, which are half of the collectives."""
    hidden = [PROGRAMS[name].stack.hidden_tensor for name in ("torchtitan-async", "torchtitan-async-rowwise")]
    assert hidden[1] == pytest.approx(hidden[0] / 2) and hidden[0] == fitted()["async-tp/hidden_tensor"]


@pytest.mark.parametrize(
    ("row", "layers"), [("OF-025", [4] * 4), ("TT-015", [15, *[16] * 6, 15]), ("NAR-005", [24, 24])]
)
def test_programs_split_layers_evenly(row, layers):
    assert [len(stage.kinds) for stage in next(plans_of(BY_ID[row])).plan.stages] == layers


def test_oneflow_has_buffers_for_micro_batches_between_forward_and_backward():
    """Twice as many copies of the blocks' inputs as there are stages, beside the inputs themselves (OneFlow,
    pipeline_buffer_pass.cpp); a run without a pipeline has none."""
    made = next(plans_of(BY_ID["OF-031"]))
    tokens, dim, layers, stages, masks = 8 * 2048, 2304, 12, 2, 8 * 2048 * 2304
    sizes = stage_bytes(made.plan, made.plan.stages[0], on_cuda=True)
    assert sizes.saved == layers * 2 * tokens * dim + masks + 8 * tokens
    parameters = accuracy._parameters(made.plan, 0)
    table = 2 * 51200 * dim // 8
    copies = (1 + 2 * stages) * sizes.saved + 3 * (2 * tokens * dim + table) + 2 * sizes.running + 4 * parameters
    assert accuracy.predict_memory(made) == int(copies + 18 * parameters + PROGRAMS["oneflow-hybrid"].context_bytes)
    assert accuracy.predict_memory(made) == pytest.approx(BY_ID["OF-031"].memory_bytes, rel=0.1)
    alone = next(plans_of(BY_ID["OF-005"]))
    assert accuracy.predict_memory(alone) == pytest.approx(BY_ID["OF-005"].memory_bytes, rel=0.1)


def test_weights_that_a_stage_keeps_gathered_are_in_float8():
    made = next(plans_of(BY_ID["TT-015"]))
    block = block_of("TT-015")
    kept = min(len(stage.kinds) for stage in made.plan.stages) * sum(
        made.plan.elements(one) for one in block.parameters
    )
    allocated = predict_cuda_memory(made.plan).total() - kept
    assert accuracy.predict_memory(made) == int(PROGRAMS["torchtitan"].reserved * allocated)


@pytest.mark.slow
def test_long_pipelines_take_the_busiest_ranks_time_per_further_micro_batch(monkeypatch):
    """As the whole schedule simulated does, to 0.3 %."""
    row = BY_ID["MTNLG-003"]
    short = predict_row(row)
    assert (short.made.plan.batch.num_microbatches, short.made.further) == (35, 125)
    monkeypatch.setattr(plans, "MOST_STAGES", 35)
    assert short.seconds == pytest.approx(predict_row(row).seconds, rel=0.003)


def test_a_program_that_reduces_each_micro_batch_updates_once():
    made = next(plans_of(BY_ID["LF-104"]))
    cluster = preset_on(made.cluster, made.link)
    once, parts = accuracy.predict(replace(made, repeats=1), cluster, PROGRAMS[made.program].stack)
    twice, _ = accuracy.predict(replace(made, repeats=2), cluster, PROGRAMS[made.program].stack)
    assert made.repeats == 2
    assert twice == pytest.approx(2 * once - parts["optimizer"] - parts["step"])


def test_what_is_fitted_is_what_presets_have():
    """And every parameter belongs to a device, a link or a program."""
    owners = {path.partition("/")[0] for path in fitted()}
    links = {"tcpx", "nvlink2", "edr-eighth"}
    programs = set(ALIKE) | set(PROGRAMS)
    assert owners <= set(fit.GROUPS) | links | programs
    assert set(fitted()) == {one.path for one in fit.PARAMETERS}
    for preset, link in {(made.cluster, made.link) for one in QUICK for made in plans_of(BY_ID[one])}:
        cluster = preset_on(preset, link)
        assert fit.apply_to_cluster(cluster, preset, link, fitted()).performance == cluster.performance


def test_quick_rows_are_predicted():
    """A quick guard of the table that `bench plan` prints: these rows are no better than others."""
    found = [predict_row(BY_ID[one]) for one in QUICK]
    assert all(abs(one.error) < 0.15 for one in found), {one.row.id: one.error for one in found}
    assert all(fits(one.made, one.memory_bytes) for one in found)
    assert by_name(figures(found))["all.time.median"].is_met


def test_doubled_communication_moves_the_error(monkeypatch):
    """The seeded fault: a row whose step is communication for a quarter is predicted that much slower."""
    row = BY_ID["OF-018"]
    right = predict_row(row)
    real = Communication.us
    monkeypatch.setattr(Communication, "us", lambda self, *args: 2 * real(self, *args))
    wrong = predict_row(row)
    sent = sum(right.parts[name] for name in ("tensor", "replicas"))
    assert wrong.seconds == pytest.approx(right.seconds + sent, rel=0.01)
    assert abs(wrong.error - right.error) > 0.05


def test_fits_say_whether_a_run_is_called_impossible():
    one = predict_row(BY_ID["LF-104"])
    capacity = cluster_preset("A100-80").device.memory_bytes
    assert fits(one.made, capacity) and not fits(one.made, capacity + 1)
    assert one.memory_bytes == predict_cuda_memory(one.made.plan).total()
    assert BYTES["float16"] == BYTES["bfloat16"]  # plans of float16 runs are those of bfloat16


def test_the_worst_rows_have_a_reason():
    found = [predict_row(BY_ID[one]) for one in QUICK]
    lines = list(notes(found))
    assert sum(one.startswith("  out:") for one in lines) == len(dict(rows.reasons_out()))
    assert [line for line in lines if line.startswith(f"  {max(found, key=lambda one: abs(one.error)).row.id} ")]


def test_a_fit_finds_parameters_that_times_were_made_with(monkeypatch):
    """And sees no row that is held out."""
    chosen = [row for row in rows.rows_to_fit() if row.id in ("LF-104", "LF-154", "LF-096")]
    problem = fit.Problem(chosen)
    meant = {"A100/memory_efficiency": 0.6, "llm-foundry/slower_attention": 2.0}
    problem.choose(meant)
    off = dict(zip(problem.rows, problem.errors(meant), strict=True))
    real = fit.Problem._error
    monkeypatch.setattr(fit.Problem, "_error", lambda self, row, values: real(self, row, values) - off[row])
    start = [fit.Parameter(path, value, prior=5.0) for path, value in zip(meant, (0.8, 1.6), strict=True)]
    assert fit.fit(problem, start) == {path: pytest.approx(value, rel=0.05) for path, value in meant.items()}
    assert all(not row.is_held_out for row in problem.rows)


@pytest.mark.slow
def test_published_runs_are_predicted_as_docs_say():
    """All rows: what is met stays met."""
    from meshwright_bench.benchmarks import Options

    found = by_name(bench_plan(Options(), lambda text: None).figures)
    met = (
        "TT.mean",
        "impossible",
        *(f"{name}.memory.{one}" for name in ("all", "held_out") for one in ("median", "p90")),
    )
    for name in ("all.time.median", "all.time.p90", "fitted.time.median", "held_out.time.median", *met):
        assert found[name].is_met, f"{name} is {found[name].value}"
    assert found["rows"].value == len(rows.counting_rows())


def test_programs_of_all_rows_are_known():
    assert {program_of(row) for row in rows.counting_rows()} <= set(PROGRAMS)
