"""The definitions against plain float64 loops, and against transformers' own modules."""

import math

import pytest
import torch
from asserts import assert_close, assert_same
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from refimpl.config import RopeConfig
from refimpl.kernels import reference
from refimpl.layers.activation import SwiGLU
from refimpl.layers.norm import HeadNorms, RMSNorm
from refimpl.layers.rotary import RotaryEmbedding, inverse_frequencies, rotate
from refimpl.quantization.plain import PLAIN

# One rounding to the dtype: half a unit in the last place, relative (epsilon / 2), and a little for the order of sums.
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
DTYPES = list(ROUNDING)
SHAPES = [(1, 1), (3, 2), (7, 80), (5, 576)]


def random(*shape, dtype=torch.float64, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def unchanged(function, *arguments):
    """The function's value; fails if it changed a tensor that it was given."""
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    value = function(*arguments)
    for old, new in zip(before, arguments, strict=True):
        if isinstance(old, torch.Tensor):
            assert_same(new, old, "an argument was changed")
    return value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_its_formula(shape, dtype):
    x, weight, eps = random(*shape, dtype=dtype, scale=3), random(shape[1], dtype=dtype, seed=1), 1e-5
    expected = torch.empty(shape, dtype=torch.float64)
    for t in range(shape[0]):
        row = x[t].double().tolist()
        root = math.sqrt(sum(value * value for value in row) / len(row) + eps)
        for i, value in enumerate(row):
            expected[t, i] = value / root * weight[i].item()
    got = unchanged(reference.rms_norm, x, weight, eps)
    assert got.dtype == dtype
    # The quotient and the product are each rounded.
    assert_close(got, expected, rtol=2.1 * ROUNDING[dtype], atol=1e-7 if dtype == torch.float16 else 1e-30)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rms_norm_is_llamas(dtype):
    x, weight = random(9, 64, dtype=dtype, scale=5), random(64, dtype=dtype, seed=1)
    theirs = modeling_llama.LlamaRMSNorm(64, eps=1e-6).to(dtype)
    theirs.weight.data.copy_(weight)
    assert_same(reference.rms_norm(x, weight, 1e-6), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_heads_is_the_norm_of_each_head_by_the_weight_of_its_kind(dtype):
    heads, weights = random(3, 5, 8, dtype=dtype, scale=3), [random(8, dtype=dtype, seed=seed) for seed in (1, 2)]
    got = unchanged(reference.norm_heads, heads, *weights, 1e-6, 3)
    for t in range(3):
        for head in range(5):
            row = heads[t, head].double().tolist()
            root = math.sqrt(sum(value * value for value in row) / 8 + 1e-6)
            expected = [value / root * w for value, w in zip(row, weights[head >= 3].double().tolist(), strict=True)]
            expected = torch.tensor(expected, dtype=torch.float64)
            assert_close(got[t, head], expected, rtol=2.1 * ROUNDING[dtype], atol=1e-7 if dtype == torch.float16 else 1e-30)
    layer = in_place(heads.clone(), *weights, 1e-6, 3)
    assert_close(layer, got, rtol=2.1 * ROUNDING[dtype], atol=1e-7 if dtype == torch.float16 else 1e-30)


def in_place(heads, q_weight, k_weight, eps, num_heads):
    """The layer on a CPU, over a part of what a projection gave; whose other heads stay."""
    wide = torch.cat((heads, torch.ones_like(heads[:, :1])), dim=1)
    norms = HeadNorms(num_heads, heads.shape[2], eps, heads.dtype, heads.device)
    norms.query.weight.data.copy_(q_weight)
    norms.key.weight.data.copy_(k_weight)
    norms(wide[:, :-1])
    assert (wide[:, -1] == 1).all()
    return wide[:, :-1]


def test_rms_norm_of_zeros_and_of_large_16_bit_numbers():
    zeros = torch.zeros(2, 8, dtype=torch.float16)
    assert_same(reference.rms_norm(zeros, torch.ones(8, dtype=torch.float16), 1e-5), zeros)
    large = torch.full((1, 8), 60_000.0, dtype=torch.float16)  # its square is no float16
    assert_close(reference.rms_norm(large, torch.ones(8, dtype=torch.float16), 1e-5), torch.ones(1, 8), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 80])
def test_rotary_is_a_rotation_of_pairs(head_dim, dtype):
    T, heads, half = 5, 3, head_dim // 2
    x, angles = random(T, heads, head_dim, dtype=dtype), random(T, half, seed=1, scale=10)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got = unchanged(reference.rotary, x, cos, sin)
    expected = torch.empty(T, heads, head_dim, dtype=torch.float64)
    for t in range(T):
        for h in range(heads):
            for i in range(half):
                a, b = x[t, h, i].item(), x[t, h, i + half].item()
                c, s = cos[t, i].item(), sin[t, i].item()
                expected[t, h, i], expected[t, h, i + half] = a * c - b * s, b * c + a * s
    assert got.dtype == dtype
    assert_close(got, expected, rtol=ROUNDING[dtype], atol=1e-14 if dtype == torch.float64 else 1e-6)


def llama_config(rope, head_dim):
    return LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=rope,
    )


