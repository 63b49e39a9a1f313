"""Recomputation policies of single blocks: `recompute.blocks`, its syntax and its rules.

Entries name layers of the whole model, so they mean the same on any layout and number of stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RecomputeConfig, RunConfig
from meshwright.errors import ConfigError
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.settings.number_ranges import RANGES, format_ranges, parse_ranges
from meshwright.settings.violation import Violation, format_value

KEY = "recompute.blocks"
ENTRY = re.compile(rf"({'|'.join(RecomputePolicy)}):{RANGES}")
SYNTAX = "an entry is policy:layers, such as full:0-3 or selective:4,6-7"


def policy_of(config: RecomputeConfig, layer: int) -> RecomputePolicy:
    """Return the policy of a layer's block; the configuration has no violation."""
    for entry in config.blocks:
        policy, ranges = _parse(entry)
        if any(layer in one for one in ranges):
            return policy
    return RecomputePolicy(config.policy)


def _parse(entry: str) -> tuple[RecomputePolicy, list[range]]:
    """Return the policy and layers of an entry with correct syntax."""
    policy, _, words = entry.partition(":")
    return RecomputePolicy(policy), parse_ranges(words)


def _entry(policy: RecomputePolicy, ranges: list[range]) -> str:
    return f"{policy}:{format_ranges(ranges)}"


def recompute_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `recompute.blocks`: syntax, existing layers, one policy a layer."""
    entries, num_layers = config.recompute.blocks, model_facts(config).num_layers
    seen: dict[int, str] = {}
    for entry in entries:
        others = tuple(one for one in entries if one is not entry)
        if not ENTRY.fullmatch(entry):
            example = f"{RecomputePolicy.FULL}:0-{num_layers - 1}"
            what = f"{KEY} has the entry {format_value(entry)}"
            policies = ", ".join(RecomputePolicy)
            yield _violation(what, f"{SYNTAX}; policies are {policies}", (*others, example), others)
            return
        policy, ranges = _parse(entry)
        missing = [layer for one in ranges for layer in (one.start, one.stop - 1) if layer >= num_layers]
        backwards = [one for one in ranges if not one]
        if backwards:
            what = f"{KEY} has the range {backwards[0].start}-{backwards[0].stop - 1} in {entry}"
            swapped = _entry(policy, [range(backwards[0].stop - 1, backwards[0].start + 1)])
            yield _violation(what, "a range is first-last", (*others, swapped), others)
            return
        if missing:
            what = f"{KEY} names layer {missing[0]} in {entry}, but the model has layers 0-{num_layers - 1}"
            within = [range(one.start, min(one.stop, num_layers)) for one in ranges if one.start < num_layers]
            fixes = [(*others, _entry(policy, within))] if within else []
            yield _violation(what, "entries name layers of the whole model, from 0", *fixes, others)
            return
        for layer in (layer for one in ranges for layer in one):
            if layer in seen:
                what = f"{KEY} names layer {layer} twice: {seen[layer]} and {entry}"
                yield _violation(what, "a layer has one policy", others)
                return
            seen[layer] = entry


def _violation(what: str, rule: str, *fixes: tuple[str, ...]) -> Violation:
    return Violation(ConfigError, what, KEY, rule, [{KEY: fix} for fix in fixes])
