"""The model as a Meshwright family: its parameters, tensor-parallel styles, initial values, data and task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.errors import LayoutError
from meshwright.models.contract import building_blocks as ops
from meshwright.models.contract import model_facts
from meshwright.models.contract.family import Family, RunFacts
from meshwright.models.contract.model_facts import KindFacts, ModelFacts, Part, Role, Saved, linear, vectors
from meshwright.models.contract.operators import Kernels, Operator, OperatorKind, Rerun
from meshwright.models.contract.tp_styles import COLUMN, DIVIDED, HEAD, ROW, STREAM, VOCABULARY, Style, gather
from meshwright.settings.violation import Violation
from parallel_gpt.config import MASK, GptConfig

STYLES: Mapping[str, Mapping[str, Style]] = {
    "block": {"norm": STREAM, "attention": gather(2), "attention.w[qkv]": COLUMN, "attention.[qk]_norm": DIVIDED,
              "attention.wo": ROW, "mlp": gather(), "mlp.0": COLUMN, "mlp.2": ROW},
    "embed": {"embed": VOCABULARY},
    "head": {"norm": STREAM, "head": HEAD},
}  # fmt: skip


def block_operators(d: int, ffn: int, num_heads: int, attention_flops: float) -> tuple[Operator, ...]:
    """What a block computes, per token, from which plans predict times."""
    return (
        ops.layer_norm("norm", d),
        ops.shared_input("norm", d, 4),
        *(ops.product(f"attention.{name}", d, d) for name in ("wq", "wk", "wv")),
        *(ops.rms_norm(f"attention.{name}", d, ops.FULL) for name in ("q_norm", "k_norm")),
        ops.attention_core("attention", flops=attention_flops, queries=d, keys=d, num_heads=num_heads),
        ops.product("attention.wo", d, d, bias=ops.FULL),
        ops.residual_sum("attention", d),
        ops.product("mlp.0", d, ffn, bias=ops.DIVIDED),
        ops.activation("mlp.1", ffn),
        ops.product("mlp.2", ffn, d, bias=ops.FULL),
        ops.residual_sum("mlp", d),
        # The mean square of the output, and the sum of both gradients.
        Operator("activation", OperatorKind.MEMORY, forward=Kernels(6, Saved(full=3.0 * d)),
                 backward=Kernels(7, Saved(full=10.0 * d)), rerun=Rerun.NEVER),
    )  # fmt: skip


class Gpt(Family):
    sections = {"model": GptConfig}

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        c, tp = f.section(GptConfig), f.axes.tp
        for what, count in (("num_heads", c.num_heads), ("ffn_dim", c.ffn_dim), ("vocab_size", c.vocab_size)):
            if count % tp:
                what = f"mesh.tp = {tp} does not divide {what} = {count}"
                fixes = [{"mesh.tp": size} for size in range(tp, 0, -1) if count % size == 0]
                yield Violation(LayoutError, what, "mesh.tp", "tp ranks have equal parts", fixes)
        if tp > 1 and f.sequence_parallel:
            key, rule = "mesh.sequence_parallel", "positions are added to all tokens of a tp rank"
            yield Violation(LayoutError, f"{key} = true", key, rule, [{key: False}])
        if f.seq_len > c.max_len:
            what, rule = f"train.seq_len = {f.seq_len} exceeds model.max_len = {c.max_len}", "positions are learned"
            yield Violation(LayoutError, what, "train.seq_len", rule, [{"model.max_len": f.seq_len}])

    def describe(self, f: RunFacts) -> ModelFacts:
        c, t = f.section(GptConfig), f.seq_len
        d, ffn = c.dim, c.ffn_dim
        weights = [weight for name in ("wq", "wk", "wv") for weight in linear(f"attention.{name}", d, d)]
        weights += vectors(d // c.num_heads, "attention.q_norm.weight", "attention.k_norm.weight")
        weights += linear("attention.wo", d, d, bias=True)
        mlp = [*linear("mlp.0", d, ffn, bias=True), *linear("mlp.2", ffn, d, bias=True)]
        attention = model_facts.AttentionFacts("attention", MASK, c.num_heads, c.num_heads, d // c.num_heads)
        block = KindFacts(
            "block",
            "blocks.{layer}",
            (*vectors(d, "norm.weight", "norm.bias"), *weights, *mlp),
            saved=Saved(full=3.0 * d, divided=6.0 * d + 2.0 * ffn),
            attention=attention,
            operators=block_operators(d, ffn, c.num_heads, attention.flops(t)),
            auxiliary=(model_facts.AuxiliaryLoss("activation", c.activation_weight),),
        )
        tokens, positions = linear("embed", d, c.vocab_size, role=Role.EMBEDDING), linear("positions", d, c.max_len)
        seen = model_facts.BufferFacts("seen.value", (c.vocab_size,), "int64", updated=True)
        ends = *vectors(d, "norm.weight", "norm.bias"), *linear("head", d, c.vocab_size, tied_to="embed.weight")
        operators = ops.layer_norm("norm", d), ops.product("head", d, c.vocab_size), ops.cross_entropy(c.vocab_size)
        head = model_facts.HeadFacts("head")
        last = KindFacts("head", "", ends, output=c.vocab_size, head=head, output_divided=True, operators=operators)
        lookup = (
            ops.embedding("embed", c.vocab_size, d),
            ops.embedding("positions", c.max_len, d),
            ops.residual_sum("add", d),
            ops.masks_and_positions("mask", 1, rotary=False),
            Operator("seen", OperatorKind.MEMORY, forward=Kernels(11)),  # few counts and positions
        )
        return ModelFacts(
            kinds=(block,),
            layers=("block",) * c.num_layers,
            edge=model_facts.EdgeFacts("stream", (t, d)),
            tokens=t,
            identity=c.model_dump(exclude={"activation_weight"}),
            first=(KindFacts("embed", "", (*tokens, *positions), (seen,), operators=lookup),),
            last=(last,),
            flops_per_token=3.0 * (c.num_layers * block.flops + last.flops),
        )

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        return STYLES

    def build(self, f: RunFacts, part: Part) -> Any:
        from parallel_gpt.module import Gpt as Module  # torch is imported here, not before

        return Module(f.section(GptConfig), part)

    def initial(self, f: RunFacts, name: str) -> model_facts.Fill:
        if name.endswith(".bias") or name == "seen.value":
            return model_facts.ZEROS
        return model_facts.ONES if "norm" in name else model_facts.Normal(0.02)

    def open_data(self, f: RunFacts) -> Any:
        from meshwright.models.tasks.text_data import open_text

        return open_text(f, vocab_size=f.section(GptConfig).vocab_size)

    def task(self, f: RunFacts, data: Any, device: Any) -> Any:
        from meshwright.models.tasks.text_task import text_task

        return text_task(f, data, device)

    def reference(self, f: RunFacts, data: Any) -> Any:
        from meshwright.models.tasks.text_task import text_reference

        return text_reference(f, data)
