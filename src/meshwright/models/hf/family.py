"""The family of transformers models.

Doesn't import torch or transformers: what it needs to know of a model is cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import chain
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, InputError
from meshwright.models.contract.family import DataConfig, OtherWeights, RunFacts
from meshwright.models.contract.model_facts import ZEROS, Fill, ModelFacts, Part, Stored, Uniform
from meshwright.models.foreign.foreign_family import ForeignFamily
from meshwright.models.foreign.structure import Structure, cached_structure, describe, parameter_of, saved_tensors
from meshwright.models.hf.config import (
    CONFIG_FILE,
    FOREIGN_NAMES,
    OURS,
    SECOND,
    HfConfig,
    LoraConfig,
    Source,
    check_peft,
    file_state,
    find_source,
    has_weights,
    is_adapter,
    original_name,
    transformers_version,
)
from meshwright.settings.violation import Violation
from meshwright.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from meshwright.models.hf.origin import TransformersModel
    from meshwright.models.hf.pretrained import Pretrained


LONGEST = 1024
"""Tokens of a sample for a folder's model, at most, if nobody says how many."""


class HfFamily(ForeignFamily):
    """Any causal language model of transformers, trained on text."""

    sections = {"model": HfConfig, "lora": LoraConfig}
    foreign_names = FOREIGN_NAMES
    preload = ("meshwright.models.hf.preload",)
    library_bytes = 180 * MIB  # of transformers 5 with what it imports, such as torch._dynamo; measured

    def structure(self, f: RunFacts) -> Structure:
        return structure_of(f)

    def identity(self, f: RunFacts) -> Mapping[str, Any]:
        lora = _lora(f)
        adapters = {} if lora is None else {"lora": lora.identity()}
        return {"kind": "hf", **_source(_section(f)).identity(), **adapters}

    def origin(self, f: RunFacts) -> TransformersModel:
        return replace(_origin(_key(f)), first_position=structure_of(f).first_position)

    def version(self, f: RunFacts) -> Source:
        """Return what config.json says now."""
        return _source(_section(f))

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        try:
            structure_of(f)
        except ConfigError as error:
            if error.where != "lora.targets":
                raise
            yield Violation(ConfigError, error.what, error.where, error.rule, [], error.fix)
            return
        name = _section(f).attention
        if f.axes.cp > 1 and name not in ("auto", OURS):
            what, rule = f"mesh.cp = {f.axes.cp} with model.attention = {name}", "only our attention exchanges keys"
            yield Violation(ConfigError, what, "model.attention", rule, [{"model.attention": "auto"}])
        yield from super().rules(f)
        if name == OURS and (why := structure_of(f).not_ours):
            rule = "it takes the place of attention that computes the same"
            what = f"model.attention = {OURS}: {why}"
            yield Violation(ConfigError, what, "model.attention", rule, [{"model.attention": "auto"}])
        if _section(f).weights == "folder" and _source(_section(f)).folder is None:
            what, rule = "model.weights = folder, but model.config is a model type", "a model type has no weights"
            yield Violation(ConfigError, what, "model.weights", rule, [{"model.weights": "random"}])
        if _section(f).unused_weights and _section(f).weights == "random":
            what, rule = "model.unused_weights is set, but model.weights = random", "only a folder has such weights"
            fixes: list[dict[str, Any]] = [{"model.weights": "folder"}, {"model.unused_weights": ()}]
            yield Violation(ConfigError, what, "model.unused_weights", rule, fixes)
        if (folder := _own_tokenizer(f)) is not None:
            what, rule = f"data.tokenizer = bytes, but {folder} has a tokenizer", "weights go on with their own tokens"
            yield Violation(ConfigError, what, "data.tokenizer", rule, [{"data.tokenizer": str(folder)}])
        lora = f.section(LoraConfig)
        unread = [key for key, value in lora if lora.rank == 0 and value != LoraConfig.model_fields[key].default]
        for key in unread:
            what, rule = f"lora.{key} is set, but lora.rank = 0", "a rank of 1 or more turns adapters on"
            default = LoraConfig.model_fields[key].default
            yield Violation(ConfigError, what, "lora.rank", rule, [{"lora.rank": 8}, {f"lora.{key}": default}])

    def implied(self, f: RunFacts) -> Mapping[str, Any]:
        """Return the tokenizer that comes with the folder's weights."""
        folder = _own_tokenizer(f)
        return {} if folder is None else {"data.tokenizer": str(folder)}

    def notes(self, f: RunFacts) -> Iterable[str]:
        """Return where the weights come from, and what of the model takes no part in training."""
        folder = _source(_section(f)).folder
        if _section(f).weights == "folder":
            tokenizer = " and tokenizer" if f.data.tokenizer == str(folder) else ""
            yield f"initial weights{tokenizer}: those of {folder}"
        elif folder is not None and has_weights(folder):
            yield f"initial weights: random, though {folder} has some (model.weights=folder)"
        else:
            yield "initial weights: random"
        yield from super().notes(f)

    def describe(self, f: RunFacts) -> ModelFacts:
        """Describe the model's parameters and costs. Matrices that have adapters have no gradients to compute."""
        facts = describe(structure_of(f), f, self.identity(f), ours=_attention(f) == OURS)
        if _lora(f) is None:
            return facts
        structure = structure_of(f)
        by_name = {block.name: block for block in structure.blocks}
        parameters = chain(*(by_name[name].parameters for name in structure.layers), structure.last.parameters)
        frozen = sum(prod(p.shape) for p in parameters if p.frozen and len(p.shape) == 2)
        forward = facts.flops_per_token / 3
        return replace(facts, flops_per_token=max(2 * forward, 3 * forward - 2 * frozen))

    def make(self, f: RunFacts) -> nn.Module:
        """Build the whole model on the meta device, with grouped experts where they are right."""
        import torch

        from meshwright.models.hf.build_model import build_model

        # Grouped products have no kernel for float64. They leave rows of tokens for other ranks' experts uninitialised.
        is_grouped = f.precision == "bfloat16" and (f.axes.tp == 1 or f.ep > 1)
        experts = None if is_grouped else "eager"
        with torch.device("meta"):
            return build_model(self.origin(f).config, attention=_attention(f), experts=experts, lora=_lora(f))

    def build(self, f: RunFacts, part: Part) -> nn.Module:
        """Build a stage, whose layers attend by ours if the run asks for it."""
        model = super().build(f, part)
        if _attention(f) == OURS:
            from meshwright.models.hf.attention import attend_on_stage, run_mixers_by_document

            structure = structure_of(f)
            path, by_name = structure.layers_path, {one.name: one.attention for one in structure.blocks}
            found = {f"{path}.{index}": by_name[structure.layers[index]] for index in part.layers}
            known = {at: facts for at, facts in found.items() if facts is not None}
            attend_on_stage(model, known)
            run_mixers_by_document(model, path, part.layers, structure.mixers)
        return model

    def other_weights(self) -> OtherWeights:
        from meshwright.models.hf.pretrained import TransformersWeights

        return TransformersWeights()

    def open_folder(self, folder: Path) -> Sequence[str] | None:
        """Return the words for a folder with a config.json, with samples of at most 1024 tokens."""
        config = folder / CONFIG_FILE
        if not config.is_file():
            return None
        if not has_weights(folder):
            what, fix = f"{folder} has no weights", "the folder that checkpoint export or hf download wrote"
            raise InputError(what, where="command line", rule="a model's folder has its weights", fix=fix)
        longest = json.loads(config.read_text("utf-8")).get("max_position_embeddings") or LONGEST
        return "hf-tiny", f"model.config={folder}", f"train.seq_len={min(LONGEST, longest)}"

    def files_to_keep(self, f: RunFacts) -> Mapping[str, bytes]:
        """Return the folder's settings of generation, and its tokenizer if the data is tokens."""
        from meshwright.models.hf.pretrained import files_of_folder

        folder = _source(_section(f)).folder
        return {} if folder is None else files_of_folder(folder, is_tokens=_has_only_tokens(f.data))

    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return the values of the folder's weights, or those that the model's own rules give."""
        lora, weights = _lora(f), pretrained(f)
        if lora is not None and is_adapter(name):
            width = parameter_of(structure_of(f), name).shape[1]
            return ZEROS if lora.zero_init and SECOND in name else Uniform(1 / sqrt(width))  # as a linear layer's
        name = name if lora is None else original_name(name)
        if weights is not None and name in weights.wanted.shapes:
            return Stored(partial(weights.read, name))
        return super().initial(f, name)

    def compute(self, f: RunFacts, name: str) -> Tensor:
        from meshwright.models.hf.build_model import compute

        return compute(lambda small: _without_values(_key(f), small), name, f.seed)

    def proof(self, f: RunFacts) -> Mapping[str, Any]:
        """Return overrides for proofs: the first gradients of adapters that start at zero are zero."""
        return {} if _lora(f) is None else {"lora.zero_init": False}

    def open_data(self, f: RunFacts) -> Any:
        """Open the text of the `data` section, and check the folder's weights if the run starts from them."""
        text, weights = super().open_data(f), pretrained(f)
        if weights is not None:
            weights.check()
        return text


