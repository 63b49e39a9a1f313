"""Report of a proof, as JSON and as at most one screen of text.

The JSON has the keys `passed`, `losses`, `parameters`, `grad_norm` and more. Non-finite numbers become null and are
described in the cause. A parameter's `max_abs_error`, `relative_error` and `cause` refer to its gradient or, if another
value is wrong first, to that (see `about`). Each tensor is that of the first step in which it is wrong or, if it is
right in all, of the step with the largest error.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.errors import RunError
from meshwright.models.contract.model_facts import LossUnit
from meshwright.prove.result import Diagnosis, Finding, ParameterResult, ProofResult, StepValue, TensorResult
from meshwright.units import counted

MAX_LINES = 24
WIDTH = 80
MAX_NAMES = 2
NO_BREAK = "\u00a0"


def to_json(result: ProofResult, *, loss_unit: str) -> dict[str, Any]:
    """Convert the result to JSON-serializable values; `loss_unit` is the name of the unit of its losses."""
    samples = [finding.diagnosis.text for finding in result.findings if finding.about == "samples"]
    causes = {name: one.diagnosis for one in reversed(result.findings) for name in one.members}
    norm = next((step.diagnosis for step in result.norms if step.diagnosis is not None), None)
    found: dict[str, Any] = {
        "passed": result.passed,
        "as_run": result.as_run,
        "precision": result.precision,
        LossUnit(loss_unit).metric("losses"): [_step(step) for step in result.losses],
        "parameters": [_parameter(parameter, causes.get(parameter.name)) for parameter in result.parameters],
        "grad_norm": {
            **_verdict(all(step.ok for step in result.norms), norm),
            "steps": [_step(step) for step in result.norms],
        },
        "samples": {"verdict": _verdict_word(not samples), "findings": samples},
        "error_feedback": None
        if result.feedback is None
        else {**asdict(result.feedback), "verdict": _verdict_word(result.feedback.ok)},
        "checks": {check.name: check.ok for check in checks(result)},
        "causes": [
            {
                "kind": one.diagnosis.kind.value,
                "about": one.about,
                "step": one.step,
                "cause": one.diagnosis.text,
                "members": list(one.members),
            }
            for one in result.findings
        ],
        "evidence": [finding.diagnosis.text for finding in result.findings if finding.about == "evidence"],
        "notes": list(result.notes),
        "axes": asdict(result.axes),
        "num_ranks": result.axes.num_ranks(),
        "num_microbatches": result.num_microbatches,
        "num_steps": result.num_steps,
    }
    plain: dict[str, Any] = finite_json(found)
    return plain


def ended_to_json(error: RunError) -> dict[str, Any]:
    """Convert the error that ended a layout before it could be compared, as a finding of its own."""
    cause = {"kind": "ended", "about": "layout", "cause": error.what, "where": error.where, "members": []}
    return {"passed": False, "causes": [cause]}


def render_ended(error: RunError) -> list[str]:
    """Return the lines of a proof whose layout ended with an error: what the exception says, where ranks were, and the
    traceback."""
    first, *trace = error.what.splitlines()
    said = next((line for line in reversed(trace) if line and not line.startswith(" ")), "")
    places = [("" if number else "where", line.strip()) for number, line in enumerate(error.where.splitlines())]
    lines = [*wrapped(f"✗ layout   {first}", "    ")]
    for label, text in (("cause", said), *places, ("rule", error.rule)):
        lines += wrapped(f"  {label:7} {text}", " " * 10) if text else []
    return lines + trace


def finite_json(value: Any) -> Any:
    """Return JSON values with non-finite numbers as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return value


def _verdict_word(ok: bool) -> str:
    return "ok" if ok else "wrong"


def _verdict(ok: bool, diagnosis: Diagnosis | None) -> dict[str, Any]:
    wrong = diagnosis if not ok else None
    return {
        "verdict": _verdict_word(ok),
        "cause": "" if wrong is None else wrong.text,
        "kind": "" if wrong is None else wrong.kind.value,
    }


def _step(step: StepValue) -> dict[str, Any]:
    return {
        "step": step.step,
        "reference": step.expected,
        "layout": list(step.observed),
        "relative_error": step.relative_error,
        "worst_rank": step.rank,
        "tolerance": step.tolerance,
        **_verdict(step.ok, step.diagnosis),
    }


