"""Each checker finds seeded breaches, each with the right words, and nothing in what is allowed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.house.families import family_breaches
from tests.house.figures import MAX_FILES, MAX_MEDIAN_LINES, figure_breaches
from tests.house.floors import FLOORS, floor_breaches, graph_breaches, torch_breaches
from tests.house.names import collective_breaches, private_breaches
from tests.house.paths import machine_folders, path_breaches
from tests.house.source import Tree
from tests.house.style import style_breaches
from tests.house.where import where_breaches
from tests.house.words import word_breaches


def plant(root: Path, files: dict[str, str]) -> Tree:
    """A repository of these files; paths are inside the package but for those in `tests/` or `docs/`."""
    for path, text in files.items():
        file = root / path if path.startswith(("tests/", "docs/")) else root / "src/meshwright" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Tree.read(root)


DOC, TYPES = '"""What it is."""\n', "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
A, B = "from meshwright.mesh.b import x", "from meshwright.mesh.a import y"
DIST = "import torch.distributed as dist\n"
ADAPTER = '"""Shards. Private PyTorch\nnames, checked on 2.13: `_x`."""\n'
FAMILIES = {"models/llama/family.py": "", "models/dit/family.py": "", "models/contract/family.py": ""}
LONG = "    x = 1\n"
GRAPHS = "graph = torch.cuda.CUDAGraph()"
BREACHES = [
    (floor_breaches, {"mesh/axes.py": "from meshwright.train import loop"}, "imports up: meshwright.train.loop"),
    (floor_breaches, {"mesh/axes.py": "import meshwright.config.load as l"}, "up: meshwright.config.load"),
    (floor_breaches, {"mesh/axes.py": "from ..train.loop import run"}, "up: meshwright.train.loop.run"),
    (floor_breaches, {"mesh/__init__.py": "from .. import train"}, "up: meshwright.train"),
    (floor_breaches, {"errors.py": "from meshwright.mesh import axes"}, "up: meshwright.mesh.axes"),
    (floor_breaches, {"data/text.py": "from meshwright.nn.x import X"}, "imports sideways: meshwright.nn.x"),
    (floor_breaches, {"cli/main.py": "from meshwright_bench import report"}, "up: meshwright_bench.report"),
    (floor_breaches, {"mesh/axes.py": "class A:\n  def f(self):\n    import meshwright.plan"}, ":3 imports up"),
    (floor_breaches, {"mesh/axes.py": f"{TYPES}from meshwright.train import loop"}, ":3 imports up"),
    (floor_breaches, {"mesh/axes.py": "import importlib\nimportlib.import_module('meshwright.train')"},
     ":2 imports up"),
    (floor_breaches, {"attic/box.py": ""}, "attic has no floor"),
    (floor_breaches, {"train/loop.py": "import meshwright.attic.box"}, "which has no floor"),
    (graph_breaches, {"models/moe/model.py": GRAPHS, "capture/run/y.py": GRAPHS}, "moe/model.py:1 has graph code"),
    (graph_breaches, {"nn/x.py": "x = 1\nwith graph_region('mlp'):"}, "nn/x.py:2 has graph code"),
    (graph_breaches, {"nn/x.py": "torch.cuda.is_current_stream_capturing()"}, "nn/x.py:1 has graph code"),
    (torch_breaches, {"units.py": "try:\n    import torch\nexcept ImportError:\n    pass"}, "units.py → torch"),
    (torch_breaches, {"config/schema.py": "from torch.nn import Module"}, "→ torch.nn.Module"),
    (torch_breaches, {"cli/main.py": "from meshwright.train.build import build",
                      "train/build.py": "import meshwright.models.llama as m",
                      "models/llama.py": "from torch import nn"},
     "cli/main.py → train/build.py → models/llama.py → torch.nn"),
    (torch_breaches, {"checkpoint/manifest.py": "", "checkpoint/__init__.py": "import torch"},
     "checkpoint/manifest.py → checkpoint/__init__.py → torch"),
    (torch_breaches, {"plan/time.py": "from meshwright.mesh.axes import Axes", "mesh/axes.py": "",
                      "mesh/__init__.py": "import torch"}, "plan/time.py → mesh/__init__.py → torch"),
    (torch_breaches, {"config/a.py": "from meshwright.config import b", "config/b.py": "from . import a\nimport torch"},
     "config/a.py → config/b.py → torch"),
    (torch_breaches, {"checkpoint/manifest.py": "import safetensors.torch"}, "→ safetensors.torch"),
    (torch_breaches, {"plan/time.py": "def f():\n    import meshwright.mesh.groups", "mesh/groups.py": "import torch"},
     "plan/time.py:2 leads to torch in a function: mesh/groups.py → torch"),
    (collective_breaches, {"train/loop.py": f"{DIST}dist.all_reduce(x)"}, "train/loop.py:2"),
    (collective_breaches, {"mesh/a.py": "from torch import distributed as d\nd.barrier()"}, "mesh/a.py:2"),
    (collective_breaches, {"mesh/a.py": "from torch.distributed import broadcast_object_list as tell"}, "mesh/a.py:1"),
    (collective_breaches, {"mesh/a.py": "import torch.distributed.nn.functional as F\nF.all_gather(x)"}, "mesh/a.py:2"),
    (collective_breaches, {"mesh/a.py": f"{DIST}ops = [dist.isend, 1]"}, "mesh/a.py:2"),
    (collective_breaches, {"mesh/a.py": f"{DIST}dist.P2POp(f, x, 1)"}, "mesh/a.py:2"),
    (private_breaches, {"mesh/a.py": "import torch.distributed.tensor._utils"}, "mesh/a.py:1 uses torch.distributed"),
    (private_breaches, {"mesh/a.py": "from torch.distributed.fsdp._fully_shard import FSDPModule"}, "mesh/a.py:1"),
    (private_breaches, {"mesh/a.py": "import torch\ntorch.cuda._lazy_init()"},
     "mesh/a.py:2 uses torch.cuda._lazy_init"),
    (private_breaches, {"mesh/a.py": "def f(x):\n    return x._local_tensor"}, "mesh/a.py:2 uses ._local_tensor"),
    (private_breaches, {"mesh/a.py": "class A(Base):\n    def f(self):\n        return self._theirs"}, "a.py:3"),
    (private_breaches, {"mesh/a.py": ADAPTER, "mesh/b.py": ADAPTER, "nn/a.py": ADAPTER}, "mesh has 2 adapters"),
    (private_breaches, {"mesh/private.py": ADAPTER, "mesh/a.py": "from meshwright.mesh.private import x",
                        "nn/a.py": "def f():\n    import meshwright.mesh.private"},
     "nn/a.py:2 imports the adapter of another room"),
    (style_breaches, {"mesh/a.py": DOC + "x = 1\n" * 600}, "is 601 lines long"),
    (style_breaches, {"mesh/a.py": f"{DOC}class A:\n  async def g(self):\n{LONG * 60}"}, "g is 61 lines"),
    (style_breaches, {"tests/test_a.py": f"def test_f():\n{LONG * 80}"}, "test_f is 81 lines long"),
    (style_breaches, {"tests/test_a.py": "def f():\n    global x, y\n"}, "has `global x, y`"),
    (style_breaches, {"mesh/a.py": f"{DOC}def f():\n    print('x')\n"}, ":3 calls print"),
    (style_breaches, {"mesh/__init__.py": "# What it is.\nx = 1\n"}, "no module docstring"),
    (style_breaches, {"mesh/a.py": f"{DOC}x = 1  # TODO: later\n"}, ":2 leaves an open end"),
    (family_breaches, {**FAMILIES, "train/run.py": "from meshwright.models.llama.module import X"}, "the family llama"),
    (family_breaches, {**FAMILIES, "plan/make.py": "Llama3Rope = 1"}, "plan/make.py:1 names the family Llama"),
    (family_breaches, {**FAMILIES, "config/a.py": "if kind == 'dit': pass"}, "config/a.py:1 names the family dit"),
    (family_breaches, {**FAMILIES, "models/dit/rules.py": "# as a llama"}, "models/dit/rules.py:1 names the family"),
    (family_breaches, {**FAMILIES, "models/contract/facts.py": "LLAMA = 1"}, "facts.py:1 names the family"),
    (family_breaches, {**FAMILIES, "plan/a.py": '    IMAGES = "dit"'}, "plan/a.py:1 names the family"),
    (figure_breaches, {"mesh/a.py": A, "mesh/b.py": f"def f():\n    {B}"}, "import cycle: meshwright.mesh."),
    (figure_breaches, {"mesh/a.py": A, "mesh/b.py": f"{TYPES}{B}"}, "import cycle: meshwright.mesh."),
    (figure_breaches, {"mesh/a.py": A, "mesh/b.py": "import meshwright.nn.c", "nn/c.py": B}, "import cycle: "),
    (figure_breaches, {"mesh/a.py": "from meshwright.nn import x", "nn/__init__.py": B}, "import cycle: "),
    (figure_breaches, {f"mesh/a{n}.py": "" for n in range(MAX_FILES + 1)}, f"mesh has {MAX_FILES + 1} files side by"),
    (figure_breaches, {"mesh/a.py": "def f(): ...\n" + f"def g():\n{LONG * MAX_MEDIAN_LINES}" * 2},
     "half of all functions"),
    *((word_breaches, {"docs/page.md": f"Here {phrase}.\n"}, "docs/page.md:1 says") for phrase in (
        "ranks hold whole copies", "the tensor lies as Shard(0)", "a part of a sum", "weight gradients are put off",
        "gradients are added up", "it is handed on", "plans each call anew", "the pictures of a run",
        "a breach of a rule", "a mended operator", "waited in vain in send", "x.toml is no file", "a whole number",
        "cut into shards", "a rank sends 4.76 MiB a step", "1 ranks")),
    (word_breaches, {"x.py": f'{DOC}x = "waited in vain"\n'}, "src/meshwright/x.py:2 says"),
    *((word_breaches, {"x.py": f"{DOC}x = {text}\n"}, "x.py:2 says") for text in (
        'f"{len(x)} ranks"', 'f"and {len(x) - 1} more ranks failed"', 'f"{len(x)} key/value heads"')),
]  # fmt: skip
SEVERAL = (torch_breaches, collective_breaches, private_breaches)
"""Of one import they may name the way to it, and each of its files, too."""


@pytest.mark.parametrize(("checker", "files", "expected"), BREACHES)
def test_a_breach_is_caught(tmp_path, checker, files, expected):
    breaches = checker(plant(tmp_path, files))
    assert any(expected in breach for breach in breaches), breaches
    assert len(set(breaches)) == 1 or checker in SEVERAL


ALLOWED = [
    (floor_breaches, {"log.py": "from meshwright.errors import MeshwrightError", "mesh/groups.py": "from . import axes",
                      "mesh/axes.py": "from meshwright import __version__",
                      "cli/main.py": "def run():\n    from meshwright_bench import run\n    import meshwright.prove.a",
                      "__main__.py": "from meshwright.cli.main import main"}),
    (torch_breaches, {"mesh/axes.py": f"{TYPES}import torch", "mesh/groups.py": "import torch",
                      "train/build.py": "import torch", "cli/main.py": "def run():\n    import meshwright.train.build",
                      "checkpoint/manifest.py": "from safetensors import safe_open"}),
    (collective_breaches, {"comm/x.py": f"{DIST}dist.all_reduce(x)", "train/a.py": f"{DIST}dist.get_rank()",
                           "train/b.py": "from meshwright.comm.collectives import all_reduce\nall_reduce(x)",
                           "train/c.py": f"import torch\ntorch.gather(x, 0, i)\n{DIST}dist.ReduceOp.SUM"}),
    (private_breaches, {"nn/a.py": f"{ADAPTER}def f(x):\n    return x._local_tensor",
                        "mesh/a.py": "import torch\nfrom meshwright.mesh.axes import _own\ntorch.__version__\nself._own"
                        "\naten._to_copy\nclass A:\n    def __init__(self, other):\n        self._mine = other._mine"}),
    (style_breaches, {"mesh/a.py": f"{DOC}def f():\n{LONG * 59}" + "y = 1\n" * 339, "mesh/_private.py": "x = 1\n",
                      "mesh/b.py": f"{DOC}# TODO(#12): wait\n# see https://x.org/1 TODO\nt = 'TODO'\n",
                      "cli/main.py": f"{DOC}print('x')\n", "tests/test_a.py": "print('x')\n"}),
    (family_breaches, {**FAMILIES, "config/presets/llama-tiny.toml": "", "config/presets/dit-digits.toml": "",
                       "config/load.py": "DEFAULT = 'llama-tiny'  # or dit-digits",
                       "models/llama/a.py": "class Llama: 1",
                       "nn/a.py": "# conditions, additions, edited",
                       "meshwright_bench/benchmarks.py": '    A = "dit"\n'}),
    (figure_breaches, {"mesh/a.py": A, "mesh/b.py": "import meshwright.nn.c", "nn/c.py": ""}),
    (figure_breaches, {f"mesh/a{n}.py": "def f(): ...\n" for n in range(MAX_FILES)}),
    (word_breaches, {"x.py": DOC + "".join(f"x = {text}\n" for text in (
        'f"{counted(len(x), 1)}"', 'f"{n} of {len(x)} ranks"', 'f"{len(x)} has"', 'f"{4 * 2} ranks"')),
        "docs/page.md": "replicated, placed as Shard(0), 11 ranks, 1 rank, cut off, a step of the plan, violation\n"
        "4.8 MiB per step, one image, the first file, sums are partial"}),
]  # fmt: skip


@pytest.mark.parametrize(("checker", "files"), ALLOWED)
def test_what_is_right_is_allowed(tmp_path, checker, files):
    assert checker(plant(tmp_path, files)) == []


def test_every_pair_of_rooms_is_judged(tmp_path):
    """An import of every room by every room: allowed exactly when its floor is lower."""
    rooms = [room for room, floor in FLOORS.items() if 0 < floor < 10]
    files = {f"{room}/all.py": "".join(f"import meshwright.{other}.all\n" for other in rooms) for room in rooms}
    forbidden = [(a, b) for a in rooms for b in rooms if a != b and FLOORS[b] >= FLOORS[a]]
    assert len(floor_breaches(plant(tmp_path, files))) == len(forbidden) > 100


AXES = "class Axes:\n    pp: int = 1\n    def rank(self): ...\nNAMES = 1\nPAIR: int = 2\ndef build(): ...\n"
GOOD_ROW = (
    "| What are axes? | `src/meshwright/mesh/axes.py` | `Axes`, `Axes.rank`, `Axes.pp`, `NAMES`, `PAIR`, `build()` |"
)
DATA = "| What is measured? | `src/meshwright/mesh/data.toml` | all of it |"


def where(tmp_path: Path, *rows: str) -> list[str]:
    text = "# Where\n\n| question | file | symbol |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    files = {"mesh/axes.py": AXES, "mesh/data.toml": "", "errors.py": "", "nn/__init__.py": "", "docs/where.md": text}
    return where_breaches(plant(tmp_path, files))


def test_rows_that_point_somewhere_are_right_and_every_room_has_one(tmp_path):
    assert where(tmp_path, GOOD_ROW, DATA) == []
    assert where(tmp_path) == ["docs/where.md has no row for the room mesh"]
    (tmp_path / "docs/where.md").unlink()
    assert where_breaches(Tree.read(tmp_path)) == ["docs/where.md is missing"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GOOD_ROW.replace("axes.py", "axis.py"), "axis.py, which does not exist"),
        (GOOD_ROW.replace("`NAMES`", "`gone`"), "names gone, which"),
        (GOOD_ROW.replace("Axes.pp", "Axes.size"), "names Axes.size, which"),
        (GOOD_ROW.replace("`build()`", "`build.rank`"), "names build.rank, which"),
        (GOOD_ROW.replace("`src/meshwright/mesh/axes.py`", "src/meshwright/mesh/axes.py"), "is not a row"),
        (DATA.replace("data.toml", "axes.py"), "names no symbol"),
        (DATA.replace("all of it", "`Axes`"), "which is not Python"),
    ],
)
def test_rows_that_point_at_nothing_are_caught(tmp_path, row, expected):
    (breach,) = where(tmp_path, GOOD_ROW, row)
    assert breach.startswith("docs/where.md:6 ") and expected in breach


FOLDERS = {"the repository": "code/root", "beside it": "code", "home": "home/ada", "an environment": "envs/ours"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository on a machine of its own, which is under `tmp_path`."""
    monkeypatch.setenv("HOME", str(tmp_path / FOLDERS["home"]))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / FOLDERS["an environment"]))
    root = tmp_path / FOLDERS["the repository"]
    root.mkdir(parents=True)
    return root


