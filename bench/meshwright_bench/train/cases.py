"""What `bench train` measures, as values: each case is a run's configuration and the target of its comparison.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config.facts_for_family import model_facts
from meshwright.config.schema import RunConfig
from meshwright.plan.load_config import load
from meshwright.units import format_count

OURS, BARE = "ours", "bare"
"""The sides of a comparison."""


@dataclass(frozen=True)
class Case:
    """One comparison of Meshwright's training step with its bare counterpart."""

    name: str
    """First part of its figures' names."""
    config: RunConfig
    """The run that is measured; the bare loop has the same model, batches, precision, layout and learning rates."""
    at_least: float
    """Target: tokens/s over the bare loop's."""
    opponent: str
    """What the bare loop is, in a few words."""
    loss_tolerance: float
    """How far the sides' losses may be apart in the first steps, in nats a token."""
    rounds: int
    steps: int
    """Steps of a block; an arm runs `2 · rounds · steps`."""
    warmup: int = 3
    """Steps before the clock starts, whose losses are compared."""
    random_tokens: int = 0
    """Train on this many random token ids rather than on `data.source`."""

    @property
    def num_steps(self) -> int:
        """Steps that each arm runs in all."""
        return self.warmup + 2 * self.rounds * self.steps

    @property
    def tokens_a_step(self) -> int:
        """Tokens of a batch, over all ranks."""
        return self.config.train.global_batch * self.config.train.seq_len

    def title(self) -> str:
        """What is compared, in one line."""
        train, axes = self.config.train, self.config.mesh.axes()
        layout = "one process" if axes.num_ranks() == 1 else f"{axes.num_ranks()} processes, FSDP2"
        return (
            f"{self.name}: {self.config.name}, {format_count(model_facts(self.config).num_params())} parameters, "
            f"batch {train.global_batch} × {train.seq_len} tokens, {train.precision}, {layout}, "
            f"{'compiled block by block' if train.compile else 'eager'}; {2 * self.rounds * self.steps} steps an arm, "
            f"against {self.opponent}"
        )


FLOAT32_TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 1e-3
"""bfloat16 has 8 bits of mantissa, and attention's backward on CUDA adds in no fixed order."""


def cpu_cases() -> tuple[Case, ...]:
    """The default preset's model, with a batch large enough that a step is mostly arithmetic."""
    words = ["train.device=cpu", "train.precision=float32", "train.global_batch=16", "train.seq_len=256"]
    one, two = (load("llama-tiny", [*words, f"mesh.dp_shard={ranks}"]) for ranks in (1, 2))
    return (
        Case("one_process", one, 0.97, "a plain PyTorch loop", FLOAT32_TOLERANCE, rounds=10, steps=4),
        Case("fsdp2_two_processes", two, 0.97, "a minimal FSDP2 script", FLOAT32_TOLERANCE, rounds=10, steps=4),
    )


def cuda_cases() -> tuple[Case, ...]:
    """The default preset's family with 1.1 B parameters and 32,000 tokens, in bfloat16."""
    loop = "a plain PyTorch loop with bfloat16 weights and float32 masters"
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
    """The run of the CUDA cases: 75 GiB or so with both arms.

    Gathered parameters are kept until backward, because the bare loop keeps its bfloat16 weights too.
    """
    model = "num_layers=16 dim=2048 num_heads=32 num_kv_heads=8 ffn_dim=8192 vocab_size=32000 rope_theta=500000.0"
    train = f"global_batch=8 seq_len=2048 lr=3e-4 precision=bfloat16 device=cuda compile={str(compile).lower()}"
    words = [f"model.{word}" for word in model.split()] + [f"train.{word}" for word in train.split()]
    return load(None, [*words, "name=one-billion", "data.source=random tokens", "mesh.reshard_after_forward=false"])
