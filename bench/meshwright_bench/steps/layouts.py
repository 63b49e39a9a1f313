"""Runs whose steps are predicted and measured: models on layouts of one to four processes. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MODELS: dict[str, tuple[str, ...]] = {
    "llama-tiny": ("llama-tiny",),
    "decoder-24M": (
        "llama-tiny",
        "model.dim=512",
        "model.num_heads=8",
        "model.ffn_dim=1536",
        "model.num_layers=8",
        "train.global_batch=8",
    ),
    "moe-tiny": ("moe-tiny",),
    "dit-digits": ("dit-digits", "train.num_microbatches=1"),
    "qwen3": ("hf-tiny", "model.config=qwen3"),
}
STEPS = {"decoder-24M": 8}
FEW_STEPS = 16
"""Steps of a run of the other models."""
FOUR = "train.num_microbatches=4"


def _pipeline(schedule: str, *words: str) -> tuple[str, ...]:
    return ("mesh.pp=2", FOUR, f"pipeline.schedule={schedule}", *words)


PIPELINES = ("f-then-b", "1f1b", "interleaved", "zb-h1", "zb-v")
LAYOUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama-tiny": (
        (),
        (FOUR,),
        ("recompute.policy=full",),
        ("train.compile=true",),
        ("mesh.dp_shard=2",),
        ("mesh.dp_replicate=2",),
        ("mesh.tp=2",),
        ("mesh.cp=2",),
        *(_pipeline(one) for one in PIPELINES),
        ("mesh.dp_shard=4",),
        ("mesh.dp_shard=2", "mesh.tp=2"),
        _pipeline("1f1b", "mesh.dp_shard=2"),
    ),
    "decoder-24M": (
        (),
        ("recompute.policy=selective",),
        ("mesh.dp_shard=2",),
        ("mesh.dp_shard=2", "recompute.policy=full"),
        ("mesh.dp_replicate=2",),
        ("mesh.tp=2",),
        ("mesh.cp=2",),
        _pipeline("1f1b"),
        ("mesh.dp_shard=4",),
        ("mesh.dp_shard=2", "mesh.tp=2"),
    ),
    "moe-tiny": ((), ("mesh.dp_shard=2",), ("mesh.dp_shard=2", "mesh.ep=2"), _pipeline("1f1b")),
    "dit-digits": ((), ("mesh.dp_shard=2",), ("mesh.tp=2",), _pipeline("1f1b")),
    "qwen3": ((), ("mesh.dp_shard=2",), ("mesh.tp=2",), _pipeline("1f1b")),
}


@dataclass(frozen=True)
class Case:
    """A run of a model on a layout."""

    model: str
    layout: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the figures, such as `llama-tiny.dp_shard2.tp2`."""
        found = []
        for word in self.layout:
            key, _, value = word.partition("=")
            short = key.rpartition(".")[2]
            plain = {
                "schedule": value,
                "policy": f"recompute-{value}",
                "compile": "compiled",
                "num_microbatches": f"m{value}",
            }
            found.append(plain.get(short, f"{short}{value}"))
        return ".".join((self.model, *(found or ["one"])))

    @property
    def words(self) -> list[str]:
        """Configuration of the run: one thread per process, and no time spent beside its steps."""
        rest = ("train.threads=1", "train.device=cpu", "train.validation_samples=0", "checkpoint.at_end=false")
        steps = STEPS.get(self.model, FEW_STEPS)
        return [*MODELS[self.model], *self.layout, *rest, "checkpoint.minutes=0", f"train.steps={steps}"]


def cases(models: Sequence[str] = tuple(MODELS)) -> Iterator[Case]:
    """Yield all cases of models."""
    for model in models:
        for layout in LAYOUTS[model]:
            yield Case(model, layout)
