"""What a captured forward changes on the host, which a graph would not do again, is named."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.errors import CaptureError
from tests.capture.run.test_edges import Replacing, runner_of, zeros


class Counting(Replacing):
    """A layer whose forward keeps something on the host, in a place of its own for each kind."""

    total, in_class = 0, [0]

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls, self.list, self.counter = kind, 0, [], Counter()
        self.number, self.cached = itertools.count(), None

    def forward(self, x):
        return x * self.weight * getattr(self, f"of_{self.kind}")()

    def of_attribute(self):
        self.calls += 1
        return self.calls

    def of_list(self):
        self.list.append(1.0)
        return len(self.list)

    def of_counter(self):
        self.counter["calls"] += 1
        return self.counter["calls"]

    def of_iterator(self):
        return next(self.number)

    def of_class_variable(self):
        Counting.total += 1
        return Counting.total

    def of_random_numbers(self):
        return random.random()

    def of_numpy(self):
        return float(np.random.rand())

    def of_cache(self):
        """What only the first forward computes is no reason."""
        self.cached = self.cached or 2.0
        return self.cached


CALLS = [0]


class CountingElsewhere(Replacing):
    def forward(self, x):
        CALLS[0] += 1
        return x * self.weight * CALLS[0]


def counting_in_closure():
    calls = [0]

    class InClosure(Replacing):
        def forward(self, x):
            calls[0] += 1
            return x * self.weight * calls[0]

    return InClosure()


@pytest.mark.parametrize(
    "module, changed",
    [
        (Counting("attribute"), "calls"),
        (Counting("list"), "list"),
        (Counting("counter"), "counter"),
        (Counting("iterator"), "number"),
        (Counting("class_variable"), "total"),
        (Counting("random_numbers"), "Python's random numbers"),
        (Counting("numpy"), "NumPy's random numbers"),
        (CountingElsewhere(), "CALLS[0]"),
        (counting_in_closure(), "calls[0]"),
        (nn.Sequential(nn.Linear(4, 4), Counting("attribute")), "1.calls"),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_what_a_forward_changes_on_the_host_is_named(module, changed):
    """A graph would have its first value baked in."""
    with pytest.raises(CaptureError, match=re.escape(f"its forward changes {changed} on the host")):
        runner_of([module], [(zeros(3, 4),)])
    counting = next((one for one in module.modules() if isinstance(one, Counting)), None)
    assert counting is None or counting.calls == (counting.kind == "attribute"), "only the observed forward counts"


def test_what_a_forward_keeps_once_is_captured():
    module = Counting("cache")
    run = runner_of([module], [(zeros(3, 4),)])
    assert run(0, 0, torch.ones(3, 4, requires_grad=True)).unique().tolist() == [2.0]
