"""Meaning and rules of keys with a syntax of their own: the learning rate of a step, settings of a
parameter, the recomputation policy of a block, steps and ranks to profile, and trackers; and notes on all keys.

Entries name steps, ranks, layers and parameters of the whole model, so they mean the same on any layout.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from numbers import Real
from typing import Any

from meshwright.comm.compression.catalogue import EXACT
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RecomputeConfig, RunConfig, TrainConfig
from meshwright.errors import ConfigError
from meshwright.nn.recompute_policy import RecomputePolicy
from meshwright.optim.role import Role, decays
from meshwright.settings.import_object import OBJECT_NAME, import_object, raised
from meshwright.settings.violation import Violation, format_value

SCHEDULE, COSINE, WSD = "train.lr_schedule", "cosine", "wsd"
OWN_RULE = "a function of the step, from 1, and the train section gives the learning rate: finite, and at least 0"
MAX_TRIED = 1000
"""Steps of an own schedule that are tried before a run."""
GROUPS = "train.parameter_groups"
SETTINGS = ("lr", "weight_decay")
BLOCKS = "recompute.blocks"
STEPS, RANKS = "train.profile", "train.profile_ranks"
ALL = "all"
FIRST_RANK = ("0",)
TRACKERS = "train.trackers"
BUILT_IN_TRACKERS = ("tensorboard", "wandb", "trackio")
TRACKER_RULE = f"a tracker is {', '.join(BUILT_IN_TRACKERS)}, or package.module:Sink for your own"
RANGE = r"\d+(?:-\d+)?"
BLOCKS_ENTRY = re.compile(rf"({'|'.join(RecomputePolicy)}):{RANGE}(?:,{RANGE})*")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate for `step`, which counts from 1; proofs go beyond `config.steps`.

    Cosine with warm-up, warm-up–stable–decay (Hu et al. 2024), or the user's own schedule.

    Raises:
        ConfigError: an own schedule raises, or gives no learning rate.
    """
    if config.lr_schedule not in (COSINE, WSD):
        return own_rate(step, config)
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.lr_schedule == COSINE:
        progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        factor = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        stable_until = config.steps - config.decay_steps
        factor = 1.0 if step <= stable_until else max(0.0, (config.steps - step) / max(1, config.decay_steps))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)


def own_rate(step: int, config: TrainConfig) -> float:
    """Return what the user's function gives for a step.

    Raises:
        ConfigError: it can't be imported, raises, or gives no learning rate.
    """
    name = config.lr_schedule
    function = _own_schedule(name)
    try:
        rate = function(step, config)
    except Exception as error:
        raise _bad_schedule(f"{name} raises {raised(error)} in step {step}") from error
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 <= float(rate) < math.inf:
        raise _bad_schedule(f"{name} gives {rate!r} in step {step}")
    return float(rate)


@cache
def _own_schedule(name: str) -> Callable[[int, TrainConfig], Any]:
    found: Callable[[int, TrainConfig], Any] = import_object(
        name, key=SCHEDULE, rule=OWN_RULE, format_setting=lambda path: f"{SCHEDULE}={path}"
    )
    return found


def _bad_schedule(what: str) -> ConfigError:
    return ConfigError(what, where=SCHEDULE, rule=OWN_RULE, fix=f"correct it, or {SCHEDULE}={COSINE}")


