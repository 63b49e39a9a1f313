"""A module of one's own as a foreign model: how it is built, called and sharded, and its own loss, if it has one.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.data.loader import IGNORED_TARGET
from meshwright.errors import ConfigError
from meshwright.models.contract.model_facts import LossUnit
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
)
from meshwright.models.foreign import private
from meshwright.models.foreign.origin import (
    DROPOUTS,
    LAYER_LISTS,
    MAX_ON_CPU,
    WITH_DROPOUT,
    AttentionFound,
    ForeignModel,
    Probe,
    build_recorded,
    given_positions,
    no_dropout,
    trained_plainly,
)
from meshwright.models.foreign.packing import MAX_TRIED, check_samples, why_not_packed
from meshwright.models.foreign.structure import FillFacts
from meshwright.models.foreign.tp_shapes import feed_forwards, owners
from meshwright.models.module.config import ModuleConfig
from meshwright.models.tasks.next_token import OwnLoss
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.settings.import_object import import_object

BUILDER = "model.builder"
RULE = "model.builder is package.module:name of a function or class that returns a torch.nn.Module"
POSITIONS = "position_ids"
STYLES = {
    "column": COLUMN,
    "row": ROW,
    "gathered_column": GATHERED_COLUMN,
    "split_row": SPLIT_ROW,
    "vocabulary": VOCABULARY,
    "head": HEAD,
    "experts": Style(StyleKind.EXPERTS),
    "replicated": REPLICATED,
}
"""Tensor-parallel styles by the names that `model.styles` has for them."""
MIN_TIME = 8
"""Tokens of a sample that shows which tables are looked up by position."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class OwnModule(ForeignModel):
    """A module that a builder returns, as the `model` section says."""

    section: ModuleConfig
    key = BUILDER
    tries_stages = True
    fix = "a module with such layers"
    fix_forward = "a forward that takes token ids [b, t], and has defaults for all else"
    fix_samples = "a forward without means, norms or choices over dim 0, the samples of a batch"

    def build(self) -> nn.Module:
        return trained_plainly(with_buffers(self._built(), self))

    def _built(self) -> nn.Module:
        name, arguments = self.section.builder, dict(self.section.arguments)
        builder = import_object(name, key=BUILDER, rule=RULE, format_setting=lambda found: f"{BUILDER}={found}")
        try:
            with warnings.catch_warnings():  # of values that a checkpoint has, and the meta device hasn't
                warnings.filterwarnings("ignore", message="for .*: copying from a non-meta parameter")
                model = builder(**arguments)
        except Exception as error:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            what = f"{name}({given}) fails: {type(error).__name__}: {error}"
            raise ConfigError(what, where=BUILDER, rule=RULE, fix="model.arguments that the builder takes") from error
        if not isinstance(model, nn.Module):
            what = f"{name} returns a {type(model).__name__}"
            raise ConfigError(what, where=BUILDER, rule=RULE, fix="return the module")
        return model

    def set_aside(self, model: nn.Module, ids: Tensor) -> tuple[str, ...]:
        """Return dropout, rows for padding and outputs besides the logits; a * is the number of any layer."""
        with torch.device("meta"):
            built = self._built()
        modules = [(re.sub(r"\.\d+(?=\.|$)", ".*", path), module) for path, module in built.named_modules()]
        drops = {path: module.p for path, module in modules if isinstance(module, DROPOUTS) and module.p}
        drops |= {path: m.dropout for path, m in modules if isinstance(m, WITH_DROPOUT) and m.dropout}
        padded = {path for path, m in modules if isinstance(m, nn.Embedding) and m.padding_idx is not None}
        found = [no_dropout(drops)] if drops else []
        found += [f"padding_idx of {path} is set aside: samples have no padding" for path in sorted(padded)]
        _, others = _outputs(model(ids))
        found += [f"{', '.join(others)} of the forward is set aside: logits alone are used"] if others else []
        return tuple(found)

    def check_probe(self, model: nn.Module, found: Probe) -> None:
        """Check that a forward has no side effects. Where it depends on values, such as which experts have tokens, what
        is not used once may be used later."""
        check_side_effects(model, self, found.time)
        if _num_elements(model) <= MAX_ON_CPU:
            check_samples(self, self, length=found.time)
        if not next(model.parameters()).is_meta:
            found.unused.clear()

    def call(self, model: Callable[..., Any], ids: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Return the logits of token ids; a module that takes `position_ids` gets those of packed documents."""
        logits: Tensor = _outputs(model(ids.contiguous(), **given_positions(layout, ids)))[0]
        return logits

    def max_len(self, model: nn.Module) -> int | None:
        """Return the rows of the smallest table that positions look up: a forward of equal tokens shows which do."""
        if _num_elements(model) > MAX_ON_CPU:
            return None
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            built, found = self.build(), list[int]()

        def note(table: nn.Embedding, args: tuple[Tensor, ...], out: Tensor) -> None:
            beyond = int(args[0].max()) - (MIN_TIME - 1)  # what is added to positions
            found.extend([table.num_embeddings - beyond] if beyond >= 0 else [])

        for module in built.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(note)
        with torch.no_grad(), suppress(Exception):  # of lengths that it doesn't take
            self.call(built, torch.zeros((1, MIN_TIME), dtype=torch.long))
        return min(found, default=None)

    def layers_path(self, model: nn.Module) -> str:
        path = self.section.layer_list
        lists = {kind: [name for name, m in model.named_modules() if isinstance(m, kind)] for kind in LAYER_LISTS}
        if path in lists[nn.ModuleList] or (path and path in lists[nn.Sequential]):
            return path
        if not path and lists[nn.ModuleList]:
            return self.largest_list(model, None)
        found = [name for kind in LAYER_LISTS for name in lists[kind] if name]
        name = type(model).__name__
        raise ConfigError(
            f"{name} has no list of modules {path}" if path else f"{name} has no torch.nn.ModuleList of layers",
            where="model.layer_list",
            rule="a model has a list of layers, to shard, recompute and split: a torch.nn.ModuleList, or the "
            "torch.nn.Sequential that model.layer_list names",
            fix=f"model.layer_list={found[0]}" if found else "a torch.nn.ModuleList of layers",
        )

    def fills(self) -> dict[str, FillFacts]:
        return build_recorded(self.build)[1]

    def styles(self, model: nn.Module, width: int) -> Iterator[dict[str, Style]]:
        """Yield the styles of `model.styles`, or those of feed-forward layers that shapes show."""
        modules = owners(model)
        found = dict.fromkeys(modules, REPLICATED)
        for glob, name in self.section.styles:
            matching = [path for path in modules if fnmatchcase(path, glob)]
            if name not in STYLES or not matching:
                raise _no_style(glob, name, list(modules))
            found |= dict.fromkeys(matching, STYLES[name])
        if self.section.styles:
            yield found
        else:
            yield from feed_forwards(model, width)

    def not_packed(self, model: nn.Module, seq_len: int, attention: AttentionFound) -> str:
        """Return why packed documents see each other in this module, tried with whole samples if that is cheap."""
        if POSITIONS not in inspect.signature(type(model).forward).parameters:
            return f"the forward of {type(model).__name__} takes no {POSITIONS}, which tell documents apart"
        size = _num_elements(model)
        length = min(seq_len, 1024 if size < 10**6 else MAX_TRIED)
        return "" if size > MAX_ON_CPU else why_not_packed(self, length=length)


def _outputs(out: Any) -> tuple[Any, list[str]]:
    """Return the logits among what a forward returns, and the names or numbers of the rest."""
    if isinstance(out, tuple | list):
        return _outputs(out[0])[0], [f"output {i}" for i, one in enumerate(out) if i and one is not None]
    named = out if type(out) is dict else vars(out) if hasattr(out, "logits") else {}
    return named.get("logits", out), [name for name, one in named.items() if name != "logits" and one is not None]


def _num_elements(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _no_style(glob: str, name: Any, paths: list[str]) -> ConfigError:
    key = f"model.styles.{glob}"
    if name not in STYLES:
        rule = f"a style is one of {', '.join(STYLES)}"
        return ConfigError(f"{key} = {name!r} is no style", where=key, rule=rule, fix=f"{key}=column")
    return ConfigError(
        f"{key}: no module with parameters has such a path",
        where=key,
        rule="a glob of model.styles matches paths of modules; * matches any part, dots included",
        fix=f"a glob of one of {', '.join(paths[:8])}{' …' if len(paths) > 8 else ''}",
    )


def computed_values(origin: OwnModule, names: frozenset[str], seed: int) -> dict[str, Tensor]:
    """Return initial values as the module's constructor gives them, built whole on the CPU with a seed of random
    ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with torch.device("cpu"):
            model = origin.build()
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: found[name].detach() for name in names}


