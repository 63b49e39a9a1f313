"""What PyTorch has no public call for: its notes of the last collective, and the ranks that FSDP2 shards a module over.

Private PyTorch names are used here and nowhere else in this room: `_dump_fr_trace_json` and `_resolve_process_group` of
`torch._C._distributed_c10d`, and FSDP2's `FSDPModule._get_fsdp_state`, `_fsdp_param_group`, `_is_hsdp` and
`_reduce_scatter_process_group`. Checked on 2.13 with gloo. Where a version notes less of its collectives, nothing is
found.
"""

from __future__ import annotations

import json

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.message_format import ranks_words


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


def shard_group(module: FSDPModule) -> ProcessGroup | None:
    """The ranks that an FSDP2 module's gradients are reduce-scattered over.

    None for a module without parameters of its own, and for one with replicas of its shards (HSDP).
    """
    own = module._get_fsdp_state()._fsdp_param_group
    return None if own is None or own._is_hsdp else own._reduce_scatter_process_group
