"""The published FlashAttention kernels as a backend: whichever is installed, over the same paged cache.

===================  ==============================================  ===========  ================  ====================
kernel               module (the first that is there is taken)       devices      block_size        functions
===================  ==============================================  ===========  ================  ====================
FlashAttention-3     ``flash_attn_interface``                        sm_80, 9x    16, 32            with_kvcache
FlashAttention-3     ``vllm.vllm_flash_attn``, as vLLM ships it      sm_90        16, 32            varlen
FlashAttention-4     ``flash_attn.cute`` (package flash-attn-4)      sm_90, 10x   16, 32            varlen
FlashAttention-2     ``flash_attn`` (package flash-attn)             sm_80 up     multiples of 256  with_kvcache, varlen
===================  ==============================================  ===========  ================  ====================

All compute in bfloat16 and float16, with head sizes of multiples of 8 up to 256. FlashAttention-3 copies pages of its tile's
size whole, by TMA: what lies behind a context's end is multiplied by a weight of 0, and a NaN that an earlier owner of the
block left there becomes the output (seen on an H200 with pages of 128). Small pages it reads row by row, and no further than
the context; so does FlashAttention-4. FlashAttention-2 has two functions: where all sequences have equally many queries,
``with_kvcache`` splits the contexts; for mixed steps ``varlen`` takes each context's length from the differences of
``cu_seqlens_k``.
Sources: Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3".
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from refimpl.attention.backend import AttentionMetadata
from refimpl.cache.kv_cache import LayerKV
from refimpl.errors import ConfigError

INSTALL = (
    "pip install flash-attn (FlashAttention-2; block_size=256), or build FlashAttention-3 from its repository's hopper/"
)


def _with_kvcache_3(
    library: Any, query: Tensor, layer_kv: LayerKV, step: AttentionMetadata, scale: float, **more: Any
) -> Any:
    return library.flash_attn_with_kvcache(
        query,
        layer_kv.k,
        layer_kv.v,
        cache_seqlens=step.seqused_k,
        page_table=step.block_table,
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_q=step.max_seqlen_q,
        softmax_scale=scale,
        causal=True,
        **more,
    )


def _varlen_vllm(library: Any, query: Tensor, layer_kv: LayerKV, step: AttentionMetadata, scale: float, **more: Any) -> Any:
    return library.flash_attn_varlen_func(
        query,
        layer_kv.k,
        layer_kv.v,
        max_seqlen_q=step.max_seqlen_q,
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_k=step.max_seqlen_k,
        seqused_k=step.seqused_k,
        softmax_scale=scale,
        causal=True,
        block_table=step.block_table,
        fa_version=3,
        **more,
    )


def _varlen_4(library: Any, query: Tensor, layer_kv: LayerKV, step: AttentionMetadata, scale: float, **more: Any) -> Any:
    return library.flash_attn_varlen_func(
        query,
        layer_kv.k,
        layer_kv.v,
        cu_seqlens_q=step.cu_seqlens_q,
        seqused_k=step.seqused_k,
        page_table=step.block_table,
        softmax_scale=scale,
        causal=True,
        **more,
    )


def _either_2(library: Any, query: Tensor, layer_kv: LayerKV, step: AttentionMetadata, scale: float, **more: Any) -> Any:
    S, n = len(step.query_lens), step.max_seqlen_q
    if len(query) == S * n:  # equally many queries each
        attended = library.flash_attn_with_kvcache(
            query.unflatten(0, (S, n)),
            layer_kv.k,
            layer_kv.v,
            cache_seqlens=step.seqused_k,
            block_table=step.block_table,
            softmax_scale=scale,
            causal=True,
            **more,
        )
        return attended.flatten(0, 1)
    return library.flash_attn_varlen_func(
        query,
        layer_kv.k,
        layer_kv.v,
        cu_seqlens_q=step.cu_seqlens_q,
        cu_seqlens_k=torch.nn.functional.pad(step.seqused_k.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=step.max_seqlen_q,
        max_seqlen_k=step.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        block_table=step.block_table,
        **more,
    )


@dataclass(frozen=True)
class Interface:
    """One of the published kernels."""

    title: str
    module: str
    functions: tuple[str, ...]
    page_multiple: int
    """Block sizes must be multiples of it."""
    largest_page: int
    """Beyond, it may read what no sequence wrote."""
    least: int
    below: int
    """Compute capabilities that it runs on, from ``least`` to under ``below``."""
    call: Callable[..., Any]
    """Takes the library, queries, a layer's cache, the step and the scale; by name a window, and what was planned, where
    that can be."""


INTERFACES = (
    Interface("FlashAttention-3", "flash_attn_interface", ("flash_attn_with_kvcache",), 16, 32, 80, 100, _with_kvcache_3),
    Interface(
        "FlashAttention-3 of vLLM",
        "vllm.vllm_flash_attn.flash_attn_interface",
        ("flash_attn_varlen_func",),
        16,
        32,
        90,
        100,
        _varlen_vllm,
    ),
    Interface("FlashAttention-4", "flash_attn.cute", ("flash_attn_varlen_func",), 16, 32, 90, 120, _varlen_4),
    Interface(
        "FlashAttention-2",
        "flash_attn",
        ("flash_attn_with_kvcache", "flash_attn_varlen_func"),
        256,
        sys.maxsize,
        80,
        200,
        _either_2,
    ),
)


def find(capability: int) -> tuple[Interface, Any]:
    """The first published kernel that is installed and runs on a device of this compute capability (90: an H100).

    Raises:
        ConfigError: there is none.

    """
    found = []
    for interface in INTERFACES:
        try:
            library = importlib.import_module(interface.module)
        except (ImportError, OSError, RuntimeError):  # not there, or built for another torch
            continue
        if not all(hasattr(library, name) for name in interface.functions):
            continue
        if interface.least <= capability < interface.below:
            return interface, library
        found.append(interface.title)
    have = f"{' and '.join(found)} cannot run on sm_{capability}" if found else "no FlashAttention is installed"
    raise ConfigError(f"attention_backend is 'flash_attn', but {have}; {INSTALL}, or use attention_backend='triton'")


def check(interface: Interface, head_dim: int, dtype: torch.dtype, block_size: int) -> None:
    """What a published kernel takes.

    Raises:
        ConfigError: a dtype, head size or block size that it does not.

    """
    what = f"attention_backend is 'flash_attn' ({interface.title}), which"
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{what} computes in bfloat16 and float16, not {name}; use attention_backend='torch'")
    if block_size % interface.page_multiple or block_size > interface.largest_page:
        up_to = f" up to {interface.largest_page}" if interface.largest_page < sys.maxsize else ""
        raise ConfigError(
            f"{what} reads blocks of multiples of {interface.page_multiple} slots{up_to}; block_size is {block_size}: "
            f"use block_size={interface.page_multiple}"
        )
    if head_dim % 8 or head_dim > 256:
        raise ConfigError(
            f"{what} has head sizes of multiples of 8 up to 256, not {head_dim}; use attention_backend='torch'"
        )


class FlashAttentionStep:
    """One step: everything goes through one call a layer."""

    def __init__(self, interface: Interface, library: Any, metadata: AttentionMetadata, softmax_scale: float) -> None:
        self._interface = interface
        self._library = library
        self._metadata = metadata
        self._scale = softmax_scale

    def write(self, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]) -> None:
        """Store the new tokens' keys and values in their slots. Mutates ``layer_kv``."""
        from refimpl.kernels.kv_write import write_kv

        write_kv(key, value, layer_kv.k, layer_kv.v, self._metadata.slot_mapping)

    def attend(
        self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"], window: int | None = None
    ) -> Float[Tensor, "T Hq D"]:
        """Attention of each new token over its sequence's tokens up to itself, or over the last ``window`` of them."""
        # Theirs is how far a token sees to either side of itself: one less than ours, which counts the token.
        more = {} if window is None else {"window_size": (window - 1, 0)}
        attended = self._interface.call(self._library, query, layer_kv, self._metadata, self._scale, **more)
        output: Tensor = attended[0] if isinstance(attended, tuple) else attended  # some give the log-sums too
        return output


class FlashAttention:
    """The backend ``flash_attn``.

    Raises:
        ConfigError: nothing is installed that runs on the device, or it does not take dtype, head size or block size.

    """

    name = "flash_attn"
    serves_windows = True

    def __init__(self, head_dim: int, dtype: torch.dtype, block_size: int, capability: int) -> None:
        self._interface, self._library = find(capability)
        check(self._interface, head_dim, dtype, block_size)
        self._scale = head_dim**-0.5

    def begin_step(self, metadata: AttentionMetadata) -> FlashAttentionStep:
        """Nothing is worked out beforehand: the kernels plan by themselves."""
        return FlashAttentionStep(self._interface, self._library, metadata, self._scale)
