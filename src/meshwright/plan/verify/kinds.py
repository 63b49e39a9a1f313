"""Verify kinds: sharding and `work` of parameters against their styles, buffers, auxiliary losses, operators'
collectives, and optimizer state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice

from meshwright.models.contract.tp_styles import LossReductions, Style, StyleKind
from meshwright.optim.role import Role
from meshwright.plan.run_plan import Buffer, Collective, LayerSpec, Parameter, RunPlan
from meshwright.plan.stage_sizes import LOAD_DTYPE
from meshwright.plan.traffic import Purpose
from meshwright.plan.verify.names import PlanError, format_count, join_names, qualified_name
from meshwright.units import counted

SHARDED_DIM = {StyleKind.COLUMN: 0, StyleKind.VOCABULARY: 0, StyleKind.HEAD: 0, StyleKind.ROW: 1}
"""Weight dim sharded by tensor parallelism (Shoeybi et al. 2019)."""
GATHERED = {True: (("all_gather", "forward"), ("reduce_scatter", "backward")), False: (("all_reduce", "backward"),)}
"""Collectives for a gathered input, with (True) and without sequence parallelism."""
SUMMED = {True: (("reduce_scatter", "forward"), ("all_gather", "backward")), False: (("all_reduce", "forward"),)}
OPERATORS: dict[str, str] = {Purpose.TENSOR: "tp"}
"""Mesh view of operators' collectives, by purpose."""
OPS = ("all_gather", "reduce_scatter", "all_reduce")
ONE_UPDATE = "a role of trained parameters has exactly one update"


def kind_faults(plan: RunPlan) -> Iterator[PlanError]:
    """Yield faults in kinds, independent of stages."""
    for kind in plan.kinds:
        for parameter in kind.parameters:
            yield from _axes(plan, kind, parameter)
            yield from _style_match(plan, kind, parameter)
            yield from _even_shards(plan, kind, parameter)
        yield from _styles(plan, kind)
        for buffer in kind.buffers:
            yield from _buffer(plan, kind, buffer)
        for number, one in enumerate(kind.collectives):
            yield from _collective(plan, one, f"kinds[{kind.name}].collectives[{number}]")
        for auxiliary in kind.auxiliary:
            cp, tp = plan.mesh.view("cp"), plan.mesh.view("tp")
            options = (cp + tp,) if auxiliary.in_region else (cp, cp + tp if plan.sequence_parallel else cp)
            if auxiliary.work not in options:
                field = f"kinds[{kind.name}].auxiliary[{auxiliary.name}]"
                what = f"the auxiliary loss {auxiliary.name} is partial over {join_names(auxiliary.work)}"
                rule = "an auxiliary loss is partial over cp, and over tp in a region, or possibly on a sharded stream"
                yield PlanError(what, rule, f"{field}.work", axis=next(iter(auxiliary.work or cp), None))
    yield from _states(plan)


def _field(kind: LayerSpec, parameter: Parameter) -> str:
    return f"kinds[{kind.name}].parameters[{parameter.name}]"


def _axes(plan: RunPlan, kind: LayerSpec, parameter: Parameter) -> Iterator[PlanError]:
    """Check that each data axis shards either the operator's input or the parameter itself (experts)."""
    name, used = qualified_name(kind, parameter), Counter(axis for shard in parameter.used for axis in shard.axes)
    data = plan.mesh.view("batch") + plan.mesh.view("cp")
    for axis in plan.mesh.in_stage():
        how_often = used[axis] + parameter.work.count(axis)
        if how_often > 1:
            what = f"{name} and its operator's input are both sharded over {axis}"
            if used[axis] > 1:
                what = f"{name} is sharded over {axis} {format_count(used[axis])}"
            rule = "an axis shards one dim of a parameter, or the operator's input"
            yield PlanError(what, rule, _field(kind, parameter), parameter=name, axis=axis)
        elif axis in data and not how_often:
            what = f"{name} is applied to all data, although {axis} shards it"
            rule = "data axes (batch, cp) must be in the work of each parameter that they don't shard in use"
            yield PlanError(what, rule, f"{_field(kind, parameter)}.work", parameter=name, axis=axis)


def _style_of(kind: LayerSpec, name: str) -> Style | None:
    module = name.rpartition(".")[0]
    return next((style for glob, style in kind.styles if fnmatchcase(module, glob)), None)


