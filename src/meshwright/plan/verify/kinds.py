"""Verify kinds by themselves: how parameters are sharded and what they are applied to, against their styles; buffers,
auxiliary losses, what operators move, and where optimizer state is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

from meshwright.models.contract.tp_styles import Style, StyleKind
from meshwright.plan.collective_bytes import Purpose
from meshwright.plan.mesh_views import Atoms
from meshwright.plan.run_plan import Buffer, Collective, Kind, Parameter, RunPlan
from meshwright.plan.verify.error import Fault, ref, times, words

SHARDED_DIM = {StyleKind.COLUMN: 0, StyleKind.VOCABULARY: 0, StyleKind.HEAD: 0, StyleKind.ROW: 1}
"""The dim of a weight that tensor parallel shards (Shoeybi et al. 2019)."""
GATHERED = {
    True: (("all_gather", "forward"), ("reduce_scatter", "backward")),
    False: (("all_reduce", "backward"),),
}
"""What a gathered input moves, with and without sequence parallel."""
SUMMED = {
    True: (("reduce_scatter", "forward"), ("all_gather", "backward")),
    False: (("all_reduce", "forward"),),
}
OPERATORS: dict[str, str] = {Purpose.TENSOR: "tp"}
"""The view of the mesh that operators move something over, by what it is for."""
OPS = ("all_gather", "reduce_scatter", "all_reduce")
ONE_STATE = "a trained parameter's optimizer state is kept exactly once"


def kind_faults(plan: RunPlan) -> Iterator[Fault]:
    """What is wrong inside kinds, whatever stages have them."""
    for kind in plan.kinds:
        for parameter in kind.parameters:
            yield from _axes(plan, kind, parameter)
            yield from _against_style(plan, kind, parameter)
            yield from _even(plan, kind, parameter)
        yield from _styles(plan, kind)
        for buffer in kind.buffers:
            yield from _buffer(plan, kind, buffer)
        for number, one in enumerate(kind.collectives):
            yield from _collective(plan, one, f"kinds[{kind.name}].collectives[{number}]")
        for auxiliary in kind.auxiliary:
            cp, tp = plan.mesh.view("cp"), plan.mesh.view("tp") if plan.sequence_parallel else ()
            if auxiliary.work not in (cp, cp + tp):
                field = f"kinds[{kind.name}].auxiliary[{auxiliary.name}]"
                what = f"the loss {auxiliary.name} is divided over {words(auxiliary.work)}"
                rule = "ranks of cp have parts of a sample's loss, and ranks of tp may, under sequence parallel"
                yield Fault(what, rule, f"{field}.work", axis=next(iter(auxiliary.work or cp), None))
    yield from _states(plan)


def _field(kind: Kind, parameter: Parameter) -> str:
    return f"kinds[{kind.name}].parameters[{parameter.name}]"


def _data(plan: RunPlan) -> Atoms:
    return plan.mesh.view("batch") + plan.mesh.view("cp")


def _axes(plan: RunPlan, kind: Kind, parameter: Parameter) -> Iterator[Fault]:
    """Axes that divide the data divide what every parameter is applied to, or the parameter itself (experts)."""
    name, used = ref(kind, parameter), Counter(axis for shard in parameter.used for axis in shard.axes)
    for axis in plan.mesh.in_stage():
        how_often = used[axis] + parameter.work.count(axis)
        if how_often > 1:
            what = f"{name} is sharded over {axis} {times(used[axis])}, and what it is applied to is divided there"
            if used[axis] > 1:
                what = f"{name} is sharded over {axis} {times(used[axis])}"
            rule = "an axis shards one dim of a parameter, or divides what it is applied to"
            yield Fault(what, rule, _field(kind, parameter), parameter=name, axis=axis)
        elif axis in _data(plan) and not how_often:
            what = f"{name} is applied to all data, as if {axis} divided none"
            rule = "axes that divide samples or sequences are in work, of every parameter that they don't shard in use"
            yield Fault(what, rule, f"{_field(kind, parameter)}.work", parameter=name, axis=axis)


def _style_of(kind: Kind, name: str) -> Style | None:
    module = name.rpartition(".")[0]
    return next((style for glob, style in kind.styles if fnmatchcase(module, glob)), None)


def _meets_part(plan: RunPlan, style: Style | None) -> bool:
    """Whether tp divides what replicated parameters of a style are applied to."""
    kind = None if style is None else style.kind
    return kind is StyleKind.DIVIDED or (kind is StyleKind.STREAM and plan.sequence_parallel)


def _against_style(plan: RunPlan, kind: Kind, parameter: Parameter) -> Iterator[Fault]:
    name, field, style = ref(kind, parameter), _field(kind, parameter), _style_of(kind, parameter.name)
    label = f"style {style.kind.value}" if style else "no style"
    dim = None if style is None else SHARDED_DIM.get(style.kind)
    if len(parameter.shape) == 1 and dim is not None:
        dim = None if dim else 0  # a row's bias is added to the sum: all ranks have it
    for axis in plan.mesh.view("tp"):
        dims = [shard.dim for shard in parameter.used if axis in shard.axes]
        if dims != ([] if dim is None else [dim]):
            what = f"{name} has {label}, and is sharded over {axis} along {_dims(dims)}, not {_dims([dim])}"
            rule = "columns, vocabularies and heads are sharded along dim 0, rows along dim 1, their biases not at all"
            yield Fault(what, rule, f"{field}.used", parameter=name, axis=axis)
        if (axis in parameter.work) is not _meets_part(plan, style):
            having = "with" if plan.sequence_parallel else "without"
            stated = "divides" if axis in parameter.work else "doesn't divide"
            what = f"{name} has {label}, {having} sequence parallel, and {axis} {stated} what it is applied to"
            rule = "tp divides what style divided is applied to, and with sequence parallel what style stream is"
            yield Fault(what, rule, f"{field}.work", parameter=name, axis=axis)


def _dims(dims: list[int] | list[int | None]) -> str:
    return "no dim" if dims in ([], [None]) else f"dim {words(dims)}"


def _even(plan: RunPlan, kind: Kind, parameter: Parameter) -> Iterator[Fault]:
    """DTensor's operators want equal shards; FSDP2 too, but along dim 0."""
    name, local = ref(kind, parameter), list(parameter.shape)
    for shard in parameter.used:
        ranks = plan.mesh.size(*shard.axes)
        if local[shard.dim] % ranks:
            what = f"{name}: {words(shard.axes)} shard dim {shard.dim} of {local[shard.dim]} over {ranks} ranks"
            rule = "what is used sharded has as many rows on every rank"
            yield Fault(what, rule, f"{_field(kind, parameter)}.used", parameter=name, axis=shard.axes[0])
        local[shard.dim] //= ranks
    fsdp = plan.mesh.view("fsdp")
    if parameter.stored_dim and local[parameter.stored_dim] % plan.mesh.size(*fsdp):
        size, ranks = local[parameter.stored_dim], plan.mesh.size(*fsdp)
        what = f"{name}: {words(fsdp)} shard the stored dim {parameter.stored_dim} of {size} over {ranks} ranks"
        rule = "FSDP2 shards unevenly along dim 0 alone"
        yield Fault(what, rule, f"{_field(kind, parameter)}.stored_dim", parameter=name, axis=fsdp[0])


