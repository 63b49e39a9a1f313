"""Cross-section rules: axes against ranks, heads against tp, batch arithmetic.

All rules are checked in one place before any process starts. Each violation includes the problem, where the key was
set, the rule and a working fix. No value is silently changed to satisfy a rule.

Suggested fixes that would violate another rule are omitted from the error.

Optimizers, expert parallelism and context parallelism with packed documents have theirs at the end.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.float8_layers import float8_violations
from meshwright.config.optimizer.lr_schedule import schedule_violations
from meshwright.config.optimizer.parameter_groups import group_violations
from meshwright.config.profiled_steps import profile_violations
from meshwright.config.recompute_blocks import recompute_violations
from meshwright.config.rules_capture import capture_violations
from meshwright.config.rules_compression import comm_violations
from meshwright.config.rules_data import data_violations
from meshwright.config.rules_trackers import tracker_violations
from meshwright.config.schema import RunConfig, TrainConfig
from meshwright.config.translate import value_named
from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.models.contract.tp_styles import OWN_PARAMETERS
from meshwright.optim.catalogue import BUILT_IN, KEY, OTHERS, OWN_RULE, RULE, optimizers_by_role
from meshwright.optim.contract import MatrixOptimizer
from meshwright.optim.role import Role
from meshwright.settings.import_object import OBJECT_NAME
from meshwright.settings.nearby_sizes import by_distance, divisors, round_up
from meshwright.settings.violation import Fix, Violation, format_fix, format_value
from meshwright.units import counted

Origins = Mapping[str, str]
"""Origin of each dotted key: `command line`, a file, `preset llama-tiny`."""

FREEZE = "train.freeze"
MAX_FIXES = 3
MAX_COMPLETIONS = 3


Rules = Callable[[RunConfig, int | None], Iterator[Violation]]
"""Callable that yields the violations of a run, given the number of ranks started by a launcher, or None. Only the
first violation is reliable, since later rules assume that earlier ones hold."""
SMALLEST_FLOAT32 = 2.0**-126
"""Smallest normal float32; devices may flush subnormal numbers to zero."""


def check(config: RunConfig, origins: Origins, *, num_ranks: int | None = None, rules: Rules | None = None) -> None:
    """Check all rules that span several keys or sections.

    Args:
        config: configuration of the run.
        origins: where each key was set, for error messages.
        num_ranks: number of ranks started by a launcher such as torchrun; None if Meshwright starts them.
        rules: rules to check; by default those in this file.

    Raises:
        LayoutError: the mesh does not fit the model, batch or number of ranks.
        ConfigError: keys contradict each other, or one has no effect.
    """
    search = _FixSearch(num_ranks, rules or violations)
    violation = search.first_violation(config)
    if violation is None:
        return
    where = f"{origins[violation.key]}, {violation.key}" if violation.key in origins else f"default of {violation.key}"
    if num_ranks is not None:
        where += f"; WORLD_SIZE={num_ranks} in the environment"
    alone = (fix for fix in violation.fixes if search.first_violation(config.with_keys(fix)) is None)
    fixes = list(islice(alone, MAX_FIXES))
    if not fixes:
        complete = (search.complete(config, fix) for fix in violation.fixes)
        fixes = list(islice(filter(None, complete), 1)) or list(violation.fixes[:1])
    words = [format_fix(fix) for fix in fixes]
    fix = " or ".join([*words, violation.otherwise] if violation.otherwise else words)
    raise violation.kind(violation.what, where=where, rule=violation.rule, fix=fix)


def violations(config: RunConfig, num_ranks: int | None) -> Iterator[Violation]:
    """Yield violations that can be found from the configuration alone; `plan.rules` adds those that need the plan."""
    family_violations = list(config.family.rules(run_facts(config)))
    yield from (one for one in family_violations if one.key != FREEZE)
    yield from _freeze_globs(config)
    yield from (one for one in family_violations if one.key == FREEZE)
    yield from _model_description(config)
    yield from data_violations(config)
    yield from packing_violations(config)
    yield from context_violations(config)
    yield from expert_violations(config)
    yield from _dropout(config)
    yield from _sequence_parallel(config)
    yield from _ranks(config, num_ranks)
    yield from _batch(config)
    yield from schedule_violations(config)
    yield from optimizer_violations(config)
    yield from group_violations(config)
    yield from precision_violations(config)
    yield from comm_violations(config)
    yield from recompute_violations(config)
    yield from capture_violations(config)
    yield from float8_violations(config)
    yield from tracker_violations(config)
    yield from profile_violations(config)
    yield from _unread_keys(config)


def repair(config: RunConfig, num_ranks: int | None, rules: Rules | None = None, fix: Fix | None = None) -> Fix | None:
    """Return keys to set so that no rule is violated (empty if none is), or None if no such fix was found.

    The keys of `fix` are among them and keep their values.
    """
    return _FixSearch(num_ranks, rules or violations).complete(config, fix or {})


@dataclass(frozen=True)
class _FixSearch:
    """Search for fixes that do not violate other rules."""

    num_ranks: int | None
    rules: Rules

    def first_violation(self, config: RunConfig) -> Violation | None:
        return next(self.rules(config, self.num_ranks), None)

    def complete(self, config: RunConfig, fix: Fix, *, depth: int = MAX_COMPLETIONS) -> Fix | None:
        """Extend `fix` until no rule is violated; return None if that fails."""
        violation = self.first_violation(config.with_keys(fix))
        if violation is None:
            return fix
        # Keep keys already set by this fix, or the search would cycle.
        more = (other for other in violation.fixes if depth and not other.keys() & fix.keys())
        found = (self.complete(config, {**fix, **other}, depth=depth - 1) for other in islice(more, MAX_FIXES))
        return next(filter(None, found), None)


def _model_description(config: RunConfig) -> Iterator[Violation]:
    """Reject models that can't be parallelized: unsupported ties and, under tp, modules with both parameters and
    submodules."""
    facts, where = model_facts(config), "model.kind"
    first = {kind.full_name(p.name, None) for kind in (*facts.first, *facts.every) for p in kind.parameters}
    styles = config.family.styles(run_facts(config)) if config.mesh.tp > 1 else {}
    for kind in (*facts.first, *facts.every, *facts.kinds, *facts.last):
        modules = {p.name.rpartition(".")[0] for p in kind.parameters}
        for p in kind.parameters:
            if p.tied_to is not None and not (kind in facts.last and p.tied_to in first):
                rule = "only an end after the blocks can be tied, to a parameter of an end before them"
                otherwise = f"list {p.tied_to} in ModelFacts.first, and the tied parameter in ModelFacts.last"
                yield Violation(ConfigError, f"{kind.name}/{p.name} is tied to {p.tied_to}", where, rule, [], otherwise)
            module = p.name.rpartition(".")[0]
            inside = any(other != module and (not module or other.startswith(f"{module}.")) for other in modules)
            found = (one for glob, one in styles.get(kind.name, {}).items() if fnmatch.fnmatchcase(module, glob))
            style = next(found, None)
            if config.mesh.tp > 1 and inside and (style is None or style.kind not in OWN_PARAMETERS):
                what = f"{kind.name}/{p.name} belongs to a module with submodules, with mesh.tp = {config.mesh.tp}"
                rule = "under tensor parallelism only modules without submodules can own parameters"
                yield Violation(
                    LayoutError, what, "mesh.tp", rule, [{"mesh.tp": 1}], "move it into a module of its own"
                )


def _dropout(config: RunConfig) -> Iterator[Violation]:
    if config.train.dropout and not model_facts(config).has_dropout:
        yield Violation(
            ConfigError,
            f"train.dropout = {config.train.dropout:g}, but this model has no dropout",
            "train.dropout",
            "train.dropout applies to models whose description says so (ModelFacts.has_dropout)",
            [{"train.dropout": 0.0}],
        )


def _sequence_parallel(config: RunConfig) -> Iterator[Violation]:
    """Check that sequence parallelism can shard the stream between blocks evenly, so families need no rule for this."""
    edge, tp, key = model_facts(config).edge, config.mesh.tp, "mesh.sequence_parallel"
    if tp == 1 or not config.mesh.sequence_parallel:
        return
    fixes: list[Fix] = [{key: False}, {"mesh.tp": 1}]
    if edge.sequence_dim is None:
        what, rule = (
            f"{key} with mesh.tp = {tp}",
            f"sequence parallelism shards the {edge.name} between blocks along the sequence",
        )
        yield Violation(LayoutError, what, key, f"{rule}, but this model's blocks need the full sequence", fixes)
    elif edge.shape[edge.sequence_dim] % tp:
        size = edge.shape[edge.sequence_dim]
        what = f"{key} with mesh.tp = {tp}, which does not divide {counted(size, 'token')} of the {edge.name}"
        yield Violation(LayoutError, what, key, "each tp rank has the same number of tokens of a sample", fixes)


def _freeze_globs(config: RunConfig) -> Iterator[Violation]:
    """Reject globs that match no parameter, and globs that freeze all parameters."""
    names, globs = model_facts(config).parameter_names(), config.train.freeze
    for glob in globs:
        if not fnmatch.filter(names, glob):
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
            rest = tuple(other for other in globs if other != glob)
            kept_globs = [(*rest, near[0]), *([rest] if rest else []), ()]
            yield Violation(
                ConfigError,
                f"train.freeze has {glob}, which matches no parameter",
                "train.freeze",
                f"globs match parameter names such as {near[0]}",
                [{"train.freeze": kept} for kept in kept_globs if not _match_all(kept, names)],
            )
    if _match_all(globs, names):
        yield Violation(
            ConfigError,
            "train.freeze leaves no parameter to train",
            "train.freeze",
            "at least one parameter must be trained",
            [{"train.freeze": ()}],
        )


def _match_all(globs: Iterable[str], names: Iterable[str]) -> bool:
    return all(any(fnmatch.fnmatchcase(name, glob) for glob in globs) for name in names)


def _batch(config: RunConfig) -> Iterator[Violation]:
    train, axes = config.train, config.mesh.axes()
    parts = axes.data_parallel() * train.num_microbatches
    if train.global_batch % parts:
        numbers = range(train.num_microbatches - 1, 0, -1)
        fewer = [number for number in numbers if not train.global_batch % (axes.data_parallel() * number)]
        sizes = (round_up(train.global_batch, parts), train.global_batch // parts * parts)
        yield Violation(
            LayoutError,
            f"train.global_batch = {train.global_batch} is not divisible by {parts}",
            "train.global_batch",
            f"global_batch must be a multiple of dp_replicate × dp_shard × num_microbatches = "
            f"{axes.dp_replicate} × {axes.dp_shard} × {train.num_microbatches}",
            [{"train.num_microbatches": one} for one in fewer[:1]]
            + [{"train.global_batch": size} for size in sizes if size],
        )


def _ranks(config: RunConfig, num_ranks: int | None) -> Iterator[Violation]:
    axes = config.mesh.axes()
    if num_ranks is None or axes.num_ranks() == num_ranks:
        return
    rest = axes.num_ranks() // axes.dp_shard
    fixes: list[Fix] = []
    if num_ranks % rest == 0:
        fixes = [{"mesh.dp_shard": num_ranks // rest}]
    found = f"{axes.num_ranks()} ranks ({axes})" if axes.num_ranks() > 1 else str(axes)
    yield Violation(
        LayoutError,
        f"the mesh has {found} but {num_ranks} were started",
        "mesh.dp_shard",
        "the product of the axis sizes must equal the number of ranks",
        fixes,
        otherwise=f"start {counted(axes.num_ranks(), 'rank')}",
    )


def _unread_keys(config: RunConfig) -> Iterator[Violation]:
    """Reject keys not read by the family, except at their default values, as in files of saved runs."""
    for key, purpose in model_facts(config).unread.items():
        section_name, name = key.split(".")
        section = getattr(config, section_name)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            yield Violation(
                ConfigError,
                f"{key} = {format_value(value)} has no effect",
                key,
                f"it applies to {purpose}, but model.kind is {config.model.kind}",
                [{key: default}],
                otherwise=f"remove {key}, or start from a preset for {purpose}",
            )


def precision_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation for each epsilon that would underflow to zero and cause a division by zero."""
    if config.train.precision == "float64":
        return
    for section, name in ((config.train, "eps"), (config.model, "norm_eps")):
        value = getattr(section, name, 1.0)
        if value < SMALLEST_FLOAT32:
            key = f"{'train' if section is config.train else 'model'}.{name}"
            yield Violation(
                ConfigError,
                f"{key} = {value} is 0 in float32",
                key,
                f"an epsilon prevents division by zero: with train.precision = {config.train.precision} "
                f"it must be at least {SMALLEST_FLOAT32:.3g}",
                [{key: type(section).model_fields[name].default}, {"train.precision": "float64"}],
            )


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


