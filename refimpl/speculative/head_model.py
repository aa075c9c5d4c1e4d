"""DraftHead: a small trained drafter over the target's last hidden states (EAGLE's idea, Li et al. 2024).

A hidden state of the target says which tokens may come next, but not which one was drawn; the head takes both, and computes
what the target's hidden state after that token may be. The target's own output layer, or its rows of frequent tokens, turns
that into a distribution, from which the next token is drafted; and so on, K times::

    h_t, the target's state at t ─┐
                                  ├─ fuse [2H → H] ─ attention over the target's own keys ─ SwiGLU ─ norm ─► s_1 ─► logits
    x_(t+1), the token just drawn ┘                                                                         │
              the next step takes s_1 and the token drawn from those logits, as h_t and x_(t+1) ◄───────────┘

**State.** None but the vector that goes from one drafted token to the next. Its attention reads keys and values that the
target has written (GliDe, Du et al. 2024), and writes none. So there is no second cache to be allocated, copied, swapped or
left with gaps: after a prefix hit, a preemption or a rejected draft the head needs the target's hidden state of one token.

**How the engine calls it**, for S sequences whose last computed token is at position t (so the cache holds t + 1 tokens)::

    head = load_head(folder, model)                       # once; model is the target, weights loaded
    context = PagedContext(model, kv_cache.layers, attention_step)  # context_lens = t + 1, one query a sequence
    state, token_ids = hidden_of_t, tokens_just_drawn     # [S, H] after the target's last norm, [S]
    for i in range(1, K + 1):
        state = head(state, token_ids, positions_of_t + i, context)         # [S, H]
        logits = head.full_logits(state)                  # [S, V] float32, -inf for tokens that the head never drafts
        token_ids = draw(logits)

All K steps use the same ``context``: drafted tokens are not in the cache, and slots beyond t + 1 are never read. Where the
target's layer has a window, so has the head's attention to its keys: all K steps see what position t sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from refimpl.attention.backend import AttentionStep
from refimpl.cache.kv_cache import LayerKV
from refimpl.layers.activation import SwiGLU
from refimpl.layers.linear import Linear
from refimpl.layers.rotary import rotate
from refimpl.models.cuts import cuts_of
from refimpl.models.llama import LlamaForCausalLM
from refimpl.quantization.plain import PLAIN
from refimpl.ranks import Ranks


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a head, and whom it drafts for."""

    target: str
    """The target's name."""
    target_fingerprint: str
    """The hash of the target's weights."""
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    """Tokens that are drafted: the most frequent of the text that it was trained on, or all."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attends: tuple[int | None, ...]
    """For each block of the head, the layer of the target whose keys and values it attends to; None: it has no attention."""
    intermediate_size: int
    """Of each block's SwiGLU."""

    @property
    def num_parameters(self) -> int:
        """The head's own weights; embedding and output layer are the target's."""
        H, heads = self.hidden_size, self.num_attention_heads * self.head_dim
        attention = sum(2 * H * heads + H for layer in self.attends if layer is not None)
        return 2 * H * H + attention + len(self.attends) * (3 * H * self.intermediate_size + H) + 2 * H

    def num_held(self, size: int) -> int:
        """Weights that each of ``size`` ranks holds: its own query heads' and all the rest, and beside them rows of the
        target's output layer, where not all tokens are drafted.
        """
        each = 2 * self.hidden_size * self.num_attention_heads * self.head_dim
        of_query_heads = sum(each for layer in self.attends if layer is not None)
        rows = self.draft_vocab_size if self.draft_vocab_size < self.vocab_size else 0
        return self.num_parameters - of_query_heads + of_query_heads // size + rows * self.hidden_size


@runtime_checkable
class DraftContext(Protocol):
    """What the target's cache holds, for the attention of the head."""

    def attend(self, layer: int, query: Float[Tensor, "T Hq D"], positions: Int[Tensor, "T"]) -> Float[Tensor, "T Hq D"]:
        """Turn the queries by their positions, and attend to the keys of that layer that each row may see."""


class PagedContext:
    """The running engine's: the paged cache, and a step of the attention backend with one query a sequence."""

    def __init__(self, target: LlamaForCausalLM, kv_cache: Sequence[LayerKV], attention: AttentionStep) -> None:
        self._target = target
        self._kv_cache = kv_cache
        self._attention = attention

    def attend(self, layer: int, query: Float[Tensor, "S Hq D"], positions: Int[Tensor, "S"]) -> Float[Tensor, "S Hq D"]:
        """Over the tokens of each sequence that the target has computed."""
        turned, window = rotate(query, self._target.rotary(positions)), self._target.config.window(layer)
        layer_kv = self._kv_cache[layer]
        # A CPU may multiply weights of 16 bits in float32; keys are compared in the cache's dtype.
        return self._attention.attend(layer_kv, turned.to(layer_kv.k.dtype), *(() if window is None else (window,)))


