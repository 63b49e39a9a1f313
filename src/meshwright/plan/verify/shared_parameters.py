"""Verify parameters with copies on several stages: their gradients are partial over pp and summed once over all sites,
and the gradient norm counts one copy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.plan.run_plan import Kind, Parameter, RunPlan
from meshwright.plan.verify.error import Fault, format_count, format_stages, join_names, qualified_name
from meshwright.plan.verify.fsdp_units import units_of

ALL_SITES = "a parameter with copies on several stages lists all sites, over which gradients are summed"


class _ParameterCopy(NamedTuple):
    stage: int
    name: str
    """Full-model name."""
    kind: Kind
    parameter: Parameter


def shared_faults(plan: RunPlan) -> Iterator[Fault]:
    """Yield faults for copies that are missing, inconsistent or counted twice."""
    copies: dict[str, list[_ParameterCopy]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        names: set[str] = set()
        for kind, layer, parameter in plan.parameters(stage):
            name, key = kind.full_name(parameter.name, layer), kind.key(parameter, layer)
            if name in names or any(copy.stage == number for copy in copies[key]):
                what = f"{key} occurs twice on one stage, as {qualified_name(kind, parameter)}"
                rule = "a stage has each parameter once: tied modules share it"
                yield Fault(what, rule, "stages", parameter=qualified_name(kind, parameter), stages=(number,))
            names.add(name)
            copies[key].append(_ParameterCopy(number, name, kind, parameter))
    yield from _originals(copies)
    yield from _sites(plan, copies)
    yield from _norm(plan, copies)
    for key, found in copies.items():
        yield from _copies_match(plan, key, found)


def _originals(copies: dict[str, list[_ParameterCopy]]) -> Iterator[Fault]:
    """Check that the original of each copy exists."""
    for key, found in copies.items():
        if all(copy.parameter.key is not None and copy.name != key for copy in found):
            name = qualified_name(found[0].kind, found[0].parameter)
            what = f"{name} is a copy of {key}, which is on no stage"
            yield Fault(what, "the original of a copy must exist", "kinds", parameter=name, stages=(found[0].stage,))


def _sites(plan: RunPlan, copies: dict[str, list[_ParameterCopy]]) -> Iterator[Fault]:
    due = {key: tuple((c.stage, c.name) for c in found) for key, found in copies.items() if len(found) > 1}
    listed = Counter(key for key, _ in plan.shared)
    sites = dict(plan.shared)
    for key in dict.fromkeys((*due, *listed)):
        stages = tuple(stage for stage, _ in due.get(key, ()))
        if listed[key] > 1:
            what = f"{key} is listed {format_count(listed[key])}: its gradient is summed over pp as often"
        elif key not in due:
            what = f"{key} is listed as shared, but has no copies on different stages"
        elif key not in sites:
            on = format_stages(stages)
            what = f"{key}: its gradient is partial over pp, with copies on {on}, but summed there 0 times"
        elif sites[key] != due[key]:
            at, copies_at = _format_sites(sites[key]), _format_sites(due[key])
            what = f"{key}: its gradient is summed over pp at {at}, but copies are at {copies_at}"
        else:
            continue
        yield Fault(what, ALL_SITES, f"shared[{key}]", parameter=key, axis="pp")


def _format_sites(sites: tuple[tuple[int, str], ...]) -> str:
    return join_names(f"stage {stage} ({name})" for stage, name in sites)


def _norm(plan: RunPlan, copies: dict[str, list[_ParameterCopy]]) -> Iterator[Fault]:
    omitted = Counter(plan.norm_omits)
    due = {(copy.stage, key) for key, found in copies.items() for copy in found[1:]}
    for stage, key in dict.fromkeys((*sorted(due), *omitted)):
        if omitted[stage, key] == ((stage, key) in due):
            continue
        if (stage, key) in due and not omitted[stage, key]:
            what = f"{key}: the gradient norm counts it on stage {copies[key][0].stage}, and again on stage {stage}"
        elif (stage, key) in due:
            what = f"{key} is left out of the gradient norm twice on stage {stage}"
        else:
            what = f"{key}: the gradient norm leaves it out on stage {stage}, but no other stage counts it"
        rule = "the gradient norm counts each parameter once, on the first stage that has it"
        yield Fault(what, rule, "norm_omits", parameter=key, axis="pp", stages=(stage,))


def _copies_match(plan: RunPlan, key: str, found: list[_ParameterCopy]) -> Iterator[Fault]:
    """Check that copies stay equal: all must be stored, trained and updated alike."""
    first = found[0]
    for other in found[1:]:
        for what, one, two in (
            *((name, getattr(first.parameter, name), getattr(other.parameter, name)) for name in _COMPARED_FIELDS),
            ("unit", _reductions(plan, first), _reductions(plan, other)),
        ):
            if one != two:
                both = f"{one} on stage {first.stage} and {two} on stage {other.stage}"
                said = f"{key}: its copies differ in {what}, {both}"
                name = qualified_name(other.kind, other.parameter)
                rule = "copies of a parameter must be stored, trained and updated alike"
                yield Fault(said, rule, "kinds", parameter=name, axis="pp", stages=(other.stage,))


_COMPARED_FIELDS = ("shape", "role", "used", "work", "stored_dim", "trained")


def _reductions(plan: RunPlan, copy: _ParameterCopy) -> tuple[str, ...]:
    """Return how a copy's gradient is reduced within its stage. It must match across stages; the codec may differ."""
    units = units_of(plan.stages[copy.stage], copy.kind, copy.parameter)
    return tuple(f"{unit.sharded}, {unit.replicas}, {unit.reduce}" for unit in units[:1])
