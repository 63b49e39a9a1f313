"""Error-feedback state that persists across steps and is saved in checkpoints.

A step is open from the first `quantise` to `commit` or `discard`. Only `commit` makes its error the new state, so a
step skipped after an overflow leaves no trace. A second `quantise` in an open step, for another micro-batch, continues
from the first one's error. This takes two buffers of one byte per element.
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
from meshwright.units import counted

_log = get_logger(__name__)

RESET_STEPS = 1024
"""Number of steps after which the error is reset to zero, as in LoCo, so that stale errors do not persist."""


@dataclass(frozen=True)
class ErrorLayout:
    """Assignment of error blocks to gradient elements; an error saved with another layout cannot be used."""

    num_blocks: int
    """Number of blocks, one per rank that receives a shard of the gradient."""
    num_elements: int
    """Elements per block."""
    shards: tuple[int, ...] = ()
    """Indices of the gradient shards that the blocks belong to; if empty, all shards in order."""

    def describe(self) -> str:
        """Return a description of the layout for messages."""
        of = f", shards {list(self.shards)}" if self.shards else ""
        return f"{counted(self.num_blocks, 'block')} of {counted(self.num_elements, 'element')}{of}"


class ErrorState:
    """Error-feedback state of one parameter group on this rank.

    Args:
        name: name of the parameter group in log messages.
        beta, reset_steps: β and T of LoCo; the error is reset after every `reset_steps`-th committed step.
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
        """Loss scale of the gradients that the error belongs to."""
        self._beta = beta
        self._reset_steps = reset_steps
        num_bytes = ERROR_CODEC.encoded_bytes(layout.num_elements)
        self._error = torch.zeros(layout.num_blocks, num_bytes, dtype=torch.uint8, device=device)
        self._next = torch.empty_like(self._error)
        self._is_open = False

    def quantise(self, g: Tensor, codec: Codec) -> Tensor:
        """Encode gradients [blocks, elements] plus the error as a payload [blocks, bytes]; opens a step."""
        error = self._next if self._is_open else self._error
        payload, _ = dispatch.loco_quantise(g, error, codec, beta=self._beta, new_error=self._next)
        self._is_open = True
        return payload

    def requantise(self, payloads: Tensor, inner: Codec, codec: Codec, *, rotate: bool = False) -> Tensor:
        """Quantise the sums over ranks of `payloads` [ranks, blocks, bytes] encoded with `inner`; opens a step."""
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
        """Make the open step's error the new state, and count the step even if it had no gradients."""
        if self._is_open:
            self._error, self._next = self._next, self._error
            self._is_open = False
        self.num_steps += 1
        if self.num_steps % self._reset_steps == 0:
            self._error.zero_()

    def discard(self) -> None:
        """Drop the open step's error, and keep the state before it."""
        self._is_open = False

    def follow_loss_scale(self, loss_scale: float) -> None:
        """Rescale the error to the loss scale of the next gradients.

        Raises:
            RunError: the loss scale changes within an open step.
        """
        if loss_scale == self.loss_scale:
            return
        if self._is_open:
            raise RunError(
                f"the loss scale changes from {self.loss_scale:g} to {loss_scale:g} within a step",
                where=f"the error feedback of {self.name}",
                rule="all gradients of a step have the same loss scale",
                fix="call commit() or discard() at the end of each step, and then follow_loss_scale()",
            )
        codes, scales = self._codes_and_scales()
        # Codes are unchanged, and multiplying a scale by a power of two is exact.
        scaled = scales.float() * (loss_scale / self.loss_scale)
        kept = scaled.isfinite() & (scaled.abs() >= torch.finfo(torch.float32).tiny)
        scaled = torch.where(kept, scaled, 0.0).to(torch.bfloat16)
        self._error = join_block(codes, scaled, ERROR_CODEC.bits)
        self.loss_scale = loss_scale

    def flush(self) -> Tensor:
        """Return the gradient not yet sent, e / (1 − β), as float32 [blocks, elements], and reset the state."""
        assert not self._is_open, "commit or discard the step first"
        pending = decode(self._error, ERROR_CODEC, num_elements=self.layout.num_elements, dtype=torch.float32)
        self._error.zero_()
        return pending / (1.0 - self._beta)

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the committed state as tensors."""
        return {
            "error": self._error.clone(),
            "layout": torch.tensor([self.layout.num_blocks, self.layout.num_elements, *self.layout.shards]),
            "num_steps": torch.tensor(self.num_steps),
            "loss_scale": torch.tensor(self.loss_scale, dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state; if its layout differs, log a warning and start from a zero error."""
        self.discard()
        self.num_steps = int(state["num_steps"])
        self.loss_scale = float(state["loss_scale"])
        num_blocks, num_elements, *shards = state["layout"].tolist()
        saved = ErrorLayout(num_blocks, num_elements, tuple(shards))
        if saved == self.layout:
            self._error.copy_(state["error"])
            return
        self._error.zero_()
        _log.warning(
            "the error feedback of %s starts from zero: it was saved for %s, not for %s",
            self.name, saved.describe(), self.layout.describe(),
        )  # fmt: skip

    def _codes_and_scales(self) -> tuple[Tensor, Tensor]:
        return split_block(self._error, ERROR_CODEC.bits, num_elements=self.layout.num_elements)


