"""What a report says, and that it is one file of well-formed HTML that loads nothing."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from importlib import metadata

import pytest

from meshwright.cluster.presets import cluster_preset
from meshwright.config.load import load
from meshwright.errors import InputError
from meshwright.plan.cuda_memory import predict_cuda_memory
from meshwright.plan.make_plan import make_plan
from meshwright.plan.memory import library_bytes, predict_memory, predict_process_memory
from meshwright.plan.time.step_time import predict_step
from meshwright.train.report import figures
from meshwright.train.report.figures import MAX_POINTS, PALETTE, Line, chart, downsample
from meshwright.train.report.page import report
from meshwright.train.report.run_data import read_run
from meshwright.units import MIB, format_bytes
from tests.train.report.folders import write_folder

VOID = {"meta", "link", "img"}
PIPELINE = ["llama-tiny", "mesh.pp=2", "mesh.dp_shard=2", "train.num_microbatches=4", "train.lr=0.001"]


@pytest.fixture
def drawn():
    """For tests of figures."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Figures of other tests aren't drawn, which would take most of their time."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(figures, "figure_as_svg", lambda draw: "<svg><defs></defs></svg>")


class Reader(HTMLParser):
    """Elements and text of a page; every element is closed in its place."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.attributes = [], [], []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and data.strip():
            self.words.append(data.strip())

    @property
    def text(self):
        return " ".join(self.words)


def read(*folders):
    page = report(folders)
    reader = Reader(page)
    for tag, name, value in reader.attributes:
        assert name not in ("onclick", "onload") and tag != "script"
        assert name not in ("src", "href") or value.startswith(("#", "data:")), (tag, name, value)
    assert "url(" not in page and "@import" not in page
    return reader


def svg_of(image):
    """The text of a figure, given as such or by its source in a page; none of another image's."""
    kind, _, data = getattr(image, "source", image).partition(",")
    return base64.b64decode(data).decode() if "svg" in kind else ""


def test_a_run_is_told_from_its_outcome_to_its_configuration(tmp_path, drawn):
    found = read(write_folder(tmp_path / "run", PIPELINE))
    for words in (
        "llama-tiny", "complete", "40 of 40", "2.2000 bits/byte", "29.2 MB of text", "pp 2 × dp_shard 2, 4 ranks",
        "torch 2.13.0", "fingerprint", "Mean over 2 measured steps: 20, 40. Measuring took 2 ms in all, 0.05% of",
        "The first step had ended after 10.5 s; a later one takes 0.157 s.", "initial values 1.75 0.25 3.25",
        "compiling 1 0 4", "all 6 3.5 10.5", "pipeline bubble 30 30 30", "predicted 150 ms from the measured times",
        "Python and its libraries",
        "weights, inside a node", "stage 0", "def f(x):\n    return <x> & y", "step 20 00000020 removed since",
        "1 step not finite and skipped: 7.", "a <b>warning</b> & more", "rank-0.log (the last 200 of 300 lines)",
        "All-to-alls of experts on rank 0, in 40 steps: 1.00 MiB, predicted 1.00 MiB, from the load 1.00 MiB.",
    ):  # fmt: skip
        assert words in found.text, words
    changed = found.text[found.text.index("another value than in the preset llama-tiny") :]
    assert "mesh.pp 1 2" in changed and "train.lr 0.004 0.001" in changed and "model.dim 128 128" not in changed


def test_images_are_in_the_page_wherever_the_folder_is(tmp_path):
    found = read(write_folder(tmp_path / "run", ["dit-digits"]))
    images = {name: value for tag, name, value in found.attributes if tag == "img"}
    assert images["alt"] == "samples after step 20" and images["src"].startswith("data:image/png;base64,iVBOR")
    (tmp_path / "run" / "samples" / "step-20.png").unlink()
    assert "elsewhere/samples/step-20.png is missing" in read(tmp_path / "run").text


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ("stopped", "stopped as requested"),
        ("failed", "outcome failed"),
        ("failed", "rank 1 failed in step 3\nwhere  rank 1 of 2"),
        ("", "not ended: it still runs, or was killed"),
    ],
)
def test_how_a_run_ended_is_said(tmp_path, ended, words):
    assert words in read(write_folder(tmp_path / "run", PIPELINE, ended=ended, measured=False)).text


