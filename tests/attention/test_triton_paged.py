"""The triton backend, by the interpreter where there is no GPU: mixed steps, a T4's, and the engine on it."""

import dataclasses
import math

import pytest
import torch
from asserts import assert_close, assert_same
from attention_case import Case

pytest.importorskip("triton")

from refimpl import LLM, SamplingParams
from refimpl.attention.checked import CheckedBackend
from refimpl.attention.triton_paged import TritonPagedAttention
from refimpl.kernels.attention_tiles import Target
from refimpl.layers.attention import Attention
from refimpl.layers.rotary import RotaryEmbedding, TableRotation
from refimpl.models.tiny import tiny
from refimpl.quantization.plain import PLAIN

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIXED = [(1, 20), (18, 30), (2, 2)]
"""A decode, a chunk for the prefill kernel, and a short prompt for the decode kernel."""


def backend(capability=80, D=16):
    return TritonPagedAttention(D**-0.5, DEVICE, Target(capability, num_sms=8))


@pytest.mark.parametrize("capability", [75, 80])
def test_a_mixed_step_of_two_layers(capability):
    case = Case(MIXED, 2, 1, 16, 8, torch.float32, device=DEVICE)
    step = backend(capability).begin_step(case.metadata)
    first = case.run(Prepared(step))
    assert_close(first, case.expected(), 2e-5, 4e-6)
    assert_same(case.run(Prepared(step)), first, "the plan serves every layer")


class Prepared:
    """A backend whose step is ready."""

    def __init__(self, step):
        self.step = step

    def begin_step(self, metadata):
        return self.step


@pytest.mark.parametrize("lens", [[(1, 9)], [(2, 2), (5, 64)], [(17, 17), (20, 41)]], ids=["decode", "K + 1", "prefill"])
def test_steps_of_one_kind(lens):
    case = Case(lens, 2, 1, 16, 16, torch.float32, device=DEVICE)
    assert_close(case.run(backend()), case.expected(), 2e-5, 4e-6)


def test_padded_rows_read_and_write_nothing():
    """One query, no context, a slot below 0: as a captured graph's spare rows."""
    case = Case([(1, 9), (1, 12)], 2, 1, 16, 8, torch.float32, device=DEVICE)
    case.metadata.seqused_k[1] = 0
    case.slot_mapping[1] = -1
    before = case.cache.k[case.table[1].long()].clone()
    got = case.run(backend())
    assert (got[1] == 0).all()
    assert torch.equal(case.cache.k[case.table[1].long()].nan_to_num(nan=9.0), before.nan_to_num(nan=9.0))
    alone = Case([(1, 9), (1, 12)], 2, 1, 16, 8, torch.float32, device=DEVICE)
    assert_same(got[0], alone.run(backend())[0])


def test_output_and_query_may_have_odd_strides():
    case = Case([(1, 9), (17, 19)], 2, 1, 16, 8, torch.float32, device=DEVICE)
    plain = case.run(backend())
    again = Case([(1, 9), (17, 19)], 2, 1, 16, 8, torch.float32, device=DEVICE)
    fused = torch.full((18, 2 * 16 + 5), math.nan, device=DEVICE)
    fused[:, 3:35] = again.query.flatten(1)
    again.query = fused[:, 3:35].unflatten(1, (2, 16))
    assert_same(again.run(backend()), plain)


@pytest.mark.parametrize("choices", [{}, {"qkv_bias": True, "qk_norm": True, "windows": (9, None)}], ids=["plain", "more"])
def test_turning_and_writing_by_one_launch_is_the_same_as_by_two(choices):
    """A backend of the user's has no such launch: it gets keys that are turned, and writes them itself."""
    config = dataclasses.replace(tiny(num_attention_heads=2, num_key_value_heads=1, head_dim=16).config, **choices)
    layer = Attention(config, torch.float32, DEVICE, PLAIN, config.window(0))
    for weight in layer.parameters():
        weight.data.normal_(0, 0.1)
    embedding = RotaryEmbedding(config.rope, 16, 64, torch.float32, DEVICE)
    outcomes = []
    for made in (backend(), CheckedBackend(backend())):
        case = Case(MIXED, 2, 1, 16, 8, torch.float32, device=DEVICE)
        positions = [position for n, context in MIXED for position in range(context - n, context)]
        rotation = TableRotation(torch.tensor(positions, device=DEVICE), embedding.cos, embedding.sin)
        x = torch.randn(len(positions), config.hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        step = made.begin_step(case.metadata)
        assert hasattr(step, "turn_and_write") is not isinstance(made, CheckedBackend)
        output = layer(x, rotation, case.cache, step)
        outcomes.append((output, case.cache.k.nan_to_num(nan=9.0), case.cache.v.nan_to_num(nan=9.0)))
    for fused, apart in zip(*outcomes, strict=True):
        assert_same(fused, apart)


def test_the_engine_draws_the_same_tokens_as_on_torch():
    prompts = [[5, 6], list(range(3, 20))]  # one for each kernel
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    tokens = []
    for name in ("torch", "triton"):
        with LLM("tiny", dtype="float32", device=DEVICE.type, attention_backend=name, block_size=8) as llm:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
    assert all(len(ids) == 3 for ids in tokens[0])
