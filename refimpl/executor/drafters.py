"""From the options of speculative decoding to who drafts, and how much: by what a round costs, which is timed here."""

from __future__ import annotations

from refimpl.attention import Setting, choose_backend
from refimpl.cache.kv_cache import KVCache
from refimpl.config import EngineArgs
from refimpl.executor.check_graphs import DraftGraphs
from refimpl.executor.cuda_graphs import DecodeStep
from refimpl.executor.draft_weights import Drafter
from refimpl.executor.model_runner import ModelRunner
from refimpl.executor.round_costs import measure_rounds
from refimpl.executor.speculation import Speculation
from refimpl.models.llama import LlamaForCausalLM
from refimpl.scheduler.drafting import Drafting
from refimpl.speculative.draft_model import DraftModelProposer
from refimpl.speculative.head_model import DraftHead
from refimpl.speculative.head_proposer import HeadProposer
from refimpl.speculative.lengths import AdaptiveLength, FixedLength
from refimpl.speculative.ngram_proposer import NgramProposer
from refimpl.speculative.proposer import Proposer
from refimpl.speculative_config import SpeculativeConfig


def make_speculation(
    config: SpeculativeConfig, args: EngineArgs, drafter: Drafter | None, runner: ModelRunner
) -> Speculation:
    """Who drafts, ready to be asked. ``drafter`` is loaded, where one has weights."""
    proposer = _proposer(config, args, drafter, runner)
    coupled = config.sampler == "coupled"
    runner.input_batch.unsettled.expect()
    return Speculation(proposer, runner.input_batch, coupled, config.synthetic_acceptance, runner.ranks)


def _proposer(config: SpeculativeConfig, args: EngineArgs, drafter: Drafter | None, runner: ModelRunner) -> Proposer:
    max_num_seqs, budget = args.step_limits()
    cache, batch = runner.kv_cache, runner.input_batch
    if isinstance(config.method, Proposer):
        return config.method
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if isinstance(drafter, DraftHead):
        return HeadProposer(drafter, runner.model, cache.layers, runner.backend, max_num_seqs)
    assert isinstance(drafter, LlamaForCausalLM), "loaded before the cache was sized"
    dtype = drafter.embed_tokens.dtype
    kv_cache = KVCache(drafter.share, cache.num_blocks, cache.block_size, dtype, batch.device)
    setting = Setting(drafter.config.head_dim, batch.device, dtype, cache.block_size, drafter.config.windowed)
    backend = choose_backend(args.attention_backend, setting)
    return DraftModelProposer(drafter, kv_cache, backend, max_num_seqs, budget)


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
