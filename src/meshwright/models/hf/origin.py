"""A model of transformers as a foreign model: how it is built, called and sharded.

Of transformers' tensor parallelism only the plan is used, which matrices are sharded and how: its implementation
all-reduces the accumulated gradient of replicated norms in every backward, wrong with more than one micro-batch.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.contract.tp_styles import (
    COLUMN,
    GATHERED_COLUMN,
    HEAD,
    REPLICATED,
    ROW,
    SPLIT_ROW,
    VOCABULARY,
    Style,
    StyleKind,
    local,
)
from meshwright.models.foreign.experts import INPUTS as EXPERT_INPUTS
from meshwright.models.foreign.experts import why_not_dispatched
from meshwright.models.foreign.origin import (
    POSITIONS,
    AttentionFound,
    ForeignModel,
    Probe,
    given_positions,
    no_dropout,
)
from meshwright.models.foreign.packing import MAX_TRIED, check_samples, why_not_packed
from meshwright.models.foreign.structure import FillFacts, RouterLoss
from meshwright.models.foreign.tp_shapes import feed_forwards, owners
from meshwright.models.hf import private
from meshwright.models.hf.attention import Mixers, attending, run_mixers_by_document
from meshwright.models.hf.build_model import (
    adapted_layers,
    build_model,
    check_called,
    dropouts,
    fills_of,
    load_config,
    original_config,
    with_adapter_styles,
)
from meshwright.models.hf.config import KEY, OURS, LoraConfig, Source, is_adapter
from meshwright.models.hf.router_loss import NOT_KNOWN, balance_loss, why_not_its_own
from meshwright.models.hf.tiny_config import limits_of, shrunken_config
from meshwright.nn.attention.mask_spec import TokenLayout

EXPERTS_ON_META, SAVING_EXPERTS = "batched_mm", "grouped_mm"
"""Implementations of experts whose shapes depend on no values, and that save what experts save on the meta device."""
LINEAR: Mapping[str, Style] = {
    "colwise": COLUMN,
    "colwise_gather_output": GATHERED_COLUMN,
    "colwise_rep": GATHERED_COLUMN,
    "rowwise": ROW,
    "rowwise_split_input": SPLIT_ROW,
    "rowwise_rep": SPLIT_ROW,
}
"""Styles of linear layers."""
ROWS = "embedding_rowwise"
EXPERTS = "moe_tp_experts"
LATENT_KEYS = "mla_kv_a_proj"
PLAN_UNFIT = (
    "dbrx",  # experts are modules of their own inside a stack of parameters
    "dots3_note_text",  # parameters that it leaves replicated get partial gradients
    "gemma3n_text",  # parameters of sharded modules are read without calling them
)
"""Model types whose plan of tensor parallelism is wrong, or isn't ours: only feed-forward layers are sharded."""
NOT_SMALL = "it can't be built small, to try it"
WITHOUT_SENTINEL = ("nemotron_h",)
"""Model types whose experts take no index that stands for other ranks' experts: all ranks run all."""


