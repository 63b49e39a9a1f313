"""Text: the next token, by cross-entropy.

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
from meshwright.models.contract.task import Batch, Forward, Task
from meshwright.models.tasks.generate_text import generate

PROMPT = "def "
TEMPERATURE = 0.7


@dataclass(frozen=True)
class TextBatch:
    """Token ids and those that follow them, [b, t] both."""

    inputs: Tensor
    targets: Tensor

    @property
    def conditions(self) -> tuple[int]:
        """The whole length, which a stream that is divided along it doesn't show."""
        return (self.inputs.shape[1],)


class TextTask(Task):
    """Reads windows of a corpus."""

    def __init__(self, f: RunFacts, corpus: Corpus, device: torch.device) -> None:
        self._run, self._device = f, device
        self._validation = corpus.validation
        self._has_text = corpus.validation_bytes_per_token is not None
        self._loader = text_loader(corpus.train, device, seq_len=f.seq_len, seed=f.seed)
        self.unit = text_unit(corpus.validation_bytes_per_token)
        self.units_a_sample = f.seq_len

    def batch(self, samples: range) -> Batch:
        """Windows of the corpus."""
        return TextBatch(*self._loader.batch(samples))

    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """From logits [b, t, v]."""
        return cross_entropy_sum(out, targets)

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Windows spread evenly over the held-out text."""
        found = validation_batches(
            self._validation,
            seq_len=self._run.seq_len,
            num_samples=self._run.validation_samples,
            batch_size=batch_size,
            data_parallel=data_parallel,
            data_index=data_index,
            device=self._device,
        )
        return [TextBatch(inputs, targets) for inputs, targets in found]

    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens without a target count for nothing."""
        return self.loss_sum(out, targets), (targets != IGNORED_TARGET).sum()

    def sample(self, forward: Forward) -> str | None:
        """A continuation of a prompt, where token ids can be turned into text."""
        f = self._run
        if not f.sample_tokens or not self._has_text:
            return None
        tokenizer = open_tokenizer(f.data.tokenizer)
        prompt = [int(token) for token in tokenizer.encode(PROMPT)]
        tokens = generate(
            forward, prompt, seq_len=f.seq_len, num_tokens=f.sample_tokens, temperature=TEMPERATURE, seed=f.seed
        )  # fmt: skip
        return PROMPT + tokenizer.decode(tokens)


def text_loader(tokens: Tokens, device: torch.device, *, seq_len: int, seed: int) -> Loader:
    """What a run reads its samples from."""
    return Loader(tokens, WindowOrder(num_windows(tokens, seq_len), seed), seq_len, device)


def text_unit(bytes_per_token: float | None) -> LossUnit:
    """Bits a byte of text where the text's bytes are known, else nats a token."""
    if bytes_per_token is None:
        return LossUnit("nats/token")
    return LossUnit("bits/byte", 1 / (math.log(2) * bytes_per_token))


def cross_entropy_sum(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Sum of the tokens' cross-entropies, in at least float32, on the whole vocabulary."""
    logits = logits_btv.flatten(0, 1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    loss = F.cross_entropy(logits, targets_bt.flatten(), reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss
