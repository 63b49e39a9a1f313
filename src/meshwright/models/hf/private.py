"""Names of `transformers` that it doesn't document, or may move.

Private transformers names, checked on 5.23.0, and PyTorch's `Tensor._base`. Both are imported inside the functions:
transformers is optional, and a plan needs neither.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


def causal_names() -> tuple[str, ...]:
    """Return the model types that `AutoModelForCausalLM` knows, in its order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_known(model_type: str) -> bool:
    """Return whether transformers has a model type, of whatever kind."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def config_class(model_type: str) -> type[Any]:
    """Return the configuration class of a model type, whole: with the vision or audio parts that it may have."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: type[Any] = CONFIG_MAPPING[model_type]
    return found


def is_causal_config(config: type[Any]) -> bool:
    """Return whether `AutoModelForCausalLM` builds a model from this configuration class itself."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return config in MODEL_FOR_CAUSAL_LM_MAPPING


def text_config_class(config: type[Any]) -> type[Any]:
    """Return the class of the text model's part of a configuration, or the class itself if it has no parts."""
    if "text_config" not in config.sub_configs:
        return config
    return type(config().text_config)


def read_config(folder: str, *, aloud: bool) -> Any:
    """Return the configuration in a folder; with `aloud`, transformers may say what it thinks of it."""
    from transformers import AutoConfig

    with nullcontext() if aloud else quiet():
        return AutoConfig.from_pretrained(folder, local_files_only=True)


def causal_lm(config: Any, *, attention: str, experts: str | None) -> Any:
    """Build a causal language model with random weights, without loading anything. The attention `auto` is the model's
    own choice, experts None transformers'."""
    options: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    with quiet():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if experts is not None and kind._can_set_experts_implementation():
            options["experts_implementation"] = experts
        return AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]


def inject_lora(model: Any, **options: Any) -> None:
    """Inject peft's adapters, in place, without its notes about names that it doesn't find in a model."""
    from peft import LoraConfig, inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(LoraConfig(**options), model)


def save_adapter(model: Any, tensors: Mapping[str, Any], folder: Path, *, base: str | None) -> None:
    """Write adapters as `PeftModel.from_pretrained` reads them; `base` is the folder of the model that they are for."""
    from safetensors.torch import save_file

    config = model.peft_config["default"]
    config.inference_mode, config.base_model_name_or_path = True, base
    config.save_pretrained(folder)
    named = {f"base_model.model.{name.replace('.default.', '.')}": tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / "adapter_model.safetensors")


def set_experts(model: Any, implementation: str) -> None:
    """Choose how a model's experts run, where it has a choice; `eager` runs one after the other, in any dtype."""
    if type(model)._can_set_experts_implementation():
        model.set_experts_implementation(implementation)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence, for as long as this lasts, transformers' notes about defaults, its progress bars, and the warnings of
    packages that it imports."""
    from transformers.utils import logging as its_logging

    before, disabled = its_logging.get_verbosity(), logging.root.manager.disable
    has_bars = its_logging.is_progress_bar_enabled()
    its_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    its_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        its_logging.set_verbosity(before)
        if has_bars:
            its_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def on_meta() -> Iterator[None]:
    """Make forwards possible on the meta device: the search for packed documents finds none in values that are not
    there, but runs its kernels, which may be counted."""
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices

    def find_none(position_ids: Any) -> None:
        with suppress(RuntimeError):
            find(position_ids)

    masking_utils.find_packed_sequence_indices = find_none
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


@contextmanager
def without_packing() -> Iterator[None]:
    """Let transformers look for no packed documents in positions: masks know them otherwise."""
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Let a model attend by another implementation for a while; a model that can't change goes on with its own."""
    before = model.config._attn_implementation
    with quiet():
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        with quiet():
            model.set_attn_implementation(before)


class Initialisation(NamedTuple):
    """The last call that initialised a tensor."""

    function: str
    arguments: tuple[Any, ...]
    by: Any
    """Module whose initialisation it was."""