def pretrained(f: RunFacts) -> Pretrained | None:
    """Return the weights of a run's folder, the same each time in a process; None if it starts without."""
    folder = _source(_section(f)).folder
    if _section(f).weights != "folder" or folder is None:
        return None
    return _pretrained(folder, folder.absolute(), _key(f), _section(f).unused_weights)


@lru_cache(maxsize=4)
def _pretrained(folder: Path, absolute: Path, key: _Key, unused: tuple[str, ...]) -> Pretrained:
    from meshwright.models.hf.pretrained import Pretrained

    found = saved_tensors(_structure(key))
    own = {original_name(name): shape for name, shape in found.shapes.items() if not is_adapter(name)}
    return Pretrained(folder, key.source, replace(found, shapes=own), unused, key.cache_dir)


def _section(f: RunFacts) -> HfConfig:
    return f.section(HfConfig)


def _attention(f: RunFacts) -> str:
    """Return the attention that a run's model computes with."""
    name, structure = _section(f).attention, structure_of(f)
    if name == "auto" and not structure.not_ours and (f.axes.cp > 1 or f.data.packing != "none"):
        return OURS
    return name


def _lora(f: RunFacts) -> LoraConfig | None:
    """Return the section of adapters, or None without them."""
    lora = f.section(LoraConfig)
    if not lora.rank:
        return None
    check_peft()
    return lora


