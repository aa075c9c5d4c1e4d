"""The two kinds of drafter, as training sees them: states from which tokens are drafted, and the logits of states."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from refimpl.config import ModelConfig
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import Checkpoint
from refimpl.models.llama import LlamaForCausalLM
from refimpl.speculate.dense import Batch, DenseContext
from refimpl.speculate.self_text import Texts
from refimpl.speculative.head_files import round_as_kept, save_head
from refimpl.speculative.head_model import DraftHead, HeadConfig

KINDS = ("head", "llama")


class Drafter(Protocol):
    """What is trained."""

    kept_layers: tuple[int, ...]
    """Layers of the target whose keys and values it reads."""
    steps: int
    """Drafted tokens in a row that differ from one another in training."""
    vocabulary: Int[Tensor, "Vd"] | None
    """Ids of the tokens that it drafts; None: all."""

    def weights(self) -> dict[str, nn.Parameter]:
        """What training changes, by name."""

    def states(self, batch: Batch, steps: int) -> Iterator[Float[Tensor, "N L Hd"]]:
        """For each of ``steps`` drafted tokens, the state of each row from which it is drafted.

        Row t has seen the text up to token t + i when it drafts the one after it; i counts from 1.
        """

    def logits(self, state: Float[Tensor, "R Hd"]) -> Float[Tensor, "R Vd"]:
        """Logits of the tokens that it drafts, in at least float32."""

    def target_logits(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R Vd"]:
        """The target's logits of the same tokens."""

    def settle(self) -> None:
        """Take the weights that a file will hold."""

    def save(self, folder: Path) -> None:
        """Write it as the engine loads it."""


class HeadDrafter:
    """A :class:`DraftHead` in training: its weights in float32, and the target's keys dense.

    It begins as a head that changes nothing: its state is the target's, scaled as the target's last norm scales.
    """

    def __init__(
        self, target: LlamaForCausalLM, config: HeadConfig, vocabulary: Int[Tensor, "Vd"], steps: int, seed: int
    ) -> None:
        self.target = target
        self.steps = steps
        self.kept_layers = tuple(sorted({layer for layer in config.attends if layer is not None}))
        self.head = DraftHead(
            config, target, vocabulary, dtype=torch.promote_types(target.embed_tokens.dtype, torch.float32)
        )
        self.vocabulary: Int[Tensor, "Vd"] | None = self.head.vocabulary
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.head.own_weights().items():
            if weight.dim() == 2:
                # What is added to the residual stream begins small.
                std = (0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0) / math.sqrt(weight.shape[1])
                weight.data.copy_(torch.randn(weight.shape, generator=generator) * std)
        H = self.head.config.hidden_size
        self.head.fuse.weight.data[:, :H] = torch.eye(H) + 0.1 * self.head.fuse.weight.data[:, :H].cpu()
        self.head.norm.data.copy_(self.target.norm.weight.data)
        for weight in self.weights().values():
            weight.requires_grad_(True)

    def weights(self) -> dict[str, nn.Parameter]:
        """The head's own; the target's are frozen."""
        return self.head.own_weights()

    def states(self, batch: Batch, steps: int) -> Iterator[Float[Tensor, "N L H"]]:
        """Each from the one before it, as in the running engine, with the tokens that the text has."""
        context = DenseContext(self.target, batch)
        N, L = batch.token_ids.shape
        positions = torch.arange(L, device=batch.token_ids.device).repeat(N)
        state = batch.hidden.flatten(0, 1)
        for i in range(1, steps + 1):
            state = self.head(state, batch.after(i).flatten(), positions + i, context)
            yield state.unflatten(0, (N, L))

    def logits(self, state: Float[Tensor, "R H"]) -> Float[Tensor, "R Vd"]:
        """By the rows of the target's output layer."""
        return self.head.compute_logits(state)

    def target_logits(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R Vd"]:
        """By the same rows."""
        return self.head.compute_logits(hidden)

    def settle(self) -> None:
        """Matrices of 8 bits."""
        round_as_kept(self.head)

    def save(self, folder: Path) -> None:
        """The head's folder."""
        save_head(self.head, folder)


class LlamaDrafter:
    """A small Llama with the target's tokenizer, which sees tokens alone: transformers' model, trained from nothing."""

    def __init__(self, checkpoint: Checkpoint, target: LlamaForCausalLM, hidden_size: int, layers: int, seed: int) -> None:
        from transformers import LlamaConfig
        from transformers import LlamaForCausalLM as Model

        self._checkpoint = checkpoint
        self._target = target
        self.steps = 1  # a token is drafted alike whether those before it were drafted too
        self.kept_layers: tuple[int, ...] = ()
        self.vocabulary: Int[Tensor, "Vd"] | None = None
        c = checkpoint.config
        heads = max(1, hidden_size // 64)
        if hidden_size % heads or (hidden_size // heads) % 2:
            raise ConfigError(
                f"a drafter of hidden size {hidden_size} cannot have heads of equal, even size; give a multiple of 64"
            )
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=c.max_position_embeddings,
            rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=True, bos_token_id=c.bos_token_id,
            eos_token_id=list(c.eos_token_ids) or None, pad_token_id=None,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: Any = Model(config)
        self.model.to(target.embed_tokens.device)

    def weights(self) -> dict[str, nn.Parameter]:
        """All of it; the output layer is the embedding."""
        return dict(self.model.named_parameters())

    def states(self, batch: Batch, steps: int) -> Iterator[Float[Tensor, "N L Hd"]]:
        """Its hidden states, which depend on the tokens alone: row t of step i is position t + i."""
        hidden = self.model.model(batch.token_ids).last_hidden_state
        for i in range(1, steps + 1):
            yield batch.ahead(hidden, i)

    def logits(self, state: Float[Tensor, "R Hd"]) -> Float[Tensor, "R V"]:
        """By its own output layer."""
        logits: Tensor = self.model.lm_head(state)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def target_logits(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """By the target's output layer."""
        return self._target.compute_logits(hidden)

    def settle(self) -> None:
        """Numbers of bfloat16."""
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.copy_(weight.bfloat16())

    def save(self, folder: Path) -> None:
        """A checkpoint folder with the target's tokenizer."""
        import copy

        copy.deepcopy(self.model).to("cpu", torch.bfloat16).save_pretrained(folder)
        self._checkpoint.tokenizer().backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def frequent_tokens(texts: Texts, config: ModelConfig, size: int) -> Int[Tensor, "Vd"]:
    """The ids of the ``size`` most frequent tokens of the answers, and those that end a text; ascending."""
    counts = np.bincount(texts.answer_tokens(), minlength=config.vocab_size).astype(np.int64)
    counts[list(config.eos_token_ids)] += int(counts.sum()) + 1
    order = np.argsort(-counts, kind="stable")
    return torch.from_numpy(np.sort(order[: min(size, config.vocab_size)]))
