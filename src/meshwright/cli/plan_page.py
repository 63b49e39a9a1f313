"""Format a plan as a page of at most 80 columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.cli.wrapping import wrapped
from meshwright.cluster.hardware import Cluster
from meshwright.cluster.presets import gpus_by_memory
from meshwright.config.resolve import group_settings
from meshwright.config.schema import CaptureConfig, RunConfig, TrainConfig
from meshwright.features.registry import plan_features
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.pipeline.simulate import Costs, simulate
from meshwright.plan.compare import hashes
from meshwright.plan.cuda_memory import WORKSPACES, predict_cuda_memory, reserved_bytes
from meshwright.plan.memory import predict_process_memory
from meshwright.plan.run_plan import BYTES, EXPERTS, Atoms, Collective, RunPlan, Unit
from meshwright.plan.stage_sizes import num_params, replicated_note
from meshwright.plan.traffic import Purpose, Traffic, predict_traffic
from meshwright.units import counted, format_bytes, format_count, format_time

COLUMNS = 80
RECOMPUTED = {RecomputePolicy.FULL: "recomputed", RecomputePolicy.SELECTIVE: "selectively recomputed"}
SHOWN = 0.005
"""Share of a step from which on a part is shown."""
MAX_ROWS = 8
"""Maximum number of stages to list one by one; beyond it, stages equal to the previous one are folded."""


def page(
    name: str, plan: RunPlan, *, config: RunConfig | None = None, cluster: Cluster | None = None,
    timed: RunPlan | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of the page; headings are not indented. A plan from a file has no configuration. With a cluster,
    the page has the time of a step on it; `timed` is the plan under a load."""
    yield f"{name} · {format_count(num_params(plan))} parameters{_trained(plan)}"
    yield from _batch(plan)
    yield from (f"  {line}" for line in replicated_note(plan))
    if cluster is not None:
        yield from _time(timed or plan, cluster, captured=is_captured(config))
    memory = predict_cuda_memory(plan)
    yield f"maximum memory of a rank  {format_bytes(memory.total())}"
    yield from _items(*(f"{kind} {format_bytes(size)}" for kind, size in vars(memory).items() if size))
    low, high = map(format_bytes, reserved_bytes(memory.total()))
    yield f"  for which PyTorch's allocator reserves {low} to {high}"
    yield devices(memory.total())
    yield f"  on CPUs, with libraries and the allocator's holes, {format_bytes(predict_process_memory(plan))}"
    if config is not None and config.capture.scope:
        yield from _capture(plan, config.capture)
    yield from _traffic(plan, predict_traffic(plan))
    yield "stages" if len(plan.stages) > 1 else "stage"
    yield from _stages(plan)
    yield "FSDP units"
    yield from _units(plan)
    yield "optimizer groups"
    yield from _groups(plan, config.train if config is not None else None)
    for feature in plan_features(plan=plan):
        heading, *rows = feature.page(plan)
        yield from heading
        for row in rows:
            yield from _items(*row)
    if collectives := list(_collectives(plan)):
        yield "operator collectives, per micro-batch"
        yield from collectives
    if plan.mesh.view("cp"):
        yield from _attention(plan)
    if plan.sums or plan.shared:
        yield "sums after the last backward"
        yield from _sums(plan)
    found = hashes(plan)
    yield "hashes"
    yield f"  model {found.model} · layout {found.layout} · plan {found.fingerprint}"


def is_captured(config: RunConfig | None) -> bool:
    """Return whether blocks are replayed as CUDA graphs."""
    return config is not None and config.capture.scope == ("layer",)


def _time(plan: RunPlan, cluster: Cluster, *, captured: bool) -> Iterator[str]:
    from meshwright.plan.time.load import describe_load  # only with a cluster
    from meshwright.plan.time.step_time import predict_step

    found = predict_step(plan, cluster, captured=captured)
    low, total, high = map(format_time, (found.low, found.total, found.high))
    yield f"a step takes {total} on {cluster.name}, {low} to {high}"
    ranks = plan.mesh.num_ranks()
    yield from _items(
        f"{found.tokens_per_s(ranks):,.0f} tokens/s per device",
        f"{found.flops / found.total / 1e6:,.3g} TFLOP/s",
    )
    parts = sorted(found.parts.items(), key=lambda item: -item[1])
    yield from _items(*(f"{part} {format_time(us)}" for part, us in parts if us >= SHOWN * found.total))
    yield from (f"  {line}" for line in describe_load(plan))
    yield from wrapped(f"rates: {cluster.performance.source}", COLUMNS, indent="  ")


