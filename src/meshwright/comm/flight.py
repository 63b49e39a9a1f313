"""What PyTorch itself noted of the last collective it was asked for, FSDP2's and DTensor's included.

Private PyTorch names are used here and nowhere else in this room: `_dump_fr_trace_json` and `_resolve_process_group` of
`torch._C._distributed_c10d`. Checked on 2.13 with gloo; where a version has or notes less, nothing is found.
"""

from __future__ import annotations

import json

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from meshwright.comm.words import ranks_words


def last_collective() -> str | None:
    """The last collective that this process entered, in words; None if PyTorch noted none."""
    try:
        entries = json.loads(c10d._dump_fr_trace_json(True, False))["entries"]  # type: ignore[attr-defined]
        last = max(entries, key=lambda entry: int(entry["record_id"]))
        name = last["profiling_name"].partition(":")[2]
        number = last["p2p_seq_id"] if last["is_p2p"] else last["collective_seq_id"]
        shapes = ", ".join(f"{dtype.lower()} {size}" for dtype, size in
                           zip(last["input_dtypes"], last["input_sizes"], strict=False))  # fmt: skip
        ranks = dist.get_process_group_ranks(c10d._resolve_process_group(last["process_group"][0]))
    except (AttributeError, KeyError, ValueError, RuntimeError):
        return None
    of = f", of {shapes}" if shapes else ""
    return f"{name}, number {number} by PyTorch's count in the group of {ranks_words(ranks)}{of}"
