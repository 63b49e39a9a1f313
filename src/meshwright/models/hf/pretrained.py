"""A model's folder: its weights as initial values by name, and its export, written by transformers or peft itself.

Each rank reads its shards of tensors from safetensors with the names of the model's parameters. These are the folder's
own, unless its tensors are quantised, or transformers stores a model otherwise than it computes, as experts one by one:
then they are converted once, into the cache. Each tensor of the folder is used, or named before processes start.

A quantised float8 matrix has a scale for all of it, for each row, or for each block of rows and columns; the last
blocks may be smaller. `quantization_config` of config.json says which: numbers without it have no known meaning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import reduce
from math import ceil
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.checkpoint import manifest, safetensors_file
from meshwright.checkpoint.manifest import read_sidecars
from meshwright.checkpoint.reader import read_tensor
from meshwright.checkpoint.safetensors_file import open_tensors, read_slices
from meshwright.data.cache_file import atomic_write, build_lock, preferred_directory, writable_directory
from meshwright.data.token_files import is_token_file
from meshwright.data.tokenizer_files import TOKENIZER_FILES, read_files
from meshwright.errors import CheckpointError
from meshwright.log import get_logger
from meshwright.models.foreign.structure import SavedTensors
from meshwright.models.hf import private
from meshwright.models.hf.build_model import build_model, load_config, merged, original_config, whole_config
from meshwright.models.hf.config import LoraConfig, Source, is_adapter, original_name, transformers_version
from meshwright.models.hf_format.checks import CONFIG, train_command
from meshwright.models.hf_format.kept_files import CONTEXT, GENERATION, context_note, stored_dtype, with_ends
from meshwright.models.hf_format.weights import (
    PREFIX,
    TRAINABLE,
    find_files,
    new_directory,
    no_adapters,
    open_weights,
)
from meshwright.settings.violation import format_fix
from meshwright.units import counted

COMPLETE = "model.weights=random, or the complete folder (hf download)"
NOT_READ = "not read of the weights in %s: %s"
UNUSED = "model.unused_weights"
SCALE = re.compile(r"(_scale(_inv)?|\.scales?|_scale_2|\.qzeros|\.g_idx|_packed|_absmax|\.absmax|\.quant_\w+.*|\.SCB)$")
"""Names beside quantised weights."""
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")

_log = get_logger(__name__)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MULTIPLIED = ("fp8", "fbgemm_fp8", "compressed-tensors")
"""Methods whose float8 weights are multiplied by their scales."""
BY_TRANSFORMERS = "mxfp4"
"""Method that transformers undoes on any device, without other packages."""
RULE = "weights are numbers by themselves, or float8 or mxfp4 with the scales that quantization_config describes"
NOT_QUANTISED = "the folder of the model that was quantised, or model.weights=random"


@dataclass
class Pretrained:
    """Weights of a model's folder, for the tensors that are wanted. Those that match a glob of `unused` are knowingly
    left out.

    `bytes_read` is the size of the tensors and slices that this process has read. Of a slice of columns, only these are
    copied, but an operating system reads files by pages.
    """

    folder: Path
    source: Source
    wanted: SavedTensors
    unused: Sequence[str]
    cache_dir: str | None
    bytes_read: int = 0
    _files: Mapping[str, Path] = field(default_factory=dict)

    def read(self, name: str, index: Sequence[slice] | None = None) -> Tensor:
        """Return a region of a tensor by its name in the model: one slice with start and stop per dim, or None for all
        of it. Errors are those of `check`."""
        if not self._files:
            self.check()
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
        if not any(self.folder.glob("*.safetensors")) and not any(self.folder.glob("*.bin")):
            raise self._misfit("the folder has no weights")
        directory = writable_directory(preferred_directory(self.cache_dir))
        converted, checked = (directory / f"weights-{self._state()}.{end}" for end in ("safetensors", "checked"))
        if not (converted.is_file() or checked.is_file()):
            with build_lock(converted), open_weights(self.folder) as stored:
                if not (converted.is_file() or checked.is_file()):
                    self._prepare(stored, converted, checked)
        is_converted = converted.is_file()
        self._files = dict.fromkeys(self.wanted.shapes, converted) if is_converted else find_files(self.folder)

    def _state(self) -> str:
        """Return a hash of all that determines whether and how the weights fit."""
        paths = sorted(self.folder.glob("*.safetensors*"))
        files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        wanted = sorted(self.wanted.shapes.items()), sorted(self.wanted.ties.items())
        state = transformers_version(), self.source.fields, self.source.quantization, files, wanted, self.unused
        return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]

    def _prepare(self, stored: Mapping[str, Tensor], converted: Path, checked: Path) -> None:
        """Compare a folder's tensors with the model's, and write them to a file if they can't be read as they are."""
        shapes, ties = self.wanted.shapes, self.wanted.ties
        plain = dequantised(stored, self.source.quantization, where=str(self.folder))
        usable = {name: tensor for name, tensor in plain.items() if self._is_number(name, tensor)}
        odd = {name: tensor.dtype for name, tensor in plain.items() if name not in usable}
        if needed := odd.keys() & shapes.keys():
            raise self._odd(min(needed), odd)
        if all(usable.get(name) is stored.get(name, 0) and usable[name].shape == shapes[name] for name in shapes):
            twice = {name: to for name, to in ties.items() if name in usable}
            same = {name for name, to in twice.items() if torch.equal(usable[name], usable[to].to(usable[name].dtype))}
            self._check_placed(usable.keys() - shapes.keys() - same, odd)
            checked.touch()
            return
        _log.info("converting the weights of %s to the names of transformers %s", self.folder, transformers_version())
        loaded = self._load(usable, odd)
        apart = {name for name, to in ties.items() if loaded.tensors.get(name) is not loaded.tensors.get(to)}
        self._check_placed(loaded.unexpected | apart, odd)
        self._check_complete(_expert_gaps(usable), odd)
        if others := loaded.tensors.keys() - shapes.keys() - ties.keys():
            found = counted(len(others), "tensor")
            _log.warning(NOT_READ, self.folder, f"{found} beside the text model, such as {min(others)}")
        with atomic_write(converted) as file:
            save_file({name: loaded.tensors[name].detach().cpu().contiguous() for name in shapes}, file.name)

    def _is_number(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor's elements are values of a parameter, or transformers makes such of them."""
        if self.source.quantization.get("quant_method") == BY_TRANSFORMERS and name.endswith(("_blocks", "_scales")):
            return True
        return tensor.dtype in TRAINABLE or name in self.wanted.integers

    def _load(self, tensors: Mapping[str, Tensor], odd: Mapping[str, torch.dtype]) -> private.LoadedWeights:
        """Return the parameters as transformers loads them, each with values of the folder."""
        shapes, config = self.wanted.shapes, whole_config(self.source)
        if self.source.quantization.get("quant_method") == BY_TRANSFORMERS:
            config.quantization_config = {**self.source.quantization, "dequantize": True}
        dtypes = [tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()]
        misfit = "{} of shape {}, but the model has {}"
        try:
            loaded = private.load_weights(config, tensors, dtype=reduce(torch.promote_types, dtypes))
        except Exception as error:  # of whatever kind
            due = {name: shapes.get(self.wanted.ties.get(name, name)) for name in tensors}
            others = [(n, tuple(tensors[n].shape), due[n]) for n in due if due[n] not in (None, tensors[n].shape)]
            self._check_complete(_expert_gaps(tensors) + [misfit.format(*one) for one in others], odd)
            reason = " ".join(str(error).split())[:200]
            raise self._misfit(f"transformers can't load the weights: {type(error).__name__}: {reason}") from error
        missing = loaded.missing & shapes.keys() | shapes.keys() - loaded.tensors.keys()
        self._check_complete([f"no {n}" for n in sorted(missing)] + [misfit.format(*n) for n in loaded.mismatched], odd)
        return loaded

    def _check_complete(self, misfits: Sequence[str], odd: Mapping[str, torch.dtype]) -> None:
        """Check that no parameter is without values, which those of another kind may be meant for."""
        if misfits and odd:
            raise self._odd(next((name for name in sorted(odd) if f"no {name}" in misfits), min(odd)), odd)
        if misfits:
            more = f" ({len(misfits) - 1} more like it)" if len(misfits) > 1 else ""
            raise self._misfit(f"the weights have {misfits[0]}{more}")

    def _check_placed(self, names: set[str], odd: Mapping[str, torch.dtype]) -> None:
        """Check that tensors without a place in the model are left out knowingly, and say what transformers ignores."""
        others = {path.name for path in self.folder.glob("*.safetensors")}
        others -= {path.name for path in find_files(self.folder).values()}
        names = names | odd.keys() | others
        unmatched = [glob for glob in self.unused if not any(fnmatchcase(name, glob) for name in names)]
        if unmatched:
            fix = format_fix({UNUSED: [glob for glob in self.unused if glob not in unmatched]})
            raise self._misfit(f"{UNUSED} has {unmatched[0]}, but no tensor without a place has such a name", fix)
        names = {name for name in names if not any(fnmatchcase(name, glob) for glob in self.unused)}
        ignored = private.ignored_names(whole_config(self.source), names) if names else set()
        if ignored := ignored | {name for name in names & others if not name.startswith("adapter")}:
            more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
            _log.warning(NOT_READ, self.folder, ", ".join(sorted(ignored)[:3]) + more)
        if names - ignored:
            raise self._without_place(sorted(names - ignored), odd)

    def _without_place(self, names: list[str], odd: Mapping[str, torch.dtype]) -> CheckpointError:
        scale = next((name for name in names if SCALE.search(name)), None)
        if scale is not None and not self.source.quantization:
            what = f"{scale} belongs to quantised weights, but config.json has no quantization_config"
            return refusal(what, str(self.folder), f"config.json as it was published, {NOT_QUANTISED}")
        if first := next((name for name in names if name in odd), None):
            return self._odd(first, odd)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        fix = format_fix({UNUSED: _globs(names)}) + " to leave out what is named"
        if names[0] in self.wanted.ties:
            what = f"{names[0]} differs from {self.wanted.ties[names[0]]}, to which config.json ties it"
            return self._misfit(what, f"tie_word_embeddings false in config.json to keep both, or {fix}")
        return self._misfit(f"the model of config.json has no place for {names[0]}{more} of the folder", fix)

    def _odd(self, name: str, odd: Mapping[str, torch.dtype]) -> CheckpointError:
        lacks = "has no scale beside it" if self.source.quantization else "config.json has no quantization_config"
        what = f"{name} is stored as {str(odd[name]).removeprefix('torch.')}, and {lacks}"
        return refusal(what, str(self.folder), NOT_QUANTISED)

    def _misfit(
        self, what: str, fix: str = "model.weights=random, or the complete folder (hf download)"
    ) -> CheckpointError:
        rule = "with model.weights = folder, its tensors are the parameters of its config.json, each and no others"
        return CheckpointError(what, where=f"model.weights, {self.folder}", rule=rule, fix=fix)


def _expert_gaps(names: Iterable[str]) -> list[str]:
    """Return what is missing where experts are stored one by one, numbered from 0, and most have it: transformers
    stacks those that are there."""
    numbers: dict[str, set[int]] = defaultdict(set)
    having: dict[tuple[str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(EXPERT.fullmatch, names)):
        numbers[match[1]].add(int(match[2]))
        having[match[1], match[3]].add(int(match[2]))
    due = {path: set(range(max(found) + 1)) for path, found in numbers.items()}
    most = {one: found for one, found in having.items() if 2 * len(found) > len(numbers[one[0]])}
    return sorted(f"no {path}{i}{part}" for (path, part), found in most.items() for i in due[path] - found)


def _globs(names: Sequence[str]) -> list[str]:
    """Return a few globs that match all names: those without numbers of layers, or what all begin with."""
    found = sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names})
    return found if len(found) <= 4 else [f"{commonprefix(names)}*"]