ROPES = [
    (RopeConfig(theta=10_000.0), {"rope_type": "default", "rope_theta": 10_000.0}),
    (RopeConfig(theta=500_000.0), {"rope_type": "default", "rope_theta": 500_000.0}),
    (
        RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("ours", "theirs"), ROPES, ids=["theta-1e4", "theta-5e5", "llama3-8", "llama3-32"])
def test_rotary_is_llamas(ours, theirs, head_dim):
    rotary = modeling_llama.LlamaRotaryEmbedding(llama_config(theirs, head_dim))
    assert_close(inverse_frequencies(ours, head_dim), rotary.inv_freq, rtol=3e-7, atol=0, what="frequencies")
    positions = torch.tensor([0, 1, 2, 17, 2047])
    embedding = RotaryEmbedding(ours, head_dim, 2048, torch.float32, torch.device("cpu"))
    query, key = random(5, 3, head_dim, dtype=torch.float32), random(5, 1, head_dim, dtype=torch.float32, seed=1)
    cos, sin = rotary(query, positions[None])
    expected = modeling_llama.apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    for x, turned in zip((query, key), expected, strict=True):
        # An angle of 2047 radians has 1.2e-4 between neighbouring float32 numbers.
        assert_close(rotate(x, embedding(positions)), turned[0].transpose(0, 1), rtol=0, atol=2e-3)


def test_gguf_divisors_stand_for_llama3_scaling():
    scaled = inverse_frequencies(ROPES[2][0], 64)
    plain = inverse_frequencies(RopeConfig(500_000.0), 64)
    divided = inverse_frequencies(RopeConfig(500_000.0, frequency_divisors=tuple((plain / scaled).tolist())), 64)
    assert_close(divided, scaled, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_layers_turn_norm_and_gate_as_the_definitions_do(dtype):
    """All heads in one product, queries and keys as slices of a wider tensor; up to the last bit, or a 16-bit rounding."""
    rtol = {torch.float64: 1e-15, torch.float32: 5e-7, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    embedding = RotaryEmbedding(RopeConfig(), 16, 64, dtype, torch.device("cpu"))
    positions = torch.tensor([0, 3, 3, 63])
    x = random(4, 5, 16, dtype=dtype)
    expected = reference.rotary(x[:, :4], embedding.cos[positions], embedding.sin[positions])
    assert_close(unchanged(rotate, x, embedding(positions))[:, :4], expected, rtol=rtol, atol=rtol)
    norm = RMSNorm(16, 1e-5, dtype, torch.device("cpu"))
    norm.weight.data = random(16, dtype=dtype)
    assert_close(norm(x[:, 0])[0], reference.rms_norm(x[:, 0], norm.weight, 1e-5), rtol=rtol, atol=rtol)
    mlp = SwiGLU(16, 8, dtype, torch.device("cpu"), PLAIN)
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        linear.weight.data = random(*linear.weight.shape, dtype=dtype)
    expected = mlp.down_proj(reference.silu_mul(mlp.gate_up_proj(x[:, 0])))
    assert_close(mlp(x[:, 0]), expected, rtol=rtol, atol=8 * rtol)


def test_rotary_products_see_distance_alone():
    embedding = RotaryEmbedding(RopeConfig(), 16, 512, torch.float64, torch.device("cpu"))
    query, key = random(1, 1, 16), random(1, 1, 16, seed=1)

    def product(i, j):
        turned = [rotate(x, embedding(torch.tensor([p]))) for x, p in ((query, i), (key, j))]
        return (turned[0] * turned[1]).sum()

    assert_close(product(300, 290), product(10, 0), rtol=1e-10, atol=1e-12)
    assert abs(product(300, 290) - product(300, 289)) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul_is_its_formula(shape, dtype):
    T, size = shape
    gate_up = random(T, 2 * size, dtype=dtype, scale=4)
    got = unchanged(reference.silu_mul, gate_up)
    expected = torch.empty(T, size, dtype=torch.float64)
    for t in range(T):
        for i in range(size):
            gate, up = gate_up[t, i].item(), gate_up[t, i + size].item()
            expected[t, i] = gate / (1 + math.exp(-gate)) * up
    assert got.dtype == dtype
    assert_close(got, expected, rtol=ROUNDING[dtype], atol=1e-6 if dtype == torch.float16 else 1e-30)


def test_silu_mul_is_llamas():
    mlp = modeling_llama.LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=1))
    x = random(5, 16, dtype=torch.float32)
    product = reference.silu_mul(torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1))
    assert_close(mlp.down_proj(product), mlp(x), rtol=1e-5, atol=1e-6)


