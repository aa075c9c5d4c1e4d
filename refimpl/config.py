"""What an engine is asked to be: EngineArgs, and the frozen configurations that it becomes. Options are checked here.

``EngineArgs`` is what a user types (names are vLLM's). It splits into :class:`CacheConfig` and :class:`SchedulerConfig`;
:class:`ModelConfig` comes from the checkpoint (names are Hugging Face's). Nothing changes after construction.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from typing import Any

from refimpl.errors import ConfigError, UnknownOptionError
from refimpl.model_config import ModelConfig as ModelConfig
from refimpl.rope_config import RopeConfig as RopeConfig
from refimpl.speculative_config import SpeculativeConfig

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
GIB = 1024**3
ONE_OF = {
    "dtype": DTYPES,
    "load_format": ("auto", "dummy"),
    "kv_cache_manager": ("paged", "contiguous"),
    "scheduler": ("continuous", "static"),
    "preemption_mode": ("auto", "swap", "recompute"),
    "all_reduce": ("auto", "one_shot", "two_shot"),
}
"""Options that are one of a few names."""
QUANTIZATIONS = ("awq", "fp8", "gptq")
ATTENTION_BACKENDS = ("auto", "torch", "native", "triton", "flash_attn")


@dataclass(frozen=True)
class CacheConfig:
    """How large the KV cache is, and in what pieces."""

    block_size: int
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    cpu_kvcache_space: float | None
    """GiB; None is min(4 GiB, a quarter of the free memory)."""


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of one step, and what a sequence may grow to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    enable_kv_cache: bool
    long_prefill_token_threshold: int = 0
    max_num_queued_reqs: int | None = None
    watermark: float = 0.0
    preemption_mode: str = "recompute"


def _option(default: Any, text: str) -> Any:
    """A field of EngineArgs with the sentence that ``refimpl generate --help`` shows for it."""
    return field(default=default, metadata={"help": text})


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Every option of an engine, with its default; names are vLLM's.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.

    """

    model: Any = _option("smollm2", "A folder or GGUF file, ORG/NAME on the Hub, 'tiny', or 'smollm2' (the default).")
    load_format: str = _option("auto", "auto (by the file) or dummy (random, seeded weights in the model's shape).")
    dtype: str = _option("auto", f"{', '.join(DTYPES)}. auto: bfloat16 where the device computes in it, else float16/32.")
    quantization: str | None = _option(
        None,
        "awq, fp8 or gptq: the layers' matrices in 4 bits or in FP8, rounded as they are loaded from one in 16 bits; "
        " default: as the checkpoint has them.",
    )
    device: str = _option("auto", "auto, cpu or cuda (cuda:1, …).")
    tensor_parallel_size: int = _option(1, "Ranks that hold the model together, a GPU or a CPU process each.")
    all_reduce: str = _option(
        "auto", "Between ranks on GPUs: auto (NCCL), or for few tokens kernels of one_shot or two_shot over NVLink."
    )
    distributed_timeout_seconds: int = _option(
        300, "Seconds that ranks may wait in a collective for one that is behind, until it is given up as stuck."
    )
    seed: int = _option(0, "Mixed with the arrival number of each request that has no seed of its own.")
    block_size: int = _option(16, "Token slots in one block of the KV cache.")
    max_model_len: int | None = _option(None, "Most tokens of prompt and output; default: the model's, or what fits.")
    max_num_seqs: int | None = _option(None, "Most sequences that run at once; default: 256, or the token budget if less.")
    max_num_batched_tokens: int = _option(2048, "Most tokens computed in one step (the budget).")
    enable_chunked_prefill: bool = _option(True, "Split prompts over several steps when they exceed the budget.")
    scheduling_policy: Any = _option(
        "fcfs", "fcfs, priority, shortest_prompt_first, fair_share_by_user; in Python also a Policy object."
    )
    long_prefill_token_threshold: int = _option(0, "Most tokens of one prompt in a step, so that it starves nobody; 0: all.")
    max_num_queued_reqs: int | None = _option(None, "Refuse a request while this many samples wait.")
    watermark: float = _option(
        0.01, "Share of the blocks left free when a sequence is admitted, for those that run to grow."
    )
    scheduler: str = _option("continuous", "continuous, or static: a batch runs until all of it has ended (a baseline).")
    static_drop_finished: bool = _option(False, "static: do not go on computing the rows that have ended.")
    enable_kv_cache: bool = _option(True, "Off: recompute every key and value in every step (the naive way).")
    enable_prefix_caching: bool = _option(True, "Keep computed blocks, for later prompts that begin alike.")
    kv_cache_manager: str = _option("paged", "paged, or contiguous: max_model_len reserved a sequence (a baseline).")
    block_allocator: Any = _option("first_freed_first", "first_freed_first, lowest_first; in Python also a class.")
    prefix_index: Any = _option("chained_hash", "chained_hash, token_tree; in Python also a PrefixIndex object.")
    num_gpu_blocks_override: int | None = _option(None, "Blocks in the KV cache, whatever the memory says.")
    kv_cache_memory_bytes: int | None = _option(None, "Bytes for the KV cache, instead of a share of the memory.")
    swap_space: float = _option(0.0, "GiB of host memory a device to which preempted sequences may be swapped.")
    preemption_mode: str = _option(
        "auto", "swap, recompute, or auto: whichever is cheaper for the victim's length, as measured at the start."
    )
    gpu_memory_utilization: float = _option(0.9, "Share of a GPU's memory for weights, activations and cache.")
    cpu_kvcache_space: float | None = _option(None, "GiB of KV cache on a CPU; default: min(4, a quarter of what is free).")
    attention_backend: Any = _option(
        "auto", "auto, torch, native, triton or flash_attn; in Python also an AttentionBackend object."
    )
    enforce_eager: bool = _option(False, "Start every kernel of a decode step on its own, without CUDA graphs.")
    speculative_config: Any = _option(
        None,
        'Draft tokens, check several at once: JSON, {"method": "ngram", "num_speculative_tokens": 4}; in Python a dict.',
    )
    async_scheduling: bool | None = _option(None, "Plan a step while the last one computes; default: on a GPU only.")
    max_logprobs: int = _option(20, "Most log-probabilities a token that a request may ask for; -1: no limit.")
    logits_hook: Any = field(default=None, metadata={"help": "In Python only: a LogitsHook for every row.", "cli": False})
    event_log_size: int = _option(10_000, "Steps that the event log keeps; 0 records nothing.")

    def __post_init__(self) -> None:
        def whole(name: str, least: int) -> None:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more")

        for name in (
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_gpu_blocks_override",
            "tensor_parallel_size",
            "distributed_timeout_seconds",
        ):
            whole(name, 1)
        whole("kv_cache_memory_bytes", 1)
        whole("event_log_size", 0)
        whole("max_logprobs", -1)
        whole("long_prefill_token_threshold", 0)
        whole("max_num_queued_reqs", 1)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number of 64 bits")
        if self.max_model_len == 1:
            raise ConfigError("max_model_len is 1; a prompt and one token to generate need 2")
        for name in (
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "enable_kv_cache",
            "static_drop_finished",
            "async_scheduling",
            "enforce_eager",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "async_scheduling" and value is None):
                raise ConfigError(f"{name} is {value!r}; it must be True or False")
        for name, allowed in ONE_OF.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization is {self.quantization!r}; it must be {', '.join(QUANTIZATIONS)}, or None (as the "
                "checkpoint is: quantised, or in dtype)"
            )
        if self.logits_hook is not None and not callable(self.logits_hook):
            raise ConfigError(f"logits_hook is {self.logits_hook!r}; it must be None or a callable (token_ids, logits)")
        object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        self._check_backend()
        self._check_baselines()
        self._check_swap()
        share, space = self.gpu_memory_utilization, self.cpu_kvcache_space
        if not _is_finite(share) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {share!r}; it must be a number above 0 and at most 1")
        if space is not None and (not _is_finite(space) or not space > 0):
            raise ConfigError(f"cpu_kvcache_space is {space!r}; it must be a number above 0 (GiB)")
        if self.max_num_seqs is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, under max_num_seqs = {self.max_num_seqs}: "
                "a step of decodes would not fit the budget; raise the first or lower the second"
            )

    def _check_backend(self) -> None:
        backend = self.attention_backend
        is_backend = callable(getattr(backend, "begin_step", None)) and isinstance(getattr(backend, "name", None), str)
        if backend not in ATTENTION_BACKENDS if isinstance(backend, str) else isinstance(backend, type) or not is_backend:
            raise ConfigError(
                f"attention_backend is {backend!r}; it must be one of {', '.join(ATTENTION_BACKENDS)}, or an object (not a "
                "class) with a name and begin_step(metadata), as refimpl.attention.AttentionBackend"
            )

    def _check_swap(self) -> None:
        if not _is_finite(self.swap_space) or not self.swap_space >= 0:
            raise ConfigError(f"swap_space is {self.swap_space!r}; it must be a number of GiB, 0 (none) or more")
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError("preemption_mode is 'swap', but swap_space is 0; give it some GiB, or use 'recompute'")
        if self.swap_space and (self.kv_cache_manager != "paged" or not self.enable_kv_cache):
            raise ConfigError(
                "swap_space is for the paged cache; with kv_cache_manager='contiguous' or enable_kv_cache=False leave it 0"
            )

    def _check_baselines(self) -> None:
        if self.speculative_config is not None and (self.scheduler == "static" or not self.enable_kv_cache):
            raise ConfigError(
                "speculative_config is for the continuous scheduler and a KV cache; with scheduler='static' or "
                "enable_kv_cache=False leave it out"
            )
        if not _is_finite(self.watermark) or not 0 <= self.watermark < 1:
            raise ConfigError(
                f"watermark is {self.watermark!r}; it must be a number from 0 to under 1 (a share of the blocks)"
            )
        if self.static_drop_finished and self.scheduler != "static":
            raise ConfigError(
                "static_drop_finished is for scheduler='static'; the continuous one never computes finished rows"
            )
        if self.kv_cache_manager == "contiguous":
            for name, default in (("block_allocator", "first_freed_first"), ("prefix_index", "chained_hash")):
                if getattr(self, name) != default:
                    raise ConfigError(f"{name} is for kv_cache_manager='paged'; the contiguous one has reservations only")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineArgs:
        """EngineArgs from keyword arguments of a user.

        Raises:
            UnknownOptionError: a name is no option; the nearest ones are named.

        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"the options are {', '.join(known)}"
                raise UnknownOptionError(f"unknown engine option {name!r}; {hint}")
        return cls(**options)

    def cache_config(self) -> CacheConfig:
        """The part that sizes the KV cache."""
        return CacheConfig(
            block_size=self.block_size,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            cpu_kvcache_space=self.cpu_kvcache_space,
        )

    def step_limits(self) -> tuple[int, int]:
        """``(max_num_seqs, max_num_batched_tokens)``, the default of the first filled in."""
        return self.max_num_seqs or min(256, self.max_num_batched_tokens), self.max_num_batched_tokens

    @property
    def num_speculative_tokens(self) -> int:
        """The most tokens that are drafted a row; 0 without speculation."""
        return 0 if self.speculative_config is None else int(self.speculative_config.num_speculative_tokens)

    def overlaps(self, on_gpu: bool) -> bool:
        """Whether a step is planned while the last one computes: never where each step needs the last one's token ids."""
        wanted = on_gpu if self.async_scheduling is None else self.async_scheduling
        drafter = None if self.speculative_config is None else self.speculative_config.method
        needs_ids = drafter == "ngram" or getattr(drafter, "needs_token_ids", False)
        return wanted and self.enable_kv_cache and not needs_ids

    def checked_max_model_len(self, model_limit: int) -> int:
        """The context length asked for, in tokens, before the cache's size is known.

        Raises:
            ConfigError: it exceeds what the model was made for, or the step's budget with chunked prefill off.

        """
        length = self.max_model_len or model_limit
        if length > model_limit:
            raise ConfigError(
                f"max_model_len is {length}, but the model's positions end at {model_limit}; lower it, or leave it out"
            )
        if self.enable_kv_cache and not self.enable_chunked_prefill and self.max_num_batched_tokens < length:
            raise ConfigError(
                f"with enable_chunked_prefill=False a prompt must fit one step: max_num_batched_tokens is "
                f"{self.max_num_batched_tokens}, under max_model_len = {length}; raise the first, lower the second, "
                "or switch chunking on"
            )
        return length

    def scheduler_config(self, model_limit: int, cache_tokens: int) -> SchedulerConfig:
        """The scheduler's part, once the cache is known to hold ``cache_tokens`` tokens.

        A default ``max_model_len`` is lowered to the cache; an explicit larger one is an error.
        """
        length = self.checked_max_model_len(model_limit)
        if length > cache_tokens and self.max_model_len is not None:
            raise ConfigError(
                f"max_model_len is {length} tokens, but the KV cache holds {cache_tokens} "
                f"({cache_tokens // self.block_size} blocks of {self.block_size}); lower max_model_len to {cache_tokens} or "
                "give the cache more memory (cpu_kvcache_space, gpu_memory_utilization, num_gpu_blocks_override)"
            )
        max_num_seqs, max_num_batched_tokens = self.step_limits()
        return SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=min(length, cache_tokens),
            enable_chunked_prefill=self.enable_chunked_prefill,
            enable_kv_cache=self.enable_kv_cache,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_num_queued_reqs=self.max_num_queued_reqs,
            watermark=self.watermark,
            preemption_mode=self.preemption_mode,
        )
