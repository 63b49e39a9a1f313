"""Build a transformers model from its configuration, with its adapters, and compute its initial values by name.

Normal values are drawn shard by shard (`nn/weight_init.py`), so they are the same on every layout. Values of other
rules are computed in full on the CPU, by the model's own code on a copy of the one module that they belong to.

Low-rank adapters (Hu et al. 2021) are injected by peft into the linear layers of decoder layers. A layer y = W x
becomes y = W x + s B A x, where only A [r, d] and B [e, r] are trained.

Shapes: d input features, e output features, r rank.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.contract.tp_styles import COLUMN, DIVIDED, REPLICATED, ROW, Style, StyleKind
from meshwright.models.foreign.origin import COMPUTED, NotSharded, build_recorded, largest_list, trained_plainly
from meshwright.models.foreign.structure import FillFacts
from meshwright.models.hf import private
from meshwright.models.hf.attention import attend_by_ours, register
from meshwright.models.hf.config import BASE, FIRST, KEY, OURS, SECOND, LoraConfig, Source
from meshwright.models.hf.tiny_config import not_causal, tiny_config
from meshwright.settings.violation import format_fix


def load_config(source: Source) -> Any:
    """Return transformers' configuration of the text model, without dropout, or raise a ConfigError if it has no causal
    language model of this type, or refuses the configuration."""
    config = original_config(source)
    for name, _ in [*dropouts(config)]:
        setattr(config, name, 0.0)
    config.use_cache = False
    private.set_router_logits(config, False)  # their loss is ours
    return config


def original_config(source: Source) -> Any:
    """Return transformers' configuration of the text model as it is."""
    if source.fields:
        config = whole_config(source)
    else:
        with private.quiet():  # notes about sizes that are small on purpose
            config = tiny_config(source.model_type)
    for found in (config.get_text_config(), config):
        if private.is_causal_config(type(found)):
            return found
    raise not_causal(source.model_type)


def whole_config(source: Source, *, aloud: bool = False) -> Any:
    """Return the configuration of a config.json, with parts for images or audio that it may have, or raise a
    ConfigError. With `aloud`, transformers says what it thinks of it, once a process."""
    if not private.is_known(source.model_type):
        raise not_causal(source.model_type)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(source.fields, "utf-8")
        try:
            return private.read_config(folder, aloud=aloud)
        except Exception as error:
            raise _no_model(source.model_type, f"{type(error).__name__}: {error}") from error


def dropouts(config: Any) -> Iterator[tuple[str, float]]:
    """Yield the names and values of probabilities of dropout, which depend on the layout of random numbers."""
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or name.endswith("pdrop") or "jitter" in name):
            yield name, value


def build_model(
    config: Any, *, attention: str = "auto", experts: str | None = "eager", lora: LoraConfig | None = None
) -> nn.Module:
    """Build the model with its plain forward, in training mode, with linear layers that can defer their gradients.

    The implementation of experts `eager` runs in every dtype; None is transformers' choice.
    """
    if attention == OURS:
        register()
    try:
        model: nn.Module = private.causal_lm(config, attention=attention, experts=experts)
    except ConfigError:
        raise
    except Exception as error:
        raise _no_model(config.model_type, f"{type(error).__name__}: {error}") from error
    if lora is not None:
        inject_adapters(model, config, lora)
    transposed = private.transposed_linear()
    for module in model.modules():
        if type(module) is transposed.__base__:
            module.__class__ = transposed
    if attention == OURS:
        attend_by_ours(model)
    return trained_plainly(model)


def _no_model(model_type: str, why: str) -> ConfigError:
    return ConfigError(
        f"transformers can't build a causal language model of {model_type}: {' '.join(why.split())[:300]}",
        where=KEY,
        rule="model.config names a causal language model of transformers (AutoModelForCausalLM)",
        fix=f"the config.json that save_pretrained or hf download wrote, or {KEY}=qwen3",
    )


