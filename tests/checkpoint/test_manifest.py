"""A manifest notices every change to every file, and names it; files are written whole, whatever the system does."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint import atomic_directory, manifest, save_load
from meshwright.checkpoint.manifest import DurableFile, FileEntry, hash_file, read_sidecars, write_file
from meshwright.errors import CheckpointError
from meshwright.models.decoder.description import RopeScaling
from meshwright.models.llama.family import LlamaSpec
from meshwright.plan.rules import load
from tests.helpers import alternatives

FILES = {"layout.json": b'{"a": [1, 2]}\n', "rank-00000.safetensors": bytes(range(256)), "rank-00001.safetensors": b""}
SPEC = LlamaSpec(4, 128, 4, 2, 352, 256, 32, rope_scaling=RopeScaling())
RUN = {"config": {"lr": 3e-3, "name": "été ∞"}, "skipped": 0, "note": None}
EVERY_FILE = ["manifest.json", *FILES]


def make(root, step, *, model=None, files=FILES):
    temporary = atomic_directory.begin(root, step)
    entries = {name: write_file(temporary / name, content) for name, content in files.items()}
    return atomic_directory.commit(temporary, step=step, model=model or SPEC.identity(), run=RUN, files=entries)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A valid checkpoint that nobody changes."""
    return make(tmp_path_factory.mktemp("original"), 7)


@pytest.fixture
def checkpoint(original, tmp_path):
    """A copy to damage."""
    return shutil.copytree(original, tmp_path / original.name)


@pytest.fixture(scope="module")
def shared(original, tmp_path_factory):
    """A copy for hypothesis to damage and repair."""
    return shutil.copytree(original, tmp_path_factory.mktemp("shared") / original.name)


def damage_of(path):
    with pytest.raises(CheckpointError) as caught:
        manifest.verify(path)
    return caught.value


def test_an_undamaged_checkpoint_says_what_it_is(original):
    found = manifest.verify(original)
    assert (found.path, found.step, found.run) == (original, 7, RUN)
    assert found == manifest.read_manifest(original)
    assert {name: entry.num_bytes for name, entry in found.files.items()} == {n: len(c) for n, c in FILES.items()}
    assert found.num_bytes() == sum(map(len, FILES.values()))
    manifest.check_model(found, SPEC.identity())


@pytest.mark.parametrize("name", ["manifest.json", "layout.json", "rank-00000.safetensors"])
@given(data=st.data())
def test_any_changed_byte_is_noticed_and_its_file_named(shared, name, data):
    content = (shared / name).read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[position] ^= data.draw(st.integers(1, 255))
    (shared / name).write_bytes(changed)
    try:
        error = damage_of(shared)
    finally:
        (shared / name).write_bytes(content)
    assert name in error.what and "changed" in error.what
    assert str(shared) in error.where


def test_every_flipped_bit_of_the_manifest_is_noticed(original, monkeypatch):
    content = (original / "manifest.json").read_bytes()
    for position in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            monkeypatch.setattr(Path, "read_bytes", lambda _, changed=changed: bytes(changed))
            with pytest.raises(CheckpointError, match="manifest.json"):
                manifest.read_manifest(original)


@pytest.mark.parametrize("name", ["layout.json", "rank-00000.safetensors"])
@given(data=st.data())
def test_truncation_is_told_in_bytes(shared, name, data):
    content = (shared / name).read_bytes()
    left = data.draw(st.integers(0, len(content) - 1))
    (shared / name).write_bytes(content[:left])
    try:
        error = damage_of(shared)
    finally:
        (shared / name).write_bytes(content)
    assert error.what == f"{name} is truncated: {left} of {len(content)} bytes"


@given(left=st.integers(0, 10_000))
def test_a_truncated_manifest_is_noticed(shared, left):
    content = (shared / "manifest.json").read_bytes()
    (shared / "manifest.json").write_bytes(content[: left % len(content)])
    try:
        assert "manifest.json" in damage_of(shared).what
    finally:
        (shared / "manifest.json").write_bytes(content)