def _has_sharded_input(plan: RunPlan, style: Style | None) -> bool:
    """Return whether tp shards the input of replicated parameters with this style."""
    kind = None if style is None else style.kind
    return kind is StyleKind.DIVIDED or (kind is StyleKind.STREAM and plan.sequence_parallel)


def _style_match(plan: RunPlan, kind: LayerSpec, parameter: Parameter) -> Iterator[PlanError]:
    name, field, style = qualified_name(kind, parameter), _field(kind, parameter), _style_of(kind, parameter.name)
    label = f"style {style.kind.value}" if style else "no style"
    dim = None if style is None else SHARDED_DIM.get(style.kind)
    if len(parameter.shape) == 1 and dim is not None:
        dim = None if dim else 0  # the bias of a row-parallel layer is replicated
    if style is not None and style.kind is StyleKind.EXPERTS:
        dim = 0
    if style is not None and style.kind is StyleKind.LOCAL:
        dim = dict(style.dims).get(parameter.name.rpartition(".")[2])
    for axis in plan.mesh.view("tp"):
        dims = [shard.dim for shard in parameter.used if axis in shard.axes]
        if dims != ([] if dim is None else [dim]):
            what = f"{name} has {label}, but is sharded over {axis} along {_dims(dims)}, not {_dims([dim])}"
            rule = "column, vocabulary, head and experts shard dim 0, row dim 1 without the bias, local the listed dims"
            yield PlanError(what, rule, f"{field}.used", parameter=name, axis=axis)
        is_local = style is not None and style.kind is StyleKind.LOCAL and dim is None
        if (axis in parameter.work) is not (is_local or _has_sharded_input(plan, style)):
            having, stated = _having(plan), "is" if axis in parameter.work else "is not"
            what = f"{name} has {label}, {having} sequence parallelism, but {axis} {stated} in `work`"
            rule = "tp is in the work of style divided, and with sequence parallelism of style stream"
            yield PlanError(what, rule, f"{field}.work", parameter=name, axis=axis)


def _having(plan: RunPlan) -> str:
    return "with" if plan.sequence_parallel else "without"


def _dims(dims: list[int] | list[int | None]) -> str:
    return "no dim" if dims in ([], [None]) else f"dim {join_names(dims)}"


def _even_shards(plan: RunPlan, kind: LayerSpec, parameter: Parameter) -> Iterator[PlanError]:
    """Check that shards are even: DTensor's operators require it in use, and FSDP2 for dims other than 0."""
    name, local = qualified_name(kind, parameter), list(parameter.shape)
    for shard in parameter.used:
        ranks = plan.mesh.size(*shard.axes)
        if local[shard.dim] % ranks:
            what = f"{name}: {join_names(shard.axes)} shard dim {shard.dim} of {local[shard.dim]} over {ranks} ranks"
            rule = "parameters must be sharded evenly while in use"
            yield PlanError(what, rule, f"{_field(kind, parameter)}.used", parameter=name, axis=shard.axes[0])
        local[shard.dim] //= ranks
    in_use = {axis for shard in parameter.used for axis in shard.axes}
    fsdp = tuple(axis for axis in plan.mesh.view("fsdp") if axis not in in_use)
    if parameter.stored_dim and local[parameter.stored_dim] % plan.mesh.size(*fsdp):
        size, ranks = local[parameter.stored_dim], plan.mesh.size(*fsdp)
        what = f"{name}: {join_names(fsdp)} shard the stored dim {parameter.stored_dim} of {size} over {ranks} ranks"
        rule = "FSDP2 supports uneven sharding along dim 0 only"
        yield PlanError(what, rule, f"{_field(kind, parameter)}.stored_dim", parameter=name, axis=fsdp[0])


def _styles(plan: RunPlan, kind: LayerSpec) -> Iterator[PlanError]:
    names = [*(parameter.name for parameter in kind.parameters), *kind.tied]
    direct = {name.rpartition(".")[0] for name in names}
    above = {module[:end] for module in direct for end in range(len(module) + 1) if module[end : end + 1] in (".", "")}
    for glob, style in kind.styles:
        field = f"kinds[{kind.name}].styles[{glob}]"
        around = (StyleKind.GATHER, StyleKind.REGION)
        modules = above if style.kind in around else direct
        needs = (*SHARDED_DIM, *around, StyleKind.DIVIDED, StyleKind.LOCAL, StyleKind.EXPERTS)
        if style.kind in needs and not any(fnmatchcase(one, glob) for one in modules):
            what = f"style {style.kind.value} of {glob} matches no parameter of {kind.name}"
            yield PlanError(what, "a style that affects parameters must match some", field)
        if style.num_inputs != 1 and (style.kind is not StyleKind.GATHER or style.num_inputs < 1):
            what = f"style {style.kind.value} of {glob} has num_inputs = {style.num_inputs}"
            yield PlanError(what, "only style gather has num_inputs, which is at least 1", field)
        if not style.kept and not style.reduces_output:
            what = f"style {style.kind.value} of {glob} has kept = false"
            yield PlanError(what, "only styles with a reduced output, such as row, can have kept = false", field)
    yield from _style_collectives(plan, kind)


