"""Rules of a diffusion transformer: its dimensions, its sampling, and what tensor parallel divides."""

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
    """The rules of a diffusion transformer that a run violates."""
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
            "sampling goes through some of the timesteps that the model is trained on",
            [{"diffusion.sampling_steps": most}, {"diffusion.num_timesteps": steps}],
        )
    if not diffusion.label_dropout and diffusion.guidance != 1 and diffusion.num_samples:
        yield Violation(
            ConfigError,
            f"diffusion.guidance = {diffusion.guidance} with diffusion.label_dropout = 0",
            "diffusion.label_dropout",
            "guidance compares with what is predicted without a class, which is learned from samples without theirs",
            [{"diffusion.guidance": 1.0}, {"diffusion.label_dropout": 0.1}, {"diffusion.num_samples": 0}],
        )


def _patches(model: DiTConfig) -> Iterator[Violation]:
    for patch, whole in (("patch_size", "image_size"), ("patch_frames", "num_frames")):
        size, total = getattr(model, patch), getattr(model, whole)
        if total % size:
            sizes = by_distance(divisors(total), size)
            yield Violation(
                ConfigError,
                f"model.{patch} = {size} does not divide model.{whole} = {total}",
                f"model.{patch}",
                "patches tile a sample",
                [*({f"model.{patch}": fit} for fit in sizes[:1]), {f"model.{whole}": round_up(total, size)}],
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
            "tp divides the numbers of heads and ffn_dim",
            [{"mesh.tp": size} for size in sizes],
        )


def _frozen_at_zero(model: DiTConfig, globs: tuple[str, ...]) -> Iterator[Violation]:
    """Every gradient but its bias's passes through the final projection, and is zero where that stays zero."""
    rest = tuple(glob for glob in globs if not fnmatch.fnmatchcase(FINAL_PROJECTION, glob))
    if model.zero_init and rest != globs:
        yield Violation(
            ConfigError,
            f"train.freeze has {FINAL_PROJECTION}, which starts at zero (model.zero_init)",
            "train.freeze",
            "nothing learns behind a projection that stays zero; a run that loads trained weights ignores zero_init",
            [{"model.zero_init": False}, {"train.freeze": rest}],
        )
