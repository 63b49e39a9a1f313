"""`meshwright draw reshard`: the plan's own words, its picture, its JSON; errors whose fix works; no torch anywhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import matplotlib
import pytest

from meshwright.mesh.layout import Layout
from meshwright.reshard import Topology, plan
from meshwright.reshard.draw_plan import explain_plan
from meshwright.reshard.planner.steps import ReshardPlan
from meshwright.reshard.verify_plan import verify
from tests.helpers import meshwright

ROOT = Path(__file__).parents[2]
WHAT = "reshard"
SIZE = ("--mesh", "4,8", "--shape", "8192,8192")
PAGE, README = (ROOT / "docs/reshard.md").read_text("utf-8"), (ROOT / "README.md").read_text("utf-8")


@pytest.fixture
def prints(draws):
    """What the command prints."""
    return lambda *words: draws(*words).stdout


def planned(src: str, dst: str, mesh=(4, 8), shape=(8192, 8192), **options) -> ReshardPlan:
    return plan(Layout.parse(src, mesh, shape), Layout.parse(dst, mesh, shape), **options)


def test_it_prints_what_the_plan_explains(prints):
    assert prints(*SIZE, "S0 S1", "S1 S0") == explain_plan(planned("S0 S1", "S1 S0")) + "\n"
    assert prints(*SIZE, "S0 R", "S0 R", "--dtype", "fp32").endswith("nothing has to move\n")


def test_json_is_the_plan_alone(prints):
    text = prints(*SIZE, "S0@1 S0@0", "S0 S0", "--dtype", "fp32", "--json", "-o", "a.svg")
    read = ReshardPlan.from_json(text)
    assert read == planned("S0@1 S0@0", "S0 S0", dtype="fp32")
    verify(read)


def test_topology_and_memory_cap_reach_the_planner(prints):
    from meshwright.cluster.presets import cluster_preset

    links = Topology.of(cluster_preset("A100-80"), (4, 8))
    words = (*SIZE, "P S0", "S1 R", "--json", "--topology", "a100-80")
    assert ReshardPlan.from_json(prints(*words)) == planned("P S0", "S1 R", topology=links)
    cap = planned("S0 S1", "S1 S0").peak_bytes - 1
    for words in (str(cap), f"{cap / 2**20:.9f}MiB", f"{cap / 1e6:.6f} MB"):
        read = ReshardPlan.from_json(prints(*SIZE, "S0 S1", "S1 S0", "--json", "--memory-cap", words))
        assert read == planned("S0 S1", "S1 S0", memory_cap_bytes=cap), words


def test_pictures_are_written(prints, tmp_path):
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        out = prints("--mesh", "2x2", "--shape", "8x8", "S0 S1", "S1 S0", "-o", name)
        assert out.endswith(f"\nfigure    {name}\n")
        assert (tmp_path / name).read_bytes().startswith(start)


def test_no_torch_and_no_matplotlib_for_text(no_torch, tmp_path):
    done = meshwright("draw", "reshard", *SIZE, "S0 S1", "S1 S0", env=no_torch, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and "all-to-all" in done.stdout


WORDS = ("--mesh", "4,8", "--shape", "16,16")


@pytest.mark.parametrize(
    ("words", "error", "fix"),
    [
        ((*WORDS, "S0", "S1 S0"), "'S0' has 1 placement for 2 mesh axes", {"S0": "S0 R"}),
        ((*WORDS, "S0 R", "S0 Q"), "'Q' is not a valid placement", {"S0 Q": "S0 R"}),
        ((*WORDS, "S0 S2", "S1 S0"), "S2 shards dim 2", {"S0 S2": "S0 S1"}),
        ((*WORDS, "S0@1 S0", "S1 S0"), "have positions 1, none", {"S0@1 S0": "S0@1 S0@0"}),
        ((*WORDS, "P(med) R", "R R"), "'med' is not a reduction", {"P(med) R": "P(sum) R"}),
        ((*WORDS, "S0 R", "R S0", "--dtype", "bf17"), "'bf17' is not a dtype", {"bf17": "bf16"}),
        ((*WORDS, "S0 R", "R S0", "--topology", "H10"), "H10 is not a cluster preset", {"H10": "H100"}),
        ((*WORDS, "S0 R", "R S0", "--memory-cap", "lots"), "--memory-cap 'lots'", {"lots": "100MB"}),
        ((*WORDS, "S0 R", "R S0", "-o", "a.pdf"), "a.pdf", {"a.pdf": "a.svg"}),
        (("--mesh", "4,0", "--shape", "16,16", "S0 R", "R S0"), "--mesh '4,0'", {"4,0": "4,8"}),
        (("--mesh", "", "--shape", "16,16", "S0 R", "R S0"), "--mesh ''", {"": "4,8"}),
        (("--mesh", "4,8", "--shape", "16,-1", "S0 R", "R S0"), "--shape '16,-1'", {"16,-1": "8192,8192"}),
    ],
)
def test_bad_input_has_a_fix_that_works(fails, prints, words, error, fix):
    parts = fails(*words)
    assert error in parts["error"]
    for wrong, right in fix.items():
        assert {right, *right.split()} & {*parts["fix"].split(), parts["fix"]}
        prints(*(right if word == wrong else word for word in words))


def test_a_cap_that_nothing_fits_names_the_smallest_that_something_does(fails, prints):
    words = (*SIZE, "S0 S1", "S1 S0", "--memory-cap")
    parts = fails(*words, "1MB")
    least = re.search(r"--memory-cap (\d+)", parts["fix"])
    assert parts["where"] == "command line, --memory-cap" and least
    prints(*words, least[1])
    fails(*words, int(least[1]) - 1)


def test_the_docs_show_what_the_command_prints(prints):
    blocks = re.findall(r"```\n\$ meshwright draw reshard (.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        command, _, shown = block.partition("\n")
        assert prints(*shlex.split(command.partition(" -o")[0])) == shown, command


def test_the_docs_picture_is_what_the_command_draws(prints, tmp_path):
    command = re.search(r"meshwright draw reshard (.*-o) docs/reshard\.svg", PAGE)
    assert command, "the page has the command that draws its picture"
    prints(*shlex.split(command[1]), "a.svg")
    shown, drawn = (ROOT / "docs/reshard.svg").read_text("utf-8"), (tmp_path / "a.svg").read_text("utf-8")
    if f"Matplotlib v{matplotlib.__version__}," in shown:
        assert drawn == shown, command[0]
    else:  # another version may write the same picture in other words
        texts = [re.findall(r"<text[^>]*>([^<]*)", text) for text in (shown, drawn)]
        assert texts[0] == texts[1] != []
    assert "(reshard.svg)" in PAGE


ROW = re.compile(r"\| \((?P<mesh>[\d, ]+)\), (?P<size>[^|]+) \| (?P<src>[^|]+) → (?P<dst>[^|]+) \| (?P<rest>.+) \|")


def test_the_table_of_the_docs_has_the_planners_bytes():
    """Ours and the bound, in MB; the other planners' are as they were measured."""
    rows = ROW.findall(PAGE)
    assert len(rows) >= 9
    for mesh, size, src, dst, rest in rows:
        shape = tuple(map(int, size.split(" × ")))
        one = planned(src, dst, tuple(map(int, mesh.split(","))), shape)
        ours, bound = rest.split(" | ")[:2]
        assert [ours, bound] == [megabytes(one.bytes_received), megabytes(one.lower_bound_bytes)], (src, dst)


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g}"
