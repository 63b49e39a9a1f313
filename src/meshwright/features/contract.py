"""What a feature does in a run; a subclass overrides what it needs, and all else does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.checkpoint.manifest import Manifest
    from meshwright.plan.traffic import LinkBytes, Traffic
    from meshwright.train.pipeline_stages import Pipeline
    from meshwright.train.record.reporter import CountedBytes


class OnRank:
    """State of a feature on a rank. All ranks call each method, in the order of this class."""

    saved_as: str = ""
    """Key of `identity` in checkpoints."""
    identity: Mapping[str, Any] = {}
    """Facts that saved state must agree with to be restored."""

    def attach(self, pipeline: Pipeline) -> None:
        """Take the rank's pipeline, before the first training step; not called where none is trained."""

    def restore(self, path: Path, manifest: Manifest) -> str:
        """Restore the state from a checkpoint; return the reason if it starts from nothing, else ''."""
        return ""

    def counting(self) -> AbstractContextManager[None]:
        """Return a context for a training step of a run, in which what the feature sends counts."""
        return nullcontext()

    def is_steady(self) -> bool:
        """Return whether steps run as they will from now on, so that they can be measured."""
        return True

    def begin(self) -> None:
        """Start a step, before its first forward."""

    def running(self) -> AbstractContextManager[None]:
        """Return a context for the forwards and backwards of a step."""
        return nullcontext()

    def end_step(self, *, applied: bool) -> None:
        """End a step; `applied` is False if it was skipped."""

    def notes(self) -> Iterator[str]:
        """Yield news for the user after a step, each once."""
        return iter(())

    def state(self) -> dict[str, Tensor]:
        """Return tensors for a checkpoint."""
        return {}

    def sent(self) -> LinkBytes | None:
        """Return the bytes sent so far in collectives of its own, also in validations; None without any."""
        return None

    def traffic(self) -> Traffic | None:
        """Return what its own collectives sent in the steps counted, to be shown beside the prediction."""
        return None

    def all_to_alls(self) -> tuple[CountedBytes, ...]:
        """Return the bytes of all-to-alls in the steps counted, by purpose."""
        return ()
