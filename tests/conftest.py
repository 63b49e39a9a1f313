"""Fixtures and settings of all tests. Imports no torch: pure tests collect and run without it."""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import hypothesis
import pytest

from tests.gangs.gang import PRELOAD, Gang, GangPool, start_server
from tests.triton_interpreter import needs_triton

# Wall-clock deadlines fail at random on a loaded machine. In CI every run draws the same examples.
for name, max_examples in (("default", 20), ("slow", 100)):
    hypothesis.settings.register_profile(
        f"meshwright-{name}",
        deadline=None,
        max_examples=max_examples,
        derandomize=os.environ.get("CI") == "true",
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )


PLACES = (
    "HF_", "HUGGINGFACE_", "MPLCONFIGDIR", "TORCHINDUCTOR_", "TORCH_HOME", "TRANSFORMERS_", "TRITON_", "WANDB_", "XDG_",
    "PYTHONUNBUFFERED", "PYTHONOPTIMIZE", "PYTHONWARNINGS",
)  # fmt: skip
"""Beginnings of the variables that may name folders and services of the user, or change how commands behave."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shuffle`."""
    parser.addoption("--shuffle", metavar="SEED", help="run the files, and the tests of each file, in a random order")


def pytest_configure(config: pytest.Config) -> None:
    """Draw more examples where the slow tests run, and give all processes of the run an empty home."""
    hypothesis.settings.load_profile("meshwright-slow" if config.option.markexpr == "slow" else "meshwright-default")
    if hasattr(config, "workerinput"):
        return  # inherits what follows
    home = tempfile.mkdtemp(prefix="home-of-tests-")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    for name in [name for name in os.environ if name.startswith(PLACES)]:
        del os.environ[name]
    os.environ |= {"HOME": home, "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle files and the tests of each, where that was asked for."""
    if seed := config.getoption("shuffle"):
        rng = random.Random(seed)
        files = sorted({item.path for item in items})
        order = dict(zip(files, rng.sample(range(len(files)), len(files)), strict=True))
        rng.shuffle(items)
        items.sort(key=lambda item: order[item.path])


PRELOADED = (
    "meshwright.train.launch.rank_imports", *PRELOAD, "matplotlib.figure", "matplotlib.backends.backend_agg",
    # What each worker would import by itself: FSDP2 and optimizers the first, tests the others.
    "torch._dynamo", "sklearn.svm", "hypothesis",
    "torch._dynamo.backends.common", "torch._inductor.debug",
    "meshwright.models.dit.task", "meshwright.models.dit.module", "meshwright.models.decoder.module",
    "meshwright.models.tasks.next_token", "meshwright.reshard.dtensor.redistribute",
    "meshwright.dtensor_ops.fallback", "meshwright.train.training_loop", "tests.quiet", "tests.undrawn",
)  # fmt: skip
FOR_HF = ("meshwright.models.hf.preload", "transformers.models.llama.modeling_llama")


@pytest.fixture(scope="session")
def gang() -> Iterator[GangPool]:
    """`gang(world_size)`: worker processes for tests that move data; shared by the whole run."""
    pool = GangPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Gang]:
    """A process of its own: Triton decides when it is imported whether it interprets, for good."""
    needs_triton()
    with Gang(1) as gang:
        yield gang


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small text, as words of the command; shared by the whole run."""
    from tests.helpers import small_corpus

    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def forked_meshwright(gang: GangPool) -> Callable[..., CompletedProcess[str]]:
    """Runs the command in a process forked from the server of gangs; see `tests.forked_command`."""
    from tests.forked_command import forked_meshwright

    return forked_meshwright


def pytest_collection() -> None:
    """Importing makes no garbage worth looking for."""
    gc.disable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Start the server of gangs with the first test that wants one: it imports while others are collected.

    The runs that tests launch are forked from the same server, and need not import what it has.
    """
    if "gang" in getattr(item, "fixturenames", ()) and not item.config.getoption("collectonly"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `tests.quiet`, for warnings of C++
            # Inductor asks for devices when it is imported, and what was forked after that can't use CUDA.
            if item.config.option.markexpr == "gpu":
                start_server(PRELOAD)
            else:
                start_server([*PRELOADED, *(FOR_HF if _collects_hf(item.config) else ())])


def _collects_hf(config: pytest.Config) -> bool:
    """Whether the tests of transformers' models are among those of this run: only they need transformers imported."""
    hf = config.rootpath / "tests/models/hf"
    paths = [Path(word.partition("::")[0]).absolute() for word in config.args]
    return any(hf.is_relative_to(path) or path.is_relative_to(hf) for path in paths)


def pytest_collection_finish() -> None:
    """What was imported and collected is never garbage: not walked again; and what tests make is looked at seldom."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device: torch.cuda.is_available() is False on this machine")


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Many files shorter than a sample, of different lengths, as a word of the command."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(400):
        words = " ".join(f"{(number * 37 + word) % 91}" for word in range(1 + number * number % 4))
        (folder / f"{number}.txt").write_text(words, "utf-8")
    return f"data.source={folder}/*.txt"
