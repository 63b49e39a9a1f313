"""Base of families whose models are not described: their structure is derived from a forward, and cached.

Doesn't import torch: what it needs to know of a model is cached.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.family import Family, Prompt, RunFacts
from meshwright.models.contract.model_facts import Computed, Constant, Fill, ModelFacts, Normal, Part, Uniform
from meshwright.models.contract.tp_styles import Style
from meshwright.models.foreign.structure import Structure, describe, fill_of
from meshwright.settings.violation import Violation

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from meshwright.models.contract.task import Batch, Forward, Reference, Task
    from meshwright.models.foreign.origin import ForeignModel


class ForeignFamily(Family):
    """Models of token ids whose structure is derived, trained on text."""

    derives = True

    @abstractmethod
    def structure(self, f: RunFacts) -> Structure:
        """Return the structure of a run's model, from the cache if it was derived before."""

    @abstractmethod
    def identity(self, f: RunFacts) -> Mapping[str, Any]:
        """Return what determines the model, besides its kind, as JSON values."""

    @abstractmethod
    def origin(self, f: RunFacts) -> ForeignModel:
        """Return how the model is built and called."""

    @abstractmethod
    def compute(self, f: RunFacts, name: str) -> Tensor:
        """Return the initial values of a parameter or buffer that are neither normal nor constant, in full."""

    def make(self, f: RunFacts) -> nn.Module:
        """Build the whole model on the meta device, as a run computes it."""
        return self.origin(f).build()

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        """Check the layout against what the model allows."""
        structure = self.structure(f)
        if f.axes.pp > 1 and structure.not_split:
            what, rule = f"mesh.pp = {f.axes.pp}: {structure.not_split}", "only the stream passes between stages"
            yield Violation(LayoutError, what, "mesh.pp", rule, [{"mesh.pp": 1}])
        if f.data.chat_field is not None and structure.not_packed:
            what, rule = f"data.chat_field = {f.data.chat_field}: {structure.not_packed}", "conversations are packed"
            texts = {"data.source": "stdlib", "data.chat_field": None, "data.packing": "none"}
            model = "a model that keeps documents apart"
            yield Violation(ConfigError, what, "data.chat_field", rule, [texts], otherwise=model)
        if f.axes.cp > 1 and structure.not_context:
            what, rule = f"mesh.cp = {f.axes.cp}: {structure.not_context}", "ranks exchange keys and values alone"
            fixes: list[dict[str, Any]] = [{"mesh.cp": 1, "mesh.dp_shard": f.axes.dp_shard * f.axes.cp}, {"mesh.cp": 1}]
            yield Violation(LayoutError, what, "mesh.cp", rule, fixes)
        if f.axes.tp > 1 and f.sequence_parallel:
            key, rule = "mesh.sequence_parallel", "layers whose structure is derived take all tokens of a sample"
            yield Violation(LayoutError, f"{key} = true", key, rule, [{key: False}])
        if f.axes.tp > 1 and structure.not_tensor_parallel:
            what, rule = f"mesh.tp = {f.axes.tp}: {structure.not_tensor_parallel}", "a rank has its share of features"
            smaller = [{"mesh.tp": size} for size in range(f.axes.tp - 1, 0, -1) if f.axes.tp % size == 0]
            sizes = "a forward that takes sizes from its inputs, as view(b, t, -1, head_dim) does"
            sizes *= structure.not_tensor_parallel.startswith("a forward")
            yield Violation(LayoutError, what, "mesh.tp", rule, smaller, otherwise=sizes)
        if f.data.packing != "none" and structure.not_packed:
            what, rule = f"data.packing = {f.data.packing}: {structure.not_packed}", "documents see only themselves"
            shorter = [] if structure.packed_len is None else [{"train.seq_len": structure.packed_len}]
            yield Violation(ConfigError, what, "data.packing", rule, [{"data.packing": "none"}, *shorter])
        if structure.router_loss is not None and (f.data.packing != "none" or f.data.chat_field is not None):
            key = "data.packing" if f.data.chat_field is None else "data.chat_field"
            what, rule = f"{key} with a balance loss of the routers", "it is the loss of a sample, not of its documents"
            texts = {"data.source": "stdlib", "data.chat_field": None} if f.data.chat_field is not None else {}
            without = '"output_router_logits": false in config.json'
            yield Violation(ConfigError, what, key, rule, [{"data.packing": "none", **texts}], otherwise=without)
        if structure.max_len is not None and f.seq_len > structure.max_len:
            what = f"train.seq_len = {f.seq_len} exceeds the {structure.max_len} positions that the model has learned"
            rule = "a table of learned positions has a row for each token"
            yield Violation(LayoutError, what, "train.seq_len", rule, [{"train.seq_len": structure.max_len}])

    def notes(self, f: RunFacts) -> Iterable[str]:
        yield from self.structure(f).set_aside
        if (routers := self.structure(f).router_loss) is not None:
            yield f"balance loss of the routers, weight {routers.weight:g}, per sample"
        if reason := self.describe(f).last[0].head.reason:
            yield f"the loss takes all logits at once: {reason}"

    def describe(self, f: RunFacts) -> ModelFacts:
        return describe(self.structure(f), f, self.identity(f))

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        structure = self.structure(f)
        ends = {"first": structure.first, "every": structure.every, "last": structure.last}
        return {block.name: block.styles for block in structure.blocks} | {
            name: end.styles for name, end in ends.items()
        }

    def build(self, f: RunFacts, part: Part) -> nn.Module:
        from meshwright.models.foreign.stage import make_stage

        structure, empty = self.structure(f), f.allow_empty_stages
        stage = make_stage(self.make(f), structure, part, self.origin(f), allow_empty=empty)
        if any(block.experts for block in structure.blocks):
            from meshwright.models.foreign.experts import prepare_experts

            prepare_experts(stage, structure, part, ep=f.ep)
        if structure.router_loss is not None:
            from meshwright.models.foreign.router_loss import add_balance_loss

            add_balance_loss(stage, structure, part, structure.router_loss.width(f))
        return stage

    def run(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run a stage; every stage takes the token ids, too, from which models make masks and positions."""
        out: Tensor = module(inputs, *batch.conditions, token_ids=batch.inputs)
        return out

    def initial(self, f: RunFacts, name: str) -> Fill:
        facts = fill_of(self.structure(f), name)
        if facts.how == "normal":
            return Normal(facts.value)
        if facts.how == "uniform":
            return Uniform(facts.value)
        if facts.how == "constant":
            return Constant(facts.value)
        return Computed(lambda: self.compute(f, name))

    def open_data(self, f: RunFacts) -> Any:
        from meshwright.models.tasks.text_data import open_text

        return open_text(f, vocab_size=self.structure(f).vocab_size)

    def task(self, f: RunFacts, data: Any, device: torch.device) -> Task:
        from meshwright.models.tasks.text_task import text_task

        return text_task(f, data, device)

    def generate(self, f: RunFacts, forward: Forward, prompt: Prompt, folder: Path) -> Mapping[str, Any]:
        from meshwright.models.tasks.next_token import answer

        return {"text": answer(f, forward, prompt)}

    def reference(self, f: RunFacts, data: Any) -> Reference:
        from meshwright.models.tasks.text_task import text_reference

        return text_reference(f, data)
