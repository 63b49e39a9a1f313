"""What tests of benchmarks share: figures by name, and a case small enough to measure, of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.plan.rules import load
from meshwright_bench.report import Figure
from meshwright_bench.train.cases import Case


def by_name(figures: Iterable[Figure]) -> dict[str, Figure]:
    """Figures, none of which has another's name."""
    figures = list(figures)
    assert len({figure.name for figure in figures}) == len(figures)
    return {figure.name: figure for figure in figures}


def tiny_case(*, ranks: int = 1, precision: str = "float32", compile: bool = False, seed: int = 0) -> Case:
    """Return a case with two rounds of two steps on random tokens, on the CPU; bfloat16 follows the CUDA cases."""
    model = "num_layers=2 dim=32 num_heads=4 num_kv_heads=2 ffn_dim=48 vocab_size=97"
    train = f"global_batch=4 seq_len=16 precision={precision} compile={str(compile).lower()} device=cpu threads=1"
    words = [*(f"model.{word}" for word in model.split()), *(f"train.{word}" for word in train.split())]
    words += [f"train.seed={seed}", f"mesh.dp_shard={ranks}"]
    words += [f"mesh.reshard_after_forward={str(precision == 'float32').lower()}", "train.warmup_steps=20"]
    config = load(None, [*words, "train.lr=3e-3", "train.steps=500", "name=tiny"])
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
