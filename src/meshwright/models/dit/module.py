"""The diffusion transformer (Peebles and Xie 2023, "Scalable diffusion models with transformers") as a plain module.

For pictures and videos, told the timestep, a label (or none: classifier-free guidance, Ho and Salimans 2022) and, for
videos, the frame rate. The condition goes to every block as an argument, so every part of the model has its own copy of
the embedders that make it, and declares them shared.

Shapes: b batch, c channels, f frames, y height, x width, t patches, d model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.dit.block import DiTBlock, FinalLayer
from meshwright.models.dit.description import FREQUENCY_DIM, DiTSpec
from meshwright.nn.condition_embedding import MlpEmbedder, sinusoids
from meshwright.nn.linear import Linear
from meshwright.nn.patch_embedding import PatchGrid, position_table


class DiT(nn.Module):
    """Patch embedding, embedders of the condition, blocks and final layer; or the part that a pipeline stage has."""

    def __init__(self, spec: DiTSpec, part: Part | None = None) -> None:
        super().__init__()
        self.spec, self.part = spec, part or Part(range(spec.num_layers))
        patch = (spec.patch_frames, spec.patch_size, spec.patch_size)
        self._grid = PatchGrid(spec.sample_shape(), patch)
        if self.part.is_first:
            self.embed = Linear(spec.patch_dim(), spec.dim, bias=True)
        self.time_embed = MlpEmbedder(FREQUENCY_DIM, spec.dim)
        # The last row is the null class.
        self.label_embed = nn.Embedding(spec.num_classes + 1, spec.dim)
        if spec.is_video:
            self.fps_embed = MlpEmbedder(FREQUENCY_DIM, spec.dim)
        self.blocks = nn.ModuleDict(
            {
                str(layer): DiTBlock(spec.dim, num_heads=spec.num_heads, head_dim=spec.head_dim, ffn_dim=spec.ffn_dim)
                for layer in self.part.layers
            }
        )
        if self.part.is_last:
            self.final = FinalLayer(spec.dim, patch_dim=spec.patch_dim())

    def forward(self, inputs: Tensor, timestep_b: Tensor, label_b: Tensor, fps_b: Tensor) -> Tensor:
        """What the diffusion asks to be predicted, [b, c, f, y, x], of noisy samples of that shape.

        A part that isn't the first takes the stream [b, t, d] instead, one that isn't the last gives it.

        Args:
            inputs: noisy samples, or the stream, in the dtype to compute in.
            timestep_b: integers.
            label_b: integers; `num_classes` is the null class.
            fps_b: frames per second, integers; pictures have none, and ignore it.
        """
        x_btd = self._embedded(inputs) if self.part.is_first else inputs
        cond_bd = self._condition(timestep_b, label_b, fps_b, like=x_btd)
        for block in self.blocks.values():
            x_btd = block(x_btd, cond_bd)
        return self._grid.unpatchify(self.final(x_btd, cond_bd)) if self.part.is_last else x_btd

    def _embedded(self, x_bcfyx: Tensor) -> Tensor:
        x_btd: Tensor = self.embed(self._grid.patchify(x_bcfyx))
        return x_btd + position_table(self._grid.counts(), self.spec.dim, device=x_btd.device, dtype=x_btd.dtype)

    def _condition(self, timestep_b: Tensor, label_b: Tensor, fps_b: Tensor, *, like: Tensor) -> Tensor:
        """The sum of what the model is told [b, d], in the stream's dtype."""
        cond_bd: Tensor = self.time_embed(sinusoids(timestep_b, FREQUENCY_DIM, dtype=like.dtype))
        cond_bd = cond_bd + self.label_embed(label_b)
        if self.spec.is_video:
            cond_bd = cond_bd + self.fps_embed(sinusoids(fps_b, FREQUENCY_DIM, dtype=like.dtype))
        return cond_bd.to(like.dtype)
