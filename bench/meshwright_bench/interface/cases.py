"""Masks, sides and sizes of `bench interface`. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.schema import RunConfig
from meshwright.plan.rules import load

SEQ_LEN = 2048
OURS, INTERFACE, THEIRS = "ours", "interface", "sdpa"
"""Sides: the preset llama-tiny, transformers' Mistral with our attention through its interface, and with its own."""
CAUSAL, WINDOWED, PACKED = "causal", "window", "documents"
MASKS = {
    CAUSAL: (OURS, INTERFACE, THEIRS),
    WINDOWED: (OURS, INTERFACE, THEIRS),
    PACKED: (OURS, INTERFACE),
}
"""Masks, with the sides that have them: transformers' own attention isn't told of documents."""
AT_LEAST = 0.9
"""Target for the speed of the interface's side over ours: the rest of the model is transformers' code."""
SAME_LOSS = 1e-4
"""Most difference of the sides' losses, in nats per token, with the same parameters and tokens."""


@dataclass(frozen=True)
class InterfaceTask:
    """Measurement of one mask: the time of a training step of every side, in one process with one thread."""

    result: Path
    mask: str
    seq_len: int = SEQ_LEN
    batch: int = 4
    more: tuple[str, ...] = ()
    """Keys of every side, such as another source."""
    rounds: int = 7
    steps: int = 1

    @property
    def window(self) -> int | None:
        """Return the sliding window in tokens, of the mask that is one."""
        return self.seq_len // 8 if self.mask == WINDOWED else None

    def config(self, side: str, folder: Path) -> RunConfig:
        """Return the configuration of a side, given a folder for the file that describes transformers' model."""
        words = [
            "train.device=cpu", "train.precision=float32", f"train.seq_len={self.seq_len}", *self.more,
            f"train.global_batch={self.batch}", f"data.packing={'documents' if self.mask == PACKED else 'none'}",
        ]  # fmt: skip
        if side == OURS:
            return load("llama-tiny", [*words, *([f"model.window={self.window}"] if self.window else [])])
        write_mistral(folder / "config.json", window=self.window, length=self.seq_len)
        attention = "sdpa" if side == THEIRS else "meshwright"
        return load("hf-tiny", [f"model.config={folder}", f"model.attention={attention}", *words])


def dimensions() -> dict[str, Any]:
    """Return the dimensions of llama-tiny."""
    model = load("llama-tiny", []).model.model_dump()
    return {**model, "head_dim": model["dim"] // model["num_heads"]}


def write_mistral(path: Path, *, window: int | None, length: int) -> None:
    """Write the configuration of transformers' Mistral with the dimensions of llama-tiny."""
    model = dimensions()
    fields = {
        "model_type": "mistral", "hidden_size": model["dim"], "intermediate_size": model["ffn_dim"],
        "num_hidden_layers": model["num_layers"], "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"], "vocab_size": model["vocab_size"],
        "sliding_window": window, "max_position_embeddings": length, "tie_word_embeddings": False,
        "rms_norm_eps": model["norm_eps"], "rope_theta": model["rope_theta"],
    }  # fmt: skip
    path.write_text(json.dumps(fields), "utf-8")
