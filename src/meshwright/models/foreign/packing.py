"""Find out whether a model keeps packed documents apart, given positions that restart.

Transformers makes masks of documents from `position_ids`, in models whose attention asks for them; recurrent and
convolutional layers, and masks of a model's own, don't. A small model shows it: what a document's tokens get must not
depend on the document before it.

Shapes: b batch, t time.
"""

from __future__ import annotations

import torch

from meshwright.errors import ConfigError
from meshwright.models.foreign.float64_mode import Float64Mode
from meshwright.models.foreign.origin import Origin
from meshwright.nn.attention.token_layout import TokenLayout

LENGTHS = (11, 13)
"""Tokens of the two documents."""
MAX_TOKEN = 200
TOLERANCE = 1e-9


def why_not_packed(small: Origin) -> str:
    """Return why a model's documents see each other when they are packed; an empty string if they don't."""
    try:
        difference = _difference(small)
    except ConfigError as error:
        return f"there is no small model to try it with: {error.what}"
    except Exception as error:  # a forward that takes no positions, or no restarting ones
        return f"its forward takes no positions that restart ({type(error).__name__})"
    return "" if difference <= TOLERANCE else "a document's logits depend on the document packed before it"


@torch.no_grad()
def _difference(origin: Origin) -> float:
    """Return the largest difference between a document's logits packed after another one and alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = origin.build().to(torch.float64)
        first, second = (torch.randint(3, MAX_TOKEN, (1, length)) for length in LENGTHS)
    layout = TokenLayout(sum(LENGTHS), documents=(LENGTHS,))
    with Float64Mode():
        packed = origin.call(model, torch.cat([first, second], 1), layout)
        alone = origin.call(model, second)
    return float((packed[:, LENGTHS[0] :] - alone).abs().max())