def config_fields(config: Any) -> dict[str, Any]:
    """Return what determines the parameters and their meaning, as JSON values."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    ignored = ("transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "use_cache")
    return {name: value for name, value in fields.items() if name not in ignored and not name.startswith("_")}


def fills_of(build: Callable[[], nn.Module]) -> dict[str, FillFacts]:
    """Return how each parameter and buffer of a model is initialised, by every one of its names: by the model's rules,
    or by its constructor where they don't say."""
    model, constructed = build_recorded(build)
    recorded = private.recorded_initialisation(model)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: _fill(recorded[id(tensor)], tensor) if id(tensor) in recorded else constructed[name]
        for name, tensor in tensors
    }


def _fill(found: private.Initialisation, tensor: Tensor) -> FillFacts:
    if not tensor.is_floating_point():
        return COMPUTED
    if found.function == "normal_" and found.arguments[0] == 0:
        return FillFacts("normal", float(found.arguments[1]))
    if found.function in ("zeros_", "ones_"):
        return FillFacts("constant", float(found.function == "ones_"))
    if found.function == "constant_":
        return FillFacts("constant", float(found.arguments[0]))
    return COMPUTED


@torch.no_grad()
def compute(model: Callable[[bool], nn.Module], name: str, seed: int) -> Tensor:
    """Return the initial values of a tensor as the model's own rules compute them.

    `model` returns the model on the meta device or, for True, with small tensors on the CPU as its constructor made
    them.
    """
    path, _, last = name.rpartition(".")
    meta = model(False)
    owner = meta.get_submodule(path)
    recorded = private.recorded_initialisation(meta).get(id(getattr(owner, last)))
    if recorded is None:
        return _constructed(getattr(model(True).get_submodule(path), last), name)
    by = owner if recorded.by is None else recorded.by
    inside = next(key for key, module in by.named_modules() if module is owner)
    real = _retied(copy.deepcopy(by).to_empty(device="cpu"), by)
    generator = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator)
        private.initialise_module(meta, real)
    found: Tensor = getattr(real.get_submodule(inside), last)
    return found.detach()


def _retied(real: nn.Module, original: nn.Module) -> nn.Module:
    """Tie the parameters of a copy that are tied in the original, in place."""
    first: dict[int, nn.Parameter] = {}
    for name, parameter in original.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        owner = real.get_submodule(path)
        setattr(owner, leaf, first.setdefault(id(parameter), getattr(owner, leaf)))
    return real


def _constructed(tensor: Tensor, name: str) -> Tensor:
    """Return the values that a tensor was constructed with."""
    if tensor.is_meta:
        raise ConfigError(
            f"{name} is not initialised by the model's rules, and too large to construct",
            where=KEY,
            rule="a run starts from initial values that the model defines",
            fix="start from the weights of a folder: model.weights=folder",
        )
    return tensor.detach()


ALL = "all-linear"
"""peft's name of all linear layers."""
TARGETS = "lora.targets"


def inject_adapters(model: nn.Module, config: Any, lora: LoraConfig) -> None:
    """Give linear layers of a model's decoder layers adapters, in place; all parameters stay trainable. Raise a
    ConfigError if a target matches no linear layer, or peft refuses one."""
    names = _targets(model, largest_list(model, getattr(config, "num_hidden_layers", None)), lora)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    alpha = int(lora.alpha) if lora.alpha.is_integer() else lora.alpha  # as other programs expect it
    options = {"r": lora.rank, "lora_alpha": alpha, "use_rslora": lora.rslora, "task_type": "CAUSAL_LM"}
    transposed = not isinstance(model.get_submodule(names[0]), nn.Linear)
    try:
        private.inject_lora(model, fan_in_fan_out=transposed, target_modules=_short(model, names), **options)
    except ValueError as error:
        able = [name for name in names if f"'{name.rpartition('.')[2]}'" not in str(error)]
        raise _error(f"peft refuses adapters for {type(model).__name__}: {error}", able) from error
    adapted = adapted_layers(model)
    if adapted != names:  # peft takes gate_proj for experts' where transformers 4 had experts of that name
        refused = {name.rpartition(".")[2] for name in names} - {path.rpartition(".")[2] for path in adapted}
        what = f"peft takes {', '.join(sorted(refused)) or TARGETS} for parts of the experts of {type(model).__name__}"
        raise _error(what, [name for name in names if name.rpartition(".")[2] not in refused])
    for parameter in trainable:  # peft freezes the rest; what depends on it is read off the autograd graph first
        parameter.requires_grad_(True)


