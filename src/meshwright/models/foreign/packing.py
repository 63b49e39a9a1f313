"""Find out whether what a model computes for a sample, or a packed document, depends on those beside it.

Transformers makes masks of documents from `position_ids`, in models whose attention asks for them; recurrent and
convolutional layers, and masks of a model's own, don't. Some rotary embeddings take the frequencies of all tokens from
the largest position among them. A small model shows it: what a document's tokens get must be what they get alone.

A third of transformers' models compute norms, softmax or rotary angles in float32 whatever their dtype, and thereby
differ by 1e-8 when a batch is merely split. Comparing needs the model's mathematics, not this rounding, so casts to
float32 become casts to float64 here and in proofs in float64.

Shapes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.models.foreign.origin import ForeignModel
from meshwright.nn.attention.mask_spec import TokenLayout

MIN_LENGTH, MAX_TRIED = 16, 128
"""Tokens of a sample that a model is tried with, at least and, if it isn't cheap, at most."""
NOISE = 0.02
"""Added to parameters, of which some may start at zero and hide what they multiply."""
TOLERANCE = 1e-9


def why_not_packed(small: ForeignModel, *, length: int) -> str:
    """Return why documents see each other in samples of a length, or an empty string if they don't."""
    length, third = max(length, MIN_LENGTH), max(length, MIN_LENGTH) // 3
    # Documents below and above the model's limits, and some that begin anywhere between multiples of them.
    documents = (3, length - 8, 5), (third, third + 1, length - 2 * third - 1)
    try:
        model, ids = float64_model(small), random_tokens(length)
        packed = _logits(small, model, ids, TokenLayout(length, documents=documents))
        pieces = ((x.split(lengths), y.split(lengths)) for x, y, lengths in zip(ids, packed, documents, strict=True))
        is_apart = all(_is_alone(small, model, *one) for pair in pieces for one in zip(*pair, strict=True))
    except Exception as error:  # a forward that takes no positions, or no restarting ones
        return f"its forward takes no positions that restart ({type(error).__name__})"
    return "" if is_apart else "a document's logits depend on the documents packed beside it"


def check_samples(origin: ForeignModel, small: ForeignModel, *, length: int) -> None:
    """Raise a ConfigError if a sample's logits depend on the others of its batch; what can't be tried passes."""
    try:
        model, ids = float64_model(small), random_tokens(length)
        is_apart = all(_is_alone(small, model, *one) for one in zip(ids, _logits(small, model, ids), strict=True))
    except Exception:  # such as no kernel for float64
        return
    if not is_apart:
        what = f"the logits of a sample depend on the other samples of its batch in {type(model).__name__}"
        rule = "a layout and train.num_microbatches divide a batch, and don't change what is learned"
        raise origin.error(what, rule, origin.fix_samples)


@torch.no_grad()
def float64_model(origin: ForeignModel) -> nn.Module:
    """Build a model in float64, whose values have noise and are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = origin.build().to(torch.float64)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


def random_tokens(length: int) -> Tensor:
    """Return two samples of token ids."""
    return torch.randint(3, 32, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _logits(origin: ForeignModel, model: nn.Module, ids_bt: Tensor, layout: TokenLayout | None = None) -> Tensor:
    with Float64Mode():
        return origin.call(model, ids_bt, layout)


def _is_alone(origin: ForeignModel, model: nn.Module, ids_t: Tensor, found: Tensor) -> bool:
    """Return whether tokens alone have the logits that were found."""
    alone = _logits(origin, model, ids_t[None])[0]
    return float((alone - found).abs().max()) <= TOLERANCE * max(1.0, float(alone.abs().max()))


NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Float64Mode(TorchFunctionMode):
    """Function mode in which every floating-point dtype that is asked for, or taken by default, is float64."""

    def __enter__(self) -> Float64Mode:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self._default)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
