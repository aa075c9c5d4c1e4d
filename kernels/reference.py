"""The mathematics of every operation, in plain torch: what a fast kernel must equal.

These functions are pure (they change no argument) and compute in at least float32, so that in float64 they are the oracle
of the oracle. The model runs on them directly where they are also fast enough. Axes are those of :mod:`refimpl.shapes`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from refimpl.kernels.philox import Purpose, uniform

GREEDY_BELOW = 1e-5
"""A temperature under it is greedy."""
FP8_MAX = 448.0
"""The largest number of e4m3."""
LEAST_SCALE = 2.0**-100
"""Of a row in FP8: a float32 of full precision, far under what a row of 16-bit numbers above 0 comes to."""
BAD_LOGITS = -2
"""In place of a token: the row's raw logits hold NaN or +inf, or no finite number at all."""
NOTHING_LEFT = -3
"""In place of a token: what was done to the logits took the last finite one."""


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """16-bit floats as float32; float32 and float64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Float[Tensor, "T H"], weight: Float[Tensor, "H"], eps: float) -> Float[Tensor, "T H"]:
    """``x / sqrt(mean(x²) + eps) · weight``, row by row.

    The quotient is rounded to x's dtype before it is multiplied, as in Hugging Face's Llama.
    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization".
    """
    wide = at_least_float32(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def norm_heads(
    heads: Float[Tensor, "T heads D"], q_weight: Float[Tensor, "D"], k_weight: Float[Tensor, "D"], eps: float, num_heads: int
) -> Float[Tensor, "T heads D"]:
    """:func:`rms_norm` of each head: of the first ``num_heads``, which are queries, by one weight, of the keys by another.

    Source: Henry et al. 2020, "Query-Key Normalization for Transformers".
    """
    parts = heads[:, :num_heads], heads[:, num_heads:]
    normed = [
        rms_norm(part.flatten(0, 1), weight, eps).unflatten(0, part.shape[:2])
        for part, weight in zip(parts, (q_weight, k_weight), strict=True)
    ]
    return torch.cat(normed, dim=1)


def add_rms_norm(
    x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"], weight: Float[Tensor, "H"], eps: float
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T H"]]:
    """``rms_norm(x + residual)``, and the sum, which is the residual stream after it. The sum is rounded to x's dtype."""
    new_residual = x + residual
    return rms_norm(new_residual, weight, eps), new_residual


