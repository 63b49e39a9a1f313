"""Rules of context parallelism and packed documents: models whose attention takes shards of tokens and documents."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.model_facts import ModelFacts
from meshwright.settings.nearby_sizes import by_distance, divisors
from meshwright.settings.violation import Fix, Violation
from meshwright.units import counted

KEY, METHOD = "mesh.cp", "mesh.cp_method"


def context_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield violations of the rules for `mesh.cp`."""
    mesh, facts = config.mesh, model_facts(config)
    if mesh.cp == 1:
        if mesh.cp_method != "auto":
            what = f"{METHOD} = {mesh.cp_method} has no effect"
            yield Violation(ConfigError, what, METHOD, "it applies to mesh.cp > 1", [{METHOD: "auto"}])
        return
    off: list[Fix] = [{KEY: 1, "mesh.dp_shard": mesh.dp_shard * mesh.cp}, {KEY: 1}]
    if unable := _why_not(facts):
        yield Violation(LayoutError, f"{KEY} = {mesh.cp}: {unable}", KEY, "cp shards samples by tokens", off)
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
            KEY,
            "every cp rank holds the same number of tokens of a sample",
            [
                *({KEY: size} for size in by_distance(divisors(max(1, tokens // tp)), mesh.cp)),
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
            f"{METHOD} = heads, but cp = {mesh.cp} does not divide the key/value heads of a tp rank ({heads})",
            METHOD,
            "heads gives each cp rank the same number of heads",
            [{METHOD: "auto"}, *({KEY: size} for size in by_distance(divisors(max(1, heads)), mesh.cp))],
        )