def schedule_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `train.lr_schedule` and its lengths; an own schedule is tried on some steps.

    Raises:
        ConfigError: an own schedule can't be imported, raises, or gives no learning rate.
    """
    from meshwright.config.translate import value_named  # ranks don't need it

    train, name = config.train, config.train.lr_schedule
    if name not in (COSINE, WSD):
        if OBJECT_NAME.fullmatch(name) is None:
            near = value_named(SCHEDULE, name) or next(
                iter(difflib.get_close_matches(name.lower(), (COSINE, WSD))), COSINE
            )
            rule = f"a schedule is {COSINE}, {WSD}, or package.module:function for your own"
            yield Violation(ConfigError, f"unknown schedule: {name}", SCHEDULE, rule, [{SCHEDULE: near}])
            return
        for step in (*range(1, train.steps + 1, -(-train.steps // MAX_TRIED)), train.steps):
            own_rate(step, train)
    room = max(0, train.steps - train.warmup_steps)
    if name == WSD and train.decay_steps > room:
        what = f"warm-up of {train.warmup_steps} and decay of {train.decay_steps} exceed {train.steps} steps"
        fixes = [{"train.decay_steps": room}, {"train.steps": train.warmup_steps + train.decay_steps}]
        yield Violation(ConfigError, what, "train.decay_steps", "warmup_steps + decay_steps ≤ steps", fixes)


def group_settings(train: TrainConfig, name: str, role: str, *, num_dims: int) -> tuple[float, float]:
    """Return the peak learning rate and the weight decay of a parameter: later entries of `train.parameter_groups` win.

    Args:
        train: the `train` section.
        name: name in the full model.
        role: its role.
        num_dims: number of its dims.
    """
    found = {"lr": train.lr, "weight_decay": train.weight_decay if decays(role, num_dims) else 0.0}
    for entry in train.parameter_groups:
        pattern, values = _parse_group(entry)
        if _matches(pattern, name, role):
            found |= values
    return found["lr"], found["weight_decay"]


def _matches(pattern: str, name: str, role: str) -> bool:
    return pattern == role if pattern in tuple(Role) else fnmatchcase(name, pattern)


def _parse_group(entry: str) -> tuple[str, Mapping[str, float]]:
    """Return the role or glob, and the settings.

    Raises:
        ValueError: the entry has another syntax, or a value is out of range.
    """
    pattern, colon, words = entry.rpartition(":")
    values: dict[str, float] = {}
    for word in words.split(","):
        name, equals, number = (part.strip() for part in word.partition("="))
        if not (colon and pattern and equals) or name not in SETTINGS or name in values:
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
        fixes = [{GROUPS: tuple(one for one in entries if one is not entry)}]
        try:
            pattern, _ = _parse_group(entry)
        except ValueError as error:
            what = f"{GROUPS} has the entry {format_value(entry)}: {error}"
            rule = (
                "an entry is role:key=value,… or glob:key=value,… with keys lr and weight_decay, such as "
                "embedding:lr=0.01"
            )
            yield Violation(ConfigError, what, GROUPS, rule, fixes)
            return
        parameters = model_facts(config).named_parameters()
        if not any(_matches(pattern, name, one.role) for name, one in parameters):
            roles = dict.fromkeys(one.role.value for _, one in parameters)
            what = f"{GROUPS} has {format_value(entry)}, which matches no parameter"
            rule = f"an entry starts with a role, which are {', '.join(roles)} here, or with a glob over full names"
            yield Violation(ConfigError, what, GROUPS, rule, fixes)
            return


def policy_of(config: RecomputeConfig, layer: int) -> RecomputePolicy:
    """Return the recomputation policy of a layer's block; the configuration has no violation."""
    for entry in config.blocks:
        policy, _, words = entry.partition(":")
        if any(layer in one for one in parse_ranges(words)):
            return RecomputePolicy(policy)
    return RecomputePolicy(config.policy)


def recompute_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `recompute.blocks`: syntax, existing layers, one policy a layer."""
    entries, num_layers = config.recompute.blocks, model_facts(config).num_layers
    seen: dict[int, str] = {}
    for entry in entries:
        others = tuple(one for one in entries if one is not entry)
        policy, _, words = entry.partition(":")
        if not BLOCKS_ENTRY.fullmatch(entry):
            example = f"{RecomputePolicy.FULL}:0-{num_layers - 1}"
            rule = "an entry is policy:layers, such as full:0-3 or selective:4,6-7; policies are "
            rule += ", ".join(RecomputePolicy)
            yield _blocks(f"has the entry {format_value(entry)}", rule, (*others, example), others)
            return
        ranges = parse_ranges(words)
        missing = [layer for one in ranges for layer in (one.start, one.stop - 1) if layer >= num_layers]
        if backwards := [one for one in ranges if not one]:
            what = f"has the range {backwards[0].start}-{backwards[0].stop - 1} in {entry}"
            swapped = format_ranges([range(backwards[0].stop - 1, backwards[0].start + 1)])
            yield _blocks(what, "a range is first-last", (*others, f"{policy}:{swapped}"), others)
            return
        if missing:
            what = f"names layer {missing[0]} in {entry}, but the model has layers 0-{num_layers - 1}"
            within = [range(one.start, min(one.stop, num_layers)) for one in ranges if one.start < num_layers]
            fixes = [(*others, f"{policy}:{format_ranges(within)}")] if within else []
            yield _blocks(what, "entries name layers of the whole model, from 0", *fixes, others)
            return
        for layer in (layer for one in ranges for layer in one):
            if layer in seen:
                what = f"names layer {layer} twice: {seen[layer]} and {entry}"
                yield _blocks(what, "a layer has one policy", others)
                return
            seen[layer] = entry


def _blocks(what: str, rule: str, *fixes: tuple[str, ...]) -> Violation:
    return Violation(ConfigError, f"{BLOCKS} {what}", BLOCKS, rule, [{BLOCKS: fix} for fix in fixes])


def parse_ranges(text: str) -> list[range]:
    """Return the ranges of a text such as `4,6-7`; one whose last number is before its first is empty."""
    bounds = (word.partition("-") for word in text.split(","))
    return [range(int(first), int(last or first) + 1) for first, _, last in bounds]


def format_ranges(ranges: Iterable[range]) -> str:
    """Return the text of ranges that aren't empty."""
    return ",".join(str(one.start) if len(one) == 1 else f"{one.start}-{one.stop - 1}" for one in ranges)


def merge_ranges(ranges: Iterable[range]) -> list[range]:
    """Return the fewest ranges that hold the same numbers, in ascending order."""
    merged: list[range] = []
    for one in sorted(ranges, key=lambda one: one.start):
        if merged and one.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, one.stop))
        else:
            merged.append(one)
    return merged


