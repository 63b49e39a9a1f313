"""Rules for the optimizer: that it exists, and that the model's parameters can have its states and updates."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.config.translate import value_named
from meshwright.errors import ConfigError
from meshwright.optim.catalogue import BUILT_IN, KEY, OTHERS, OWN_RULE, RULE, optimizers_by_role
from meshwright.optim.contract import MatrixOptimizer
from meshwright.optim.role import Role
from meshwright.settings.import_object import OBJECT_NAME
from meshwright.settings.violation import Violation, format_value
from meshwright.units import counted

UNREAD = {"adamw": ("momentum",), "sgd": ("beta1", "beta2", "eps")}
"""Keys of `train` that built-in optimizers don't read."""


def optimizer_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations: states with dims that parameters lack, whole matrices that are none, keys without effect.

    Raises:
        ConfigError: there is no such optimizer, or what it says of itself is wrong.
    """
    name = config.train.optimizer
    if name not in BUILT_IN and OBJECT_NAME.fullmatch(name) is None:
        near = value_named(KEY, name) or next(iter(difflib.get_close_matches(name.lower(), BUILT_IN)), OTHERS)
        own = "" if near != OTHERS or value_named(KEY, name) else "your own by package.module:factory"
        yield Violation(ConfigError, f"unknown optimizer: {name}", KEY, RULE, [{KEY: near}], otherwise=own)
        return
    by_role = optimizers_by_role(config.train.optimizer)
    for name, parameter in model_facts(config).named_parameters():
        optimizer, dims = by_role[parameter.role][1], len(parameter.shape)
        what = f"{name} has role {parameter.role} and {counted(dims, 'dim')}, but {config.train.optimizer}"
        fixes = [{KEY: OTHERS}]
        for state, one in optimizer.states(parameter.role).items():
            if max(one.dims or (0,)) >= dims:
                yield Violation(ConfigError, f"{what} keeps {state} along dims {one.dims}", KEY, OWN_RULE, fixes)
                return
        if isinstance(optimizer, MatrixOptimizer) and dims != (3 if parameter.role is Role.EXPERTS else 2):
            rule = "a matrix has two dims, and matrices that are stacked, with role experts, three"
            yield Violation(ConfigError, f"{what} updates whole matrices", KEY, rule, fixes)
            return
    yield from _unread(config.train)


def _unread(train: TrainConfig) -> Iterator[Violation]:
    """Reject keys that the optimizer doesn't read, except at their default values, as in files of saved runs."""
    for key in UNREAD.get(train.optimizer, ()):
        value, default = getattr(train, key), TrainConfig.model_fields[key].default
        if value != default:
            others = " and ".join(name for name in BUILT_IN if key not in UNREAD.get(name, ()))
            what, rule = f"train.{key} = {format_value(value)} has no effect", f"it applies to {others}"
            fixes = [{f"train.{key}": default}]
            yield Violation(ConfigError, what, f"train.{key}", f"{rule}, but {KEY} is {train.optimizer}", fixes)
