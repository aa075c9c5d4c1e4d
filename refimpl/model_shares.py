"""What one rank holds of a model that several hold together: Megatron's split (Shoeybi et al. 2019), as arithmetic.

::

    matrix              split by               a rank of N holds                      then
    Q, K, V             heads (outputs)        Hq / N query heads, Hkv / N key heads  ─┐ attention of these heads
    attention's output  heads (inputs)         the columns of its heads               ◄┘ all-reduce
    gate, up            outputs                I / N of each                          ─┐ their product
    down                inputs                 the same I / N columns                 ◄┘ all-reduce
    embedding, lm_head  rows of vocabulary     V / N rows, rounded up to 8            embedding: all-reduce; logits: gathered

Where there are fewer key/value heads than ranks, each is held by several ranks: every rank whose query heads ask it has its
own copy, and its own copy of its cache. Norms are whole on every rank.
"""

from __future__ import annotations

import dataclasses

from refimpl.errors import ConfigError
from refimpl.model_config import ModelConfig

ROWS_OF_VOCABULARY = 8
"""A rank's rows of embedding and output head are a multiple of it: 16 bytes of 16-bit logits, as products like them."""


def fits(config: ModelConfig, size: int) -> bool:
    """Whether so many ranks can hold a model together."""
    kv_heads = config.num_key_value_heads
    return (
        config.num_attention_heads % size == 0
        and config.intermediate_size % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
    )


def sizes_that_fit(config: ModelConfig) -> list[int]:
    """All numbers of ranks that can."""
    return [size for size in range(1, config.num_attention_heads + 1) if fits(config, size)]


def check_size(config: ModelConfig, size: int, name: str) -> None:
    """See that so many ranks can hold a model together.

    Raises:
        ConfigError: they cannot; the message names what does not divide, and the numbers of ranks that can.

    """
    if fits(config, size):
        return
    heads, kv_heads, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    whys = [
        f"{count} {what} cannot be dealt out evenly"
        for count, what in ((heads, "query heads"), (inner, "columns of its feed-forward layer"))
        if count % size
    ]
    if kv_heads % size and size % kv_heads:
        whys.append(f"{kv_heads} key/value heads can be neither dealt out nor copied evenly")
    legal = ", ".join(map(str, sizes_that_fit(config)))
    raise ConfigError(f"tensor_parallel_size is {size}, but of {name} {' and '.join(whys)}; it can be {legal}")


def share_of(config: ModelConfig, size: int) -> ModelConfig:
    """The model as one of ``size`` ranks holds it: fewer heads, a narrower feed-forward layer, part of the vocabulary.

    The vocabulary is rounded up: the last ranks may hold rows that belong to no token.
    """
    if size == 1:
        return config
    return dataclasses.replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=max(1, config.num_key_value_heads // size),
        intermediate_size=config.intermediate_size // size,
        vocab_size=rows_of_vocabulary(config.vocab_size, size),
    )


def share_if_it_fits(config: ModelConfig, size: int) -> ModelConfig:
    """The same of a draft model, which every rank holds whole where it cannot be split so."""
    return share_of(config, size) if fits(config, size) else config


def rows_of_vocabulary(vocab_size: int, size: int) -> int:
    """Rows of embedding and output head that each of ``size`` ranks holds, those of no token counted."""
    each = -(-vocab_size // size)
    return vocab_size if size == 1 else -(-each // ROWS_OF_VOCABULARY) * ROWS_OF_VOCABULARY


def held_tokens(vocab_size: int, rank: int, size: int) -> range:
    """The tokens whose rows a rank holds."""
    each = rows_of_vocabulary(vocab_size, size)
    return range(min(rank * each, vocab_size), min((rank + 1) * each, vocab_size))


def first_kv_head(config: ModelConfig, rank: int, size: int) -> int:
    """The first of a rank's key/value heads: the one that its first query head asks."""
    return rank * config.num_key_value_heads // size


def all_reduce_bytes(config: ModelConfig, num_tokens: int, bytes_per_value: int) -> int:
    """Bytes that each rank puts into the all-reduces of a step: one for the embedding, and two a layer, of ``[T, H]``."""
    return (2 * config.num_hidden_layers + 1) * num_tokens * config.hidden_size * bytes_per_value
