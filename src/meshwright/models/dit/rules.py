"""Configuration rules of a diffusion transformer: dimensions, sampling and tensor-parallel divisibility."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator

from meshwright.errors import ConfigError, LayoutError
from meshwright.models.contract.attention_head_rule import head_violations
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.dit.config import DiffusionConfig, DiTConfig
from meshwright.settings.nearby_sizes import by_distance, divisors, round_up
from meshwright.settings.violation import Violation

FINAL_PROJECTION = "final.head.weight"


def violations(model: DiTConfig, diffusion: DiffusionConfig, f: RunFacts) -> Iterator[Violation]:
    """Yield the diffusion transformer rules that a run violates."""
    yield from head_violations(dim=model.dim, num_heads=model.num_heads, head_dim=model.head_dim)
    yield from _patches(model)
    yield from _tensor_parallel(model, f)
    yield from _sampling(diffusion)
    yield from _frozen_at_zero(model, f.freeze)


def _sampling(diffusion: DiffusionConfig) -> Iterator[Violation]:
    steps, most = diffusion.sampling_steps, diffusion.num_timesteps
    if steps > most:
        yield Violation(
            ConfigError,
            f"diffusion.sampling_steps = {steps} is more than diffusion.num_timesteps = {most}",
            "diffusion.sampling_steps",
            "sampling uses a subset of the training timesteps",
            [{"diffusion.sampling_steps": most}, {"diffusion.num_timesteps": steps}],
        )
    if not diffusion.label_dropout and diffusion.guidance != 1 and diffusion.num_samples:
        yield Violation(
            ConfigError,
            f"diffusion.guidance = {diffusion.guidance} with diffusion.label_dropout = 0",
            "diffusion.label_dropout",
            "guidance needs unconditional predictions, which are learned from samples with dropped labels",
            [{"diffusion.guidance": 1.0}, {"diffusion.label_dropout": 0.1}, {"diffusion.num_samples": 0}],
        )


def _patches(model: DiTConfig) -> Iterator[Violation]:
    for patch, sample in (("patch_size", "image_size"), ("patch_frames", "num_frames")):
        size, total = getattr(model, patch), getattr(model, sample)
        if total % size:
            sizes = by_distance(divisors(total), size)
            yield Violation(
                ConfigError,
                f"model.{patch} = {size} does not divide model.{sample} = {total}",
                f"model.{patch}",
                "patches tile a sample",
                [*({f"model.{patch}": fit} for fit in sizes[:1]), {f"model.{sample}": round_up(total, size)}],
            )


def _tensor_parallel(model: DiTConfig, f: RunFacts) -> Iterator[Violation]:
    tp = f.axes.tp
    counts = {"attention heads": model.num_heads, "feed-forward columns (model.ffn_dim)": model.ffn_dim}
    name = next((name for name, count in counts.items() if count % tp), None)
    if name is not None:
        sizes = by_distance(divisors(math.gcd(*counts.values())), tp)
        yield Violation(
            LayoutError,
            f"mesh.tp = {tp} does not divide {counts[name]} {name}",
            "mesh.tp",
            "tp divides num_heads and ffn_dim",
            [{"mesh.tp": size} for size in sizes],
        )


def _frozen_at_zero(model: DiTConfig, globs: tuple[str, ...]) -> Iterator[Violation]:
    """Reject a frozen, zero-initialised final projection: all gradients except its bias's would stay zero."""
    remaining = tuple(glob for glob in globs if not fnmatch.fnmatchcase(FINAL_PROJECTION, glob))
    if model.zero_init and remaining != globs:
        yield Violation(
            ConfigError,
            f"train.freeze includes {FINAL_PROJECTION}, which starts at zero (model.zero_init)",
            "train.freeze",
            "a projection frozen at zero blocks all gradients; zero_init has no effect on loaded weights",
            [{"model.zero_init": False}, {"train.freeze": remaining}],
        )
