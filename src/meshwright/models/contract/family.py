"""Model family interface, what a family is told of a run, and lookup of families by name. Doesn't import torch.

A built-in family is a folder in `models/` with a `family.py`; an external one is selected by `model.kind =
"package.module:Name"`. No other code in Meshwright refers to a family by name, so adding one requires no edits here.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import Field

from meshwright import models
from meshwright.errors import ConfigError
from meshwright.mesh.axes import Axes
from meshwright.models.contract.model_facts import Fill, ModelFacts, Part
from meshwright.models.contract.tp_styles import Style
from meshwright.settings.import_object import OBJECT_NAME, import_object
from meshwright.settings.section import ModelSection, Names, Section
from meshwright.settings.violation import Violation, by_distance, divisors, round_up

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from meshwright.models.contract.task import Batch, Forward, Reference, Task


KEY = "model.kind"
RULE = "a family is the name of a folder in meshwright.models, or package.module:Name for your own"


class TrainingData(Protocol):
    """Opened and validated training data of a family."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the samples; a run resumes only on the same data."""

    @property
    def description(self) -> str:
        """Short human-readable description."""


class OtherWeights(Protocol):
    """Import and export of weights in an external format."""

    description: str
    """Human-readable name of the format."""

    @property
    def model_type(self) -> str | None:
        """Value of `model_type` in the format's config.json; None for any."""

    def export(self, checkpoint: Path, out: Path, *, merge: bool = False, dtype: str | None = None) -> Sequence[str]:
        """Export a checkpoint's weights to a directory in this format, with `merge`, with its adapters merged, in
        torch's `dtype` or that of the weights that training started from; return notes for people."""

    def load(self, source: Path, root: Path) -> Any:
        """Import a directory in this format as a checkpoint at step 0."""


class Family(ABC):
    """Interface between a kind of model and the rest of Meshwright. Instances hold no per-run state."""

    sections: ClassVar[Mapping[str, type[Section]]]
    """Configuration sections that the family defines, by name: `model` and any others it needs."""
    decides_samples: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Keys by section that determine the samples of a step; a resumed run must keep their values."""
    derives: ClassVar[bool] = False
    """Whether a model is built and run to describe it, which takes seconds, instead of being described by its sizes."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that every rank needs besides PyTorch and that are slow to import: they are imported once."""
    library_bytes: ClassVar[int] = 0
    """Memory that libraries of the family take in each process besides PyTorch, as `RunPlan.libraries`."""
    conditions: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors among a batch's conditions, in order, for messages."""
    foreign_names: ClassVar[Mapping[str, str]] = {}
    """Names that other frameworks give to the family's own keys, by dotted key, separated by spaces: they are suggested
    to users of these names."""

    def version(self, f: RunFacts) -> Hashable:
        """Return what tells apart models of equal sections: the content of files that they name. It must be fast."""
        return None

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        """Yield violations of the family's rules, for its sections and for tensor parallelism."""
        return ()

    def implied(self, f: RunFacts) -> Mapping[str, Any]:
        """Return values, by dotted key, of keys that nobody has set, where other keys imply them."""
        return {}

    def notes(self, f: RunFacts) -> Iterable[str]:
        """Return what plan, prove and run say of the model: where its weights come from, what of it is set aside."""
        return ()

    @abstractmethod
    def describe(self, f: RunFacts) -> ModelFacts:
        """Return the description of the model."""

    @abstractmethod
    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        """Return tensor-parallel styles by kind and module path, in the order they are applied."""

    @abstractmethod
    def build(self, f: RunFacts, part: Part) -> nn.Module:
        """Build the full model or one stage as a plain module on the meta device, using the full model's parameter
        names."""

    @abstractmethod
    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return the initial values of a parameter or buffer, given its name in the full model."""

    def proof(self, f: RunFacts) -> Mapping[str, Any]:
        """Return overrides applied by `prove`, for keys whose values make gradients of the first step zero."""
        return {}

    def other_weights(self) -> OtherWeights | None:
        """Return the importer and exporter for an external weight format, or None."""
        return None

    def open_folder(self, folder: Path) -> Sequence[str] | None:
        """Return the preset and the words that start from the weights in a folder; None if it isn't the family's.

        Raises:
            InputError: the folder has no weights.
        """
        return None

    def files_to_keep(self, f: RunFacts) -> Mapping[str, bytes]:
        """Return files, by name, that checkpoints carry for exports, besides the tokenizer of the data."""
        return {}

    def run(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """Run a stage's forward; `inputs` are the model's inputs or the previous stage's output."""
        out: Tensor = module(inputs, *batch.conditions)
        return out

    @abstractmethod
    def open_data(self, f: RunFacts) -> TrainingData:
        """Open the training data and check it against the model, if possible without importing torch: errors are raised
        before processes start.

        Raises:
            DataError: the data is missing, too small, or does not fit the model.
        """

    @abstractmethod
    def task(self, f: RunFacts, data: Any, device: torch.device) -> Task:
        """Return this rank's training task; `data` is the return value of `open_data`."""

    def generate(self, f: RunFacts, forward: Forward, prompt: Prompt, folder: Path) -> Mapping[str, Any]:
        """Return what a trained model generates: `text`, or the `files` that were written to a folder. Called on all
        ranks."""
        task = self.task(f, self.open_data(f), forward.device)
        found = task.after_validation(forward, 0, folder)
        return {"files": [str(path) for path in found.values() if isinstance(path, Path)]}

    @abstractmethod
    def reference(self, f: RunFacts, data: Any) -> Reference:
        """Return an independent, plain implementation of the task's loss for `prove`."""


