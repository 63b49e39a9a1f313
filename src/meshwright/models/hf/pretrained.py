"""Weights of a model's folder, as initial values by name.

Each rank reads its shards of tensors from safetensors with the names of the model's parameters. These are the folder's
own, unless its tensors are quantised, or transformers stores a model otherwise than it computes, as experts one by one:
then they are converted once, into the cache. Each tensor of the folder is used, or named before processes start.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint.safetensors_file import open_tensors, read_slices
from meshwright.data.cache_directory import preferred_directory, writable_directory
from meshwright.data.cache_file import atomic_write, build_lock
from meshwright.errors import CheckpointError
from meshwright.log import get_logger
from meshwright.models.foreign.description import SavedTensors
from meshwright.models.hf import private
from meshwright.models.hf.build_model import whole_config
from meshwright.models.hf.quantised import BY_TRANSFORMERS, dequantised, refusal
from meshwright.models.hf.quantised import FIX as NOT_QUANTISED
from meshwright.models.hf.source import Source, transformers_version
from meshwright.models.huggingface.weight_files import TRAINABLE, find_files, open_weights
from meshwright.settings.violation import format_fix

COMPLETE = "model.weights=random, or the complete folder (hf download)"
UNUSED = "model.unused_weights"
SCALE = re.compile(r"(_scale(_inv)?|\.scales?|_scale_2|\.qzeros|\.g_idx|_packed|_absmax|\.absmax|\.quant_\w+.*|\.SCB)$")
"""Names beside quantised weights."""
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")

_log = get_logger(__name__)


class Pretrained:
    """Weights of a model's folder.

    Attributes:
        bytes_read: size of the tensors and slices that this process has read. Of a slice of columns, only these are
            copied, but an operating system reads files by pages.
    """

    def __init__(self, source: Source, wanted: SavedTensors, unused: Sequence[str], *, cache_dir: str | None) -> None:
        """Remember what is to be read.

        Args:
            source: a model's folder.
            wanted: the tensors of the model.
            unused: globs over names of tensors that are knowingly left out.
            cache_dir: directory of converted weights.
        """
        assert source.folder is not None
        self.bytes_read = 0
        self._source, self._folder, self._wanted, self._unused = source, source.folder, wanted, tuple(unused)
        self._cache_dir = cache_dir
        self._files: Mapping[str, Path] | None = None

    def has(self, name: str) -> bool:
        """Return whether a parameter or buffer is one of the weights."""
        return name in self._wanted.shapes

    def read(self, name: str, index: Sequence[slice] | None = None) -> Tensor:
        """Return a region of a tensor by its name in the model.

        Args:
            name: name of a parameter or saved buffer.
            index: one slice with start and stop per dim; None for the full tensor.

        Raises:
            CheckpointError: as in `check`.
        """
        if self._files is None:
            self.check()
        assert self._files is not None
        with open_tensors(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name) if index is None else read_slices(file, name, tuple(index))
        self.bytes_read += tensor.nbytes
        return tensor

    def check(self) -> None:
        """Check that each parameter has its values and each tensor of the folder its place, after converting them if
        they need it. One process of a machine does, once for a state of the folder.

        Raises:
            CheckpointError: a file is missing or damaged, or a tensor is missing, of another shape or dtype, or one of
                which the model has no use.
        """
        if not any(self._folder.glob("*.safetensors")) and not any(self._folder.glob("*.bin")):
            raise self._misfit("the folder has no weights")
        directory = writable_directory(preferred_directory(self._cache_dir))
        converted, checked = (directory / f"weights-{self._state()}.{end}" for end in ("safetensors", "checked"))
        if not (converted.is_file() or checked.is_file()):
            with build_lock(converted), open_weights(self._folder) as stored:
                if not (converted.is_file() or checked.is_file()):
                    self._prepare(stored, converted, checked)
        is_converted = converted.is_file()
        self._files = dict.fromkeys(self._wanted.shapes, converted) if is_converted else find_files(self._folder)

    def _state(self) -> str:
        """Return a hash of all that determines whether and how the weights fit."""
        paths = sorted(self._folder.glob("*.safetensors*"))
        files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        state = [transformers_version(), self._source.fields, self._source.quantization, files, self._wanted.ties]
        text = json.dumps([*state, sorted(self._wanted.shapes.items()), self._unused])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _prepare(self, stored: Mapping[str, Tensor], converted: Path, checked: Path) -> None:
        """Compare a folder's tensors with the model's, and write them to a file if they can't be read as they are."""
        shapes, ties = self._wanted.shapes, self._wanted.ties
        quantization = json.loads(self._source.quantization or "{}")
        plain = dequantised(stored, quantization, where=str(self._folder))
        odd = {name for name, tensor in plain.items() if not self._is_number(name, tensor, quantization)}
        usable = {name: tensor for name, tensor in plain.items() if name not in odd}
        if needed := odd & shapes.keys():
            raise self._odd(min(needed), stored)
        if all(usable.get(name) is stored.get(name, 0) and usable[name].shape == shapes[name] for name in shapes):
            same = {name for name, to in ties.items() if name in usable and torch.equal(usable[name], usable[to])}
            self._check_placed(usable.keys() - shapes.keys() - same, odd, stored)
            checked.touch()
            return
        _log.info("converting the weights of %s to the names of transformers %s", self._folder, transformers_version())
        loaded = self._load(usable, quantization)
        self._check_complete(loaded, usable, odd, stored)
        self._check_placed(loaded.unexpected | (ties.keys() & loaded.tensors.keys()), odd, stored)
        if others := loaded.tensors.keys() & {private.text_name(name) for name in usable} - shapes.keys():
            self._say(f"{len(others)} tensors of other parts than the text model, such as {min(others)}")
        with atomic_write(converted) as file:
            save_file({name: loaded.tensors[name].detach().cpu().contiguous() for name in shapes}, file.name)

    def _is_number(self, name: str, tensor: Tensor, quantization: Mapping[str, Any]) -> bool:
        """Return whether a tensor's elements are values of a parameter, or transformers makes such of them."""
        if quantization.get("quant_method") == BY_TRANSFORMERS and name.endswith(("_blocks", "_scales")):
            return True
        return tensor.dtype in TRAINABLE or name in self._wanted.integers

    def _load(self, tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> private.LoadedWeights:
        config = whole_config(self._source)
        if quantization.get("quant_method") == BY_TRANSFORMERS:
            config.quantization_config = {**quantization, "dequantize": True}
        dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
        try:
            return private.load_weights(config, tensors, dtype=reduce(torch.promote_types, dtypes, torch.float16))
        except Exception as error:  # of whatever kind
            reason = " ".join(str(error).split())[:200]
            raise self._misfit(f"transformers can't load the weights: {type(error).__name__}: {reason}") from error

    def _check_complete(
        self, loaded: private.LoadedWeights, usable: Iterable[str], odd: set[str], stored: Mapping[str, Tensor]
    ) -> None:
        """Check that each parameter has values of the folder."""
        shapes = self._wanted.shapes
        missing = sorted(loaded.missing & shapes.keys() | shapes.keys() - loaded.tensors.keys()) or _expert_gaps(usable)
        misfits = [f"no {name}" for name in missing] + [
            f"{name} of shape {found}, but the model has {due}" for name, found, due in loaded.mismatched
        ]
        if misfits and odd:
            raise self._odd(min(odd), stored)
        if misfits:
            more = f" ({len(misfits) - 1} more like it)" if len(misfits) > 1 else ""
            raise self._misfit(f"the weights have {misfits[0]}{more}")

    def _check_placed(self, names: set[str], odd: set[str], stored: Mapping[str, Tensor]) -> None:
        """Check that tensors without a place in the model are left out knowingly, and say what transformers ignores."""
        others = {path.name for path in self._folder.glob("*.safetensors")}
        others -= {path.name for path in (*find_files(self._folder).values(),)}
        names = names | odd | others
        unmatched = [glob for glob in self._unused if not any(fnmatchcase(name, glob) for name in names)]
        if unmatched:
            fix = format_fix({UNUSED: [glob for glob in self._unused if glob not in unmatched]})
            raise self._misfit(f"{UNUSED} has {unmatched[0]}, but no tensor without a place has such a name", fix)
        names = {name for name in names if not any(fnmatchcase(name, glob) for glob in self._unused)}
        if not names:
            return
        ignored = private.ignored_names(whole_config(self._source), names)
        ignored |= {name for name in names & others if not name.startswith("adapter")}
        if ignored:
            self._say(f"{', '.join(sorted(ignored)[:3])}{f' and {len(ignored) - 3} more' if len(ignored) > 3 else ''}")
        if names - ignored:
            raise self._without_place(sorted(names - ignored), odd, stored)

    def _without_place(self, names: list[str], odd: set[str], stored: Mapping[str, Tensor]) -> CheckpointError:
        scale = next((name for name in names if SCALE.search(name)), None)
        if scale is not None and not self._source.quantization:
            what = f"{scale} belongs to quantised weights, but config.json has no quantization_config"
            return refusal(what, str(self._folder), f"config.json as it was published, {NOT_QUANTISED}")
        if first := next((name for name in names if name in odd), None):
            return self._odd(first, stored)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        fix = format_fix({UNUSED: _globs(names)}) + " to leave out what is named"
        if names[0] in self._wanted.ties:
            what = f"{names[0]} differs from {self._wanted.ties[names[0]]}, to which config.json ties it"
            return self._misfit(what, f"tie_word_embeddings false in config.json to keep both, or {fix}")
        return self._misfit(f"the model of config.json has no place for {names[0]}{more} of the folder", fix)

    def _odd(self, name: str, stored: Mapping[str, Tensor]) -> CheckpointError:
        dtype = str(stored[name].dtype).removeprefix("torch.")
        lacks = "has no scale beside it" if self._source.quantization else "config.json has no quantization_config"
        return refusal(f"{name} is stored as {dtype}, and {lacks}", str(self._folder), NOT_QUANTISED)

    def _say(self, what: str) -> None:
        _log.warning("not read of the weights in %s: %s", self._folder, what)

    def _misfit(self, what: str, fix: str = COMPLETE) -> CheckpointError:
        return CheckpointError(
            what,
            where=f"model.weights, {self._folder}",
            rule="with model.weights = folder, its tensors are the parameters of its config.json, each and no others",
            fix=fix,
        )


def _expert_gaps(names: Iterable[str]) -> list[str]:
    """Return the names that are missing where experts are stored one by one, and numbered from 0; transformers stacks
    those that are there."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(EXPERT.fullmatch, names)):
        found[match[1], match[3]].add(int(match[2]))
    return sorted(f"{a}{i}{b}" for (a, b), numbers in found.items() for i in set(range(max(numbers))) - numbers)


def _globs(names: Sequence[str]) -> list[str]:
    """Return a few globs that match all names: those without numbers of layers, or what all begin with."""
    found = sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names})
    return found if len(found) <= 4 else [f"{commonprefix(names)}*"]
