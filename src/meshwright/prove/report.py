"""Report of a proof, as JSON and as at most one screen of text.

The JSON has the keys `passed`, `losses`, `parameters`, `grad_norm` and more. Non-finite numbers become null and are
described in the cause. A parameter's `max_abs_error`, `relative_error` and `cause` refer to its gradient at step 1 or,
if that is correct, to its earliest wrong value (see `about`). All three also appear under `initial`, `gradient`,
`after_first_step` and `after_steps`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.models.contract.model_facts import LossUnit
from meshwright.prove.compare.result import Diagnosis, FaultKind, ParameterResult, ProofResult, StepValue, TensorResult
from meshwright.units import counted

MAX_LINES = 24
WIDTH = 80
MAX_NAMES = 2
NO_BREAK = "\u00a0"


def to_json(result: ProofResult, *, loss_unit: str) -> dict[str, Any]:
    """Convert the result to JSON-serializable values; `loss_unit` is the name of the unit of its losses."""
    found: dict[str, Any] = {
        "passed": result.passed,
        LossUnit(loss_unit).metric("losses"): [_step(step, result.losses.diagnosis) for step in result.losses.steps],
        "parameters": [_parameter(parameter) for parameter in result.parameters],
        "grad_norm": {
            **_verdict(result.grad_norm.ok, result.grad_norm.diagnosis),
            "steps": [_step(step, result.grad_norm.diagnosis) for step in result.grad_norm.steps],
        },
        "samples": {
            "verdict": _verdict_word(not result.samples),
            "findings": [finding.text for finding in result.samples],
        },
        "checks": {check.name: check.ok for check in checks(result)},
        "causes": [
            {"kind": g.diagnosis.kind.value, "about": g.about, "cause": g.diagnosis.text, "members": list(g.members)}
            for g in reported_findings(result)
        ],
        "evidence": [finding.text for finding in result.findings],
        "notes": list(result.notes),
        "axes": asdict(result.axes),
        "num_ranks": result.axes.num_ranks(),
        "num_microbatches": result.num_microbatches,
        "num_steps": result.num_steps,
        "tolerance": {"step_1": result.gradient_tolerance, "later": result.later_tolerance},
    }
    plain: dict[str, Any] = finite_json(found)
    return plain


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
    wrong = not ok and diagnosis is not None
    return {
        "verdict": _verdict_word(ok),
        "cause": diagnosis.text if wrong and diagnosis is not None else "",
        "kind": diagnosis.kind.value if wrong and diagnosis is not None else "",
    }


def _step(step: StepValue, diagnosis: Diagnosis | None) -> dict[str, Any]:
    return {
        "step": step.step,
        "reference": step.expected,
        "layout": list(step.observed),
        "relative_error": step.relative_error,
        "worst_rank": step.rank,
        "tolerance": step.tolerance,
        **_verdict(step.ok, diagnosis),
    }


def _parameter(parameter: ParameterResult) -> dict[str, Any]:
    root = parameter.root
    about = next(about for about, tensor in _tensors_by_kind(parameter).items() if tensor is root)
    return {
        "name": parameter.name,
        "max_abs_error": root.error.max_abs,
        "relative_error": root.error.relative,
        **_verdict(parameter.ok, root.diagnosis),
        "about": about,
        "shape": list(parameter.shape),
        **{about: None if tensor is None else _tensor(tensor) for about, tensor in _tensors_by_kind(parameter).items()},
    }


def _tensors_by_kind(parameter: ParameterResult) -> dict[str, TensorResult | None]:
    """Return the verdicts on a parameter by JSON key, in the order a fault propagates."""
    return {
        "initial": parameter.initial,
        "gradient": parameter.gradient,
        "after_first_step": parameter.first,
        "after_steps": parameter.final,
    }


def _tensor(tensor: TensorResult) -> dict[str, Any]:
    error = tensor.error
    worst = {"rank": error.rank, "index": list(error.index), "found": error.observed, "due": error.expected}
    return {
        "max_abs_error": error.max_abs,
        "relative_error": error.relative,
        "tolerance": tensor.tolerance,
        **_verdict(tensor.ok, tensor.diagnosis),
        "worst": None if error.rank is None else worst,
        "replicated_over": list(tensor.replicated),
        "num_copies": tensor.num_replicas,
        "copies_bitwise_equal": tensor.replicas_equal,
        "copy_difference": tensor.max_replica_difference,
    }


SHOWN_ON_FAILURE = ("branches", "replicas", "first", "initial")
"""Checks listed in the summary line only if they fail."""


@dataclass(frozen=True)
class ReportCheck:
    """Entry of the summary line."""

    name: str
    label: str
    ok: bool


def checks(result: ProofResult) -> list[ReportCheck]:
    """Return all checks in the order of the summary line."""
    losses, norms, num = result.losses, result.grad_norm, len(result.parameters)
    gradients = [p.gradient for p in result.parameters if p.gradient is not None]
    right, final = sum(gradient.ok for gradient in gradients), sum(p.final.ok for p in result.parameters)
    initial = [p.initial for p in result.parameters if p.initial is not None]
    copied = [tensor for p in result.parameters for tensor in p.tensors() if tensor.num_replicas > 1]
    first = [p.first for p in result.parameters if p.first is not None]
    steps = f"{result.num_steps} step{'s' if result.num_steps != 1 else ''}"
    limit = f"{result.gradient_tolerance:.0e}".replace("e-0", "e-")
    after = f"parameters after {steps}"
    found = [
        ReportCheck("loss", f"loss {losses.num_right()} of {steps}", losses.ok),
        ReportCheck("gradients", f"gradients {right} of {len(gradients)} ≤ {limit}", 0 < right == len(gradients)),
        ReportCheck("grad_norm", "norm" if norms.ok else f"norm {norms.num_right()} of {steps}", norms.ok),
        ReportCheck("parameters", after if final == num else f"{after} {final} of {num}", 0 < final == num),
        ReportCheck("samples", "samples", not result.samples),
        ReportCheck("branches", "skipped steps, learning rates, epochs", not result.branches),
    ]
    if copied:
        found.append(ReportCheck("replicas", "replicas", all(tensor.replicas_agree for tensor in copied)))
    for name, label, tensors in (("first", "parameters after step 1", first), ("initial", "initial weights", initial)):
        if tensors:
            num_ok = sum(tensor.ok for tensor in tensors)
            found.append(ReportCheck(name, f"{label} {num_ok} of {len(tensors)}", num_ok == len(tensors)))
    return found


TENSOR_KINDS = {
    "initial": ("initial weights", ""),
    "gradient": ("gradients", ""),
    "after_first_step": ("parameters", " after step 1"),
    "after_steps": ("parameters", " after the last step"),
}
"""Display name of each kind of tensor, and when it was recorded."""


@dataclass(frozen=True)
class ReportedFinding:
    """Diagnosis with all affected parameters."""

    about: str
    """Kind of value: `gradient`, `loss`, …"""
    diagnosis: Diagnosis
    members: tuple[str, ...] = ()
    """Affected parameters; empty for other kinds of values."""
    num_all: int = 0
    """Total number of parameters with a tensor of this kind."""

    def title(self) -> str:
        """Format the members: `all 39 gradients`, `head.weight`, `embed.weight and 3 more (4 of 39 gradients)`."""
        if not self.members:
            return self.about
        sort, after = TENSOR_KINDS[self.about]
        num = len(self.members)
        if num == self.num_all > 1:
            return f"all {num} {sort}{after}"
        shown = ", ".join(self.members[:MAX_NAMES])
        if num <= MAX_NAMES:
            return shown + after
        return f"{shown} and {num - MAX_NAMES} more ({num} of {self.num_all} {sort}{after})"


def reported_findings(result: ProofResult) -> list[ReportedFinding]:
    """Group parameters by diagnosis, causes before consequences."""
    found = [ReportedFinding("evidence", finding) for finding in result.findings]
    found += [ReportedFinding("samples", finding) for finding in result.samples]
    found += [ReportedFinding(_known_title(finding), finding) for finding in result.known]
    found += [ReportedFinding("other steps", finding) for finding in result.branches]
    for about in TENSOR_KINDS:
        found += group_by_cause(about, [(p.name, _tensors_by_kind(p)[about]) for p in result.parameters])
        if about == "gradient":
            series = (("norm", result.grad_norm), ("loss", result.losses))
            found += [
                ReportedFinding(name, finding.diagnosis) for name, finding in series if finding.diagnosis is not None
            ]
    return sorted(found, key=lambda group: group.diagnosis.kind is FaultKind.CONSEQUENCE)


def _known_title(finding: Diagnosis) -> str:
    return "forward" if finding.kind is FaultKind.FORWARD else "known fault"


def group_by_cause(about: str, tensors: list[tuple[str, TensorResult | None]]) -> list[ReportedFinding]:
    """Group wrong tensors of one kind by diagnosis, the largest group first."""
    members: dict[tuple[FaultKind, str, str], list[tuple[str, TensorResult]]] = {}
    for name, tensor in tensors:
        if tensor is not None and tensor.diagnosis is not None:
            finding = tensor.diagnosis
            members.setdefault((finding.kind, finding.symptom, finding.cause), []).append((name, tensor))
    num_all, found = sum(tensor is not None for _, tensor in tensors), []
    for group in members.values():
        # Show the detail of the member with the largest error.
        group.sort(key=lambda pair: -pair[1].error.relative)
        diagnosis = group[0][1].diagnosis
        assert diagnosis is not None, "only tensors with a diagnosis are grouped"
        found.append(ReportedFinding(about, diagnosis, tuple(name for name, _ in group), num_all))
    return sorted(found, key=lambda group: -len(group.members))


def render(result: ProofResult) -> list[str]:
    """Render the findings and the summary line as at most one screen of text."""
    summary = [line.replace(NO_BREAK, " ") for line in wrapped(_summary(result), "  ")]
    tail = [line for note in result.notes for line in wrapped(f"  note    {note}", " " * 10)] + summary
    if result.passed:
        return [*_margins(result), *tail]
    findings = reported_findings(result)
    # Hide consequences if a cause is known; the summary line still counts them.
    causes = [group for group in findings if group.diagnosis.kind is not FaultKind.CONSEQUENCE] or findings
    entries = [list(finding_lines(group.title(), group.members, group.diagnosis)) for group in causes]
    return one_screen(entries, tail)


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


def finding_lines(title: str, members: tuple[str, ...], diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a finding."""
    yield from wrapped(f"✗ {title}   {diagnosis.symptom}", " " * 4)
    yield from wrapped(f"  cause   {diagnosis.cause}", " " * 10)
    if diagnosis.detail:
        where = f"in {members[0]}: " if len(members) > 1 else ""
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
    """Return the largest relative errors of a proof that passed."""
    gradients = [(p.gradient.error.relative, p.name) for p in result.parameters if p.gradient is not None]
    final = [(p.final.error.relative, p.name) for p in result.parameters]
    findings = [
        f"{what} {error:.1e} ({name})"
        for what, found in (("gradient", gradients), ("parameter", final))
        if found
        for error, name in [max(found)]
    ]
    return [f"largest relative error: {' · '.join(findings)}"]
