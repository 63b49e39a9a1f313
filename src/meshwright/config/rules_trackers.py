"""Rules for the trackers of a run. Whether they are installed is checked when a run starts: a plan needs none."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError
from meshwright.settings.import_object import OBJECT_NAME
from meshwright.settings.violation import Violation

TRACKERS = "train.trackers"
BUILT_IN = ("tensorboard", "wandb", "trackio")
RULE = f"a tracker is {', '.join(BUILT_IN)}, or package.module:Sink for your own"


def tracker_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield trackers that are neither built in nor the name of an object."""
    names = config.train.trackers
    for name in names:
        if name in BUILT_IN or OBJECT_NAME.fullmatch(name):
            continue
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        fixes = dict.fromkeys([replace_tracker(names, name, *near), replace_tracker(names, name)])
        yield Violation(ConfigError, f"no such tracker: {name!r}", TRACKERS, RULE, [{TRACKERS: fix} for fix in fixes])


def replace_tracker(names: tuple[str, ...], name: str, *others: str) -> tuple[str, ...]:
    """Return the names with one replaced by others, each once."""
    found = (one for old in names for one in (others if old == name else (old,)))
    return tuple(dict.fromkeys(found))
