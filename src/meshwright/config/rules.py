"""Rules that cross sections: axes against ranks, heads against tp, batch arithmetic.

One place, checked before any process starts; each rule says what is wrong, where it was set, the rule, and a fix
that works. Nothing is ever changed silently to make a rule hold.

A rule that is broken offers ways out; those that would only break another rule are left out of the error.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from meshwright.config.breach import Breach, Way, as_word, as_words
from meshwright.config.rules_comm import comm_breaches
from meshwright.config.rules_dit import dit_breaches, frozen_at_zero
from meshwright.config.rules_llama import llama_breaches
from meshwright.config.rules_numbers import number_breaches
from meshwright.config.rules_pipeline import pipeline_breaches
from meshwright.config.schema import DiffusionConfig, LlamaConfig, RunConfig
from meshwright.config.sizes import round_up
from meshwright.errors import ConfigError, LayoutError

Origins = Mapping[str, str]
"""Where each key was set (`command line`, a file, `preset llama-tiny`), by dotted key."""

NOT_READ = {
    "llama": tuple(f"diffusion.{name}" for name in DiffusionConfig.model_fields),
    "dit": ("data.tokenizer", "data.token_dtype", "train.seq_len", "train.sample_tokens"),
}
"""Keys that a kind of model has no use for, which another one reads."""

MAX_WAYS = 3
MAX_COMPLETIONS = 3


def check(config: RunConfig, origins: Origins, *, num_ranks: int | None = None) -> None:
    """Check every rule that crosses keys or sections.

    Args:
        config: the run.
        origins: where each key was set, for the errors.
        num_ranks: ranks that a launcher such as torchrun started; None when we start them ourselves.

    Raises:
        LayoutError: the mesh fits neither the model, the batch nor the number of ranks.
        ConfigError: the model's or the training's keys contradict each other, or one has no effect.
    """
    breach = next(breaches(config, num_ranks), None)
    if breach is None:
        return
    where = f"{origins[breach.key]}, {breach.key}" if breach.key in origins else f"default of {breach.key}"
    if num_ranks is not None:
        where += f"; WORLD_SIZE={num_ranks} in the environment"
    alone = (way for way in breach.ways if next(breaches(_changed(config, way), num_ranks), None) is None)
    ways = list(islice(alone, MAX_WAYS))
    if not ways:
        completed = (_completed(config, way, num_ranks) for way in breach.ways)
        ways = list(islice(filter(None, completed), 1)) or list(breach.ways[:1])
    fixes = [as_words(way) for way in ways]
    fix = " or ".join([*fixes, breach.otherwise] if breach.otherwise else fixes)
    raise breach.kind(breach.what, where=where, rule=breach.rule, fix=fix)


def breaches(config: RunConfig, num_ranks: int | None) -> Iterator[Breach]:
    """The rules that `config` breaks. Later ones assume that earlier ones hold: only the first is sure."""
    yield from _unavailable(config)
    yield from llama_breaches(config) if isinstance(config.model, LlamaConfig) else dit_breaches(config)
    yield from _frozen(config)
    yield from frozen_at_zero(config)
    yield from _ranks(config, num_ranks)
    yield from _batch(config)
    yield from _schedule(config)
    yield from number_breaches(config)
    yield from pipeline_breaches(config)
    yield from comm_breaches(config)
    yield from _without_effect(config)


def repair(config: RunConfig, num_ranks: int | None) -> Way | None:
    """Keys to set so that no rule is broken, none if none is; None where that is not found."""
    return _completed(config, {}, num_ranks)


def _completed(config: RunConfig, way: Way, num_ranks: int | None, *, depth: int = MAX_COMPLETIONS) -> Way | None:
    """`way` with what else has to be set then, so that no rule is broken; None where that is not found."""
    breach = next(breaches(_changed(config, way), num_ranks), None)
    if breach is None:
        return way
    # What this way has already set stays: setting it again would go round in circles.
    more = (other for other in breach.ways if depth and not other.keys() & way.keys())
    found = (_completed(config, {**way, **other}, num_ranks, depth=depth - 1) for other in islice(more, MAX_WAYS))
    return next(filter(None, found), None)


def _changed(config: RunConfig, way: Way) -> RunConfig:
    sections: dict[str, Any] = {}
    for key, value in way.items():
        section, name = key.split(".")
        sections[section] = sections.get(section, getattr(config, section)).model_copy(update={name: value})
    return config.model_copy(update=sections)


def _unavailable(config: RunConfig) -> Iterator[Breach]:
    for axis in ("cp", "ep"):
        size = getattr(config.mesh, axis)
        if size > 1:
            # ep's ranks are dp_shard's; cp's go to dp_shard, where they don't go away.
            ways = [{f"mesh.{axis}": 1}]
            if axis == "cp":
                ways.insert(0, {**ways[0], "mesh.dp_shard": config.mesh.dp_shard * size})
            yield Breach(
                LayoutError,
                f"mesh.{axis} = {size} is not available yet",
                f"mesh.{axis}",
                "this version lays work on pp, dp_replicate, dp_shard and tp",
                ways,
            )


def _frozen(config: RunConfig) -> Iterator[Breach]:
    """Globs that freeze nothing are misspelt; a model that is frozen whole has nothing to train."""
    names, globs = config.model.spec().parameter_names(), config.train.freeze
    for glob in globs:
        if not fnmatch.filter(names, glob):
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
            rest = tuple(other for other in globs if other != glob)
            kept_globs = [(*rest, near[0]), *([rest] if rest else []), ()]
            yield Breach(
                ConfigError,
                f"train.freeze has {glob}, which is no parameter's name",
                "train.freeze",
                f"names are as {near[0]}; * stands for any part of them",
                [{"train.freeze": kept} for kept in kept_globs if not _match_all(kept, names)],
            )
    if _match_all(globs, names):
        yield Breach(
            ConfigError,
            "train.freeze leaves no parameter to train",
            "train.freeze",
            "something is trained",
            [{"train.freeze": ()}],
        )


def _match_all(globs: Iterable[str], names: Iterable[str]) -> bool:
    return all(any(fnmatch.fnmatchcase(name, glob) for glob in globs) for name in names)


def _batch(config: RunConfig) -> Iterator[Breach]:
    train, axes = config.train, config.mesh.axes()
    parts = axes.data_parallel() * train.num_microbatches
    if train.global_batch % parts:
        yield Breach(
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


def _ranks(config: RunConfig, num_ranks: int | None) -> Iterator[Breach]:
    axes = config.mesh.axes()
    if num_ranks is None or axes.num_ranks() == num_ranks:
        return
    rest = axes.num_ranks() // axes.dp_shard
    ways = []
    if num_ranks % rest == 0:
        ways = [{"mesh.dp_shard": num_ranks // rest}]
    yield Breach(
        LayoutError,
        f"the mesh has {axes.num_ranks()} ranks ({axes}) but {num_ranks} were started",
        "mesh.dp_shard",
        "the product of the axes' sizes is the number of ranks",
        ways,
        otherwise=f"start {axes.num_ranks()} ranks",
    )


def _schedule(config: RunConfig) -> Iterator[Breach]:
    train = config.train
    room = max(0, train.steps - train.warmup_steps)
    if train.lr_schedule == "wsd" and train.decay_steps > room:
        yield Breach(
            ConfigError,
            f"warm-up of {train.warmup_steps} and decay of {train.decay_steps} steps do not fit into "
            f"{train.steps} steps",
            "train.decay_steps",
            "warmup_steps + decay_steps ≤ steps",
            [{"train.decay_steps": room}, {"train.steps": train.warmup_steps + train.decay_steps}],
        )


def _without_effect(config: RunConfig) -> Iterator[Breach]:
    """Keys that were set for another kind of model. A saved run has them all: one at its default asks for nothing."""
    kind = config.model.kind
    for key in NOT_READ[kind]:
        section_name, name = key.split(".")
        section = getattr(config, section_name)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            others = " or ".join(other for other, keys in NOT_READ.items() if key not in keys)
            yield Breach(
                ConfigError,
                f"{key} = {as_word(value)} has no effect",
                key,
                f"it is for a {others}, and model.kind is {kind}",
                [{key: default}],
                otherwise=f"leave {key} out, or start from a preset of a {others}",
            )
