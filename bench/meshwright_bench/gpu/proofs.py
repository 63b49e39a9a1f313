"""Part `proofs`: `meshwright prove` on the device, where kernels run that only GPUs have. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from meshwright_bench.gpu.cases import Case, Figures, Setting
from meshwright_bench.gpu.commands import device_words, run_command
from meshwright_bench.gpu.start import IMAGES, text_source

BATCH = ("train.global_batch=8",)
TEXT = ("train.seq_len=128",)
BFLOAT16 = ("train.precision=bfloat16",)
PACKED = ("data.packing=documents", "data.separator=0")


@dataclass(frozen=True)
class Proof:
    """A run to prove: a preset, overrides, and whether in its own precision or in float64."""

    preset: str
    words: tuple[str, ...] = ()
    as_run: bool = False
    needs: tuple[str, ...] = ()


PROOFS = {
    "dense": Proof("llama-tiny"),
    "dense_as_run": Proof("llama-tiny", BFLOAT16, as_run=True),
    # Attention on documents takes `flex_attention` in float32, in bfloat16 `varlen_attn`.
    "packed_flex": Proof("llama-tiny", PACKED, as_run=True),
    "packed_varlen": Proof("llama-tiny", (*PACKED, *BFLOAT16), as_run=True),
    "experts_grouped": Proof("moe-tiny", BFLOAT16, as_run=True),
    "dropout": Proof("llama-tiny", ("train.dropout=0.1", *BFLOAT16), as_run=True),
    "float8": Proof("llama-tiny", ("float8.recipe=current", *BFLOAT16), as_run=True),
    "compiled": Proof("llama-tiny", ("train.compile=true", *BFLOAT16), as_run=True),
    "captured": Proof("llama-tiny", ("capture.scope=layer", "capture.strict=true", "train.num_microbatches=2")),
    "hf_qwen3": Proof("hf-tiny", BFLOAT16, as_run=True, needs=("transformers",)),
    "diffusion": Proof("dit-digits", BFLOAT16, as_run=True, needs=("sklearn",)),
    "muon": Proof("llama-tiny", ("train.optimizer=muon",)),
}
"""Kernels of a run are proved as run; in float64 those that have it."""
IN_DRY = ("dense", "muon")


def cases(setting: Setting) -> list[Case]:
    """Return a case for each proof; a dry run has two small ones."""
    text_source(setting)
    names = IN_DRY if setting.is_dry else PROOFS
    return [Case(name, partial(prove, name, setting), PROOFS[name].needs) for name in names]


def proof_words(name: str, setting: Setting) -> list[str]:
    """Return the words of a proof's configuration."""
    proof = PROOFS[name]
    text = () if proof.preset in IMAGES else (*TEXT, text_source(setting))
    smaller = ("model.num_layers=2", "train.seq_len=32") if setting.is_dry else ()
    return [proof.preset, *BATCH, *text, *proof.words, *smaller, *device_words(setting)]


def prove(name: str, setting: Setting) -> Figures:
    """Run a proof; what is not proved is an error.

    Raises:
        CaseError: it is not proved, or did not run.
    """
    more = [*(["--as-run"] if PROOFS[name].as_run else []), *(["--steps", "2"] if setting.is_dry else [])]
    run_command(name, "-m", "meshwright", "prove", *proof_words(name, setting), *more)
    return {}
