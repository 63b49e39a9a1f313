"""The diffusion transformer (Peebles and Xie 2023, "Scalable diffusion models with transformers") as a plain module.

Denoises images or videos, conditioned on the timestep, a class label (or the null class, for classifier-free guidance;
Ho and Salimans 2022) and, for videos, the frame rate. The condition is an argument of every block, so each pipeline
stage has a replica of the condition embedders and declares them shared.

Shapes: b batch, c channels, f frames, y height, x width, t patches, d model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.models.contract.model_facts import Part
from meshwright.models.dit.block import DiTBlock, FinalLayer
from meshwright.models.dit.description import FREQUENCY_DIM, DiTSpec
from meshwright.nn.attention.module import token_contexts
from meshwright.nn.attention.token_layout import TokenLayout
from meshwright.nn.condition_embedding import MlpEmbedder, sinusoids
from meshwright.nn.dropout_add.block_dropout import BlockDropout
from meshwright.nn.linear import Linear
from meshwright.nn.patch_embedding import PatchGrid, position_table


class DiT(nn.Module):
    """Patch embedding, condition embedders, blocks and final layer, or the part of them in one pipeline stage."""

    def __init__(self, spec: DiTSpec, part: Part | None = None, *, dropout: float = 0.0, seed: int = 0) -> None:
        """Create the modules; `dropout` and `seed` are those of the blocks' branches."""
        super().__init__()
        self._drops = dropout > 0
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
                str(layer): DiTBlock(
                    spec.dim,
                    num_heads=spec.num_heads,
                    head_dim=spec.head_dim,
                    ffn_dim=spec.ffn_dim,
                    dropout=BlockDropout(dropout, seed, layer),
                )
                for layer in self.part.layers
            }
        )
        if self.part.is_last:
            self.final = FinalLayer(spec.dim, patch_dim=spec.patch_dim())

    def forward(
        self, inputs: Tensor, timestep_b: Tensor, label_b: Tensor, fps_b: Tensor, layout: TokenLayout | None = None
    ) -> Tensor:
        """Predict the diffusion target [b, c, f, y, x] from noisy samples of the same shape.

        Parts other than the first take the residual stream [b, t, d] as input; parts other than the last return it.

        Args:
            inputs: noisy samples or the residual stream, in the compute dtype.
            timestep_b: integer timesteps.
            label_b: integer class labels; `num_classes` is the null class.
            fps_b: integer frames per second; ignored for images.
            layout: placement of the patches; needed for dropout only.
        """
        x_btd = self._embed_patches(inputs) if self.part.is_first else inputs
        cond_bd = self._condition(timestep_b, label_b, fps_b, like=x_btd)
        contexts = token_contexts(
            self.blocks.values(),
            layout or TokenLayout(self.spec.num_tokens()),
            device=x_btd.device,
            dtype=x_btd.dtype,
            drops=self._drops and self.training,
        )
        for block, tokens in zip(self.blocks.values(), contexts, strict=True):
            x_btd = block(x_btd, cond_bd, tokens)
        return self._grid.unpatchify(self.final(x_btd, cond_bd)) if self.part.is_last else x_btd

    def _embed_patches(self, x_bcfyx: Tensor) -> Tensor:
        x_btd: Tensor = self.embed(self._grid.patchify(x_bcfyx))
        return x_btd + position_table(self._grid.counts(), self.spec.dim, device=x_btd.device, dtype=x_btd.dtype)

    def _condition(self, timestep_b: Tensor, label_b: Tensor, fps_b: Tensor, *, like: Tensor) -> Tensor:
        """Return the sum of the condition embeddings [b, d], in the dtype of `like`."""
        cond_bd: Tensor = self.time_embed(sinusoids(timestep_b, FREQUENCY_DIM, dtype=like.dtype))
        cond_bd = cond_bd + self.label_embed(label_b)
        if self.spec.is_video:
            cond_bd = cond_bd + self.fps_embed(sinusoids(fps_b, FREQUENCY_DIM, dtype=like.dtype))
        return cond_bd.to(like.dtype)
