"""Checks that ranks of other launchers make for themselves."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch

from meshwright.errors import LayoutError
from meshwright.plan.make_plan import make_plan
from meshwright.plan.rules import load
from meshwright.train.launch.rank_context import RunSpec
from meshwright.train.rank_checks import agree_on_folder, plan_before_group, verified_plan
from meshwright.train.record.reporter import Reporter
from tests.helpers import rank_context

CPU = torch.device("cpu")


def test_a_plan_with_faults_is_refused():
    config = load(None, ["train.device=cpu"])
    plan = make_plan(config)
    assert verified_plan(RunSpec(config, Reporter), rank_context()) == plan
    faulty = replace(plan, loss=replace(plan.loss, units=0))
    with pytest.raises(LayoutError, match="divided by 0"):
        verified_plan(RunSpec(config, Reporter, plan=faulty), rank_context())


def test_a_run_that_cannot_fit_is_refused():
    assert plan_before_group(RunSpec(load(None), Reporter), rank_context(), CPU) == make_plan(load(None))
    with pytest.raises(LayoutError, match="would need"):
        plan_before_group(RunSpec(load(None, ["model.dim=100000000"]), Reporter), rank_context(), CPU)


def test_an_optimizer_of_the_user_s_own_is_tried():
    config = load(None)
    plan = make_plan(config)
    own = replace(plan, optimizer=replace(plan.optimizer, name="mine:make"))
    trial = mock.patch("meshwright.train.own_optimizer.check_optimizer", side_effect=RuntimeError("tried"))
    with trial, ExitStack() as hold, pytest.raises(RuntimeError, match="tried"):
        agree_on_folder(rank_context(), RunSpec(config, Reporter), own, mock.Mock(), hold)
