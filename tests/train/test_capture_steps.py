"""What a captured run leaves alone: addresses, hooks, validation, state after failures; and what it says."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.capture.plan import plan_capture
from meshwright.capture.predict import predict_capture
from meshwright.capture.run.backend import Times
from meshwright.capture.run.capture import capture, observe
from meshwright.capture.run.scopes import finding_regions, graph_region
from meshwright.capture.run.simulated_graphs import SimulatedGraphs
from meshwright.errors import CaptureError, LayoutError
from meshwright.features.capture.run import agree_on_capture, average_over_ranks
from meshwright.nn.step_handles import StepBuffer
from meshwright.nn.transformer_block import TransformerBlock
from meshwright.parallel.data_parallel import fsdp_modules
from meshwright.parallel.private import unsharded_parameters
from meshwright.pipeline import generate, lower
from meshwright.plan.make_plan import make_plan
from meshwright.train.forward_only import validate
from tests.helpers import small_corpus
from tests.train.jobs import generate_on, load_words, make_job, make_task, run_on

SMALL = ["llama-tiny", "model.dim=32", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_dim=48",
         "train.global_batch=8", "train.num_microbatches=4", "train.seq_len=16"]  # fmt: skip
LAYER = "capture.scope=layer"
BF16 = "train.precision=bfloat16"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return [*SMALL, *small_corpus(tmp_path_factory.mktemp("capture"))]


def test_a_step_in_which_graphs_are_captured_is_not_measured(words):
    _, step = make_job(0, 1, [*words, LAYER])
    step.measure(frozenset({1, 2}), base_bytes=0)
    step(1)
    step(2)
    assert step.measurement.gather().steps == (2,)


def addresses_and_hooks(rank, world_size, words):
    """Addresses after each of five captured steps, and how often each parameter's gradient hook ran per step."""
    job, step = make_job(rank, world_size, words)
    step(1)
    fired = Counter()
    units = [pair for unit in fsdp_modules(job.model) for pair in unsharded_parameters(unit)]
    for number, (_, parameter) in enumerate(units):
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: fired.update([number]))
    addresses, counts = set(), []
    for number in range(2, 7):
        fired.clear()
        step(number)
        addresses.add(step._job.features["capture"].session.runner.addresses())
        counts.append(set(fired.values()) if len(fired) == len(units) else "some never")
    return len(addresses), counts


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_addresses_stay_and_hooks_fire_once_a_micro_batch_under_fsdp2(gang, words, num_ranks):
    layout = [BF16, LAYER, f"mesh.dp_shard={num_ranks}"]
    for num_addresses, counts in gang(num_ranks).run(addresses_and_hooks, [*words, *layout]):
        assert num_addresses == 1 and counts == [{4}] * 5


