"""Low-rank adapters (Hu et al. 2021) on the linear layers of a model's decoder layers, injected by peft.

A layer y = W x becomes y = W x + s B A x, where only A [r, d] and B [e, r] are trained.

Shapes: d input features, e output features, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.contract.tp_styles import COLUMN, DIVIDED, REPLICATED, ROW, Style, StyleKind
from meshwright.models.foreign.origin import NotSharded, largest_list
from meshwright.models.hf import private
from meshwright.models.hf.config import LoraConfig
from meshwright.models.hf.lora_names import BASE, FIRST, SECOND
from meshwright.settings.violation import format_fix

ALL = "all-linear"
"""peft's name of all linear layers."""
KEY = "lora.targets"


def inject_adapters(model: nn.Module, config: Any, lora: LoraConfig) -> None:
    """Give linear layers of a model's decoder layers adapters, in place; all parameters stay trainable.

    Args:
        model: model as transformers builds it.
        config: its configuration.
        lora: its adapters, of rank 1 or more.

    Raises:
        ConfigError: a target matches no linear layer, or peft refuses one.
    """
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
        what = f"peft takes {', '.join(sorted(refused)) or KEY} for parts of the experts of {type(model).__name__}"
        raise _error(what, [name for name in names if name.rpartition(".")[2] not in refused])
    for parameter in trainable:  # peft freezes the rest; what depends on it is read off the autograd graph first
        parameter.requires_grad_(True)


def adapted_layers(model: nn.Module) -> list[str]:
    """Return the paths of a model's layers with adapters."""
    return [path.removesuffix(f".{BASE}") for path, _ in model.named_modules() if path.endswith(f".{BASE}")]


def _targets(model: nn.Module, layers: str | None, lora: LoraConfig) -> list[str]:
    """Return the paths of the linear layers that get adapters."""
    kinds = (nn.Linear, private.transposed_linear().__base__)
    able = [path for path, module in model.named_modules() if type(module) in kinds and path.startswith(f"{layers}.")]
    for target in lora.targets:
        if not any(_matches(path, target) for path in able):
            raise _error(f"{KEY} has {target}, which matches no linear layer of the decoder layers", able)
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
        where=KEY,
        rule="adapters are for linear layers of the decoder layers; here these are " + (", ".join(last) or "none"),
        fix=format_fix({KEY: last} if last else {"lora.rank": 0}),
    )


def check_called(model: nn.Module, unused: set[str]) -> None:
    """Check that the output depends on every adapter.

    Raises:
        ConfigError: a module reads a layer's weight instead of calling the layer, so an adapter would add nothing.
    """
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
    """Return the weights of the model without adapters, to which what these add has been added.

    Args:
        model: model with adapters, without values.
        tensors: values by name.
    """
    paths = adapted_layers(model)
    found = {name: tensor for name, tensor in tensors.items() if not any(name.startswith(f"{p}.lora_") for p in paths)}
    for path in paths:
        layer: Any = model.get_submodule(path)
        base = f"{path}.{BASE}.weight"
        product = tensors[f"{path}.{SECOND}.weight"] @ tensors[f"{path}.{FIRST}.weight"]
        found[base] = found[base] + layer.scaling["default"] * (product.T if layer.fan_in_fan_out else product)
    return found
