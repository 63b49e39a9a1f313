"""Imports that go up or sideways, and ways to torch, are caught; others are allowed."""

from __future__ import annotations

import pytest

from tests.house.floors import FLOORS, floor_breaches, graph_breaches, torch_breaches
from tests.house.plant import plant

FLOOR_BREACHES = {
    "up": ("mesh/axes.py", "from meshwright.train import loop", "imports up: meshwright.train.loop"),
    "up, plain import": ("mesh/axes.py", "import meshwright.config.load", "up: meshwright.config.load"),
    "up, renamed": ("mesh/axes.py", "import meshwright.config.load as l", "up: meshwright.config.load"),
    "up, from the package": ("mesh/axes.py", "from meshwright import train", "up: meshwright.train"),
    "up, relative": ("mesh/axes.py", "from ..train.loop import run", "up: meshwright.train.loop.run"),
    "up, relative, from an init": ("mesh/__init__.py", "from .. import train", "up: meshwright.train"),
    "up, deep room": ("nn/attention/rope.py", "from ...models import spec", "up: meshwright.models.spec"),
    "up, from floor 0": ("errors.py", "from meshwright.mesh import axes", "up: meshwright.mesh.axes"),
    "up, from the root": ("__init__.py", "from meshwright.mesh import axes", "up: meshwright.mesh.axes"),
    "sideways": (
        "data/text.py",
        "from meshwright.nn.x import X",
        "imports sideways: meshwright.nn.x",
    ),
    "sideways, high up": ("parallel/a.py", "from meshwright.capture import x", "sideways: meshwright.capture.x"),
    "up, to the benchmarks": ("cli/main.py", "from meshwright_bench import report", "up: meshwright_bench.report"),
    "in a function": ("mesh/axes.py", "def f():\n    from meshwright.train import loop", ":2 imports up"),
    "in a method": ("mesh/axes.py", "class A:\n  def f(self):\n    import meshwright.plan", ":3 imports up"),
    "for types": (
        "mesh/axes.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from meshwright.train import loop",
        ":3 imports up",
    ),
    "by name": (
        "mesh/axes.py",
        "import importlib\nimportlib.import_module('meshwright.train')",
        ":2 imports up",
    ),
    "unknown room": ("attic/box.py", "", "attic has no floor"),
    "unknown file": ("helpers.py", "", "helpers has no floor"),
    "of an unknown room": ("train/loop.py", "import meshwright.attic.box", "which has no floor"),
}


@pytest.mark.parametrize("path, text, expected", FLOOR_BREACHES.values(), ids=FLOOR_BREACHES)
def test_floor_breaches_are_caught(tmp_path, path, text, expected):
    breaches = floor_breaches(plant(tmp_path, {path: text}))
    assert len(breaches) == 1
    assert expected in breaches[0]


def test_imports_that_go_down_are_allowed(tmp_path):
    files = {
        "errors.py": "import os",
        "log.py": "from meshwright.errors import MeshwrightError",
        "mesh/axes.py": "from meshwright.errors import LayoutError\nfrom meshwright import __version__",
        "mesh/groups.py": "from . import axes\nfrom .axes import Axes\nimport torch",
        "cli/main.py": "def run():\n    from meshwright_bench import run\n    import meshwright.prove.report",
        "__main__.py": "from meshwright.cli.main import main",
    }
    assert floor_breaches(plant(tmp_path, files)) == []


def test_every_pair_of_rooms_is_judged(tmp_path):
    """An import of every room by every room: allowed exactly when its floor is lower."""
    rooms = [room for room, floor in FLOORS.items() if 0 < floor < 10]
    files = {f"{room}/all.py": "".join(f"import meshwright.{other}.all\n" for other in rooms) for room in rooms}
    forbidden = [(a, b) for a in rooms for b in rooms if a != b and FLOORS[b] >= FLOORS[a]]
    assert len(floor_breaches(plant(tmp_path, files))) == len(forbidden) > 100


@pytest.mark.parametrize(
    "line", ["graph = torch.cuda.CUDAGraph()", "torch.cuda.is_current_stream_capturing()", "with graph_region('mlp'):"]
)
def test_graph_code_in_models_is_caught(tmp_path, line):
    tree = plant(tmp_path, {"models/moe/model.py": line, "nn/x.py": f"x = 1\n{line}", "capture/run/y.py": line})
    assert [breach.split("/", 2)[2] for breach in graph_breaches(tree)] == [
        "models/moe/model.py:1 has graph code",
        "nn/x.py:2 has graph code",
    ]


TORCH_BREACHES = {
    "directly": ({"mesh/axes.py": "import torch"}, "mesh/axes.py → torch"),
    "a part of it": ({"config/schema.py": "from torch.nn import Module"}, "→ torch.nn.Module"),
    "in a try": ({"units.py": "try:\n    import torch\nexcept ImportError:\n    pass"}, "units.py → torch"),
    "in a class": ({"units.py": "class A:\n    import torch"}, "units.py → torch"),
    "through a file": (
        {"plan/time.py": "from meshwright.mesh import groups", "mesh/groups.py": "import torch"},
        "plan/time.py → mesh/groups.py → torch",
    ),
    "through two files": (
        {
            "cli/main.py": "from meshwright.train.build import build",
            "train/build.py": "import meshwright.models.llama as m",
            "models/llama.py": "from torch import nn",
        },
        "cli/main.py → train/build.py → models/llama.py → torch.nn",
    ),
    "through its room": (
        {"checkpoint/manifest.py": "", "checkpoint/__init__.py": "from .store import save",
         "checkpoint/store.py": "import torch"},
        "checkpoint/manifest.py → checkpoint/__init__.py → checkpoint/store.py → torch",
    ),
    "through another room": (
        {"plan/time.py": "from meshwright.mesh.axes import Axes", "mesh/axes.py": "",
         "mesh/__init__.py": "import torch"},
        "plan/time.py → mesh/__init__.py → torch",
    ),
    "after a cycle": (
        {"config/a.py": "from meshwright.config import b", "config/b.py": "from . import a\nimport torch"},
        "config/a.py → config/b.py → torch",
    ),
    "what imports it": ({"checkpoint/manifest.py": "import safetensors.torch"}, "→ safetensors.torch"),
    "late": ({"pipeline/draw.py": "def f():\n    import torch"}, "draw.py:2 leads to torch in a function"),
    "late, through a file": (
        {"plan/time.py": "def f():\n    import meshwright.mesh.groups", "mesh/groups.py": "import torch"},
        "plan/time.py:2 leads to torch in a function: mesh/groups.py → torch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("files, expected", TORCH_BREACHES.values(), ids=TORCH_BREACHES)
def test_ways_to_torch_are_caught(tmp_path, files, expected):
    breaches = torch_breaches(plant(tmp_path, files))
    assert any(expected in breach for breach in breaches), breaches


def test_torch_is_allowed_where_it_belongs(tmp_path):
    files = {
        "mesh/axes.py": "import math\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "mesh/groups.py": "import torch",
        "train/build.py": "import torch",
        "train/launch.py": "def start():\n    from meshwright.train import build",
        "cli/main.py": "def run():\n    from meshwright.train import build\n    import torch",
        "checkpoint/manifest.py": "from safetensors import safe_open",
    }
    assert torch_breaches(plant(tmp_path, files)) == []