def dequantised(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any], *, where: str) -> dict[str, Tensor]:
    """Return a folder's tensors with float8 weights multiplied by their scales, in float32, without these scales. Raise
    a CheckpointError if the method of `quantization_config` is another one, or a scale doesn't fit its weight."""
    method = quantization.get("quant_method")
    if quantization and method not in (*MULTIPLIED, BY_TRANSFORMERS):
        what = f"config.json has a quantization_config with the method {method}, which can't be undone"
        raise refusal(
            what, where, f"{NOT_QUANTISED}; if the weights aren't quantised, config.json without quantization_config"
        )
    found = dict(tensors)
    if method not in MULTIPLIED:
        return found
    for name, weight in tensors.items():
        names = f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('.weight')}.scale"
        scale = next((one for one in names if one in tensors), None)
        if weight.dtype in FLOAT8 and scale is not None:
            found[name] = _multiplied(weight, found.pop(scale), quantization.get("weight_block_size"), name, where)
    return found


def _multiplied(weight: Tensor, scale: Tensor, block: list[int] | None, name: str, where: str) -> Tensor:
    """Return a weight times its scale: one number for all of it or, in each dim, for all, each index or each block."""
    full, by_dim = scale.float(), scale.dim() == weight.dim()
    fits = scale.is_floating_point() and (by_dim or (scale.numel() == 1 and block is None))
    if by_dim:
        widths = [0] * weight.dim() if block is None else [1] * (weight.dim() - len(block)) + block
        for dim, (size, width) in enumerate(zip(weight.shape, widths, strict=True)):
            if width and scale.shape[dim] == ceil(size / width):
                full = full.repeat_interleave(width, dim).narrow(dim, 0, size)
            fits &= full.shape[dim] == size or (scale.shape[dim] == 1 and not width)
    if not fits:
        what = f"the scale of {name}, {list(weight.shape)}, is {scale.dtype} of shape {list(scale.shape)}"
        raise refusal(f"{what}, where weight_block_size is {block}", where, NOT_QUANTISED)
    return weight.float() * full


