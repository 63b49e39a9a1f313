"""A language model in plain PyTorch, as the family `module` trains it: nothing in it is Meshwright's."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention with normed queries and keys, and a feed-forward layer."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.norms = head_dim, nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream [b, t, d] after the block. A rank of tp has some of the heads."""
        h = self.norms[0](x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # type: ignore[no-any-return]


class TinyGpt(nn.Module):
    """Language model of `depth` blocks."""

    def __init__(self, vocab_size: int = 256, width: int = 64, depth: int = 4, max_len: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(max_len, width)
        self.blocks = nn.ModuleList(Block(width, head_dim=16) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [b, t] to logits [b, t, v]."""
        x: Tensor = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]