@cache
def family_names() -> tuple[str, ...]:
    """Return the names of the built-in families."""
    folders = [Path(path) / info.name for path in models.__path__ for info in pkgutil.iter_modules([path])]
    own = Path(__file__).parent
    return tuple(sorted(folder.name for folder in folders if (folder / "family.py").is_file() and folder != own))


@cache
def find_family(kind: str) -> Family:
    """Return a built-in family by its name, or one of `package.module:Name`, a `Family` subclass or instance.

    Raises:
        ConfigError: the family is unknown, or its module can't be imported.
    """
    if kind in family_names():
        return _instance(importlib.import_module(f"{models.__name__}.{kind}.family").FAMILY, kind)
    if not OBJECT_NAME.fullmatch(kind):
        near = difflib.get_close_matches(kind, family_names(), n=1)
        raise _no_family(f"{KEY} = {kind!r}: no such family", f"{KEY}={near[0] if near else family_names()[0]}")
    found = import_object(kind, key=KEY, rule=_rule(), format_setting=lambda name: f"{KEY}={name}")
    return _instance(found, kind)


def _instance(found: Any, kind: str) -> Family:
    if isinstance(found, type) and issubclass(found, Family):
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise _no_family(f"{kind} lacks {', '.join(missing)}", f"define {missing[0]} in {found.__name__}")
        found = found()
    if not isinstance(found, Family):
        raise _no_family(f"{kind} is not a family: {type(found).__name__}", "derive the class from meshwright's Family")
    if not issubclass(found.sections.get("model", type(None)), ModelSection):
        raise _no_family(f"{kind} has no model section", "add a subclass of ModelSection as sections['model']")
    return found


def _no_family(what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=KEY, rule=_rule(), fix=fix)


def _rule() -> str:
    return f"{RULE}; built-in families are {', '.join(family_names())}"