@pytest.mark.parametrize("name", EVERY_FILE)
def test_missing_files_appended_bytes_and_directories_are_noticed(checkpoint, name):
    content = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(content + b"\n")
    assert name in damage_of(checkpoint).what
    (checkpoint / name).unlink()
    assert damage_of(checkpoint).what.startswith(f"{name} is missing")
    (checkpoint / name).mkdir()
    assert name in damage_of(checkpoint).what


def test_swapped_files_are_noticed(tmp_path):
    path = make(tmp_path, 1, files={"a": b"12", "b": b"34"})
    (path / "a").rename(path / "c")
    (path / "b").rename(path / "a")
    (path / "c").rename(path / "b")
    assert damage_of(path).what.startswith("a has changed")


def test_a_file_that_nobody_listed_is_ignored(checkpoint):
    (checkpoint / "notes.txt").write_text("mine")
    manifest.verify(checkpoint)


def test_a_manifest_of_another_format_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
    assert "format 1" in damage_of(checkpoint).what


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path):
    assert manifest.list_checkpoints(tmp_path / "nowhere") == []
    steps = [3, 20, 100, 123456789]
    for step in reversed(steps):
        make(tmp_path, step)
    for other in (".tmp-00000004", ".del-00000005", "best", "12", "00000006.bak"):
        (tmp_path / other).mkdir()
    assert [path.name for path in manifest.list_checkpoints(tmp_path)] == [f"{step:08d}" for step in steps]


def test_the_newest_valid_one_is_taken_and_the_reasons_for_the_others_told(tmp_path):
    assert manifest.newest_valid(tmp_path) == (None, [])
    one, two, three, four = (make(tmp_path, step) for step in (1, 2, 3, 4))
    (four / "manifest.json").unlink()
    (three / "layout.json").write_bytes(FILES["layout.json"].replace(b"1", b"2"))
    found, passed_over = manifest.newest_valid(tmp_path)
    assert found == two
    assert [path for path, _ in passed_over] == [four, three]
    assert "manifest.json is missing" in passed_over[0][1]
    assert "layout.json has changed content" in passed_over[1][1]
    # The quick look sees sizes only.
    assert manifest.newest_complete(tmp_path) == three
    (two / "layout.json").unlink()
    assert manifest.newest_valid(tmp_path)[0] == one


@pytest.mark.parametrize(
    ("change", "field", "here", "there"),
    [
        ({"dim": 256}, "dim", "256", "128"),
        ({"kind": "moe"}, "kind", '"moe"', '"llama"'),
        ({"tie_embeddings": True}, "tie_embeddings", "true", "false"),
        ({"rope_scaling": None}, "rope_scaling", "not set", "8.0"),
        ({"rope_scaling": {**SPEC.identity()["rope_scaling"], "factor": 32.0}}, "rope_scaling.factor", "32.0", "8.0"),
        ({"new_field": 3}, "new_field", "3", "not set"),
    ],
)
def test_another_model_is_refused_by_its_first_difference(original, change, field, here, there):
    with pytest.raises(CheckpointError) as caught:
        manifest.check_model(manifest.read_manifest(original), SPEC.identity() | change)
    assert f"model.{field}" in caught.value.what
    assert f"{here} here" in caught.value.what and there in caught.value.what
    assert f"model.{field}" in caught.value.fix


SCALED = "model.rope_scaling.factor=4.0"


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        ([], [SCALED]),
        ([SCALED], []),
        ([SCALED], ["model.rope_scaling.factor=2.0", "model.rope_scaling.original_seq_len=99"]),
        (["model.dim=64", "model.tie_embeddings=true", "model.norm_eps=1e-30"], ["model.num_layers=3"]),
        (["model.head_dim=64"], []),
    ],
)
def test_the_fix_makes_it_the_checkpoint_s_model(tmp_path, saved, here):
    path = make(tmp_path, 1, model=load(None, saved).model.spec().identity())
    with pytest.raises(CheckpointError) as caught:
        manifest.check_model(manifest.read_manifest(path), load(None, here).model.spec().identity())
    [words, *_] = alternatives(caught.value.fix)
    assert not {word.partition("=")[0] for word in words} & {"model.vocab_size", "model.num_heads"}
    manifest.check_model(manifest.read_manifest(path), load(None, [*here, *words]).model.spec().identity())