def with_buffers(model: nn.Module, origin: ForeignModel) -> nn.Module:
    """Make buffers of tensors that are plain attributes, in place, so that they move with the module. Raise a
    ConfigError if tensors are in a list or mapping."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            lost = [x for x in private.leaves(value) if isinstance(x, Tensor) and id(x) not in known]
            if isinstance(value, Tensor) and lost:
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
            elif lost:
                what = f"{path or type(model).__name__}.{name} holds tensors"
                fix = f"register_buffer for each tensor of {name}, with persistent=False"
                raise origin.error(what, "tensors of a module are parameters or buffers, which move with it", fix)
    return model


def check_side_effects(model: nn.Module, origin: ForeignModel, time: int) -> None:
    """Run a forward of `time` tokens, and raise a ConfigError if it draws random numbers, writes to a buffer, or mixes
    samples: all that it may do is to compute logits."""
    name = type(model).__name__
    norms = (path for path, module in model.named_modules() if isinstance(module, BATCH_NORMS))
    if (path := next(norms, None)) is not None:
        what = f"{path} of {name} normalises over the samples of a batch"
        raise _error(origin, what, "what a sample gets doesn't depend on others", "torch.nn.LayerNorm or RMSNorm")
    before = {path: private.version(buffer) for path, buffer in model.named_buffers()}
    with private.random_operators() as drawn:
        origin.call(model, torch.zeros((2, time), dtype=torch.long, device=next(model.parameters()).device))
    if drawn:
        what = f"the forward of {name} draws random numbers ({drawn[0]})"
        rule = "a layout has other samples on each rank, and would draw others"
        raise _error(origin, what, rule, "a forward without dropout and noise")
    after = {path: private.version(buffer) for path, buffer in model.named_buffers()}
    changed = [path for path in before if before[path] != after.get(path)]
    if changed:
        what = f"the forward of {name} writes to its buffer {changed[0]}"
        rule = "a forward leaves buffers as they are: ranks would write different values"
        raise _error(origin, what, rule, f"a forward that doesn't write to {changed[0]}")


def _error(origin: ForeignModel, what: str, rule: str, fix: str) -> ConfigError:
    return origin.error(what, rule, f"{fix}, or a family of your own (model.kind=package.module:Family)")


LOSS_KEY = "model.loss"
LOSS_RULE = "model.loss takes logits [b, t, v] and targets [b, t], and returns the loss of each token, [b, t]"


@lru_cache(maxsize=8)
def own_loss(name: str) -> OwnLoss | None:
    """Return the loss that `model.loss` names, None for cross-entropy, or raise a ConfigError if there is no such
    function."""
    if not name:
        return None
    loss = import_object(name, key=LOSS_KEY, rule=LOSS_RULE, format_setting=lambda found: f"{LOSS_KEY}={found}")
    return OwnLoss(summed(loss, name), LossUnit("per token"))


def summed(loss: Callable[[Tensor, Tensor], Tensor], name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that sums a loss over the tokens that have a target.

    `loss` returns each token's loss, given logits and targets; a token without a target has target 0.
    """

    def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
        if isinstance(logits, DTensor):  # a head sharded over the vocabulary
            logits = logits.full_tensor()
        counted = targets != IGNORED_TARGET
        losses = loss(logits, targets.where(counted, 0))
        if losses.shape != targets.shape:
            what = f"{name} returns a tensor {list(losses.shape)} for targets {list(targets.shape)}"
            raise ConfigError(what, where=LOSS_KEY, rule=LOSS_RULE, fix='reduction="none" in the loss')
        losses = losses.float() if losses.dtype in (torch.bfloat16, torch.float16) else losses
        return losses.where(counted, 0).sum()

    return loss_sum
