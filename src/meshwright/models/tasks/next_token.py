"""Next-token prediction on text, with cross-entropy loss.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.data.loader import IGNORED_TARGET, Loader, validation_batches
from meshwright.data.sampler import WindowOrder
from meshwright.data.text_corpus import Corpus, Tokens, num_windows
from meshwright.data.tokenizer import open_tokenizer
from meshwright.models.contract.loss_unit import LossUnit
from meshwright.models.contract.run_facts import RunFacts
from meshwright.models.contract.task import Batch, BatchUse, Forward, HostBatch, Task
from meshwright.models.tasks.generate_text import generate
from meshwright.nn.attention.token_layout import TokenLayout

PROMPT = "def "
TEMPERATURE = 0.7


@dataclass(frozen=True)
class TextBatch:
    """Token ids and their next tokens, both [b, t]."""

    inputs: Tensor
    targets: Tensor
    layout: TokenLayout

    @property
    def conditions(self) -> tuple[TokenLayout]:
        """The placement of the tokens."""
        return (self.layout,)


class NextTokenTask(Task):
    """Loss and text generation of next-token prediction, whatever the samples are."""

    def __init__(self, f: RunFacts, corpus: Corpus, device: torch.device) -> None:
        self._run, self._device = f, device
        self._has_text = corpus.validation_bytes_per_token is not None
        self.unit = text_unit(corpus.validation_bytes_per_token)

    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the tokens' cross-entropies for logits [b, t, v]."""
        return cross_entropy_sum(out, targets)

    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the number of tokens, ignoring those without a target."""
        return self.loss_sum(out, targets), (targets != IGNORED_TARGET).sum()

    def sample(self, forward: Forward) -> str | None:
        """Return the prompt and its continuation, or None if sampling is off or the corpus has no known tokenizer."""
        f = self._run
        if not f.sample_tokens or not self._has_text:
            return None
        tokenizer, text = open_tokenizer(f.data.tokenizer), f.sample_prompt or PROMPT
        prompt = [int(token) for token in tokenizer.encode(text)]
        tokens = generate(
            forward, prompt, seq_len=f.seq_len, num_tokens=f.sample_tokens, temperature=TEMPERATURE, seed=f.seed
        )  # fmt: skip
        return text + tokenizer.decode(tokens)


class TextTask(NextTokenTask):
    """Next-token prediction on windows of a corpus."""

    def __init__(self, f: RunFacts, corpus: Corpus, device: torch.device) -> None:
        super().__init__(f, corpus, device)
        assert corpus.packed is None, "a packed corpus has a task of its own: text_task chooses"
        self._validation = corpus.validation
        self._loader = text_loader(corpus.train, device, seq_len=f.seq_len, seed=f.seed)
        self.units_a_sample = f.seq_len

    def batch(self, samples: range) -> Batch:
        """Return the windows of the training samples."""
        return self.prepare(samples, BatchUse()).to(self._device)

    def prepare(self, samples: range, use: BatchUse) -> HostBatch:
        """Read the windows of the training samples; inputs and targets come from one read."""
        layout = TokenLayout(self._run.seq_len, samples=tuple(samples))

        def assemble(tensors: tuple[Tensor, ...]) -> Batch:
            inputs, targets = tensors
            return TextBatch(inputs, targets, layout)

        return HostBatch(self._loader.host_batch(samples), assemble)

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Return this rank's windows of the held-out text, evenly spread."""
        batches = validation_batches(
            self._validation,
            seq_len=self._run.seq_len,
            num_samples=self._run.validation_samples,
            batch_size=batch_size,
            data_parallel=data_parallel,
            data_index=data_index,
            device=self._device,
        )
        return [TextBatch(inputs, targets, TokenLayout(self._run.seq_len)) for inputs, targets in batches]


def text_loader(tokens: Tokens, device: torch.device, *, seq_len: int, seed: int) -> Loader:
    """Return the loader of a run's training samples."""
    return Loader(tokens, WindowOrder(num_windows(tokens, seq_len), seed), seq_len, device)


def text_unit(bytes_per_token: float | None) -> LossUnit:
    """Return bits per byte if the bytes of the text are known, else nats per token."""
    nats = "nats/token"
    if bytes_per_token is None:
        return LossUnit(nats)
    return LossUnit("bits/byte", 1 / (math.log(2) * bytes_per_token), own=nats)


def cross_entropy_sum(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Return the sum of the tokens' cross-entropies over the full vocabulary, in at least float32."""
    logits = logits_btv.flatten(0, 1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    loss = F.cross_entropy(logits, targets_bt.flatten(), reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss
