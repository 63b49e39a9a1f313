"""Small diffusion transformers and batches for tests."""

from __future__ import annotations

import torch

from meshwright.mesh.local_shards import local_box, to_local
from meshwright.models.dit.description import DiTSpec
from meshwright.nn.weight_init import normal_shard

IMAGES = DiTSpec(num_layers=4, dim=16, num_heads=4, head_dim=4, ffn_dim=24, image_size=8, patch_size=2,
                   num_channels=2, num_classes=5, zero_init=False)  # fmt: skip
VIDEOS = DiTSpec(num_layers=4, dim=16, num_heads=2, head_dim=6, ffn_dim=24, image_size=6, patch_size=2, num_channels=1,
                 num_classes=5, num_frames=4, patch_frames=2, zero_init=False)  # fmt: skip


def words_of(spec, axes=None, layers=None):
    """A run of a spec, on a mesh; with `layers`, in so many stages of one rank, of so many layers each."""
    words = [f"model.{name}={str(value).lower()}" for name, value in vars(spec).items()]
    words += [f"mesh.{axis}={size}" for axis, size in (axes.used().items() if axes else ())]
    if layers is not None:
        words += [f"pipeline.chunks={len(layers)}", f"pipeline.layers_per_stage={list(layers)}",
                  "pipeline.allow_empty_stages=true"]  # fmt: skip
    return [*words, "train.precision=float64"]


def make_batch(spec, size, *, dtype=torch.float64):
    """Noisy samples, timesteps, labels (a null one among them), frame rates."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, *spec.sample_shape(), generator=generator, dtype=torch.float64).to(dtype)
    timestep = torch.randint(0, 1000, (size,), generator=generator)
    label = torch.randint(0, spec.num_classes, (size,), generator=generator)
    label[0] = spec.num_classes
    return x, timestep, label, torch.randint(1, 30, (size,), generator=generator)


@torch.no_grad()
def fill(part):
    """Give every parameter, biases too, values that depend on its name in the whole model only; none is near zero."""
    for name, parameter in part.named_parameters():
        index = local_box(parameter).slices()
        to_local(parameter).copy_(normal_shard(0, name, parameter.shape, std=0.3, index=index))
    return part
