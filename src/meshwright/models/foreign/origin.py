"""Interface to a model that was not written for Meshwright: how it is built, called and sharded.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.contract.tp_styles import Style
from meshwright.models.foreign.findings import Probe
from meshwright.models.foreign.structure import FillFacts, Structure
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.linear import Linear

LAYER_LISTS = (nn.ModuleList, nn.Sequential)
"""Modules that hold a model's layers."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
WITH_DROPOUT = (nn.MultiheadAttention, nn.RNNBase)
"""Modules that have dropout inside."""
MAX_ON_CPU = 200_000_000
"""Parameters of a model that is tried out with values, at most."""


class NotSharded(Exception):
    """A model can't be sharded over tp, and why."""


class Origin(ABC):
    """A foreign model, whose structure is derived from a forward."""

    key: ClassVar[str]
    """Configuration key that names the model, for errors."""
    fix: ClassVar[str]
    """Setting of a model that works, for errors."""
    fix_forward: ClassVar[str] = ""
    """Forward that works, for errors; as `fix` if empty."""
    fix_samples: ClassVar[str] = ""
    """Forward that computes samples one by one, for errors; as `fix` if empty."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the model on the current device, in training mode and without dropout.

        Raises:
            ConfigError: it can't be built.
        """

    @abstractmethod
    def call(self, model: Callable[..., Any], ids: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Return the logits [b, t, v] of token ids [b, t], which the layout may say to be packed documents.

        Args:
            model: the model, or its forward; on the meta device neither may look at values.
            ids: token ids.
            layout: documents of each sample.
        """

    @abstractmethod
    def layers_path(self, model: nn.Module) -> str:
        """Return the path of the model's list of layers.

        Raises:
            ConfigError: there is no such list.
        """

    @abstractmethod
    def fills(self) -> dict[str, FillFacts]:
        """Return the initial values of each parameter and buffer, by every one of its names."""

    @abstractmethod
    def styles(self, model: nn.Module, width: int) -> Iterable[dict[str, Style]]:
        """Yield tensor-parallel styles by the paths of modules with parameters, the best first: the first that fit are
        taken.

        Args:
            model: the model on the meta device.
            width: features of the stream between layers.
        """

    def check_probe(self, model: nn.Module, found: Probe) -> None:  # noqa: B027, most models are trained whole
        """Check what a probe of the model has found, and add the parameters that are not trained to `found.frozen`.

        Raises:
            ConfigError: something that is trained is not used.
        """

    def set_aside(self, model: nn.Module, ids: Tensor) -> tuple[str, ...]:
        """Return what takes no part in training, a line each: dropout, outputs besides the logits.

        Args:
            model: the model as `build` returns it.
            ids: token ids that it takes.
        """
        return ()

    def why_not_staged(self, structure: Structure, ids: Tensor) -> str:
        """Return why stages of the model fail for token ids, or an empty string if they run or aren't tried."""
        return ""

    @abstractmethod
    def not_packed(self, model: nn.Module, seq_len: int) -> str:
        """Return why documents packed in samples of a length would see each other, or an empty string if they don't."""

    def limits(self) -> list[int]:
        """Return the lengths past which the model may treat tokens otherwise, the largest first."""
        return []

    def max_len(self, model: nn.Module) -> int | None:
        """Return the number of learned positions, or None without such a table."""
        return None

    def prepare_saving(self, model: nn.Module) -> None:  # noqa: B027, most models need nothing
        """Prepare a model on the meta device for measuring what it saves."""

    def prepare_float64(self, model: nn.Module) -> None:  # noqa: B027, most models need nothing
        """Prepare a model for float64, if it has parts that choose their kernels."""

    def largest_list(self, model: nn.Module, length: int | None) -> str:
        """Return the path of the largest list of modules (see `largest_list`).

        Raises:
            ConfigError: there is none.
        """
        found = largest_list(model, length)
        if found is None:
            rule = "a model has a torch.nn.ModuleList of layers, to shard, recompute and split"
            raise self.error(f"{type(model).__name__} has no list of layers", rule)
        return found

    def error(self, what: str, rule: str, fix: str = "", *, kind: type[ConfigError] = ConfigError) -> ConfigError:
        """Return an error about the model."""
        own = f"{self.fix}, or a family of your own (model.kind=package.module:Family)"
        return kind(what, where=self.key, rule=rule, fix=fix or own)


def largest_list(model: nn.Module, length: int | None) -> str | None:
    """Return the path of the list of modules with the most parameters, among those of a length if there are such."""
    lists = [(path, one) for path, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one)]
    wanted = [one for one in lists if len(one[1]) == length] or lists
    return max(wanted, key=lambda one: sum(p.numel() for p in one[1].parameters()))[0] if wanted else None


def trained_plainly(model: nn.Module) -> nn.Module:
    """Put a model into training mode without dropout, in place. Its linear layers can defer their weights' gradients,
    and its embeddings have a gradient for each row."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
            module.weight_gradients = None  # type: ignore[assignment]
        elif isinstance(module, nn.Embedding):
            module.padding_idx = None  # samples have no padding, and each row of the table gets its gradient
        elif isinstance(module, DROPOUTS):
            module.p = 0.0
        elif isinstance(module, WITH_DROPOUT):
            module.dropout = 0.0
    return model.train()


def no_dropout(probabilities: Mapping[str, float]) -> str:
    """Return a line on dropout that takes no part."""
    return f"dropout is set aside: {', '.join(f'{name} = {value:g}' for name, value in probabilities.items())}"


def restarting_positions(layout: TokenLayout | None, device: torch.device) -> Mapping[str, Tensor]:
    """Return `position_ids` [b, t] that restart with each packed document; nothing without such documents."""
    if layout is None or layout.documents is None:
        return {}
    positions = [torch.cat([torch.arange(length) for length in sample]) for sample in layout.documents]
    return {"position_ids": torch.stack(positions).to(device)}
