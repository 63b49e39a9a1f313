"""Modules of a user's own whose output is, or only seems to be, what their head returns."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Plain(nn.Module):
    """Returns its head's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))


class InPlace(Plain):
    """Scales logits in place."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        logits *= 3.0
        return logits


class Twice(Plain):
    """Calls its head twice."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(ids)
        return self.head(x + self.head(x).softmax(-1).amax(-1, keepdim=True))


class Hooked(Plain):
    """Has a hook that scales logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(lambda module, inputs, out: 3 * out)


class Replaced(Plain):
    """Has a head whose forward is another."""

    def __init__(self) -> None:
        super().__init__()
        self.head.forward = partial(scaled, self.head)


def scaled(head: nn.Linear, x: Tensor) -> Tensor:
    """Logits, scaled."""
    return 3 * nn.functional.linear(x, head.weight, head.bias)


class Shaped(Plain):
    """Looks at the shape of logits."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        assert logits.shape[:2] == ids.shape
        return logits


class Masked(Plain):
    """Masks padding of the vocabulary."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        logits[..., 200:] = -1e4
        return logits


class Parameter(Plain):
    """Scales logits by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale * self.head(self.hidden(ids))


class OfToken(Plain):
    """Centres a token's logits, which is not elementwise."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        return logits - logits.mean(-1, keepdim=True)


class Shadowed(Plain):
    """Has a head of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Scaled(16, 256)


class Scaled(nn.Linear):
    """A linear layer that scales its result."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Watched(Plain):
    """Has a hook that scales what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, inputs, out: 3 * out)


class Capped(Plain):
    """Caps logits."""

    def forward(self, ids: Tensor) -> Tensor:
        return 30.0 * torch.tanh(self.head(self.hidden(ids)) / 30.0)