def paged_case(query_lens, contexts, Hq, Hkv, D, B, dtype=torch.float64, seed=0):
    """Random queries and a cache whose unwritten slots hold NaN, with shuffled tables."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-context // B) for context in contexts]
    ids = (torch.randperm(sum(blocks) + 3, generator=generator) + 1).tolist()
    table = torch.zeros(len(contexts), max(blocks), dtype=torch.int32)
    k, v = (torch.full((sum(blocks) + 4, B, Hkv, D), math.nan, dtype=dtype) for _ in range(2))
    for s, context in enumerate(contexts):
        for i in range(blocks[s]):
            table[s, i] = ids.pop()
        for position in range(context):
            for cache in (k, v):
                cache[table[s, position // B], position % B] = torch.randn(Hkv, D, generator=generator).to(dtype)
    query = torch.randn(sum(query_lens), Hq, D, generator=generator).to(dtype)
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0)
    return query, k, v, table, cu_seqlens_q, torch.tensor(contexts), D**-0.5


def attention_by_loops(query, k, v, table, cu_seqlens_q, seqused_k, scale):
    """Softmax attention in Python's own floats, one query head at a time."""
    B, Hkv, G = k.shape[1], k.shape[2], query.shape[1] // k.shape[2]
    expected = torch.empty(query.shape, dtype=torch.float64)
    for s, context in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[s].item(), cu_seqlens_q[s + 1].item()
        slots = [(table[s, p // B].item(), p % B) for p in range(context)]
        for t in range(first, last):
            position = context - (last - t)
            for h in range(query.shape[1]):
                q = query[t, h].tolist()
                keys = [k[block, offset, h // G].tolist() for block, offset in slots[: position + 1]]
                values = [v[block, offset, h // G].tolist() for block, offset in slots[: position + 1]]
                scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
                weights = [math.exp(score - max(scores)) for score in scores]
                for d in range(query.shape[2]):
                    total = sum(w * value[d] for w, value in zip(weights, values, strict=True))
                    expected[t, h, d] = total / sum(weights)
    assert Hkv * G == query.shape[1]
    return expected


@pytest.mark.parametrize(("Hq", "Hkv"), [(6, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize(("query_lens", "contexts"), [([1], [1]), ([5], [5]), ([1, 4, 3], [9, 4, 8]), ([2, 1], [16, 17])])
def test_paged_attention_is_softmax_over_own_context(query_lens, contexts, Hq, Hkv):
    case = paged_case(query_lens, contexts, Hq, Hkv, D=4, B=4)
    assert_close(unchanged_but_nan(*case), attention_by_loops(*case), rtol=1e-12, atol=1e-13)


def unchanged_but_nan(*case):
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in case]
    value = reference.paged_attention(*case)
    for old, new in zip(before, case, strict=True):
        if isinstance(old, torch.Tensor):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    return value


@pytest.mark.parametrize(("Hq", "Hkv"), [(9, 3), (7, 1), (8, 8)])
def test_paged_attention_is_transformers_eager_attention(Hq, Hkv):
    """One whole prompt through the function that transformers' Llama runs on."""
    L, D = 33, 16
    case = paged_case([L], [L], Hq, Hkv, D, B=8)
    query, k, v, table = case[:4]
    keys, values = (cache[table[0].long()].flatten(0, 1)[:L] for cache in (k, v))

    class Module:
        num_key_value_groups, training = Hq // Hkv, False

    mask = torch.full((L, L), -math.inf, dtype=torch.float64).triu(1)[None, None]
    heads_first = [x.transpose(0, 1)[None] for x in (query, keys, values)]
    theirs, _ = modeling_llama.eager_attention_forward(Module(), *heads_first, mask, scaling=D**-0.5)
    # transformers' softmax is in float32.
    assert_close(reference.paged_attention(*case), theirs[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_paged_attention_of_16_bits_rounds_once(dtype):
    case = paged_case([3], [20], 4, 2, 16, B=8, dtype=dtype)
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in case]
    assert_close(reference.paged_attention(*case), reference.paged_attention(*wide), rtol=ROUNDING[dtype], atol=1e-6)