def head_violations(*, dim: int, num_heads: int, head_dim: int | None) -> Iterator[Violation]:
    """Yield a violation if `num_heads` does not divide the model's width."""
    if head_dim is None and dim % num_heads:
        heads = [{"model.num_heads": size} for size in by_distance(divisors(dim), num_heads)]
        multiple = round_up(dim, 2 * num_heads)
        width = round_up(multiple // num_heads, 2)
        yield Violation(
            ConfigError,
            f"model.num_heads = {num_heads} does not divide model.dim = {dim}",
            "model.num_heads",
            "model.head_dim defaults to dim / num_heads",
            [*heads[:1], {"model.dim": multiple}, *heads[1:], {"model.head_dim": width}],
        )


S = TypeVar("S", bound=Section)


class DataConfig(Section):
    """Source of the text, images or videos."""

    source: str = Field(
        "stdlib",
        description="text: stdlib (this Python's own source files), a glob of files of text, JSON lines (.jsonl) or "
        "Parquet (see data.text_field and data.chat_field), the folder of a saved Hugging Face dataset, "
        "package.module:Source for your own, or a token file (.npy, or .bin of data.token_dtype); images and videos: "
        "digits, digits-video, or a glob of image files",
    )
    mixture: Names = Field(
        (),
        description="sources of text with weights, in place of data.source: weight:source or weight:source#field, "
        "such as ['0.7:web/*.jsonl','0.3:stdlib']",
    )
    validation_source: str | None = Field(
        None,
        min_length=1,
        description="source of text to validate with; by default a tenth of data.source, or of each source of "
        "data.mixture, is held out",
    )
    when_exhausted: Literal["wrap", "end"] = Field(
        "wrap",
        description="when all of a source of text was read: wrap starts its next epoch; end refuses a run that would "
        "need one",
    )
    tokenizer: str = Field("bytes", description="bytes, or the path to a Hugging Face tokenizer.json or its folder")
    token_dtype: Literal["uint8", "uint16", "uint32"] = Field("uint16", description="element type of a .bin token file")
    packing: Literal["none", "documents"] = Field(
        "none",
        description="samples of text: none reads windows of one stream of tokens; documents packs whole documents, "
        "which neither attend to nor predict each other",
    )
    separator: int | None = Field(
        None,
        ge=0,
        description="token id that ends each document: of a token file, needed by data.packing=documents; of text, in "
        "place of the end of text that data.tokenizer declares",
    )
    bos: Literal["auto", "none"] = Field(
        "auto", description="beginning of each document of text: auto adds what data.tokenizer itself adds, if anything"
    )
    text_field: str | None = Field(
        None,
        min_length=1,
        description="field that is the text of each record: of JSON lines (.jsonl, .ndjson), Parquet or a saved "
        "dataset",
    )
    chat_field: str | None = Field(
        None,
        min_length=1,
        description="field that is the conversation of each record, a list of messages with role and content; they are "
        "written by the chat template of data.tokenizer, and only the assistant's tokens count in the loss",
    )
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="cache directory of tokenized text and packed documents; ~/.cache/meshwright by default",
    )
    prefetch: int = Field(
        2, ge=0, le=1024, description="micro-batches that each rank prepares ahead; 0 prepares each when it is needed"
    )


@dataclass(frozen=True)
class RunFacts:
    """Settings of a run that a family may depend on."""

    sections: Mapping[str, Section]
    """The family's own sections by name, including `model`."""
    axes: Axes
    sequence_parallel: bool
    steps: int
    seq_len: int
    global_batch: int
    num_microbatches: int
    validation_samples: int
    sample_tokens: int
    sample_prompt: str | None
    """Text that the generated text continues; None if the task chooses."""
    seed: int
    dropout: float
    """Probability of dropping an element of a block's branches before they are added to the stream."""
    precision: str
    """Dtype of activations: float32, bfloat16 or float64."""
    freeze: tuple[str, ...]
    data: DataConfig
    allow_empty_stages: bool = False
    """Whether a stage may have no layers."""
    ep: int = 1
    """Ranks of dp_shard × cp that experts are sharded over."""
    trains: bool = True
    """Whether the model is trained, and not only evaluated: then no data may be on both sides."""

    def section(self, kind: type[S]) -> S:
        """Return the family's section of this type."""
        return next(section for section in self.sections.values() if isinstance(section, kind))


@dataclass(frozen=True)
class Prompt:
    """Request to a model that generates text."""

    text: str
    num_tokens: int
    """Most tokens to generate."""
    temperature: float
    """Temperature of sampling; 0 takes the likeliest token."""
    is_chat: bool = False
    """Whether the text is what a user says, in the tokenizer's chat template."""
