"""Compare plans: hashes that decide whether checkpoints and ranks are compatible, and a list of differing fields.

A checkpoint can be loaded on any layout if the model hash matches. Its error feedback, which is specific to the
elements each rank sends, also requires a matching layout hash. Ranks run together only if their fingerprints match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.plan.run_plan import LayerSpec, Parameter, RunPlan, Stage, Unit
from meshwright.plan.serialize import canonical, encode
from meshwright.units import counted

HASH_DIGITS = 16
MAX_VALUE_CHARS = 60
"""Maximum displayed length of a differing value."""
MISSING = "missing"
"""Placeholder for a value that exists in only one of the plans."""


@dataclass(frozen=True)
class Hashes:
    """Hashes of a plan, the same on all machines."""

    model: str
    """Hash, checked when loading, of the names and shapes of the full model's parameters and saved buffers."""
    layout: str
    """Hash of the layout and encoding of the gradients each rank sends; checked when loading error feedback."""
    fingerprint: str
    """Hash of the entire plan; all ranks must agree on it."""


def hashes(plan: RunPlan) -> Hashes:
    """Return the hashes of a plan: 16 hex digits of the SHA-256 of canonical JSON without floats."""
    return Hashes(*(_hash(part) for part in (_model_identity(plan), _gradient_layout(plan), encode(plan))))


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:HASH_DIGITS]


def _model_identity(plan: RunPlan) -> Any:
    """Return the values that identify the model, independent of stages, mesh, precision and frozen parameters."""
    shapes: dict[str, list[int]] = {}
    for stage in plan.stages:
        for kind, layer in plan.held(stage):
            for parameter in kind.parameters:
                shapes[kind.key(parameter, layer)] = list(parameter.shape)
            for buffer in kind.buffers:
                if buffer.saved:
                    shapes[kind.full_name(buffer.name, layer)] = list(buffer.shape)
    return shapes


def _gradient_layout(plan: RunPlan) -> Any:
    """Return the values that identify the gradient layout, independent of the schedule, micro-batches and weight
    gathering. Kinds are identified by their contents, not by name."""
    return {
        "atoms": [[name, size] for name, size in plan.mesh.atoms if size > 1],
        "nodes": [plan.mesh.node(rank) for rank in range(plan.mesh.num_ranks())],
        "stages": [_stage_layout(plan, stage) for stage in plan.stages],
    }


def _stage_layout(plan: RunPlan, stage: Stage) -> Any:
    # A unit sends the concatenated shards of its parameters, so their order, identity and sharding matter.
    blocks = {name: _units(plan.kind(name)) for name in dict.fromkeys(stage.kinds)}
    in_root = stage.root.parameters
    members = [_member(p) for kind, _, p in plan.parameters(stage) if f"{kind.name}/{p.name}" in in_root]
    return {
        "pp_rank": stage.pp_rank,
        "layers": list(stage.layers),
        "units": [blocks[name] for name in stage.kinds],
        "ends": [_units(plan.kind(name)) for name in (*stage.before, *stage.after)],
        "root": [_unit(stage.root), members],
    }


def _units(kind: LayerSpec) -> Any:
    by_name = {parameter.name: parameter for parameter in kind.parameters}
    return [[_unit(unit), [_member(by_name[name]) for name in unit.parameters]] for unit in kind.units]


def _unit(unit: Unit) -> Any:
    return {name: encode(getattr(unit, name)) for name in ("sharded", "replicas", "gradients", "inside_node")}


def _member(parameter: Parameter) -> Any:
    return {name: encode(getattr(parameter, name)) for name in ("name", "shape", "used", "stored_dim", "trained")}


@dataclass(frozen=True)
class Difference:
    """A field that differs between two plans."""

    path: str
    """Path of the field, such as `kinds[block].units[block].freed`."""
    first: str
    """Value in the first plan, as shortened JSON."""
    second: str

    def __str__(self) -> str:
        return f"{self.path}: {self.first} | {self.second}"


def differences(first: RunPlan, second: RunPlan) -> list[Difference]:
    """Return the fields that differ, in plan order. Kinds, units and parameters are matched by name, stages by index;
    only the first differing action of each schedule row is listed."""
    return list(_diff(encode(first), encode(second), ""))


def _diff(first: Any, second: Any, path: str) -> Iterator[Difference]:
    if first == second and type(first) is type(second):
        return
    if isinstance(first, dict) and isinstance(second, dict):
        yield from _diff_fields(first, second, f"{path}.{{}}" if path else "{}")
    elif isinstance(first, list) and isinstance(second, list):
        yield from _diff_lists(first, second, path)
    else:
        yield Difference(path, _shorten(first), _shorten(second))


def _diff_fields(one: dict[str, Any], two: dict[str, Any], place: str) -> Iterator[Difference]:
    """Compare by name; a plan's file may lack what is zero."""
    for name in (*one, *(name for name in two if name not in one)):
        if name in one and name in two:
            yield from _diff(one[name], two[name], place.format(name))
        else:
            found = (_shorten(values[name]) if name in values else MISSING for values in (one, two))
            yield Difference(place.format(name), *found)


def _diff_lists(first: list[Any], second: list[Any], path: str) -> Iterator[Difference]:
    one, two = _by_name(first), _by_name(second)
    is_named = one is not None and two is not None
    if not is_named and path == "schedule.actions":
        yield from _diff_actions(first, second, path)
        return
    if one is None or two is None:
        if not any(isinstance(value, dict | list) for value in (*first, *second)):
            yield Difference(path, _shorten(first), _shorten(second))
            return
        one, two = ({str(number): value for number, value in enumerate(values)} for values in (first, second))
    yield from _diff_fields(one, two, f"{path}[{{}}]")
    if is_named and list(one) != list(two) and one.keys() == two.keys():
        yield Difference(f"{path}, order", _shorten(list(one)), _shorten(list(two)))


def _diff_actions(first: list[str], second: list[str], path: str) -> Iterator[Difference]:
    for rank in range(max(len(first), len(second))):
        rows = [rows[rank].split() if rank < len(rows) else None for rows in (first, second)]
        one, two = rows
        if one is None or two is None:
            yield Difference(
                f"{path}[{rank}]", *(MISSING if row is None else counted(len(row), "action") for row in rows)
            )
        elif one != two:
            same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
            cells = (row[same] if same < len(row) else "the end of the row" for row in (one, two))
            yield Difference(f"{path}[{rank}][{same}]", *cells)


def _by_name(values: list[Any]) -> dict[str, Any] | None:
    """Key a list by name if it consists of named objects or (name, value) pairs with unique names, else return None."""
    found: dict[str, Any] = {}
    for value in values:
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            name, rest = value["name"], value
        elif isinstance(value, list) and [isinstance(one, str) for one in value] == [True, False]:
            name, rest = value
        else:
            return None
        if name in found:
            return None
        found[name] = rest
    return found


def _shorten(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 1]}…"
