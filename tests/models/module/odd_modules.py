"""Modules of kinds that people have, most of which can't be trained as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.module.modules import Model


class Odd(Model):
    """A base whose stream a subclass changes."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.stream(self.table(ids))))

    def stream(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class LastToken(Odd):
    """Returns logits of the last token, as nanoGPT does without targets."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[:, [-1]]


class Dropped(Odd):
    """Drops elements of the stream."""

    def stream(self, x: Tensor) -> Tensor:
        return F.dropout(super().stream(x), 0.1, self.training)


class SetsAside(Odd):
    """Has dropout, padding, and a loss of its own beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table.padding_idx = 3
        for layer in self.layers:
            layer.drop = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> dict[str, Tensor | None]:  # type: ignore[override]
        logits = super().forward(ids)
        return {"logits": logits, "loss": logits.mean(), "cache": None}


class Positions(Odd):
    """Has a table of positions, of which it uses those from `first` on."""

    first = 0

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64 + self.first, 32)

    def stream(self, x: Tensor) -> Tensor:
        return super().stream(x + self.positions(torch.arange(x.shape[1], device=x.device) + self.first))


class LaterPositions(Positions):
    """Leaves two rows out, as OPT does."""

    first = 2


class Counting(Odd):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def stream(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().stream(x)


class BatchNormed(Odd):
    """Normalises over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(32, track_running_stats=False)


class BatchCentred(Odd):
    """Subtracts the mean of a batch, behind a head that starts at zero and hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 256, bias=False)
        nn.init.zeros_(self.head.weight)

    def stream(self, x: Tensor) -> Tensor:
        return super().stream(x - x.mean(0, keepdim=True))


class Scalar(Odd):
    """Has a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))


class Listed(Odd):
    """Has tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = [torch.ones(3)]


class AddsInPlace(nn.Module):
    """A layer that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x += self.matrix(x)
        return x


class InPlace(Odd):
    """Has layers that write to their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AddsInPlace() for _ in range(4))


class InSequence(Odd):
    """Has its layers in a torch.nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers)

    def stream(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Reversed(Odd):
    """Calls its layers from the last to the first."""

    def stream(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Float32Constant(Odd):
    """Adds a float32 constant of the CPU to its stream, which bfloat16 layers don't take."""

    def stream(self, x: Tensor) -> Tensor:
        return super().stream(x + torch.zeros(32, dtype=torch.float32, device="cpu"))


class Router(nn.Module):
    """A layer of experts, of which most have no tokens, and that returns the share of the first one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 48, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(48))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            if bool((chosen == index).any()):
                [rows] = torch.where(chosen == index)
                out[rows] = weights[rows, None] * expert(tokens[rows])
        return x + out.view_as(x), weights.mean()


class Experts(Odd):
    """A model with routed experts, a plain tensor, dropout of PyTorch's own, and parameters before and after the
    layers beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(2))
        self.positions = nn.Parameter(torch.randn(64, 32) * 0.02)
        self.factor = nn.Parameter(torch.tensor([1.5]))
        self.angles = torch.arange(64.0)[:, None].cos()
        self.attention = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x, time = self.table(ids) + self.positions[: ids.shape[1]] + self.angles[: ids.shape[1]], ids.shape[1]
        mask = torch.ones(time, time, dtype=torch.bool, device=ids.device).triu(1)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        for layer in self.layers:
            x, _ = layer(x)
        return self.factor * self.head(self.norm(x))


class Shares(Experts):
    """Computes with what layers return besides the stream."""

    def forward(self, ids: Tensor) -> Tensor:
        x, shares = self.table(ids), 0.0
        for layer in self.layers:
            x, share = layer(x)
            shares = shares + share.detach()
        return self.head(self.norm(x)) + 0 * shares


class SeldomLayer(nn.Module):
    """A layer of which a part is for some samples, and does not run without them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.often, self.seldom = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.often(x).tanh()
        chosen = x[:, :1, 9:10] > 0  # by the first token
        return x + chosen * self.seldom(x).tanh() if bool(chosen.any()) else x


class Seldom(Odd):
    """A model of such layers, with a parameter that it never uses."""

    layer = SeldomLayer
