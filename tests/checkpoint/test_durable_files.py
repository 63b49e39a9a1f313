"""Files are written whole, whatever the system does with a write, and their entries are those of their content."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint import manifest
from meshwright.checkpoint.manifest import DurableFile, FileEntry, hash_file, write_file


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
