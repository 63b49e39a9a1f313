"""Floors: imports go down only, rooms on one floor don't import each other, and plans never import torch.

The tables are the architecture's; a new room is entered here before its first file.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch

from tests.house.source import BENCH, PACKAGE, Module, Tree

FLOORS = {
    "errors": 0, "units": 0, "log": 0, "output_files": 0, "lasting_output": 0, "figure": 0, "settings": 0,
    "__init__": 0, "lazy_package": 0,
    "cluster": 1, "mesh": 1, "nn": 1, "data": 1,
    "comm": 2,
    "pipeline": 3, "checkpoint": 3, "reshard": 3,
    "dtensor_ops": 4, "optim": 4,
    "models": 5,
    "config": 6,
    "plan": 7,
    "parallel": 8, "capture": 8,
    "train": 9,
    "prove": 10, "calibrate": 10,
    "api": 11,
    "cli": 12,
    "__main__": 13, "meshwright_bench": 13,
}  # fmt: skip
"""Room, or file beside the rooms, by floor."""

FEATURE_FILES = {
    "__init__": 0.5, "contract": 0.5, "section": 0.5,
    "registry": 5.5, "rules": 6.5, "plan": 7.5, "apply": 8.5, "run": 9.5, "reference": 10.5,
}  # fmt: skip
"""Files of `features` and of a feature's folder, by floor: above the room of the same work. Others stand above `nn`."""
OF_FEATURES = ("contract", "registry")
"""Files of `features` for all; a feature's own are for itself and its benchmarks, its section for the schema, too."""

LATE = {("lazy_package", "api"), ("cli", "meshwright_bench")} | {
    ("__init__", above) for above in ("api", "checkpoint", "comm", "dtensor_ops", "pipeline", "reshard")
}
"""Pairs (room, room above) of imports allowed inside functions and for types only."""

TORCH_FREE = (
    "__init__.py", "__main__.py", "api.py", "errors.py", "units.py", "log.py", "output_files.py", "lasting_output.py",
    "figure.py", "lazy_package.py",
    "cluster/*",
    "mesh/axes.py", "mesh/layout*.py", "mesh/layout.py", "mesh/shard_intervals.py",
    "comm/__init__.py", "comm/compression/__init__.py", "comm/compression/catalogue.py",
    "settings/*",
    "nn/__init__.py", "nn/attention/__init__.py", "nn/attention/mask_spec.py", "nn/attention/backend.py",
    "nn/recompute_policy.py", "features/__init__.py", "features/contract.py", "features/registry.py",
    "features/*/__init__.py", "features/*/section.py", "features/*/rules.py",
    "features/*/plan.py",
    "models/__init__.py", "models/contract/__init__.py", "models/contract/model_facts.py", "models/contract/saved.py",
    "models/*/operators.py", "models/contract/building_blocks.py",
    "models/contract/family.py", "models/contract/tp_styles.py",
    "models/*/__init__.py", "models/*/family.py", "models/*/config.py", "models/*/description.py", "models/*/rules.py",
    "models/tasks/text_data.py",
    "models/tasks/text_sources.py",
    "models/hf_format/architecture.py", "models/hf_format/checks.py", "models/hf_format/kept_files.py",
    "models/llama/hf_*.py", "models/moe/hf_*.py",
    "models/hf/config.py", "models/hf/tiny_*.py", "models/foreign/structure.py",
    "models/foreign/foreign_family.py",
    "data/sampler.py", "data/text_corpus.py", "data/tokenizer.py", "data/tokenizer_files.py", "data/tokenise.py",
    "data/cache_file.py", "data/token_cache.py", "data/packed_windows.py", "data/packed_corpus.py",
    "data/sources/*", "data/chats/*", "data/mixtures/*", "data/windows.py", "data/images.py",
    "config/*", "config/*/*",
    "plan/*",
    "pipeline/actions.py", "pipeline/schedule_table.py", "pipeline/generate*.py",
    "pipeline/lower.py", "pipeline/verify*.py", "pipeline/simulate.py", "pipeline/timeline.py",
    "pipeline/draw.py", "pipeline/split_layers.py",
    "capture/__init__.py", "capture/signature.py", "capture/lifetimes.py",
    "capture/plan.py", "capture/verify.py", "capture/draw.py", "capture/predict.py", "capture/run/__init__.py",
    "reshard/__init__.py", "reshard/planner/*", "reshard/draw_plan.py", "reshard/transfer_plan.py",
    "reshard/verify_plan.py", "reshard/verify_transfer.py", "reshard/run/__init__.py",
    "reshard/run/shard_exchange.py", "reshard/run/compile_step.py",
    "dtensor_ops/__init__.py",
    "optim/__init__.py", "optim/role.py", "optim/contract.py", "optim/catalogue.py", "optim/whole_matrix.py",
    "checkpoint/manifest.py", "checkpoint/atomic_directory.py",
    "train/launch/__init__.py", "train/launch/launcher.py", "train/launch/machine_limits.py",
    "train/launch/rank_context.py", "train/launch/rank_start.py", "train/launch/cluster_job.py",
    "train/record/__init__.py", "train/record/reporter.py", "train/record/loss_curves.py",
    "train/record/record_files.py", "train/record/figures.py", "train/record/sink.py", "train/record/trackers.py",
    "train/report/*", "train/record/step_parts.py",
    "train/run_folder.py", "train/choose_folder.py",
    "prove/script/__init__.py", "prove/script/proof.py", "prove/script/layout_choice.py",
    "calibrate/__init__.py", "calibrate/fit.py",
    "prove/spec.py", "prove/bodies.py", "prove/catalogue.py",
    "meshwright_bench/benchmarks.py", "meshwright_bench/command.py", "meshwright_bench/report.py",
    "meshwright_bench/alternate.py", "meshwright_bench/ranks.py", "meshwright_bench/devices.py",
    "meshwright_bench/*/benchmark.py", "meshwright_bench/*/cases.py", "meshwright_bench/comm/loss_cost.py",
    "cli/*",
)  # fmt: skip
"""Files that import no torch, by patterns inside the package."""