def rotary(
    x: Float[Tensor, "T heads D"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"]
) -> Float[Tensor, "T heads D"]:
    """Turn the pairs ``(x[i], x[i + D/2])`` of each head by the angle of their position.

    ``cos`` and ``sin`` hold ``half = D / 2`` angles a token. Source: Su et al. 2021, "RoFormer"; the halves layout is
    that of GPT-NeoX and Hugging Face.
    """
    first, second = at_least_float32(x).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1).to(first.dtype), sin.unsqueeze(1).to(first.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_at(
    x: Float[Tensor, "T heads D"],
    positions: Int[Tensor, "T"],
    cos: Float[Tensor, "positions half"],
    sin: Float[Tensor, "positions half"],
) -> Float[Tensor, "T heads D"]:
    """:func:`rotary` by tables that hold every position's cosines and sines."""
    return rotary(x, cos[positions.long()], sin[positions.long()])


def silu_mul(gate_up: Float[Tensor, "T two_I"]) -> Float[Tensor, "T I"]:
    """SwiGLU's product (Shazeer 2020): the first half of the columns through SiLU, times the second half."""
    gate, up = at_least_float32(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def linear(
    x: Float[Tensor, "T in_features"], weight: Float[Tensor, "out_features in_features"]
) -> Float[Tensor, "T out_features"]:
    """``x Wᵀ``, added up in float64 and rounded once."""
    return (x.double() @ weight.double().T).to(x.dtype)


def gated_linear(x: Float[Tensor, "T H"], weight: Float[Tensor, "two_I H"]) -> Float[Tensor, "T I"]:
    """SwiGLU's product (Shazeer 2020) of what gate's and up's weights, one above the other, make of ``x``."""
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def quantise(x: Float[Tensor, "T C"]) -> tuple[Float[Tensor, "T C"], Float[Tensor, "T"]]:
    """Rows as ``values · scales``: values in e4m3 (4 bits of exponent, 3 of mantissa, up to 448), a scale a row.

    A row's scale brings its largest magnitude to 448; it is in at least float32. Nothing overflows, and a row of zeros stays
    one. Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
    """
    wide = at_least_float32(x)
    scales = (wide.abs().amax(-1) / FP8_MAX).clamp(min=LEAST_SCALE)
    values = (wide / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values, scales


def rms_norm_quantise(
    x: Float[Tensor, "T H"], weight: Float[Tensor, "H"], eps: float
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T"]]:
    """:func:`quantise` of :func:`rms_norm`."""
    return quantise(rms_norm(x, weight, eps))


def add_rms_norm_quantise(
    x: Float[Tensor, "T H"], residual: Float[Tensor, "T H"], weight: Float[Tensor, "H"], eps: float
) -> tuple[Float[Tensor, "T H"], Float[Tensor, "T"], Float[Tensor, "T H"]]:
    """:func:`quantise` of :func:`add_rms_norm`'s norm, and the sum."""
    normed, new_residual = add_rms_norm(x, residual, weight, eps)
    return *quantise(normed), new_residual


def silu_mul_quantise(gate_up: Float[Tensor, "T two_I"]) -> tuple[Float[Tensor, "T I"], Float[Tensor, "T"]]:
    """:func:`quantise` of :func:`silu_mul`."""
    return quantise(silu_mul(gate_up))


def fp8_linear(
    values: Float[Tensor, "T in_features"],
    scales: Float[Tensor, "T"],
    weight: Float[Tensor, "out_features in_features"],
    weight_scales: Float[Tensor, "out_features"],
) -> Float[Tensor, "T out_features"]:
    """``x Wᵀ`` of quantised rows by a weight of quantised rows; in the scales' dtype, at least float32."""
    product = values.to(scales.dtype) @ weight.to(scales.dtype).T
    return product * scales.unsqueeze(-1) * weight_scales


def fp8_gated_linear(
    values: Float[Tensor, "T H"],
    scales: Float[Tensor, "T"],
    weight: Float[Tensor, "two_I H"],
    weight_scales: Float[Tensor, "two_I"],
) -> Float[Tensor, "T I"]:
    """SwiGLU's product (Shazeer 2020) of what gate's and up's quantised weights, one above the other, make of the rows."""
    gate, up = fp8_linear(values, scales, weight, weight_scales).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def write_kv(
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    k_cache: Float[Tensor, "blocks B Hkv D"],
    v_cache: Float[Tensor, "blocks B Hkv D"],
    slot_mapping: Int[Tensor, "T"],
) -> tuple[Float[Tensor, "blocks B Hkv D"], Float[Tensor, "blocks B Hkv D"]]:
    """New caches, with each token's keys and values at its slot, ``block · B + place``; a slot below 0 is none."""
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    places = (slots // k_cache.shape[1], slots % k_cache.shape[1])
    return k_cache.index_put(places, key[written]), v_cache.index_put(places, value[written])


def turn_and_write_kv(
    query: Float[Tensor, "T Hq D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    positions: Int[Tensor, "T"],
    cos: Float[Tensor, "positions half"],
    sin: Float[Tensor, "positions half"],
    k_cache: Float[Tensor, "blocks B Hkv D"],
    v_cache: Float[Tensor, "blocks B Hkv D"],
    slot_mapping: Int[Tensor, "T"],
) -> tuple[Float[Tensor, "T Hq D"], Float[Tensor, "blocks B Hkv D"], Float[Tensor, "blocks B Hkv D"]]:
    """Turned queries, and new caches with turned keys and values: :func:`rotary_at`, then :func:`write_kv`."""
    turned = rotary_at(key, positions, cos, sin)
    return rotary_at(query, positions, cos, sin), *write_kv(turned, value, k_cache, v_cache, slot_mapping)


def copy_blocks(
    pools: Float[Tensor, "pools blocks B Hkv D"], sources: Int[Tensor, "n"], targets: Int[Tensor, "n"]
) -> Float[Tensor, "pools blocks B Hkv D"]:
    """New pools, with block ``sources[i]`` of each at ``targets[i]``. Targets are distinct, and none is a source."""
    return scatter_blocks(pools, targets, gather_blocks(pools, sources))


def gather_blocks(
    pools: Float[Tensor, "pools blocks B Hkv D"], block_ids: Int[Tensor, "n"]
) -> Float[Tensor, "n pools B Hkv D"]:
    """Some blocks of every pool, block by block."""
    return pools[:, block_ids.long()].transpose(0, 1)


def scatter_blocks(
    pools: Float[Tensor, "pools blocks B Hkv D"], block_ids: Int[Tensor, "n"], staging: Float[Tensor, "n pools B Hkv D"]
) -> Float[Tensor, "pools blocks B Hkv D"]:
    """New pools, with ``staging[i]`` at block ``block_ids[i]`` of each; ids are distinct."""
    new = pools.clone()
    new[:, block_ids.long()] = staging.transpose(0, 1)
    return new


def paged_attention(
    query: Float[Tensor, "T Hq D"],
    k_cache: Float[Tensor, "blocks B Hkv D"],
    v_cache: Float[Tensor, "blocks B Hkv D"],
    block_table: Int[Tensor, "S max_blocks"],
    cu_seqlens_q: Int[Tensor, "S_plus_1"],
    seqused_k: Int[Tensor, "S"],
    softmax_scale: float,
    window: int | None = None,
) -> Float[Tensor, "T Hq D"]:
    """Causal attention of each sequence's newest queries over its own keys and values, read through its block table.

    Sequence s has queries ``cu_seqlens_q[s] … cu_seqlens_q[s + 1]`` and ``seqused_k[s]`` keys; its last query stands at
    its last key. Query head h reads key/value head ``h // G``. Argument names are flash-attn's. With a ``window`` a query
    sees that many keys, its own the last of them (as Hugging Face's ``sliding_window`` counts; flash-attn's is one less).

    This is the definition, one sequence and one head group at a time: gather the pages, scores, softmax, weighted sum.
    """
    G = query.shape[1] // k_cache.shape[2]
    output = torch.empty_like(query)
    for s in range(len(seqused_k)):
        first, last, length = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1]), int(seqused_k[s])
        keys = at_least_float32(k_cache[block_table[s].long()].flatten(0, 1)[:length])  # [L, Hkv, D]
        values = at_least_float32(v_cache[block_table[s].long()].flatten(0, 1)[:length])
        queries = at_least_float32(query[first:last]).unflatten(1, (-1, G))  # [n, Hkv, G, D]
        scores = torch.einsum("nkgd,lkd->kgnl", queries, keys) * softmax_scale
        query_positions = torch.arange(length - (last - first), length, device=query.device)
        keys_ahead = torch.arange(length, device=query.device) - query_positions[:, None]  # 0: the query's own
        visible = (keys_ahead <= 0) & (keys_ahead > -(window or length))
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        output[first:last] = torch.einsum("kgnl,lkd->nkgd", weights, values).flatten(1, 2).to(query.dtype)
    return output


def penalise(
    logits: Float[Tensor, "R V"],
    rows: Int64[Tensor, "A"],
    token_ids: Int64[Tensor, "A L"],
    num_prompt_tokens: Int64[Tensor, "A"],
    num_tokens: Int64[Tensor, "A"],
    presence: Float[Tensor, "A"],
    frequency: Float[Tensor, "A"],
    repetition: Float[Tensor, "A"],
) -> Float[Tensor, "R V"]:
    """New logits, with the penalties of each text on its row. What lies behind ``num_tokens`` is not read.

    ``repetition`` divides positive logits and multiplies others, of every token in prompt or output (Keskar et al. 2019,
    "CTRL"). ``frequency`` is taken off for each time that the output holds a token, ``presence`` once (OpenAI's API).
    """
    new = at_least_float32(logits).clone()
    for text, row in enumerate(rows.tolist()):
        ids = token_ids[text, : int(num_tokens[text])]
        seen, output = ids.unique(), ids[int(num_prompt_tokens[text]) :]
        times = torch.zeros_like(new[row]).scatter_add(0, output, torch.ones_like(output, dtype=new.dtype))
        factor = repetition[text].to(new.dtype)
        new[row, seen] = torch.where(new[row, seen] > 0, new[row, seen] / factor, new[row, seen] * factor)
        new[row] = new[row] - frequency[text].to(new.dtype) * times - presence[text].to(new.dtype) * (times > 0)
    return new


def sample(
    logits: Float[Tensor, "R V"],
    temperature: Float[Tensor, "R"],
    seed: Int64[Tensor, "R"],
    path: Int64[Tensor, "R"],
    position: Int64[Tensor, "R"],
    purpose: int,
    raw: Float[Tensor, "R V"] | None = None,
    top_k: Int64[Tensor, "R"] | None = None,
    top_p: Float[Tensor, "R"] | None = None,
    min_p: Float[Tensor, "R"] | None = None,
) -> tuple[Int64[Tensor, "R"], Float[Tensor, "R"]]:
    """A token of each row, and its log-probability by the raw logits that ``logits`` were made of (the same, if not given).

    Greedy rows take the argmax, the lowest id where several tie. Others take the first token, in the order of the
    vocabulary, whose cumulative probability exceeds the row's uniform number times the total; probabilities are those of
    :func:`kept_masses`. Rows without a finite peak get ``BAD_LOGITS`` or ``NOTHING_LEFT``, and NaN.
    """
    logits = at_least_float32(logits)
    raw = logits if raw is None else at_least_float32(raw)
    peak = logits.amax(-1, keepdim=True)
    random = temperature >= GREEDY_BELOW
    scaled = (logits - peak) / torch.where(random, temperature, 1).to(logits.dtype).unsqueeze(-1)
    masses = scaled.exp() if top_k is None or top_p is None or min_p is None else kept_masses(scaled, top_k, top_p, min_p)
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    threshold = uniform(seed, path, position, Purpose(purpose)) * cumulative[:, -1]
    drawn = torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    token_ids = torch.where(random, drawn, logits.argmax(-1))
    logprobs = raw.log_softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    for peaks, refusal in ((peak.squeeze(-1), NOTHING_LEFT), (raw.amax(-1), BAD_LOGITS)):
        token_ids = torch.where(peaks.isfinite(), token_ids, refusal)
    return token_ids, torch.where(token_ids >= 0, logprobs, math.nan)


def kept_masses(
    scaled: Float[Tensor, "R V"], top_k: Int64[Tensor, "R"], top_p: Float[Tensor, "R"], min_p: Float[Tensor, "R"]
) -> Float[Tensor, "R V"]:
    """Probabilities up to a factor, after the filters, of scaled logits whose largest is 0.

    Dropped are, in turn: tokens less probable than ``min_p`` times the most probable; all but the ``top_k`` most probable
    (under 1: none); all but the fewest of those whose share of their mass reaches ``top_p``. Where probabilities tie, the
    lower id counts as the more probable.
    """
    V = scaled.shape[-1]
    kept = scaled.masked_fill(scaled < min_p.to(scaled.dtype).log().unsqueeze(-1), -math.inf)
    values, ids = kept.sort(dim=-1, descending=True, stable=True)
    limit = torch.where((top_k < 1) | (top_k > V), V, top_k).unsqueeze(-1)
    masses = values.exp().masked_fill(torch.arange(V, device=scaled.device) >= limit, 0)
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    short = (before < top_p.double().unsqueeze(-1) * cumulative[:, -1:]) | (top_p >= 1).unsqueeze(-1)
    return torch.zeros_like(scaled).scatter(-1, ids, masses * short)
