"""What is saved from one layout is what is loaded onto another, bit for bit, and nothing is pickled."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import warnings
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from meshwright.checkpoint import manifest, safetensors_file, save_load
from meshwright.checkpoint.reader import read_row
from meshwright.checkpoint.safetensors_file import DTYPES, TensorToWrite
from meshwright.errors import CheckpointError, RunError
from tests.checkpoint import layouts
from tests.checkpoint.layouts import ALONE, LAYOUTS, SHAPES, MeshLayout, values

BLOCK_DEGREES = [(1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4), (1, 2, 1), (2, 1, 2)]
"""dp_replicate, dp_shard, tp."""


def save(root, tensors, *, step=1, keep=9, run=None):
    return save_load.save(root, step, tensors, model={"kind": "test"}, run=run or {}, keep=keep)


def blank(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def saved(gang, tmp_path_factory):
    """A checkpoint of the same tensors from each layout."""
    root = tmp_path_factory.mktemp("saved")
    paths = {ALONE: save(root / "alone", values())}
    for layout in LAYOUTS[1:]:
        paths[layout] = gang(layout.num_ranks).run(layouts.save_laid_out, root / str(layout), layout)[0]
    return paths


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_a_checkpoint_of_any_layout_is_complete(saved, source):
    checked = manifest.verify(saved[source])
    assert {"layout.json", "rank-00000.safetensors"} <= set(checked.files)
    assert save_load.tensor_names(saved[source]) == set(SHAPES)
    found = save_load.read_tensors(saved[source], SHAPES)
    assert all(torch.equal(found[name], tensor) for name, tensor in values().items())
    # Whatever the layout, every element is stored once.
    data = sum(load_file(file)[key].numel() for file in saved[source].glob("*.safetensors") for key in load_file(file))
    assert data == sum(tensor.numel() for tensor in values().values())


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_a_row_is_read_from_any_layout(saved, source):
    layout = safetensors_file.read_layout(saved[source])
    for name, tensor in values().items():
        for row in range(tensor.shape[0] if tensor.dim() else 0):
            found = read_row(layout, name, row)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor[row])


def test_fetched_tensors_are_saved_one_at_a_time(tmp_path):
    alive = []

    def fetch(tensor):
        copy = tensor.clone()
        assert not any(ref() is not None for ref in alive)
        alive.append(weakref.ref(copy))
        return copy

    tensors = [TensorToWrite(name, t.dtype, tuple(t.shape), partial(fetch, t)) for name, t in values().items()]
    path = save_load.save_fetched(tmp_path / "a", 1, tensors, model={"kind": "test"}, run={}, keep=9)
    assert len(alive) == len([t for t in values().values() if t.numel()])
    same = save(tmp_path / "b", values())
    assert manifest.verify(path).files == manifest.verify(same).files


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((one, ALONE) for one in LAYOUTS),
        *((ALONE, one) for one in LAYOUTS[1:]),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in zip(LAYOUTS[1:], LAYOUTS[3:], strict=False)),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in zip(LAYOUTS[3:], LAYOUTS[1:], strict=False)),
    ],
    ids=str,
)
def test_any_layout_loads_onto_any_other(gang, saved, source, target):
    if target == ALONE:
        found = blank(values())
        save_load.load(saved[source], found)
        assert all(torch.equal(found[name], tensor) for name, tensor in values().items())
    else:
        wrong = gang(target.num_ranks).run(layouts.load_laid_out, saved[source], target)
        assert wrong == [[]] * target.num_ranks


@pytest.mark.slow
def test_eight_ranks_on_three_axes(gang, saved, tmp_path):
    layout = MeshLayout((2, 2, 2), (None, 0, 1))
    path = gang(8).run(layouts.save_laid_out, tmp_path, layout)[0]
    found = save_load.read_tensors(path, SHAPES)
    assert all(torch.equal(found[name], tensor) for name, tensor in values().items())
    assert gang(8).run(layouts.load_laid_out, saved[LAYOUTS[1]], layout) == [[]] * 8


@pytest.fixture(scope="module")
def saved_blocks(gang, tmp_path_factory):
    """A checkpoint of the same FSDP2 × tensor-parallel module from each layout."""
    root = tmp_path_factory.mktemp("blocks")
    paths = {}
    for i, (replicate, shard, tp) in enumerate(BLOCK_DEGREES):
        num_ranks = replicate * shard * tp
        paths[replicate, shard, tp] = gang(num_ranks).run(layouts.save_block, root / str(i), (replicate, shard, tp))[0]
    return paths


@pytest.mark.parametrize("degrees", BLOCK_DEGREES, ids=str)
def test_sharded_modules_are_saved_whole(saved_blocks, degrees):
    manifest.verify(saved_blocks[degrees])
    full = layouts.full_block(1)
    found = save_load.read_tensors(saved_blocks[degrees], full)
    assert all(torch.equal(found[name], tensor) for name, tensor in full.items())


@pytest.mark.parametrize(
    "target", [pytest.param(d, marks=() if d == (2, 1, 2) else pytest.mark.slow, id=str(d)) for d in BLOCK_DEGREES]
)
def test_sharded_modules_are_filled_in_place_from_any_layout(gang, saved_blocks, target):
    """From itself and those before it, so that of each two one is loaded from the other."""
    num_ranks = target[0] * target[1] * target[2]
    for source, path in list(saved_blocks.items())[: BLOCK_DEGREES.index(target) + 1]:
        results = gang(num_ranks).run(layouts.load_block, path, target)
        assert results == [([], True)] * num_ranks, source


def test_replicas_are_written_once_and_shared_out(gang, tmp_path):
    path = gang(2).run(layouts.save_replicas, tmp_path)[0]
    files = [load_file(path / f"rank-0000{rank}.safetensors") for rank in range(2)]
    names = [set(file) - {"only.here"} for file in files]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 16
    assert abs(len(names[0]) - len(names[1])) <= 1, "one rank writes what the other could have"
    assert files[1]["only.here"].tolist() == [0, 1, 2]


def test_a_rank_with_nothing_to_write_writes_no_file(gang, tmp_path):
    path = gang(4).run(layouts.save_short, tmp_path)[0]
    assert sorted(file.name for file in path.glob("*.safetensors")) == [f"rank-0000{i}.safetensors" for i in range(3)]
    assert save_load.read_tensors(path, ["w"])["w"].tolist() == [0, 1, 2]


def test_a_group_saves_and_loads_without_the_other_ranks(gang, tmp_path):
    assert gang(4).run(layouts.save_on_subgroup, tmp_path) == [None, [0, 1, 2, 3], [0, 1, 2, 3], None]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5 * dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype)
    path = save(tmp_path, {"w": tensor})
    for found in (save_load.read_tensors(path, ["w"])["w"], load_file(path / "rank-00000.safetensors")["w"]):
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), bits)


@settings(max_examples=40)
@given(data=st.data())
def test_files_are_read_alike_by_the_library(tmp_path_factory, data):
    """Ours and safetensors' own are the same, however odd the sizes and names."""
    shapes = st.lists(st.integers(0, 3), max_size=3)
    dtypes = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64])
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__")
    specs = data.draw(st.dictionaries(names, st.tuples(shapes, dtypes), min_size=1, max_size=5))
    tensors = {name: torch.ones(shape).cumsum(-1).to(dtype) for name, (shape, dtype) in specs.items()}
    folder = tmp_path_factory.mktemp("files")
    ours = save(folder, tensors) / "rank-00000.safetensors"
    save_file(tensors, folder / "theirs.safetensors")
    ours, theirs = load_file(ours), load_file(folder / "theirs.safetensors")
    assert set(ours) == set(theirs) == set(tensors)
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_strided_tensors_and_parameters_are_filled_in_place(tmp_path):
    parameter, transposed = torch.nn.Parameter(torch.randn(4, 6)), torch.randn(4, 6).t()
    path = save(tmp_path, {"t": transposed, "parameter": parameter})
    found, target = torch.zeros(4, 6).t(), torch.nn.Parameter(torch.zeros(4, 6))
    save_load.load(path, {"t": found, "parameter": target})
    assert torch.equal(found, transposed)
    assert torch.equal(target, parameter) and target.grad_fn is None and target.requires_grad