LATE_TORCH_ALLOWED = (
    "__main__.py", "api.py", "cli/*", "train/launch/launcher.py",
    "meshwright_bench/command.py", "meshwright_bench/devices.py", "meshwright_bench/*/benchmark.py",
    "meshwright_bench/comm/loss_cost.py",
    "optim/catalogue.py", "prove/script/proof.py", "prove/bodies.py", "train/launch/rank_start.py",
    "train/record/sink.py", "models/*/family.py", "models/foreign/foreign_family.py",
    "prove/catalogue.py",
)  # fmt: skip
"""Of those, files that start work that needs torch: they may import it inside functions."""

TORCH = ("torch", "torchao", "torchvision", "triton", "safetensors.torch", "transformers")
"""Torch itself and what imports it."""

GRAPH_CODE = re.compile(r"CUDAGraph|cuda\.graph|graph_region|graphed_callables|stream_capturing|meshwright\.capture")
"""Names of PyTorch's and Meshwright's CUDA graphs."""


def floor_breaches(tree: Tree) -> list[str]:
    """Rooms without a floor; imports that go up or sideways, wherever in the file they stand; features that others
    import instead of asking the registry."""
    breaches = []
    for module in tree.package:
        here = _floor_of(module.name)
        if here is None:
            breaches.append(f"{module.path}: {module.room} has no floor in the architecture's table")
            continue
        for one in module.imports:
            room = _room_of(one.target)
            if room is None or (module.room, room) in LATE and (one.late or one.typing_only):
                continue
            if room == "features":
                breaches += _feature_breaches(module, one.target, one.line)
            if room == module.room != "features" or one.typing_only and is_for_types(module):
                continue
            floor = _floor_of(one.target)
            if floor is None:
                breaches.append(f"{module.path}:{one.line} imports {one.target}, which has no floor")
            elif not (floor < here or floor == here and (floor == 0 or room == module.room)):
                way = "sideways" if floor == here else "up"
                breaches.append(f"{module.path}:{one.line} imports {way}: {one.target} (floor {here:g} → {floor:g})")
    return breaches


