"""Run folders as runs leave them, written without training."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from meshwright.config.load import load
from meshwright.config.source import to_toml
from meshwright.pipeline.simulate import Costs, simulate
from meshwright.pipeline.timeline import to_values
from meshwright.plan.compare import hashes
from meshwright.plan.make_plan import make_plan
from meshwright.plan.serialize import to_json
from meshwright.plan.traffic import predict_traffic
from meshwright.train.record.step_parts import StepParts

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f64540"
    "0000000049454e44ae426082"
)


def write_folder(path, words, *, steps=40, ended="complete", measured=True):
    """Write the folder of a run of a configuration, given by words, and return its path."""
    config = load(words[0], [*words[1:], f"train.steps={max(steps, 1)}"])
    plan = make_plan(config)
    path.mkdir()
    (path / "config.toml").write_text(to_toml(config))
    (path / "plan.json").write_text(to_json(plan))
    unit = "squared_error" if "dit" in words[0] else "bits_per_byte"
    (path / "metrics.jsonl").write_text("".join(json.dumps(_step(n, steps, unit)) + "\n" for n in range(1, steps + 1)))
    events = [*_started(config, plan), *(_measured(plan, steps) if measured else []), *_made(path, unit, steps)]
    if ended:
        message = "" if ended == "complete" else "rank 1 failed in step 3\nwhere  rank 1 of 2\nfix    --resume auto"
        events.append({"event": "end", "outcome": ended, "message": message, "seconds": 12.5})
    lines = (json.dumps({"time": "2026-11-25T12:00:00+00:00", **event}) + "\n" for event in events)
    (path / "events.jsonl").write_text("".join(lines))
    return path


def _step(number, steps, unit):
    found = {
        "step": number,
        f"loss_{unit}": 2 + 6 * math.exp(-number / 20),
        "grad_norm": 1 + 5 / number,
        "lr": 1e-3 * min(1, number / 10),
        "tokens_per_s": 14_000 + 100 * (number % 7),
        "memory_bytes": 400 * 2**20,
        "skipped": number == 7,
    }
    return found | ({f"validation_loss_{unit}": 2.2} if number in (steps // 2, steps) else {})


def _started(config, plan):
    axes = config.mesh.axes()
    yield {
        "event": "start", "after_step": 0, "versions": {"python": "3.11.7", "torch": "2.13.0"}, "host": "host",
        "name": config.name, "num_params": 850_000, "corpus": "29.2 MB of text", "mesh": config.mesh.layout(),
        "num_ranks": axes.num_ranks(), "device": "cpu", "backend": "gloo", "global_batch": plan.batch.global_batch,
        "seq_len": plan.batch.tokens, "steps": config.train.steps, "predicted_bytes": 0,
    }  # fmt: skip
    seconds = {"data": 0.5, "processes and imports": 2.0, "initial values": 0.25, "first step": 0.75}
    ranks = [seconds | {"initial values": 0.25 + rank} for rank in range(axes.num_ranks())]
    yield {"event": "under way", "ranks": [*ranks[:-1], ranks[-1] | {"compiling": 4.0}]}
    yield {"event": "note", "text": "a <b>warning</b> & more"}


def _measured(plan, steps):
    timeline = simulate(plan.schedule, Costs.uniform(forward=0.01, backward_input=0.01, backward_weight=0.01)).timeline
    traffic = predict_traffic(plan)
    memory = {"parameters": 4 << 20, "gradients": 4 << 20, "optimizer": 8 << 20, "buffers": 0, "base": 280 << 20}
    sent = [{"purposes": [one.purpose], "counted": asdict(one.sent), "predicted": asdict(one.sent)}
            for one in traffic.entries]  # fmt: skip
    ranks = range(plan.mesh.num_ranks())
    yield {
        "event": "measured", "plan": hashes(plan).fingerprint,
        "steps": [steps // 2, steps], "cost_s": 0.002, "steps_s": 4.0, "sent_by": traffic.rank,
        "parts": [asdict(StepParts(0.1, 0.001 * rank, 0.02, 0.03, 0.004, 0.0, 0.001)) for rank in ranks],
        "memory": [memory | {"peak": (400 + rank) << 20} for rank in ranks], "sent": sent,
        "timeline": to_values({"predicted": timeline, "measured": timeline}),
    }  # fmt: skip


def _made(path, unit, steps):
    (path / "checkpoints" / f"{steps:08d}").mkdir(parents=True)
    yield {"event": "checkpoint", "step": steps // 2, "path": f"{steps // 2:08d}", "seconds": 0.2}
    yield {"event": "checkpoint", "step": steps, "path": f"{steps:08d}", "seconds": 0.2}
    if unit == "squared_error":
        (path / "samples").mkdir()
        (path / "samples" / "step-20.png").write_bytes(PNG)
        yield {"event": "image", "step": 20, "name": "samples", "path": "elsewhere/samples/step-20.png"}
    else:
        yield {"event": "sample", "step": steps, "text": "def f(x):\n    return <x> & y"}
    (path / "logs").mkdir()
    (path / "logs" / "rank-0.log").write_text("2026-11-25 12:00:00 WARNING a: b\n" * 300)
    all_to_all = {"purpose": "experts", "sent": 1 << 20, "predicted": 1 << 20, "explained": 1 << 20, "basis": "load"}
    yield {"event": "counted", "steps": steps, "all_to_alls": [all_to_all]}
