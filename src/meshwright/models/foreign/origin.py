"""Interface to a model that was not written for Meshwright: how it is built, initialised, called and sharded.

The last operator of a constructor that wrote a whole tensor says how its values are distributed; what was written in
parts, by an unknown operator, or made from other tensors is computed.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models.contract.model_facts import AttentionFacts
from meshwright.models.contract.tp_styles import Style
from meshwright.models.foreign import private
from meshwright.models.foreign.structure import Carried, FillFacts, RouterLoss
from meshwright.nn.attention.mask_spec import TokenLayout
from meshwright.nn.attention.positions import token_positions
from meshwright.nn.linear import Linear

LAYER_LISTS = (nn.ModuleList, nn.Sequential)
"""Modules that hold a model's layers."""
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
WITH_DROPOUT = (nn.MultiheadAttention, nn.RNNBase)
"""Modules that have dropout inside."""
MAX_ON_CPU = 200_000_000
"""Parameters of a model that is tried out with values, at most."""


@dataclass(frozen=True)
class AttentionFound:
    """Attention of a model's layers, and what it allows."""

    layers: Mapping[int, AttentionFacts] = field(default_factory=dict)
    """Attention of the layers that have one, by index."""
    not_ours: str = ""
    """Reason why our attention can't take the place of the model's; empty if it can."""
    not_context: str = ""
    """Reason why a sample can't be sharded by tokens; empty if it can."""
    first_position: int = 0
    """Position of a sample's first token. Models that count from behind the id of padding get positions, since samples
    have no padding, and its id is a token like others."""
    mixers: tuple[tuple[str, str], ...] = ()
    """Path in a layer and class of modules that mix tokens without attention, and run document by document."""


class NotSharded(Exception):
    """A model can't be sharded over tp, and why."""


class ForeignModel(ABC):
    """A foreign model, whose structure is derived from a forward."""

    key: ClassVar[str]
    """Configuration key that names the model, for errors."""
    fix: ClassVar[str]
    """Setting of a model that works, for errors."""
    fix_forward: ClassVar[str] = ""
    """Forward that works, for errors; as `fix` if empty."""
    fix_samples: ClassVar[str] = ""
    """Forward that computes samples one by one, for errors; as `fix` if empty."""
    tries_stages: ClassVar[bool] = False
    """Whether stages are tried even if only the stream passes between them."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the model on the current device, in training mode and without dropout, or raise a ConfigError."""

    @abstractmethod
    def call(self, model: Callable[..., Any], ids: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Return the logits [b, t, v] of token ids [b, t], which the layout may say to be packed documents.

        `model` may be the model's forward; on the meta device neither may look at values.
        """

    @abstractmethod
    def layers_path(self, model: nn.Module) -> str:
        """Return the path of the model's list of layers, or raise a ConfigError without one."""

    @abstractmethod
    def fills(self) -> dict[str, FillFacts]:
        """Return the initial values of each parameter and buffer, by every one of its names."""

    @abstractmethod
    def styles(self, model: nn.Module, width: int) -> Iterable[dict[str, Style]]:
        """Yield tensor-parallel styles by the paths of modules with parameters, for a model on the meta device with a
        stream of this width, the best first: the first that fit are taken."""

    def check_probe(self, model: nn.Module, found: Probe) -> None:  # noqa: B027, most models are trained whole
        """Check what a probe of the model has found, and add the parameters that are not trained to `found.frozen`;
        raise a ConfigError if something that is trained is not used."""

    def router_loss(self, model: nn.Module, time: int) -> RouterLoss | None:
        """Return the loss of its routers that the model's own forward adds for samples of a length, None if it adds
        nothing, or raise a ConfigError if it adds another loss."""
        return None

    def set_aside(self, model: nn.Module, ids: Tensor) -> tuple[str, ...]:
        """Return what takes no part in training, a line each: dropout, outputs besides the logits."""
        return ()

    def attention(self, model: nn.Module, seq_len: int) -> AttentionFound:
        """Return what is known of a model's attention, for samples of a length; the model may be a tp rank's."""
        unknown = "its attention isn't described"
        return AttentionFound(not_ours=unknown, not_context=unknown)

    @abstractmethod
    def not_packed(self, model: nn.Module, seq_len: int, attention: AttentionFound) -> str:
        """Return why documents packed in samples of a length would see each other, or an empty string if they don't;
        with our attention, or the model's own where ours can't take its place."""

    def stacked_experts(self, model: nn.Module) -> Iterable[str]:
        """Return the paths of modules whose own parameters are stacked by expert, and which take tokens, the choices of
        experts and their weights."""
        return ()

    def why_not_dispatched(self, model: nn.Module, length: int) -> str:
        """Return why tokens can't be sent to these experts, as a sample of a length shows, or why there are none."""
        return ""

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
        """Return the path of the largest list of modules (see `largest_list`), or raise a ConfigError without one."""
        found = largest_list(model, length)
        if found is None:
            rule = "a model has a torch.nn.ModuleList of layers, to shard, recompute and split"
            raise self.error(f"{type(model).__name__} has no list of layers", rule)
        return found

    def error(self, what: str, rule: str, fix: str = "", *, kind: type[ConfigError] = ConfigError) -> ConfigError:
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
    return f"dropout is set aside: {', '.join(f'{name} = {value:g}' for name, value in probabilities.items())}"


POSITIONS = "position_ids"
"""Argument of models that tells positions."""


def given_positions(layout: TokenLayout | None, ids_bt: Tensor, first: int = 0) -> Mapping[str, Tensor]:
    """Return `position_ids` [b, t] of a rank's tokens, which restart with each packed document; nothing if they are
    those of whole samples and count from 0."""
    if not first and (layout is None or (layout.documents is None and layout.shards is None)):
        return {}
    positions = token_positions(layout or TokenLayout(ids_bt.shape[1]), ids_bt.device)
    return {POSITIONS: positions.expand(ids_bt.shape) + first}


BATCH_DIM, TIME_DIM, BATCH_TIME_DIM = -1, -2, -3
"""Stand for sizes of the batch, the tokens of a sample, and both, in shapes."""


@dataclass
class Probe:
    """Findings of a probe."""

    layers_path: str
    time: int
    """Tokens of a sample that the model takes."""
    batch_dims: tuple[int, int] = (0, 1)
    """Dims of the stream that are samples and tokens."""
    between_layers: bool = False
    """Whether something is computed between a layer and the next."""
    per_token: tuple[int, ...] = ()
    """Shape of the stream per token: its width, after others where it has several parts."""
    stream: int | str = 0
    """Position or name of the stream among a layer's arguments."""
    returns: tuple[str, int] = ("tensor", 1)
    """Form of a layer's output and its length."""
    vocab_size: int = 0
    before: set[str] = field(default_factory=set)
    """Names of parameters outside the layers that the first layer's input depends on."""
    after: set[str] = field(default_factory=set)
    """Names of those that the output depends on, given the last layer's output."""
    between: set[str] = field(default_factory=set)
    """Names of those that a layer's output depends on, given its input."""
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the outputs of modules outside the layers that return one tensor, by path."""
    phases: dict[str, set[str]] = field(default_factory=dict)
    """Phases in which each module outside the layers ran: before, in a layer, between, after."""
    unused: set[str] = field(default_factory=set)
    """Names of parameters that no output depends on by a gradient."""
    frozen: set[str] = field(default_factory=set)
    """Names of parameters that the model doesn't train."""
    carried: tuple[tuple[Carried, ...], ...] = ()
    """See `Structure`."""
    not_split: str = ""


COMPUTED = FillFacts("computed")


def build_recorded(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, FillFacts]]:
    """Build a model on the meta device, and return it with the initial values of its parameters and buffers, by every
    one of their names."""
    with torch.device("meta"), _Recorder() as recorder:
        model = build()
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return model, {name: recorder.fill(tensor) for name, tensor in tensors}


