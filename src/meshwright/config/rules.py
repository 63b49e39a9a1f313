"""Rules that cross sections: axes against ranks, heads against tp, batch arithmetic.

One place, checked before any process starts; each rule says what is wrong, where it was set, the rule, and a fix
that works. Nothing is ever changed silently to make a rule hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from meshwright.config.schema import RunConfig
from meshwright.errors import ConfigError, LayoutError

Origins = Mapping[str, str]
"""Where each key was set (`command line`, a file, `preset llama-tiny`), by dotted key."""


def check(config: RunConfig, origins: Origins, *, num_ranks: int | None = None) -> None:
    """Check every rule that crosses keys or sections.

    Args:
        config: the run.
        origins: where each key was set, for the errors.
        num_ranks: ranks that a launcher such as torchrun started; None when we start them ourselves.

    Raises:
        LayoutError: the mesh fits neither the model, the batch nor the number of ranks.
        ConfigError: the model's or the training's keys contradict each other.
    """

    def where(key: str) -> str:
        return f"{origins[key]}, {key}" if key in origins else f"default of {key}"

    _check_available(config, where)
    _check_model(config, where)
    _check_tensor_parallel(config, where)
    _check_batch(config, where)
    _check_ranks(config, where, num_ranks)
    _check_schedule(config, where)


Where = Callable[[str], str]


def _check_available(config: RunConfig, where: Where) -> None:
    for axis in ("pp", "cp", "ep"):
        size = getattr(config.mesh, axis)
        if size > 1:
            raise LayoutError(
                f"mesh.{axis} = {size} is not available yet",
                where=where(f"mesh.{axis}"),
                rule="this version lays work on dp_replicate, dp_shard and tp",
                fix=f"mesh.{axis}=1, with mesh.dp_shard={config.mesh.dp_shard * size} for as many ranks",
            )


def _check_model(config: RunConfig, where: Where) -> None:
    model = config.model
    if model.head_dim is None and model.dim % model.num_heads:
        raise ConfigError(
            f"model.num_heads = {model.num_heads} does not divide model.dim = {model.dim}",
            where=where("model.num_heads"),
            rule="without model.head_dim a head is dim / num_heads wide",
            fix=f"model.num_heads={_nearest(_divisors(model.dim), model.num_heads)}, or give model.head_dim",
        )
    head_dim = model.spec().head_dim
    if head_dim % 2:
        key = "model.head_dim" if model.head_dim is not None else "model.dim"
        fix = f"model.head_dim={head_dim + 1}"
        raise ConfigError(
            f"a head is {head_dim} wide",
            where=where(key),
            rule="rotary embedding turns pairs: head_dim is even",
            fix=fix,
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads = {model.num_kv_heads} does not divide model.num_heads = {model.num_heads}",
            where=where("model.num_kv_heads"),
            rule="grouped-query attention gives every key/value head the same number of query heads",
            fix=f"model.num_kv_heads={_nearest(_divisors(model.num_heads), model.num_kv_heads)}",
        )


def _check_tensor_parallel(config: RunConfig, where: Where) -> None:
    model, tp = config.model, config.mesh.tp
    counts = {
        "attention heads": model.num_heads,
        "key/value heads": model.num_kv_heads,
        "feed-forward columns (model.ffn_dim)": model.ffn_dim,
        "vocabulary entries (model.vocab_size)": model.vocab_size,
    }
    if config.mesh.sequence_parallel:
        counts["tokens a sample (train.seq_len, with mesh.sequence_parallel)"] = config.train.seq_len
    for name, count in counts.items():
        if count % tp:
            sizes = [size for size in _divisors(math.gcd(*counts.values())) if size > 1]
            fix = " or ".join(f"mesh.tp={size}" for size in sizes[:4]) or "mesh.tp=1"
            raise LayoutError(
                f"mesh.tp = {tp} does not divide {count} {name}",
                where=where("mesh.tp"),
                rule="tp divides the numbers of heads, of key/value heads, ffn_dim, vocab_size, "
                "and seq_len when sequence_parallel is on",
                fix=fix,
            )


def _check_batch(config: RunConfig, where: Where) -> None:
    train, axes = config.train, config.mesh.axes()
    parts = axes.data_parallel() * train.num_microbatches
    if train.global_batch % parts:
        low, high = train.global_batch // parts * parts, _up(train.global_batch, parts)
        fix = f"train.global_batch={high}" + (f" or {low}" if low else "")
        raise LayoutError(
            f"train.global_batch = {train.global_batch} does not divide into {parts} equal parts",
            where=where("train.global_batch"),
            rule=f"global_batch is a multiple of dp_replicate × dp_shard × num_microbatches = "
            f"{axes.dp_replicate} × {axes.dp_shard} × {train.num_microbatches}",
            fix=fix,
        )


def _check_ranks(config: RunConfig, where: Where, num_ranks: int | None) -> None:
    axes = config.mesh.axes()
    if num_ranks is None or axes.num_ranks() == num_ranks:
        return
    rest = axes.num_ranks() // axes.dp_shard
    fix = f"start {axes.num_ranks()} ranks"
    if num_ranks % rest == 0:
        fix = f"mesh.dp_shard={num_ranks // rest}, or " + fix
    raise LayoutError(
        f"the mesh has {axes.num_ranks()} ranks ({axes}) but {num_ranks} were started",
        where=f"{where('mesh.dp_shard')}; WORLD_SIZE={num_ranks} in the environment",
        rule="the product of the axes' sizes is the number of ranks",
        fix=fix,
    )


def _check_schedule(config: RunConfig, where: Where) -> None:
    train = config.train
    tail = train.decay_steps if train.lr_schedule == "wsd" else 0
    if train.warmup_steps + tail > train.steps and train.lr_schedule == "wsd":
        raise ConfigError(
            f"warm-up of {train.warmup_steps} and decay of {tail} steps do not fit into {train.steps} steps",
            where=where("train.decay_steps"),
            rule="warmup_steps + decay_steps ≤ steps",
            fix=f"train.decay_steps={max(0, train.steps - train.warmup_steps)}, or more train.steps",
        )


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _nearest(candidates: list[int], wanted: int) -> int:
    return min(candidates, key=lambda size: (abs(size - wanted), size))


def _up(count: int, unit: int) -> int:
    return math.ceil(count / unit) * unit
