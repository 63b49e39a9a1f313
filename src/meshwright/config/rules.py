"""Rules that cross sections: axes against ranks, heads against tp, batch arithmetic.

One place, checked before any process starts; each rule says what is wrong, where it was set, the rule, and a fix
that works. Nothing is ever changed silently to make a rule hold.

A violated rule offers fixes; those that would only violate another rule are left out of the error.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.rules_compression import comm_violations
from meshwright.config.rules_precision import number_violations
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.settings.nearby_sizes import round_up
from meshwright.settings.violation import Fix, Violation, as_word, as_words

Origins = Mapping[str, str]
"""Where each key was set (`command line`, a file, `preset llama-tiny`), by dotted key."""

FREEZE = "train.freeze"
UNAVAILABLE = ("mesh.cp", "mesh.ep")
"""Mesh axes that no version lays work on yet."""
MAX_FIXES = 3
MAX_COMPLETIONS = 3


Rules = Callable[[RunConfig, int | None], Iterator[Violation]]
"""The rules that a run violates, given the number of ranks that a launcher started, or None. Later ones assume that
earlier ones hold: only the first is sure."""


def check(config: RunConfig, origins: Origins, *, num_ranks: int | None = None, rules: Rules | None = None) -> None:
    """Check every rule that crosses keys or sections.

    Args:
        config: the run.
        origins: where each key was set, for the errors.
        num_ranks: ranks that a launcher such as torchrun started; None when we start them ourselves.
        rules: those of this file when None.

    Raises:
        LayoutError: the mesh fits neither the model, the batch nor the number of ranks.
        ConfigError: the model's or the training's keys contradict each other, or one has no effect.
    """
    search = _Search(num_ranks, rules or violations)
    violation = search.first(config)
    if violation is None:
        return
    where = f"{origins[violation.key]}, {violation.key}" if violation.key in origins else f"default of {violation.key}"
    if num_ranks is not None:
        where += f"; WORLD_SIZE={num_ranks} in the environment"
    alone = (fix for fix in violation.fixes if search.first(config.with_keys(fix)) is None)
    fixes = list(islice(alone, MAX_FIXES))
    if not fixes:
        completed = (search.completed(config, fix) for fix in violation.fixes)
        fixes = list(islice(filter(None, completed), 1)) or list(violation.fixes[:1])
    words = [as_words(fix) for fix in fixes]
    fix = " or ".join([*words, violation.otherwise] if violation.otherwise else words)
    raise violation.kind(violation.what, where=where, rule=violation.rule, fix=fix)


def violations(config: RunConfig, num_ranks: int | None) -> Iterator[Violation]:
    """The rules of the configuration alone; `plan.rules` has those of what follows from it, too."""
    yield from _unavailable(config)
    of_family = list(config.family.rules(run_facts(config)))
    yield from (one for one in of_family if one.key != FREEZE)
    yield from _frozen(config)
    yield from (one for one in of_family if one.key == FREEZE)
    yield from _described(config)
    yield from _sequence_parallel(config)
    yield from _ranks(config, num_ranks)
    yield from _batch(config)
    yield from _schedule(config)
    yield from number_violations(config)
    yield from comm_violations(config)
    yield from _without_effect(config)


def repair(config: RunConfig, num_ranks: int | None, rules: Rules | None = None) -> Fix | None:
    """Keys to set so that no rule is violated, none if none is; None where that is not found."""
    return _Search(num_ranks, rules or violations).completed(config, {})


@dataclass(frozen=True)
class _Search:
    """For fixes that violate no other rule."""

    num_ranks: int | None
    rules: Rules

    def first(self, config: RunConfig) -> Violation | None:
        return next(self.rules(config, self.num_ranks), None)

    def completed(self, config: RunConfig, fix: Fix, *, depth: int = MAX_COMPLETIONS) -> Fix | None:
        """`fix` with what else has to be set then, so that no rule is violated; None where that is not found."""
        violation = self.first(config.with_keys(fix))
        if violation is None:
            return fix
        # What this fix has already set stays: setting it again would go round in circles.
        more = (other for other in violation.fixes if depth and not other.keys() & fix.keys())
        found = (self.completed(config, {**fix, **other}, depth=depth - 1) for other in islice(more, MAX_FIXES))
        return next(filter(None, found), None)


def _unavailable(config: RunConfig) -> Iterator[Violation]:
    for key in UNAVAILABLE:
        axis = key.removeprefix("mesh.")
        size = getattr(config.mesh, axis)
        if size > 1:
            # ep's ranks are dp_shard's; cp's go to dp_shard, where they don't go away.
            fixes: list[Fix] = [{f"mesh.{axis}": 1}]
            if axis == "cp":
                fixes.insert(0, {**fixes[0], "mesh.dp_shard": config.mesh.dp_shard * size})
            yield Violation(
                LayoutError,
                f"mesh.{axis} = {size} is not available yet",
                f"mesh.{axis}",
                "this version lays work on pp, dp_replicate, dp_shard and tp",
                fixes,
            )


def _described(config: RunConfig) -> Iterator[Violation]:
    """Refuse descriptions that no layout can follow: other ties, and under tp parameters beside modules."""
    facts, where = model_facts(config), "model.kind"
    first = {kind.full_name(p.name, None) for kind in facts.first for p in kind.parameters}
    for kind in (*facts.first, *facts.every, *facts.kinds, *facts.last):
        modules = {p.name.rpartition(".")[0] for p in kind.parameters}
        for p in kind.parameters:
            if p.tied_to is not None and not (kind in facts.last and p.tied_to in first):
                rule = "an end after the blocks may be tied to a parameter of an end before them, and nothing else"
                otherwise = f"{p.tied_to} among the first ends of Family.describe, and its tie among the last"
                yield Violation(ConfigError, f"{kind.name}/{p.name} is tied to {p.tied_to}", where, rule, [], otherwise)
            module = p.name.rpartition(".")[0]
            inside = any(other != module and (not module or other.startswith(f"{module}.")) for other in modules)
            if config.mesh.tp > 1 and inside:
                what = f"{kind.name}/{p.name} is a parameter beside modules, with mesh.tp = {config.mesh.tp}"
                rule = "under tensor parallel a parameter is in a module that has none inside"
                yield Violation(LayoutError, what, "mesh.tp", rule, [{"mesh.tp": 1}], "a module that holds it alone")


def _sequence_parallel(config: RunConfig) -> Iterator[Violation]:
    """Check that the stream between blocks has a dim to shard, evenly; a family needs no rule of its own for it."""
    edge, tp, key = model_facts(config).edge, config.mesh.tp, "mesh.sequence_parallel"
    if tp == 1 or not config.mesh.sequence_parallel:
        return
    whole: list[Fix] = [{key: False}, {"mesh.tp": 1}]
    if edge.sequence_dim is None:
        what, rule = f"{key} with mesh.tp = {tp}", f"sequence parallel shards the {edge.name} between blocks by tokens"
        yield Violation(LayoutError, what, key, f"{rule}, and the blocks of this model need all of them", whole)
    elif edge.shape[edge.sequence_dim] % tp:
        size = edge.shape[edge.sequence_dim]
        what = f"{key} with mesh.tp = {tp}, which does not divide {size} tokens of the {edge.name}"
        yield Violation(LayoutError, what, key, "every rank of tp has as many tokens of a sample", whole)


def _frozen(config: RunConfig) -> Iterator[Violation]:
    """Globs that freeze nothing are misspelt; a model that is frozen whole has nothing to train."""
    names, globs = model_facts(config).parameter_names(), config.train.freeze
    for glob in globs:
        if not fnmatch.filter(names, glob):
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
            rest = tuple(other for other in globs if other != glob)
            kept_globs = [(*rest, near[0]), *([rest] if rest else []), ()]
            yield Violation(
                ConfigError,
                f"train.freeze has {glob}, which is no parameter's name",
                "train.freeze",
                f"names are as {near[0]}; * stands for any part of them",
                [{"train.freeze": kept} for kept in kept_globs if not _match_all(kept, names)],
            )
    if _match_all(globs, names):
        yield Violation(
            ConfigError,
            "train.freeze leaves no parameter to train",
            "train.freeze",
            "something is trained",
            [{"train.freeze": ()}],
        )


def _match_all(globs: Iterable[str], names: Iterable[str]) -> bool:
    return all(any(fnmatch.fnmatchcase(name, glob) for glob in globs) for name in names)


def _batch(config: RunConfig) -> Iterator[Violation]:
    train, axes = config.train, config.mesh.axes()
    parts = axes.data_parallel() * train.num_microbatches
    if train.global_batch % parts:
        yield Violation(
            LayoutError,
            f"train.global_batch = {train.global_batch} does not divide into {parts} equal parts",
            "train.global_batch",
            f"global_batch is a multiple of dp_replicate × dp_shard × num_microbatches = "
            f"{axes.dp_replicate} × {axes.dp_shard} × {train.num_microbatches}",
            [
                {"train.global_batch": size}
                for size in (round_up(train.global_batch, parts), train.global_batch // parts * parts)
                if size
            ],
        )


def _ranks(config: RunConfig, num_ranks: int | None) -> Iterator[Violation]:
    axes = config.mesh.axes()
    if num_ranks is None or axes.num_ranks() == num_ranks:
        return
    rest = axes.num_ranks() // axes.dp_shard
    fixes: list[Fix] = []
    if num_ranks % rest == 0:
        fixes = [{"mesh.dp_shard": num_ranks // rest}]
    yield Violation(
        LayoutError,
        f"the mesh has {axes.num_ranks()} ranks ({axes}) but {num_ranks} were started",
        "mesh.dp_shard",
        "the product of the axes' sizes is the number of ranks",
        fixes,
        otherwise=f"start {axes.num_ranks()} ranks",
    )


def _schedule(config: RunConfig) -> Iterator[Violation]:
    train = config.train
    room = max(0, train.steps - train.warmup_steps)
    if train.lr_schedule == "wsd" and train.decay_steps > room:
        yield Violation(
            ConfigError,
            f"warm-up of {train.warmup_steps} and decay of {train.decay_steps} steps do not fit into "
            f"{train.steps} steps",
            "train.decay_steps",
            "warmup_steps + decay_steps ≤ steps",
            [{"train.decay_steps": room}, {"train.steps": train.warmup_steps + train.decay_steps}],
        )


def _without_effect(config: RunConfig) -> Iterator[Violation]:
    """Keys that the family does not read. A saved run has them all: one at its default asks for nothing."""
    for key, purpose in model_facts(config).unread.items():
        section_name, name = key.split(".")
        section = getattr(config, section_name)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            yield Violation(
                ConfigError,
                f"{key} = {as_word(value)} has no effect",
                key,
                f"it is for {purpose}, and model.kind is {config.model.kind}",
                [{key: default}],
                otherwise=f"leave {key} out, or start from a preset for {purpose}",
            )