def devices(num_bytes: int) -> str:
    """Return the known GPUs whose memory is enough, and the largest of the others."""
    smaller, fitting = gpus_by_memory(num_bytes)
    largest = "".join(f"{one.name} ({format_bytes(one.device.memory_bytes)})" for one in smaller[-1:])
    if not fitting:
        return f"  fits no known GPU: the largest is {largest}"
    return f"  fits {', '.join(one.name for one in fitting)}" + (f"; not {largest}" if largest else "")


def nodes_of_gpus(plan: RunPlan) -> int | None:
    """Return the ranks on a node of the smallest GPU that holds a rank; None if they don't fill several nodes."""
    smaller, fitting = gpus_by_memory(predict_cuda_memory(plan).total())
    ranks, size = plan.mesh.num_ranks(), (fitting or smaller)[0].devices_per_node
    return size if ranks > size and ranks % size == 0 else None


def _trained(plan: RunPlan) -> str:
    """Return how many parameters are trained, if not all are."""
    total, trained = num_params(plan), num_params(plan, trained=True)
    return "" if trained == total else f", {format_count(trained)} trained ({100 * trained / total:.2g} %)"


def _batch(plan: RunPlan) -> Iterator[str]:
    batch, compute = plan.batch, plan.stages[0].root.compute
    used = [f"{atom} {size}" for atom, size in plan.mesh.atoms if size > 1]
    kept = f", {plan.masters} masters" if compute != plan.masters else ""
    yield from _items(
        f"{' × '.join(used)} = {counted(plan.mesh.num_ranks(), 'rank')}" if used else "one rank",
        f"batch {batch.global_batch} × {batch.tokens} tokens",
        f"{batch.num_microbatches} × {counted(batch.samples, 'sample')} per rank",
        f"{compute}{kept}",
        f"schedule {plan.schedule.kind}{_bubble(plan)}",
    )


def _bubble(plan: RunPlan) -> str:
    """Return the share of a step that stages wait for each other, where forward and backward take 1 and 2."""
    if plan.schedule.num_ranks == 1:
        return ""
    costs = Costs.uniform(forward=1.0, backward_input=1.0, backward_weight=1.0)
    return f", bubble {simulate(plan.schedule, costs).bubble():.0%}"


def _capture(plan: RunPlan, capture: CaptureConfig) -> Iterator[str]:
    if capture.scope != ("layer",):
        yield f"CUDA graphs of {', '.join(capture.scope)}: planned in the first step, which runs eagerly"
        return
    from meshwright.capture.predict import predict_capture  # only with graphs of layers

    found = predict_capture(plan, mode=capture.mode)
    yield f"CUDA graphs of a rank, at most  {found.graphs} in {found.pools} memory pool{'s' * (found.pools > 1)}"
    sizes = {
        "static tensors": found.static - found.inputs,
        "copies of weights": found.weights,
        "workspaces": WORKSPACES,
    }
    words = [f"{what} {format_bytes(size)} more" for what, size in sizes.items() if size]
    yield from _items(*words, f"{format_bytes(found.saved)} of the activations in pools")


