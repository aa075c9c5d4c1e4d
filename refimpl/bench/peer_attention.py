"""The published FlashAttention on the inputs of our attention kernels, so that both are timed in one run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from refimpl.attention import flash
from refimpl.attention.backend import AttentionMetadata
from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels.spec import Case

ATTENTION = ("paged_attention", "flash_attention")
"""The kernels that it is a peer of."""
MOST_SPLITS = 32
"""Of a context, where a plan is made beforehand: what vLLM allows FlashAttention-3 in its CUDA graphs."""


class FlashAttentionPeer:
    """Whichever FlashAttention is installed.

    Raises:
        ConfigError: none is that runs on the device.

    """

    def __init__(self, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        self._interface, self._library = flash.find(10 * major + minor)

    @property
    def title(self) -> str:
        """Its name, and its version where a package of that name says one."""
        package = self._interface.module.partition(".")[0]
        try:
            return f"{self._interface.title} {version(package)}"
        except PackageNotFoundError:
            return self._interface.title

    def takes(self, case: Case) -> bool:
        """Whether it reads blocks of this size."""
        B = case.inputs["k_cache"].shape[1]
        return bool(B % self._interface.page_multiple == 0 and self._interface.largest_page >= B)

    def launching(self, case: Case) -> Callable[[], Any]:
        """A call on the inputs of one of :data:`ATTENTION`; what can be planned is planned here, as ours is."""
        given = case.inputs
        query, layer_kv, scale = given["query"], LayerKV(given["k_cache"], given["v_cache"]), given["softmax_scale"]
        cu_seqlens_q, seqused_k = given["cu_seqlens_q"], given["seqused_k"]
        step = AttentionMetadata(
            query_lens=cu_seqlens_q.diff().tolist(),
            context_lens=seqused_k.tolist(),
            block_size=layer_kv.k.shape[1],
            block_table=given["block_table"],
            slot_mapping=seqused_k,  # nothing is written
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=seqused_k,
        )
        planned = self._planned(query, layer_kv, step) if step.max_seqlen_q == 1 else {}
        return lambda: self._interface.call(self._library, query, layer_kv, step, scale, **planned)

    def _planned(self, query: torch.Tensor, layer_kv: LayerKV, step: AttentionMetadata) -> dict[str, Any]:
        """How FlashAttention-3 splits the contexts of decodes; the others plan within their call."""
        if not self._interface.module.startswith("vllm"):
            return {}
        metadata = self._library.get_scheduler_metadata(
            batch_size=len(step.query_lens),
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=step.max_seqlen_k,
            num_heads_q=query.shape[1],
            num_heads_kv=layer_kv.k.shape[2],
            headdim=query.shape[2],
            cache_seqlens=step.seqused_k,
            qkv_dtype=query.dtype,
            cu_seqlens_q=step.cu_seqlens_q,
            page_size=layer_kv.k.shape[1],
            causal=True,
            num_splits=MOST_SPLITS,
        )
        return {"scheduler_metadata": metadata, "num_splits": MOST_SPLITS}