def _style_collectives(plan: RunPlan, kind: LayerSpec) -> Iterator[PlanError]:
    """Check that a kind's collectives match its styles (Korthikanti et al. 2022, figures 4 and 5)."""
    due: Counter[tuple[str, str]] = Counter()
    matrices = [p.name for p in kind.parameters if len(p.shape) == 2]
    matrices += [name for name in kind.tied if name.endswith(".weight")]
    gathering = [glob for glob, style in kind.styles if style.kind is StyleKind.GATHER]
    reductions = LossReductions.of(kind.parts)
    gathered, summed = GATHERED[plan.sequence_parallel], SUMMED[plan.sequence_parallel]
    for glob, style in kind.styles if plan.mesh.view("tp") else ():
        is_around = style.kind in (StyleKind.GATHER, StyleKind.REGION)
        num_gathered = 2 if style.kind is StyleKind.EXPERTS else int(is_around)  # experts: tokens, and their weights
        due.update((num_gathered + bool(style.partial_tail) + bool(style.summed_input)) * gathered)
        due.update((bool(style.reduced_output) + (style.kind in (StyleKind.REGION, StyleKind.EXPERTS))) * summed)
        for name in (one for one in matrices if fnmatchcase(one.rpartition(".")[0], glob)):
            alone = style.kind is StyleKind.COLUMN and not any(fnmatchcase(name, f"{one}.*") for one in gathering)
            if style.kind is StyleKind.HEAD or alone:
                due.update(gathered)
            if style.kind in (StyleKind.ROW, StyleKind.VOCABULARY):
                due.update(summed)
            if style.kind is StyleKind.HEAD:
                due["all_reduce", "forward"] += len(reductions.values)
            if style.gathered:
                due["all_gather", "forward" if style.kind is StyleKind.COLUMN else "backward"] += 1
    has: Counter[tuple[str, str]] = Counter()
    for one in kind.collectives:
        if one.tokens not in (0, reductions.tokens):
            what = f"{one.op} of {kind.name} is called for {one.tokens} tokens each"
            yield PlanError(what, "a loss by chunks reduces one chunk at once", f"kinds[{kind.name}].collectives")
        if one.purpose == Purpose.TENSOR:
            has.update({(one.op, "forward"): one.forward, (one.op, "backward"): one.backward})
    for op, name in dict.fromkeys((*due, *has)):
        if has[op, name] != due[op, name]:
            what = f"{kind.name} calls {op} {has[op, name]}× in {name}, but its styles imply {due[op, name]}×"
            rule = f"collectives must match the styles {_having(plan)} sequence parallelism"
            yield PlanError(what, rule, f"kinds[{kind.name}].collectives", axis=next(iter(plan.mesh.view("tp")), None))


def _buffer(plan: RunPlan, kind: LayerSpec, buffer: Buffer) -> Iterator[PlanError]:
    name, field = f"{kind.name}/{buffer.name}", f"kinds[{kind.name}].buffers[{buffer.name}]"
    data = plan.mesh.view("batch") + plan.mesh.view("cp")
    for axis in plan.mesh.in_stage():
        divided, summed = axis in buffer.work, axis in buffer.summed
        if divided is not summed:
            sees = "different inputs" if divided else "the same inputs"
            what = f"buffer {name}: {axis} ranks see {sees}, but its update is summed there {format_count(int(summed))}"
            rule = "an update is summed exactly over the axes that shard its inputs"
            yield PlanError(what, rule, f"{field}.summed", parameter=name, axis=axis)
        due = axis in data or _has_sharded_input(plan, _style_of(kind, buffer.name))
        if (buffer.work or buffer.load) and divided is not due:
            what = f"buffer {name} has {axis} {'' if divided else 'not '}in `work`"
            rule = "data axes are in the work of an updated buffer, and tp if its module's style implies it"
            yield PlanError(what, rule, f"{field}.work", parameter=name, axis=axis)
    if buffer.load and (buffer.dtype != LOAD_DTYPE or len(buffer.shape) != 1 or buffer.shape[0] < 1):
        what = f"load counter {name} is {buffer.dtype} of shape {list(buffer.shape)}"
        yield PlanError(what, f"a load counter has one {LOAD_DTYPE} count per expert", f"{field}.load", parameter=name)