def profiled_steps(train: TrainConfig) -> list[range]:
    """Return the steps to profile as ranges of consecutive steps, in order; the configuration has no violation."""
    return merge_ranges(parse_ranges(",".join(train.profile))) if train.profile else []


def profiled_ranks(config: RunConfig) -> list[range]:
    """Return the ranks to profile, in order; the configuration has no violation."""
    if config.train.profile_ranks == (ALL,):
        return [range(config.mesh.axes().num_ranks())]
    return merge_ranges(parse_ranges(",".join(config.train.profile_ranks)))


def profile_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `train.profile` and `train.profile_ranks`: syntax, existing steps and ranks,
    and ranks only with steps."""
    train, num_ranks = config.train, config.mesh.axes().num_ranks()
    if train.profile:
        has = f"train.steps = {train.steps}"
        yield from _range_violations(STEPS, "step", train.profile, range(1, train.steps + 1), has, default=())
    if train.profile_ranks != (ALL,):
        has = f"the mesh has {num_ranks} rank{'s' * (num_ranks > 1)}"
        yield from _range_violations(RANKS, "rank", train.profile_ranks, range(num_ranks), has, default=FIRST_RANK)
    if train.profile_ranks != FIRST_RANK and not train.profile:
        what = f"{RANKS} without {STEPS} has no effect"
        rule = f"{RANKS} says which ranks write a profile of the steps in {STEPS}"
        yield Violation(ConfigError, what, RANKS, rule, [{STEPS: (str(train.steps),)}, {RANKS: FIRST_RANK}])


def _range_violations(
    key: str, noun: str, entries: tuple[str, ...], allowed: range, has: str, *, default: tuple[str, ...]
) -> Iterator[Violation]:
    """Yield the first entry that is neither a number nor a range, or goes beyond `allowed`."""
    words = [word.strip() for word in ",".join(entries).split(",")]
    ranges = [parse_ranges(word)[0] if re.fullmatch(RANGE, word) else None for word in words]
    for word, one in zip(words, ranges, strict=True):
        if one is None:
            what = f"{key} has {word!r}"
        elif not one:
            what = f"{key} has the range {word}, whose last {noun} is before its first"
        elif one.start not in allowed or one[-1] not in allowed:
            beyond = one.start if one.start not in allowed else one[-1]
            what = f"{key} names {noun} {beyond}, but {has}"
        else:
            continue
        kept = [range(max(one.start, allowed.start), min(one.stop, allowed.stop)) for one in ranges if one is not None]
        fixes = [(format_ranges(merge_ranges(filter(len, kept))),)] if any(kept) else []
        example = f"{noun}s are numbers and ranges first-last, such as 5,10-12"
        rule = f"{example}; this run has {noun}s {allowed.start}-{allowed.stop - 1}"
        yield Violation(ConfigError, what, key, rule, [{key: fix} for fix in (*fixes, default)])
        return


def tracker_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield trackers that are neither built in nor the name of an object. Whether they are installed is checked when a
    run starts: a plan needs none."""
    names = config.train.trackers
    for name in names:
        if name not in BUILT_IN_TRACKERS and not OBJECT_NAME.fullmatch(name):
            near = difflib.get_close_matches(name, BUILT_IN_TRACKERS, n=1)
            kept = dict.fromkeys([replace_tracker(names, name, *near), replace_tracker(names, name)])
            fixes = [{TRACKERS: fix} for fix in kept]
            yield Violation(ConfigError, f"no such tracker: {name!r}", TRACKERS, TRACKER_RULE, fixes)


def replace_tracker(names: tuple[str, ...], name: str, *others: str) -> tuple[str, ...]:
    """Return the names with one replaced by others, each once."""
    found = (one for old in names for one in (others if old == name else (old,)))
    return tuple(dict.fromkeys(found))


def notes_of(config: RunConfig) -> Iterator[str]:
    """Yield what plan, prove and run say of a configuration first: where the model's weights come from, what of it is
    set aside, and settings that have no effect."""
    yield from config.family.notes(run_facts(config))
    comm, mesh, train = config.comm, config.mesh, config.train
    if comm.gradients != EXACT and mesh.axes().data_parallel() == 1:
        yield f"comm.gradients = {comm.gradients} has no effect: dp_replicate = dp_shard = 1, so none are reduced"
    if comm.weights != EXACT and mesh.dp_shard == 1:
        yield f"comm.weights = {comm.weights} has no effect: dp_shard = 1, so none are gathered"
    if train.warmup_steps > train.steps and train.lr_schedule in (COSINE, WSD):  # common in short trials of long runs
        yield (
            f"train.warmup_steps = {train.warmup_steps} exceeds train.steps = {train.steps}: the learning rate only "
            f"reaches {learning_rate(train.steps, train):.3g}, not train.lr = {train.lr:g}"
        )
