"""How an engine's weights are held: by the option, the checkpoint, the device, and what a CPU has room for."""

from __future__ import annotations

import logging

import torch

from refimpl.config import EngineArgs, ModelConfig
from refimpl.executor.device import free_host_memory
from refimpl.loading.checkpoint import Checkpoint
from refimpl.quantization.awq import Awq
from refimpl.quantization.choose import choose_method, fits_widened
from refimpl.quantization.method import LinearMethod

log = logging.getLogger(__name__)


def method_of(
    args: EngineArgs, checkpoint: Checkpoint, share: ModelConfig, device: torch.device, dtype: torch.dtype
) -> LinearMethod:
    """The method of a checkpoint's matrices, of which this rank holds ``share``.

    Raises:
        ConfigError, ModelError: as :func:`choose_method`.

    """
    config, ranks = checkpoint.config, args.tensor_parallel_size
    free = free_host_memory() // ranks if device.type == "cpu" else 0
    method = choose_method(args.quantization, device, config, fits_widened(share, dtype, free), ranks)
    if isinstance(method, Awq) and config.quantization is None and args.load_format != "dummy":
        log.warning(
            "%s is in 16 bits or more: its weights are rounded to 4 bits as they are loaded, without samples of "
            "activations; a checkpoint that was quantised beforehand loses less",
            checkpoint.name,
        )
    return method


def held_in(method: LinearMethod, dtype: torch.dtype) -> str:
    """How the weights are held, for people."""
    name = str(dtype).removeprefix("torch.")
    if isinstance(method, Awq) and method.widens:
        return f"{name} (widened from {method.name})"
    return f"{method.name} (embeddings and output head in {name})" if method.name else name
