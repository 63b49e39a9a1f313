"""Cross-section rules: axes against ranks, heads against tp, batch arithmetic.

All rules are checked in one place before any process starts. Each violation includes the problem, where the key was
set, the rule and a working fix. No value is silently changed to satisfy a rule.
Suggested fixes that would violate another rule are omitted from the error.

Here are the rules of the mesh, the batch and compression; those of single sections stand in `section_rules`, those of
keys with a syntax of their own in `resolve`.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from meshwright.comm.compression.catalogue import Use, is_lossy, lossless_names
from meshwright.config import resolve, section_rules
from meshwright.config.facts_for_family import model_facts, run_facts
from meshwright.config.schema import RunConfig
from meshwright.config.section_rules import FREEZE
from meshwright.errors import ConfigError, LayoutError
from meshwright.features.registry import plan_features
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.models.contract.tp_styles import OWN_PARAMETERS
from meshwright.settings.violation import Fix, Violation, by_distance, divisors, format_fix, round_up
from meshwright.units import counted

Origins = Mapping[str, str]
"""Origin of each dotted key: `command line`, a file, `preset llama-tiny`."""

EP, CP, CP_METHOD = "mesh.ep", "mesh.cp", "mesh.cp_method"
SECONDARY, NODE = "comm.secondary_shards", "comm.ranks_per_node"
MAX_FIXES = 3
MAX_COMPLETIONS = 3
Rules = Callable[[RunConfig, int | None], Iterator[Violation]]
"""Callable that yields the violations of a run, given the number of ranks started by a launcher, or None. Only the
first violation is reliable, since later rules assume that earlier ones hold."""


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
    rules = rules or violations
    if (violation := _first(config, num_ranks, rules)) is None:
        return
    where = f"{origins[violation.key]}, {violation.key}" if violation.key in origins else f"default of {violation.key}"
    if num_ranks is not None:
        where += f"; WORLD_SIZE={num_ranks} in the environment"
    alone = (fix for fix in violation.fixes if _first(config.with_keys(fix), num_ranks, rules) is None)
    fixes = list(islice(alone, MAX_FIXES))
    if not fixes:
        complete = (_complete(config, num_ranks, rules, fix, MAX_COMPLETIONS) for fix in violation.fixes)
        fixes = list(islice(filter(None, complete), 1)) or list(violation.fixes[:1])
    words = [format_fix(fix) for fix in fixes]
    fix = " or ".join([*words, violation.otherwise] if violation.otherwise else words)
    raise violation.kind(violation.what, where=where, rule=violation.rule, fix=fix)


def violations(config: RunConfig, num_ranks: int | None) -> Iterator[Violation]:
    """Yield violations that can be found from the configuration alone; `plan.rules` adds those that need the plan."""
    family_violations = list(config.family.rules(run_facts(config)))
    yield from (one for one in family_violations if one.key != FREEZE)
    yield from section_rules.freeze_violations(config)
    yield from (one for one in family_violations if one.key == FREEZE)
    yield from _model_description(config)
    yield from section_rules.data_violations(config)
    yield from context_violations(config)
    yield from expert_violations(config)
    yield from section_rules.dropout_violations(config)
    yield from _sequence_parallel(config)
    yield from _ranks(config, num_ranks)
    yield from _batch(config)
    yield from resolve.schedule_violations(config)
    yield from section_rules.optimizer_violations(config)
    yield from resolve.group_violations(config)
    yield from section_rules.precision_violations(config)
    yield from comm_violations(config)
    yield from resolve.recompute_violations(config)
    yield from section_rules.capture_violations(config)
    for feature in plan_features(config=config):
        yield from feature.rules(config)
    yield from resolve.tracker_violations(config)
    yield from resolve.profile_violations(config)
    yield from section_rules.unread_key_violations(config)


def repair(config: RunConfig, num_ranks: int | None, rules: Rules | None = None, fix: Fix | None = None) -> Fix | None:
    """Return keys to set so that no rule is violated (empty if none is), or None if no such fix was found.

    The keys of `fix` are among them and keep their values.
    """
    return _complete(config, num_ranks, rules or violations, fix or {}, MAX_COMPLETIONS)


def _first(config: RunConfig, num_ranks: int | None, rules: Rules) -> Violation | None:
    return next(rules(config, num_ranks), None)


def _complete(config: RunConfig, num_ranks: int | None, rules: Rules, fix: Fix, depth: int) -> Fix | None:
    """Extend `fix` until no rule is violated; return None if that fails."""
    violation = _first(config.with_keys(fix), num_ranks, rules)
    if violation is None:
        return fix
    # Keep keys already set by this fix, or the search would cycle.
    more = islice((one for one in violation.fixes if depth and not one.keys() & fix.keys()), MAX_FIXES)
    return next(filter(None, (_complete(config, num_ranks, rules, {**fix, **one}, depth - 1) for one in more)), None)


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


def _sequence_parallel(config: RunConfig) -> Iterator[Violation]:
    """Check that sequence parallelism can shard the stream between blocks evenly, so families need no rule for this."""
    edge, tp, key = model_facts(config).edge, config.mesh.tp, "mesh.sequence_parallel"
    if tp == 1 or not config.mesh.sequence_parallel:
        return
    fixes: list[Fix] = [{key: False}, {"mesh.tp": 1}]
    if edge.sequence_dim is None:
        rule = f"sequence parallelism shards the {edge.name} between blocks along the sequence, but this model's "
        yield Violation(LayoutError, f"{key} with mesh.tp = {tp}", key, f"{rule}blocks need the full sequence", fixes)
    elif edge.shape[edge.sequence_dim] % tp:
        size = edge.shape[edge.sequence_dim]
        what = f"{key} with mesh.tp = {tp}, which does not divide {counted(size, 'token')} of the {edge.name}"
        yield Violation(LayoutError, what, key, "each tp rank has the same number of tokens of a sample", fixes)


def _batch(config: RunConfig) -> Iterator[Violation]:
    train, axes = config.train, config.mesh.axes()
    parts = axes.data_parallel() * train.num_microbatches
    if train.global_batch % parts:
        numbers = range(train.num_microbatches - 1, 0, -1)
        fewer = [number for number in numbers if not train.global_batch % (axes.data_parallel() * number)]
        sizes = (round_up(train.global_batch, parts), train.global_batch // parts * parts)
        what = f"train.global_batch = {train.global_batch} is not divisible by {parts}"
        rule = "global_batch must be a multiple of dp_replicate × dp_shard × num_microbatches = "
        rule += f"{axes.dp_replicate} × {axes.dp_shard} × {train.num_microbatches}"
        fixes = [{"train.num_microbatches": one} for one in fewer[:1]]
        fixes += [{"train.global_batch": size} for size in sizes if size]
        yield Violation(LayoutError, what, "train.global_batch", rule, fixes)


def _ranks(config: RunConfig, num_ranks: int | None) -> Iterator[Violation]:
    axes = config.mesh.axes()
    if num_ranks is None or axes.num_ranks() == num_ranks:
        return
    rest = axes.num_ranks() // axes.dp_shard
    fixes = [{"mesh.dp_shard": num_ranks // rest}] if num_ranks % rest == 0 else []
    found = f"{axes.num_ranks()} ranks ({axes})" if axes.num_ranks() > 1 else str(axes)
    what = f"the mesh has {found} but {num_ranks} were started"
    rule = "the product of the axis sizes must equal the number of ranks"
    otherwise = f"start {counted(axes.num_ranks(), 'rank')}"
    yield Violation(LayoutError, what, "mesh.dp_shard", rule, fixes, otherwise=otherwise)


def expert_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `mesh.ep`."""
    ep, mesh = config.mesh.ep, config.mesh
    if ep == 1:
        return
    facts = model_facts(config)
    counts = [kind.experts.num_experts for kind in facts.kinds if kind.experts is not None]
    if not counts:
        what = f"mesh.ep = {ep}{f': {why}' if (why := facts.not_expert_parallel) else ' for a model without experts'}"
        yield Violation(LayoutError, what, EP, "ep shards experts", [{EP: 1}])
        return
    ranks = mesh.dp_shard * mesh.cp
    sizes: list[Fix] = [{EP: size} for size in by_distance(divisors(math.gcd(ranks, *counts)), ep)]
    if ranks % ep or (ep % mesh.cp and mesh.cp % ep):
        what = f"mesh.ep = {ep} does not divide {counted(ranks, 'rank')}"
        rule = f"ep divides dp_shard × cp = {mesh.dp_shard} × {mesh.cp}, and is a multiple of cp or divides it"
        yield Violation(LayoutError, what, EP, rule, [*sizes, {"mesh.dp_shard": round_up(mesh.dp_shard, ep)}])
    for count in counts:
        if count % ep:
            what = f"mesh.ep = {ep} does not divide {counted(count, 'expert')}"
            yield Violation(LayoutError, what, EP, "every ep rank holds the same number of experts of a layer", sizes)
    if config.comm.secondary_shards is not None:
        what = f"{SECONDARY} = {config.comm.secondary_shards} with mesh.ep = {ep}"
        rule = "experts and other parameters are stored on different groups of ranks, which secondary shards don't "
        yield Violation(ConfigError, what, SECONDARY, f"{rule}follow", [{SECONDARY: None}, {EP: 1}])


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
        what = f"{product} does not divide {counted(tokens, 'token')} of a sample"
        fixes = [
            *({CP: size} for size in by_distance(divisors(max(1, tokens // tp)), mesh.cp)),
            {"train.seq_len": -(-tokens // (mesh.cp * tp)) * mesh.cp * tp},
        ]
        yield Violation(LayoutError, what, CP, "every cp rank holds the same number of tokens of a sample", fixes)


def _heads(config: RunConfig, facts: ModelFacts) -> Iterator[Violation]:
    mesh = config.mesh
    layers = [kind.attention for kind in facts.kinds if kind.attention is not None]
    heads = math.gcd(*(layer.num_kv_heads for layer in layers), *(layer.num_heads for layer in layers)) // mesh.tp
    if mesh.cp_method == "heads" and heads % mesh.cp:
        what = f"{CP_METHOD} = heads, but cp = {mesh.cp} does not divide the key/value heads of a tp rank ({heads})"
        fixes: list[Fix] = [
            {CP_METHOD: "auto"},
            *({CP: size} for size in by_distance(divisors(max(1, heads)), mesh.cp)),
        ]
        yield Violation(LayoutError, what, CP_METHOD, "heads gives each cp rank the same number of heads", fixes)


def lossy_keys(config: RunConfig) -> list[str]:
    """Return the keys of `comm` that select lossy compression."""
    return [f"comm.{use}" for use in (Use.GRADIENTS, Use.WEIGHTS) if is_lossy(getattr(config.comm, use))]


def lossless_value(key: str) -> str:
    """Return the lossless value for one of the keys from `lossy_keys`."""
    return lossless_names(Use(key.removeprefix("comm.")))[-1]


def comm_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `comm`."""
    for key in lossy_keys(config) if config.train.precision == "float64" else ():
        what = f"{key} = {getattr(config.comm, key.split('.')[1])} with train.precision = float64"
        rule = "lossy codecs support float32 and bfloat16 only"
        yield Violation(ConfigError, what, key, rule, [{key: lossless_value(key)}, {"train.precision": "float32"}])
    if config.comm.secondary_shards is not None:
        yield from _secondary_shards(config, config.comm.secondary_shards)
    size, ranks = config.comm.ranks_per_node, config.mesh.axes().num_ranks()
    if size is not None and ranks % size:
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
        what = f"{NODE} = {size} does not divide {counted(ranks, 'rank')}"
        fixes: list[Fix] = [{NODE: min(fitting, key=lambda n: abs(n - size))}, {NODE: None}]
        yield Violation(LayoutError, what, NODE, "all nodes have the same number of ranks", fixes)


def _secondary_shards(config: RunConfig, size: int) -> Iterator[Violation]:
    ranks = config.mesh.dp_shard
    if ranks % size or size == ranks:
        fitting = [n for n in range(2, ranks) if ranks % n == 0]
        nearest: list[Fix] = [{SECONDARY: min(fitting, key=lambda n: abs(n - size))}] if fitting else []
        what = f"{SECONDARY} = {size} and mesh.dp_shard = {ranks}"
        rule = "dp_shard is split into two or more equal groups, each of which keeps a full copy of the weights"
        fixes = [*nearest, {"mesh.dp_shard": 2 * size}, {SECONDARY: None}]
        yield Violation(LayoutError, what, SECONDARY, rule, fixes)
    if not config.mesh.reshard_after_forward:
        what = f"{SECONDARY} = {size} with mesh.reshard_after_forward = false"
        rule = "weights that stay unsharded until the backward pass are not resharded"
        fixes = [{"mesh.reshard_after_forward": True}, {SECONDARY: None}]
        yield Violation(ConfigError, what, SECONDARY, rule, fixes)
    if config.mesh.tp > 1:
        what = f"{SECONDARY} = {size} with mesh.tp = {config.mesh.tp}"
        rule = "FSDP2 can't reshard tensor-parallel parameters to other groups than they are stored in"
        fixes = [{SECONDARY: None}, {"mesh.tp": 1}]
        yield Violation(LayoutError, what, SECONDARY, rule, fixes)
