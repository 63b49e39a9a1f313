"""The error of one parameter group from step to step: what a checkpoint holds of error feedback.

A step is open from the first `quantise` to `commit` or `discard`. Only `commit` makes its error the state, so that a
step that is skipped for an overflow leaves nothing behind; a second `quantise` in an open step, of another
micro-batch, goes on from the first one's error. This takes two buffers of one byte an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.comm.compression.catalogue import ERROR_CODEC, Codec
from meshwright.comm.compression.codecs import decode, join_block, split_block
from meshwright.comm.compression.error_feedback import BETA
from meshwright.comm.kernels import dispatch
from meshwright.errors import RunError
from meshwright.log import get_logger

_log = get_logger(__name__)

RESET_STEPS = 1024
"""Steps after which the error starts from zero again, as in LoCo: a stale error must not stay for ever."""


@dataclass(frozen=True)
class ErrorLayout:
    """What an error belongs to: that of another layout is of other elements, and means nothing."""

    num_blocks: int
    """One for each rank that a piece of the gradient goes to."""
    num_elements: int
    """Elements of a block."""
    pieces: tuple[int, ...] = ()
    """Which pieces of the gradient the blocks are of; all of them, in order, if empty."""

    def words(self) -> str:
        """The layout, for people."""
        of = f", the pieces {list(self.pieces)}" if self.pieces else ""
        return f"{self.num_blocks} blocks of {self.num_elements} elements{of}"


class ErrorState:
    """The error of one parameter group on this rank.

    Args:
        name: of the parameter group, for the log.
        beta, reset_steps: β and T of LoCo; the error is zero after every `reset_steps`-th committed step.
    """

    def __init__(
        self,
        name: str,
        layout: ErrorLayout,
        *,
        device: torch.device | str = "cpu",
        beta: float = BETA,
        reset_steps: int = RESET_STEPS,
    ) -> None:
        self.name = name
        self.layout = layout
        self.num_steps = 0
        """Committed steps since the start of training."""
        self.loss_scale = 1.0
        """What the gradients that the error is of were multiplied by."""
        self._beta = beta
        self._reset_steps = reset_steps
        num_bytes = ERROR_CODEC.encoded_bytes(layout.num_elements)
        self._error = torch.zeros(layout.num_blocks, num_bytes, dtype=torch.uint8, device=device)
        self._next = torch.empty_like(self._error)
        self._is_open = False

    def quantise(self, g: Tensor, codec: Codec) -> Tensor:
        """The payload [blocks, bytes] of gradients [blocks, elements] with the error added; opens a step."""
        error = self._next if self._is_open else self._error
        payload, _ = dispatch.loco_quantise(g, error, codec, beta=self._beta, new_error=self._next)
        self._is_open = True
        return payload

    def requantise(self, payloads: Tensor, inner: Codec, codec: Codec, *, rotate: bool = False) -> Tensor:
        """As `quantise`, of the sums over the ranks of `payloads` [ranks, blocks, bytes], blocks of `inner`."""
        error = self._next if self._is_open else self._error
        payload, _ = dispatch.requantise(
            payloads,
            inner,
            error=error,
            codec=codec,
            num_elements=self.layout.num_elements,
            rotate=rotate,
            beta=self._beta,
            new_error=self._next,
        )
        self._is_open = True
        return payload

    def commit(self) -> None:
        """The open step was taken: its error is the state now. A step without gradients counts too."""
        if self._is_open:
            self._error, self._next = self._next, self._error
            self._is_open = False
        self.num_steps += 1
        if self.num_steps % self._reset_steps == 0:
            self._error.zero_()

    def discard(self) -> None:
        """The open step is skipped: the state stays what it was before it."""
        self._is_open = False

    def follow_loss_scale(self, loss_scale: float) -> None:
        """The next gradients are multiplied by `loss_scale`, so the error of the last ones has to be too.

        Raises:
            RunError: it changes in an open step.
        """
        if loss_scale == self.loss_scale:
            return
        if self._is_open:
            raise RunError(
                f"the loss scale changes from {self.loss_scale:g} to {loss_scale:g} within a step",
                where=f"the error feedback of {self.name}",
                rule="all gradients of a step have one loss scale",
                fix="commit() after a step that was taken, discard() after a skipped one, and then follow_loss_scale()",
            )
        codes, scales = self._codes_and_scales()
        # Codes stay, and a scale that a power of two multiplies keeps all of its bits.
        scaled = scales.float() * (loss_scale / self.loss_scale)
        kept = scaled.isfinite() & (scaled.abs() >= torch.finfo(torch.float32).tiny)
        scaled = torch.where(kept, scaled, 0.0).to(torch.bfloat16)
        self._error = join_block(codes, scaled, ERROR_CODEC.bits)
        self.loss_scale = loss_scale

    def flush(self) -> Tensor:
        """What was never sent, e / (1 − β), as float32 [blocks, elements]; sent with the last gradient it ends the
        feedback without loss. The state is zero after it."""
        assert not self._is_open, "commit or discard the step first"
        pending = decode(self._error, ERROR_CODEC, num_elements=self.layout.num_elements, dtype=torch.float32)
        self._error.zero_()
        return pending / (1.0 - self._beta)

    def state_dict(self) -> dict[str, Tensor]:
        """The committed state as tensors, which later steps do not change."""
        return {
            "error": self._error.clone(),
            "layout": torch.tensor([self.layout.num_blocks, self.layout.num_elements, *self.layout.pieces]),
            "num_steps": torch.tensor(self.num_steps),
            "loss_scale": torch.tensor(self.loss_scale, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; from a zero error, and a warning in the log, where its layout is another one."""
        self.discard()
        self.num_steps = int(state["num_steps"])
        self.loss_scale = float(state["loss_scale"])
        num_blocks, num_elements, *pieces = state["layout"].tolist()
        saved = ErrorLayout(num_blocks, num_elements, tuple(pieces))
        if saved == self.layout:
            self._error.copy_(state["error"])
            return
        self._error.zero_()
        _log.warning(
            "the error feedback of %s starts from zero: it was saved for %s, not for %s",
            self.name, saved.words(), self.layout.words(),
        )  # fmt: skip

    def _codes_and_scales(self) -> tuple[Tensor, Tensor]:
        return split_block(self._error, ERROR_CODEC.bits, num_elements=self.layout.num_elements)


