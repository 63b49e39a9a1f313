"""A family of models: what it describes, builds and trains on, and how a family is found. Torch-free.

A family of ours is a folder of `models/` with a file `family.py`; one of somebody else's is named by
`model.kind = "package.module:Name"`. Nothing else in Meshwright names a family, so bringing one edits no file here.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from meshwright import models
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models.contract.initial_values import Fill
from meshwright.models.contract.model_facts import ModelFacts, Part
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.tp_styles import Style
from meshwright.settings.section import ModelSection, Section
from meshwright.settings.violation import Violation

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from meshwright.models.contract.task import Batch, Reference, Task

KEY = "model.kind"
RULE = "a family is a folder of meshwright.models by its name, or your own as package.module:Name"
OUTSIDE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class TrainingData(Protocol):
    """What a family trains on, opened and checked: any value with these."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the samples: a run only goes on with the same."""

    @property
    def description(self) -> str:
        """A few words for people."""


class OtherWeights(Protocol):
    """Weights in somebody else's format."""

    description: str
    """Its name, for people."""
    model_type: str
    """What that format's config.json calls the model."""

    def export(self, checkpoint: Path, out: Path) -> Any:
        """Write a checkpoint's weights as a directory of that format."""

    def load(self, source: Path, root: Path) -> Any:
        """Make a checkpoint of step 0 from such a directory."""


class Family(ABC):
    """What a kind of model is to the rest of Meshwright. An instance holds nothing of a run."""

    sections: ClassVar[Mapping[str, type[Section]]]
    """The sections of the configuration that are this family's, by name: `model`, and what else it needs."""
    proof: ClassVar[Mapping[str, Any]] = {}
    """Keys that a proof sets: what would make all gradients of the first step zero."""
    decides_samples: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Keys of its sections, by section, that decide what a step trains on: a run that goes on keeps them."""

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        """Rules of its sections, and of what tensor parallel divides, that the run violates."""
        return ()

    @abstractmethod
    def describe(self, f: RunFacts) -> ModelFacts:
        """The model as a value."""

    @abstractmethod
    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        """By kind, the styles of module paths inside it, for tensor parallel; in the order they are applied."""

    @abstractmethod
    def build(self, f: RunFacts, part: Part) -> nn.Module:
        """The model, or the part of it on a stage: plain, with the names of the whole model; on the meta device."""

    @abstractmethod
    def initial(self, f: RunFacts, name: str) -> Fill:
        """Initial values of a parameter or a buffer, by its name in the whole model."""

    def other_weights(self) -> OtherWeights | None:
        """Import and export in a format that others know the model by; None if there is none."""
        return None

    def run(self, module: nn.Module, inputs: Tensor, batch: Batch) -> Tensor:
        """A stage's forward: from the model's inputs, or the stream, to the stream, or the model's output."""
        out: Tensor = module(inputs, *batch.conditions)
        return out

    @abstractmethod
    def open_data(self, f: RunFacts) -> TrainingData:
        """What a run trains on, checked against the model. Torch-free where it can be: errors come before processes.

        Raises:
            DataError: missing, too small, or not what the model takes.
        """

    @abstractmethod
    def task(self, f: RunFacts, data: Any, device: torch.device) -> Task:
        """What is trained, on this rank; `data` is what `open_data` gave."""

    @abstractmethod
    def reference(self, f: RunFacts, data: Any) -> Reference:
        """The task's loss written out plainly, for proofs."""


@cache
def family_names() -> tuple[str, ...]:
    """The families that come with Meshwright."""
    folders = (info.name for info in pkgutil.iter_modules(models.__path__) if info.ispkg)
    return tuple(sorted(name for name in folders if any(_has_family(Path(path) / name) for path in models.__path__)))


def _has_family(folder: Path) -> bool:
    return (folder / "family.py").is_file() and folder.name != Path(__file__).parent.name


@cache
def find_family(kind: str) -> Family:
    """The family of this name.

    Args:
        kind: of a family that comes with Meshwright, or `package.module:Name` of a `Family`, the class or an instance.

    Raises:
        ConfigError: there is none; or its module can't be imported.
    """
    if kind in family_names():
        return _instance(importlib.import_module(f"{models.__name__}.{kind}.family").FAMILY, kind)
    if not OUTSIDE.fullmatch(kind):
        near = difflib.get_close_matches(kind, family_names(), n=1)
        raise _no_family(f"{KEY} = {kind!r}: no such family", f"{KEY}={near[0] if near else family_names()[0]}")
    module_name, _, name = kind.partition(":")
    try:
        module = importlib.import_module(module_name)
    except MeshwrightError:
        raise
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "\0")
        what = f"there is no module {module_name}" if missing else f"importing {module_name} failed: {error!r}"
        fix = "install the package, or add its folder to PYTHONPATH" if missing else f"python -c 'import {module_name}'"
        raise _no_family(what, fix) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1, cutoff=0.0)
        raise _no_family(f"{module_name} has no {name}", f"{KEY}={module_name}:{near[0] if near else 'Name'}")
    return _instance(getattr(module, name), kind)


def _instance(found: Any, kind: str) -> Family:
    if isinstance(found, type) and issubclass(found, Family):
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise _no_family(f"{kind} lacks {', '.join(missing)}", f"define {missing[0]} in {found.__name__}")
        found = found()
    if not isinstance(found, Family):
        raise _no_family(f"{kind} is no family: {type(found).__name__}", "a class derived from meshwright's Family")
    if not issubclass(found.sections.get("model", type(None)), ModelSection):
        raise _no_family(f"{kind} has no section model", "sections = {'model': a class derived from ModelSection}")
    return found


def _no_family(what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=KEY, rule=f"{RULE}; ours are {', '.join(family_names())}", fix=fix)
