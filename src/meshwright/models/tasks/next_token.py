"""Next-token prediction on text, with cross-entropy loss.

Shapes: b batch, t time, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.comm.collectives import broadcast_object
from meshwright.data.loader import IGNORED_TARGET, Loader, chosen_validation, validation_batches
from meshwright.data.mixtures.mixture import Text, corpora, train_order, train_sizes, validation_shares
from meshwright.data.windows import JoinedWindows, TokenWindows
from meshwright.errors import InputError
from meshwright.models.contract.family import Prompt, RunFacts
from meshwright.models.contract.model_facts import LossUnit
from meshwright.models.contract.task import Batch, BatchUse, Forward, HostBatch, SimpleBatch, Task
from meshwright.models.tasks.text_data import encode_prompt
from meshwright.models.tasks.text_sources import end_ids
from meshwright.nn.attention.mask_spec import TokenLayout

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


@dataclass(frozen=True)
class OwnLoss:
    """A loss in place of cross-entropy."""

    sum: Callable[[Tensor, Tensor], Tensor]
    """Sum of the tokens' losses for logits [b, t, v] and targets [b, t]; `IGNORED_TARGET` is no target."""
    unit: LossUnit


class TextTask(Task):
    """Next-token prediction on windows of a text: of its stream of tokens, or of packed documents.

    The loss is the mean over the targets of the global batch; the first token of a packed document is no target.
    """

    def __init__(self, f: RunFacts, text: Text, device: torch.device, loss: OwnLoss | None = None) -> None:
        self._run, self._device = f, device
        self._has_text = text.is_text
        self._loss_sum = cross_entropy_sum if loss is None else loss.sum
        self.unit = text_unit(text.validation_bytes_per_token) if loss is None else loss.unit
        sources, held_out = corpora(text), validation_shares(text)
        assert all(one.packed is not None or one.train_mask is None for one in sources), "conversations are packed"
        train = [TokenWindows(one.train, f.seq_len) if one.packed is None else one.packed.train for one in sources]
        validation = [
            TokenWindows(one.validation, f.seq_len) if one.packed is None else one.packed.validation
            for one, _ in held_out
        ]
        self._validation = JoinedWindows(validation)
        self._validation_shares = [share for _, share in held_out]
        self._loader = Loader(JoinedWindows(train), train_order(text, train_sizes(text, f.seq_len), f.seed), device)
        self.units_per_sample = f.seq_len if sources[0].packed is None else None

    def loss_sum(self, out: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the tokens' losses for logits [b, t, v]; a scalar is that sum, computed by the head."""
        return self._loss_sum(out, targets) if out.dim() else out

    def batch(self, samples: range) -> Batch:
        """Return the windows of the training samples."""
        return self.prepare(samples, BatchUse()).to(self._device)

    def prepare(self, samples: range, use: BatchUse) -> HostBatch:
        """Read the windows of the training samples; inputs and targets come from one read."""
        host = self._loader.host_batch(samples)
        layout = TokenLayout(self._run.seq_len, documents=host.documents, samples=tuple(samples))

        def assemble(tensors: tuple[Tensor, ...]) -> Batch:
            inputs, targets = tensors
            return TextBatch(inputs, targets, layout)

        return HostBatch((host.inputs, host.targets), assemble)

    def count(self, samples: range) -> int:
        """Return the number of targets in the training samples, without reading tokens."""
        return self._loader.count(samples)

    def validation(self, *, batch_size: int, data_parallel: int, data_index: int) -> list[Batch]:
        """Return this rank's windows of the held-out text, evenly spread."""
        sizes = [source.num_windows for source in self._validation.sources]
        batches = validation_batches(
            self._validation,
            chosen_validation(sizes, self._validation_shares, self._run.validation_samples),
            batch_size=batch_size,
            data_parallel=data_parallel,
            data_index=data_index,
            device=self._device,
        )
        return [
            TextBatch(one.inputs, one.targets, TokenLayout(self._run.seq_len, documents=one.documents))
            for one in batches
        ]

    def validation_sums(self, out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the number of tokens, ignoring those without a target."""
        return self.loss_sum(out, targets), (targets != IGNORED_TARGET).sum()

    def end_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end turns of the assistant, and documents."""
        return end_ids(self._run.data)

    def sample(self, forward: Forward) -> str | None:
        """Return the prompt and its continuation, or None if sampling is off or the corpus has no known tokenizer."""
        f = self._run
        if not f.sample_tokens or not self._has_text:
            return None
        text = f.sample_prompt or PROMPT
        tokenizer, prompt = encode_prompt(text, f.data)
        tokens = generate(
            forward, prompt, seq_len=f.seq_len, num_tokens=f.sample_tokens, temperature=TEMPERATURE, seed=f.seed
        )  # fmt: skip
        return text + tokenizer.decode(tokens)


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


def answer(f: RunFacts, forward: Forward, prompt: Prompt) -> str:
    """Return the text that a model writes after a prompt, or as the assistant's answer to it."""
    tokenizer, ids = encode_prompt(prompt.text, f.data)
    ends = set(end_ids(f.data))
    if prompt.is_chat:
        from meshwright.data.chats.chat_format import ChatFormat

        chat = ChatFormat(f.data.tokenizer)
        ids = chat.encode_question(prompt.text)
        ends |= {chat.turn_end.id} if chat.turn_end is not None else set()
    if not ids:
        what, rule = f"the prompt {prompt.text!r} has no tokens", "the first token that is generated follows another"
        raise InputError(
            what, where="command line, --prompt", rule=rule, fix="a longer prompt, such as --prompt 'def '"
        )
    needed = -(-(len(ids) + prompt.num_tokens) // 64) * 64  # a few lengths only, of which each has its kernels
    tokens = generate(
        forward,
        ids,
        seq_len=min(f.seq_len, needed),
        num_tokens=prompt.num_tokens,
        temperature=prompt.temperature,
        seed=f.seed,
        ends=ends,
    )
    return tokenizer.decode(tokens[:-1] if tokens[-1] in ends else tokens)


def generate(
    forward: Forward,
    prompt: Sequence[int],
    *,
    seq_len: int,
    num_tokens: int,
    temperature: float,
    seed: int,
    ends: Collection[int] = (),
) -> list[int]:
    """Continue `prompt` by `num_tokens` sampled tokens, or until one of `ends`.

    The context is padded to the training length, to keep the shapes that the layout was checked for; causal attention
    ignores the padding. The first rank with the logits samples each token and broadcasts it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    inputs_bt = torch.zeros((1, seq_len), dtype=torch.int64, device=forward.device)
    batch = SimpleBatch(inputs_bt, (TokenLayout(seq_len),))
    with forward.evaluating(1, batch_size=1) as run:
        for _ in range(num_tokens):
            context = tokens[-seq_len:]
            inputs_bt.zero_()
            inputs_bt[0, : len(context)] = torch.tensor(context, device=forward.device)
            logits = run([batch])
            token = None
            if forward.rank == forward.source:
                last = logits[0][0, len(context) - 1].float().cpu()
                if temperature == 0:
                    token = int(last.argmax().item())
                else:
                    probabilities = torch.softmax(last / temperature, dim=-1)
                    token = int(torch.multinomial(probabilities, 1, generator=generator).item())
            token = broadcast_object(token, src=forward.source)
            assert token is not None
            tokens.append(token)
            if token in ends:
                break
    return tokens[len(prompt) :]
