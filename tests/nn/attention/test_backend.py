"""Claims of the backends and the choice of `auto`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.nn.attention.backend import AttentionRequest, Backend, choose_backend, refusal, supporting
from meshwright.nn.attention.mask_spec import MaskSpec
from tests.nn.attention.dense_masks import masks

requests = st.builds(
    AttentionRequest,
    device=st.sampled_from(["cpu", "cuda", "xla", "mps", "meta"]),
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "float16"]),
    mask=masks(8),
    whole=st.booleans(),
    num_heads=st.sampled_from([4, 8]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([12, 64, 128, 512]),
    dropout_p=st.sampled_from([0.0, 0.1]),
    needs_grad=st.booleans(),
    needs_lse=st.booleans(),
)


@given(requests)
def test_the_reference_takes_everything_and_auto_always_finds_one(request_):
    assert not refusal(Backend.REFERENCE, request_)
    assert choose_backend(Backend.AUTO, request_) in supporting(request_)


@given(requests)
def test_a_refusal_names_exactly_the_backends_that_do(request_):
    for backend in set(Backend) - {Backend.AUTO}:
        if backend in supporting(request_):
            assert choose_backend(backend, request_) is backend
        else:
            with pytest.raises(ConfigError) as error:
                choose_backend(backend, request_)
            assert error.value.fix.endswith(": " + ", ".join(supporting(request_)))


@given(requests, st.lists(st.integers(1, 99), min_size=1))
def test_auto_does_not_depend_on_the_lengths_of_documents(request_, lengths):
    one, other = (replace(request_, mask=replace(request_.mask, documents=x)) for x in ((), (tuple(lengths),)))
    assert choose_backend(Backend.AUTO, one) is choose_backend(Backend.AUTO, other)


CUDA = AttentionRequest("cuda", "bfloat16", MaskSpec(causal=True))


@pytest.mark.parametrize(("request_", "backend"), [
    (CUDA, Backend.SDPA),
    (replace(CUDA, mask=MaskSpec(causal=True, window=9)), Backend.VARLEN),
    (replace(CUDA, mask=MaskSpec(documents=())), Backend.VARLEN),
    (replace(CUDA, mask=MaskSpec(documents=()), dtype="float32"), Backend.FLEX),
    (replace(CUDA, mask=MaskSpec(causal=True, prefix=2)), Backend.FLEX),
    (replace(CUDA, whole=False), Backend.FLEX),
    (replace(CUDA, needs_lse=True), Backend.FLEX),
    (replace(CUDA, needs_lse=True, dtype="float64"), Backend.REFERENCE),
    (replace(CUDA, dropout_p=0.1), Backend.REFERENCE),
    (replace(CUDA, device="cpu", mask=MaskSpec(causal=True, window=9, documents=()), whole=False), Backend.SDPA),
    (replace(CUDA, device="xla", head_dim=128), Backend.SPLASH),
    (replace(CUDA, device="xla", head_dim=64), Backend.REFERENCE),
])  # fmt: skip
def test_auto_prefers(request_, backend):
    assert choose_backend(Backend.AUTO, request_) is backend


def test_heads_that_do_not_divide_are_nobodys():
    with pytest.raises(ConfigError) as error:
        choose_backend(Backend.AUTO, replace(CUDA, num_heads=3, num_kv_heads=2))
    assert "num_kv_heads = 2 does not divide num_heads = 3" in error.value.what