def _styles(plan: RunPlan, kind: Kind) -> Iterator[Fault]:
    names = [*(parameter.name for parameter in kind.parameters), *kind.tied]
    direct = {name.rpartition(".")[0] for name in names}
    above = {module[:end] for module in direct for end in range(len(module) + 1) if module[end : end + 1] in (".", "")}
    for glob, style in kind.styles:
        field = f"kinds[{kind.name}].styles[{glob}]"
        modules = above if style.kind is StyleKind.GATHER else direct
        needs = (*SHARDED_DIM, StyleKind.GATHER, StyleKind.DIVIDED)
        if style.kind in needs and not any(fnmatchcase(one, glob) for one in modules):
            what = f"style {style.kind.value} is for {glob}, and no parameter of {kind.name} is there"
            yield Fault(what, "a style that says what becomes of parameters has some", field)
        if style.num_inputs != 1 and (style.kind is not StyleKind.GATHER or style.num_inputs < 1):
            what = f"style {style.kind.value} of {glob} counts {style.num_inputs} inputs"
            yield Fault(what, "a gathering module's inputs are counted, and no other's", field)
        if not style.kept and style.kind is not StyleKind.ROW:
            what = f"style {style.kind.value} of {glob} keeps no output"
            yield Fault(what, "a row's output may not be kept, every other's is", field)
    yield from _moves(plan, kind)