def refusal(what: str, where: str, fix: str) -> CheckpointError:
    """Return the error for weights that can't be used as they are stored."""
    return CheckpointError(what, where=where, rule=RULE, fix=fix)


LENGTH_SCALINGS = {"dynamic", "linear", "longrope", "yarn"}
"""Scalings of rotary embeddings for which the context length is one that models or inference servers compute with."""


class TransformersWeights:
    """Export of any model of transformers; weights are read by `model.weights=folder` instead of imported."""

    description = "any causal language model of transformers"
    model_type = None

    def export(self, checkpoint: Path, out: Path, *, merge: bool = False, dtype: str | None = None) -> list[str]:
        """Write a checkpoint's weights or adapters, configuration and tokenizer, through the memory of one process.

        With `merge`, the adapters are added to the model's weights, and these written. Without a dtype, weights get
        that of the folder that training started from, and adapters stay as trained.

        Raises:
            CheckpointError: the checkpoint is damaged or has no adapters to merge, or `out` is not empty.
            RunError: `out` cannot be written.
        """
        verified = manifest.verify(checkpoint)
        stored, model, run = safetensors_file.read_layout(checkpoint), verified.model, verified.run
        fields = model.get("fields")
        source = Source(str(model["model_type"]), None, "" if fields is None else json.dumps(fields))
        adapters, base, notes = model.get("lora"), _base(run), list[str]()
        if merge and not adapters:
            raise no_adapters(checkpoint)
        names = [name.removeprefix(PREFIX) for name in stored.tensors if name.startswith(PREFIX)]
        wanted = names if merge or not adapters else [name for name in names if is_adapter(name)]
        with new_directory(out) as folder:
            tensors = {name: read_tensor(stored, f"{PREFIX}{name}") for name in wanted}
            if adapters and not merge and dtype is not None:
                tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
            if adapters:
                tensors = _export_adapters(source, LoraConfig(**adapters), tensors, folder, merge=merge, base=base)
            if merge or not adapters:
                config = original_config(source)
                notes += _raise_context(config, run.get("config", {}).get("train", {}).get("seq_len", 0))
                dtype = dtype or (stored_dtype(fields) if base and fields else None)
                private.save_model(config, tensors, folder, dtype=None if dtype is None else getattr(torch, dtype))
            files = {**read_files(folder, (CONFIG, GENERATION)), **_kept(verified)}
            for name, content in with_ends(files, run.get("end_ids", ())).items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content)
        return notes

    def load(self, source: Path, root: Path) -> Path:
        """Refuse, with the command that trains the folder: nothing needs to be imported."""
        raise CheckpointError(
            f"{source} is read by transformers, and needs no import",
            where=str(source),
            rule="an import is for models that have a family of their own here",
            fix=train_command(source),
        )


