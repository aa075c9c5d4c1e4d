"""Deployment: a model on N devices of a kind; what fits is shown as arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from refimpl.config import CacheConfig, ModelConfig
from refimpl.errors import OutOfMemoryError
from refimpl.executor import memory
from refimpl.simulate.hardware import Hardware, find_hardware, nearest
from refimpl.simulate.models import KV_BYTES, WeightFormat, find_format, find_model
from refimpl.simulate.roofline import MEASURED, Efficiency, Roofline

GIB = 1024**3


@dataclass(frozen=True)
class Deployment:
    """What is simulated: whose weights in which format, on how many of which devices."""

    model_name: str
    model: ModelConfig
    hardware: Hardware
    tensor_parallel_size: int
    weights: WeightFormat
    kv_bytes: int
    roofline: Roofline

    @classmethod
    def of(
        cls,
        model: str,
        hardware: str,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        efficiency: Efficiency = MEASURED,
    ) -> Deployment:
        """A deployment by names.

        Raises:
            ConfigError: a name is not known (the nearest are named), or the heads do not divide over the devices.
            ModelError: ``model`` is a folder whose config.json cannot be used.

        """
        config, device, weights = find_model(model), find_hardware(hardware), find_format(dtype)
        kv_bytes = nearest(kv_cache_dtype, KV_BYTES, "kv_cache_dtype")
        roofline = Roofline(config, device, tensor_parallel_size, weights, kv_bytes, efficiency)
        return cls(model, config, device, tensor_parallel_size, weights, kv_bytes, roofline)

    @property
    def name(self) -> str:
        """The devices, for people."""
        return f"{self.tensor_parallel_size} × {self.hardware.name}, {self.weights.name}, simulated"

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the KV cache, over all layers and devices."""
        return memory.block_bytes(self.model, block_size, self.kv_bytes) * self.roofline.kv_copies

    def num_host_blocks(self, swap_space: float, block_size: int) -> int:
        """Blocks that ``swap_space`` GiB of host memory a device hold."""
        return int(swap_space * GIB * self.tensor_parallel_size // self.block_bytes(block_size))

    def _allowed(self, utilization: float) -> int:
        return int(utilization * self.hardware.memory_bytes * self.tensor_parallel_size)

    def num_blocks(self, cache: CacheConfig) -> int:
        """Usable blocks: ``(utilization · memory · N - weights) / block bytes``, less the null block; or as the options say.

        Raises:
            OutOfMemoryError: the weights, or the least cache beside them, do not fit; the message has the sum.

        """
        if cache.num_gpu_blocks_override is not None:
            return cache.num_gpu_blocks_override
        allowed = self._allowed(cache.gpu_memory_utilization)
        left = allowed - self.roofline.weight_bytes
        left = left if cache.kv_cache_memory_bytes is None else min(left, cache.kv_cache_memory_bytes)
        each = self.block_bytes(cache.block_size)
        if left < 2 * each:
            raise OutOfMemoryError(
                f"{self.model_name} does not fit {self.tensor_parallel_size} × {self.hardware.name}: "
                f"{self._sum(cache.gpu_memory_utilization)} are left for the KV cache, of which two blocks of "
                f"{cache.block_size} tokens take {2 * each / 1e9:.3f} GB. Raise tensor_parallel_size or "
                "gpu_memory_utilization, take a smaller dtype (fp8, awq), or other hardware",
                weights=self.roofline.weight_bytes,
                allowed=allowed,
            )
        return left // each - 1

    def _sum(self, utilization: float) -> str:
        each, n, weights = self.hardware.memory_bytes, self.tensor_parallel_size, self.roofline.weight_bytes
        left = self._allowed(utilization) - weights
        return (
            f"{utilization:g} · {each / 1e9:.1f} GB · {n} = {self._allowed(utilization) / 1e9:.1f} GB, less "
            f"{weights / 1e9:.1f} GB of weights in {self.weights.name}: {left / 1e9:.1f} GB"
        )

    def arithmetic(self, cache: CacheConfig) -> str:
        """How many blocks there are, and why, as a sentence."""
        blocks, each = self.num_blocks(cache), self.block_bytes(cache.block_size)
        whole = f"{blocks:,} blocks of {cache.block_size} tokens, {blocks * cache.block_size:,} tokens"
        if cache.num_gpu_blocks_override is not None:
            return f"num_gpu_blocks_override: {whole} ({blocks * each / 1e9:.1f} GB)"
        given = (
            "" if cache.kv_cache_memory_bytes is None else f"; at most {cache.kv_cache_memory_bytes / 1e9:.1f} GB were asked"
        )
        return f"{self._sum(cache.gpu_memory_utilization)}{given}; / {each:,} B, less the null block: {whole}"
