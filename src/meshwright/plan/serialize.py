"""JSON serialization of plans: human-readable, diffable output and a strict reader.

All fields are written by name and read by type. Plans with a different version, missing or unknown fields, or values
of the wrong type are rejected rather than filled with defaults. The schedule is written as rows of actions, in the
format of table files (`pipeline/schedule_table`).
"""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from meshwright.errors import ConfigError, ScheduleError
from meshwright.features.registry import PART_NAMES, part_types
from meshwright.pipeline.actions import Action, Overlap
from meshwright.pipeline.schedule_table import Schedule, parse_action
from meshwright.plan.run_plan import FORMAT, LayerSpec, PlannedKernels, PlannedOperator, RunPlan, SavedBytes

WIDTH = 160
"""Maximum line length, where a value can be broken into several lines."""
REGENERATE_FIX = "a new plan, which meshwright plan writes with the words of the run and -o"

OMITS_DEFAULTS = (PlannedOperator, PlannedKernels, RunPlan)
"""Types that are written without fields that have their default, as most of theirs do."""

LATER: dict[type, tuple[str, ...]] = {SavedBytes: ("fused",), LayerSpec: ("operators",)}
"""Fields that plans of this format lack if they are from before them."""

T = TypeVar("T")


def to_json(plan: RunPlan) -> str:
    """Serialize a plan; `from_json` is the inverse. Values that fit on one line are written on one line."""
    return "\n".join(_lines(encode(plan), 0)) + "\n"


def canonical(value: Any) -> str:
    """Return an encoded value as canonical JSON, for hashing."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def encode(value: Any) -> Any:
    """Encode a plan or a part of it as JSON values, with fields in declaration order."""
    if isinstance(value, Schedule):
        return {
            "kind": value.kind,
            "num_microbatches": value.num_microbatches,
            "stage_ranks": list(value.stage_ranks),
            "actions": [" ".join(map(str, row)) for row in value.actions],
        }
    if isinstance(value, LayerSpec):
        parts = dict.fromkeys(PART_NAMES) | {part.feature: encode(part) for part in value.parts}
        names = [name for field in fields(value) for name in (PART_NAMES if field.name == "parts" else (field.name,))]
        return {name: parts[name] if name in parts else encode(getattr(value, name)) for name in names}
    if is_dataclass(value):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        kind: type = type(value)
        omitted = _defaults(kind) if kind in OMITS_DEFAULTS else {}
        return {name: encode(one) for name, one in found.items() if name not in omitted or one != omitted[name]}
    if isinstance(value, tuple):
        return [encode(one) for one in value]
    if isinstance(value, StrEnum):
        return value.value
    assert value is None or type(value) in (bool, int, str), f"{value!r} can't be stored in a plan"
    return value


def _lines(value: Any, depth: int) -> list[str]:
    short = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(short) + depth <= WIDTH:
        return [short]
    named = sorted(value.items()) if isinstance(value, dict) else [("", one) for one in value]
    found = ["{" if isinstance(value, dict) else "["]
    for number, (name, one) in enumerate(named):
        first, *others = _lines(one, depth + 1)
        start = f"{json.dumps(name)}: {first}" if isinstance(value, dict) else first
        own = [" " * (depth + 1) + start, *others]
        found += [*own[:-1], own[-1] + ("," if number < len(named) - 1 else "")]
    return [*found, " " * depth + ("}" if isinstance(value, dict) else "]")]


def from_json(text: str, *, where: str) -> RunPlan:
    """Parse a plan written by `to_json` without verifying it.

    Args:
        text: contents of the file.
        where: path of the file, for errors.

    Raises:
        ConfigError: the text is not a plan of this version, or a field is missing, unknown or has the wrong type.
        ScheduleError: an action of the schedule can't be parsed.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"not a plan: {error}", where=where, rule="a plan is a JSON file", fix=REGENERATE_FIX
        ) from None
    if not isinstance(found, dict) or "format" not in found:
        rule = f"a plan is a JSON object with a field format = {FORMAT}"
        raise ConfigError("not a plan", where=where, rule=rule, fix=REGENERATE_FIX)
    if type(found["format"]) is not int or found["format"] != FORMAT:
        what = f"a plan of format {json.dumps(found['format'])}"
        rule = f"this version of Meshwright reads plans of format {FORMAT}"
        raise ConfigError(what, where=f"{where}, format", rule=rule, fix=f"{REGENERATE_FIX}, in this version")
    return _Reader(where).read(RunPlan, found, "")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return found