def test_floating_point_dtypes_convert_on_loading(tmp_path):
    tensors = values(torch.bfloat16)
    path = save(tmp_path, tensors)
    for dtype in (torch.float32, torch.float64, torch.float16):
        found = {name: tensor.to(dtype) for name, tensor in blank(tensors).items()}
        save_load.load(path, found)
        assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in tensors.items())


def test_what_is_not_asked_for_is_left_alone(tmp_path):
    path = save(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})
    save_load.load(path, {"b": (found := torch.zeros(2))})
    assert found.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"other": torch.zeros(2, 3)}, "other is not in the checkpoint"),
        ({"w": torch.zeros(3, 2)}, "w has shape [3, 2] here and [2, 3] in the checkpoint"),
        ({"w": torch.zeros(2, 3, dtype=torch.int32)}, "w is torch.int32 here and torch.float32"),
        ({"w": torch.zeros(2, 3, device="meta")}, "w is on the meta device"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(tmp_path, tensors, words):
    path = save(tmp_path, {"w": torch.ones(2, 3), "z": torch.ones(1)})
    last = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        save_load.load(path, {**tensors, "z": last})
    assert words in caught.value.what
    assert not last.any()


def test_missing_pieces_are_noticed(tmp_path):
    path = save(tmp_path, {"w": torch.ones(4)})
    text = (path / "layout.json").read_text()
    (path / "layout.json").write_text(text.replace('[[[0], [4], "rank', '[[[0], [3], "rank'))
    with pytest.raises(CheckpointError, match="3 of the 4 elements of w"):
        save_load.load(path, {"w": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="3 of the 4 elements of w"):
        save_load.read_tensors(path, ["w"])


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"format": 2, "tensors": {}}', '{"format": 1, "tensors": 3}']
)
def test_a_layout_that_cannot_be_read_is_named(tmp_path, content):
    path = save(tmp_path, {"w": torch.ones(4)})
    (path / "layout.json").unlink()
    if content is not None:
        (path / "layout.json").write_text(content)
    for read in (lambda: save_load.load(path, {"w": torch.zeros(4)}), lambda: save_load.tensor_names(path)):
        with pytest.raises(CheckpointError, match="layout.json"):
            read()


