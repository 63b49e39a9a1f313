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
from meshwright.settings.import_object import OBJECT_NAME
from meshwright.settings.violation import Violation, format_value
from meshwright.units import counted

MOMENTUM = "train.momentum"


def optimizer_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations: states with dims that parameters lack, whole matrices that are none, keys without effect.

    Raises:
        ConfigError: there is no such optimizer, or what it says of itself is wrong.
    """
    name = config.train.optimizer
    if name not in BUILT_IN and OBJECT_NAME.fullmatch(name) is None:
        near = value_named(KEY, name) or difflib.get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.0)[0]
        yield Violation(ConfigError, f"unknown optimizer: {name}", KEY, RULE, [{KEY: near}])
        return
    by_role, default = optimizers_by_role(config.train.optimizer), TrainConfig.model_fields["momentum"].default
    for name, parameter in model_facts(config).named_parameters():
        optimizer, dims = by_role[parameter.role][1], len(parameter.shape)
        what = f"{name} has role {parameter.role} and {counted(dims, 'dim')}, but {config.train.optimizer}"
        fixes = [{KEY: OTHERS}]
        for state, one in optimizer.states(parameter.role).items():
            if max(one.dims or (0,)) >= dims:
                yield Violation(ConfigError, f"{what} keeps {state} along dims {one.dims}", KEY, OWN_RULE, fixes)
                return
        if isinstance(optimizer, MatrixOptimizer) and dims not in (2, 3):
            rule = "a matrix has two dims, and matrices that are stacked three"
            yield Violation(ConfigError, f"{what} updates whole matrices", KEY, rule, fixes)
            return
    if config.train.momentum != default and config.train.optimizer == OTHERS:
        what = f"{MOMENTUM} = {format_value(config.train.momentum)} has no effect"
        rule = f"it applies to {' and '.join(name for name in BUILT_IN if name != OTHERS)}, but {KEY} is {OTHERS}"
        yield Violation(ConfigError, what, MOMENTUM, rule, [{MOMENTUM: default}])
