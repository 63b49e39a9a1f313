"""Token files: memory-mapped, scanned once, and rejected with a fix if malformed."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import token_files
from meshwright.data.token_cache import map_ends
from meshwright.data.token_files import open_token_file
from meshwright.errors import DataError

DTYPES = ["uint8", "uint16", "uint32"]


@pytest.fixture
def opened(tmp_path):
    """Opens a token file with its cache in the test's own directory."""

    def open_it(path, token_dtype="uint16"):
        return open_token_file(str(path), token_dtype=token_dtype, cache_dir=str(tmp_path / "cache"))

    return open_it


@settings(max_examples=30)
@given(
    ids=st.lists(st.integers(0, 255), min_size=2, max_size=100),
    dtype=st.sampled_from(["<u1", "<u2", ">u2", "<u4", "<i4", ">i8"]),
    chunk=st.integers(1, 40),
)
def test_facts_of_an_npy(tmp_path_factory, ids, dtype, chunk):
    folder = tmp_path_factory.mktemp("npy")
    np.save(folder / "t.npy", np.array(ids, dtype=dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_CHUNK_TOKENS", chunk)
        tokens, facts, _ = open_token_file(str(folder / "t.npy"), token_dtype="uint8", cache_dir=str(folder / "cache"))
    assert tokens.tolist() == ids and tokens.dtype == np.dtype(dtype)
    assert facts.vocab_size == max(ids) + 1
    assert facts.num_train + facts.num_validation == len(ids)
    assert facts.num_validation == max(1, len(ids) // 10)
    assert facts.validation_text_bytes is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_bin_and_npy_of_the_same_tokens_are_the_same_corpus(tmp_path, opened, dtype):
    ids = np.random.default_rng(0).integers(0, 250, 1000).astype(dtype)
    ids.tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.npy", ids)
    np.save(tmp_path / "big_endian.npy", ids.astype(ids.dtype.newbyteorder(">")))
    tokens, facts, _ = opened(tmp_path / "t.bin", dtype)
    np.testing.assert_array_equal(tokens, ids)
    for other in ("t.npy", "big_endian.npy"):
        assert opened(tmp_path / other)[1].fingerprint == facts.fingerprint


@settings(max_examples=25)
@given(place=st.integers(0, 99), value=st.integers(0, 9))
def test_the_fingerprint_sees_every_token(tmp_path_factory, place, value):
    folder = tmp_path_factory.mktemp("npy")
    ids = np.arange(100) % 10
    changed = ids.copy()
    changed[place] = value
    fingerprints = []
    for name, tokens in (("a", ids), ("b", changed)):
        np.save(folder / f"{name}.npy", tokens.astype(np.uint16))
        _, facts, _ = open_token_file(str(folder / f"{name}.npy"), token_dtype="uint16", cache_dir=str(folder))
        fingerprints.append(facts.fingerprint)
    assert (fingerprints[0] == fingerprints[1]) == (ids == changed).all()


@pytest.mark.parametrize("name", ["t.npy", "t.bin"])
def test_tokens_are_mapped_and_scanned_once(tmp_path, opened, monkeypatch, name):
    ids = np.arange(100, dtype=np.uint16)
    np.save(tmp_path / "t.npy", ids)
    ids.tofile(tmp_path / "t.bin")
    tokens, facts, _ = opened(tmp_path / name)
    assert not tokens.flags.writeable
    base = tokens
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base.base, mmap.mmap)
    monkeypatch.setattr(token_files, "_scan", lambda *_: pytest.fail("scanned again"))
    assert opened(tmp_path / name)[1] == facts


def test_a_changed_file_is_scanned_again(tmp_path, opened):
    for largest in (50, 70_000):
        np.save(tmp_path / "t.npy", np.array([1, 2, largest]))
        assert opened(tmp_path / "t.npy")[1].vocab_size == largest + 1
    np.array([1, 2, 300, 400], dtype=np.uint16).tofile(tmp_path / "t.bin")
    assert opened(tmp_path / "t.bin", "uint16")[1].vocab_size == 401
    assert opened(tmp_path / "t.bin", "uint8")[1].vocab_size <= 256


BAD = {
    "floats": np.ones(20),
    "booleans": np.ones(20, dtype=bool),
    "two dimensions": np.ones((4, 5), dtype=np.uint16),
    "a scalar": np.array(3),
    "nothing": np.ones(0, dtype=np.uint16),
    "one token": np.ones(1, dtype=np.uint16),
    "a negative id": np.array([1, 2, -1, 3]),
    "objects": np.array([{}, {}]),
}


@pytest.mark.parametrize("contents", [b"", b"not an array", b"\x93NUMPY\x01\x00", b"PK\x03\x04zip", "cut", "archive"])
def test_a_file_that_is_no_npy_is_refused(tmp_path, opened, contents):
    path = tmp_path / "t.npy"
    if contents == "archive":
        np.savez(tmp_path / "t.npz", np.arange(10))
        (tmp_path / "t.npz").rename(path)
    elif contents == "cut":
        np.save(path, np.arange(1000))
        path.write_bytes(path.read_bytes()[:-8])
    else:
        path.write_bytes(contents)
    with pytest.raises(DataError, match="is not a valid token file"):
        opened(path)
    (tmp_path / "t.bin").write_bytes(b"")
    with pytest.raises(DataError, match="0 tokens"):
        opened(tmp_path / "t.bin")


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_npy_is_refused(tmp_path, opened, kind):
    np.save(tmp_path / "t.npy", BAD[kind], allow_pickle=True)
    with pytest.raises(DataError) as caught:
        opened(tmp_path / "t.npy")
    assert "data.source" in caught.value.where and str(tmp_path / "t.npy") in caught.value.where
    assert caught.value.rule and "np.save" in caught.value.fix


@settings(max_examples=40)
@given(num_bytes=st.integers(2, 40), dtype=st.sampled_from(DTYPES))
def test_a_bin_of_the_wrong_size_is_refused_with_types_that_fit(tmp_path_factory, num_bytes, dtype):
    folder = tmp_path_factory.mktemp("bin")
    (folder / "t.bin").write_bytes(bytes(num_bytes))

    def ask(dtype):
        return open_token_file(str(folder / "t.bin"), token_dtype=dtype, cache_dir=str(folder))

    if num_bytes % np.dtype(dtype).itemsize:
        with pytest.raises(DataError, match=f"{num_bytes} bytes") as caught:
            ask(dtype)
        for fix in caught.value.fix.split(" or "):
            dtype = fix.removeprefix("data.token_dtype=")
            assert num_bytes % np.dtype(dtype).itemsize == 0
    elif num_bytes // np.dtype(dtype).itemsize >= 2:
        ask(dtype)


@pytest.mark.parametrize("name", ["t.bin", "t.npy", "*.npy"])
def test_a_missing_file_names_what_is_near(tmp_path, opened, name):
    with pytest.raises(DataError, match=f"nearest existing directory is {tmp_path}") as caught:
        opened(tmp_path / "no" / name)
    assert caught.value.where.startswith("data.source, ")
    np.save(tmp_path / "tt.npy", np.arange(10))
    if name == "t.npy":
        with pytest.raises(DataError) as caught:
            opened(tmp_path / name)
        assert caught.value.fix == f"data.source={tmp_path / 'tt.npy'}"


def documents_of(path, separator, folder):
    tokens, facts, cached = open_token_file(str(path), token_dtype="uint16", cache_dir=str(folder), separator=separator)
    return tokens.tolist(), facts, map_ends(cached, facts).tolist()


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, 3), min_size=2, max_size=60), chunk=st.integers(1, 40))
def test_documents_end_with_their_separator(tmp_path_factory, ids, chunk):
    """Separators at the start, at the end, doubled and missing, in chunks that end anywhere."""
    folder = tmp_path_factory.mktemp("documents")
    np.save(folder / "t.npy", np.array(ids, dtype=np.uint16))
    expected = [place + 1 for place, token in enumerate(ids) if token == 0 or place == len(ids) - 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_CHUNK_TOKENS", chunk)
        if len(expected) < 2:
            with pytest.raises(DataError, match="does not occur" if 0 not in ids else "single document") as caught:
                documents_of(folder / "t.npy", 0, folder)
            assert caught.value.where.startswith("data.separator") and "data.packing=none" in caught.value.fix
            return
        _, facts, ends = documents_of(folder / "t.npy", 0, folder)
    assert ends == expected
    goal = len(ids) - max(1, len(ids) // 10)
    assert facts.num_train in expected[:-1], "no document is in both splits"
    assert all(abs(facts.num_train - goal) <= abs(end - goal) for end in expected[:-1])
    assert facts.num_train_documents == expected.index(facts.num_train) + 1
    assert facts.num_train_documents + facts.num_validation_documents == len(expected)
    assert facts.num_train + facts.num_validation == len(ids)


def test_each_separator_has_its_own_cache(tmp_path):
    ids = [5, 0, 5, 1, 5, 5, 0, 1, 5, 5, 5, 1]
    np.array(ids, dtype=np.uint16).tofile(tmp_path / "t.bin")
    open_token_file(str(tmp_path / "t.bin"), token_dtype="uint16", cache_dir=str(tmp_path / "cache"))
    assert documents_of(tmp_path / "t.bin", 0, tmp_path / "cache")[2] == [2, 7, 12]
    assert documents_of(tmp_path / "t.bin", 1, tmp_path / "cache")[2] == [4, 8, 12]
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_separator_beyond_the_element_type_does_not_occur(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(10, dtype=np.uint8))
    with pytest.raises(DataError, match="separator 300 does not occur .* ids are up to 0"):
        documents_of(tmp_path / "t.npy", 300, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