@pytest.mark.parametrize("damage", ["missing", "truncated", "not safetensors"])
def test_a_tensor_file_that_cannot_be_read_is_named(tmp_path, damage):
    path = save(tmp_path, {"w": torch.ones(4)})
    file = path / "rank-00000.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:-1] if damage == "truncated" else b"not one of these files")
    with pytest.raises(CheckpointError, match="rank-00000.safetensors"):
        save_load.load(path, {"w": torch.zeros(4)})


@given(shape=st.lists(st.integers(0, 5), max_size=3), data=st.data())
def test_layouts_come_back_from_json(tmp_path_factory, shape, data):
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    key = safetensors_file.shard_key("wé", offset, tuple(shape), tuple(shape))
    shard = safetensors_file.StoredShard(offset, tuple(shape), "rank-00001.safetensors", key)
    tensors = {
        "wé": safetensors_file.TensorEntry("BF16", tuple(shape), (shard, shard)),
        "v": safetensors_file.TensorEntry("I8", (), ()),
    }
    folder = tmp_path_factory.mktemp("layout")
    (folder / safetensors_file.LAYOUT).write_bytes(safetensors_file.encode_layout(tensors))
    assert safetensors_file.read_layout(folder).tensors == tensors


def test_only_keep_checkpoints_stay(tmp_path):
    for step in range(1, 6):
        save(tmp_path, {"w": torch.tensor(float(step))}, step=step, keep=2)
    assert [path.name for path in manifest.list_checkpoints(tmp_path)] == ["00000004", "00000005"]
    # Going back to an earlier step: what was just saved stays, though two newer ones exist.
    path = save(tmp_path, {"w": torch.tensor(3.0)}, step=3, keep=2)
    assert manifest.verify(path).step == 3


def test_nothing_is_pickled_and_nothing_is_warned_of(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a pickle")

    for module, name in itertools.product((pickle, torch), ("load", "loads", "dump", "dumps", "save")):
        monkeypatch.setattr(module, name, refuse, raising=False)
    tensors = values()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = save(tmp_path, tensors)
        save_load.load(path, blank(tensors))
    assert sorted(file.name for file in path.iterdir()) == ["layout.json", "manifest.json", "rank-00000.safetensors"]
    json.loads((path / "layout.json").read_text())


def test_what_the_manifest_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="JSON"):
        save(tmp_path / "root", {"w": torch.zeros(2)}, run={"loss": float("inf")})
    assert not (tmp_path / "root").exists()