def _parameter(parameter: ParameterResult, cause: Diagnosis | None) -> dict[str, Any]:
    tensors = parameter.tensors()
    root = tensors[parameter.about]
    return {
        "name": parameter.name,
        "max_abs_error": root.error.max_abs,
        "relative_error": root.error.relative,
        **_verdict(parameter.ok and cause is None, root.diagnosis or cause),
        "about": parameter.about,
        "shape": list(parameter.shape),
        "gradient": None,
        **{about: _tensor(tensor) for about, tensor in tensors.items()},
    }


def _tensor(tensor: TensorResult) -> dict[str, Any]:
    error = tensor.error
    worst = {"rank": error.rank, "index": list(error.index), "found": error.observed, "due": error.expected}
    return {
        "step": tensor.step,
        "max_abs_error": error.max_abs,
        "relative_error": error.relative,
        "tolerance": tensor.tolerance,
        "proves": tensor.proves,
        **_verdict(tensor.ok, tensor.diagnosis),
        "worst": None if error.rank is None else worst,
        "replicated_over": list(tensor.replicated),
        "num_copies": tensor.num_replicas,
        "copies_bitwise_equal": tensor.replicas_equal,
        "copy_difference": tensor.max_replica_difference,
    }


SHOWN_ON_FAILURE = ("other steps", "replicas", "initial")
"""Checks listed in the summary line only if they fail."""


@dataclass(frozen=True)
class ReportCheck:
    """Entry of the summary line."""

    name: str
    label: str
    ok: bool


def checks(result: ProofResult) -> list[ReportCheck]:
    """Return all checks in the order of the summary line."""
    num, about = len(result.parameters), {one.about for one in result.findings}
    gradients = [p.gradient for p in result.parameters if p.gradient is not None]
    provable = [gradient for gradient in gradients if gradient.proves]
    right = {
        "loss": sum(step.ok for step in result.losses),
        "gradients": sum(gradient.ok for gradient in provable),
        "norm": sum(step.ok for step in result.norms),
        "parameters": sum(p.update.ok for p in result.parameters),
        "initial": sum(p.initial.ok for p in result.parameters),
    }
    steps = counted(result.num_steps, "step")
    is_exact = not result.as_run and all(one.tolerance <= 1e-12 for one in gradients)
    limit = " ≤ 1e-12" if is_exact else ""
    all_norms, all_updates = right["norm"] == result.num_steps, right["parameters"] == num
    after = f"parameters after each of {steps}" if result.num_steps > 1 else "parameters after 1 step"
    applied = not about & {"clipping", "learning rate"}
    found = [
        ReportCheck("loss", f"loss {right['loss']} of {steps}", 0 < right["loss"] == result.num_steps),
        ReportCheck(
            "gradients",
            f"gradients {right['gradients']} of {len(gradients)}{limit}",
            bool(gradients) and all(gradient.ok for gradient in gradients),
        ),
        ReportCheck("grad_norm", "norm" if all_norms else f"norm {right['norm']} of {steps}", all_norms),
        ReportCheck("clipping", "clipping and learning rate", applied),
        ReportCheck(
            "parameters", after if all_updates else f"{after} {right['parameters']} of {num}", bool(num) and all_updates
        ),
        ReportCheck("samples", "samples", "samples" not in about),
        ReportCheck("other steps", "skipped steps, learning rates, epochs", "other steps" not in about),
    ]
    copied = [tensor for p in result.parameters for tensor in p.tensors().values() if tensor.num_replicas > 1]
    if copied and not result.as_run:
        found.append(ReportCheck("replicas", "replicas", all(tensor.replicas_agree for tensor in copied)))
    found.append(ReportCheck("initial", f"initial weights {right['initial']} of {num}", right["initial"] == num))
    if result.feedback is not None and result.feedback.tells:
        found.append(ReportCheck("error feedback", "error feedback", result.feedback.ok))
    return found


TENSOR_KINDS = {
    "initial": "initial weights",
    "gradient": "gradients",
    "update": "parameters",
}
"""Display name of each kind of tensor."""


