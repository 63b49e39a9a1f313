"""`meshwright draw pipeline`: text that fits, tables, pictures, the docs' gallery, clear errors; no torch anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import pytest

from meshwright.errors import ScheduleError
from meshwright.pipeline import Schedule, generate
from meshwright.pipeline.generate import ScheduleKind
from tests.helpers import meshwright, shown_error

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs/schedules"
KINDS = [kind.value for kind in ScheduleKind]
WHAT = "pipeline"
SIZE = ("--stages", 4, "--microbatches", 8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_is_drawn_as_text(draws, kind):
    lines = draws(kind, *SIZE).stdout.splitlines()
    assert lines[0].startswith(f"{kind} · 4 ranks · 8 micro-batches")
    assert [line.split()[0] for line in lines[1:5]] == list("0123")
    assert lines[5].startswith("makespan ") and len(lines) == 6
    assert max(map(len, lines)) <= 100


def test_text_is_as_wide_as_the_terminal(draws):
    wide, narrow = (draws("1f1b", *SIZE, COLUMNS=str(columns)).stdout.splitlines() for columns in (200, 40))
    assert len(wide[1]) == 2 + 33 * 2 and len(narrow[1]) == 2 + 33


def test_names_are_forgiven_case_and_underscores(draws):
    assert draws("ZB_V", *SIZE).stdout == draws("zb-v", *SIZE).stdout


def test_simulate_prints_a_row_a_rank(draws):
    lines = draws("zb-v", *SIZE, "--simulate").stdout.splitlines()
    assert "idle on the worst rank: 0 within its span, 3 of the makespan" in lines[5]
    assert lines[6].split()[:2] == ["rank", "busy"]
    rows = [line.split() for line in lines[7:]]
    assert [row[:5] for row in rows] == [[str(rank), "48", "0", "3", "4"] for rank in range(4)]
    assert all(len(row) == 7 for row in rows)


def test_receive_slots_of_1f1b(draws):
    rows = [line.split() for line in draws("1f1b", *SIZE, "--simulate").stdout.splitlines()[7:]]
    assert [int(row[4]) for row in rows] == [4, 3, 2, 1]
    for rank, row in enumerate(rows):
        assert int(row[5]) <= 4 - rank + 1


def test_costs(draws):
    times = ("--forward", 2, "--backward-input", 3, "--backward-weight", 1.5, "--latency", 0.5)
    text = draws("1f1b", "--stages", 2, "--microbatches", 2, *times).stdout
    assert "makespan 20.5 ·" in text  # both ways once, (m + p - 1) of 6.5 each, 2 transfers


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "dualpipe-v"])
def test_a_table_that_was_written_is_read_again(draws, tmp_path, kind):
    first = draws(kind, *SIZE, "--csv", "a.csv", "--json", "a.json")
    assert "table     a.csv\ntable     a.json\n" in first.stdout
    schedule = generate(kind, num_stages=4, num_microbatches=8)
    assert Schedule.from_json((tmp_path / "a.json").read_text()) == schedule
    assert Schedule.from_csv((tmp_path / "a.csv").read_text()).actions == schedule.actions
    drawn = first.stdout.splitlines()[1:6]
    for words in (("a.csv",), ("a.json", *SIZE), ("./a.csv", "--stages", 4, "--chunks", schedule.num_chunks)):
        assert draws(*words).stdout.splitlines()[1:6] == drawn


def test_a_table_on_the_standard_output_stands_alone(draws):
    schedule = generate("1f1b", num_stages=4, num_microbatches=8)
    done = draws("1f1b", *SIZE, "--simulate", "--csv", "-")
    assert done.stdout == schedule.to_csv() and "makespan 33" in done.stderr
    assert Schedule.from_json(draws("1f1b", *SIZE, "--json", "-").stdout) == schedule


def test_pictures_are_written(draws, tmp_path):
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        assert f"figure    {name}\n" in draws("dualpipe-v", *SIZE, "-o", name).stdout
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("kind", KINDS)
def test_the_docs_gallery_is_what_the_command_draws(draws, tmp_path, kind):
    draws(kind, *SIZE, "-o", "a.svg")
    shown, drawn = (GALLERY / f"{kind}.svg").read_text("utf-8"), (tmp_path / "a.svg").read_text("utf-8")
    if f"Matplotlib v{matplotlib.__version__}," in shown:
        assert drawn == shown, (
            f"meshwright draw pipeline {kind} {' '.join(map(str, SIZE))} -o docs/schedules/{kind}.svg"
        )
    else:  # another version may write the same picture in other words
        boxes = [re.findall(r'id="(rank\d+-\w+)"', text) for text in (shown, drawn)]
        assert boxes[0] == boxes[1] != []
    assert f"(schedules/{kind}.svg)" in (ROOT / "docs/pipeline.md").read_text("utf-8")


def test_the_docs_show_what_the_command_prints(draws, tmp_path):
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs/pipeline.md").read_text("utf-8"), re.DOTALL)
    command, shown = blocks[0], blocks[1]
    drawn = draws(*command.split()[3:]).stdout
    assert [line.rstrip() for line in drawn.splitlines()] == shown.splitlines()
    by_hand = (ROOT / "docs/pipeline.md").read_text("utf-8").partition("## Writing a table by hand")[2]
    make, table, use, error = re.findall(r"```\n(.*?)```", by_hand, re.DOTALL)[:4]
    draws(*make.split()[3:])
    by_hand = "".join(line for line in table.splitlines(keepends=True) if not line.startswith("#"))
    assert (tmp_path / "mine.csv").read_text() == by_hand
    (tmp_path / "mine.csv").write_text(table)
    draws(*use.split()[3:])
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(table.replace("0F0,0F1", "0F0,0f 1"), where="mine.csv")
    shown = [line.split(maxsplit=1)[1] for line in error.splitlines()]
    assert shown == [caught.value.what, caught.value.where, caught.value.rule, caught.value.fix]


def test_no_torch_and_no_matplotlib_for_text(no_torch, tmp_path):
    done = meshwright("draw", "pipeline", "1f1b", *map(str, SIZE), "--simulate", env=no_torch, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "" and "makespan 33" in done.stdout


@pytest.mark.parametrize(
    ("words", "error", "fix"),
    [
        (("1f1", *SIZE), "'1f1'", "1f1b"),
        (("zbv", *SIZE), "'zbv'", "zb-v"),
        (("gpipe", *SIZE), "'gpipe'", "f-then-b"),
        (("nothing-like-it", *SIZE), "'nothing-like-it'", ""),
        (("1f1b",), "1f1b needs the number of stages", "--stages 4 --microbatches 8"),
        (("1f1b", "--stages", 3), "1f1b needs the number of micro-batches", "--stages 3 --microbatches 8"),
        (("1f1b", "--stages", 0, "--microbatches", 8), "0 stages", ""),
        (("1f1b", "--stages", 4, "--microbatches", -1), "-1 micro-batches", ""),
        (("1f1b", *SIZE, "--chunks", 2), "1f1b with 2 chunks", "interleaved"),
        (("dualpipe-v", "--stages", 4, "--microbatches", 7), "only 7 micro-batches for 4 ranks", "8"),
        (("1f1b", *SIZE, "--latency", -1), "--latency -1", "--latency 0"),
        (("1f1b", *SIZE, "--forward", 0), "--forward 0", "--forward 1"),
        (("1f1b", *SIZE, "--backward-weight", "nan"), "--backward-weight nan", "--backward-weight 1"),
        (("1f1b", *SIZE, "--backward-input", "inf"), "--backward-input inf", "--backward-input 1"),
        (("1f1b", *SIZE, "-o", "a.pdf"), "a.pdf", "a.svg"),
        (("1f1b", *SIZE, "-o", "none/a.svg"), "folder not found: none", "mkdir -p none"),
        (("1f1b", *SIZE, "-o", "/proc/a.svg"), "can't write /proc/a.svg", "another name"),
        (("1f1b", *SIZE, "--csv", "-", "--json", "-"), "--csv - and --json - both", "--csv -"),
        (("none.csv",), "can't read none.csv", "--csv mine.csv"),
        (("./",), "can't read", ""),
    ],
)
def test_bad_input(fails, words, error, fix):
    parts = fails(*words)
    assert error in parts["error"] and fix in parts["fix"]


def test_a_table_that_can_not_be_written(here):
    for option in ("--csv", "--json"):
        done = here("draw", "pipeline", "1f1b", *SIZE, option, "none/a.csv")
        assert done.returncode == 2 and done.stdout == "" and shown_error(done.stderr)["fix"] == "mkdir -p none"


@pytest.mark.parametrize(
    ("table", "words", "error", "where"),
    [
        ("0F0,0B0\n1F0, 1K0\n", (), "'1K0' is not an action", "a.csv, line 2, column 6"),
        ("0F0,0B0\n1F0,1B0\n", ("--stages", 3), "has 2 ranks, not 3", "a.csv"),
        ("0F0,0B0\n1F0,1B0\n", ("--microbatches", 2), "has 1 micro-batches, not 2", "a.csv"),
        ("0F0,0B0\n1F0,1B0\n", ("--chunks", 2), "has 1 chunks, not 2", "a.csv"),
        ("0F0,0B0\n1F0\n", (), "", "a.csv"),
        ("0F0,0B0,0B0\n", (), "0B0", "a.csv"),
        ("0B0,0F0\n", (), "0B0", "a.csv"),
        ("0F0,1B0,0B0\n1F0\n", (), "stage 1", "a.csv"),
        ("\n# nothing\n", (), "no actions", "a.csv"),
        ("0F0,0B0\n", ("--stages", 0), "has 1 ranks, not 0", "a.csv"),
    ],
)
def test_bad_tables(fails, tmp_path, table, words, error, where):
    (tmp_path / "a.csv").write_text(table)
    parts = fails("a.csv", *words)
    assert error in parts["error"] and parts["where"].startswith(where)


def test_tables_that_are_no_text_or_no_table(fails, tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe0F0")
    assert "not UTF-8" in fails("a.csv")["error"]
    (tmp_path / "a.json").write_text('{"format": 1}')
    assert "not a pipeline table" in fails("a.json")["error"]
