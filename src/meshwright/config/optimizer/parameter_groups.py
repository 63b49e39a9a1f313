"""Settings of single parameters: `train.parameter_groups`, its syntax and its rules.

Entries name a role or full-model names, so they mean the same on any layout. Later entries win.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.errors import ConfigError
from meshwright.optim.role import Role, decays
from meshwright.settings.violation import Violation, format_value

KEY = "train.parameter_groups"
NAMES = ("lr", "weight_decay")
SYNTAX = "an entry is role:key=value,… or glob:key=value,… with keys lr and weight_decay, such as embedding:lr=0.01"


def group_settings(train: TrainConfig, name: str, role: str, *, num_dims: int) -> tuple[float, float]:
    """Return the peak learning rate and the weight decay of a parameter; the configuration has no violation.

    Args:
        train: the `train` section.
        name: name in the full model.
        role: its role.
        num_dims: number of its dims.
    """
    found = {"lr": train.lr, "weight_decay": train.weight_decay if decays(role, num_dims) else 0.0}
    for entry in train.parameter_groups:
        pattern, values = _parse(entry)
        if _matches(pattern, name, role):
            found |= values
    return found["lr"], found["weight_decay"]


def _matches(pattern: str, name: str, role: str) -> bool:
    return pattern == role if pattern in tuple(Role) else fnmatchcase(name, pattern)


def _parse(entry: str) -> tuple[str, Mapping[str, float]]:
    """Return the role or glob, and the settings.

    Raises:
        ValueError: the entry has another syntax, or a value is out of range.
    """
    pattern, colon, words = entry.rpartition(":")
    values: dict[str, float] = {}
    for word in words.split(","):
        name, equals, number = (part.strip() for part in word.partition("="))
        if not (colon and pattern and equals) or name not in NAMES or name in values:
            raise ValueError(f"{word or 'an empty setting'} is not lr=… or weight_decay=…, each at most once")
        value = float(number)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} = {number} is negative or not finite")
        values[name] = value
    return pattern.strip(), values


def group_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `train.parameter_groups`: syntax, and parameters that exist."""
    entries = config.train.parameter_groups
    for entry in entries:
        others = tuple(one for one in entries if one is not entry)
        try:
            pattern, _ = _parse(entry)
        except ValueError as error:
            what = f"{KEY} has the entry {format_value(entry)}: {error}"
            yield Violation(ConfigError, what, KEY, SYNTAX, [{KEY: others}])
            return
        parameters = model_facts(config).named_parameters()
        if not any(_matches(pattern, name, one.role) for name, one in parameters):
            roles = dict.fromkeys(one.role.value for _, one in parameters)
            what = f"{KEY} has {format_value(entry)}, which matches no parameter"
            rule = f"an entry starts with a role, which are {', '.join(roles)} here, or with a glob over full names"
            yield Violation(ConfigError, what, KEY, rule, [{KEY: others}])
            return