@pytest.mark.parametrize(("folder", "end"), list(zip(FOLDERS, ("", "/.cache/x.py", ": as it is", ""), strict=True)))
@pytest.mark.parametrize("with_git", [True, False])
def test_paths_of_one_machine_are_caught(root, tmp_path, folder, end, with_git):
    if with_git:
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        (root / ".gitignore").write_text("runs/\n")
    own, home = tmp_path / FOLDERS[folder], tmp_path / FOLDERS["home"]
    others = f"src{own}/x ~{own}/x ${{HOME}}{own}\n{home}m/x {home}-2\n{tempfile.gettempdir()}/x\n#!/usr/bin/env bash\n"
    plant(root, {"docs/a.md": f"one\nsee `{own}{end}`\n", "docs/b.md": others})
    (root / "runs").mkdir()
    (root / "runs/log.txt").write_text(f"{own}{end}")
    (root / "docs/picture.png").write_bytes(b"\xff\xfe" + f"{own}{end}".encode())
    assert path_breaches(root) == [f"docs/a.md:2 names {own}, of one machine"]


def test_folders_that_every_machine_has_are_nobodys(root, tmp_path, monkeypatch):
    assert machine_folders(root) == {tmp_path / folder for folder in FOLDERS.values()}
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(tempfile, "tempdir", str(root.parent))
    monkeypatch.setenv("HOME", "/")
    assert machine_folders(root) == {root}