def test_a_source_tree_has_no_version(tmp_path, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert (
        "Made by Meshwright from a source tree." in read(write_folder(tmp_path / "run", PIPELINE, measured=False)).text
    )


def test_what_was_not_written_is_left_out(tmp_path):
    folder = write_folder(tmp_path / "run", PIPELINE, measured=False)
    assert "Not measured" in read(folder).text and "Predicted, of the rank with the most" in read(folder).text
    for name in ("events.jsonl", "plan.json", "metrics.jsonl"):
        (folder / name).unlink()
        assert "unknown: no events.jsonl" in read(folder).text
    assert "Curves" not in read(folder).text


def test_the_attempts_of_a_resumed_run_are_listed_and_its_last_end_counts(tmp_path):
    folder = write_folder(tmp_path / "run", PIPELINE, ended="stopped")
    lines = (folder / "events.jsonl").read_text().splitlines()
    start = json.loads(lines[0]) | {"after_step": 20}
    (folder / "events.jsonl").write_text("\n".join([*lines, json.dumps(start), '{"event": "no', ""]))
    found = read(folder).text
    assert "attempt 2 started 2026-11-25 12:00:00+00:00, after step 20" in found and "not ended" in found


def test_measurements_of_another_plan_are_not_compared_with_this_one(tmp_path):
    folder = write_folder(tmp_path / "run", PIPELINE)
    assert "Mean over 2 measured steps" in read(folder).text
    other = write_folder(tmp_path / "other", ["llama-tiny", "mesh.dp_shard=4"])
    (folder / "plan.json").write_text((other / "plan.json").read_text())
    found = read(folder).text
    assert "Not measured" in found and "sends the most; not counted" in found


def test_runs_are_compared_by_what_differs(tmp_path):
    folders = [write_folder(tmp_path / f"run-{i}", ["llama-tiny", f"train.lr={lr}"], steps=steps)
               for i, (lr, steps) in enumerate([(1e-3, 40), (2e-3, 40), (3e-3, 30)])]  # fmt: skip
    found = read(*folders)
    assert "Results Keys that differ Curves Run 1 Run 2 Run 3" in found.text
    assert "train.lr 0.001 0.002 0.003 train.steps 40 40 30" in found.text
    assert "Training loss relative to the first run" in found.text and "lr=0.002" in found.text
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and {"run-1", "run-3", "run-2-curves"} <= set(ids)
    assert {value[1:] for _, name, value in found.attributes if name == "href" and value != "data:,"} <= set(ids)


def test_runs_of_one_configuration_and_losses_in_several_units(tmp_path, drawn):
    one, other = (write_folder(tmp_path / name, ["llama-tiny"]) for name in ("one", "other"))
    assert "None: the runs have the same configuration." in read(one, other).text
    image = write_folder(tmp_path / "image", ["dit-digits"])
    images = [value for tag, name, value in read(one, image).attributes if (tag, name) == ("img", "src")]
    drawn = "".join(map(svg_of, images))
    assert ">bits/byte<" in drawn and ">squared error<" in drawn


def test_what_is_not_a_run_is_refused(tmp_path):
    folder = write_folder(tmp_path / "run", PIPELINE)
    with pytest.raises(InputError, match="is given twice"):
        report([folder, tmp_path / "." / "run"])
    with pytest.raises(InputError, match="is not a run folder: no readable config.toml"):
        report([tmp_path])
    (folder / "metrics.jsonl").write_text("damaged\n")
    with pytest.raises(InputError, match="not a step"):
        report([folder])


def test_a_long_run_is_drawn_with_few_points(tmp_path):
    points = [(float(x), float(x % 10)) for x in range(10 * MAX_POINTS)]
    assert len(downsample(points)) == MAX_POINTS and {y for _, y in downsample(points)} == {4.5}
    found = read(write_folder(tmp_path / "run", ["llama-tiny"], steps=MAX_POINTS + 1))
    assert "Each point is a mean over 2 steps." in found.text


def test_a_chart_names_itself_and_its_curves(drawn):
    image = chart([Line("a < b", [(1, 1.0), (2, 3.0)]), Line("empty", [])], title="Loss", y="bits/byte")
    assert image.alt == "Loss: a < b ends at 3" and "bits/byte" in svg_of(image)
    assert chart([Line("none", [])], title="Loss", y="y") is None
    assert "<use " in svg_of(chart([Line("one", [(5, 1.0)])], title="t", y="y")), "a point has a marker"


def test_the_colors_of_figures_follow_the_scheme_and_can_be_told_from_the_page(drawn):
    """WCAG 2.2: a contrast of 4.5 for text, and of 3 for what else is to be seen."""
    svg = svg_of(chart([Line(str(i), [(1, 1.0), (2, i)]) for i in range(7)], title="t", y="y"))
    assert "prefers-color-scheme:dark" in svg
    drawn = svg.replace(re.search("<style>:root.*?</style>", svg)[0], "")
    assert not any(color in drawn for pair in PALETTE.values() for color in pair)
    for name, pair in PALETTE.items():
        assert f"var(--{name})" in drawn or name == "idle"
        for color, page in zip(pair, ("#ffffff", "#16181c"), strict=True):
            one, other = sorted(map(luminance, (color, page)))
            assert (other + 0.05) / (one + 0.05) >= {"ink": 4.5, "grey": 4.5, "idle": 1.0}.get(name, 3.0), (name, color)


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_log_files_of_ranks_are_in_order(tmp_path):
    folder = write_folder(tmp_path / "run", PIPELINE)
    for rank in (10, 2):
        (folder / "logs" / f"rank-{rank}.log").write_text("x\n")
    assert [name for name, _ in read_run(folder).logs()] == ["rank-0.log", "rank-2.log", "rank-10.log"]


@pytest.mark.parametrize(("device", "cluster"), [("cpu", "CPU"), ("NVIDIA H200", "H200"), ("NVIDIA of 2040", "")])
def test_the_time_of_a_step_is_compared_by_part(tmp_path, device, cluster):
    folder = write_folder(tmp_path / "run", PIPELINE)
    events = (folder / "events.jsonl").read_text().replace('"device": "cpu"', f'"device": "{device}"')
    (folder / "events.jsonl").write_text(events)
    _, _, *parts = read(folder).text.split("Predicted time of a step")  # the first is in the table of contents
    section = "".join(parts).partition("Timeline of a step")[0]
    if not cluster:
        assert "no preset has a NVIDIA of 2040" in section
        return
    time = predict_step(make_plan(load(PIPELINE[0], PIPELINE[1:])), cluster_preset(cluster))
    assert f"on {cluster}, with rates of" in section and f"a step {time.total / 1e3:.3g} ms" in section


def test_memory_is_compared_by_type_and_adds_up(tmp_path):
    """Four ranks of which the last holds the most, 403 MiB: 280 before the run, and 16 of tensors that stay."""
    found, plan = read(write_folder(tmp_path / "run", PIPELINE)).text, make_plan(load(*PIPELINE[:1], PIPELINE[1:]))
    memory, total = predict_memory(plan), predict_process_memory(plan)
    stays = memory.parameters + memory.gradients + memory.optimizer + memory.buffers
    libraries = library_bytes(plan)
    for words in (
        f"Python and its libraries {format_bytes(libraries)} 0.27 GiB {280 * MIB / libraries - 1:+.1%}",
        f"gathered, activations, error feedback and holes between tensors {format_bytes(total - libraries - stays)} "
        "0.10 GiB",
        f"total {format_bytes(total)} 0.39 GiB {403 * MIB / total - 1:+.1%}",
    ):
        assert words in found, words


def test_memory_of_a_gpu_is_compared_with_its_peak(tmp_path):
    """Types are compared by what is held of each, and the total by the peak, when not all of them are."""
    folder, plan = write_folder(tmp_path / "run", PIPELINE), make_plan(load(*PIPELINE[:1], PIPELINE[1:]))
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace('"device": "cpu"', '"device": "NVIDIA H200"'))
    total, stays = 280 * MIB + predict_cuda_memory(plan).total(), predict_memory(plan)
    apart = stays.parameters + stays.gradients + stays.optimizer + stays.buffers
    for words in (
        f"gathered, activations, error feedback and workspace {format_bytes(total - 280 * MIB - apart)} 0.10 GiB",
        f"total {format_bytes(total)} 0.39 GiB {403 * MIB / total - 1:+.1%}",
    ):
        assert words in read(folder).text, words
