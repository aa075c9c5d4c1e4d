"""The target over whole texts at once, without a cache: hidden states and keys for training a drafter.

They are made once for all texts where there is memory to keep them (:class:`KeptStates`), else anew for each batch.

It is the engine's own model, given an attention of its own: texts of one length lie one after the other in the flat batch,
padded at their ends, where nothing earlier can see the padding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels.reference import at_least_float32
from refimpl.kernels.transfer import array_to_device
from refimpl.layers.rotary import Rotation, rotate
from refimpl.loading.checkpoint import Checkpoint, copy_weights
from refimpl.models.llama import LlamaForCausalLM
from refimpl.models.registry import build_model
from refimpl.speculate.self_text import Texts


def frozen_target(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """The target with its weights as they are written, not packed."""
    model = build_model(checkpoint.config, dtype, device)
    copy_weights(checkpoint.weights(), model.checkpoint_views(), checkpoint)
    return model


def mixed_precision(model: LlamaForCausalLM) -> torch.autocast:
    """Where a drafter's float32 weights meet a target in 16 bits: products are in the target's dtype."""
    dtype = model.embed_tokens.dtype
    narrow = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(model.embed_tokens.device.type, dtype if narrow else torch.bfloat16, enabled=narrow)


def causal_attention(
    query: Float[Tensor, "T Hq D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    texts: int,
    window: int | None = None,
) -> Float[Tensor, "T Hq D"]:
    """Attention of each token to those of its text up to itself, or to the last ``window`` of them.

    ``texts`` of equal length lie one after the other.
    """
    groups = query.shape[1] // key.shape[1]
    # [N, heads, L, D]; keys and values are repeated, which lets every device use its fused operation.
    folded = [x.unflatten(0, (texts, -1)).transpose(1, 2) for x in (query, key, value)]
    key, value = (x.repeat_interleave(groups, dim=1) for x in folded[1:])
    seen = None
    if window is not None and window < key.shape[2]:
        places = torch.arange(key.shape[2], device=key.device)
        ahead = places - places[:, None]
        seen = (ahead <= 0) & (ahead > -window)
    attended: Tensor = F.scaled_dot_product_attention(folded[0], key, value, attn_mask=seen, is_causal=seen is None)
    return attended.transpose(1, 2).flatten(0, 1)


class DenseStep:
    """Attention for whole texts (an :class:`AttentionStep`). It keeps the keys and values of some layers."""

    def __init__(self, layers: Sequence[object], texts: int, kept: Collection[int]) -> None:
        self._texts = texts
        self._kept = {id(layers[layer]): layer for layer in kept}
        self._last: tuple[Tensor, Tensor] | None = None
        self.keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer: keys, turned, and values, [T, Hkv, D] each."""

    def write(self, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]) -> None:
        """Hand them to the attention of the same layer, which comes next."""
        self._last = key, value
        if id(layer_kv) in self._kept:
            self.keys_values[self._kept[id(layer_kv)]] = self._last

    def attend(
        self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"], window: int | None = None
    ) -> Float[Tensor, "T Hq D"]:
        """Attention of each token to those of its text up to itself, or to the last ``window`` of them."""
        assert self._last is not None
        return causal_attention(query, *self._last, self._texts, window)


@dataclass(frozen=True)
class Batch:
    """Some texts of nearly one length, and what the target makes of them. Padding repeats the last token's id."""

    token_ids: Int[Tensor, "N L"]
    lengths: Int[Tensor, "N"]
    answers: Int[Tensor, "N"]
    loops: Bool[Tensor, "N L"]
    """Whether a token stands in a loop."""
    hidden: Float[Tensor, "N L H"]
    keys_values: Mapping[int, tuple[Tensor, Tensor]]

    def after(self, steps: int) -> Int[Tensor, "N L"]:
        """The token that stands ``steps`` after each; at the end, the last one."""
        return self.ahead(self.token_ids, steps)

    @staticmethod
    def ahead(x: Tensor, steps: int) -> Tensor:
        """What stands ``steps`` further on, along the texts; at the end, the last."""
        places = torch.arange(x.shape[1], device=x.device).add_(steps).clamp_(max=x.shape[1] - 1)
        return x[:, places]

    def drafts(self, steps: int) -> Bool[Tensor, "N L"]:
        """Rows t from which tokens of the answer are drafted ``steps`` times, the last being the one after t + steps."""
        places = torch.arange(self.token_ids.shape[1], device=self.token_ids.device)
        return (places >= self.answers[:, None] - 1) & (places + steps < self.lengths[:, None])


