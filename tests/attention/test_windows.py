"""Attention to the last tokens alone: every backend against the definition, and what becomes of one that cannot."""

import math

import pytest
import torch
from asserts import assert_close, assert_same
from attention_case import Case
from family_models import WINDOW, variant

from refimpl import LLM, SamplingParams, TransformersCheckpoint
from refimpl.attention import TorchPagedAttention
from refimpl.attention.flash import FlashAttention, FlashAttentionStep
from refimpl.attention.torch_paged import cut_tiles
from refimpl.errors import ConfigError
from refimpl.kernels import attention_cases, reference

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LENS = [(1, 1), (1, 6), (1, 7), (1, 8), (1, 40), (5, 5), (9, 30), (2, 17)]
"""Decodes with contexts about a window of 7, a prompt, a chunk in the middle of a context, a check of a draft."""


def test_the_definition_counts_the_token_itself():
    case = Case([(6, 6)], 1, 1, 4, 4)
    case.run()
    scores = (case.query[:, 0] @ case.key[:, 0].T) * case.scale
    ahead = torch.arange(6) - torch.arange(6)[:, None]
    for window in range(1, 8):
        seen = (ahead <= 0) & (ahead > -window)
        expected = scores.masked_fill(~seen, -math.inf).softmax(-1) @ case.value[:, 0]
        assert_close(case.expected(window)[:, 0], expected, 1e-12, 1e-13)
    assert_same(case.expected(1), case.value)


@pytest.mark.parametrize("window", [1, 2, 6, 7, 8, 39, 40, 1000])
@pytest.mark.parametrize("B", [1, 4, 16])
def test_torch_gathers_what_windows_reach_over(B, window):
    Case(LENS, 6, 2, 16, B).check(window=window)
    for lens in LENS:
        Case([lens], 4, 2, 16, B, in_order=True).check(window=window)


def test_torch_serves_layers_with_and_without_a_window_in_one_step():
    case = Case([(300, 520), (1, 40), (260, 260)], 4, 2, 16, 16)
    step = TorchPagedAttention(case.scale).begin_step(case.metadata)
    step.write(case.cache, case.key, case.value)
    for window in (None, 33, 300, None, 33):
        got = step.attend(case.cache, case.query, window)
        assert_close(got, case.expected(window), 1e-11, 1e-12, what=f"window {window}")


def test_torch_reads_no_more_blocks_than_a_window_and_its_tile_lie_in():
    tiles = cut_tiles([1, 300], [1000, 500]).within(50, 16)
    # The first query of the tiles stands at 999, 200 and 456, and sees the 50 keys up to itself.
    assert tiles.first_blocks.tolist() == [950 // 16, 151 // 16, 407 // 16]
    assert tiles.contexts.tolist() == [1000 - 944, 456 - 144, 500 - 400]
    behind = Case([(1, 1000)], 2, 1, 16, 16)
    expected = behind.run(window=50)
    behind.cache.k[behind.table[0, : 944 // 16].long()] = math.nan
    assert_same(behind.run(window=50), expected, "what lies before the window is not read")


# ---------------------------------------------------------------------- by kernels


@pytest.mark.parametrize(("capability", "window"), [(75, 13), (80, 1), (80, 13)])
def test_triton_serves_decodes_and_prompts_within_a_window(capability, window):
    pytest.importorskip("triton")
    from refimpl.attention.triton_paged import TritonPagedAttention
    from refimpl.kernels.attention_tiles import Target

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = Case([(1, 40), (17, 33), (2, 9)], 1, 1, 16, 8, torch.float32, device=device)
    backend = TritonPagedAttention(16**-0.5, device, Target(capability, num_sms=8))
    step = backend.begin_step(case.metadata)
    step.write(case.cache, case.key, case.value)
    for own in (window, None):
        assert_close(step.attend(case.cache, case.query, own), case.expected(own), 2e-5, 4e-6, what=f"window {own}")


def test_bytes_and_operations_within_a_window():
    whole = {"S": 2, "n": 4, "L": 100, "Hq": 8, "Hkv": 2, "D": 16, "B": 8}
    shape = whole | {"window": 10}
    rows = torch.arange(96, 100)
    assert attention_cases.flops(whole, torch.float32) == 2 * 4 * 16 * 8 * int((rows + 1).sum())
    assert attention_cases.flops(shape, torch.float32) == 2 * 4 * 16 * 8 * 4 * 10
    assert attention_cases.bytes_moved(shape, torch.float32) == 2 * 2 * (13 * 2 + 4 * 8) * 16 * 4
    inputs = attention_cases.make_case(shape, torch.float64, torch.device("cpu"), 0).inputs
    del inputs["max_seqlen_q"]
    seen = [reference.paged_attention(**inputs | {"window": window}) for window in (10, 11, None)]
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


# ---------------------------------------------------------------------- others' backends


def test_published_kernels_are_told_how_far_a_token_sees_beside_itself():
    calls = []

    def call(library, query, layer_kv, step, scale, **more):
        calls.append(more)
        return query

    case = Case([(1, 9)], 2, 1, 16, 16)
    interface = type("Interface", (), {"call": staticmethod(call)})()
    step = FlashAttentionStep(interface, None, case.metadata, case.scale)
    for window in (None, 1, 4096):
        step.attend(case.cache, case.query, window)
    assert calls == [{}, {"window_size": (0, 0)}, {"window_size": (4095, 0)}]
    assert FlashAttention.serves_windows


class Own:
    """A backend that was written before there were windows."""

    name = "own"

    def __init__(self):
        self.inner = TorchPagedAttention(24**-0.5)

    def begin_step(self, metadata):
        step = self.inner.begin_step(metadata)
        own = type("Step", (), {})()
        own.write, own.attend = step.write, lambda layer_kv, query: step.attend(layer_kv, query)
        return own


class OwnWithWindows(Own):
    """One that serves them."""

    serves_windows = True

    def begin_step(self, metadata):
        return self.inner.begin_step(metadata)


def texts(prompt, **options):
    checkpoint = TransformersCheckpoint(variant("mistral", torch.float64))
    with LLM(checkpoint, dtype="float64", num_gpu_blocks_override=20, **options) as llm:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length", output.outputs[0].stop_reason
    return output.outputs[0].token_ids


def test_a_backend_of_ones_own_serves_windows_if_it_says_so_and_is_refused_where_it_does_not():
    prompt = list(range(20))
    assert texts(prompt, attention_backend=OwnWithWindows()) == texts(prompt)
    with pytest.raises(ConfigError, match=r"'own' does not say that it serves windows.*serves_windows = True"):
        texts(prompt, attention_backend=Own())


def test_contexts_no_longer_than_the_window_need_no_backend_that_serves_them():
    prompt, most = [5], {"max_model_len": WINDOW}
    assert texts(prompt, attention_backend=Own(), **most) == texts(prompt, **most)
