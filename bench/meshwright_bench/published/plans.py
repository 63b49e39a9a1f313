"""Plans of published runs: from a row to a configuration, a plan and a cluster. Doesn't import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from meshwright.config.schema import RunConfig, run_type
from meshwright.models.contract.operators import OperatorKind, Rerun
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load, violations
from meshwright.plan.run_plan import (
    BYTES,
    LayerSpec,
    PlannedKernels,
    PlannedOperator,
    RunPlan,
    SavedBytes,
    Shard,
    Stage,
    Unit,
)
from meshwright_bench.published.programs import PROGRAMS, Program, program_of
from meshwright_bench.published.rows import Row
from meshwright_bench.published.torchtitan import as_torchtitan

GPT = "meshwright_bench.published.gpt:FAMILY"
POLICIES = ("none", "full", "selective")
VOCABULARY = 51200
"""Size of MT-NLG's vocabulary, which its row doesn't state: GPT-2's, padded."""
MOST_STAGES = 8
"""Stages of pipelines that are simulated with all micro-batches. Of longer ones the schedule's period is as long as the
busiest rank's work, to 0.3 %, so that they are simulated with as many micro-batches as stages."""
SYSTEMS = {
    "A100 40GB, 1600": ("A100-40", "roce200"),
    "A100 80GB, 1600": ("A100-80", "roce200"),
    "DGX-A100": ("A100-80", "hdr"),
    "DGX A100": ("A100-80", "hdr"),
    "GCP A3": ("H100", "tcpx"),
    "Grand Teton": ("H100-96", "roce400"),
    "H100 80GB": ("H100", "roce400"),
    "H200": ("H200", "ndr"),
    "4x8 V100": ("V100-16", "edr-eighth"),
}
"""Preset and link between nodes, by the beginning of a system's name. LF doesn't name the network of its H100s."""


@dataclass(frozen=True)
class Made:
    """A row with one plan of it."""

    row: Row
    program: str
    cluster: str
    link: str
    config: RunConfig
    plan: RunPlan
    repeats: int = 1
    """Micro-batches, each with its own reduction, of which the plan has one."""
    further: int = 0
    """Micro-batches besides the plan's, each of which takes as long as the busiest rank of a long pipeline."""


def plans_of(row: Row) -> Iterator[Made]:
    """Yield the plans of a row: one, or all that differ in what it doesn't state."""
    name = program_of(row)
    program = PROGRAMS[name]
    system = next(one for start, one in SYSTEMS.items() if row.text["system"].startswith(start))
    for samples, chunks in product(_microbatch_sizes(row), _chunks(row)):
        config, repeats, further = _config(row, program, samples=samples, chunks=chunks), 1, 0
        found = next(violations(config, None), None)
        if found is not None:
            raise ValueError(f"{row.id}: {found}")
        if program.reduces_each:
            config, repeats = _with_microbatches(config, 1)
        elif config.mesh.pp > MOST_STAGES:
            microbatches = config.train.num_microbatches
            config, further = _with_microbatches(config, config.mesh.pp)[0], microbatches - config.mesh.pp
        plan = _as_program(make_plan(config, nodes=min(8, row.size("gpus"))), program, row)
        yield Made(row, name, *system, config, plan, repeats, further)


def _with_microbatches(config: RunConfig, number: int) -> tuple[RunConfig, int]:
    """Return a configuration with fewer micro-batches of the same size, and how many times as many there were."""
    train = config.train
    batch = train.global_batch * number // train.num_microbatches
    keys = {"train.num_microbatches": number, "train.global_batch": batch}
    return config.with_keys(keys), train.num_microbatches // number


