"""Proofs on GPUs: what they keep of a configuration, one device for ranks and reference, and on a GPU ten proofs and
faults of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from meshwright import api
from meshwright.errors import InputError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.prove import conclude
from meshwright.prove.report import render
from meshwright.prove.spec import ProofSpec, as_configured, as_proof, set_aside, set_aside_as_run
from tests.gangs.gang import GangPool, start_server
from tests.helpers import rank_context
from tests.prove import proofs
from tests.prove.as_run.proofs import SIZES
from tests.prove.kernel_faults import COMPILED, FAULTS, PACKED
from tests.prove.on_named_device import CASES, send
from tests.prove.proofs import STEP, Seed, assert_named, packed_documents

CUDA = "train.device=cuda"
NARROW = ("train.precision=bfloat16", "model.head_dim=16")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Packed documents."""
    return packed_documents(tmp_path_factory.mktemp("packed"))


def proof_on(gang: GangPool, device: str, words: Sequence[str], documents: list[str], *, as_run: bool, fault: str = ""):
    """The proof of a small model of the preset among the words, on documents where `PACKED` is."""
    preset = next((word for word in words if "=" not in word and word != PACKED), "llama-tiny")
    keys = [f"train.device={device}", *(word for word in words if "=" in word)]
    config = load(preset, [*SIZES.get(preset, STEP), *(documents if PACKED in words else []), *keys])
    seed = Seed("tests.prove.kernel_faults", "FAULTS", fault) if fault else Seed()
    return proofs.proof(gang, (as_configured if as_run else as_proof)(config), seed, as_run=as_run)


@pytest.mark.parametrize(("asked", "kept"), [("cuda", "cuda"), ("auto", "cpu"), ("cpu", "cpu")])
def test_gpus_are_used_where_they_are_named(asked: str, kept: str) -> None:
    config = load("llama-tiny", [f"train.device={asked}", "capture.scope=layer", "train.precision=bfloat16"])
    exact, run = as_proof(config), as_configured(config)
    assert {exact.train.device, run.train.device} == {kept}
    assert exact.capture.backend == "auto" and run.capture.backend == ("auto" if kept == "cuda" else "simulate")
    kernels = "kernels that have no float64 are set aside"
    assert any(kernels in line for line in set_aside(config, make_plan(config))) == (kept == "cuda")
    assert any("capture.scope" in line for line in set_aside_as_run(config)) == (kept == "cpu")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_ranks_without_a_gpu_are_an_error() -> None:
    with pytest.raises(InputError, match="0 CUDA devices"):
        api.prove(load("llama-tiny", [*proofs.SMALL, CUDA]))


class FirstDeviceError(Exception):
    """Ends a process of a proof where it uses its device."""


@pytest.mark.parametrize("body", [conclude.record_layout, conclude.compare_with_reference, conclude.trace_on_ranks])
def test_every_process_uses_the_device_that_it_is_given(monkeypatch, tmp_path, body) -> None:
    """Not the second pass's reference, which compares on the CPU."""
    device, used = torch.device("meta"), []

    def use(*args: Any, **named: Any) -> None:
        used.extend(one for one in (*args, *named.values()) if isinstance(one, torch.device))
        raise FirstDeviceError

    monkeypatch.setattr(conclude, "choose_device", lambda config, context: device)
    for name in ("rank_group", "conclude"):
        monkeypatch.setattr(conclude, name, use)
    monkeypatch.setattr(conclude, "load_records", lambda spec: [])
    config = proofs.small_config()
    with pytest.raises(FirstDeviceError):
        body(rank_context(0, 1), ProofSpec(config, make_plan(config), 1, tmp_path))
    assert used == [device]


QUICK = ("llama", "captured", "experts", "as run", "a fault")


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([one for one in CASES if one not in QUICK], marks=pytest.mark.slow)], ids=", ".join
)
def test_ranks_and_reference_are_on_one_device(gang: GangPool, names: Sequence[str]) -> None:
    """In a process forked from the gangs' server, which has imported torch."""
    start_server()
    context = get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(there, names))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    assert isinstance(found, dict), found
    if fault := found.pop("a fault", None):
        assert not fault["passed"] and "output of head" in fault["text"] and "0.500 ×" in fault["text"]
    assert len(found) >= 2 and all(one["passed"] for one in found.values()), found


SLOW = (COMPILED,)  # imports the compiler


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_a_fault_of_a_kernel_is_caught(gang: GangPool, documents: list[str], name: str) -> None:
    assert_named(proof_on(gang, "cpu", FAULTS[name].layout, documents, as_run=True, fault=name), FAULTS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_kernel_is_caught_on_a_gpu(gang: GangPool, documents: list[str], name: str) -> None:
    assert_named(proof_on(gang, "cuda", FAULTS[name].layout, documents, as_run=True, fault=name), FAULTS[name])


PROOFS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "dense": (True, NARROW),
    "packed, varlen": (True, (PACKED, *NARROW)),
    "packed, flex": (True, (PACKED, "model.head_dim=16")),
    "grouped products": (True, ("moe-tiny", "train.precision=bfloat16", "model.dim=32", "model.expert_dim=16")),
    "dropout": (True, (*NARROW, "train.dropout=0.1")),
    "float8": (True, (*NARROW, "float8.recipe=current")),
    "compiled": (True, (*NARROW, "train.compile=true")),
    "captured": (False, ("capture.scope=layer", "train.num_microbatches=2")),
    "qwen3": (True, ("hf-tiny", "model.config=qwen3", "train.precision=bfloat16")),
    "pictures": (True, ("dit-digits", "train.precision=bfloat16")),
    "muon": (False, ("train.optimizer=muon",)),
}
"""Whether they are proved as run, and the configuration."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROOFS)
def test_a_layout_is_proved_on_a_gpu(gang: GangPool, documents: list[str], name: str) -> None:
    as_run, words = PROOFS[name]
    result = proof_on(gang, "cuda", words, documents, as_run=as_run)
    assert result.passed, "\n".join(render(result))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROOFS)
def test_the_same_layouts_are_proved_on_the_cpu(gang: GangPool, documents: list[str], name: str) -> None:
    as_run, words = PROOFS[name]
    result = proof_on(gang, "cpu", words, documents, as_run=as_run)
    assert result.passed, "\n".join(render(result))