def _moves(plan: RunPlan, kind: Kind) -> Iterator[Fault]:
    """What the styles move is all that tensor parallel moves (Korthikanti et al. 2022, figures 4 and 5)."""
    due: Counter[tuple[str, str]] = Counter()
    matrices = [p.name for p in kind.parameters if len(p.shape) == 2]
    matrices += [name for name in kind.tied if name.endswith(".weight")]
    gathering = [glob for glob, style in kind.styles if style.kind is StyleKind.GATHER]
    for glob, style in kind.styles if plan.mesh.view("tp") else ():
        if style.kind is StyleKind.GATHER:
            due.update(GATHERED[plan.sequence_parallel])
        for name in (one for one in matrices if fnmatchcase(one.rpartition(".")[0], glob)):
            alone = style.kind is StyleKind.COLUMN and not any(fnmatchcase(name, f"{one}.*") for one in gathering)
            if style.kind is StyleKind.HEAD or alone:
                due.update(GATHERED[plan.sequence_parallel])
            if style.kind in (StyleKind.ROW, StyleKind.VOCABULARY):
                due.update(SUMMED[plan.sequence_parallel])
            if style.kind is StyleKind.HEAD:
                due["all_reduce", "forward"] += 1  # of the loss
    has = Counter(
        (one.op, name)
        for one in kind.collectives
        if one.purpose == Purpose.TENSOR
        for name, count in (("forward", one.forward), ("backward", one.backward))
        if count
    )
    for op, name in dict.fromkeys((*due, *has)):
        if has[op, name] != due[op, name]:
            having = "with" if plan.sequence_parallel else "without"
            what = f"{kind.name} has {has[op, name]} {op} in its {name}, and its styles {due[op, name]}"
            rule = f"tensor parallel {having} sequence parallel moves what its styles say"
            yield Fault(what, rule, f"kinds[{kind.name}].collectives", axis=next(iter(plan.mesh.view("tp")), None))


def _buffer(plan: RunPlan, kind: Kind, buffer: Buffer) -> Iterator[Fault]:
    name, field = f"{kind.name}/{buffer.name}", f"kinds[{kind.name}].buffers[{buffer.name}]"
    for axis in plan.mesh.in_stage():
        divided, summed = axis in buffer.work, axis in buffer.summed
        if divided is not summed:
            sees = "different parts" if divided else "the same"
            what = f"buffer {name}: ranks of {axis} see {sees}, and its update is summed there {times(int(summed))}"
            rule = "an update is summed once over every axis that divides what it counts, and over no other"
            yield Fault(what, rule, f"{field}.summed", parameter=name, axis=axis)
        due = axis in _data(plan) or _meets_part(plan, _style_of(kind, buffer.name))
        if buffer.work and divided is not due:
            what = f"buffer {name} counts {'parts' if divided else 'all'} of what {axis} divides"
            rule = "an update counts a part of the data on every rank, and over tp what its module's style says"
            yield Fault(what, rule, f"{field}.work", parameter=name, axis=axis)


def _collective(plan: RunPlan, one: Collective, field: str) -> Iterator[Fault]:
    rule = "an operator moves elements, in a forward or a backward, over axes of the mesh"
    if one.op not in OPS or one.purpose not in OPERATORS:
        yield Fault(f"{one.op} for {one.purpose}", f"one of {words(OPS)}, for one of {words(OPERATORS)}", field)
    if one.elements < 1 or min(one.forward, one.backward, one.recomputed) < 0 or not one.forward + one.backward:
        passes = f"{one.forward} times forward, {one.backward} backward, {one.recomputed} again"
        yield Fault(f"{one.op} of {one.elements} elements, {passes}", rule, field)
    tokens = max(1, plan.batch.tokens // plan.mesh.size(*plan.mesh.view("cp")))
    if one.elements % tokens:
        what = f"{one.op} of {one.elements} elements, for {tokens} tokens of a sample"
        yield Fault(what, "every token has as many elements", f"{field}.elements", axis=next(iter(one.axes), None))
    if one.dtype not in (plan.edge.dtype, plan.masters):
        what = f"{one.op} in {one.dtype}"
        yield Fault(what, f"operators compute in {plan.edge.dtype} or {plan.masters}", f"{field}.dtype")
    if one.recomputed > one.forward:
        what = f"{one.op} {times(one.recomputed)} when recomputed, and {times(one.forward)} in a forward"
        yield Fault(what, "recomputation repeats a forward, or a part of it", field)
    view = OPERATORS.get(one.purpose)
    wrong = set(one.axes) ^ set(plan.mesh.view(view) if view else one.axes)
    if wrong or not one.axes:
        what = f"{one.op} over {words(one.axes)} for {one.purpose}"
        rule = f"what operators move for {one.purpose} goes over {view}"
        yield Fault(what, rule, f"{field}.axes", axis=min(wrong, default=None))


def _states(plan: RunPlan) -> Iterator[Fault]:
    """Every role of something that is trained has its state in one place."""
    kept = Counter(role for state in plan.optimizer.states for role in state.roles)
    needed = {p.role: ref(kind, p) for kind in reversed(plan.kinds) for p in reversed(kind.parameters) if p.trained}
    for role in dict.fromkeys((*needed, *kept)):
        if kept[role] > 1 or (role in needed and not kept[role]):
            name = needed.get(role)
            what = f"{name or 'nothing'} has the role {role}, whose optimizer state is kept {times(kept[role])}"
            yield Fault(what, ONE_STATE, "optimizer.states", parameter=name)
    for number, state in enumerate(plan.optimizer.states):
        if len(set(state.names)) < len(state.names):
            yield Fault(f"state {words(state.names)}", ONE_STATE, f"optimizer.states[{number}].names")
