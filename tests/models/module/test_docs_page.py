"""The weights of a run open in the plain module, as the page says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import layout_file
from meshwright.checkpoint.manifest import newest_valid
from meshwright.checkpoint.reader import read_tensor
from meshwright.models.module import example
from tests.docs.console import ROOT, run_here
from tests.helpers import clean_environment
from tests.prove.proofs import SOURCE

SHORT = ("train.steps=1", "train.warmup_steps=0", "train.seq_len=16", "train.validation_samples=0",
         "train.sample_tokens=0", "train.threads=1", f"data.source={SOURCE}")  # fmt: skip


@pytest.mark.slow
def test_exported_weights_open_in_the_plain_module(
    forked_meshwright: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny_gpt.py").write_text(Path(str(example.__file__)).read_text("utf-8"), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    page = (ROOT / "docs/own_module.md").read_text("utf-8")
    for command in re.findall(r"^meshwright ((?:run|checkpoint) .*)$", page, re.M):
        words = shlex.split(command)
        if words[0] == "checkpoint":
            run_here(*words)
            continue
        result = forked_meshwright(*words, *SHORT, env=clean_environment() | {"PYTHONPATH": "."})
        assert result.returncode == 0, result.stderr
    [script] = re.findall(r"^```python\n(from safetensors.*?)^```", page, re.M | re.S)
    names: dict[str, Any] = {}
    exec(script, names)
    checkpoint, _ = newest_valid(tmp_path / "runs/tiny/checkpoints")
    assert checkpoint is not None
    stored, weights = layout_file.read(checkpoint), dict(names["model"].named_parameters())
    assert weights
    for name, weight in weights.items():
        torch.testing.assert_close(weight, read_tensor(stored, f"model.{name}"), rtol=0, atol=0)