class DenseContext:
    """What a head attends to in training: the target's keys of the same text, up to the row's own position."""

    def __init__(self, model: LlamaForCausalLM, batch: Batch) -> None:
        self._cos, self._sin = model.rotary.cos, model.rotary.sin
        self._window_of = model.config.window
        self._keys_values = batch.keys_values
        self._texts = len(batch.token_ids)

    def attend(self, layer: int, query: Float[Tensor, "T Hq D"], positions: Int[Tensor, "T"]) -> Float[Tensor, "T Hq D"]:
        """As the engine's paged context does, by operations that can be trained through."""
        cos, sin = at_least_float32(self._cos[positions]), at_least_float32(self._sin[positions])
        rotation = Rotation(cos[:, None, None], torch.stack((-sin, sin), dim=1).unsqueeze(1))
        key, value = self._keys_values[layer]
        return causal_attention(rotate(query, rotation).to(key.dtype), key, value, self._texts, self._window_of(layer))


@torch.no_grad()
def run_target(
    model: LlamaForCausalLM, texts: Texts, chosen: Sequence[int], loops: np.ndarray, layers: Collection[int]
) -> Batch:
    """The target's hidden states of the chosen texts, and the keys and values of some of its layers."""
    device = model.embed_tokens.device
    lengths = texts.lengths[list(chosen)]
    longest = int(lengths.max())
    places = texts.starts[list(chosen)][:, None] + np.minimum(np.arange(longest), lengths[:, None] - 1)
    token_ids = array_to_device(texts.token_ids[places], device, torch.int64)
    positions = torch.arange(longest, device=device).repeat(len(lengths))
    # Where the cache of a layer would be: no two are the same, and nothing but their dtype is read.
    stand_ins = [LayerKV(*[torch.empty(0, dtype=model.embed_tokens.dtype)] * 2) for _ in model.layers]
    step = DenseStep(stand_ins, len(lengths), layers)
    hidden = model(token_ids.flatten(), positions, stand_ins, step)
    return Batch(
        token_ids,
        array_to_device(lengths, device),
        array_to_device(texts.answers[list(chosen)], device, torch.int64),
        array_to_device(loops[places], device),
        hidden.unflatten(0, token_ids.shape),
        step.keys_values,
    )


class KeptStates:
    """The target's hidden states of many texts, and some layers' keys and values, made once and kept on the device.

    Row t of each tensor is token t of the flat texts.
    """

    def __init__(self, model: LlamaForCausalLM, texts: Texts, layers: Collection[int], batches: Iterable[list[int]]) -> None:
        device, c = model.embed_tokens.device, model.config
        count, dtype = len(texts.token_ids), model.embed_tokens.dtype
        self._texts = texts
        self._token_ids = array_to_device(texts.token_ids, device, torch.int64)
        self._hidden = torch.empty(count, c.hidden_size, dtype=model.activations, device=device)
        shape = (count, c.num_key_value_heads, c.head_dim)
        self._keys_values = {
            layer: (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for layer in layers
        }
        no_loops = np.zeros(count, dtype=bool)
        for chosen in batches:
            batch = run_target(model, texts, chosen, no_loops, layers)
            real = (torch.arange(batch.token_ids.shape[1], device=device) < batch.lengths[:, None]).flatten()
            rows = _places(texts, chosen, device).flatten()[real]
            self._hidden[rows] = batch.hidden.flatten(0, 1)[real]
            for layer, kept in self._keys_values.items():
                for store, made in zip(kept, batch.keys_values[layer], strict=True):
                    store[rows] = made[real]

    @staticmethod
    def num_bytes(model: LlamaForCausalLM, texts: Texts, layers: Collection[int]) -> int:
        """What they take."""
        c = model.config
        states = c.hidden_size * model.activations.itemsize
        keys_values = 2 * len(layers) * c.num_key_value_heads * c.head_dim * model.embed_tokens.dtype.itemsize
        return len(texts.token_ids) * (states + keys_values + 8)

    def batch(self, chosen: Sequence[int]) -> Batch:
        """As :func:`run_target` makes it, but that padding repeats all of the last token."""
        texts, device = self._texts, self._hidden.device
        places = _places(texts, chosen, device)
        flat = places.flatten()
        return Batch(
            self._token_ids[places],
            array_to_device(texts.lengths[list(chosen)], device),
            array_to_device(texts.answers[list(chosen)], device, torch.int64),
            torch.zeros_like(places, dtype=torch.bool),
            self._hidden[places],
            {layer: (key[flat], value[flat]) for layer, (key, value) in self._keys_values.items()},
        )


def _places(texts: Texts, chosen: Sequence[int], device: torch.device) -> Int[Tensor, "N L"]:
    """Where the tokens of some texts stand in the flat texts; beyond an end, the last one's."""
    lengths = texts.lengths[list(chosen)]
    places = texts.starts[list(chosen)][:, None] + np.minimum(np.arange(int(lengths.max())), lengths[:, None] - 1)
    return array_to_device(places, device)
