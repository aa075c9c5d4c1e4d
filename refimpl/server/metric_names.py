"""Which metrics there are: names, kinds and buckets are those of vLLM's V1 engine, so its dashboards can be pointed here.

Two differ in what they count, because a name should hold what it says. ``iteration_tokens_total`` counts the tokens that a
step computed (vLLM: a prompt's whole length in the step that ends it). ``inter_token_latency_seconds`` has one entry for
each token after the first, 0 between tokens of one step (vLLM: one entry a step).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
WHOLE_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
LENGTHS = ()
"""Stands for 1, 2, 5, 10, … up to the longest sequence that the engine serves (:func:`lengths_up_to`)."""

REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class MetricName:
    """One metric. Its samples are labelled with ``model_name`` and ``engine``, and then with ``labels``."""

    name: str
    """Without prefix, and without the ``_total`` of a counter."""
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None
    """Of a histogram: the upper bounds, but for the last, which is infinite."""
    in_vllm: bool = True


def lengths_up_to(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … as far as ``longest`` tokens."""
    return tuple(m * 10**p for p in range(len(str(longest))) for m in (1, 2, 5) if m * 10**p <= longest)


def _gauge(name: str, text: str, *labels: str, in_vllm: bool = True) -> MetricName:
    return MetricName(name, "gauge", text, labels, in_vllm=in_vllm)


def _counter(name: str, text: str, *labels: str, in_vllm: bool = True) -> MetricName:
    return MetricName(name, "counter", text, labels, in_vllm=in_vllm)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> MetricName:
    return MetricName(name, "histogram", text, buckets=buckets)


METRICS = (
    # what is going on
    _gauge("engine_up", "1 while the engine takes requests, else 0.", in_vllm=False),
    _gauge("num_requests_running", "Samples that hold a slot."),
    _gauge("num_requests_waiting", "Samples in the queue, preempted ones among them."),
    _gauge("num_requests_swapped", "Samples whose blocks are in the swap space."),
    _gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that sequences hold, from 0 to 1."),
    _gauge("cpu_cache_usage_perc", "Share of the swap space's blocks that are in use, from 0 to 1."),
    # the cache
    _counter("prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache."),
    _counter("prefix_cache_hits", "Those of them that were found."),
    _counter("prefix_cache_evictions", "Cached blocks that were forgotten for new ones.", in_vllm=False),
    _counter("num_preemptions", "How often a sample gave its slot and blocks to others."),
    _counter("swapped_blocks", "Blocks copied to the swap space (out) and back (in).", "direction", in_vllm=False),
    _counter("kv_offload_total_bytes", "Bytes of these copies.", "transfer_type"),
    # tokens
    _counter("prompt_tokens", "Tokens of prompts, counted when the first token after them is there."),
    _counter("prompt_tokens_cached", "Those of them that were found in the prefix cache."),
    _counter("prompt_tokens_by_source", "The same by where their keys and values came from.", "source"),
    _counter("generation_tokens", "Output tokens."),
    _histogram("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS),
    # speculation
    _counter("spec_decode_num_drafts", "Checks: how often a sample had drafts checked."),
    _counter("spec_decode_num_draft_tokens", "Tokens that were drafted and checked."),
    _counter("spec_decode_num_accepted_tokens", "Drafts that became output tokens."),
    _counter("spec_decode_num_accepted_tokens_per_pos", "The same by the place in the draft, from 0.", "position"),
    # what users feel
    _histogram("time_to_first_token_seconds", "From the arrival to the first token, the queue included.", FIRST_TOKEN),
    _histogram("inter_token_latency_seconds", "Between neighbouring tokens of a sample.", BETWEEN_TOKENS),
    _histogram("time_per_output_token_seconds", "The same, by its older name.", BETWEEN_TOKENS),
    _counter("request_success", "Requests that ended, by why.", "finished_reason"),
    # requests that ended by themselves (stop, length)
    _histogram("request_time_per_output_token_seconds", "A request's mean between its tokens.", BETWEEN_TOKENS),
    _histogram("e2e_request_latency_seconds", "From a request's arrival to its end.", WHOLE_REQUEST),
    _histogram("request_queue_time_seconds", "From a request's arrival until it first ran.", WHOLE_REQUEST),
    _histogram("request_prefill_time_seconds", "From then to its first token.", WHOLE_REQUEST),
    _histogram("request_decode_time_seconds", "From its first token to its last.", WHOLE_REQUEST),
    _histogram("request_inference_time_seconds", "From when it first ran to its last token.", WHOLE_REQUEST),
    _histogram("request_prompt_tokens", "Tokens of a request's prompt.", LENGTHS),
    _histogram("request_prefill_kv_computed_tokens", "Those of them that were not found in the prefix cache.", LENGTHS),
    _histogram("request_generation_tokens", "Output tokens of a request, of all its samples.", LENGTHS),
    _histogram("request_params_max_tokens", "The most output tokens that a request might have had.", LENGTHS),
    _histogram("request_params_n", "Samples that a request asked for.", SAMPLES),
)  # fmt: skip
"""In the order in which they are exposed."""
