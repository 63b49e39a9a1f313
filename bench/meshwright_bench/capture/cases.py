"""Models, arms and tasks of `bench capture`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

EAGER, COMPILED, CALLABLES = "eager", "compiled", "pytorch"
"""Arms without our graphs: as it is, torch.compile, torch.cuda.make_graphed_callables."""
SLOT, PER_MICROBATCH, SEPARATE = "slot", "per_microbatch", "separate"
"""Arms of ours: graphs by slot, by micro-batch in one pool, and by micro-batch in a pool each (for memory only)."""


@dataclass(frozen=True)
class CaptureCase:
    """Blocks on the first rank of a pipeline, replayed in the order of its row."""

    name: str
    dim: int
    num_layers: int
    seq_len: int
    preset: str = "llama-tiny"
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Further keys of the section `model`."""
    samples: int = 1
    stages: int = 1
    microbatches: int = 4
    scope: tuple[str, ...] = ("layer",)
    dtype: str = "bfloat16"
    faster_than: float | None = None
    """Target for the speed over eager execution."""

    def words(self) -> tuple[str, ...]:
        """Return the overrides of a configuration besides the model's."""
        return (f"train.seq_len={self.seq_len}", f"train.global_batch={self.samples}")


EXPERTS = "moe-tiny"
ON_CUDA = (
    CaptureCase("launch-bound", 1024, 24, 512, sizes={"ffn_dim": 4096}, faster_than=2.0),
    CaptureCase("gpu-bound", 4096, 4, 4096, sizes={"ffn_dim": 16384}, faster_than=0.99),
    CaptureCase(
        "experts",
        1024,
        8,
        512,
        preset=EXPERTS,
        sizes={"num_experts": 64, "expert_dim": 512},
        scope=("attention", "moe_router"),
        faster_than=1.1,
    ),
    CaptureCase("pipeline", 1024, 8, 512, sizes={"ffn_dim": 4096}, stages=4, microbatches=16),
)
ON_CPU = (
    CaptureCase("launch-bound", 64, 4, 64, sizes={"ffn_dim": 256}, dtype="float32"),
    CaptureCase(
        "experts",
        64,
        2,
        64,
        preset=EXPERTS,
        sizes={"num_experts": 8, "expert_dim": 32},
        scope=("attention", "moe_router"),
        dtype="float32",
    ),
    CaptureCase("pipeline", 64, 4, 64, sizes={"ffn_dim": 256}, stages=4, microbatches=16, dtype="float32"),
)
"""Small: on a CPU graphs are simulated, which shows their number and memory, and no speed."""


@dataclass(frozen=True)
class CaptureTask:
    """Measurement of one case."""

    result: Path
    case: CaptureCase
    device: str = "cpu"
    rounds: int = 5
    steps: int = 3