@dataclass(frozen=True)
class TransformersModel(ForeignModel):
    """A causal language model of transformers: that of a source, with an attention and maybe adapters."""

    source: Source
    attention_name: str = "auto"
    lora: LoraConfig | None = None
    first_position: int = 0
    """Position of a sample's first token."""
    mixers: Mixers = ()
    """Modules that run document by document, for our attention."""
    over_ep: bool = False
    """Whether experts are sharded over ep, and therefore not over tp."""
    key = KEY
    fix = f"{KEY}=qwen3"

    @property
    def config(self) -> Any:
        """Transformers' configuration, a new one each time, since building a model changes it. Raises a ConfigError if
        it has no such model, or it is an encoder."""
        config = load_config(self.source)
        if getattr(config, "is_decoder", None) is False:
            raise self.error(
                f"{config.model_type} is an encoder: each token sees later ones",
                "next-token prediction needs a causal model",
                f"{KEY}=qwen3, or is_decoder=true in config.json if the weights are a decoder's",
            )
        return config

    def build(self) -> nn.Module:
        experts = EXPERTS_ON_META if torch.get_default_device().type == "meta" else "eager"
        model = build_model(self.config, attention=self.attention_name, experts=experts, lora=self.lora)
        if self.mixers:
            path = self.layers_path(model)
            layers = range(len(list(model.get_submodule(path).children())))
            run_mixers_by_document(model, path, layers, self.mixers)
        return model

    def call(self, model: Callable[..., Any], ids: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Return the logits of token ids. Masks of documents are ours, or transformers makes them from positions. With
        ours, a call without layout, as in proofs' references, attends by the model's definition."""
        state, given = attending(model), given_positions(layout, ids, self.first_position)
        with ExitStack() as stack:
            if ids.is_meta:
                stack.enter_context(private.on_meta())
            if state is not None:
                stack.enter_context(private.without_packing())
                state.layout, state.positions = layout, given.get(POSITIONS)
                if layout is None:
                    stack.enter_context(private.attention(getattr(model, "__self__", model), "eager"))
            logits: Tensor = private.logits(model(input_ids=ids, use_cache=False, **given))
        return logits

    def set_aside(self, model: nn.Module, ids: Tensor) -> tuple[str, ...]:
        found = {name: value for name, value in dropouts(original_config(self.source)) if value}
        return (no_dropout(found),) if found else ()

    def layers_path(self, model: nn.Module) -> str:
        """Return the path of the list of decoder layers: the largest of those as long as `num_hidden_layers`."""
        return self.largest_list(model, getattr(self.config, "num_hidden_layers", None))

    def fills(self) -> dict[str, FillFacts]:
        return fills_of(self._plain().build)

    def _plain(self) -> TransformersModel:
        """Return the model without adapters, which change names and types."""
        return replace(self, lora=None)

    def check_probe(self, model: nn.Module, found: Probe) -> None:
        """Check that samples are computed one by one, that the output depends on every adapter, and freeze the rest."""
        if (small := self._shrunken(found.time, found.time)) is not None:
            check_samples(self, small, length=found.time)
        if self.lora is not None:
            check_called(model, found.unused)
            found.frozen |= {name for name, _ in model.named_parameters() if not is_adapter(name)}

    def router_loss(self, model: nn.Module, time: int) -> RouterLoss | None:
        """Return the balance loss of the routers, if it is what the model's own forward adds; other losses are not
        trained."""
        found = re.findall(r'"(\w*loss\w*)": ([\d.e-]+)', self.config.to_json_string(use_diff=False))
        weights = {name: weight for name, weight in found if float(weight)}
        wanted = private.wants_router_logits(original_config(self.source))
        try:
            ids = torch.zeros((2, time), dtype=torch.long, device=next(model.parameters()).device)
            with torch.no_grad():
                adds = bool(weights) and private.added_loss(model, ids, routed=wanted) is not None
        except Exception:  # such as an operator without a kernel for the meta device
            adds = wanted and bool(weights)
        if not adds:
            return None
        small = self._plain()._shrunken(time, time)
        for one in map(float, weights.values()):
            if not (why := NOT_SMALL if small is None else why_not_its_own(small, one, time)):
                if (loss := balance_loss(self, model, one, time)) is not None:
                    return loss
                why = NOT_KNOWN
        name, weight = next(iter(weights.items()))
        what = f"the forward of {type(model).__name__} adds a loss with {name} = {weight} to that of the next token"
        rule = "of other losses, only transformers' balance loss of all layers' routers is trained"
        setting = '"output_router_logits": false' if wanted else f'"{name}": 0'
        fix = f"{setting} in {self.source.folder or self.source.model_type}/config.json"
        raise self.error(f"{what}: {why}", rule, fix)

    def styles(self, model: nn.Module, width: int) -> Iterator[dict[str, Style]]:
        """Yield transformers' plan as our styles, if it has one, and those of feed-forward layers that shapes show."""
        if self.lora is not None:
            with torch.device("meta"):
                plain = self._plain().build()
            for styles in self._plain().styles(plain, width):
                yield with_adapter_styles(styles, adapted_layers(model))
            return
        config = self.config
        plan = {} if config.model_type in PLAN_UNFIT else private.tensor_parallel_plan(model)
        if plan:
            styles = tp_styles(model, plan, config)
            is_whole = {path for path, one in styles.items() if one.kind is StyleKind.EXPERTS and self.over_ep}
            yield styles | dict.fromkeys(is_whole, REPLICATED)
        yield from feed_forwards(model, width, private.transposed_linear())

    def attention(self, model: nn.Module, seq_len: int) -> AttentionFound:
        """Return what the layers ask of attention, and whether ours is theirs in this model, built small."""
        if self.attention_name != "auto":
            why = f"model.attention = {self.attention_name}"
            return AttentionFound(not_ours=why, not_context=why)
        if (small := self._shrunken(seq_len, min(seq_len, MAX_TRIED))) is None:
            return AttentionFound(not_ours=NOT_SMALL, not_context=NOT_SMALL)
        from meshwright.models.hf.attention_checks import Small, find_attention

        def ours(first: int) -> ForeignModel:
            return replace(small, attention_name=OURS, first_position=first)

        return find_attention(self, model, Small(replace(small, attention_name="eager"), ours), seq_len)

    def not_packed(self, model: nn.Module, seq_len: int, attention: AttentionFound) -> str:
        """Return why documents see each other in this model, built small."""
        longest = min(seq_len, MAX_TRIED)
        if (small := self._shrunken(seq_len, longest)) is None:
            return NOT_SMALL
        if not attention.not_ours:
            small = replace(small, attention_name=OURS, mixers=attention.mixers)
        return why_not_packed(replace(small, first_position=attention.first_position), length=longest)

    def stacked_experts(self, model: nn.Module) -> Iterator[str]:
        yield from (path for path, one in owners(model).items() if not why_not_stacked(one))

    def why_not_dispatched(self, model: nn.Module, length: int) -> str:
        """Return why a small model's experts compute other values for the tokens that they are sent."""
        if not any(self.stacked_experts(model)):
            found = ((path, one) for path, one in model.named_modules() if path.endswith("experts"))
            return next((f"{path} {why_not_stacked(one)}" for path, one in found), "")
        small = self._shrunken(length, length)
        return NOT_SMALL if small is None else why_not_dispatched(small, length=length)

    def limits(self) -> list[int]:
        return limits_of(self.config)

    def _shrunken(self, seq_len: int, longest: int) -> TransformersModel | None:
        """Return the model with tiny sizes, whose limits are to `longest` tokens as its own are to `seq_len`; None if
        its sizes then don't fit each other."""
        try:
            with private.quiet():
                small = shrunken_config(self.config, seq_len=seq_len, longest=longest)
            source = Source(small.model_type, fields=small.to_json_string(use_diff=False))
            made = TransformersModel(source, self.attention_name)
            made.build()
        except Exception:  # whatever their classes raise
            return None
        return made

    def max_len(self, model: nn.Module) -> int | None:
        """Return the rows of a table of learned positions, of which a model may add some for padding."""
        positions = getattr(self.config, "max_position_embeddings", None)
        rows = [table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)]
        found = [positions for n in rows if positions is not None and positions <= n <= positions + 8]
        return min(found, default=None)

    def prepare_saving(self, model: nn.Module) -> None:
        """Run experts by grouped products on the meta device: without values the others save more than a run does."""
        if next(model.parameters()).is_meta:
            private.set_experts(model, SAVING_EXPERTS)

    def prepare_float64(self, model: nn.Module) -> None:
        """Run experts one after the other: the reference of a run in bfloat16 may have grouped ones."""
        private.set_experts(model, "eager")


