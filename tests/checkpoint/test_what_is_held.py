"""What is saved comes back with the same bits, whatever its name and kind, or is refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.checkpoint import manifest, save_load
from meshwright.errors import CheckpointError
from tests.checkpoint import layouts
from tests.checkpoint.test_save_load import save


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