def _collective(plan: RunPlan, one: Collective, field: str) -> Iterator[PlanError]:
    if one.op not in OPS or one.purpose not in OPERATORS:
        rule_op = f"the op must be one of {join_names(OPS)}, the purpose one of {join_names(OPERATORS)}"
        yield PlanError(f"{one.op} with purpose {one.purpose}", rule_op, field)
    if one.elements < 1 or min(one.forward, one.backward, one.recomputed) < 0 or not one.forward + one.backward:
        passes = f"{one.forward} forward, {one.backward} backward, {one.recomputed} recomputed"
        rule = "a collective has elements, and runs in the forward or the backward"
        yield PlanError(f"{one.op} of {one.elements} elements, {passes}", rule, field)
    if one.elements % (tokens := max(1, plan.rank_tokens)):
        what, axis = f"{one.op} of {one.elements} elements, for {tokens} tokens of a sample", next(iter(one.axes), None)
        yield PlanError(what, "all tokens have the same number of elements", f"{field}.elements", axis=axis)
    if one.dtype not in (plan.edge.dtype, plan.masters):
        what = f"{one.op} in {one.dtype}"
        yield PlanError(what, f"operators compute in {plan.edge.dtype} or {plan.masters}", f"{field}.dtype")
    if one.recomputed > one.forward:
        counts = f"{format_count(one.recomputed)} when recomputed, but {format_count(one.forward)} in a forward"
        what = f"{one.op} runs {counts}"
        yield PlanError(what, "recomputation repeats at most the forward", field)
    view = OPERATORS.get(one.purpose)
    wrong = set(one.axes) ^ set(plan.mesh.view(view) if view else one.axes)
    if wrong or not one.axes:
        what = f"{one.op} with purpose {one.purpose} is over {join_names(one.axes)}"
        rule = f"collectives with purpose {one.purpose} must be over {view}"
        yield PlanError(what, rule, f"{field}.axes", axis=min(wrong, default=None))


def _states(plan: RunPlan) -> Iterator[PlanError]:
    """Check that each role of a trained parameter has exactly one update, whose states its parameters can have."""
    kept = Counter(role for update in plan.optimizer.updates for role in update.roles)
    trained = [(kind, p) for kind in plan.kinds for p in kind.parameters if p.trained]
    needed = {p.role: qualified_name(kind, p) for kind, p in reversed(trained)}
    for role in dict.fromkeys((*needed, *kept)):
        if kept[role] > 1 or (role in needed and not kept[role]):
            name = needed.get(role)
            what = f"{name or 'no parameter'} has role {role}, whose update occurs {format_count(kept[role])}"
            yield PlanError(what, ONE_UPDATE, "optimizer.updates", parameter=name)
            return
    for number, update in enumerate(plan.optimizer.updates):
        names = [state.name for state in update.states]
        if len(set(names)) < len(names):
            rule = "a parameter has each state once"
            yield PlanError(f"duplicate states: {join_names(names)}", rule, f"optimizer.updates[{number}].states")
    yield from islice(
        (fault for kind, p in trained for fault in _update(plan, kind, p)), 1
    )  # others would say the same


def _update(plan: RunPlan, kind: LayerSpec, parameter: Parameter) -> Iterator[PlanError]:
    name, dims = qualified_name(kind, parameter), len(parameter.shape)
    update = plan.optimizer.update_of(parameter.role)
    for state in update.states:
        if any(not 0 <= dim < dims for dim in state.dims or ()):
            what = f"{name} has {counted(dims, 'dim')}, but its state {state.name} has dims "
            what += join_names(state.dims or ())
            yield PlanError(what, "a state has dims of its parameter", "optimizer.updates", parameter=name)
    if update.whole and dims != (3 if parameter.role == Role.EXPERTS else 2):
        what = f"{name} has {counted(dims, 'dim')}, but {update.optimizer} updates whole matrices"
        rule = "a matrix has two dims, and matrices that are stacked, with role experts, three"
        yield PlanError(what, rule, "optimizer.updates", parameter=name)
