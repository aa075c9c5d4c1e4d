"""From the options of speculative decoding to who drafts: loads what a proposer needs, and times what a round costs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from refimpl.attention import Setting, choose_backend
from refimpl.cache.kv_cache import KVCache
from refimpl.config import EngineArgs
from refimpl.errors import ConfigError
from refimpl.executor.check_graphs import DraftGraphs
from refimpl.executor.cuda_graphs import DecodeStep
from refimpl.executor.model_runner import ModelRunner
from refimpl.executor.round_costs import measure_rounds
from refimpl.executor.speculation import Speculation
from refimpl.loading.checkpoint import Checkpoint, load_model, open_checkpoint
from refimpl.model_shares import fits
from refimpl.models.llama import LlamaForCausalLM
from refimpl.ranks import ALONE, Ranks
from refimpl.scheduler.drafting import Drafting
from refimpl.speculative.draft_model import DraftModelProposer
from refimpl.speculative.head_files import load_head, shipped_head
from refimpl.speculative.head_proposer import HeadProposer
from refimpl.speculative.lengths import AdaptiveLength, FixedLength
from refimpl.speculative.ngram_proposer import NgramProposer
from refimpl.speculative.proposer import Proposer
from refimpl.speculative_config import SpeculativeConfig

log = logging.getLogger(__name__)

COMPARED_TOKENS = 512
"""Tokens whose texts are compared, to see whether two vocabularies are one."""


def open_draft_model(config: SpeculativeConfig | None, target: Checkpoint, ranks: Ranks = ALONE) -> Checkpoint | None:
    """The draft model's checkpoint, if the options name one; no weights are read.

    Raises:
        ConfigError: its vocabulary is not the target's.
        ModelError: it cannot be had, read or run.

    """
    if config is None or config.method != "draft_model":
        return None
    checkpoint = open_checkpoint(config.model)
    if ranks.rank == 0:
        check_same_vocabulary(target, checkpoint)
    return checkpoint


def load_draft_model(
    checkpoint: Checkpoint,
    args: EngineArgs,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    ranks: Ranks = ALONE,
) -> LlamaForCausalLM:
    """The draft model with its weights: split over the ranks as the target is, or where its sizes do not divide, whole on
    each of them.

    Raises:
        ModelError: they cannot be read.

    """
    length = min(max_model_len, checkpoint.config.context_limit())
    if length < max_model_len:
        log.info("the draft model %s reads at most %d tokens; longer texts go on without drafts", checkpoint.name, length)
    together = ranks if fits(checkpoint.config, ranks.size) else ALONE
    return load_model(checkpoint, args.load_format, dtype, device, args.seed, length, ranks=together)


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


def make_speculation(
    config: SpeculativeConfig, args: EngineArgs, target: Checkpoint, draft: LlamaForCausalLM | None, runner: ModelRunner
) -> Speculation:
    """Who drafts, ready to be asked. ``draft`` is what :func:`load_draft_model` gave, if there is one.

    Raises:
        ConfigError: there is no head for this model, or it is one for another.

    """
    proposer = _proposer(config, args, target, draft, runner)
    coupled = config.sampler == "coupled"
    runner.input_batch.unsettled.expect()
    return Speculation(proposer, runner.input_batch, coupled, config.synthetic_acceptance, runner.ranks)


def _proposer(
    config: SpeculativeConfig, args: EngineArgs, target: Checkpoint, draft: LlamaForCausalLM | None, runner: ModelRunner
) -> Proposer:
    max_num_seqs, budget = args.step_limits()
    cache, batch = runner.kv_cache, runner.input_batch
    if isinstance(config.method, Proposer):
        return config.method
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "head":
        folder = Path(config.model) if config.model is not None else shipped_head(target.fingerprint())
        if folder is None:
            raise ConfigError(
                f"no draft head comes with refimpl for {target.name}; train one (`refimpl speculate train --target "
                f"{target.name} --out FOLDER`) and give its folder as model of speculative_config"
            )
        head = load_head(folder, runner.model, target.name, target.fingerprint())
        return HeadProposer(head, runner.model, cache.layers, runner.backend, max_num_seqs)
    assert draft is not None, "loaded before the cache was sized"
    dtype = draft.embed_tokens.dtype
    kv_cache = KVCache(draft.share, cache.num_blocks, cache.block_size, dtype, batch.device)
    setting = Setting(draft.config.head_dim, batch.device, dtype, cache.block_size, draft.config.windowed)
    backend = choose_backend(args.attention_backend, setting)
    return DraftModelProposer(draft, kv_cache, backend, max_num_seqs, budget)


def record_drafter(runner: ModelRunner, sizes: list[int]) -> None:
    """Record CUDA graphs of a draft model's steps, where there is one."""
    assert runner.speculation is not None
    proposer, batch = runner.speculation.proposer, runner.input_batch
    if isinstance(proposer, DraftModelProposer) and getattr(proposer.backend, "decodes_on_device", False):
        step = DecodeStep(proposer.model, proposer.kv_cache, batch, proposer.backend, sizes[-1])
        proposer.graphs = DraftGraphs.of(step, sizes[-1])


def make_drafting(config: SpeculativeConfig, args: EngineArgs, runner: ModelRunner) -> Drafting:
    """The number of drafts a round: as asked, or adapting to costs that are measured here."""
    assert runner.speculation is not None
    most, longest = config.num_speculative_tokens, runner.speculation.proposer.max_len
    if not config.adaptive:
        return Drafting(FixedLength(most), longest)
    return Drafting(AdaptiveLength(most, measure_rounds(runner, most, args.step_limits())), longest)
