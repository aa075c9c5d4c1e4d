"""LocalExecutor: the model on one device of this process."""

from __future__ import annotations

import gc
import logging
import os
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from refimpl.attention import AttentionBackend, Setting, backend_choice, choose_backend
from refimpl.cache.kv_cache import KVCache
from refimpl.cache.staged_blocks import staging_bytes
from refimpl.config import GIB, EngineArgs
from refimpl.errors import OutOfMemoryError
from refimpl.executor import gpu_memory, memory
from refimpl.executor.cuda_graphs import graph_sizes
from refimpl.executor.device import free_host_memory, resolve_device, resolve_dtype
from refimpl.executor.input_batch import InputBatch
from refimpl.executor.model_runner import ModelRunner
from refimpl.executor.pending import PendingOutput
from refimpl.executor.preemption_costs import measure
from refimpl.loading.checkpoint import Checkpoint, load_model
from refimpl.models.llama import LlamaForCausalLM
from refimpl.outputs import ModelRunnerOutput, SchedulerOutput
from refimpl.sampling.slots import SamplingSlots
from refimpl.sampling_params import LogitsHooks
from refimpl.scheduler.preemption import PreemptionCosts

log = logging.getLogger(__name__)

WORKER = "refimpl-step"
"""How the threads that compute steps are named."""


class LocalExecutor:
    """Loads the model, sizes the cache from the memory that is left, and runs steps.

    With ``asynchronous`` steps run in one worker thread, in order; without, ``submit`` computes at once.

    Raises:
        OutOfMemoryError: the weights or the least cache do not fit.

    """

    def __init__(self, args: EngineArgs, checkpoint: Checkpoint, max_model_len: int, asynchronous: bool) -> None:
        self.device = resolve_device(args.device)
        self.dtype = resolve_dtype(args.dtype, self.device)
        self.device_name = f"{self.device}, {str(self.dtype).removeprefix('torch.')}"
        self.weight_bytes = checkpoint.config.num_parameters * self.dtype.itemsize
        self.block_bytes = memory.block_bytes(checkpoint.config, args.block_size, self.dtype.itemsize)
        self.logits_hooks: LogitsHooks | None = {}
        self._check_room_for_weights(checkpoint)
        try:
            model = load_model(checkpoint, args.load_format, self.dtype, self.device, args.seed, max_model_len)
            max_num_seqs, max_num_batched_tokens = args.step_limits()
            setting = Setting(checkpoint.config.head_dim, self.device, self.dtype, args.block_size)
            backend = choose_backend(args.attention_backend, setting)
            log.info("attention: %s (%s)", *backend_choice(args.attention_backend, setting))
            self.graph_sizes = self._graph_sizes(args, backend, max_num_seqs)
            self.num_host_blocks = int(args.swap_space * GIB // self.block_bytes)
            available = self._available_bytes(args, model, max_num_seqs, min(max_num_batched_tokens, max_model_len))
            self.num_blocks = memory.num_blocks(args.cache_config(), checkpoint.config, self.dtype.itemsize, available)
            max_model_len = min(max_model_len, self.num_blocks * args.block_size)
            self.runner = ModelRunner(
                model,
                KVCache(
                    checkpoint.config,
                    self.num_blocks,
                    args.block_size,
                    self.dtype,
                    self.device,
                    self.num_host_blocks,
                ),
                InputBatch(
                    max_num_seqs,
                    max_model_len,
                    args.block_size,
                    self.device,
                    SamplingSlots(
                        max_num_seqs, checkpoint.config.vocab_size, self.device, self.logits_hooks, args.logits_hook
                    ),
                ),
                backend,
            )
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                raise
            raise OutOfMemoryError(
                f"{checkpoint.name} needs {self.weight_bytes / GIB:.2f} GiB for its "
                f"weights in {args.dtype} beside its KV cache, which {self.device} does not have: {error}"
            ) from error
        self.preemption_costs: PreemptionCosts | None = None
        if self.num_host_blocks and args.preemption_mode == "auto":
            most = min(max_num_batched_tokens, max_model_len - 1)
            self.preemption_costs = measure(self.runner, checkpoint.config, most, self.num_host_blocks)
        if self.graph_sizes:
            self.runner.capture(self.graph_sizes)
            log.info("CUDA graphs: %d, for decodes of up to %d sequences", len(self.graph_sizes), self.graph_sizes[-1])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=WORKER) if asynchronous else None
        # Who waits for a GPU's tokens is not who orders its next step.
        reads = asynchronous and self.device.type == "cuda"
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=WORKER) if reads else None
        self._closed = False
        self._process = os.getpid()

    def _graph_sizes(self, args: EngineArgs, backend: AttentionBackend, max_num_seqs: int) -> list[int]:
        """Numbers of decodes for which CUDA graphs are recorded; none where they cannot be, or are not wanted."""
        on_device = getattr(backend, "decodes_on_device", False)  # a backend of the user's need not know of it
        in_graphs = self.device.type == "cuda" and on_device and not args.enforce_eager
        return graph_sizes(max_num_seqs) if in_graphs else []

    def _check_room_for_weights(self, checkpoint: Checkpoint) -> None:
        """Say before the loading, not minutes into it, that the weights alone are too large."""
        needed = self.weight_bytes
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else free_host_memory()
        if needed > free:
            raise OutOfMemoryError(
                f"{checkpoint.name} has {checkpoint.config.num_parameters / 1e9:.2f} billion weights, {needed / GIB:.1f} GiB"
                f" in {str(self.dtype).removeprefix('torch.')}; {self.device} has {free / GIB:.1f} GiB free. Use a smaller "
                "dtype or model, or another device",
                needed=needed,
                free=free,
            )

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
        if self.runner.graphs is not None:
            self.runner.graphs.release()
        self.runner.kv_cache.release()
        self.runner.model.release()
        del self.runner
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            memory.give_back_to_the_system()

    def _available_bytes(self, args: EngineArgs, model: LlamaForCausalLM, max_num_seqs: int, num_tokens: int) -> int:
        """Bytes that the KV cache may take. On a GPU, the largest step is run once to see what it needs beside."""
        cache = args.cache_config()
        longest = args.max_model_len or model.config.context_limit()
        enough = memory.enough_bytes(model.config, args.block_size, self.dtype.itemsize, max_num_seqs, longest)
        if self.device.type == "cpu":
            available = memory.cpu_cache_bytes(cache, free_host_memory())
            return available if cache.cpu_kvcache_space is not None else min(available, enough)
        if cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None:
            return 0  # the options say it all
        beside = gpu_memory.step_bytes(args, model, self.dtype, self.device, max_num_seqs, num_tokens)
        if self.graph_sizes:
            beside += gpu_memory.graph_bytes(args, model, self.dtype, self.device, self.graph_sizes, longest)
        if self.num_host_blocks:
            beside += staging_bytes(self.block_bytes, self.num_host_blocks)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return min(memory.gpu_cache_bytes(cache, total, total - free, beside), enough)


def _launch(runner: ModelRunner, scheduler_output: SchedulerOutput) -> PendingOutput:
    """A step. What it raises keeps its lines and loses its variables: a notebook's last traceback would hold tensors."""
    try:
        return runner.launch(scheduler_output)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def _execute(runner: ModelRunner, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    return _launch(runner, scheduler_output).result()


def _read(launched: Future[PendingOutput]) -> ModelRunnerOutput:
    return launched.result().result()