class LazyErrorState:
    """Error state created on first use, when the layout of the gradients is known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._error: ErrorState | None = None
        self._saved: Mapping[str, Tensor] | None = None
        self._loss_scale: float | None = None

    def quantise(self, g: Tensor, codec: Codec) -> Tensor:
        """Encode gradients plus the error; a change of layout resets the error, with a warning."""
        return self.state_for(ErrorLayout(*g.shape), g.device).quantise(g, codec)

    def state_for(self, layout: ErrorLayout, device: torch.device) -> ErrorState:
        """Return the error state for this layout, restored from the previous or saved state if there is one."""
        if self._error is None or self._error.layout != layout:
            saved = self._saved if self._error is None else self._error.state_dict()
            self._error = ErrorState(self._name, layout, device=device)
            if saved is not None:
                self._error.load_state_dict(saved)
            if self._loss_scale is not None:
                self._error.follow_loss_scale(self._loss_scale)
        return self._error

    def commit(self) -> None:
        """Make the open step's error the new state."""
        if self._error is not None:
            self._error.commit()

    def discard(self) -> None:
        """Drop the open step's error."""
        if self._error is not None:
            self._error.discard()

    def follow_loss_scale(self, loss_scale: float) -> None:
        """Rescale the error to this loss scale, now or when it is created."""
        self._loss_scale = loss_scale
        if self._error is not None:
            self._error.follow_loss_scale(loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the committed state; empty before first use."""
        return dict(self._saved or {}) if self._error is None else self._error.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved error once the layout is known; an empty state resets it."""
        self._saved, self._loss_scale = dict(state) or None, None
        if self._saved is None:
            self._error = None
        elif self._error is not None:
            self._error.load_state_dict(self._saved)


class ErrorFeedbackMixin:
    """Step and checkpoint methods of a collective with error feedback."""

    def __init__(self, errors: Mapping[str, LazyErrorState]) -> None:
        self._errors = errors
        """Error states by the prefix of their keys in a state dict."""

    def commit(self) -> None:
        """Carry the step's errors into the next one, after the optimizer step."""
        for error in self._errors.values():
            error.commit()

    def discard(self) -> None:
        """Drop the step's errors, after a step skipped for an overflow."""
        for error in self._errors.values():
            error.discard()

    def follow_loss_scale(self, loss_scale: float) -> None:
        """Rescale the errors to the loss scale of the next gradients."""
        for error in self._errors.values():
            error.follow_loss_scale(loss_scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's errors, which differ between ranks."""
        return {
            prefix + key: value for prefix, error in self._errors.items() for key, value in error.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore saved errors once their layouts are known; errors missing from `state` start from zero."""
        for prefix, error in self._errors.items():
            error.load_state_dict(strip_prefix(prefix, state))


def strip_prefix(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of `state` whose keys start with `prefix`, with the prefix removed."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