class Feedback:
    """The error of gradients whose number shows at the first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._error: ErrorState | None = None
        self._saved: Mapping[str, Tensor] | None = None
        self._loss_scale: float | None = None

    def quantise(self, g: Tensor, codec: Codec) -> Tensor:
        """As of `ErrorState`; an error of another layout than before starts from zero, with a warning."""
        return self.error_of(ErrorLayout(*g.shape), g.device).quantise(g, codec)

    def error_of(self, layout: ErrorLayout, device: torch.device) -> ErrorState:
        """The error of gradients of this layout, as it was left or saved."""
        if self._error is None or self._error.layout != layout:
            saved = self._saved if self._error is None else self._error.state_dict()
            self._error = ErrorState(self._name, layout, device=device)
            if saved is not None:
                self._error.load_state_dict(saved)
            if self._loss_scale is not None:
                self._error.follow_loss_scale(self._loss_scale)
        return self._error

    def commit(self) -> None:
        """The step was taken."""
        if self._error is not None:
            self._error.commit()

    def discard(self) -> None:
        """The step is skipped."""
        if self._error is not None:
            self._error.discard()

    def follow_loss_scale(self, loss_scale: float) -> None:
        """As of `ErrorState`, also of an error that shows later."""
        self._loss_scale = loss_scale
        if self._error is not None:
            self._error.follow_loss_scale(loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        """The committed state; empty before the first use."""
        return dict(self._saved or {}) if self._error is None else self._error.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with a saved error, as soon as the layout is known; from nothing with an empty state."""
        self._saved, self._loss_scale = dict(state) or None, None
        if self._saved is None:
            self._error = None
        elif self._error is not None:
            self._error.load_state_dict(self._saved)


class KeepsErrors:
    """What a collective with errors does at the end of a step and at a checkpoint."""

    def __init__(self, errors: Mapping[str, Feedback]) -> None:
        self._errors = errors
        """By what stands before their tensors' names in a state."""

    def commit(self) -> None:
        """The optimizer has taken the step: its errors are carried into the next."""
        for error in self._errors.values():
            error.commit()

    def discard(self) -> None:
        """The step is skipped, for an overflow: its errors are forgotten."""
        for error in self._errors.values():
            error.discard()

    def follow_loss_scale(self, loss_scale: float) -> None:
        """The next gradients are multiplied by `loss_scale`, and so are the errors of the last ones."""
        for error in self._errors.values():
            error.follow_loss_scale(loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        """The errors of this rank, which no other rank has."""
        return {
            start + key: value for start, error in self._errors.items() for key, value in error.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with saved errors, as soon as the sizes are known; one that `state` doesn't have starts from zero."""
        for start, error in self._errors.items():
            error.load_state_dict(starting_with(start, state))


def starting_with(start: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of `state` whose names start so, without it."""
    return {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