EP = "mesh.ep"


def expert_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `mesh.ep`."""
    ep, mesh = config.mesh.ep, config.mesh
    if ep == 1:
        return
    counts = [kind.experts.num_experts for kind in model_facts(config).kinds if kind.experts is not None]
    if not counts:
        yield Violation(LayoutError, f"mesh.ep = {ep} for a model without experts", EP, "ep shards experts", [{EP: 1}])
        return
    ranks = mesh.dp_shard * mesh.cp
    sizes: list[Fix] = [{EP: size} for size in by_distance(divisors(math.gcd(ranks, *counts)), ep)]
    if ranks % ep or (ep % mesh.cp and mesh.cp % ep):
        yield Violation(
            LayoutError,
            f"mesh.ep = {ep} does not divide {counted(ranks, 'rank')}",
            EP,
            f"ep divides dp_shard × cp = {mesh.dp_shard} × {mesh.cp}, and is a multiple of cp or divides it",
            [*sizes, {"mesh.dp_shard": round_up(mesh.dp_shard, ep)}],
        )
    for count in counts:
        if count % ep:
            yield Violation(
                LayoutError,
                f"mesh.ep = {ep} does not divide {counted(count, 'expert')}",
                EP,
                "every ep rank holds the same number of experts of a layer",
                sizes,
            )
    if config.comm.secondary_shards is not None:
        yield Violation(
            ConfigError,
            f"comm.secondary_shards = {config.comm.secondary_shards} with mesh.ep = {ep}",
            "comm.secondary_shards",
            "experts and other parameters are stored on different groups of ranks, which secondary shards don't follow",
            [{"comm.secondary_shards": None}, {EP: 1}],
        )


CP, CP_METHOD = "mesh.cp", "mesh.cp_method"


def context_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `mesh.cp`."""
    mesh, facts = config.mesh, model_facts(config)
    if mesh.cp == 1:
        if mesh.cp_method != "auto":
            what = f"{CP_METHOD} = {mesh.cp_method} has no effect"
            yield Violation(ConfigError, what, CP_METHOD, "it applies to mesh.cp > 1", [{CP_METHOD: "auto"}])
        return
    off: list[Fix] = [{CP: 1, "mesh.dp_shard": mesh.dp_shard * mesh.cp}, {CP: 1}]
    if unable := _why_not(facts):
        yield Violation(LayoutError, f"{CP} = {mesh.cp}: {unable}", CP, "cp shards samples by tokens", off)
        return
    yield from _tokens(config, facts)
    yield from _heads(config, facts)