def title(finding: Finding) -> str:
    """Format what a finding is about: `all 39 gradients`, `head.weight`, `embed.weight and 3 more (4 of 39 gradients)`,
    with the step if it is not the first."""
    when = f" of step {finding.step}" if finding.step > 1 and finding.about not in ("forward", "samples") else ""
    if finding.about == "update":
        when = f" after step {finding.step}"
    if not finding.members:
        return finding.about + when
    sort, num = TENSOR_KINDS.get(finding.about, f"{finding.about}s"), len(finding.members)
    if num == finding.num_all > 1:
        return f"all {num} {sort}{when}"
    names = ", ".join(finding.members[:MAX_NAMES])
    if num <= MAX_NAMES:
        return names + (when if finding.about != "gradient" else f" (gradient{when})" * bool(when))
    return f"{names} and {num - MAX_NAMES} more ({num} of {finding.num_all} {sort}{when})"


def render(result: ProofResult) -> list[str]:
    """Render the findings and the summary line as at most one screen of text."""
    summary = [line.replace(NO_BREAK, " ") for line in wrapped(_summary(result), "  ")]
    tail = [line for note in result.notes for line in wrapped(f"  note    {note}", " " * 10)] + summary
    if result.passed:
        return [*_margins(result), *tail]
    return finding_lines(result.findings, tail)


def finding_lines(findings: Sequence[Finding], tail: list[str]) -> list[str]:
    """Return the lines of findings that follow from no other, or of all if there are no such, and the last lines."""
    causes = [one for one in findings if not one.is_consequence] or findings
    return one_screen([list(_finding_lines(one)) for one in causes], tail)


def one_screen(entries: list[list[str]], tail: list[str]) -> list[str]:
    """Return as many findings as fit the screen above the last lines."""
    lines: list[str] = []
    for at, entry in enumerate(entries):
        left = len(entries) - at
        if lines and len(lines) + len(entry) + len(tail) + (left > 1) > MAX_LINES:
            lines.append(f"… {counted(left, 'more finding')}: see the JSON")
            break
        lines += entry
    return lines + tail


def _finding_lines(one: Finding) -> Iterator[str]:
    diagnosis = one.diagnosis
    yield from wrapped(f"✗ {title(one)}   {diagnosis.symptom}", " " * 4)
    yield from wrapped(f"  cause   {diagnosis.cause}", " " * 10)
    if diagnosis.detail:
        where = f"in {one.members[0]}: " if len(one.members) > 1 else ""
        yield from wrapped(f"  detail  {where}{diagnosis.detail}", " " * 10)


def wrapped(line: str, indent: str) -> list[str]:
    """Wrap a line to the width of the screen, with non-breaking spaces kept."""
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    ) or [line]


def _summary(result: ProofResult) -> str:
    shown = [check for check in checks(result) if check.name not in SHOWN_ON_FAILURE or not check.ok]
    return " · ".join(f"{check.label} {'✓' if check.ok else '✗'}".replace(" ", NO_BREAK) for check in shown)


def _margins(result: ProofResult) -> list[str]:
    """Return the largest relative errors of a proof that passed; as run, beside what rounding explains."""
    gradients = {p.name: p.gradient for p in result.parameters if p.gradient is not None}
    if not gradients:
        return []
    if not result.as_run:
        updates = {p.name: p.update for p in result.parameters}
        shown = [
            f"{what} {found[name].error.relative:.1e} ({name})"
            for what, found in (("gradient", gradients), ("update", updates))
            for name in [max(found, key=lambda name, found=found: found[name].error.relative)]  # type: ignore[misc]
        ]
        return wrapped(f"largest relative error: {' · '.join(shown)}", "  ")
    loss = max(result.losses, key=lambda step: step.relative_error)
    shown = [f"loss {loss.relative_error:.1e} of {loss.tolerance:.1e}"]
    if known := [name for name, found in gradients.items() if math.isfinite(found.tolerance)]:
        nearest = max(known, key=lambda name: gradients[name].error.relative / (gradients[name].tolerance or 1.0))
        check = gradients[nearest]
        shown.append(f"gradient {check.error.relative:.1e} of {check.tolerance:.1e} ({nearest})")
    lines = [f"relative errors, and what rounding to {result.precision} explains: {' · '.join(shown)}"]
    if (found := result.feedback) is not None:
        lines.append(
            f"errors of {found.method} over {counted(result.num_steps, 'step')}: {found.observed:.1f} × those of one; "
            f"{found.with_feedback:.1f} with error feedback, {found.without:.1f} without"
        )
    return [line for text in lines for line in wrapped(text, "  ")]