def recorded_initialisation(model: Any) -> dict[int, Initialisation]:
    """Return how a model's own rules initialise its parameters and buffers, by `id`. Nothing is written."""
    from transformers import initialization

    found: dict[int, Initialisation] = {}
    by: list[Any] = [None]

    def recorder(name: str, original: Any) -> Any:
        signature = inspect.signature(original)

        def record(tensor: Any, *positional: Any, **named: Any) -> Any:
            bound = signature.bind(tensor, *positional, **named)
            bound.apply_defaults()
            of = tensor._base if tensor._base is not None else tensor
            kind = name if tensor._base is None else "view"
            found[id(of)] = Initialisation(kind, tuple(bound.arguments.values())[1:], by[0])
            return tensor

        return record

    functions, copy = dict(initialization.TORCH_INIT_FUNCTIONS), initialization.copy_
    for module in model.modules():
        module._is_hf_initialized = False
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor._is_hf_initialized = False
    parts = [module for module in model.modules() if hasattr(type(module), "_init_weights")]
    for part in parts:
        part._init_weights = _noting(part, by)
    for name, function in functions.items():
        initialization.TORCH_INIT_FUNCTIONS[name] = recorder(name, function)
    initialization.copy_ = recorder("copy_", copy)
    try:
        model.initialize_weights()
    finally:
        initialization.TORCH_INIT_FUNCTIONS.update(functions)
        initialization.copy_ = copy
        for part in parts:
            del part._init_weights
    return found


def _noting(part: Any, by: list[Any]) -> Any:
    """Return a model's initialisation of a module that notes the module in `by` first."""
    initialise = part._init_weights

    def noting(module: Any) -> None:
        by[0] = module
        initialise(module)

    return noting


def initialise_module(model: Any, module: Any) -> None:
    """Apply a model's rules of initialisation to one module, on which no tensor is marked as initialised."""
    model._init_weights(module)


def tensor_parallel_plan(model: Any) -> dict[str, str]:
    """Return transformers' styles of tensor parallelism by glob of module or parameter names."""
    return dict(model._tp_plan or {})


def logits(out: Any) -> Any:
    """Return the logits of a model's output."""
    return out.logits if hasattr(out, "logits") else out[0]


ROUTERS = "router_logits"
"""transformers' name of what routers return, and of what a model may add a loss of."""


def routers(model: Any) -> Iterator[tuple[str, int]]:
    """Yield the paths of a model's routers, as it records them, with the index of their logits in what they return."""
    recorders = (getattr(model.base_model, "_can_record_outputs", None) or {}).get(ROUTERS, ())
    for path, module in model.named_modules():
        for one in recorders if isinstance(recorders, list | tuple) else [recorders]:
            is_there = one.layer_name is None or f".{one.layer_name.strip('.')}." in f".{path}."
            if isinstance(module, one.target_class) and is_there:
                yield path, one.index


def top_k(model: Any) -> int | None:
    """Return how many experts a token of a mixture has; None if its configuration doesn't tell."""
    found = getattr(model.config, "num_experts_per_tok", None)
    return found if isinstance(found, int) else None


def set_router_logits(config: Any, wanted: bool) -> None:
    """Let models return the logits of their routers and add a loss of them, or not."""
    for part in (config, config.get_text_config()):
        if hasattr(part, f"output_{ROUTERS}"):
            setattr(part, f"output_{ROUTERS}", wanted)


def wants_router_logits(config: Any) -> bool:
    """Return whether models return the logits of their routers."""
    return bool(getattr(config.get_text_config(), f"output_{ROUTERS}", False))


def added_loss(model: Any, ids: Any, *, routed: bool) -> Any:
    """Return what a model's own forward adds to the loss of its labels, such as that of routers whose logits are
    returned; None if nothing."""
    import torch

    losses: list[torch.Tensor] = []

    def loss_of_labels(*args: Any, **kwargs: Any) -> torch.Tensor:
        losses.append(torch.zeros((), device=ids.device))
        return losses[-1]

    model._loss_function = loss_of_labels
    set_router_logits(model.config, routed)
    try:
        with on_meta() if ids.is_meta else nullcontext():
            out = model(input_ids=ids, labels=ids, use_cache=False, return_dict=True)
    finally:
        del model._loss_function
        set_router_logits(model.config, False)
    return out.loss if losses and (out.loss is not losses[-1] or losses[-1]._version > 0) else None