def adapted_layers(model: nn.Module) -> list[str]:
    return [path.removesuffix(f".{BASE}") for path, _ in model.named_modules() if path.endswith(f".{BASE}")]


def _targets(model: nn.Module, layers: str | None, lora: LoraConfig) -> list[str]:
    kinds = (nn.Linear, private.transposed_linear().__base__)
    able = [path for path, module in model.named_modules() if type(module) in kinds and path.startswith(f"{layers}.")]
    for target in lora.targets:
        if not any(_matches(path, target) for path in able):
            raise _error(f"{TARGETS} has {target}, which matches no linear layer of the decoder layers", able)
    found = [path for path in able if not lora.targets or any(_matches(path, target) for target in lora.targets)]
    if not found:
        raise _error(f"the decoder layers of {type(model).__name__} have no linear layers", able)
    return found


def _matches(path: str, target: str) -> bool:
    return target == ALL or f".{path}".endswith(f".{target}") or fnmatchcase(path, target)


def _short(model: nn.Module, names: list[str]) -> list[str]:
    """Return the last parts of paths if these say as much, as other programs expect them in a saved adapter."""
    last = {name.rpartition(".")[2] for name in names}
    taken = {path for path, _ in model.named_modules() if path.rpartition(".")[2] in last}
    return sorted(last) if taken == set(names) else names


def _error(what: str, able: Iterable[str]) -> ConfigError:
    last = sorted({path.rpartition(".")[2] for path in able})
    return ConfigError(
        what,
        where=TARGETS,
        rule="adapters are for linear layers of the decoder layers; here these are " + (", ".join(last) or "none"),
        fix=format_fix({TARGETS: last} if last else {"lora.rank": 0}),
    )


def check_called(model: nn.Module, unused: set[str]) -> None:
    """Raise a ConfigError if a module reads the weight of an adapted layer instead of calling the layer: its adapter
    would add nothing."""
    paths = adapted_layers(model)
    idle = [path for path in paths if not unused.isdisjoint({f"{path}.{FIRST}.weight", f"{path}.{SECOND}.weight"})]
    if idle:
        what = f"{type(model).__name__} doesn't call {idle[0]}, so that an adapter there would add nothing"
        last = {path.rpartition(".")[2] for path in idle}
        raise _error(what, [path for path in paths if path.rpartition(".")[2] not in last])


def with_adapter_styles(styles: Mapping[str, Style], layers: Iterable[str]) -> dict[str, Style]:
    """Return the tensor-parallel styles of a model with adapters, given those of the model without.

    Each adapter is placed as its layer is: B's rows are sharded as those of W are, or else A's columns as those of W.
    The tensor of width r in between is replicated, and reduced in the backward or the forward.

    Raises:
        NotSharded: a layer's style has no counterpart.
    """
    found = dict(styles)
    for path in layers:
        style = found.pop(path)
        first, second = _pair(path, style)
        found |= {f"{path}.{BASE}": style, f"{path}.{FIRST}": first, f"{path}.{SECOND}": second}
    return found


def _pair(path: str, style: Style) -> tuple[Style, Style]:
    """Return the styles of A and B."""
    if style.kind in (StyleKind.COLUMN, StyleKind.REPLICATED):
        return REPLICATED, style
    if style.kind is StyleKind.ROW:
        return style, REPLICATED
    if style.kind is StyleKind.DIVIDED:
        return DIVIDED, DIVIDED
    if style.kind is StyleKind.LOCAL and style.summed_input:
        return REPLICATED, COLUMN
    if style.kind is StyleKind.LOCAL and style.reduced_output:
        return ROW, REPLICATED
    raise NotSharded(f"an adapter of {path} can't be sharded as its layer is ({style.kind.value})")


def merged(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the model without adapters, to which what these add has been added."""
    paths = adapted_layers(model)
    found = {name: tensor for name, tensor in tensors.items() if not any(name.startswith(f"{p}.lora_") for p in paths)}
    for path in paths:
        layer: Any = model.get_submodule(path)
        base = f"{path}.{BASE}.weight"
        product = tensors[f"{path}.{SECOND}.weight"] @ tensors[f"{path}.{FIRST}.weight"]
        found[base] = found[base] + layer.scaling["default"] * (product.T if layer.fan_in_fan_out else product)
    return found
