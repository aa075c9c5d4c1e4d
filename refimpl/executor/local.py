"""LocalExecutor: the model on one device of this process."""

from __future__ import annotations

import gc
import logging
import os
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from refimpl.attention import Setting, choose_backend
from refimpl.cache.kv_cache import KVCache
from refimpl.cache.staged_blocks import staging_bytes
from refimpl.config import GIB, EngineArgs
from refimpl.errors import OutOfMemoryError
from refimpl.executor import gpu_memory, memory, memory_advice, serving, warm_up
from refimpl.executor.cuda_graphs import graph_sizes
from refimpl.executor.device import free_host_memory, is_out_of_memory, resolve_device, resolve_dtype
from refimpl.executor.device_memory import DeviceMemory
from refimpl.executor.draft_weights import Drafter, open_draft_weights
from refimpl.executor.drafters import make_drafting, make_speculation, record_drafter
from refimpl.executor.input_batch import InputBatch
from refimpl.executor.mixed_graphs import mixed_sizes
from refimpl.executor.model_runner import ModelRunner
from refimpl.executor.pending import PendingOutput
from refimpl.executor.pending_checks import PendingChecks
from refimpl.executor.preemption_costs import measure
from refimpl.executor.stages import Stages
from refimpl.executor.weights import check_room, free_before_loading, held_in, method_of
from refimpl.loading.checkpoint import Checkpoint, load_model
from refimpl.memory_report import MemoryPart, SettingChange
from refimpl.model_shares import share_of
from refimpl.outputs import ModelRunnerOutput, SchedulerOutput
from refimpl.quantization.method import weight_bytes
from refimpl.ranks import ALONE, Ranks
from refimpl.sampling.slots import SamplingSlots
from refimpl.sampling_params import LogitsHooks
from refimpl.scheduler.drafting import Drafting
from refimpl.scheduler.preemption import PreemptionCosts
from refimpl.speculative.lengths import ladder
from refimpl.speculative_config import SpeculativeConfig

log = logging.getLogger(__name__)

WORKER = "refimpl-step"
"""How the threads that compute steps are named."""