def _own_tokenizer(f: RunFacts) -> Path | None:
    """Return the folder whose tokenizer its weights are used to, where text would be read as bytes; None elsewhere."""
    section, data = _section(f), f.data
    if section.weights != "folder" or (folder := _source(section).folder) is None:
        return None
    from meshwright.data.tokenizer_files import BYTES, TOKENIZER

    if data.tokenizer != BYTES or not (folder / TOKENIZER).is_file():
        return None
    return None if _has_only_tokens(data) else folder


def _has_only_tokens(data: DataConfig) -> bool:
    """Return whether all training data are token files, which say no tokenizer."""
    from meshwright.data.token_files import is_token_file
    from meshwright.models.tasks.text_sources import all_sources

    return all(is_token_file(one.source) for one in all_sources(data))


def _source(section: HfConfig) -> Source:
    return _found(section.config, file_state(section.config))


@lru_cache(maxsize=64)
def _found(text: str, state: Any) -> Source:
    return find_source(text)


@dataclass(frozen=True)
class _Key:
    """Key of the caches: all that determines a model's structure."""

    source: Source
    attention: str
    lora: LoraConfig | None
    seq_len: int
    tp: int
    cache_dir: str | None
    over_ep: bool
    """Whether experts are sharded over ep, and not over tp."""


def _key(f: RunFacts) -> _Key:
    attention = "auto" if _section(f).attention == OURS else _section(f).attention
    return _Key(_source(_section(f)), attention, _lora(f), f.seq_len, f.axes.tp, f.data.cache_dir,
                f.axes.tp > 1 and f.ep > 1)  # fmt: skip


def structure_of(f: RunFacts) -> Structure:
    """Return the structure of a run's model, from the cache if it was derived before."""
    return _structure(_key(f))


@lru_cache(maxsize=64)
def _origin(key: _Key) -> TransformersModel:
    from meshwright.models.hf.origin import TransformersModel

    return TransformersModel(key.source, key.attention, key.lora, over_ep=key.over_ep)


@lru_cache(maxsize=64)
def _structure(key: _Key) -> Structure:
    def derive() -> Structure:
        from meshwright.models.foreign.derive import derive_structure
        from meshwright.models.hf.build_model import whole_config

        if key.source.fields:
            whole_config(key.source, aloud=True)  # here alone, or each rank would repeat it
        return derive_structure(_origin(key), seq_len=key.seq_len, tp=key.tp)

    decides = {**key.source.identity(), "attention": key.attention, "seq_len": key.seq_len, "tp": key.tp}
    decides |= {"transformers": transformers_version(), "torch": version("torch")}
    decides |= {"over_ep": True} if key.over_ep else {}
    if key.lora is not None:
        decides |= {"lora": key.lora.identity(), "peft": version("peft")}
    return cached_structure(decides, derive, cache_dir=key.cache_dir)


@lru_cache(maxsize=4)
def _without_values(key: _Key, small: bool) -> nn.Module:
    """Build the model on the meta device, without adapters; with `small`, small tensors on the CPU."""
    import torch

    from meshwright.models.foreign.private import small_on_cpu

    with small_on_cpu() if small else torch.device("meta"):
        return _origin(replace(key, lora=None)).build()


FAMILY = HfFamily()
