"""Sizes, masks and targets of the benchmark of attention. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from meshwright.nn.attention.backend import AttentionRequest, Backend, choose_backend, refusal
from meshwright.nn.attention.mask_spec import MaskSpec

SEQ_LEN = 4096
WINDOW = 256
DOCUMENTS = (1024,) * 4
WINDOW_AT_MOST = 0.25
"""Target for the forward under the window by `auto`, over plain causal attention."""
CAUSAL, WINDOWED = "causal", "window"
MASKS = {
    CAUSAL: MaskSpec(causal=True),
    WINDOWED: MaskSpec(causal=True, window=WINDOW),
    "documents": MaskSpec(causal=True, documents=(DOCUMENTS,)),
}
MEASURED = (Backend.SDPA, Backend.FLEX, Backend.VARLEN)
"""Backends that are measured where they run; the reference is not made for speed."""


class Pass(StrEnum):
    """What is timed."""

    FORWARD = "forward"
    BOTH = "forward_backward"


@dataclass(frozen=True)
class AttentionTask:
    """Times of attention in one process with one thread."""

    result: Path
    device: str = "cpu"
    dtype: str = "float32"
    seq_len: int = SEQ_LEN
    num_heads: int = 8
    head_dim: int = 64
    backends: tuple[Backend, ...] = MEASURED
    rounds: int = 7
    steps: int = 1

    def arms(self, timed: Pass) -> list[tuple[Backend, str]]:
        """Return the backends and masks to time; the first is the baseline, plain causal attention."""
        arms = [(Backend.SDPA, CAUSAL)]
        for backend in self.backends:
            for name, mask in MASKS.items():
                request = AttentionRequest(self.device, self.dtype, mask, head_dim=self.head_dim,
                                           needs_grad=timed is Pass.BOTH)  # fmt: skip
                if (backend, name) not in arms and not refusal(backend, request):
                    arms.append((backend, name))
        return arms


def target_arm(device: str, dtype: str) -> str:
    """Return the arm with a target: the window, by the backend that `auto` takes for it."""
    request = AttentionRequest(device, dtype, MASKS[WINDOWED])
    return f"{choose_backend(Backend.AUTO, request)}.{WINDOWED}"


def flops_over_causal(mask: str) -> float:
    """Return the FLOPs under a mask, over those of plain causal attention."""
    return MASKS[mask].num_pairs(SEQ_LEN) / MASKS[CAUSAL].num_pairs(SEQ_LEN)