def tp_styles(model: nn.Module, plan: Mapping[str, str], config: Any) -> dict[str, Style]:
    """Return the style of each module with parameters by its path, given transformers' styles by glob of names."""
    return {path: _style(path, module, plan, config) for path, module in owners(model).items()}


def _style(path: str, module: nn.Module, plan: Mapping[str, str], config: Any) -> Style:
    name = next((style for glob, style in plan.items() if fnmatchcase(path, glob)), None)
    if name == EXPERTS:
        return _experts(path, module, config)
    if name == LATENT_KEYS:
        return Style(StyleKind.REPLICATED, partial_tail=config.qk_rope_head_dim)
    if name == ROWS and isinstance(module, nn.Embedding) and not list(module.children()):
        return VOCABULARY
    if name is not None and name in LINEAR and isinstance(module, nn.Linear):
        is_outside = not any(part.isdigit() for part in path.split("."))  # layers are numbered
        is_head = is_outside and module.out_features == getattr(config, "vocab_size", None)
        return HEAD if is_head and LINEAR[name] is GATHERED_COLUMN else LINEAR[name]
    own = {
        leaf: style
        for leaf, _ in module.named_parameters(recurse=False)
        for glob, style in plan.items()
        if fnmatchcase(f"{path}.{leaf}", glob)
    }
    is_whole = len(own) == sum(1 for _ in module.parameters(recurse=False))
    if is_whole and all(style == "colwise" for style in own.values()):
        return local(**dict.fromkeys(own, 0))
    return REPLICATED  # styles that are not ours, too: what then meets shards is found by shapes


def _experts(path: str, module: nn.Module, config: Any) -> Style:
    """Return the style of experts: sharded by expert, or replicated where a rank couldn't run its own alone."""
    if config.model_type in WITHOUT_SENTINEL or why_not_stacked(module):
        return REPLICATED
    return Style(StyleKind.EXPERTS, top_k=int(getattr(config, "num_experts_per_tok", 0) or 1))


def why_not_stacked(module: nn.Module) -> str:
    """Return what keeps a module from being experts of which each rank can hold some, or an empty string."""
    count = getattr(module, "num_experts", None)
    shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
    if any(True for child in module.children() for _ in child.parameters()):
        return "has parameters in modules of its own"
    if not shapes or count is None or any(shape[0] != count for shape in shapes):
        return "has parameters that are not stacked by expert"
    if len(inspect.signature(module.forward).parameters) < EXPERT_INPUTS:
        return "doesn't take tokens, the indices of their experts, and weights"
    return ""