def _export_adapters(
    source: Source, lora: LoraConfig, tensors: dict[str, Tensor], folder: Path, *, merge: bool, base: str | None
) -> dict[str, Tensor]:
    """Return the tensors with adapters merged, or else write them as peft does."""
    with torch.device("meta"):
        model = build_model(load_config(source), lora=lora)
    if merge:
        return {original_name(name): tensor for name, tensor in merged(model, tensors).items()}
    private.save_adapter(model, tensors, folder, base=base)
    return tensors


def _base(run: Mapping[str, Any]) -> str | None:
    """Return the absolute path of the folder whose weights training started from; None if they were random."""
    section = run.get("config", {}).get("model", {})
    if section.get("weights") != "folder":
        return None
    path = Path(os.path.abspath(Path(run.get("directory", ""), Path(section["config"]).expanduser())))
    return str(path.parent if path.suffix == ".json" else path)


def _raise_context(config: Any, trained: int) -> list[str]:
    """Raise the context length to that of the samples, and return a note; kinds of layers may have own scalings."""
    before, rope = getattr(config, CONTEXT, None), getattr(config, "rope_parameters", None) or {}
    if not isinstance(before, int) or trained <= before:
        return []
    each = [rope] if "rope_type" in rope else [one for one in rope.values() if isinstance(one, dict)]
    if scalings := LENGTH_SCALINGS & {str(one.get("rope_type")) for one in each}:
        return [f"{CONTEXT} stays {before}, for samples of {trained} tokens: {', '.join(scalings)} computes with it"]
    setattr(config, CONTEXT, trained)
    return context_note(before, trained)


def _kept(verified: manifest.Manifest) -> dict[str, bytes]:
    """Return the files beside the weights that the checkpoint carries; one of an earlier version lacks those of the
    model's folder, which may still be there."""
    kept, config = read_sidecars(verified), verified.run.get("config", {})
    path = Path(str(config.get("model", {}).get("config"))).expanduser()
    if "directory" in verified.run or verified.model.get("fields") is None or not path.exists():
        return kept
    folder = path if path.is_dir() else path.parent
    is_tokens = is_token_file(str(config.get("data", {}).get("source")))
    return {**files_of_folder(folder, is_tokens=is_tokens), **kept}


def files_of_folder(folder: Path, *, is_tokens: bool) -> dict[str, bytes]:
    """Return the settings of generation of a model's folder and, if it is trained on token files, its tokenizer."""
    return read_files(folder, (GENERATION, *TOKENIZER_FILES) if is_tokens else (GENERATION,))
