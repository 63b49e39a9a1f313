"""Process entry points of a proof as run, and its report: the ranks, then the reference and the comparison."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from meshwright.config.facts_for_family import run_facts
from meshwright.models.contract.model_facts import LossUnit
from meshwright.prove.as_run.judge import judge
from meshwright.prove.as_run.record_run import AsRunRecord, record_as_run
from meshwright.prove.as_run.result import AsRunResult, Check, Finding
from meshwright.prove.compare.result import FaultKind
from meshwright.prove.report import MAX_NAMES, NO_BREAK, finding_lines, finite_json, one_screen, wrapped
from meshwright.prove.spec import ProofSpec
from meshwright.train.build_job import rank_group
from meshwright.train.launch.rank_context import RankContext
from meshwright.units import counted


def record_layout(context: RankContext, spec: ProofSpec) -> None:
    """Train as one rank of the layout under proof and save its record in the spec's folder."""
    config, plan = spec.config, spec.plan
    with rank_group(config, plan, context, torch.device("cpu")):
        data = config.family.open_data(run_facts(config))
        record = record_as_run(config, context, data, num_steps=spec.num_steps, plan=plan)
        torch.save(vars(record), spec.record(context.rank))


def compare_with_reference(context: RankContext, spec: ProofSpec) -> None:
    """Compute the reference, compare the ranks' records with it, and save the result in the same folder."""
    context.post("comparing")
    num_ranks = spec.config.mesh.axes().num_ranks()
    records = [AsRunRecord(**torch.load(spec.record(rank), weights_only=True)) for rank in range(num_ranks)]
    data = spec.config.family.open_data(run_facts(spec.config))
    result = judge(spec.config, spec.plan, records, data)
    answer = {"report": to_json(result, loss_unit=records[0].loss_unit), "lines": render(result)}
    spec.result.write_text(json.dumps(answer), "utf-8")


def to_json(result: AsRunResult, *, loss_unit: str) -> dict[str, Any]:
    """Convert the result to JSON-serializable values; `loss_unit` is the name of the unit of its losses."""
    found: dict[str, Any] = {
        "passed": result.passed,
        "as_run": True,
        "precision": result.precision,
        LossUnit(loss_unit).metric("losses"): _check(result.losses),
        "grad_norm": _check(result.norms),
        "parameters": [
            {
                "name": name,
                "gradient": {**_check(check), "proves": check.proves},
                "updates": _check(result.updates[name]) if name in result.updates else None,
                **_cause(result, name),
            }
            for name, check in result.gradients.items()
        ],
        "error_feedback": None
        if result.feedback is None
        else {**asdict(result.feedback), "verdict": _word(result.feedback.ok)},
        "causes": [
            {
                "kind": finding.diagnosis.kind.value,
                "about": finding.about,
                "cause": finding.diagnosis.text,
                "members": list(finding.members),
            }
            for finding in result.findings
        ],
        "notes": list(result.notes),
        "axes": asdict(result.axes),
        "num_ranks": result.axes.num_ranks(),
        "num_microbatches": result.num_microbatches,
        "num_steps": result.num_steps,
    }
    plain: dict[str, Any] = finite_json(found)
    return plain


def _word(ok: bool) -> str:
    return "ok" if ok else "wrong"


def _check(check: Check) -> dict[str, Any]:
    return {
        "relative_error": check.error,
        "tolerance": check.tolerance,
        "step": check.step,
        "verdict": _word(check.ok),
    }


def _cause(result: AsRunResult, name: str) -> dict[str, Any]:
    causes = [finding.diagnosis.text for finding in result.findings if name in finding.members]
    ok = not causes and result.gradients[name].ok and (name not in result.updates or result.updates[name].ok)
    return {"verdict": _word(ok), "cause": causes[0] if causes else ""}


def render(result: AsRunResult) -> list[str]:
    """Render the findings, what is not proved, and the summary as at most one screen of text."""
    tail = [line for note in result.notes for line in wrapped(f"  note    {note}", " " * 10)]
    tail += [line.replace(NO_BREAK, " ") for line in wrapped(_summary(result), "  ")]
    if result.passed:
        return [*_margins(result), *tail]
    # Consequences are hidden if a cause is known; the summary still counts them.
    causes = [one for one in result.findings if one.diagnosis.kind is not FaultKind.CONSEQUENCE] or result.findings
    return one_screen([list(finding_lines(_title(one, result), one.members, one.diagnosis)) for one in causes], tail)


def _title(finding: Finding, result: AsRunResult) -> str:
    num, num_all = len(finding.members), len(result.gradients)
    if not num:
        return finding.about
    if num == num_all > 1:
        return f"all {num} {finding.about}"
    shown = ", ".join(finding.members[:MAX_NAMES])
    more = f" and {num - MAX_NAMES} more" if num > MAX_NAMES else ""
    return f"{shown}{more} ({finding.about})"


def _summary(result: AsRunResult) -> str:
    gradients, updates = result.gradients.values(), result.updates.values()
    provable = [check for check in gradients if check.proves]
    shown = [
        (f"losses of {counted(result.num_steps, 'step')}", result.losses.ok),
        (f"gradients {sum(check.ok for check in provable)} of {len(result.gradients)}", all(c.ok for c in gradients)),
        ("norm", result.norms.ok),
        (f"updates {sum(check.ok for check in updates)} of {len(result.updates)}", all(c.ok for c in updates)),
        ("samples", not any(finding.about == "samples" for finding in result.findings)),
    ]
    if result.feedback is not None:
        shown.append(("error feedback", result.feedback.ok))
    return " · ".join(f"{label} {'✓' if ok else '✗'}".replace(" ", NO_BREAK) for label, ok in shown)


def _margins(result: AsRunResult) -> list[str]:
    """Return errors beside their tolerances: the loss, and the gradient that comes nearest to its tolerance."""
    nearest = max(result.gradients, key=lambda name: result.gradients[name].error / result.gradients[name].tolerance)
    check, loss = result.gradients[nearest], result.losses
    lines = [
        f"relative errors, and what rounding to {result.precision} explains: loss {loss.error:.1e} of "
        f"{loss.tolerance:.1e} · gradient {check.error:.1e} of {check.tolerance:.1e} ({nearest})"
    ]
    if result.feedback is not None:
        found = result.feedback
        lines.append(
            f"errors of {found.method} over {counted(result.num_steps, 'step')}: {found.observed:.1f} × those of one; "
            f"{found.with_feedback:.1f} with error feedback, {found.without:.1f} without"
        )
    return [line for text in lines for line in wrapped(text, "  ")]
