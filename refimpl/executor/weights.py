"""How an engine's weights are held: by the option, the checkpoint, the device, and what a CPU has room for.

Ranks of one machine share a CPU's memory: what all of them need is held against what is free before any of them has loaded.
"""

from __future__ import annotations

import logging

import torch

from refimpl.config import GIB, EngineArgs, ModelConfig
from refimpl.errors import OutOfMemoryError
from refimpl.executor.device import free_host_memory
from refimpl.executor.draft_weights import DraftWeights
from refimpl.loading.checkpoint import Checkpoint
from refimpl.model_shares import share_of
from refimpl.quantization.awq import Awq
from refimpl.quantization.choose import choose_method, fits_widened, methods_for
from refimpl.quantization.method import LinearMethod, weight_bytes
from refimpl.ranks import Ranks

log = logging.getLogger(__name__)


def free_before_loading(ranks: Ranks, device: torch.device) -> int:
    """Bytes of a CPU that each rank may take; 0 where they are on GPUs. Waits for all ranks.

    So each has looked before any loads, and all go by the same number: that of the machine with the least for each rank.
    """
    return ranks.least(free_host_memory() // ranks.here) if device.type == "cpu" else 0


def method_of(
    args: EngineArgs, checkpoint: Checkpoint, share: ModelConfig, device: torch.device, dtype: torch.dtype, free: int
) -> LinearMethod:
    """The method of a checkpoint's matrices, of which this rank holds ``share``, and may take ``free`` bytes of a CPU.

    Raises:
        ConfigError, ModelError: as :func:`choose_method`.

    """
    config = checkpoint.config
    method = choose_method(args.quantization, device, config, fits_widened(share, dtype, free), args.tensor_parallel_size)
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


def check_room(
    checkpoint: Checkpoint,
    draft: DraftWeights | None,
    method: LinearMethod,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    free: int,
) -> None:
    """Say before the loading, not minutes into it, that the weights alone are too large for a CPU.

    Args:
        checkpoint: the model.
        draft: the weights of what drafts, if there are any.
        method: of the model's matrices.
        dtype: of all else.
        device: the CPU.
        ranks: those of this machine share its memory.
        free: bytes that each may take.

    Raises:
        OutOfMemoryError: the message has the sums, and what would fit.

    """
    config = share_of(checkpoint.config, ranks.size)

    def together(method: LinearMethod, size: int) -> int:
        return ranks.here * (weight_bytes(config, method, size) + (0 if draft is None else draft.weight_bytes(size)))

    needed, free = together(method, dtype.itemsize), ranks.here * free
    if needed <= free:
        return
    said = f"{config.num_parameters / 1e9:.2f} billion weights"
    if draft is not None:
        theirs = draft.weight_bytes(dtype.itemsize)
        said += f" ({(needed / ranks.here - theirs) / GIB:.1f} GiB), and {draft.told} has {draft.num_weights / 1e9:.2f}"
        said += f" ({theirs / GIB:.1f} GiB)"
    if ranks.here > 1:
        said += f" on each of {ranks.here} ranks here, together"
    smaller = _smaller(method, config, dtype, device).items()
    how, count = next(((how, count) for how, what in smaller if (count := together(*what)) <= free), ("", 0))
    advice = f"{how} takes {count / GIB:.1f} GiB and fits" if how else "Use a smaller model"
    advice += ", or none that drafts" if draft is not None and not how else ""
    raise OutOfMemoryError(
        f"{checkpoint.name} has {said}, {needed / GIB:.1f} GiB in {held_in(method, dtype)}; {device} has "
        f"{free / GIB:.1f} GiB free. {advice}, or use another device",
        needed=needed,
        free=free,
    )


def _smaller(
    method: LinearMethod, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, tuple[LinearMethod, int]]:
    """Options by which a model takes less, each with its method and its bytes a value: the mildest first."""
    found = {"dtype=bfloat16": (method, 2)}
    for other in [] if method.name else methods_for(device, config):
        found[f"quantization={other.name}"] = (other, dtype.itemsize)
        found[f"quantization={other.name} with dtype=bfloat16"] = (other, 2)
    return found
