"""The family of transformers models.

Doesn't import torch or transformers: what it needs to know of a model is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.family import Family, OtherWeights
from meshwright.models.contract.initial_values import Computed, Constant, Fill, Normal
from meshwright.models.contract.model_facts import EdgeFacts, KindFacts, ModelFacts, Part
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.tp_styles import Style
from meshwright.models.hf.config import HfConfig
from meshwright.models.hf.facts_cache import cached_structure
from meshwright.models.hf.source import Source, find_source, transformers_version
from meshwright.models.hf.structure import BlockFacts, EndFacts, FillFacts, Structure
from meshwright.settings.violation import Violation

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from meshwright.models.contract.task import Batch, Reference, Task


class HfFamily(Family):
    """Any causal language model of transformers, trained on text."""

    sections = {"model": HfConfig}
    preload = ("meshwright.models.hf.preload",)

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        """Check the layout against what the model allows."""
        structure = structure_of(f)
        if f.axes.pp > 1 and structure.not_split:
            what, rule = f"mesh.pp = {f.axes.pp}: {structure.not_split}", "only the stream passes between stages"
            yield Violation(LayoutError, what, "mesh.pp", rule, [{"mesh.pp": 1}])
        if f.axes.tp > 1 and f.sequence_parallel:
            key, rule = "mesh.sequence_parallel", "modules of transformers take all tokens of a sample"
            yield Violation(LayoutError, f"{key} = true", key, rule, [{key: False}])
        if f.axes.tp > 1 and structure.not_tensor_parallel:
            what, rule = f"mesh.tp = {f.axes.tp}: {structure.not_tensor_parallel}", "matrices are sharded over tp"
            yield Violation(LayoutError, what, "mesh.tp", rule, [{"mesh.tp": 1}])
        if f.data.packing != "none" and structure.not_packed:
            what, rule = f"data.packing = {f.data.packing}: {structure.not_packed}", "documents see only themselves"
            yield Violation(ConfigError, what, "data.packing", rule, [{"data.packing": "none"}])
        if _section(f).weights == "folder" and _source(_section(f)).folder is None:
            what, rule = "model.weights = folder, but model.config is a model type", "a model type has no weights"
            yield Violation(ConfigError, what, "model.weights", rule, [{"model.weights": "random"}])
        if (folder := _forgotten_tokenizer(f)) is not None:
            what, rule = f"data.tokenizer = bytes, but {folder} has a tokenizer", "weights go on with their own tokens"
            yield Violation(ConfigError, what, "data.tokenizer", rule, [{"data.tokenizer": str(folder)}])
        if structure.max_len is not None and f.seq_len > structure.max_len:
            what = f"train.seq_len = {f.seq_len} exceeds the {structure.max_len} positions that the model has learned"
            rule = "a table of learned positions has a row for each token"
            yield Violation(LayoutError, what, "train.seq_len", rule, [{"train.seq_len": structure.max_len}])

    def describe(self, f: RunFacts) -> ModelFacts:
        """Describe the model's parameters and costs."""
        return describe(structure_of(f), f)

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        """Return the tensor-parallel styles."""
        structure = structure_of(f)
        ends = {"first": structure.first, "every": structure.every, "last": structure.last}
        return {block.name: block.styles for block in structure.blocks} | {
            name: end.styles for name, end in ends.items()
        }

    def build(self, f: RunFacts, part: Part) -> nn.Module:
        """Build the model, and turn it into one stage."""
        from meshwright.models.hf.arrange import arrange, remove_aliases
        from meshwright.models.hf.stage import make_stage

        structure, model = structure_of(f), _build(f)
        remove_aliases(model, structure.aliases)
        names = [[parameter.name for parameter in end.parameters] for end in (structure.last, structure.every)]
        arrange(model, structure.layers_path, tuple(names[0]), tuple(names[1]))
        return make_stage(model, structure, part)

    def run(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run a stage; every stage takes the token ids, too, from which models make masks and positions."""
        out: Tensor = module(inputs, *batch.conditions, token_ids=batch.inputs)
        return out

    def other_weights(self) -> OtherWeights:
        """Return the export to a folder that `from_pretrained` opens."""
        from meshwright.models.hf.export import TransformersWeights

        return TransformersWeights()

    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return the initial values that the model's own rules give."""
        section, structure = _section(f), structure_of(f)
        folder, names = _source(section).folder, frozenset(_saved_shapes(structure))
        if section.weights == "folder" and folder is not None and name in names:
            from meshwright.models.hf.pretrained import read_pretrained

            cache_dir = f.data.cache_dir
            return Computed(lambda: read_pretrained(folder, name, names, cache_dir=cache_dir))
        facts = _fill(structure, name)
        if facts.how == "normal":
            return Normal(facts.value)
        if facts.how == "constant":
            return Constant(facts.value)
        from meshwright.models.hf.initial_values import to_fill

        return to_fill(facts, lambda small: _without_values(section, small), name, seed=f.seed)

    def open_data(self, f: RunFacts) -> Any:
        """Open the text of the `data` section, and check the folder's weights if the run starts from them."""
        from meshwright.models.tasks.text_data import open_text

        structure, section = structure_of(f), _section(f)
        text = open_text(f, vocab_size=structure.vocab_size)
        folder = _source(section).folder
        if section.weights == "folder" and folder is not None:
            from meshwright.models.hf.pretrained import check_pretrained

            check_pretrained(folder, _saved_shapes(structure), cache_dir=f.data.cache_dir)
        return text

    def task(self, f: RunFacts, data: Any, device: torch.device) -> Task:
        """Return the next-token task."""
        from meshwright.models.tasks.text_task import text_task

        return text_task(f, data, device)

    def reference(self, f: RunFacts, data: Any) -> Reference:
        """Return the reference implementation of the next-token loss."""
        from meshwright.models.tasks.text_task import text_reference

        return text_reference(f, data)


def describe(structure: Structure, f: RunFacts) -> ModelFacts:
    """Describe a model of this structure."""
    blocks = tuple(_kind(block, structure) for block in structure.blocks)
    flops = {block.name: block.flops for block in structure.blocks}
    first, every, last = (_end(name, getattr(structure, name)) for name in ("first", "every", "last"))
    has_every = structure.every.parameters or structure.every.buffers
    return ModelFacts(
        kinds=blocks,
        layers=structure.layers,
        edge=EdgeFacts("stream", (f.seq_len, *structure.per_token)),
        tokens=f.seq_len,
        identity={"kind": "hf", **_source(_section(f)).identity()},
        first=(first,),
        every=(every,) if has_every else (),
        last=(KindFacts(**{**vars(last), "output": float(structure.vocab_size)}),),
        keeps_documents_apart=not structure.not_packed,
        # The backward costs twice the forward.
        flops_per_token=3.0 * (sum(flops[name] for name in structure.layers) + structure.last.flops),
    )


def _kind(block: BlockFacts, structure: Structure) -> KindFacts:
    path = f"{structure.layers_path}.{{layer}}"
    return KindFacts(block.name, path, block.parameters, block.buffers, saved=block.saved, flops=block.flops)


def _end(name: str, end: EndFacts) -> KindFacts:
    return KindFacts(name, "", end.parameters, end.buffers, saved=end.saved, flops=end.flops)


def _fill(structure: Structure, name: str) -> FillFacts:
    prefix = f"{structure.layers_path}."
    if not name.startswith(prefix):
        return structure.fills[name]
    layer, _, inside = name.removeprefix(prefix).partition(".")
    return next(block for block in structure.blocks if block.name == structure.layers[int(layer)]).fills[inside]


def _saved_shapes(structure: Structure) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters and saved buffers by name, tied ones by their first name."""
    parts: list[tuple[str, EndFacts | BlockFacts]] = []
    parts += [("", end) for end in (structure.first, structure.every, structure.last)]
    by_name = {block.name: block for block in structure.blocks}
    parts += [(f"{structure.layers_path}.{i}.", by_name[kind]) for i, kind in enumerate(structure.layers)]
    found: dict[str, tuple[int, ...]] = {}
    for prefix, part in parts:
        found |= {prefix + p.name: p.shape for p in part.parameters if p.tied_to is None}
        found |= {prefix + b.name: b.shape for b in part.buffers if b.saved}
    return found


def _section(f: RunFacts) -> HfConfig:
    return f.section(HfConfig)


def _forgotten_tokenizer(f: RunFacts) -> Path | None:
    """Return the folder whose weights would read the bytes of text, though it has a tokenizer; None if they don't."""
    section, data = _section(f), f.data
    folder = _source(section).folder
    if section.weights != "folder" or folder is None:
        return None
    from meshwright.data.token_files import is_token_file
    from meshwright.data.tokenizer import BYTES, TOKENIZER
    from meshwright.models.tasks.text_sources import all_sources

    if data.tokenizer != BYTES or not (folder / TOKENIZER).is_file():
        return None
    return None if all(is_token_file(one.source) for one in all_sources(data)) else folder


@lru_cache(maxsize=64)
def _source(section: HfConfig) -> Source:
    return find_source(section.config)


def structure_of(f: RunFacts) -> Structure:
    """Return the structure of a run's model, from the cache if it was derived before."""
    return _structure(_section(f), f.seq_len, f.axes.tp, f.data.cache_dir)


@lru_cache(maxsize=64)
def _structure(section: HfConfig, seq_len: int, tp: int, cache_dir: str | None) -> Structure:
    source = _source(section)

    def derive() -> Structure:
        from meshwright.models.hf.derive import derive_structure

        return derive_structure(source, attention=section.attention, seq_len=seq_len, tp=tp)

    versions = {"transformers": transformers_version(), "torch": version("torch")}
    key = {**source.identity(), "attention": section.attention, "seq_len": seq_len, "tp": tp, **versions}
    return cached_structure(key, derive, cache_dir=cache_dir)


def _build(f: RunFacts) -> nn.Module:
    from meshwright.models.hf.build_model import build_model, load_config

    section = _section(f)
    # Grouped products have no kernel for float64. They leave rows of tokens for other ranks' experts uninitialised.
    experts = None if f.precision == "bfloat16" and f.axes.tp == 1 else "eager"
    return build_model(load_config(_source(section)), attention=section.attention, experts=experts)


@lru_cache(maxsize=4)
def _without_values(section: HfConfig, small: bool) -> nn.Module:
    """Build the model on the meta device; with `small`, small tensors on the CPU."""
    import torch

    from meshwright.models.hf.build_model import build_model, load_config
    from meshwright.models.hf.private import small_on_cpu

    with small_on_cpu() if small else torch.device("meta"):
        return build_model(load_config(_source(section)), attention=section.attention)


FAMILY = HfFamily()