def test_a_root_that_is_a_file_is_an_error_of_the_run(tmp_path):
    (tmp_path / "root").write_text("mine")
    with pytest.raises(RunError, match="rank 0"):
        save(tmp_path / "root", {"w": torch.zeros(2)})
    assert (tmp_path / "root").read_text() == "mine"


class InOtherTensors(torch.Tensor):
    """A tensor whose values are in another one, as those of quantisation libraries are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    __torch_dispatch__ = None


COMPLEX = torch.complex(torch.randn(3, 2), torch.randn(3, 2))
TENSORS = {
    "plain": torch.randn(3, 2),
    "conjugated": torch.conj(COMPLEX),
    "negated": torch.conj(COMPLEX).imag,
    "both, transposed": torch.conj(COMPLEX).t()[1:],
    "every second": torch.randn(9)[::2],
    "expanded": torch.randn(1).expand(5),
    "with a hole before": torch.arange(7, dtype=torch.int16)[3:],
    "one number": torch.tensor(3.5, dtype=torch.bfloat16),
    "nothing": torch.zeros(0, 3, dtype=torch.int64),
    "no complex numbers": torch.conj(COMPLEX)[:0],
    "a result": (torch.ones(2, requires_grad=True) * 2),
    "float8": torch.randn(4).to(torch.float8_e5m2),
}
REFUSED_TENSORS = {
    "sparse": torch.eye(3).to_sparse(),
    "quantised": torch.empty(3, dtype=torch.uint4),
    "complex128": COMPLEX.to(torch.complex128),
    "meta": torch.empty(2, device="meta"),
    "lazy": torch.nn.UninitializedParameter(),
    "no tensor": 3,
    "in other tensors": InOtherTensors(torch.randn(3)),
}
NAMES = ["", "\0", "a/b", "../../x", "w[0:2,0:4]", "x" * 70_000, "layout.json", '\n"\\']
REFUSED_NAMES = ["__metadata__", "\ud800", "a\udfffb", 7]


@given(
    named=st.dictionaries(
        st.one_of(st.sampled_from([*NAMES, *REFUSED_NAMES]), st.text(st.characters(), max_size=4)),
        st.sampled_from([*TENSORS] * 3 + [*REFUSED_TENSORS]), min_size=1, max_size=4,
    )
)  # fmt: skip
def test_what_is_saved_is_loaded_with_the_same_bits_or_refused(tmp_path_factory, named):
    root = tmp_path_factory.mktemp("any")
    tensors = {name: {**TENSORS, **REFUSED_TENSORS}[kind] for name, kind in named.items()}
    is_refused = any(kind in REFUSED_TENSORS for kind in named.values()) or any(
        not isinstance(name, str) or name == "__metadata__" or re.search("[\ud800-\udfff]", name) for name in named
    )
    if is_refused:
        with pytest.raises(CheckpointError) as caught:
            save(root, tensors)
        assert caught.value.rule and caught.value.fix and str(caught.value).encode()
        assert list(root.iterdir()) == []
        return
    path = save(root, tensors)
    manifest.verify(path)
    loaded = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    save_load.load(path, loaded)
    for found in (loaded, save_load.read_tensors(path, tensors)):
        assert all(bits(found[name]) == bits(tensor) for name, tensor in tensors.items())
    assert [entry.name for entry in root.iterdir()] == [path.name]


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.shape, tensor.dtype, plain.reshape(-1).view(torch.uint8).tolist()


def test_a_conjugated_tensor_is_filled_in_place(tmp_path):
    path = save(tmp_path, {"w": COMPLEX})
    save_load.load(path, {"w": torch.conj(target := torch.zeros_like(COMPLEX))})
    assert torch.equal(torch.conj(target), COMPLEX)


def test_a_shard_with_the_name_of_a_tensor_is_refused(gang, tmp_path):
    for told in gang(2).run(layouts.save_shard_like_name, tmp_path):
        assert "w[0:1,0:2] is the name of two tensors" in told
    assert list(tmp_path.iterdir()) == []


def test_replicas_that_differ_are_named(gang, tmp_path):
    warnings, nothing = gang(2).run(layouts.save_different_replicas, tmp_path)
    assert nothing == [[], []]
    assert warnings[0] == []
    assert re.search("b has other values on rank 1 than on rank 0, and so have 2 more tensors", warnings[1][0])
