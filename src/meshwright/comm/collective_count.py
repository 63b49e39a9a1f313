"""Count what this rank hands to collectives and pipeline channels in a step, by group.

Collectives of FSDP2 and DTensor are counted where they are called, so those in compiled code are not seen. Compressed
collectives are not either: they keep a count of their own (`compression`).
"""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from meshwright.comm.collective_log import group_records
from meshwright.comm.private import group_of, replaced_collectives

SEND, ALL_TO_ALL, EXCHANGE = "send", "all_to_all", "exchange"
TENSORS = ("input", "input_tensor", "tensor", "self")
"""Names of the argument that holds a collective's input."""


Sent = tuple[str, tuple[int, ...]]
"""Operation and its group: `all_gather`, `reduce_scatter`, `all_reduce`, `send`, `all_to_all` or `exchange`."""


class CollectiveBytes(Counter[Sent]):
    """Bytes by operation and group, and the CPU time that counting took."""

    cost_s = 0.0


@contextmanager
def count_collectives() -> Iterator[CollectiveBytes]:
    """Yield the bytes that this rank sends to each peer in the context, by operation and group; in all-to-alls and
    exchanges, where peers get different amounts, to all of them.

    An all-reduce counts as a reduce-scatter and an all-gather. Each collective counts as what it must send, whatever
    a backend does: gloo's reduce-scatter, for example, is an all-reduce.
    """
    found = CollectiveBytes()
    depth = 0

    def counting(op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:  # some call others
                begin = time.thread_time()
                arguments = signature.bind(*args, **kwargs).arguments
                x = next(arguments[name] for name in TENSORS if name in arguments)
                ranks = tuple(dist.get_process_group_ranks(group_of(arguments.get("group"))))
                shard = x.numel() if op == "all_gather" else -(-x.numel() // len(ranks))
                times = 2 if op == "all_reduce" else 1
                if len(ranks) > 1:
                    found[op, ranks] += times * shard * x.element_size()
                found.cost_s += time.thread_time() - begin
            depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1

        return call

    before = _own_counts()
    with replaced_collectives(counting):
        yield found
    found.update(_own_counts() - before)


def _own_counts() -> Counter[Sent]:
    """Return the bytes that our channels, all-to-alls and exchanges have sent so far."""
    found: Counter[Sent] = Counter()
    for record in group_records().values():
        found[SEND, record.ranks] += record.channel_bytes
        found[ALL_TO_ALL, record.ranks] += record.all_to_all_bytes
        found[EXCHANGE, record.ranks] += record.exchange_bytes
    return found