class HeadBlock(nn.Module):
    """Attention over the target's keys, if any, and a feed-forward layer; each behind a norm, around a residual."""

    def __init__(
        self, config: HeadConfig, attends: int | None, dtype: torch.dtype, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__()
        H, heads = config.hidden_size, config.num_attention_heads * config.head_dim // ranks.size
        self.ranks = ranks
        self.attends = attends
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        if attends is not None:
            self.attention_norm = _weight(H, dtype, device)
            self.q_proj = Linear(H, heads, dtype, device)
            self.o_proj = Linear(heads, H, dtype, device)
        self.mlp_norm = _weight(H, dtype, device)
        self.mlp = SwiGLU(H, config.intermediate_size, dtype, device, PLAIN)

    def forward(self, x: Float[Tensor, "T H"], positions: Int[Tensor, "T"], context: DraftContext) -> Float[Tensor, "T H"]:
        """``x`` and what this block adds to it."""
        if self.attends is not None:
            query = self.q_proj(_norm(x, self.attention_norm, self.eps)).unflatten(-1, (-1, self.head_dim))
            x = x + self.ranks.all_reduce(self.o_proj(context.attend(self.attends, query, positions).flatten(1)))
        out: Tensor = x + self.mlp(_norm(x, self.mlp_norm, self.eps))
        return out


class DraftHead(nn.Module):
    """The drafter of one target, whose embedding and output layer it uses.

    Args:
        config: its sizes.
        target: the target, weights loaded; the head gets its dtype and device.
        vocabulary: the ids of the tokens that it drafts, ascending, [Vd].
        dtype: of its own weights, if not the target's (training keeps them in float32).

    Where ranks hold the target together, each computes the attention of its own query heads, whose keys it has, and all the
    rest of the head.

    """

    def __init__(
        self, config: HeadConfig, target: LlamaForCausalLM, vocabulary: Int[Tensor, "Vd"], dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        embedding = target.embed_tokens.data
        dtype, device, H = dtype or embedding.dtype, embedding.device, config.hidden_size
        self.register_buffer("embed_tokens", embedding, persistent=False)
        self.register_buffer("vocabulary", vocabulary.to(device), persistent=False)
        self.embed_tokens: Tensor
        self.vocabulary: Tensor
        self.embedding_norm = _weight(H, dtype, device)
        self.fuse = Linear(2 * H, H, dtype, device)
        self.blocks = nn.ModuleList(HeadBlock(config, layer, dtype, device, target.ranks) for layer in config.attends)
        self.norm = _weight(H, dtype, device)
        self.rows = _rows_of(target, vocabulary) if len(vocabulary) < config.vocab_size else None
        """The output layer's rows of the tokens that are drafted; without, all of it is used."""
        self._output_layer = (target.lm_head,)  # in a tuple: no part of this module
        self._vocabulary, self._target_config, self.ranks = target.vocabulary, target.config, target.ranks

    def forward(
        self, state: Float[Tensor, "T H"], token_ids: Int[Tensor, "T"], positions: Int[Tensor, "T"], context: DraftContext
    ) -> Float[Tensor, "T H"]:
        """The state after ``token_ids``, which stand at ``positions``; ``state`` is that of the token before each."""
        embedded = _norm(self._embed(token_ids), self.embedding_norm, self.config.rms_norm_eps)
        x = self.fuse(torch.cat((state, embedded.to(state.dtype)), dim=-1))
        for block in self.blocks:
            x = block(x, positions, context)
        return _norm(x, self.norm, self.config.rms_norm_eps)

    def _embed(self, token_ids: Int[Tensor, "T"]) -> Float[Tensor, "T H"]:
        return self._vocabulary.embed(self.embed_tokens, token_ids, self.embed_tokens.dtype)

    def compute_logits(self, state: Float[Tensor, "T H"]) -> Float[Tensor, "T Vd"]:
        """Logits of the tokens of ``vocabulary``, in at least float32."""
        logits: Tensor
        logits = self._vocabulary.whole(self._output_layer[0](state)) if self.rows is None else self.rows(state)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def full_logits(self, state: Float[Tensor, "T H"]) -> Float[Tensor, "T V"]:
        """The same by token id; those of tokens that are never drafted are -inf."""
        logits = self.compute_logits(state)
        if logits.shape[-1] == self.config.vocab_size:
            return logits
        return logits.new_full((len(logits), self.config.vocab_size), -torch.inf).index_copy_(1, self.vocabulary, logits)

    def share_of_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """What a rank takes of one of the head's weights: of its attention, the rows or columns of its own query heads."""
        module = name.split(".")[-2] if "." in name else name
        if self.ranks.size == 1 or module not in ("q_proj", "o_proj"):
            return tensor
        dim, start, full = cuts_of(self._target_config, self.ranks)[module]
        return tensor.narrow(dim, start, full // self.ranks.size)

    def own_weights(self) -> dict[str, nn.Parameter]:
        """The weights that are the head's alone, by name."""
        return {name: weight for name, weight in self.named_parameters() if not name.startswith("rows.")}

    def pack_weights(self) -> None:
        """After loading: move matrices into the layout that this CPU multiplies fastest."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(twice=True)

    def release(self) -> None:
        """Give the memory of the head's own weights back now."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.release()
        for tensor in self.parameters():
            tensor.untyped_storage().resize_(0)


def _weight(size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)


def _norm(x: Float[Tensor, "T H"], weight: Float[Tensor, "H"], eps: float) -> Float[Tensor, "T H"]:
    """RMSNorm by torch, which can be trained through."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def _rows_of(target: LlamaForCausalLM, vocabulary: Int[Tensor, "Vd"]) -> Linear:
    """The rows of the target's output layer for some tokens, as a layer of its own.

    A weight that was packed for a CPU, or is spread over ranks, can be read by multiplying with it alone: unit vectors give
    its columns.
    """
    H, weight = target.config.hidden_size, target.lm_head.weight
    embedding = target.embed_tokens
    rows = Linear(H, len(vocabulary), embedding.dtype, embedding.device)
    ids = vocabulary.to(embedding.device)
    if weight.numel() and target.ranks.size == 1:
        rows.weight.data.copy_(weight.data[ids])
        return rows
    for units in torch.eye(H, dtype=embedding.dtype, device=embedding.device).split(64):
        columns = units.argmax(1)
        rows.weight.data[:, columns] = target.vocabulary.whole(target.lm_head(units))[:, ids].t().to(rows.weight.dtype)
    return rows