def _traffic(plan: RunPlan, traffic: Traffic) -> Iterator[str]:
    if not traffic.entries:
        yield "traffic  none: there is one rank"
        return
    sent, exact = traffic.sent(), traffic.exact()
    without = f" (uncompressed {format_bytes(exact.total())})" if exact.total() != sent.total() else ""
    yield f"each rank sends per step, at most  {format_bytes(sent.total())}{without}"
    for one in sorted(traffic.entries, key=lambda one: -one.sent.total()):
        links = [(one.sent.inside_node, "inside a node"), (one.sent.between_nodes, "between nodes")]
        by_link = " · ".join(f"{format_bytes(size)} {where}" for size, where in links if size)
        yield f"  {one.purpose:<18} {by_link}"
        if one.purpose == Purpose.EXPERTS:
            from meshwright.plan.expert_traffic import describe_rows  # only where a plan has experts

            rows = describe_rows(plan, traffic.rank)
            yield from wrapped(rows, COLUMNS, indent="    ") if rows else ()
        if one.purpose == Purpose.CONTEXT and plan.batch.packed:
            yield "    as if each sample were one document; packed ones send less or more"
    if isinstance(plan.mesh.nodes, int) and plan.mesh.num_ranks() > MAX_ROWS:
        yield f"  on nodes of {plan.mesh.nodes} ranks (comm.ranks_per_node)"


def _stages(plan: RunPlan) -> Iterator[str]:
    yield "  stage  pp rank  layers       parameters"
    before, skipped = "", 0
    for number, stage in enumerate(plan.stages):
        first, stop = stage.layers
        layers = f"{first}–{stop - 1}" if stop > first else "none"
        elements = sum(math.prod(parameter.shape) for _, _, parameter in plan.parameters(stage))
        ends = " ".join((*stage.before, *stage.after))
        row = f"{layers if len(plan.stages) <= MAX_ROWS else stop - first:<12} {format_count(elements):>8}  {ends}"
        if len(plan.stages) > MAX_ROWS and row == before and number < len(plan.stages) - 1:
            skipped += 1
            continue
        if skipped:
            yield f"  … {skipped} more like this"
        before, skipped = row, 0
        yield f"  {number:>5}  {stage.pp_rank:>7}  {layers:<12} {format_count(elements):>8}  {ends}".rstrip()


def _units(plan: RunPlan) -> Iterator[str]:
    layers = Counter(name for stage in plan.stages for name in stage.kinds)
    for kind in plan.kinds:
        for unit in kind.units:
            members = [parameter for parameter in kind.parameters if parameter.name in unit.parameters]
            times = f" × {layers[kind.name]}" if kind.is_block else ""
            elements = sum(math.prod(parameter.shape) for parameter in members)
            frozen = sum(not parameter.trained for parameter in members)
            more = [f"{frozen} of {len(members)} frozen"] if frozen else []
            more += [RECOMPUTED[kind.recompute]] if kind.recompute in RECOMPUTED else []
            more += ["compiled"] if kind.compiled else []
            name = f"{kind.name} experts" if unit.name == EXPERTS else kind.name
            in_use = kind.experts.axes if kind.experts is not None and unit.name == EXPERTS else ()
            more = [f"in use over {_axes(in_use)}", *more] if in_use else more
            yield from _items(f"{name}{times}", format_count(elements), _unit_words(unit), *more)
    roots = set()
    for stage in plan.stages:
        held = [(f"{kind.name}/{p.name}", math.prod(p.shape)) for kind, _, p in plan.parameters(stage)]
        roots.add(sum(size for name, size in held if name in stage.root.parameters))
    sizes = " … ".join(dict.fromkeys(map(format_count, sorted(roots))))
    yield from _items("root of a stage", sizes, _unit_words(plan.stages[0].root))


def _unit_words(unit: Unit) -> str:
    over = f"sharded over {_axes(unit.sharded)}" if unit.sharded else "not sharded"
    over += f", replicated over {_axes(unit.replicas)}" if unit.replicas else ""
    kept = unit.num_secondary()
    after = "freed after the forward" if unit.freed is True else "kept until the backward"
    after = f"kept sharded over {counted(kept, 'rank')} until the backward" if kept else after
    sent = [f"{what} {method}" for what, method in (("gradients", unit.gradients), ("weights", unit.weights))
            if method != "exact"]  # fmt: skip
    return " · ".join([over, *([after] if unit.sharded else []), *sent])


