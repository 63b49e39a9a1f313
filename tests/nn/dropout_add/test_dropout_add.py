"""Dropout + add: values, gradients, precision, compilation, recomputation, and what is refused."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.errors import ConfigError, LayoutError
from meshwright.nn.dropout_add import eager
from meshwright.nn.dropout_add.eager import DropoutKey, drop_threshold, keep_mask, keep_scale
from meshwright.nn.dropout_add.module import DropoutAdd, dropout_add
from tests.nn.dropout_add.cases import DTYPES, KEY, drop, inputs


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    p=st.sampled_from([0.1, 0.5, 0.99]),
    first=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_are_those_of_the_mask_rounded_once(shape, dtypes, p, first, seed):
    x, residual, rows = inputs(*shape, seed=seed)
    x, residual = (
        tensor.detach().to(dtype).requires_grad_() for tensor, dtype in zip((x, residual), dtypes, strict=True)
    )
    out = drop(x, residual, rows, p, first_column=first)
    assert out.dtype == torch.promote_types(*dtypes) and out.is_contiguous()
    gradient = torch.randn_like(out)
    out.backward(gradient)

    wide = eager.compute_dtype(out.dtype)
    keep, scale = keep_mask(KEY, rows, shape[-1], p, first_column=first), keep_scale(drop_threshold(p))
    expected = torch.where(keep, x.detach().to(wide) * scale, 0.0) + residual.detach().to(wide)
    assert torch.equal(out.detach(), expected.to(out.dtype))
    kept = torch.where(keep, gradient.to(wide) * scale, 0.0).to(out.dtype)
    assert x.grad.dtype == x.dtype and torch.equal(x.grad, kept.to(x.dtype))
    assert residual.grad.dtype == residual.dtype and torch.equal(residual.grad, gradient.to(residual.dtype))


def test_gradients_pass_gradcheck_twice():
    x, residual, rows = inputs(2, 3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *given: drop(*given, rows), (x, residual))
    assert torch.autograd.gradgradcheck(lambda *given: drop(*given, rows), (x, residual))


def test_the_operator_keeps_torchs_contract():
    """Its schema, its fake implementation, and its backward, also traced."""
    x, residual, rows = inputs(2, 3, 5)
    operator = torch.ops.meshwright.dropout_add.default
    torch.library.opcheck(operator, (x, residual, rows, KEY.words, 2**31, 0))


@pytest.mark.parametrize("named", [{"p": 0.0}, {"p": 2**-40}, {"training": False}, {"p": 0.0, "training": False}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_dropout_it_is_the_exact_sum(named, dtype):
    x, residual, _ = inputs(3, 4, 5, dtype=dtype)
    found = dropout_add(x, residual, **{"p": 0.5, "training": True} | named)
    assert torch.equal(found, residual + x)


def test_elements_that_are_dropped_add_nothing():
    x = torch.full((4, 64), float("nan"))
    residual = torch.tensor([-2.0, float("inf"), 1e-45, 3.0]).repeat(4, 16)
    rows = torch.arange(4)
    found, keep = drop(x, residual, rows), keep_mask(KEY, rows, 64, 0.3)
    assert torch.equal(found[~keep], residual[~keep]) and found[keep].isnan().all()
    infinite = torch.full((4, 64), float("inf"))
    ones = torch.ones(4, 64, requires_grad=True)
    drop(ones, residual, rows).backward(infinite)
    assert torch.equal(ones.grad, torch.where(keep, infinite, 0.0))


@pytest.mark.parametrize("chunk", [1, 7, 20, 64, 10**6])
def test_chunks_change_nothing(monkeypatch, chunk):
    x, residual, rows = inputs(3, 5, 10)
    expected = drop(x, residual, rows)
    monkeypatch.setitem(eager.CHUNK, "cpu", chunk)
    assert torch.equal(drop(x, residual, rows), expected)


def test_any_strides_are_taken():
    x, residual, rows = (tensor.detach() for tensor in inputs(4, 6, 8))
    expected = drop(x, residual, rows)
    strided = x.transpose(0, 2).contiguous().transpose(0, 2), torch.stack([residual, x], -1)[..., 0]
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous()
    assert torch.equal(drop(*strided, rows.t().contiguous().t()), expected)
    ones, zeros = torch.ones(4, 6, 8, requires_grad=True), torch.zeros(4, 6, 8)
    drop(ones, zeros, rows).sum().backward()  # the gradient is an expanded scalar
    assert torch.equal(ones.grad, drop(ones, zeros, rows))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_gives_nothing(shape):
    x, residual, rows = inputs(*shape)
    out = drop(x, residual, rows)
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


def test_only_the_input_that_needs_a_gradient_gets_one():
    x, residual, rows = inputs(2, 3, 4)
    drop(x, residual.detach(), rows).sum().backward()
    assert torch.equal(x.grad, drop(torch.ones_like(x), torch.zeros_like(x), rows))
    x.grad = None
    drop(x.detach(), residual, rows).sum().backward()
    assert x.grad is None and torch.equal(residual.grad, torch.ones_like(x))


def saved_by(run):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        run()
    return saved


def test_it_saves_the_numbers_of_the_tokens_only():
    x, residual, rows = inputs(2, 3, 400)
    assert [tensor.data_ptr() for tensor in saved_by(lambda: drop(x, residual, rows))] == [
        rows.data_ptr(),
        KEY.words.data_ptr(),
    ]
    assert saved_by(lambda: drop(x.detach(), residual, rows)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_more_precise_than_two_operations(dtype):
    """Relative error against float64, in the norm; the chain rounds dropout's result, too."""
    x, residual, rows = (tensor.detach() for tensor in inputs(64, 512, dtype=dtype))
    for p in (0.1, 0.3, 0.7):
        exact = drop(x.double(), residual.double(), rows, p)
        keep = keep_mask(KEY, rows, 512, p)
        chain = torch.where(keep, x * (1 / (1 - p)), 0.0) + residual
        ours, theirs = ((found.double() - exact).norm() / exact.norm() for found in (drop(x, residual, rows, p), chain))
        assert ours < theirs < 2 * ours
        # The best that the dtype can do.
        assert ours <= 1.0001 * (exact.to(dtype).double() - exact).norm() / exact.norm()