def ddp_gradients(rank, world_size, captured):
    """Gradients of a model under DistributedDataParallel, over three steps of three micro-batches; hooks fired."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    fired, runner = Counter(), None
    if captured:
        observed = observe({0: layers}, {0: [(torch.zeros(2, 8, requires_grad=True),), (None,)]})
        signatures = [[one.observed.signature("cpu") for one in observed[0]]]
        schedule = lower(generate("1f1b", num_stages=1, num_microbatches=3))
        plan = plan_capture(schedule, layers_per_chunk=2, signatures=signatures)
        runner = capture(observed, plan, backend="simulate", returns_gradients=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x, m):
            for number, layer in enumerate(self.layers):
                x = layer(x) if runner is None else runner(number, m, x)
            return x

    model = DistributedDataParallel(Model())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: fired.update(["hook"]))
    found = []
    for step in range(3):
        model.zero_grad(set_to_none=True)
        for m in range(3):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + 10 * m + rank))
            model.require_backward_grad_sync = m == 2
            model(x.requires_grad_(), m).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found, fired["hook"]


def test_hooks_fire_once_a_micro_batch_under_ddp(gang):
    eager, captured = (gang(2).run(ddp_gradients, on) for on in (False, True))
    for (expected, times), (found, captured_times) in zip(eager, captured, strict=True):
        assert times == captured_times == 3 * 3 * 4
        assert all(torch.equal(a, b) for a, b in zip(sum(expected, []), sum(found, []), strict=True))


def disagree(rank, world_size, words):
    job, _ = make_job(rank, world_size, words)
    try:
        agree_on_capture("same" if rank == 0 else "other", job)
    except LayoutError as error:
        return str(error)
    return None


def test_ranks_with_different_plans_stop_at_the_start(gang, words):
    told = gang(2).run(disagree, [*words, LAYER, "mesh.dp_shard=2"])
    assert told[0] == told[1] and "ranks 0 and 1 have different capture plans" in told[0]


def capture_other_layers(rank, world_size, words):
    """Steps in which rank 1 leaves a block eager that rank 0 captures."""
    _, step = make_job(rank, world_size, words)
    if rank == 1:
        step._job.features["capture"].session.eager["blocks.0"] = "as this test wants"
    try:
        step(1)
    except LayoutError as error:
        return error.what
    return None


def test_ranks_compare_what_they_capture(gang, words):
    told = gang(2).run(capture_other_layers, [*words, LAYER, "mesh.dp_shard=2"])
    assert told[0] == told[1] and told[0].startswith("ranks 0 and 1 have different capture plans")


def test_a_step_after_one_that_failed_starts_from_its_first_computation(words, monkeypatch):
    job, step = make_job(0, 1, [*words, LAYER])
    other, eager = make_job(0, 1, words)
    for number in (1, 2):
        assert step(number).loss == eager(number).loss
    loss_sum = step._task.loss_sum
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="out of luck"):
        patch.setattr(step._task, "loss_sum", raising_at(loss_sum, 2))
        step(3)
    job.optimizer.zero_grad()
    assert step(3).loss == eager(3).loss
    pairs = zip(job.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def raising_at(loss_sum, call):
    calls = iter(range(1, 100))

    def raising(out, targets):
        if next(calls) == call:
            raise ValueError("out of luck")
        return loss_sum(out, targets)

    return raising


def refusals(rank, world_size, words):
    _, step = make_job(rank, world_size, words)
    step(1)
    return step._job.features["capture"].session.runner is None, set(
        step._job.features["capture"].session.eager.values()
    )


@pytest.mark.slow
def test_stages_whose_pairs_take_turns_stay_eager(gang, words):
    moe = ["moe-tiny", *words[1:3], "model.expert_dim=24", *words[5:], "model.num_layers=4", "mesh.pp=2"]
    overlapped = ["mesh.dp_shard=2", "mesh.ep=2", "pipeline.schedule=dualpipe-v", "capture.scope=attention"]
    for is_eager, reasons in gang(4).run(refusals, [*moe, *overlapped]):
        assert is_eager and reasons == {"overlapped computations of the stage take turns while it runs"}


@dataclass
class Slot:
    """A tensor that a layer updates, and that is not a buffer."""

    largest: torch.Tensor


class Counting(nn.Module):
    """A layer that draws random numbers, counts its calls and averages its inputs."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.count = nn.Linear(4, 4), nn.Dropout(0.5), StepBuffer((), torch.int64)
        self.register_buffer("mean", torch.zeros(4))
        self.slot = Slot(torch.zeros(()))

    def forward(self, x):
        self.count.add(torch.ones((), dtype=torch.int64))
        with torch.no_grad():
            self.mean.add_(x.mean(0))
            self.slot.largest.fill_(torch.maximum(self.slot.largest, x.abs().max() + 1))
        return self.drop(self.linear(x))


def one_layer(num_microbatches=2):
    module = Counting()
    observed = observe({0: [module]}, {0: [(torch.zeros(3, 4, requires_grad=True),)]})
    schedule = lower(generate("1f1b", num_stages=1, num_microbatches=num_microbatches))
    signatures = [[observed[0][0].observed.signature("cpu")]]
    return module, observed, plan_capture(schedule, layers_per_chunk=1, signatures=signatures)


@pytest.mark.parametrize("fails", ["never", "forward", "backward"])
def test_capturing_leaves_gradients_generators_and_buffers_alone(fails, monkeypatch):
    module, observed, plan = one_layer()
    module(torch.ones(3, 4)).sum().backward()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    gradient, kept = module.linear.weight.grad, module.linear.weight.grad.clone()
    largest = module.slot.largest.clone()
    pending, generator = module.count.pending().clone(), torch.get_rng_state()

    def failing(self, *args, **named):
        torch.rand(3)
        module.mean.add_(1)
        raise RuntimeError("out of luck")

    if fails != "never":
        monkeypatch.setattr(SimulatedGraphs, fails, failing)
        with pytest.raises(CaptureError, match="layer 0 of stage 0 can't be captured: RuntimeError: out of luck"):
            capture(observed, plan, backend="simulate")
    else:
        capture(observed, plan, backend="simulate")
    assert torch.equal(module.slot.largest, largest)
    assert module.linear.weight.grad is gradient and torch.equal(gradient, kept)
    assert torch.equal(torch.get_rng_state(), generator) and torch.equal(module.count.pending(), pending)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_random_numbers_buffers_and_counts_are_those_of_eager_execution():
    torch.manual_seed(0)
    module, observed, plan = one_layer(num_microbatches=3)
    eager = copy.deepcopy(module)
    runner, outputs = capture(observed, plan, backend="simulate"), []
    for run in (lambda m, x: runner(0, m, x), lambda m, x: eager(x)):
        torch.manual_seed(1)
        found = []
        for step in range(2):
            for m in range(3):
                y = run(m, torch.full((3, 4), step + m / 4, requires_grad=True))
                found.append(y.detach().clone())
                y.sum().backward()
        outputs.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    assert len({tuple(one.flatten().tolist()) for one in outputs[0]}) == 6
    assert torch.equal(module.mean, eager.mean) and module.count.pending() == eager.count.pending() == 6
    assert torch.equal(module.linear.weight.grad, eager.linear.weight.grad)