def _feature_breaches(module: Module, target: str, line: int) -> list[str]:
    """An import of a feature's own files by another part of the tree."""
    folder, parts = _folder(target), target.split(".")
    is_schema = module.inner_path == "config/schema.py" and parts[3:4] == ["section"]
    if folder in OF_FEATURES or is_schema or folder == _folder(module.name) or module.room == BENCH:
        return []
    return [f"{module.path}:{line} imports {target}: only {folder} itself does, others ask features/registry"]


def is_for_types(module: Module) -> bool:
    """Whether a file may name everything in its types: the contract of features and their registry."""
    return module.inner_path in ("features/contract.py", "features/registry.py")


def _folder(name: str) -> str:
    """`float8` for anything inside `features/float8`, and `contract` or `registry`; empty outside of `features`."""
    parts = name.split(".")
    return parts[2] if parts[1:2] == ["features"] and len(parts) > 2 else ""


def _floor_of(name: str) -> float | None:
    """The floor of a module, or of what is imported from it."""
    room, folder, parts = _room_of(name), _folder(name), name.split(".")
    if room != "features":
        return None if room is None else FLOORS.get(room)
    stem = folder if folder in OF_FEATURES else parts[3] if len(parts) > 3 else "__init__"
    return FEATURE_FILES.get(stem, 1.5)


def graph_breaches(tree: Tree) -> list[str]:
    """Code of CUDA graphs where modules and models are defined: what is captured is decided from outside."""
    return [
        f"{module.path}:{number} has graph code"
        for module in tree.package
        if module.room in ("nn", "models")
        for number, line in enumerate(module.text.splitlines(), start=1)
        if GRAPH_CODE.search(line)
    ]


def torch_breaches(tree: Tree) -> list[str]:
    """Torch-free files from which an import leads to torch."""
    breaches = []
    for module in tree.package:
        if not _matches(module, TORCH_FREE):
            continue
        if chain := torch_chain(tree, module):
            breaches.append(f"{module.path} leads to torch: {' → '.join(chain)}")
        if _matches(module, LATE_TORCH_ALLOWED):
            continue
        for one in module.imports:
            if one.late and not one.typing_only:
                for chain in _lead(tree, one.target, {module.name}):
                    way = " → ".join(chain)
                    breaches.append(f"{module.path}:{one.line} leads to torch in a function: {way}")
    return breaches


def torch_chain(tree: Tree, module: Module, seen: set[str] | None = None) -> list[str]:
    """The imports by which loading `module` loads torch, or nothing. A package on the way loads too."""
    seen = set() if seen is None else seen
    seen.add(module.name)
    parents = [parent for parent in tree.resolve(module.name) if parent.name not in seen]
    for parent in parents:
        chain = torch_chain(tree, parent, seen)
        if chain:
            return [module.inner_path, *chain]
    for one in module.imports:
        if not one.late and not one.typing_only:
            for chain in _lead(tree, one.target, seen):
                return [module.inner_path, *chain]
    return []


def _lead(tree: Tree, target: str, seen: set[str]) -> list[list[str]]:
    """At most one chain from an import's target to torch."""
    if any(target == name or target.startswith(name + ".") for name in TORCH):
        return [[target]]
    for module in tree.resolve(target):
        if module.name not in seen:
            chain = torch_chain(tree, module, seen)
            if chain:
                return [chain]
    return []


def _room_of(target: str) -> str | None:
    parts = target.split(".")
    if parts[0] == BENCH:
        return BENCH
    if parts[0] != PACKAGE:
        return None
    # `import meshwright` and names of its `__init__`, such as `__version__`.
    return "__init__" if len(parts) == 1 or parts[1] in ("__version__", "*") else parts[1]


def _matches(module: Module, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(module.inner_path, pattern) for pattern in patterns)
