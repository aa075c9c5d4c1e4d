"""The compiled operations of a CPU beside torch's, which are tested against transformers."""

from __future__ import annotations

import pytest
import torch

from refimpl.attention.backend import AttentionMetadata
from refimpl.attention.native_paged import MOST_TOKENS, NativePagedAttention
from refimpl.attention.torch_paged import TorchPagedAttention
from refimpl.bench.flops import flop_counter
from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels import native
from refimpl.layers.activation import silu_mul
from refimpl.layers.norm import RMSNorm
from refimpl.layers.rotary import Rotation, rotate

needs_compiler = pytest.mark.skipif(bool(native.obstacle()), reason=native.obstacle())
BOUND = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
BOTH = pytest.mark.parametrize("dtype", list(BOUND))
CONTEXTS = [1, 16, 17, 90]
D, HKV, G, BLOCK = 24, 2, 3, 16


def close(found, wanted, dtype):
    torch.testing.assert_close(found.float(), wanted.float(), rtol=BOUND[dtype], atol=BOUND[dtype])


def step_of(dtype, query_lens=(1, 1, 1, 1)):
    """A cache whose unwritten slots are NaN, and the step of the last so many tokens of each context."""
    tables = torch.tensor([[6 * s + b + 1 for b in range(6)] for s in range(len(CONTEXTS))]).flip(1)
    shape = (25, BLOCK, HKV, D)
    layer = LayerKV(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
    slots = []
    for table, context, new in zip(tables, CONTEXTS, query_lens, strict=True):
        for place in range(context):
            for pages in (layer.k, layer.v):
                pages[table[place // BLOCK], place % BLOCK] = torch.randn(HKV, D).to(dtype)
        slots += [int(table[place // BLOCK]) * BLOCK + place % BLOCK for place in range(context - new, context)]
    return layer, AttentionMetadata.of(list(query_lens), CONTEXTS, BLOCK, tables, torch.tensor(slots))


@needs_compiler
@BOTH
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize(
    "query_lens",
    [
        pytest.param((1, 1, 1, 1), id="decodes"),
        pytest.param((1, 3, 2, MOST_TOKENS), id="checks"),
        pytest.param((1, 16, MOST_TOKENS + 1, 1), id="decodes-around-a-prompt"),
        pytest.param((1, 2, 17, 40), id="prompt-and-chunk"),
    ],
)
def test_attention_is_torchs_in_float64_and_reads_no_slot_beyond_a_context(dtype, window, query_lens):
    layer, metadata = step_of(dtype, query_lens)
    query = torch.randn(sum(query_lens), HKV * G, D).to(dtype)
    found = NativePagedAttention(D**-0.5).begin_step(metadata).attend(layer, query, window)
    wide = LayerKV(layer.k.double(), layer.v.double())
    wanted = TorchPagedAttention(D**-0.5).begin_step(metadata).attend(wide, query.double(), window)
    assert found.isfinite().all()
    close(found, wanted, dtype)


@needs_compiler
@BOTH
def test_a_checked_token_has_the_very_numbers_of_its_decode(dtype):
    layer, metadata = step_of(dtype, (1, 3, 2, 16))
    query = torch.randn(22, HKV * G, D).to(dtype)
    backend = NativePagedAttention(D**-0.5)
    found = backend.begin_step(metadata).attend(layer, query)
    for token in range(16):
        context = CONTEXTS[3] - 15 + token
        decode = AttentionMetadata.of([1], [context], BLOCK, metadata.block_table[3:], metadata.slot_mapping[:1])
        assert torch.equal(backend.begin_step(decode).attend(layer, query[6 + token : 7 + token])[0], found[6 + token])


@needs_compiler
@BOTH
def test_queries_and_keys_are_turned_and_stored_as_torchs_are(dtype):
    layer, metadata = step_of(dtype)
    other = LayerKV(layer.k.clone(), layer.v.clone())
    heads = torch.randn(len(CONTEXTS), HKV * (G + 2), D).to(dtype)
    angles = torch.randn(len(CONTEXTS), D // 2)
    sin = torch.stack((-angles.sin(), angles.sin()), dim=1).unsqueeze(1)
    rotation = Rotation(angles.cos()[:, None, None], sin)
    step = NativePagedAttention(D**-0.5).begin_step(metadata)
    query = step.turn_and_write_heads(layer, heads, HKV * G, rotation.cos, rotation.signed_sin)
    turned = rotate(heads[:, : HKV * (G + 1)].float(), rotation).to(dtype)
    plain = TorchPagedAttention(D**-0.5).begin_step(metadata)
    plain.write(other, turned[:, HKV * G :], heads[:, HKV * (G + 1) :])
    close(query, turned[:, : HKV * G], dtype)
    for found, wanted in ((layer.k, other.k), (layer.v, other.v)):
        close(found.nan_to_num(7), wanted.nan_to_num(7), dtype)


@needs_compiler
@BOTH
def test_norms_and_swiglu_are_torchs(dtype):
    x, residual = torch.randn(3, 40).to(dtype), torch.randn(3, 40)
    norm = RMSNorm(40, 1e-5, torch.float32, torch.device("cpu"))
    torch.nn.init.normal_(norm.weight)
    summed = residual + x.float()
    normed, kept = norm(x, residual.clone())
    close(kept, summed, torch.float32)
    close(normed, norm.plainly(summed), torch.float32)
    gate_up = torch.cat((torch.linspace(-200, 200, 41), torch.randn(41)))[None].to(dtype)
    close(silu_mul(gate_up), torch.nn.functional.silu(gate_up[:, :41].float()) * gate_up[:, 41:].float(), dtype)
    assert silu_mul(torch.full((1, 4), torch.nan, dtype=dtype)).isnan().all()


@needs_compiler
@BOTH
def test_threads_that_share_long_prompts_do_the_same(dtype):
    T = 1000
    assert T * HKV * G * D > 2**16, "so many that they are shared"
    shape = (65, BLOCK, HKV, D)
    ours, theirs = (LayerKV(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2))
    slots = torch.arange(BLOCK, BLOCK + T).flip(0)
    metadata = AttentionMetadata.of([T], [T], BLOCK, torch.arange(1, 64)[None], slots)
    heads, angles = torch.randn(T, HKV * (G + 2), D).to(dtype), torch.randn(T, D // 2)
    rotation = Rotation(angles.cos()[:, None, None], torch.stack((-angles.sin(), angles.sin()), dim=1).unsqueeze(1))
    step = NativePagedAttention(D**-0.5).begin_step(metadata)
    query = step.turn_and_write_heads(ours, heads, HKV * G, rotation.cos, rotation.signed_sin)
    turned = rotate(heads[:, : HKV * (G + 1)].float(), rotation).to(dtype)
    TorchPagedAttention(D**-0.5).begin_step(metadata).write(theirs, turned[:, HKV * G :], heads[:, HKV * (G + 1) :])
    for found, wanted in ((query, turned[:, : HKV * G]), (ours.k, theirs.k), (ours.v, theirs.v)):
        close(found, wanted, dtype)
    x, residual = torch.randn(T, 80).to(dtype), torch.randn(T, 80)
    norm = RMSNorm(80, 1e-5, torch.float32, torch.device("cpu"))
    torch.nn.init.ones_(norm.weight)
    normed, summed = norm(x, residual.clone())
    close(summed, residual + x.float(), torch.float32)
    close(normed, norm.plainly(residual + x.float()), torch.float32)
    gate_up = torch.randn(T, 160).to(dtype)
    close(silu_mul(gate_up), torch.nn.functional.silu(gate_up[:, :80].float()) * gate_up[:, 80:].float(), dtype)


@needs_compiler
def test_what_is_trained_is_torchs():
    gate_up = torch.randn(2, 8, requires_grad=True)
    assert not native.by_native(gate_up)
    silu_mul(gate_up).sum().backward()
    assert gate_up.grad is not None


@needs_compiler
def test_what_counts_torchs_operations_sees_them_all():
    layer, metadata = step_of(torch.float32)
    query = torch.randn(len(CONTEXTS), HKV * G, D)
    with flop_counter() as counter:
        NativePagedAttention(D**-0.5).begin_step(metadata).attend(layer, query)
    assert counter.get_total_flops() >= 4 * HKV * G * D * sum(CONTEXTS), "scores and sums, and what torch pads"
