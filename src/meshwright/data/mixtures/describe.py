"""Describe a mixture for people: its sources with their weights, sizes and epochs. Torch-free."""

from __future__ import annotations

from meshwright.data.mixtures.mixture import Mixture
from meshwright.data.mixtures.mixture_order import MixtureOrder
from meshwright.data.mixtures.shares import ONE
from meshwright.data.sampler import SampleOrder
from meshwright.units import counted


def describe(mixture: Mixture, order: SampleOrder, *, num_samples: int) -> str:
    """Return a line for a mixture and one for each source.

    Args:
        mixture: the mixture.
        order: order of its samples.
        num_samples: samples of the run.
    """
    assert isinstance(order, MixtureOrder), "a mixture has an order of its own"
    lines = [f"mixture of {counted(len(mixture.sources), 'source')}"]
    for corpus, share, size, number in zip(
        mixture.sources, mixture.shares, order.sizes, order.num_read(num_samples), strict=True
    ):
        title, *more = corpus.description.split("\n")
        lines.append(f"  {share / ONE:6.2%}  {title}; {_epochs(number / size)} in this run")
        lines += [f"          {line.strip()}" for line in more]
    return "\n".join(lines)


def _epochs(number: float) -> str:
    if number < 0.001:
        return "under 0.001 epochs"
    digits = f"{number:.2g}" if number < 10 else f"{number:,.0f}"
    return f"{digits} epoch{'' if digits == '1' else 's'}"
