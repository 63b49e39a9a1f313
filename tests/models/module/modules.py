"""Small modules of a user's own, each with something that the family has to find out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """A layer with attention of one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None))


class Model(nn.Module):
    """A tied model whose layers come after its norm in the module, with a computed table."""

    layer: type[nn.Module] = Layer

    def __init__(self, width: int = 32, depth: int = 4, vocab_size: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.table = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(self.layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("angles", torch.arange(width).float().cos())
        nn.init.normal_(self.table.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.scale + self.angles
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class ApartModel(Model):
    """A model that keeps packed documents apart, given positions that restart."""

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        mask = None
        if position_ids is not None:
            document = (position_ids == 0).cumsum(1)
            mask = (document[:, :, None] == document[:, None, :]) & torch.ones(
                ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device
            ).tril()
        x = self.table(ids) * self.scale + self.angles
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class TogetherModel(Model):
    """A model that takes positions, and lets documents see each other."""

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Map token ids [b, t] to logits [b, t, v], whatever the positions are."""
        return super().forward(ids)


class RescaledModel(ApartModel):
    """A model that keeps documents apart, but scales all tokens by whether any document is longer than 40."""

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        longest = ids.shape[1] if position_ids is None else int(position_ids.max()) + 1
        return super().forward(ids, position_ids) * (2 if longest > 40 else 1)


class ManyTablesLayer(Layer):
    """A layer with parameters of several dims, of which not all are matrices."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.decay = nn.Parameter(torch.rand(4, width // 4))
        self.heads = nn.Parameter(torch.randn(4, width // 4, width // 4) * 0.1)
        self.joined = nn.Parameter(torch.randn(width, 4, width // 4) * 0.1)
        self.plain = nn.Parameter(torch.randn(width, width) * 0.1)
        self.first, self.second = (nn.Parameter(torch.randn(*shape) * 0.1) for shape in ((width, 2), (2, width)))
        self.query = nn.Parameter(torch.randn(4, width // 4) * 0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = super().forward(x, mask)
        x = x + self.conv(x.mT)[..., : x.shape[1]].mT
        by_head = x.unflatten(-1, (4, -1)) * torch.exp(-self.decay.exp())
        x = x + torch.einsum("bthd,hde->bthe", by_head, self.heads).flatten(2)
        x = x + torch.einsum("btd,dhe->bthe", x, self.joined).flatten(2)
        x = x + torch.einsum("bthd,hd->bth", by_head, self.query).repeat_interleave(x.shape[-1] // 4, -1)
        normed = self.plain / self.plain.norm(dim=0, keepdim=True)
        return x + x @ (normed + self.first @ self.second)


class ManyTables(Model):
    """A model whose tokens are a parameter that is indexed, and whose positions are one that is added."""

    layer = ManyTablesLayer

    def __init__(self, width: int = 32, depth: int = 2, vocab_size: int = 256) -> None:
        super().__init__(width, depth, vocab_size)
        self.rows = nn.Parameter(torch.randn(vocab_size, width) * 0.05)
        self.positions = nn.Parameter(torch.randn(1024, width) * 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows[ids] + self.table(ids) * self.scale + self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class TimeFirstLayer(Layer):
    """A layer whose stream is [t, b, d]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class TimeFirst(Model):
    """A model whose stream is [t, b, d]."""

    layer = TimeFirstLayer

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).transpose(0, 1) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(0, 1)))


class Scaled(Model):
    """A model that scales and shifts the stream between its layers, by a parameter around them."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x) * self.scale + 0.1
        return self.head(self.norm(x))


class AddingLayer(Layer):
    """A layer that takes a table, too."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x + table)


class FixedTable(Model):
    """A model whose layers all add a table that isn't trained, which a module before them looks up."""

    layer = AddingLayer

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Embedding(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.scale
        with torch.no_grad():
            fixed = self.fixed(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, fixed)
        return self.head(self.norm(x))


class ChunkedLayer(Layer):
    """A layer that takes chunks of 8 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.view(x.shape[0], -1, 8, x.shape[2])
        return super().forward(chunks.flatten(0, 1)).view_as(x)


class Chunked(Model):
    """A model whose samples are chunks of 8 tokens."""

    layer = ChunkedLayer


class ReadsDevice(Model):
    """A model that reads what its table is like."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.to(self.table.weight.device))


class Skipping(Model):
    """A model that adds the first layer's output before the last layer."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.layers[0](self.table(ids) * self.scale)
        for layer in self.layers[1:3]:
            x = layer(x)
        return self.head(self.norm(self.layers[3](x + first)))


class Averaged(Model):
    """A model whose logits are those of the mean of what all layers return."""

    def forward(self, ids: Tensor) -> Tensor:
        x, outputs = self.table(ids) * self.scale, []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return self.head(self.norm(torch.stack(outputs).mean(0)))


class OutsideResiduals(Model):
    """A model that adds the stream around its layers."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


class ListingLayer(Layer):
    """A layer that puts what it computes into a list, and adds what the first one has put there."""

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        x = super().forward(x)
        kept.append(x)
        return x + kept[0]


class Listing(Model):
    """A model whose layers keep what they compute in a list."""

    layer = ListingLayer

    def forward(self, ids: Tensor) -> Tensor:
        x, kept = self.table(ids) * self.scale, []
        for layer in self.layers:
            x = layer(x, kept)
        return self.head(self.norm(x))


class SharedLayers(Model):
    """A model whose layers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(32)] * 2)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return twice the cross-entropy of each token."""
    return 2 * F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a mean, which is no loss of each token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def no_module() -> int:
    """Return something else than a module."""
    return 3


def no_layers() -> nn.Module:
    """Return a module without a list of layers."""
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
