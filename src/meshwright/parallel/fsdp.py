"""What FSDP2 has no public call for.

Private PyTorch names are used here and nowhere else in this room: `FSDPModule._get_fsdp_state` and
`_root_post_backward_final_callback`. Checked on 2.13; `torch.distributed.pipelining` of 2.11 calls the same.
"""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule


def finish_backward(root: FSDPModule) -> None:
    """Do what FSDP2 does at the end of a backward, outside of one.

    Every unit whose backward is not under way adds its unsharded gradient to what it has, and, if its sync is on,
    reduces all of it; then the reductions are waited for.
    """
    state = root._get_fsdp_state()
    state._root_post_backward_final_callback()
