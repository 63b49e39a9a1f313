"""Every page, table and error fits a terminal of 80 columns, which would otherwise break it in the middle of a word."""

from __future__ import annotations

import io
import re
import sys

import pytest

from meshwright.cli.wrapping import CODE, FIGURE, wrapped
from tests.helpers import run_folder

COLUMNS = 80


class Screen(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        return True


@pytest.fixture
def shown(here, monkeypatch):
    """Runs the command on a terminal of 80 columns, and gives the lines that stay."""

    def run(*words, code=0):
        screen = Screen()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        assert here(*words, TERM="xterm", COLUMNS=str(COLUMNS)).returncode == code, screen.getvalue()
        return [re.split(r"\r\x1b\[2K", line)[-1] for line in screen.getvalue().rstrip("\n").split("\n")]

    return run


PAGES = {
    "plan": "plan",
    "moe": "plan deepseek-v3-like",
    "experts": "plan moe-tiny mesh.dp_shard=4 mesh.ep=2 mesh.tp=2",
    "images": "plan dit-xl-2",
    "videos": "plan video-dit-xl",
    "context parallel": "plan mistral-7b mesh.cp=4",
    "packed documents": "plan llama-tiny mesh.cp=2 mesh.pp=2 data.packing=documents",
    "compressed": "plan llama3-70b mesh.tp=1 comm.gradients=loco4 comm.weights=int8 comm.ranks_per_node=8",
    "captured": "plan llama-tiny mesh.pp=2 pipeline.schedule=zb-v capture.scope=layer recompute.policy=selective",
    "float8": "plan llama3-8b float8.recipe=delayed float8.keep_first=2 mesh.pp=4",
    "diff": "plan llama-tiny --diff llama3-8b",
    "presets": "presets",
    "devices": "presets --devices",
    "preset": "presets video-dit-xl",
    "1f1b": "draw pipeline 1f1b --stages 8 --microbatches 64 --simulate",
    "dualpipe-v": "draw pipeline dualpipe-v --stages 4 --microbatches 8 --simulate",
    "capture": "draw capture zb-v --stages 4 --microbatches 16 --layers 4,3",
    "reshard": "draw reshard S0,R R,S1 --mesh 4,8 --shape 8192,8192",
    "three axes": "draw reshard S0,S1,S0 S1,S0,P --mesh 16,16,16 --shape 1048576,8192 --topology H100",
    "strided": "draw reshard SS0/4,S0,P S0@1,S1,S0@0 --mesh 4,8,2 --shape 8192,8192",
    "torchrun": "launch torchrun --nodes 2 --gpus-per-node 4 llama-tiny mesh.dp_shard=8 -o nodes.sh",
}
ERRORS = {
    "value": "run llama-tiny mesh.tp=3",
    "preset": "run no-such-preset",
    "option": "draw pipeline 1f1b --stagse 4",
    "source": "run data.source=no-such-file.txt",
    "tracker": "run train.trackers=wandbb",
    "benchmark": "bench no-such",
    "part": "bench",
    "schedule": "draw pipeline no-such",
    "checkpoint": "checkpoint ls no-such",
}
HELP = ("", "plan", "run", "prove", "report", "presets", "doctor", "bench", "draw", "draw pipeline", "draw capture",
        "draw reshard", "draw loss", "checkpoint", "checkpoint ls", "checkpoint import", "launch",
        "launch slurm", "launch kubernetes", "launch torchrun")  # fmt: skip


def words_of(command):
    return [word.replace(",", " ") if re.match(r"S?[SRP]", word) else word for word in command.split()]


def assert_fits(lines):
    assert lines
    too_long = [line for line in (CODE.sub("", line) for line in lines) if len(line) > COLUMNS]
    assert not too_long, "\n".join(too_long)


@pytest.mark.parametrize("command", PAGES.values(), ids=PAGES)
def test_pages(shown, command):
    assert_fits(shown(*words_of(command)))


@pytest.mark.parametrize("command", ERRORS.values(), ids=ERRORS)
def test_errors(shown, command):
    lines = shown(*command.split(), code=2)
    assert_fits([line for line in lines if not CODE.sub("", line).startswith(("where", "fix"))])  # these are copied
    plain = [CODE.sub("", line) for line in lines]
    assert [line.split()[0] for line in plain if line[0] != " "] == ["error", "where", "rule", "fix"]
    assert all(line[:7].strip() in ("error", "where", "rule", "fix", "") for line in plain)


@pytest.mark.parametrize("command", HELP)
def test_help(shown, command):
    lines = shown(*command.split(), "--help")
    assert_fits(lines)
    assert not any(re.search(r"\w…", line) for line in lines), "help is cut off"


def test_losses_of_runs(shown, tmp_path):
    for name in ("a-run-with-quite-a-long-name", "b"):
        run_folder(tmp_path / name, [3.0, 2.0, 1.0], "name = 'x'\n")
    assert_fits(shown("draw", "loss", "a-run-with-quite-a-long-name", "b"))


def test_a_figure_broken_from_its_unit_or_a_long_line_is_noticed():
    with pytest.raises(AssertionError):
        assert_fits(["x" * (COLUMNS + 1)])
    assert_fits(["\x1b[1m" + "x" * COLUMNS + "\x1b[0m"])
    assert FIGURE.search("0.31 GiB") and list(wrapped("a 0.31 GiB", 6)) == ["a", "    0.31 GiB"]
