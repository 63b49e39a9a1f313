"""Collectives outside comm and private names outside an adapter are caught."""

from __future__ import annotations

import pytest

from tests.house.names import collective_breaches, private_breaches
from tests.house.plant import plant

ADAPTER = '"""Shards. Private PyTorch\nnames, checked on 2.13: `_x`."""\n'

COLLECTIVES = {
    "dist": "import torch.distributed as dist\ndist.all_reduce(x)",
    "from torch": "from torch import distributed as d\nd.barrier()",
    "in full": "import torch.distributed\ntorch.distributed.reduce_scatter_tensor(x, y)",
    "by name": "from torch.distributed import all_gather_into_tensor",
    "by another name": "from torch.distributed import broadcast_object_list as tell",
    "of c10d": "from torch.distributed.distributed_c10d import all_to_all_single",
    "functional": "import torch.distributed.nn.functional as F\nF.all_gather(x)",
    "as a value": "import torch.distributed as dist\nops = [dist.isend, 1]",
    "in a function": "def f():\n    import torch.distributed as dist\n    return dist.batch_isend_irecv([])",
    "objects": "import torch.distributed as dist\ndist.gather_object(x)",
    "point to point": "import torch.distributed as dist\ndist.P2POp(f, x, 1)",
}


@pytest.mark.parametrize("text", COLLECTIVES.values(), ids=COLLECTIVES)
@pytest.mark.parametrize("path", ["train/loop.py", "mesh/groups.py", "checkpoint/store.py"])
def test_collectives_are_caught(tmp_path, path, text):
    assert len(collective_breaches(plant(tmp_path, {path: text}))) >= 1


@pytest.mark.parametrize(
    "path, text",
    [("comm/x.py", text) for text in COLLECTIVES.values()]
    + [
        ("train/loop.py", "import torch.distributed as dist\ndist.get_rank()\ndist.init_process_group()"),
        ("train/loop.py", "from meshwright.comm.collectives import all_reduce\nall_reduce(x)"),
        ("train/loop.py", "import torch\ntorch.gather(x, 0, i)\ntorch.broadcast_to(x, s)"),
        ("train/loop.py", "import torch.distributed as dist\ndist.ReduceOp.SUM"),
    ],
)
def test_what_is_no_collective_or_in_its_room_is_allowed(tmp_path, path, text):
    assert collective_breaches(plant(tmp_path, {path: text})) == []


PRIVATE = {
    "module": "import torch.distributed.tensor._utils",
    "of a private module": "from torch.distributed.fsdp._fully_shard import FSDPModule",
    "name": "from torch.distributed.tensor.placement_types import _StridedShard",
    "attribute": "import torch\ntorch._foreach_mul_(a, b)",
    "deep attribute": "import torch\ntorch.cuda._lazy_init()",
    "attribute of a class": "from torch.distributed.tensor import DTensor\nDTensor._spec",
    "of an object": "def f(x):\n    return x._local_tensor",
    "of an object, one never seen": "def f(x):\n    x._some_new_field = 1",
    "of a base class": "class A(Base):\n    def f(self):\n        return self._theirs",
    "in a function": "def f():\n    from torch._dynamo import reset",
}


@pytest.mark.parametrize("text", PRIVATE.values(), ids=PRIVATE)
def test_private_names_are_caught_outside_an_adapter(tmp_path, text):
    assert private_breaches(plant(tmp_path, {"mesh/shards.py": text}))
    assert private_breaches(plant(tmp_path, {"mesh/shards.py": ADAPTER + text})) == []


def test_a_room_has_one_adapter(tmp_path):
    breaches = private_breaches(plant(tmp_path, {"mesh/a.py": ADAPTER, "mesh/b.py": ADAPTER, "nn/a.py": ADAPTER}))
    assert len(breaches) == 1
    assert "mesh has 2 adapters" in breaches[0]


def test_an_adapter_is_imported_by_its_own_room_only(tmp_path):
    inside, outside = "from meshwright.mesh.private import x", "def f():\n    import meshwright.mesh.private"
    files = {"mesh/private.py": ADAPTER, "mesh/a.py": inside, "nn/a.py": outside}
    (breach,) = private_breaches(plant(tmp_path, files))
    assert breach.startswith("src/meshwright/nn/a.py:2 imports the adapter of another room")


def test_dunders_and_private_names_of_ours_and_of_operators_are_allowed(tmp_path):
    text = (
        "import torch\nfrom meshwright.mesh.axes import _own\ntorch.__version__\nself._own\naten._to_copy\n"
        "class A:\n    def __init__(self, other):\n        self._mine = other._mine"
    )
    assert private_breaches(plant(tmp_path, {"mesh/a.py": text})) == []
