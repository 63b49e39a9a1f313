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

from meshwright.config.schema import RunConfig
from meshwright.data.loader import IGNORED_TARGET, Loader, validation_batches
from meshwright.data.sampler import Order
from meshwright.data.text import Corpus, Tokens, num_windows
from meshwright.data.tokenizer import open_tokenizer
from meshwright.train.reporter import LossUnit
from meshwright.train.stages import Batch, Pipeline
from meshwright.train.tasks.base import Task
from meshwright.train.tasks.generate import generate

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

    def __init__(self, config: RunConfig, corpus: Corpus, device: torch.device) -> None:
        train = config.train
        self._config, self._device = config, device
        self._validation = corpus.validation
        self._has_text = corpus.validation_bytes_per_token is not None
        self._loader = text_loader(config, corpus.train, device)
        self.unit = text_unit(corpus.validation_bytes_per_token)
        self.units_a_sample = train.seq_len

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
            seq_len=self._config.train.seq_len,
            num_samples=self._config.train.validation_samples,
            batch_size=batch_size,
            data_parallel=data_parallel,
            data_index=data_index,
            device=self._device,
        )
        return [TextBatch(inputs, targets) for inputs, targets in found]

    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens without a target count for nothing."""
        return self.loss_sum(out, targets), (targets != IGNORED_TARGET).sum()

    def sample(self, pipeline: Pipeline) -> str | None:
        """A continuation of a prompt, where token ids can be turned into text."""
        train = self._config.train
        if not train.sample_tokens or not self._has_text:
            return None
        tokenizer = open_tokenizer(self._config.data.tokenizer)
        prompt = [int(token) for token in tokenizer.encode(PROMPT)]
        tokens = generate(
            pipeline, prompt, num_tokens=train.sample_tokens, temperature=TEMPERATURE, seed=train.seed
        )  # fmt: skip
        return PROMPT + tokenizer.decode(tokens)


def text_loader(config: RunConfig, tokens: Tokens, device: torch.device) -> Loader:
    """What a run reads its samples from."""
    train = config.train
    return Loader(tokens, Order(num_windows(tokens, train.seq_len), train.seed), train.seq_len, device)


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
