"""Parts `capture`, `float8` and `kernels`: cases of `meshwright bench`, one by one, so that each leaves its figures.

Torch-free: each case runs on a rank of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from meshwright_bench.capture.benchmark import capture_body, capture_figures
from meshwright_bench.capture.cases import ON_CPU, ON_CUDA, CaptureCase, CaptureTask
from meshwright_bench.comm.benchmark import cuda_body, cuda_figures
from meshwright_bench.comm.cases import CudaTask
from meshwright_bench.expert_layers.benchmark import (
    combine_figures,
    grouped_body,
    grouped_figures,
    move_figures,
    moves_body,
)
from meshwright_bench.expert_layers.cases import GroupedTask, MovesTask
from meshwright_bench.float8.benchmark import layer_body, layer_figures, loss_body, loss_figures
from meshwright_bench.float8.cases import LayerTask, LossTask
from meshwright_bench.gpu.cases import Case, Figures, Setting
from meshwright_bench.gpu.start import text_source
from meshwright_bench.ranks import run_measurement
from meshwright_bench.report import Figure

ROUNDS, CAPTURE_ROUNDS = 3, 2
DRY_LOSS = ("llama-tiny", "train.precision=bfloat16", "train.steps=2", "train.seq_len=16", "train.global_batch=2",
            "model.num_layers=1")  # fmt: skip


def capture_cases(setting: Setting) -> list[Case]:
    """Return the cases of `bench capture`; a dry run has the first of its CPU's."""
    found = ON_CPU[:1] if setting.is_dry else ON_CUDA
    return [Case(case.name, partial(_capture, case, setting)) for case in found]


def _capture(case: CaptureCase, setting: Setting) -> Figures:
    rounds, steps = (1, 1) if setting.is_dry else (CAPTURE_ROUNDS, 2)
    task = partial(CaptureTask, case=case, device=setting.device, rounds=rounds, steps=steps)
    answer = run_measurement(capture_body, task, num_ranks=1)
    return _values(capture_figures(case, answer, on_cuda=not setting.is_dry), drop=f"{case.name}.")


def float8_cases(setting: Setting) -> list[Case]:
    """Return the speed of float8 layers, then the losses of training in float8; a dry run has two steps of these."""
    layers = Case("layers", _layers)
    losses = Case("losses", partial(_losses, setting))
    return [losses] if setting.is_dry else [layers, losses]


def _layers() -> Figures:
    answer = run_measurement(layer_body, partial(LayerTask, rounds=ROUNDS), num_ranks=1)
    return _values(layer_figures(answer), drop="cuda.")


def _losses(setting: Setting) -> Figures:
    task = partial(LossTask, device=setting.device)
    if setting.is_dry:
        task = partial(task, words=(*DRY_LOSS, text_source(setting)))
    return _values(loss_figures(run_measurement(loss_body, task, num_ranks=1)))


def kernel_cases(setting: Setting) -> list[Case]:
    """Return compressed collectives' kernels, moves of experts' rows, and grouped products."""
    found = [Case("comm", partial(_comm, setting)), Case("moves", partial(_moves, setting))]
    return found if setting.is_dry else [*found, Case("combine", _combine), Case("grouped", partial(_grouped, setting))]


def _comm(setting: Setting) -> Figures:
    task = partial(CudaTask, rounds=ROUNDS, device=setting.device)
    if setting.is_dry:
        task = partial(task, num_elements=2**12, num_sets=1, rounds=1, steps=1)
    return _values(cuda_figures(run_measurement(cuda_body, task, num_ranks=1)), drop="cuda.")


def _moves(setting: Setting) -> Figures:
    task = partial(MovesTask, device=setting.device, rounds=ROUNDS, steps=10)
    if setting.is_dry:
        task = partial(task, num_tokens=64, dim=32, num_experts=4, top_k=2, rounds=1, steps=1)
    return _values(move_figures(run_measurement(moves_body, task, num_ranks=1)))


def _combine() -> Figures:
    task = partial(MovesTask, device="cuda", num_tokens=32_768, steps=20, only_combine=True, rounds=ROUNDS)
    return _values(combine_figures(run_measurement(moves_body, task, num_ranks=1)), drop="cuda.")


def _grouped(setting: Setting) -> Figures:
    assert setting.gpu is not None, "not in a dry run"
    answer = run_measurement(grouped_body, partial(GroupedTask, rounds=ROUNDS), num_ranks=1)
    return _values(grouped_figures(answer, setting.gpu), drop="cuda.")


def _values(figures: Iterable[Figure], *, drop: str = "") -> Figures:
    """Return the figures' values by name, without a beginning that repeats the case's."""
    return {figure.name.removeprefix(drop): figure.value for figure in figures}
