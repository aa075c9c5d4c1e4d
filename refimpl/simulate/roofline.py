"""Roofline: how long a step would take. One formula, from the bytes that it moves and the operations that it does.

::

    seconds = max(bytes / bandwidth, operations / rate) + all-reduces + overhead + transfers

    bytes       weights, read once · keys and values of every context, read · those of new tokens, written
    operations  2 · the layers' weights · tokens + 2 · the output head's weights · rows that draw
                + 4 · layers · query heads · head size · (query, key) pairs                            (attention, QK and PV)
    all-reduces 2 a layer, each latency + 2 (N - 1) / N · tokens · hidden size · 2 B / link            (0 where N = 1)
    overhead    a layer's share · layers + a row's · rows that draw
    transfers   keys and values of the blocks that are swapped out or in / link to the host

Transfers are added, not overlapped, as the engine does it: what goes out must be read before the step writes there, and what
comes in is read by the step. A step without rows, whose sequences have all given way, takes its transfers alone.

Tensor parallelism over N devices divides bytes and operations by N; keys and values by no more than there are KV heads. Each
device moves what it holds over its own link to the host. Bandwidth, rate and links are the peaks of
:mod:`refimpl.simulate.hardware` times the shares of :class:`Efficiency`.

Left out, in this first form: activations (their bytes and their memory), that attention and the products of a step come one
after the other (so a step may be bound by memory in one and by arithmetic in the other), the width of a head's tiles, the
all-gather of logits, and whatever a real cluster adds between hosts.

How good it is
--------------
The shares and overheads were chosen on eleven runs of vLLM 0.23.0 on one H200 (``bench/measured.py``): Llama-3-8B in
bfloat16 with 1 to 256 sequences that decode, its prefill of 64 and 256 prompts, its prefill in FP8, and Llama-3-70B in
FP8 with one sequence. Seconds of these whole runs come out within 6%: those of 1 to 256 sequences by +0.7, -0.2, +1.0,
+1.2, +4.6, +2.5 and -2.8%.

Runs that nothing was chosen by: 8B on 128 and 512 requests of mixed lengths +3.6 and -2.9%; 8B in FP8 -7.4 to +2.9%; 70B in
FP8 -10.2 to +1.9%; a single prompt of 512 tokens, 16 ms, -18%. With Poisson arrivals of 10, 20 and 30 a second the median
time to the first token is 4, 1 and 9% too short, and the time per output token 3, 2 and 5%. ``refimpl bench simulate``
repeats all of it. This is one kind of device: that others reach the same shares of their peaks, and links too, is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from refimpl.config import ModelConfig
from refimpl.errors import ConfigError
from refimpl.scheduler.preemption import PreemptionCosts
from refimpl.simulate.hardware import Hardware
from refimpl.simulate.models import WeightFormat


@dataclass(frozen=True)
class Efficiency:
    """The calibrated part: which share of each peak is reached, and what a step costs besides."""

    bandwidth: float = 0.90
    flops: float = 0.62
    """In 16 bits."""
    fp8_flops: float = 0.50
    link: float = 0.60
    host_link: float = 0.86
    """Of pinned copies: 55 of 64 GB/s, each way, measured on one H200."""
    layer_seconds: float = 43e-6
    """Of each layer in each step: launches, kernels too small to fill the device, planning and sampling spread over them."""
    row_seconds: float = 17e-6
    """Of each row that draws: its logits, its sampling, its bookkeeping; and what the formula leaves out of attention."""


MEASURED = Efficiency()


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """What a step has to do. Counts are of the whole step, all rows together."""

    tokens: int
    """Computed in this step, ``T``."""
    rows: int
    """Sequences that draw a token."""
    context: float
    """Tokens whose keys and values are read: each row's context, its new tokens included. Where layers have windows, a mean
    over all layers."""
    pairs: float
    """(query, key) pairs of causal attention. Likewise."""
    swapped: int = 0
    """Token slots of blocks that go to the host or come from it."""


class StepTimes(msgspec.Struct, frozen=True, gc=False):
    """Seconds of a step, by cause."""

    memory: float
    """To move its bytes."""
    compute: float
    """To do its operations: at the same time."""
    communication: float
    """All-reduces."""
    overhead: float
    transfer: float = 0.0
    """To move swapped blocks, before all else."""

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        longer = self.memory if self.memory > self.compute else self.compute
        return longer + self.communication + self.overhead + self.transfer


class Roofline:
    """The formula for one model on N devices of a kind.

    Args:
        model: its shape.
        hardware: one device.
        tensor_parallel_size: N.
        weights: their format.
        kv_bytes: bytes of one value in the KV cache.
        efficiency: the calibrated shares and overheads.

    Raises:
        ConfigError: the model's heads do not divide over N devices.

    """

    def __init__(
        self,
        model: ModelConfig,
        hardware: Hardware,
        tensor_parallel_size: int,
        weights: WeightFormat,
        kv_bytes: int = 2,
        efficiency: Efficiency = MEASURED,
    ) -> None:
        _check_heads(model, tensor_parallel_size)
        n = tensor_parallel_size
        head = model.vocab_size * model.hidden_size
        embedded = 0 if model.tie_word_embeddings else head
        layers = model.num_parameters - head - embedded
        outputs = model.num_hidden_layers * sum(outputs for outputs, _ in model.layer_matrices)
        matrices = (model.num_parameters - model.num_outside_matrices) * weights.bytes_per_weight
        matrices += outputs * weights.bytes_per_output
        self.weight_bytes = round(matrices + 2 * model.num_outside_matrices)
        """Of all devices together: what the weights take in memory."""
        self.weight_bytes_read = round(matrices + 2 * (model.num_outside_matrices - embedded))
        """In each step: all but the input embeddings, of which a step reads one row a token."""
        self.kv_bytes_per_token = model.kv_bytes_per_token(kv_bytes)
        self._flops_per_token = 2 * layers
        self._flops_per_row = 2 * head
        self._flops_per_pair = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
        self._bandwidth = hardware.bandwidth * efficiency.bandwidth
        self._weight_seconds = self.weight_bytes_read / n / self._bandwidth
        self.kv_copies = n // min(n, model.num_key_value_heads)
        """Devices that hold the same keys and values, where there are more devices than KV heads."""
        self._swapped_bytes = self.kv_bytes_per_token * self.kv_copies
        self._kv_seconds = self.kv_bytes_per_token * self.kv_copies / n / self._bandwidth
        peak = weights.flops(hardware)
        self._rate = n * peak * (efficiency.flops if peak == hardware.flops else efficiency.fp8_flops)
        self._step_seconds = model.num_hidden_layers * efficiency.layer_seconds
        self._row_seconds = efficiency.row_seconds
        self._reduce_latency = 2 * model.num_hidden_layers * hardware.link_latency if n > 1 else 0.0
        self._host_bandwidth = n * hardware.host_bandwidth * efficiency.host_link
        reduced = 2 * model.num_hidden_layers * 2 * (n - 1) / n * model.hidden_size * 2
        self._reduce_seconds = reduced / (hardware.link_bandwidth * efficiency.link)

    def times(self, work: StepWork) -> StepTimes:
        """What a step takes, by cause."""
        tokens, rows = work.tokens, work.rows
        transfer = work.swapped * self._swapped_bytes / self._host_bandwidth
        if not tokens and not rows:
            return StepTimes(0.0, 0.0, 0.0, 0.0, transfer)
        linear = self._flops_per_token * tokens + self._flops_per_row * rows
        memory = self._weight_seconds + (work.context + tokens) * self._kv_seconds
        compute = (linear + self._flops_per_pair * work.pairs) / self._rate
        communication = self._reduce_latency + self._reduce_seconds * tokens
        overhead = self._step_seconds + self._row_seconds * rows
        return StepTimes(memory, compute, communication, overhead, transfer)

    def preemption_costs(self) -> PreemptionCosts:
        """What swapping and recomputing add to a step; its weights and its overhead are paid for the others anyway."""
        return PreemptionCosts(
            kv_bytes_per_token=self._swapped_bytes,
            link_bytes_per_second=self._host_bandwidth,
            flops_per_token=self._flops_per_token,
            attention_flops_per_token_pair=self._flops_per_pair,
            flops_per_second=self._rate,
        )


def _check_heads(model: ModelConfig, n: int) -> None:
    if n < 1:
        raise ConfigError(f"tensor_parallel_size is {n}; it must be a whole number, 1 or more")
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    legal = [k for k in range(1, heads + 1) if heads % k == 0 and (kv_heads % k == 0 or k % kv_heads == 0)]
    if n not in legal:
        raise ConfigError(
            f"tensor_parallel_size is {n}, over which {heads} query heads and {kv_heads} key/value heads do not divide; "
            f"give one of {', '.join(map(str, legal))}"
        )