def _microbatch_sizes(row: Row) -> list[int]:
    """Return the samples of a micro-batch, or all plausible numbers of them if a row doesn't state it."""
    stated = row.number("mbs")
    if stated is not None:
        return [stated]
    if row.source == "TT":  # as many micro-batches as stages, by default
        return [row.size("gbs") // row.size("fsdp") // row.size("pp")]
    each = row.size("gbs") // _replicas(row)
    return [1] if row.source == "MTNLG" else [size for size in (1, 2, 4, 8) if each % size == 0]


def _chunks(row: Row) -> list[int]:
    """Return the stages per rank, or all plausible numbers of them if a row doesn't state it."""
    stated, pp = row.number("vp"), row.size("pp")
    if stated is not None or pp == 1 or row.source != "NAR":
        return [stated or 1]
    return [chunks for chunks in (1, 2, 3, 4, 5, 6) if (row.size("layers") // pp) % chunks == 0]


def _split(layers: int, stages: int) -> list[int]:
    """Return the layers of each stage: as many, as Megatron and OneFlow demand; torchtitan gives the stages after the
    first those that are left."""
    each, left = divmod(layers, stages)
    return [each + (0 < stage <= left) for stage in range(stages)]


def _replicas(row: Row) -> int:
    """Return the size of data parallelism, of both kinds."""
    return row.size("gpus") // (row.size("tp") * row.size("pp") * row.size("cp"))


def _config(row: Row, program: Program, *, samples: int, chunks: int) -> RunConfig:
    replicas = _replicas(row)
    shards = (row.number("fsdp") or replicas) if program.sharded else 1
    microbatches = row.size("gbs") // (replicas * samples)
    mesh = {
        "pp": row.size("pp"), "tp": row.size("tp"), "cp": row.size("cp"), "dp_shard": shards,
        "dp_replicate": replicas // shards, "sequence_parallel": row.text["sp"] == "1",
        "cp_method": "ring" if row.size("cp") > 1 else "auto", "reshard_after_forward": row.size("pp") == 1,
    }  # fmt: skip
    values: dict[str, Any] = {
        "model": _model(row, program),
        "mesh": mesh,
        "train": {
            "seq_len": row.size("seq_len"), "global_batch": row.size("gbs"), "num_microbatches": microbatches,
            "precision": "bfloat16", "compile": program.compiled, "loss_chunk": 0,
        },
        "recompute": {"policy": next(p for p in POLICIES if row.text["recompute"].startswith(p))},
    }  # fmt: skip
    if row.text["dtype"] == "fp8" and program.compiled:
        values["float8"] = {"recipe": "current"}
    stages = row.size("pp") * chunks
    if stages > 1:
        values["pipeline"] = {"chunks": chunks, "layers_per_stage": _split(row.size("layers"), stages)}
    return run_type(values["model"]["kind"]).model_validate(values)


def _model(row: Row, program: Program) -> dict[str, Any]:
    sizes = {
        "num_layers": row.size("layers"), "dim": row.size("hidden"), "num_heads": row.size("heads"),
        "ffn_dim": row.size("ffn_hidden"), "vocab_size": row.number("vocab") or VOCABULARY,
    }  # fmt: skip
    if sizes["ffn_dim"] != 4 * sizes["dim"]:  # with a gate, RMS norms and rotary positions
        return {"kind": _gated_family(), "num_kv_heads": row.size("kv_heads"), **sizes}
    return {"kind": GPT, "scores": program.scores, "bias": program.bias, **sizes}


@cache
def _gated_family() -> str:
    return load("llama-tiny").model.kind


def _as_program(plan: RunPlan, program: Program, row: Row) -> RunPlan:
    """Return a plan with what a program does otherwise than Meshwright."""
    # "PURE" reduces in 16 bits, too.
    reduce = "bfloat16" if "PURE" in row.text["notes"] else program.reduce
    rate = {"fp8": "float8", "fp16": "float16"}.get(row.text["dtype"], "bfloat16")
    tp = plan.mesh.view("tp")

    def of_kind(kind: LayerSpec) -> LayerSpec:
        operators = tuple(_as_run(one, program, rate, is_block=kind.is_block) for one in kind.operators)
        units = tuple(replace(unit, reduce=reduce) for unit in kind.units) if not program.reduces_whole else ()
        return replace(
            kind,
            units=units,
            operators=operators,
            saved=_saved(kind, operators, program),
            output_elements=int(program.live_logits * kind.output_elements),
        )

    kinds = {kind.name: of_kind(kind) for kind in plan.kinds}
    if program.reruns:
        kinds = {name: as_torchtitan(kind, program, plan.mesh) for name, kind in kinds.items()}
    stages = tuple(replace(stage, root=_root(plan, stage, reduce, program.reduces_whole)) for stage in plan.stages)
    plan = replace(plan, kinds=tuple(kinds.values()), stages=stages)
    # Each tp rank sends its part of what it has whole, and gathers it (Narayanan et al. 2021, section 4.1).
    return replace(plan, edge=replace(plan.edge, shards=(Shard(0, tp),))) if program.scatters and tp else plan


def _root(plan: RunPlan, stage: Stage, reduce: str, whole: bool) -> Unit:
    """Return the root unit, which has all of a stage's parameters if they are reduced as a whole."""
    if not whole:
        return replace(stage.root, reduce=reduce)
    held = dict.fromkeys(f"{kind.name}/{one.name}" for kind, _ in plan.held(stage) for one in kind.parameters)
    return replace(stage.root, reduce=reduce, parameters=tuple(held))


def _saved(kind: LayerSpec, operators: tuple[PlannedOperator, ...], program: Program) -> SavedBytes | None:
    """Return what a kind saves. Where a program runs products again, their results aren't kept, nor are those of
    gathers, as Meshwright's selective recomputation does."""
    if kind.saved is None or not program.reruns:
        return kind.saved
    again = [one for one in operators if one.kind is OperatorKind.PRODUCT and one.rerun is Rerun.ALWAYS]
    less = sum(one.rows * one.columns for one in again)
    less += sum(one.forward * one.elements for one in kind.collectives if one.op == "all_gather")
    return replace(kind.saved, selective=kind.saved.selective - less * BYTES["bfloat16"])


def _as_run(one: PlannedOperator, program: Program, rate: str, *, is_block: bool) -> PlannedOperator:
    """Return an operator with the rate of a row's dtype; plans have no float16, which takes as many bytes as bfloat16,
    and in float8 are only the products of blocks."""
    is_product = one.kind is OperatorKind.PRODUCT
    if one.rate == "bfloat16" and (rate == "float16" or (is_block and is_product)):
        one = replace(one, rate=rate)
        one = _with_casts(one) if rate == "float8" else one
    if one.name not in program.reruns and not (program.reruns and one.rate == "float8"):
        return one
    # torchtitan keeps the results of PyTorch's product, which isn't the one in float8; nothing needs a block's last.
    return replace(one, rerun=Rerun.NEVER if one.name == "ffn.down" else Rerun.ALWAYS)


def _with_casts(one: PlannedOperator) -> PlannedOperator:
    """Return a product with Transformer Engine's kernels that cast its operands to float8: they read two bytes and
    write one, and the backward also transposes, as products in float8 take operands in one order only."""
    inputs, outputs = one.rows * one.inner, one.rows * one.columns
    weight = one.inner * one.columns
    ahead = PlannedKernels(2, 3 * inputs, 3 * weight)
    back = PlannedKernels(3, 2 * inputs + 5 * outputs, 2 * weight)
    return replace(one, forward=ahead, backward=back)