def test_the_fix_for_another_kind_names_its_preset(tmp_path):
    path = make(tmp_path, 1, model=load(None).model.spec().identity())
    with pytest.raises(CheckpointError, match="model.kind is") as caught:
        manifest.check_model(manifest.read_manifest(path), load("dit-digits").model.spec().identity())
    assert caught.value.fix.startswith("use a preset of a llama, with ")
    [words, *_] = alternatives(caught.value.fix)
    manifest.check_model(manifest.read_manifest(path), load("llama3-8b", words).model.spec().identity())


def test_a_field_that_is_not_set_is_as_good_as_none(tmp_path):
    old = make(tmp_path, 1, model={name: v for name, v in load(None).model.spec().identity().items() if v is not None})
    manifest.check_model(manifest.read_manifest(old), load(None).model.spec().identity() | {"new_field": None})


def test_what_json_cannot_hold_is_refused_by_name(tmp_path):
    for run in ({"loss": float("nan")}, {"folder": tmp_path}):
        with pytest.raises(CheckpointError, match="JSON"):
            manifest.encode(step=1, model={}, run=run, files={})


def test_reading_checkpoints_needs_no_torch():
    rooms = "manifest, atomic_directory"
    code = f"import sys\nfrom meshwright.checkpoint import {rooms}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})


@given(parts=st.lists(st.binary(max_size=40)), chunk=st.integers(1, 16), most=st.integers(1, 16))
def test_what_was_written_is_there_and_was_hashed(tmp_path_factory, parts, chunk, most):
    path = tmp_path_factory.mktemp("durable") / "file"
    real = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "CHUNK_BYTES", chunk)
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:most]))  # as a system may: not all at once
        with DurableFile(path) as file:
            for part in parts:
                file.write(memoryview(part))
            entry = file.finish()
    content = b"".join(parts)
    assert path.read_bytes() == content
    assert entry == FileEntry(len(content), hashlib.sha256(content).hexdigest()) == hash_file(path)


def test_a_file_is_never_written_over(tmp_path):
    write_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"


def test_a_file_is_closed_when_its_write_fails(tmp_path, monkeypatch):
    def fail(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "file", b"data")
    assert len(os.listdir("/proc/self/fd")) == before


SIDECARS = {"tokenizer.json": b"{}\n", "empty": b"", "templates/tool.jinja": b"{{ \xff }}"}


@pytest.fixture
def with_sidecars(tmp_path):
    return save_load.save(tmp_path, 1, {"w": torch.ones(2)}, model={}, run={}, keep=1, sidecars=SIDECARS)


def test_sidecars_are_read_as_they_were_given(with_sidecars, tmp_path):
    assert read_sidecars(manifest.verify(with_sidecars)) == SIDECARS
    assert torch.equal(save_load.read_tensors(with_sidecars, ["w"])["w"], torch.ones(2))
    without = save_load.save(tmp_path, 2, {"w": torch.ones(2)}, model={}, run={}, keep=1)
    assert read_sidecars(manifest.verify(without)) == {} and not with_sidecars.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "templates/tool.jinja"])
def test_a_changed_or_missing_sidecar_is_named(with_sidecars, name):
    path = with_sidecars / "sidecars" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"sidecars/{name} has changed"):
        manifest.verify(with_sidecars)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"sidecars/{name} is missing"):
        manifest.verify(with_sidecars)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_sidecars(manifest.read_manifest(with_sidecars))
