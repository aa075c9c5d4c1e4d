"""What several test files share."""

import torch

from refimpl.attention import AttentionMetadata, Setting, choose_backend
from refimpl.cache.kv_cache import KVCache


def full_logits(model, token_ids, block_size=16):
    """Logits of every position of one sequence, computed in one step over a fresh paged cache: ``[L, V]``."""
    L = len(token_ids)
    num_blocks = -(-L // block_size)
    dtype, device = model.embed_tokens.dtype, model.embed_tokens.device
    cache = KVCache(model.config, num_blocks, block_size, dtype, device)
    positions = torch.arange(L, device=device)
    metadata = AttentionMetadata.of(
        query_lens=[L],
        context_lens=[L],
        block_size=block_size,
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None],
        slot_mapping=positions + block_size,  # block 1 is the first
    )
    step = choose_backend("auto", Setting(model.config.head_dim, device, dtype, block_size)).begin_step(metadata)
    hidden = model(torch.tensor(token_ids, device=device), positions, cache.layers, step)
    return model.compute_logits(hidden)
