"""A model class of `transformers` as a value: what conversion needs to know of it.

Our models are given as `ModelFacts.identity`, the form stored in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from meshwright.errors import CheckpointError
from meshwright.units import counted

Model = Mapping[str, Any]
"""Our description of a model."""


@dataclass(frozen=True)
class MappedTensor:
    """One of our parameters, and the tensor or tensors of Hugging Face's that hold its values."""

    name: str
    shape: tuple[int, ...]
    """Shape of ours: (out, in) for matrix weights."""
    theirs: tuple[str, ...]
    is_stacked: bool = False
    """Whether ours stacks theirs along a new first dim; otherwise there is one of theirs, with our shape."""

    def their_shape(self) -> tuple[int, ...]:
        """Return the shape of each of theirs."""
        return self.shape[1:] if self.is_stacked else self.shape

    def inside(self, ours: str, theirs: str) -> MappedTensor:
        """Return the tensor inside module `ours` of our model, and inside module `theirs` of theirs."""
        return replace(self, name=f"{ours}.{self.name}", theirs=tuple(f"{theirs}.{name}" for name in self.theirs))


class ConfigWriter(Protocol):
    """Conversion of our description to the content of a `config.json`."""

    def __call__(self, model: Model, *, dtype: str, max_seq_len: int | None) -> dict[str, Any]:
        """Return the configuration.

        Args:
            model: our description.
            dtype: torch's name of the weights' dtype, such as `bfloat16`.
            max_seq_len: maximum context length in tokens; if None, chosen by the family.
        """


class ConfigReader(Protocol):
    """Conversion of the content of a `config.json` to our description."""

    def __call__(self, config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
        """Return our description.

        Args:
            config: content of the file.
            where: path of the file, for errors.

        Raises:
            CheckpointError: the model is another one or has unsupported options, or a key is missing or invalid.
        """


class ModelCheck(Protocol):
    """Check of what only some models of a family are."""

    def __call__(self, model: Model, *, where: str) -> None:
        """Check that the architecture can express the model.

        Args:
            model: our description.
            where: path of the checkpoint, for errors.

        Raises:
            CheckpointError: it cannot.
        """


@dataclass(frozen=True)
class Repeated:
    """A count in `config.json` of modules with tensors of their own."""

    key: str
    """Key in `config.json`."""
    ours: str
    """Key in our description."""
    noun: str


LAYERS = Repeated("num_hidden_layers", "num_layers", "layer")


def check_no_window(model: Model, *, where: str) -> None:
    """Check that a model attends to all earlier tokens; the architecture can express all such models of the family.

    Raises:
        CheckpointError: it has a sliding window.
    """
    if (window := model.get("window")) is not None:
        raise CheckpointError(
            f"the model has a sliding window of {counted(window, 'token')} (model.window)",
            where=where,
            rule="only models without a sliding window can be exported to Hugging Face's format",
            fix="export a checkpoint of a model without model.window",
        )


def no_counters(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Return no counters."""
    return {}


@dataclass(frozen=True)
class Architecture:
    """A causal language model of `transformers`, and its conversion to and from one of our families."""

    kind: str
    """Our family's name, as in checkpoints."""
    noun: str
    """The architecture in messages, after "a"."""
    name: str
    """The class in `transformers`."""
    model_type: str
    """`model_type` in `config.json`."""
    read_config: ConfigReader
    write_config: ConfigWriter
    tensors: Callable[[Model], Iterable[MappedTensor]]
    """All parameters, in model order."""
    repeated: tuple[Repeated, ...] = (LAYERS,)
    counters: Callable[[Model], Mapping[str, tuple[int, ...]]] = no_counters
    """Shapes of our saved int64 counters by name: zero after an import, not exported."""
    check_model: ModelCheck = check_no_window
