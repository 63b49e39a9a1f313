"""Findings of a probe, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    not_split: str = ""
