"""Find out whether a type of models keeps packed documents apart, given positions that restart, on a small one.

Transformers makes masks of documents from `position_ids`, in models whose attention asks for them; recurrent and
convolutional layers, and masks of a model's own, don't. A small model of the type shows it: what a document's tokens
get must not depend on the document before it.

Shapes: b batch, t time.
"""

from __future__ import annotations

import torch

from meshwright.errors import ConfigError
from meshwright.models.hf import private
from meshwright.models.hf.build_model import build_model, load_config
from meshwright.models.hf.float64_mode import Float64Mode
from meshwright.models.hf.source import Source

LENGTHS = (11, 13)
"""Tokens of the two documents."""
TOLERANCE = 1e-9


def why_not_packed(model_type: str) -> str:
    """Return why documents of a type of models see each other when they are packed; an empty string if they don't."""
    try:
        difference = _difference(model_type)
    except ConfigError as error:
        return f"there is no small {model_type} to try it with: {error.what}"
    except Exception as error:  # a forward that takes no positions, or no restarting ones
        return f"its forward takes no positions that restart ({type(error).__name__})"
    return "" if difference <= TOLERANCE else "a document's logits depend on the document packed before it"


@torch.no_grad()
def _difference(model_type: str) -> float:
    """Return the largest difference between a document's logits packed after another one and alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(load_config(Source(model_type))).to(torch.float64)
        first, second = (torch.randint(3, 200, (1, length)) for length in LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with Float64Mode():
        packed = private.logits(model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False))
        alone = private.logits(model(input_ids=second, use_cache=False))
    return float((packed[:, LENGTHS[0] :] - alone).abs().max())
