"""Which rows or columns of a checkpoint's tensors a rank takes, by the last words of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from refimpl.model_config import ModelConfig
from refimpl.model_shares import first_kv_head, held_tokens, share_of
from refimpl.quantization.method import Destination
from refimpl.quantization.slices import Slice, SliceOfSeveral
from refimpl.quantization.stored import MadeOfSeveral
from refimpl.ranks import Ranks

OUTPUTS, INPUTS = 0, 1
"""The axes of a matrix ``[out_features, in_features]``."""


class Cut(NamedTuple):
    """From where on a rank takes a tensor, along which axis; ``full`` is how long the axis is."""

    dim: int
    start: int
    full: int


def cuts_of(config: ModelConfig, ranks: Ranks) -> dict[str, Cut]:
    """By module: how a rank's share is cut out of it. What is not named here is whole on every rank."""
    rank, share, D = ranks.rank, share_of(config, ranks.size), config.head_dim
    queries = rank * share.num_attention_heads * D, config.num_attention_heads * D
    keys = first_kv_head(config, rank, ranks.size) * D, config.num_key_value_heads * D
    inner = rank * share.intermediate_size, config.intermediate_size
    tokens = held_tokens(config.vocab_size, rank, ranks.size).start, config.vocab_size
    return {
        "q_proj": Cut(OUTPUTS, *queries),
        "k_proj": Cut(OUTPUTS, *keys),
        "v_proj": Cut(OUTPUTS, *keys),
        "o_proj": Cut(INPUTS, *queries),
        "gate_proj": Cut(OUTPUTS, *inner),
        "up_proj": Cut(OUTPUTS, *inner),
        "down_proj": Cut(INPUTS, *inner),
        "embed_tokens": Cut(OUTPUTS, *tokens),
        "lm_head": Cut(OUTPUTS, *tokens),
    }


def cut_views(
    views: Mapping[str, Destination], config: ModelConfig, ranks: Ranks, dtype: torch.dtype
) -> dict[str, Destination]:
    """Where each whole tensor of a checkpoint goes on this rank, from where the rank's part of it goes."""
    cuts = cuts_of(config, ranks)
    found = {}
    for name, view in views.items():
        cut = cuts.get(name.split(".")[-2])
        # A bias has outputs alone: that of a matrix which is cut by inputs is whole on every rank.
        kind = SliceOfSeveral if isinstance(view, MadeOfSeveral) else Slice
        found[name] = view if cut is None or cut.dim >= len(view.shape) else kind(view, *cut, dtype)
    return found