@cache
def _defaults(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass that have defaults."""
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return the field types of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


class _Reader:
    """Typed reader of JSON values; errors name the field."""

    def __init__(self, where: str) -> None:
        self._where = where

    def read(self, kind: type[T], value: Any, path: str) -> T:
        """Read a value of type `kind`; `path` is its location in the file."""
        found: T = self._read(kind, value, path)
        return found

    def _read(self, kind: Any, value: Any, path: str) -> Any:
        options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        fitting = next((option for option in options if _fits(option, value)), None)
        if fitting is None:
            self._refuse_type(" or ".join(map(_type_name, options)), value, path)
        if fitting is Schedule:
            return self._schedule(value, path)
        if is_dataclass(fitting):
            assert isinstance(fitting, type)
            if fitting is LayerSpec:
                return self._kind(value, path)
            optional = _defaults(fitting) if fitting in OMITS_DEFAULTS else LATER.get(fitting, ())
            given = {name: hint for name, hint in _hints(fitting).items() if name in value or name not in optional}
            return fitting(**self._fields(given, value, path))
        if get_origin(fitting) is tuple:
            return self._tuple(get_args(fitting), value, path)
        if issubclass(fitting, StrEnum):
            if value not in tuple(fitting):
                self._refuse_type(f"one of {', '.join(fitting)}", value, path)
            return fitting(value)
        return value

    def _fields(self, hints: dict[str, Any], value: dict[str, Any], path: str) -> dict[str, Any]:
        unknown, missing = sorted(value.keys() - hints.keys()), [name for name in hints if name not in value]
        if unknown:
            self._refuse("unknown field", _join(path, unknown[0]), f"the fields are {', '.join(hints)}")
        if missing:
            self._refuse("missing field", _join(path, missing[0]), f"a plan of format {FORMAT} has all fields")
        return {name: self._read(hint, value[name], _join(path, name)) for name, hint in hints.items()}

    def _kind(self, value: dict[str, Any], path: str) -> LayerSpec:
        parts = {name: one | None for name, one in part_types().items()}
        each = (parts if name == "parts" else {name: hint} for name, hint in _hints(LayerSpec).items())
        hints = {name: hint for one in each for name, hint in one.items()}
        hints = {name: hint for name, hint in hints.items() if name in value or name not in LATER[LayerSpec]}
        found = self._fields(hints, {**dict.fromkeys(PART_NAMES), **value}, path)  # plans from before a feature lack it
        own = tuple(part for name in PART_NAMES if (part := found.pop(name)) is not None)
        return LayerSpec(**found, parts=own)

    def _tuple(self, kinds: tuple[Any, ...], value: list[Any], path: str) -> tuple[Any, ...]:
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(kinds) != len(value):
            self._refuse_type(f"a list of {len(kinds)}", value, path)
        pairs = enumerate(zip(kinds, value, strict=True))
        return tuple(self._read(kind, one, f"{path}[{i}]") for i, (kind, one) in pairs)

    def _schedule(self, value: dict[str, Any], path: str) -> Schedule:
        rows = tuple[str, ...]
        found = self._fields({**_hints(Schedule), "actions": rows}, value, path)
        actions = tuple(self._row(row, f"{path}.actions[{rank}]") for rank, row in enumerate(found["actions"]))
        return Schedule(found["kind"], found["num_microbatches"], found["stage_ranks"], actions)

    def _row(self, row: str, path: str) -> tuple[Action | Overlap, ...]:
        found = []
        for number, cell in enumerate(row.split(), start=1):
            try:
                found.append(parse_action(cell))
            except ScheduleError as error:
                where = f"{self._where}, {path}, action {number}"
                raise ScheduleError(error.what, where=where, rule=error.rule, fix=error.fix or REGENERATE_FIX) from None
        return tuple(found)

    def _refuse_type(self, expected: str, value: Any, path: str) -> NoReturn:
        text = json.dumps(value, ensure_ascii=False)
        text = text if len(text) < 60 else f"{text[:57]}…"
        self._refuse(f"{path.rpartition('.')[2] or 'the plan'} = {text}", path, f"must be {expected}")

    def _refuse(self, what: str, path: str, rule: str) -> NoReturn:
        if not what.startswith(path.rpartition(".")[2]):
            what = f"{what} {path.rpartition('.')[2]}"
        raise ConfigError(what, where=f"{self._where}, {path}" if path else self._where, rule=rule, fix=REGENERATE_FIX)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _fits(kind: Any, value: Any) -> bool:
    """Return whether a JSON value matches a type; bools do not count as ints."""
    if kind in (None, type(None)):
        return value is None
    if is_dataclass(kind):
        return isinstance(value, dict)
    if get_origin(kind) is tuple:
        return isinstance(value, list)
    return type(value) is (str if issubclass(kind, StrEnum) else kind)


def _type_name(kind: Any) -> str:
    """Return the display name of a type."""
    if is_dataclass(kind):
        return "an object"
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        return f"a list of {_plural_name(inner[0])}" if inner[-1] is Ellipsis else f"a list of {len(inner)}"
    return {int: "an int", bool: "a bool", type(None): "null"}.get(kind, "a string")


def _plural_name(kind: Any) -> str:
    return {int: "ints", str: "strings"}.get(kind, "objects" if is_dataclass(kind) else "lists")
