"""Structure of a foreign model, for the plan and the stages, as a value. Doesn't import torch.

`derive` finds it on the meta device; `facts_cache` keeps it, so that a plan needs neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshwright.models.contract.model_facts import BufferFacts, ParameterFacts, Saved
from meshwright.models.contract.tp_styles import Style


@dataclass(frozen=True)
class FillFacts:
    """Initial values of a parameter or buffer."""

    how: Literal["normal", "uniform", "constant", "computed"]
    value: float = 0.0
    """Standard deviation, largest absolute value, or the constant."""


@dataclass(frozen=True)
class BlockFacts:
    """A kind of decoder layers that are alike in everything."""

    name: str
    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[BufferFacts, ...]
    fills: dict[str, FillFacts]
    """Initial values by name inside the layer, without adapters."""
    saved: Saved
    flops: float
    """Forward floating-point operations per token."""
    styles: dict[str, Style] = field(default_factory=dict)


@dataclass(frozen=True)
class EndFacts:
    """Parameters and buffers outside the layers, with their names in the model."""

    parameters: tuple[ParameterFacts, ...] = ()
    buffers: tuple[BufferFacts, ...] = ()
    saved: Saved = Saved()
    flops: float = 0.0
    styles: dict[str, Style] = field(default_factory=dict)


@dataclass(frozen=True)
class Structure:
    """A foreign model, split into its decoder layers and what is around them."""

    layers_path: str
    """Path of the list of decoder layers."""
    layers: tuple[str, ...]
    """Name of the kind of each layer."""
    blocks: tuple[BlockFacts, ...]
    first: EndFacts
    """Parts that only the first stage has."""
    every: EndFacts
    """Parts that every stage has: buffers of rotary embeddings, and parameters that layers of several stages use."""
    last: EndFacts
    """Parts that only the last stage has."""
    stubs: dict[str, tuple[int, ...]]
    """Modules that return zeros on other stages than the first, with the shapes of their outputs (see `probe`)."""
    blanks: dict[str, tuple[int, ...]]
    """Parameters that are read without calling their modules and are zeros on other stages than the first, with their
    shapes."""
    fills: dict[str, FillFacts]
    """Initial values of all that is outside the layers."""
    aliases: dict[str, str]
    """Second names of parameters that are used together with the first: a module reads the other's."""
    per_token: tuple[int, ...]
    """Shape of the stream between layers per token."""
    stream: int | str
    """Position or name of the stream among a layer's arguments."""
    batch_dims: tuple[int, int]
    """Dims of the stream that are samples and tokens."""
    between_layers: bool
    """Whether something is computed between a layer and the next."""
    returns: tuple[str, int]
    """Form of a layer's output: `tensor`, `tuple` or `list`, and its length."""
    vocab_size: int
    max_len: int | None
    """Rows of a table of learned positions; None without one."""
    not_split: str = ""
    """Reason why the layers can't be split over pipeline stages; empty if they can."""
    not_tensor_parallel: str = ""
    """Reason why matrices can't be sharded over tp; empty if they can."""
    not_packed: str = ""
    """Reason why packed documents would see each other; empty if they don't."""
    packed_len: int | None = None
    """A shorter sample in which they don't."""
    set_aside: tuple[str, ...] = ()
    """What of the model takes no part in training, a line each."""
    undeferred: str = ""
    """A matrix whose gradient can't be deferred: of neither a linear layer nor an embedding; empty without one."""
