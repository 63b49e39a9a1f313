"""The diffusion transformer family: its description, tensor-parallel styles, initial values, data and task."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, DataError, LayoutError
from meshwright.models.contract.family import Family, RunFacts, head_violations
from meshwright.models.contract.model_facts import ZEROS, Fill, ModelFacts, Normal, Part
from meshwright.models.contract.tp_styles import COLUMN, ROW, Style, gather
from meshwright.models.dit.description import DiffusionConfig, DiTConfig, DiTSpec, describe, init_std
from meshwright.settings.violation import Violation, by_distance, divisors, round_up

if TYPE_CHECKING:
    import torch
    from torch import nn

    from meshwright.data.images import ImageDataset
    from meshwright.models.contract.task import Reference, Task

INIT_STD = 0.02
"""Standard deviation of the embedders' weights, and of modulation and final projection unless they start at zero."""

STYLES: Mapping[str, Mapping[str, Style]] = {
    "block": {
        "attention": gather(2),
        "attention.wq": COLUMN,
        "attention.wk": COLUMN,
        "attention.wv": COLUMN,
        "attention.wo": ROW,
        "mlp": gather(),
        "mlp.fc1": COLUMN,
        "mlp.fc2": ROW,
    }
}
FINAL_PROJECTION = "final.head.weight"


class DiTFamily(Family):
    """Diffusion transformers for images and videos (Peebles and Xie 2023)."""

    sections = {"model": DiTConfig, "diffusion": DiffusionConfig}
    conditions = ("timesteps", "labels", "frame rates")
    decides_samples = {"diffusion": ("num_timesteps", "schedule", "prediction", "label_dropout")}

    def rules(self, f: RunFacts) -> Iterable[Violation]:
        return violations(f.section(DiTConfig), f.section(DiffusionConfig), f)

    def proof(self, f: RunFacts) -> Mapping[str, Any]:
        """Return overrides for proofs: gates at zero make nearly all first gradients zero."""
        return {"model.zero_init": False}

    def describe(self, f: RunFacts) -> ModelFacts:
        return describe(_spec(f))

    def styles(self, f: RunFacts) -> Mapping[str, Mapping[str, Style]]:
        """Return the styles of the blocks; embedders and modulation are replicated."""
        return STYLES

    def build(self, f: RunFacts, part: Part) -> nn.Module:
        from meshwright.models.dit.module import DiT

        return DiT(_spec(f), part, dropout=f.dropout, seed=f.seed)

    def initial(self, f: RunFacts, name: str) -> Fill:
        """Return the initial distribution of a parameter, as in Peebles and Xie's code."""
        path, spec = name.split("."), _spec(f)
        if path[-1] == "bias":
            return ZEROS
        if path[0] in ("time_embed", "fps_embed", "label_embed"):
            return Normal(INIT_STD)
        if path[0] == "final" or "modulation" in path:
            return ZEROS if spec.zero_init else Normal(INIT_STD)
        if path[0] == "embed":
            return Normal(init_std(spec.patch_dim(), spec.dim))
        # Xavier's variance depends on fan_in + fan_out, so input and output projections share it.
        return Normal(init_std(spec.dim, spec.ffn_dim if "mlp" in path else spec.num_heads * spec.head_dim))

    def open_data(self, f: RunFacts) -> ImageDataset:
        """Open the images or videos of the `data` section; a DataError says what is wrong with them, or with the
        model."""
        from meshwright.data.images import open_images

        model = f.section(DiTConfig)
        dataset = open_images(
            f.data.source, image_size=model.image_size, num_channels=model.num_channels, num_frames=model.num_frames
        )
        if dataset.num_classes > model.num_classes:
            raise DataError(
                f"model.num_classes = {model.num_classes} is too small: the data has {dataset.num_classes} classes",
                where=f"model.num_classes; data.source, {f.data.source}",
                rule="the model has at least as many classes as the data",
                fix=f"model.num_classes={dataset.num_classes}",
            )
        return dataset

    def task(self, f: RunFacts, data: Any, device: torch.device) -> Task:
        from meshwright.models.dit.task import ImageTask

        return ImageTask(f, data, device)

    def reference(self, f: RunFacts, data: Any) -> Reference:
        from meshwright.models.dit.reference_loss import ImageReference

        return ImageReference(f, data)


def _spec(f: RunFacts) -> DiTSpec:
    return f.section(DiTConfig).spec()


FAMILY = DiTFamily()


def violations(model: DiTConfig, diffusion: DiffusionConfig, f: RunFacts) -> Iterator[Violation]:
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
