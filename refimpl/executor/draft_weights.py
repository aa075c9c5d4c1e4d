"""The weights of what drafts: opened before anything is loaded, so that all sums count them; loaded after the target's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from refimpl.config import EngineArgs
from refimpl.errors import ConfigError
from refimpl.executor import memory
from refimpl.loading.checkpoint import Checkpoint, load_model, open_checkpoint
from refimpl.model_shares import fits, share_if_it_fits
from refimpl.models.llama import LlamaForCausalLM
from refimpl.quantization.choose import choose_method
from refimpl.quantization.method import weight_bytes
from refimpl.ranks import ALONE, Ranks
from refimpl.speculative.head_files import load_head, read_head_config, shipped_head
from refimpl.speculative.head_model import DraftHead
from refimpl.speculative_config import SpeculativeConfig

log = logging.getLogger(__name__)

COMPARED_TOKENS = 512
"""Tokens whose texts are compared, to see whether two vocabularies are one."""

Drafter = LlamaForCausalLM | DraftHead
"""What drafts and has weights."""


@runtime_checkable
class DraftWeights(Protocol):
    """The weights of what drafts, on one rank. Nothing is loaded yet."""

    told: str
    """What they are, for people: ``its draft model NAME``."""
    num_weights: int

    def weight_bytes(self, bytes_per_value: int) -> int:
        """What they take beside a target of so many bytes a value."""

    def block_bytes(self, block_size: int, bytes_per_value: int) -> int:
        """What it adds to each block of the KV cache."""

    def load(self, target: LlamaForCausalLM, args: EngineArgs, max_model_len: int) -> Drafter:
        """Read them. The target has its weights.

        Raises:
            ConfigError: they are those of a head for another target.
            ModelError: they cannot be read.

        """


class ModelWeights:
    """Those of a draft model: split over the ranks as the target is, or where its sizes do not divide, whole on each."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, size: int) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._share = share_if_it_fits(checkpoint.config, size)
        self.told = f"its draft model {checkpoint.name}"
        self.num_weights = self._share.num_parameters

    def weight_bytes(self, bytes_per_value: int) -> int:
        """Held as its checkpoint has them."""
        return weight_bytes(self._share, choose_method(None, self._device, self._share), bytes_per_value)

    def block_bytes(self, block_size: int, bytes_per_value: int) -> int:
        """Of its own keys and values."""
        return memory.block_bytes(self._share, block_size, bytes_per_value)

    def load(self, target: LlamaForCausalLM, args: EngineArgs, max_model_len: int) -> LlamaForCausalLM:
        """In the target's dtype."""
        checkpoint, ranks = self._checkpoint, target.ranks
        length = min(max_model_len, checkpoint.config.context_limit())
        if length < max_model_len:
            log.info("%s reads at most %d tokens; longer texts go on without drafts", self.told, length)
        together = ranks if fits(checkpoint.config, ranks.size) else ALONE
        dtype = target.embed_tokens.dtype
        return load_model(checkpoint, args.load_format, dtype, self._device, args.seed, length, ranks=together)


class HeadWeights:
    """Those of a draft head. Its keys and values are the target's."""

    def __init__(self, folder: Path, target: Checkpoint, size: int) -> None:
        self._folder, self._target = folder, target
        self.told = "its draft head"
        self.num_weights = read_head_config(folder).num_held(size)

    def weight_bytes(self, bytes_per_value: int) -> int:
        """In the target's dtype."""
        return self.num_weights * bytes_per_value

    def block_bytes(self, block_size: int, bytes_per_value: int) -> int:
        """Nothing."""
        return 0

    def load(self, target: LlamaForCausalLM, args: EngineArgs, max_model_len: int) -> DraftHead:
        """Beside the target, whose embedding it reads."""
        return load_head(self._folder, target, self._target.name, self._target.fingerprint())


def open_draft_weights(
    config: SpeculativeConfig | None, target: Checkpoint, device: torch.device, ranks: Ranks = ALONE
) -> DraftWeights | None:
    """What the options name, if it has weights: a draft model or a head.

    Raises:
        ConfigError: the draft model's vocabulary is not the target's, or no head comes with refimpl for this target.
        ModelError: it cannot be had, read or run.

    """
    if config is None or config.method not in ("draft_model", "head"):
        return None
    if config.method == "draft_model":
        checkpoint = open_checkpoint(config.model)
        if ranks.rank == 0:
            check_same_vocabulary(target, checkpoint)
        return ModelWeights(checkpoint, device, ranks.size)
    folder = Path(config.model) if config.model is not None else shipped_head(target.fingerprint())
    if folder is None:
        raise ConfigError(
            f"no draft head comes with refimpl for {target.name}; train one (`refimpl speculate train --target "
            f"{target.name} --out FOLDER`) and give its folder as model of speculative_config"
        )
    return HeadWeights(folder, target, ranks.size)


def check_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Refuse a draft model whose tokens are others than the target's: its drafts would be other texts.

    Raises:
        ConfigError: their numbers differ, or the text of a token does.

    """
    sizes = target.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the draft model {draft.name} has {sizes[1]} tokens, {target.name} has {sizes[0]}: drafts must be of the same "
            "vocabulary; use a draft model of the same family"
        )
    ours, theirs = target.tokenizer(), draft.tokenizer()
    for token_id in range(0, sizes[0], max(1, sizes[0] // COMPARED_TOKENS)):
        if ours.token_text(token_id) != theirs.token_text(token_id):
            raise ConfigError(
                f"token {token_id} is {theirs.token_text(token_id)!r} for the draft model {draft.name}, and "
                f"{ours.token_text(token_id)!r} for {target.name}: drafts must be of the same vocabulary"
            )
