"""A case small enough to measure in a test: the path of the real ones, with a model of a few thousand parameters."""

from __future__ import annotations

from meshwright.bench.cases import Case
from meshwright.config.schema import LlamaConfig, MeshConfig, RunConfig, TrainConfig


def tiny_case(*, ranks: int = 1, precision: str = "float32", compile: bool = False, seed: int = 0) -> Case:
    """Two rounds of two steps on random tokens, on the CPU. bfloat16 takes the CUDA cases' path."""
    config = RunConfig(
        name="tiny",
        model=LlamaConfig(num_layers=2, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=97),
        mesh=MeshConfig(dp_shard=ranks, reshard_after_forward=precision == "float32"),
        train=TrainConfig(
            global_batch=4, seq_len=16, precision=precision, compile=compile, device="cpu", threads=1, seed=seed
        ),
    )
    return Case(
        "tiny",
        config,
        0.97,
        "a plain PyTorch loop",
        loss_tolerance=1e-4 if precision == "float32" else 1e-3,
        rounds=2,
        steps=2,
        random_tokens=4096,
    )
