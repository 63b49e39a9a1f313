"""Find out whether what a model computes for a sample, or a packed document, depends on those beside it.

Transformers makes masks of documents from `position_ids`, in models whose attention asks for them; recurrent and
convolutional layers, and masks of a model's own, don't. Some rotary embeddings take the frequencies of all tokens from
the largest position among them. A small model shows it: what a document's tokens get must be what they get alone.

Shapes: b batch, t time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.models.foreign.float64_mode import Float64Mode
from meshwright.models.foreign.origin import Origin
from meshwright.nn.attention.token_layout import TokenLayout

MIN_LENGTH, MAX_TRIED, MAX_TOKEN = 16, 128, 200
"""Tokens of a sample that a model is tried with, at least and at most, and largest token."""
NOISE = 0.02
"""Added to parameters, of which some may start at zero and hide what they multiply."""
TOLERANCE = 1e-9


def why_not_packed(small: Origin, *, length: int, vocab_size: int = MAX_TOKEN) -> str:
    """Return why a model's documents see each other when they are packed; an empty string if they don't.

    Args:
        small: a model that is tried out with values.
        length: tokens of a sample, by which it passes the limits that it has.
        vocab_size: number of its tokens.
    """
    length = max(length, MIN_LENGTH)
    third = length // 3
    # Documents below and above the limits, and some that begin anywhere between multiples of them.
    layout = TokenLayout(length, documents=((3, length - 8, 5), (third, third + 1, length - 2 * third - 1)))
    try:
        model, ids = _model(small), _tokens(2, length, vocab_size)
        packed = _logits(small, model, ids, layout)
        for number, lengths in enumerate(layout.documents or ()):
            parts = zip(ids[number].split(lengths), packed[number].split(lengths), strict=True)
            if any(_differ(_logits(small, model, part[None]), found) for part, found in parts):
                return "a document's logits depend on the documents packed beside it"
    except Exception as error:  # a forward that takes no positions, or no restarting ones
        return f"its forward takes no positions that restart ({type(error).__name__})"
    return ""


def check_samples(origin: Origin, small: Origin, *, length: int, vocab_size: int = MAX_TOKEN) -> None:
    """Check that a sample's logits don't depend on the other samples of its batch; what can't be tried passes.

    Args:
        origin: the model, for errors.
        small: one like it that is tried out with values.
        length: tokens of a sample that it takes.
        vocab_size: number of its tokens.

    Raises:
        ConfigError: they do.
    """
    try:
        model, ids = _model(small), _tokens(2, length, vocab_size)
        together = _logits(small, model, ids)
        mixed = [_differ(_logits(small, model, one[None]), found) for one, found in zip(ids, together, strict=True)]
    except Exception:  # such as no kernel for float64
        return
    if any(mixed):
        what = f"the logits of a sample depend on the other samples of its batch in {type(model).__name__}"
        rule = "a layout and train.num_microbatches divide a batch, and don't change what is learned"
        raise origin.error(what, rule, origin.fix_samples)


@torch.no_grad()
def _model(origin: Origin) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = origin.build().to(torch.float64)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


def _tokens(num_samples: int, length: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, min(vocab_size, MAX_TOKEN), (num_samples, length), generator=generator)


@torch.no_grad()
def _logits(origin: Origin, model: nn.Module, ids_bt: Tensor, layout: TokenLayout | None = None) -> Tensor:
    with Float64Mode():
        return origin.call(model, ids_bt, layout)


def _differ(alone: Tensor, together: Tensor) -> bool:
    limit = TOLERANCE * max(1.0, float(alone.abs().max()))
    return not float((alone[0] - together).abs().max()) <= limit