class Block(nn.Module):
    def __init__(self, site):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = DropoutAdd(0.4, seed=2**63 + 11, site=site)

    def forward(self, x, rows):
        return self.dropout(torch.tanh(self.linear(x)), x, rows)


def gradients(blocks, x, rows, through=lambda block, *given: block(*given)):
    x = x.detach().requires_grad_()
    y = x
    for block in blocks:
        block.zero_grad()
        y = through(block, y, rows)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]


def test_compiled_blocks_have_the_same_mask_and_one_graph():
    """One for all layers, sites and steps: integers of the key would make one for each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [Block(site) for site in range(3)]
    compiled = deepcopy(blocks)
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    for block in compiled:
        block.compile(fullgraph=True, backend=backend)
    for step in range(3):
        x, rows = torch.randn(2, 3, 8), torch.arange(6).view(2, 3) + 6 * step
        for found, expected in zip(gradients(compiled, x, rows), gradients(blocks, x, rows), strict=True):
            assert torch.equal(found, expected)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_recomputation_draws_the_same_mask_without_rng_state():
    torch.manual_seed(0)
    blocks, x, rows = [Block(0), Block(1)], torch.randn(2, 3, 8), torch.arange(6).view(2, 3)

    def recomputed(block, *given):
        torch.manual_seed(len(given) + int(torch.randint(9, ())))  # nobody's state
        return checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)

    for found, expected in zip(gradients(blocks, x, rows, recomputed), gradients(blocks, x, rows), strict=True):
        assert torch.equal(found, expected)


def test_any_layout_drops_its_part_of_the_same_elements():
    """Batch, sequence, a permutation of tokens, and channels, forward and backward."""
    x, residual, rows = inputs(4, 6, 12)
    whole = drop(x, residual, rows)
    whole.square().sum().backward()
    tokens = torch.tensor([5, 0, 3])
    for part, first, of_rows in (
        ((slice(1, 3),), 0, (slice(1, 3),)),
        ((slice(None), tokens), 0, (slice(None), tokens)),
        ((slice(None), slice(2, 5), slice(5, 11)), 5, (slice(None), slice(2, 5))),
    ):
        shard_x, shard_residual = (tensor.detach()[part].requires_grad_() for tensor in (x, residual))
        found = drop(shard_x, shard_residual, rows[of_rows], first_column=first)
        assert torch.equal(found, whole[part])
        found.square().sum().backward()
        assert torch.equal(shard_x.grad, x.grad[part])


def test_the_layer_drops_in_training_only_and_copies():
    layer, (x, residual, rows) = DropoutAdd(0.3, seed=1, site=2), inputs(2, 3, 4)
    expected = drop(x, residual, rows, key=DropoutKey(1, 2))
    for one in (layer, deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(one(x, residual, rows), expected)
    assert torch.equal(layer.eval()(x, residual), residual + x)
    assert not layer.state_dict() and repr(layer) == "DropoutAdd(p=0.3, seed=1, site=2)"
    with torch.device("meta"):
        on_meta = DropoutAdd(0.3, seed=1, site=2)
        assert on_meta(torch.empty(2, 4), torch.empty(2, 4), torch.empty(2, dtype=torch.int64)).is_meta
    assert torch.equal(on_meta.to_empty(device="cpu")(x, residual, rows), expected)


def test_what_does_not_fit_is_refused():
    x, residual, rows = inputs(2, 3, 4)
    with pytest.raises(ConfigError, match=r"no numbers of the tokens \(rows_bt\)"):
        DropoutAdd(0.1, seed=0, site=0)(x, residual)
    with pytest.raises(ConfigError, match="no key"):
        dropout_add(x, residual, 0.1, training=True, rows_bt=rows)
    for p in (-0.1, 1.0):
        with pytest.raises(ConfigError, match="dropout p"):
            DropoutAdd(p, seed=0, site=0)
        with pytest.raises(ConfigError, match="dropout p"):
            dropout_add(x, residual, p, training=False)
    for wrong in (
        (x[:1], residual, rows),
        (x, residual, rows[:, :2]),
        (x, residual, rows.int()),
        (x, residual, rows[0]),
    ):
        with pytest.raises(LayoutError, match="numbers of tokens"):
            drop(*wrong)
    with pytest.raises(LayoutError, match="first_column = -1"):
        drop(x, residual, rows, first_column=-1)
    with pytest.raises(ConfigError, match=r"dropout of torch\.int64"):
        drop(x.long(), residual, rows)