def packing_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield a violation if documents are packed for a model whose attention may not know of documents."""
    facts = model_facts(config)
    without = [kind.name for kind in facts.kinds if kind.attention is None]
    if config.data.packing != "none" and without and not facts.keeps_documents_apart:
        yield Violation(
            ConfigError,
            f"data.packing = {config.data.packing}, but blocks {without[0]} don't describe their attention",
            "data.packing",
            "packed documents must not attend to each other, so a model says where its attention is "
            "(KindFacts.attention)",
            [{"data.packing": "none"}] if config.data.chat_field is None else [],
            otherwise="" if config.data.chat_field is None else "a model that does",
        )


def _why_not(facts: ModelFacts) -> str:
    """Return why a model's samples can't be sharded by tokens, or an empty string."""
    if facts.edge.sequence_dim is None:
        return "this model's blocks need the full sequence"
    for kind in facts.kinds:
        if kind.attention is None:
            return f"blocks {kind.name} don't describe their attention (KindFacts.attention)"
        experts = kind.experts
        if experts is not None and experts.capacity is not None:
            return f"the capacity of experts in {kind.name} counts all tokens of a sample"
        if experts is not None and experts.uniform:
            return f"uniform routing in {kind.name} counts all tokens of a sample"
    return ""


def _tokens(config: RunConfig, facts: ModelFacts) -> Iterator[Violation]:
    mesh, tokens = config.mesh, facts.tokens
    tp = mesh.tp if mesh.sequence_parallel else 1
    if tokens % (mesh.cp * tp):
        product = f"cp × tp = {mesh.cp} × {tp}, with mesh.sequence_parallel" if tp > 1 else f"cp = {mesh.cp}"
        yield Violation(
            LayoutError,
            f"{product} does not divide {counted(tokens, 'token')} of a sample",
            CP,
            "every cp rank holds the same number of tokens of a sample",
            [
                *({CP: size} for size in by_distance(divisors(max(1, tokens // tp)), mesh.cp)),
                {"train.seq_len": -(-tokens // (mesh.cp * tp)) * mesh.cp * tp},
            ],
        )


def _heads(config: RunConfig, facts: ModelFacts) -> Iterator[Violation]:
    mesh = config.mesh
    layers = [kind.attention for kind in facts.kinds if kind.attention is not None]
    heads = math.gcd(*(layer.num_kv_heads for layer in layers), *(layer.num_heads for layer in layers)) // mesh.tp
    if mesh.cp_method == "heads" and heads % mesh.cp:
        yield Violation(
            LayoutError,
            f"{CP_METHOD} = heads, but cp = {mesh.cp} does not divide the key/value heads of a tp rank ({heads})",
            CP_METHOD,
            "heads gives each cp rank the same number of heads",
            [{CP_METHOD: "auto"}, *({CP: size} for size in by_distance(divisors(max(1, heads)), mesh.cp))],
        )
