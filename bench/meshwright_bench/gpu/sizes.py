"""The model that `train`, `memory` and `profile` measure, and the arms of `train`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright_bench.gpu.cases import Setting
from meshwright_bench.gpu.commands import random_tokens

PRESET = "llama-tiny"
"""Preset whose sizes are all replaced."""


@dataclass(frozen=True)
class Size:
    """A dense decoder with an untied head, and its batch."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    global_batch: int
    seq_len: int
    precision: str = "bfloat16"
    num_microbatches: int = 1

    def words(self, setting: Setting, *, steps: int) -> tuple[str, ...]:
        """Return the words of a run of this size on random tokens, which neither validates nor generates."""
        model = ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
        train = ("global_batch", "seq_len", "precision", "num_microbatches")
        tokens = random_tokens(setting, vocab_size=self.vocab_size, count=self.num_tokens(steps))
        return (
            PRESET,
            *(f"model.{name}={getattr(self, name)}" for name in model),
            *(f"train.{name}={getattr(self, name)}" for name in train),
            f"train.steps={steps}",
            "train.lr=3e-4",
            "train.warmup_steps=2",
            "train.validation_samples=0",
            "train.sample_tokens=0",
            "mesh.reshard_after_forward=false",
            f"data.source={tokens}",
        )

    def num_tokens(self, steps: int) -> int:
        """Return the number of tokens that some more than `steps` steps read, so that none is seen twice."""
        return (steps + 4) * self.global_batch * (self.seq_len + 1)


LARGE = Size(16, 2048, 32, 8, 8192, 128_256, 4, 4096)
"""1.50 B parameters: a small model with the vocabulary of a large one."""
SMALL = Size(12, 512, 8, 8, 1536, 256, 4, 512, num_microbatches=4)
"""Small blocks, whose launches take longer than their work."""
DRY = Size(2, 32, 2, 2, 64, 96, 2, 16, precision="float32")
STEPS, DRY_STEPS = 20, 6

COMPILED = "ours.compiled"
ARMS: dict[str, tuple[str, ...]] = {
    COMPILED: ("train.compile=true",),
    "ours.float8_current": ("train.compile=true", "float8.recipe=current"),
    "ours.float8_delayed": ("train.compile=true", "float8.recipe=delayed"),
}
"""Overrides of our arms."""


def our_words(arm: str, setting: Setting) -> tuple[str, ...]:
    """Return the words of an arm's run; the compiled one records its last two steps for `profile`.

    A dry run compiles nothing: a CPU's compiler takes longer than all else.
    """
    size, steps = (DRY, DRY_STEPS) if setting.is_dry else (LARGE, STEPS)
    words = ARMS[arm]
    if setting.is_dry:
        words = tuple(word for word in words if word != "train.compile=true")
    profiled = (f"train.profile={steps - 1}-{steps}",) if arm == COMPILED else ()
    return (*size.words(setting, steps=steps), *words, *profiled)
