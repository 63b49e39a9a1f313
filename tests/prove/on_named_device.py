"""Prove layouts of one rank on `tests.named_device`, where ranks and reference must not mix devices.

In a process of its own, since the device stays.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from meshwright.plan.make_plan import make_plan
from meshwright.prove.conclude import conclude, sides_of
from meshwright.prove.record import layout_run
from meshwright.prove.record.layout_run import gather_evidence, record_rank
from meshwright.prove.record.reference_run import PlainModel
from meshwright.prove.report import render
from meshwright.prove.trace.conclude import find_place, with_place
from meshwright.prove.trace.probe import trace_rank
from tests import named_device
from tests.helpers import rank_context
from tests.prove.as_run.proofs import as_run_config
from tests.prove.proofs import Seed, data_of, small_config, small_dit_config, small_expert_config

FORWARD = Seed("tests.prove.forward_faults", "FORWARD_FAULTS", "logits are scaled")
CASES: dict[str, tuple[Any, tuple[str, ...], Seed]] = {
    "llama": (small_config, ("train.num_microbatches=2", "train.loss_chunk=16", "train.dropout=0.1"), Seed()),
    "packed": (small_config, ("data.packing=documents", "train.optimizer=muon"), Seed()),
    "captured": (small_config, ("capture.scope=layer",), Seed()),
    "experts": (small_expert_config, ("model.z_loss=0.001",), Seed()),
    "pictures": (small_dit_config, (), Seed()),
    "as run": (as_run_config, ("train.precision=float32", "train.dropout=0.1"), Seed()),
    "a fault": (small_config, (), FORWARD),
}


def proof(device: torch.device, configured: Any, words: tuple[str, ...], seed: Seed) -> dict[str, Any]:
    """Prove a layout on a device, and return what the proof says."""
    config, as_run = configured(*words), configured is as_run_config
    plan, data, context = make_plan(config), data_of(config), rank_context(0, 1)
    with seed.planted(as_run=as_run) as tamper:
        record = record_rank(config, context, data, num_steps=2, plan=plan, as_run=as_run, tamper=tamper)
    result = conclude(config, plan, [record], data, num_steps=2, as_run=as_run, device=device)
    if step := result.locate_step:
        with seed.planted() as tamper:
            trace = trace_rank(config, context, data, step=step, plan=plan, tamper=tamper)
        plain = PlainModel(config, data)
        sides = sides_of(config, gather_evidence(config, plan, [record]), plain, as_run=as_run)
        result = with_place(result, find_place(config, plan, [trace], data, plain, sides, step=step), plan)
    return {"passed": result.passed, "text": " ".join(" ".join(render(result)).split())}


def send(pipe: Connection, names: Sequence[str]) -> None:
    """Send what the proofs of cases say, or the error's text; the body of a process, whose threads can't be ended."""
    try:
        torch.set_num_threads(1)
        device, asked = named_device.use(), []
        layout_run.choose_device = lambda config, context: asked.append(config) or device
        found: Any = {name: proof(device, *CASES[name]) for name in names}
        assert len(asked) >= len(found), "ranks are on a device of their own choice"
    except BaseException:
        found = traceback.format_exc()
    pipe.send(found)
    os._exit(0)