@cache
def transposed_linear() -> type[Any]:
    """Return GPT-2's linear layer, whose weight [d, e] is transposed, with widths taken from its weight, which may be a
    shard. Its base is transformers' own, by which the model's initialisation knows it."""
    from transformers.pytorch_utils import Conv1D

    class TransposedLinear(Conv1D):
        def forward(self, x: Any) -> Any:
            return x @ self.weight + self.bias

    return TransposedLinear


class LoadedWeights(NamedTuple):
    """A model's tensors as transformers loads them, and its report, by names in the text model."""

    tensors: dict[str, Any]
    """Parameters and saved buffers, tied ones by all their names."""
    missing: set[str]
    """Names that transformers filled by the model's own rules."""
    unexpected: set[str]
    """Names that the model doesn't have; those that it declares as ignored, too."""
    mismatched: list[tuple[str, Any, Any]]
    """Name, shape of the weights and shape of the model."""


def load_weights(config: Any, tensors: Mapping[str, Any], *, dtype: Any) -> LoadedWeights:
    """Load stored tensors into a model, converted to the names and forms that it computes with, and to a dtype that is
    wide enough for all. The configuration may be that of a model with images or audio."""
    with quiet():
        from transformers import PreTrainedModel

        kind, config = _model_class(config)
        adjust = PreTrainedModel._adjust_missing_and_unexpected_keys
        PreTrainedModel._adjust_missing_and_unexpected_keys = lambda self, loading_info: None  # type: ignore[method-assign]
        try:
            model, found = kind.from_pretrained(
                None, config=config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True,
                ignore_mismatched_sizes=True,
            )  # fmt: skip
        finally:
            PreTrainedModel._adjust_missing_and_unexpected_keys = adjust  # type: ignore[method-assign]
    twice = {name for name in tensors if f"{model.base_model_prefix}.{name}" in tensors}  # both become the latter
    return LoadedWeights(
        {_text_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()},
        {_text_name(name) for name in found["missing_keys"]},
        {_text_name(name) for name in found["unexpected_keys"] | twice},
        [(_text_name(name), tuple(a), tuple(b)) for name, a, b in sorted(found["mismatched_keys"])],
    )


def ignored_names(config: Any, names: Iterable[str]) -> set[str]:
    """Return those names of stored tensors that a model has no place for and declares as ignored."""
    import torch

    with quiet(), torch.device("meta"):
        kind, config = _model_class(config)
        model = kind(config)
    found = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    model._adjust_missing_and_unexpected_keys(found)
    return {name for name in names if name not in found.unexpected_keys}


def _model_class(config: Any) -> tuple[Any, Any]:
    """Return the class that `AutoModelForCausalLM` loads weights with, and the configuration that it takes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    found = config if is_causal_config(type(config)) else config.get_text_config()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(found)]
    is_text = kind.config_class is found.sub_configs.get("text_config")
    return kind, found.get_text_config() if is_text else found


def _text_name(name: str) -> str:
    """Return a parameter's name in the text model, which a model with images or audio calls `language_model`."""
    return name.replace("language_model.", "")


def save_model(config: Any, tensors: Mapping[str, Any], folder: Path, *, dtype: Any = None) -> None:
    """Write a model with these parameters and saved buffers, tied ones by their first names, as `from_pretrained` reads
    it; in `dtype` but for what the model always has in float32, or as they are if None."""
    import torch

    with quiet():
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    always = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    found = {
        name: x if dtype is None or not x.is_floating_point() or always & {*name.split(".")} else x.to(dtype)
        for name, x in tensors.items()
    }
    model.load_state_dict(found, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype or next(iter(tensors.values())).dtype
    with quiet():
        model.save_pretrained(folder)
