"""Base of families of decoders: rules, description, tensor-parallel styles, initial values, data and task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.family import Family, Prompt, RunFacts, head_violations
from meshwright.models.contract.model_facts import ONES, Fill, ModelFacts, Normal, Part
from meshwright.models.contract.tp_styles import COLUMN, FINAL_ROW, HEAD, ROW, STREAM, VOCABULARY, Style, gather
from meshwright.models.decoder.description import BLOCK, WINDOW_BLOCK, DecoderConfig, DecoderSpec, describe
from meshwright.settings.violation import Violation, by_distance, divisors, round_up

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from meshwright.data.mixtures.mixture import Text
    from meshwright.models.contract.task import Forward, Reference, Task


INIT_STD = 0.02

BLOCK_STYLES: Mapping[str, Style] = {
    "attention_norm": STREAM,
    "attention": gather(2),
    "attention.wq": COLUMN,
    "attention.wk": COLUMN,
    "attention.wv": COLUMN,
    "attention.wo": ROW,
    "ffn_norm": STREAM,
    "ffn": gather(),
    "ffn.gate": COLUMN,
    "ffn.up": COLUMN,
    "ffn.down": FINAL_ROW,
}
STYLES: Mapping[str, Mapping[str, Style]] = {
    BLOCK: BLOCK_STYLES,
    WINDOW_BLOCK: BLOCK_STYLES,
    "embed": {"embed": VOCABULARY},
    "head": {"norm": STREAM, "head": HEAD},
}


class DecoderFamily(Family):
    """Decoders trained on text. A subclass has a section `model` derived from `DecoderConfig`."""

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        return violations(f.section(DecoderConfig), f)

    def describe(self, f: RunFacts) -> ModelFacts:
        return describe(_spec(f), f.seq_len)

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        """Return Megatron's tensor-parallel styles: column-wise, then row-wise (Shoeybi et al. 2019)."""
        return STYLES

    def build(self, f: RunFacts, part: Part) -> nn.Module:
        from meshwright.models.decoder.module import Decoder

        return Decoder(_spec(f), part, dropout=f.dropout, seed=f.seed)

    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return a parameter's initial distribution, scaled down with depth for projections into the residual stream
        (GPT-2; Radford et al. 2019, section 2.3).
        """
        if "norm" in name:
            return ONES
        if name.endswith(("wo.weight", "down.weight")):
            return Normal(INIT_STD / math.sqrt(2.0 * _spec(f).num_layers))
        return Normal(INIT_STD)

    def open_data(self, f: RunFacts) -> Text:
        from meshwright.models.tasks.text_data import open_text

        return open_text(f, vocab_size=_spec(f).vocab_size)

    def task(self, f: RunFacts, data: Any, device: torch.device) -> Task:
        from meshwright.models.tasks.text_task import text_task

        return text_task(f, data, device)

    def generate(self, f: RunFacts, forward: Forward, prompt: Prompt, folder: Path) -> Mapping[str, Any]:
        from meshwright.models.tasks.next_token import answer

        return {"text": answer(f, forward, prompt)}

    def reference(self, f: RunFacts, data: Any) -> Reference:
        from meshwright.models.tasks.text_task import text_reference

        return text_reference(f, data)


def _spec(f: RunFacts) -> DecoderSpec:
    return f.section(DecoderConfig).spec()


def violations(model: DecoderConfig, f: RunFacts, *, has_dense: bool = True) -> Iterator[Violation]:
    """Yield the rules that a run violates; `has_dense` is False if no layer has a feed-forward layer."""
    yield from _model(model)
    yield from _window(model)
    yield from _tensor_parallel(model, f, has_dense=has_dense)


def _model(model: DecoderConfig) -> Iterator[Violation]:
    yield from head_violations(dim=model.dim, num_heads=model.num_heads, head_dim=model.head_dim)
    head_dim = model.spec().head_dim
    if head_dim % 2:
        counts = by_distance(divisors(model.dim // 2), model.num_heads) if model.head_dim is None else ()
        yield Violation(
            ConfigError,
            f"head_dim = {head_dim} is odd",
            "model.head_dim" if model.head_dim is not None else "model.dim",
            "rotary embedding rotates pairs, so head_dim is even",
            [{"model.head_dim": head_dim + 1}, *({"model.num_heads": count} for count in counts)],
        )
    if model.num_heads % model.num_kv_heads:
        sizes = by_distance(divisors(model.num_heads), model.num_kv_heads)
        divisible_heads = round_up(model.num_heads, model.num_kv_heads)
        yield Violation(
            ConfigError,
            f"model.num_kv_heads = {model.num_kv_heads} does not divide model.num_heads = {model.num_heads}",
            "model.num_kv_heads",
            "grouped-query attention gives every key/value head the same number of query heads",
            [*({"model.num_kv_heads": size} for size in sizes), {"model.num_heads": divisible_heads}],
        )


def _window(model: DecoderConfig) -> Iterator[Violation]:
    if model.global_every and model.window is None:
        yield Violation(
            ConfigError,
            f"model.global_every = {model.global_every} without model.window",
            "model.global_every",
            "every n-th layer differs from the others only if those have a sliding window",
            [{"model.global_every": 0}, {"model.window": 256}],
        )
    elif model.window is not None and (model.global_every == 1 or model.global_every > model.num_layers):
        has_window = model.global_every > 1
        yield Violation(
            ConfigError,
            f"model.global_every = {model.global_every}, but {'no' if has_window else 'every'} layer of "
            f"{model.num_layers} then attends to all earlier tokens",
            "model.global_every",
            "every n-th layer attends to all earlier tokens, and the others have a sliding window",
            [{"model.global_every": 0}] if has_window else [{"model.window": None, "model.global_every": 0}],
        )


def _tensor_parallel(model: DecoderConfig, f: RunFacts, *, has_dense: bool) -> Iterator[Violation]:
    tp = f.axes.tp
    counts = {
        "attention heads": model.num_heads,
        "key/value heads": model.num_kv_heads,
        "feed-forward columns (model.ffn_dim)": model.ffn_dim,
        "vocabulary entries (model.vocab_size)": model.vocab_size,
    }
    if not has_dense:
        del counts["feed-forward columns (model.ffn_dim)"]
    if f.sequence_parallel:
        counts["tokens per sample (train.seq_len, with mesh.sequence_parallel)"] = f.seq_len
    name = next((name for name, count in counts.items() if count % tp), None)
    if name is None:
        return
    sizes = by_distance(divisors(math.gcd(*counts.values())), tp)
    yield Violation(
        LayoutError,
        f"mesh.tp = {tp} does not divide {counts[name]} {name}",
        "mesh.tp",
        "tp divides num_heads, num_kv_heads, ffn_dim, vocab_size and, with sequence_parallel, seq_len",
        [{"mesh.tp": size} for size in sizes],
    )