def optimizer_groups(plan: RunPlan, train: TrainConfig | None) -> list[dict[str, Any]]:
    """Return trained parameters with the same role and settings, and their elements, the largest groups first. Peak
    learning rates and decay are those of the `train` section, and None for a plan from a file."""
    sizes: dict[tuple[Any, ...], dict[str, int]] = {}
    for kind, layer, one in (found for stage in plan.stages for found in plan.parameters(stage)):
        name, settings = kind.key(one, layer), dict[str, float | None](lr=None, weight_decay=None)
        if train is not None:
            lr, decay = group_settings(train, name, one.role, num_dims=len(one.shape))
            settings = {"lr": lr, "weight_decay": decay}
        if one.trained:
            key = {"optimizer": plan.optimizer.update_of(one.role).optimizer, "role": one.role, **settings}
            sizes.setdefault(tuple(key.items()), {})[name] = math.prod(one.shape)
    found = [
        {**dict(key), "parameters": list(members), "elements": sum(members.values())} for key, members in sizes.items()
    ]
    return sorted(found, key=lambda group: -group["elements"])


def _groups(plan: RunPlan, train: TrainConfig | None) -> Iterator[str]:
    for one in optimizer_groups(plan, train):
        size = f"{counted(len(one['parameters']), 'parameter')}, {format_count(one['elements'])}"
        settings = [f"decay {one['weight_decay']:g}" if one["weight_decay"] else "no decay"] if train else []
        settings += [f"lr {one['lr']:g}"] if train and one["lr"] != train.lr else []
        yield from _items(one["role"], one["optimizer"], size, *settings)


def _collectives(plan: RunPlan) -> Iterator[str]:
    totals: Counter[tuple[str, Atoms, int]] = Counter()
    for stage in plan.stages:
        for kind, _ in plan.held(stage):
            for one in kind.collectives:
                calls = one.num_calls(plan.batch.samples * plan.rank_tokens)
                times = calls * _times(one, recomputed=kind.recompute == RecomputePolicy.FULL)
                totals[one.op, one.axes, -(-_bytes(plan, one) // calls)] += times
    for (op, axes, size), times in totals.items():
        yield f"  {op.replace('_', '-'):<15} over {_axes(axes)}  {times:>6} × {format_bytes(size)}"


def _attention(plan: RunPlan) -> Iterator[str]:
    """Yield the method of each kind's attention under context parallelism, with the reason."""
    from meshwright.plan.context.layers import explain_method, imbalance_of_ranks  # only where cp shards tokens

    layers = Counter(name for stage in plan.stages for name in stage.kinds)
    slowest = f"slowest rank {imbalance_of_ranks(plan):.3f} × the mean of its work"
    yield f"attention over {_axes(plan.mesh.view('cp'))}, {slowest}"
    for kind in plan.kinds:
        if kind.attention is not None:
            method = f"{kind.name} × {layers[kind.name]} · {explain_method(plan, kind)}"
            yield from wrapped(method, COLUMNS, indent="  ")


def _bytes(plan: RunPlan, one: Collective) -> int:
    return plan.batch.samples * one.elements * BYTES[one.dtype]


def _times(one: Collective, *, recomputed: bool) -> int:
    return one.forward + one.backward + (one.recomputed if recomputed else 0)


def _sums(plan: RunPlan) -> Iterator[str]:
    who = {"ours": "by Meshwright", "fsdp": "by FSDP2", "dtensor": "by DTensor"}
    for one in plan.sums:
        yield from _items(
            one.op, f"over {_axes(one.axes)}", counted(len(one.parameters), "distinct parameter"), who[one.by]
        )
    stages = Counter(tuple(stage for stage, _ in sites) for _, sites in plan.shared)
    for held, count in stages.items():
        where = f"stages {held[0]} and {held[1]}" if len(held) == 2 else counted(len(held), "stage")
        yield from _items("sum", f"over {where}", counted(count, "shared parameter"), "by Meshwright")


def _axes(axes: Sequence[str]) -> str:
    return " × ".join(axes)


def _items(*parts: str) -> Iterator[str]:
    """Join parts with middle dots, breaking lines only between parts."""
    line = " "
    for part in parts:
        for inner in part.split(" · "):
            joined = f"{line} · {inner}" if line.strip() else f"  {inner}"
            if len(joined) > COLUMNS:
                yield line
                joined = f"    {inner}"
            line = joined
    yield line
