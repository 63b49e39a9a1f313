"""Cases of `bench train`: the configuration of a run and the target of its comparison. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.plan.rules import load
from meshwright.units import format_count

OURS, BARE = "ours", "bare"
"""Sides of a comparison."""


@dataclass(frozen=True)
class Case:
    """Comparison of Meshwright's training step with a bare loop."""

    name: str
    """Prefix of the figures' names."""
    config: RunConfig
    """Configuration to measure; the bare loop has the same model, batches, precision, layout and learning rates."""
    at_least: float
    """Target throughput in tokens/s relative to the bare loop."""
    opponent: str
    """Short description of the bare loop."""
    loss_tolerance: float
    """Maximum difference of the sides' losses in the first steps, in nats per token."""
    rounds: int
    steps: int
    """Steps per block; an arm runs `2 · rounds · steps`."""
    warmup: int = 3
    """Steps before timing starts, whose losses are compared."""
    random_tokens: int = 0
    """Number of random token ids to train on; `data.source` is used if 0."""

    @property
    def num_steps(self) -> int:
        """Return the total number of steps per arm."""
        return self.warmup + 2 * self.rounds * self.steps

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens per global batch."""
        return self.config.train.global_batch * self.config.train.seq_len

    def title(self) -> str:
        """Describe the comparison in one line."""
        train, axes = self.config.train, self.config.mesh.axes()
        layout = "one process" if axes.num_ranks() == 1 else f"{axes.num_ranks()} processes, FSDP2"
        return (
            f"{self.name}: {self.config.name}, {format_count(model_facts(self.config).num_params())} parameters, "
            f"batch {train.global_batch} × {train.seq_len} tokens, {train.precision}, {layout}, "
            f"{'compiled block by block' if train.compile else 'eager'}; {2 * self.rounds * self.steps} steps per arm, "
            f"against {self.opponent}"
        )


FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 1e-3
"""Tolerance in bfloat16, which has an 8-bit significand; attention's backward on CUDA is not deterministic."""


def cpu_cases() -> tuple[Case, ...]:
    """Return the cases with the default preset's model and a batch large enough for compute to dominate."""
    words = ["train.device=cpu", "train.precision=float32", "train.global_batch=16", "train.seq_len=256"]
    one, two = (load("llama-tiny", [*words, f"mesh.dp_shard={ranks}"]) for ranks in (1, 2))
    return (
        Case("one_process", one, 0.97, "a plain PyTorch loop", FLOAT32_TOLERANCE, rounds=10, steps=4),
        Case("fsdp2_two_processes", two, 0.97, "a minimal FSDP2 script", FLOAT32_TOLERANCE, rounds=10, steps=4),
    )


def cuda_cases() -> tuple[Case, ...]:
    """Return the cases with a model of 1.1 B parameters and a vocabulary of 32,000, in bfloat16."""
    loop = "a plain PyTorch loop with bfloat16 weights and float32 master weights"
    return tuple(
        Case(
            name,
            one_billion(compile=compile),
            0.98,
            loop,
            BFLOAT16_TOLERANCE,
            rounds=8,
            steps=3,
            random_tokens=1 << 22,
        )
        for name, compile in (("cuda_1b_eager", False), ("cuda_1b_compiled", True))
    )


def one_billion(*, compile: bool) -> RunConfig:
    """Return the configuration of the CUDA cases, which needs about 75 GiB with both arms.

    Parameters are not resharded after the forward, because the bare loop keeps its bfloat16 weights too.
    """
    model = "num_layers=16 dim=2048 num_heads=32 num_kv_heads=8 ffn_dim=8192 vocab_size=32000 rope_theta=500000.0"
    train = f"global_batch=8 seq_len=2048 lr=3e-4 precision=bfloat16 device=cuda compile={str(compile).lower()}"
    words = [f"model.{word}" for word in model.split()] + [f"train.{word}" for word in train.split()]
    return load(None, [*words, "name=one-billion", "data.source=random tokens", "mesh.reshard_after_forward=false"])