class LocalExecutor:
    """Loads the model, sizes the cache from the memory that is left, and runs steps.

    With ``asynchronous`` steps run in one worker thread, in order; without, ``submit`` computes at once. Where ``ranks``
    hold the model together, this is what each of them does with its share.

    Raises:
        OutOfMemoryError: the weights or the least cache do not fit.

    """

    def __init__(
        self,
        args: EngineArgs,
        checkpoint: Checkpoint,
        max_model_len: int,
        asynchronous: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self.device = resolve_device(args.device)
        self.dtype = resolve_dtype(args.dtype, self.device)
        self.device_name = f"{self.device}, {str(self.dtype).removeprefix('torch.')}"
        share = share_of(checkpoint.config, ranks.size)
        self._free = free_before_loading(ranks, self.device)
        self._method = method_of(args, checkpoint, share, self.device, self.dtype, self._free)
        self.weight_bytes = weight_bytes(share, self._method, self.dtype.itemsize)
        self.block_bytes = memory.block_bytes(share, args.block_size, self.dtype.itemsize)
        self.logits_hooks: LogitsHooks | None = {}
        self.preemption_costs: PreemptionCosts | None = None
        self.drafting: Drafting | None = None
        self.num_blocks = 0
        self.memory: DeviceMemory | None = None
        """How a GPU's memory is divided."""
        self._closed = False
        self._process = os.getpid()
        self.stages = Stages("loading the weights")
        """What is being made, and what each part of it took."""
        try:
            self._build(args, checkpoint, max_model_len)
        except BaseException as error:
            self._give_back_after(error)
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryError(f"{checkpoint.name}: {self._what_to_do(args)} ({error})") from error
        self.step_threads = set[int]()
        """Identifiers of the threads that compute, where steps are not computed at once."""
        self._thread = self._one_thread() if asynchronous else None
        # Who waits for a GPU's tokens is not who orders its next step.
        reads = asynchronous and self.device.type == "cuda"
        self._reader = self._one_thread() if reads else None

    def _one_thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, WORKER, lambda known: known.add(threading.get_ident()), (self.step_threads,))

    def _load(self, args: EngineArgs, checkpoint: Checkpoint, max_model_len: int) -> None:
        """The weights, and those of what drafts; first of all it is seen that there is room for both."""
        speculative: SpeculativeConfig | None = args.speculative_config
        draft = open_draft_weights(speculative, checkpoint, self.device, self._ranks)
        if draft is not None:
            self.weight_bytes += draft.weight_bytes(self.dtype.itemsize)
            self.block_bytes += draft.block_bytes(args.block_size, self.dtype.itemsize)
        if self.device.type == "cuda":
            self.memory = gpu_memory.before_loading(args, checkpoint.config, self.dtype, self.device, draft)
            told = checkpoint.name if draft is None else f"{checkpoint.name} with {draft.told}"
            memory_advice.check_weights(self.memory, told, held_in(self._method, self.dtype), str(self.device))
        else:
            check_room(checkpoint, draft, self._method, self.dtype, self.device, self._ranks, self._free)
        self._model = load_model(
            *(checkpoint, args.load_format, self.dtype, self.device, args.seed, max_model_len, self._method), self._ranks
        )
        self._drafter = None if draft is None else draft.load(self._model, args, max_model_len)
        if self.memory is not None:
            laws = 1 if speculative is None else 1 + speculative.num_speculative_tokens
            self.memory = gpu_memory.with_weights(self.memory, self.device)
            self.memory = self.memory.with_(block_bytes=self.block_bytes, laws_a_row=laws)

    def _build(self, args: EngineArgs, checkpoint: Checkpoint, max_model_len: int) -> None:
        """Model, cache and runner, in this order: the cache takes what the rest leaves."""
        config = checkpoint.config
        self._load(args, checkpoint, max_model_len)
        speculative = args.speculative_config
        windowed = self._model.config.windowed  # of the model as it is built, for contexts of max_model_len
        setting = Setting(config.head_dim, self.device, self.dtype, args.block_size, windowed)
        backend = choose_backend(args.attention_backend, setting)
        max_num_seqs, max_num_batched_tokens = args.step_limits()
        served = serving.who_serves(args, setting, self._method.name)
        log.info("on %s: %s", self.device_name, serving.in_a_line(served))
        in_graphs, _ = serving.graphs_choice(args.attention_backend, setting, args.enforce_eager)
        self.graph_sizes = graph_sizes(max_num_seqs) if in_graphs else []
        """Numbers of decodes for which CUDA graphs are recorded."""
        prompts_too, _ = serving.mixed_graphs_choice(args.attention_backend, setting, args.enforce_eager)
        self.token_sizes = mixed_sizes(max_num_batched_tokens) if prompts_too and speculative is None else []
        """The same for steps with prompts, but not beside drafts: numbers of tokens."""
        self.stages.enter("compiling kernels")
        if serving.compiles_kernels(args.attention_backend, setting):
            with self._ranks.muted():
                warm_up.compile_kernels(args, self._model, self.dtype, self.device, self.graph_sizes, self.token_sizes)
        self.stages.enter("measuring what a step takes")
        self.num_host_blocks = int(args.swap_space * GIB // self.block_bytes)
        available = self._available_bytes(args, max_num_seqs)
        self.num_blocks = self._ranks.least(memory.num_blocks(args.cache_config(), self.block_bytes, available))
        max_model_len = min(max_model_len, self.num_blocks * args.block_size)
        self.stages.enter(
            "making the KV cache" + (f" and its swap space of {args.swap_space:g} GiB" if args.swap_space else "")
        )
        kv_cache = KVCache(
            self._model.share, self.num_blocks, args.block_size, self.dtype, self.device, self.num_host_blocks
        )
        self.stages.enter("making the batch")
        slots = SamplingSlots(max_num_seqs, config.vocab_size, self.device, self.logits_hooks, args.logits_hook)
        reads_lengths = not getattr(backend, "decodes_on_device", False)
        batch = InputBatch(max_num_seqs, max_model_len, args.block_size, self.device, slots, reads_lengths)
        self.runner = ModelRunner(self._model, kv_cache, batch, backend, self._ranks)
        if speculative is not None:
            self.stages.enter("making ready to draft")
            self.runner.speculation = make_speculation(speculative, args, self._drafter, self.runner)
        self.stages.enter("timing a preemption")
        if self.num_host_blocks and args.preemption_mode == "auto":
            most = min(max_num_batched_tokens, max_model_len - 1)
            self.preemption_costs = measure(self.runner, self._model.share, most, self.num_host_blocks)
        self.stages.enter("recording CUDA graphs")
        if self.graph_sizes:
            checks = [] if speculative is None else ladder(speculative.num_speculative_tokens, speculative.adaptive)
            self.runner.capture(self.graph_sizes, self.token_sizes, checks)
            if speculative is not None:
                record_drafter(self.runner, self.graph_sizes)
        if speculative is not None:
            self.stages.enter("timing a round of drafts")
            self.drafting = make_drafting(speculative, args, self.runner)
        self.stages.end()

    def submit(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Order a step: at once, or in the worker thread after those before it."""
        if self._reader is not None and self._thread is not None:
            return self._reader.submit(_read, self._thread.submit(_launch, self.runner, scheduler_output))
        if self._thread is not None:
            return self._thread.submit(_execute, self.runner, scheduler_output)
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(_execute(self.runner, scheduler_output))
        except BaseException as error:  # a second Ctrl-C too: the engine must learn that this step is torn
            future.set_exception(error)
        return future

    @property
    def kv_cache(self) -> KVCache:
        """The tensors behind the block ids."""
        return self.runner.kv_cache

    def close(self) -> None:
        """End the thread and release weights and cache, whoever still refers to them.

        In a child that was forked off, nothing is done: thread, device and memory are its parent's.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        if self._thread is not None:
            in_worker = threading.current_thread().name.startswith(WORKER)  # garbage is collected anywhere
            self._thread.shutdown(wait=not in_worker)
            if self._reader is not None:
                self._reader.shutdown(wait=not in_worker)
            if in_worker:
                return  # a step may be running; when it ends, nobody refers to the tensors
        self._release()

    def _release(self) -> None:
        """Give back what has been made so far."""
        runner: ModelRunner | None = self.__dict__.pop("runner", None)
        if runner is not None:
            runner.release_graphs()
            runner.kv_cache.release()
            if runner.speculation is not None:
                runner.speculation.proposer.release()
        models: list[Drafter | None] = [self.__dict__.pop(name, None) for name in ("_model", "_drafter")]
        for model in models:
            if model is not None:
                model.release()
        del runner, models, model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            memory.give_back_to_the_system()

    def _give_back_after(self, error: BaseException) -> None:
        """Give back what a half-built engine holds, although the error's traceback will be kept: it loses its variables."""
        one: BaseException | None = error
        while one is not None:
            traceback.clear_frames(one.__traceback__)
            one = one.__cause__ or one.__context__
        self._release()

    def _what_to_do(self, args: EngineArgs) -> str:
        """After an allocation failed and everything was given back: what was being made, and what to change."""
        fixed = [name for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes") if getattr(args, name) is not None]
        if self.memory is None:
            sizes = self.block_bytes, self.num_blocks, self.__dict__.get("num_host_blocks", 0)
            return memory_advice.after_a_failure_on_a_cpu(self.stages.current, free_host_memory(), *sizes, *fixed[:1])
        free = torch.cuda.mem_get_info(self.device)[0]
        device = str(self.device)
        return memory_advice.after_a_failure(self.memory, self.stages.current, device, free, self.num_blocks, *fixed[:1])

    @property
    def memory_parts(self) -> tuple[MemoryPart, ...]:
        """A GPU's memory, part by part."""
        return () if self.memory is None else self.memory.parts(self.num_blocks)

    @property
    def setting_changes(self) -> tuple[SettingChange, ...]:
        """What other settings would make of the cache."""
        return () if self.memory is None else self.memory.changes()

    def _available_bytes(self, args: EngineArgs, max_num_seqs: int) -> int:
        """Bytes that the KV cache may take. On a GPU, the largest step is run once to see what it needs beside."""
        cache, model = args.cache_config(), self._model
        if self.memory is None:
            longest = args.max_model_len or model.config.context_limit()
            enough = memory.enough_bytes(self.block_bytes, args.block_size, max_num_seqs, longest)
            available = memory.cpu_cache_bytes(cache, free_host_memory() // self._ranks.here)
            return available if cache.cpu_kvcache_space is not None else min(available, enough)
        if self.num_host_blocks:
            self.memory = self.memory.with_(staging=staging_bytes(self.block_bytes, self.num_host_blocks))
        if not self.memory.measured:
            return 0  # the options say it all
        sizes = self.graph_sizes, self.token_sizes
        with self._ranks.muted():
            self.memory = gpu_memory.measured(self.memory, args, model, self.dtype, self.device, *sizes)
        memory_advice.check_room(self.memory, str(self.device), args.max_model_len)
        return min(self.memory.left, self.memory.enough)


def _launch(runner: ModelRunner, scheduler_output: SchedulerOutput) -> PendingOutput | PendingChecks:
    """A step. What it raises keeps its lines and loses its variables: a notebook's last traceback would hold tensors."""
    try:
        return runner.launch(scheduler_output)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def _execute(runner: ModelRunner, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    return _launch(runner, scheduler_output).result()


def _read(launched: Future[PendingOutput | PendingChecks]) -> ModelRunnerOutput:
    return launched.result().result()