def _written(name: str, arguments: tuple[Any, ...]) -> FillFacts:
    """Return the values that an operator, such as `aten.normal_`, writes to a whole tensor, given its other
    arguments."""
    if name in ("aten.zero_", "aten.zeros"):
        return FillFacts("constant", 0.0)
    if name == "aten.ones":
        return FillFacts("constant", 1.0)
    if name in ("aten.fill_", "aten.full") and isinstance(arguments[0], int | float):
        return FillFacts("constant", float(arguments[0]))
    if name in ("aten.normal_", "aten.randn"):
        mean, std = _completed(arguments)
        return FillFacts("normal", float(std)) if mean == 0 else COMPUTED
    if name == "aten.uniform_":
        low, high = _completed(arguments)
        return FillFacts("uniform", float(high)) if low == -high else COMPUTED
    return COMPUTED


def _completed(arguments: tuple[Any, ...]) -> tuple[float, float]:
    """Return the parameters of a distribution, by default 0 and 1."""
    found = [*arguments, *(0.0, 1.0)[len(arguments) :]]
    return float(found[0]), float(found[1])


class _Recorder(private.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records what operators write to whole storages."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fills: dict[int, FillFacts | None] = {}
        self._kept: list[Any] = []
        """Storages that were written to: a tensor that is made unseen could have the id of one that is freed."""

    def fill(self, tensor: Tensor) -> FillFacts:
        """Return how a tensor's values are distributed."""
        found = self._fills.get(private.storage_id(tensor))
        return COMPUTED if found is None or not tensor.is_floating_point() else found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).rpartition(".")[0]
        taken = {private.storage_id(x) for x in private.leaves((args, kwargs)) if isinstance(x, Tensor)}
        if private.is_mutable(func):
            self._note(args[0], _written(name, args[1:]))
        for made in private.leaves(out):
            if isinstance(made, Tensor) and private.storage_id(made) not in taken:
                is_empty = name.startswith(("aten.empty", "aten.new_empty"))
                values = args[1:2] if name == "aten.full" else ()
                self._note(made, None if is_empty else _written(name, values))
        return out

    def _note(self, tensor: Tensor, values: FillFacts | None) -> None:
        self._kept.append(tensor.untyped_storage())
        is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        self._fills[private.storage_id(tensor)] = values if is_whole else COMPUTED