def with_validation(rank, world_size, words, between):
    job, step = make_job(rank, world_size, words)
    for number in range(1, 5):
        step(number)
        if between:
            validate(step.pipeline, make_task(job.config))
            generate_on(job, [1, 2, 3], num_tokens=2, temperature=1.0, seed=0)
    return [getattr(p, "_local_tensor", p).detach() for p in job.model.parameters()], step._job.features[
        "capture"
    ].session.runner.addresses()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["mesh.dp_shard=2", BF16], ["mesh.pp=2", "pipeline.schedule=1f1b"]])
def test_validation_and_generation_between_steps_change_nothing(gang, words, layout):
    num_ranks = 2 if layout else 1
    words = [*words, LAYER, *layout]
    for one, other in zip(*(run_on(gang, num_ranks, with_validation, words, on) for on in (False, True)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert len(one[1]) == len(other[1])


def notes(words, num_steps=2):
    _, step = make_job(0, 1, words)
    for number in range(1, num_steps + 1):
        step(number)
    return step._job.features["capture"].session


def test_what_stays_eager_is_said(words, tmp_path):
    moe = ["moe-tiny", *words[1:2], "model.expert_dim=24", "model.num_heads=2", *words[5:], LAYER]
    session = notes([*moe, "train.precision=float64"])
    assert session.runner is None
    (line,) = session.notes()
    assert "blocks.0 and 1 more stays eager: it reads a tensor on the host (tolist, " in line
    with pytest.raises(CaptureError, match=r"blocks.0 stays eager: it reads a tensor on the host"):
        notes([*moe, "train.precision=float64", "capture.strict=true"])


def test_a_scope_that_is_slower_than_eager_is_turned_off(words, monkeypatch):
    def times(self):
        is_attention = self._layer.name.endswith("attention")
        return Times(eager=3.0, replayed=4.0 if is_attention else 2.0)

    monkeypatch.setattr(SimulatedGraphs, "times", times)
    session = notes([*words, "capture.scope=['attention','mlp']"])
    captured, eager = session.notes()
    assert captured.endswith("2 modules in 4 graphs: blocks.0.ffn, blocks.1.ffn")
    assert eager == "blocks.0.attention and 1 more stays eager: attention measured 0.75× eager execution"


def test_speeds_are_averaged_over_ranks(gang, words):
    found = gang(2).run(averaged, [*words, "mesh.dp_shard=2"])
    assert found == [{"attention": 0.75, "mlp": 2.0}] * 2


def averaged(rank, world_size, words):
    job, _ = make_job(rank, world_size, words)
    return average_over_ranks({"attention": 0.5 + 0.5 * rank, **({"mlp": 2.0} if rank else {})}, job)


def test_what_is_captured_is_said(words):
    (line,) = notes([*words, LAYER]).notes()
    assert line == "CUDA graphs (simulate): 2 modules in 4 graphs: blocks.0, blocks.1"


@pytest.mark.parametrize("mode", ["slot", "per_microbatch"])
def test_graphs_and_memory_are_predicted(words, mode):
    """Saved bytes are those of the blocks' descriptions; pools also hold temporary memory, in blocks of 64 bytes."""
    layout = [*words, LAYER, f"capture.mode={mode}", "train.precision=float32", "model.dim=64", "train.seq_len=64"]
    session = notes(layout)
    found, plan = predict_capture(make_plan(load_words(layout)), mode=mode), session.plan
    assert found.graphs == len(plan.graphs) and found.pools == plan.num_pools and not found.weights
    assert found.static <= plan.buffer_bytes <= 1.2 * found.static
    assert found.saved <= session.runner.stats().pool_bytes
    observed = sum(plan.pool_bytes().values())
    assert found.saved == pytest.approx(observed, rel=0.1)


def test_a_scope_may_be_a_glob(words):
    session = notes([*words, "capture.scope=attention.w[qv]"])
    assert session.notes()[0].endswith("4 modules in 8 graphs: blocks.0.attention.wq … blocks.1.attention.wv")


class Regions(nn.Module):
    """Blocks whose author marks what to capture."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(4, 4),
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            nn.Linear(4, 4),
        )

    def forward(self, x):
        with graph_region("middle"):
            x = self.second(self.first(x))
        return self.third(x)


def test_modules_called_in_a_region_are_found():
    model = Regions()
    with finding_regions(model, ("region:middle", "region:other")) as found:
        model(torch.zeros(2, 4))
    assert list(found) == ["first", "second"]
    model(torch.zeros(2, 4))
    with finding_regions(model, ("region:other",)) as found:
        model(torch.zeros(2, 4))
    assert not found


def test_a_region_of_a_run_is_captured(words, monkeypatch):
    def marked(self, x_btd, tokens):
        with graph_region("block"):
            h = self.attention_norm(x_btd)
            x_btd = self.attention_add(self.attention(h, tokens), x_btd, tokens.rows_bt)
        return self.ffn_add(self.ffn(self.ffn_norm(x_btd)), x_btd, tokens.rows_bt)

    monkeypatch.setattr(TransformerBlock, "forward", marked)
    session = notes([*words, "capture.scope=region:block"], num_steps=3)
    assert "6 modules" in session.notes()[0] and session.runner.stats().replays == 6 * 2 * 4
