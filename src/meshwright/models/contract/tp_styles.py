"""How tensor parallel divides a module's parameters and activations (Shoeybi et al. 2019), as values. Torch-free.

A family names a style for paths inside its kinds; `parallel/tensor` applies them with DTensor, and the plan derives
from the same values which axes a gradient is partial over and what travels. A module without a style is replicated:
every rank of tp has all of its parameters and computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StyleKind(StrEnum):
    """What is divided."""

    COLUMN = "column"
    """A linear layer's outputs: weight and bias by rows. Its input is replicated, its output stays divided."""
    ROW = "row"
    """A linear layer's inputs: the weight by columns. Its output is summed into the stream."""
    VOCABULARY = "vocabulary"
    """An embedding by rows of its table: its output is summed into the stream."""
    HEAD = "head"
    """An output head by columns: it gathers the stream, and its logits stay divided."""
    STREAM = "stream"
    """Replicated parameters applied to the stream: to a part of its tokens under sequence parallel."""
    GATHER = "gather"
    """A module without a division of its own, whose first input is gathered from the stream for those inside."""
    DIVIDED = "divided"
    """Replicated parameters applied to what a column has divided: norms of queries and keys."""


@dataclass(frozen=True)
class Style:
    """The style of one module."""

    kind: StyleKind
    num_inputs: int = 1
    """Positional inputs of a gathering module; only the first is of the stream."""
    kept: bool = True
    """Of a row: backward needs its output. Recomputation stops before the last one that nothing keeps."""


COLUMN, ROW, VOCABULARY = Style(StyleKind.COLUMN), Style(StyleKind.ROW), Style(StyleKind.VOCABULARY)
HEAD, STREAM, DIVIDED = Style(StyleKind.HEAD), Style(StyleKind.STREAM), Style(StyleKind.DIVIDED)
FINAL_ROW = Style(StyleKind.ROW, kept=False)
"""The last row of a block whose output is only added to the stream."""


def gather(num_inputs: int = 1) -> Style:
    """A module that gathers its first input."""
    return Style(StyleKind.GATHER, num_inputs=num_inputs)


LOSS_REDUCTIONS = 3
"""All-reduces of a cross-entropy over a divided vocabulary, a number for each token: maximum, sum, and the target's."""
