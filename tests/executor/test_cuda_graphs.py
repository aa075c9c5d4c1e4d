"""Decode steps worked out on the device: the tokens of steps that the host shapes, and nothing written for empty rows."""

import bisect
import gc
import os
import weakref

import pytest
import torch

pytest.importorskip("triton")

from refimpl import LLM, SamplingParams
from refimpl.executor.check_graphs import CheckGraphs, DraftGraphs
from refimpl.executor.cuda_graphs import DecodeGraphs, DecodeStep, graph_sizes
from refimpl.models.tiny import tiny

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
PROMPTS = [[5, 6, 7], [9] * 17, [11, 12], [13]]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""The interpreter takes its time for each."""


def test_sizes_reach_the_most_sequences_and_no_further():
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 4]
    assert graph_sizes(4) == [1, 2, 4]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(256) == [1, 2, 4, *range(8, 257, 8)]
    assert graph_sizes(500) == graph_sizes(1000) == [*graph_sizes(256), *range(272, 513, 16)]


def test_padding_is_under_eight_in_a_hundred_rows():
    sizes, batches = graph_sizes(256), range(1, 257)
    computed = sum(sizes[bisect.bisect_left(sizes, rows)] for rows in batches)
    assert computed / sum(batches) - 1 < 0.08


class Unrecorded(DecodeGraphs):
    """Computes what would be recorded, anew each time."""

    def __init__(self, step, sizes):
        self._process = os.getpid()
        self.step = step
        self.sizes = sizes
        self.replayed = []
        self._graphs = {}

    def run(self, place):
        self.replayed.append((self.sizes[place], 1))
        return self.step.forward(self.sizes[place])


class UnrecordedChecks(CheckGraphs):
    """The same for several tokens of each row."""

    def __init__(self, step, sizes, num_tokens):
        self.step, self.sizes, self.num_tokens = step, sizes, num_tokens
        self._by_tokens = {}
        self.replayed = []

    def run(self, num_tokens, place):
        self.replayed.append((self.sizes[place], num_tokens))
        return self.step.forward(self.sizes[place], num_tokens)


def llm_on(device, **options):
    return LLM(
        tiny(**FEW_HEADS), dtype="float32", device=device, attention_backend="triton", enforce_eager=True, max_num_seqs=4,
        max_model_len=32, num_gpu_blocks_override=12, **options,
    )  # fmt: skip


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)]


def test_decodes_from_slots_and_contexts_alone_give_the_same_tokens():
    device = "cuda" if ON_GPU else "cpu"
    with llm_on(device) as llm:
        expected = tokens(llm)
    with llm_on(device) as llm:
        runner = llm.engine.executor.runner
        with torch.inference_mode():
            step = DecodeStep(runner.model, runner.kv_cache, runner.input_batch, runner.backend, 4)
            runner.graphs = Unrecorded(step, [1, 2, 4])
            assert tokens(llm) == expected
            assert (4, 1) in runner.graphs.replayed


@pytest.mark.parametrize("seed", [0, 1])
def test_checks_of_drafts_from_bounds_alone_give_the_same_tokens(seed):
    """With overlap the host's lengths are bounds; the device lowers them, in recorded steps and in others, and a draft
    model's steps likewise. Seed 0 makes the draft model the target."""
    device = "cuda" if ON_GPU else "cpu"
    with llm_on(device) as llm:
        expected = tokens(llm)
    drafts = {"method": "draft_model", "model": tiny(seed=seed, **FEW_HEADS), "num_speculative_tokens": 3, "adaptive": False}
    for recorded in (False, True):
        with llm_on(device, speculative_config=drafts, async_scheduling=True) as llm, torch.inference_mode():
            runner = llm.engine.executor.runner
            proposer = runner.speculation.proposer
            if recorded:
                steps = [
                    DecodeStep(one.model, one.kv_cache, runner.input_batch, one.backend, 4) for one in (runner, proposer)
                ]
                runner.graphs, runner.check_graphs = (
                    Unrecorded(steps[0], [1, 2, 4]),
                    UnrecordedChecks(steps[0], [1, 2, 4], [4]),
                )
                lagging = UnrecordedChecks(steps[1], [1, 2, 4], [2])
                proposer.graphs = DraftGraphs(Unrecorded(steps[1], [1, 2, 4]), lagging)
            assert tokens(llm) == expected
            log = llm.engine.events.records
            assert sum(len(drafts) for record in log for drafts in record.drafts) > 6
            if recorded:
                assert seed == 0 or (4, 2) in lagging.replayed
                assert runner.check_graphs.replayed


def test_empty_rows_write_nothing_and_read_nothing():
    device = "cuda" if ON_GPU else "cpu"
    with llm_on(device) as llm, torch.inference_mode():
        runner = llm.engine.executor.runner
        step = DecodeStep(runner.model, runner.kv_cache, runner.input_batch, runner.backend, 4)
        for layer in runner.kv_cache.layers:
            layer.k.fill_(torch.nan)
            layer.v.fill_(torch.nan)
        step.forward(4)
        assert all(bool(layer.k.isnan().all() and layer.v.isnan().all()) for layer in runner.kv_cache.layers)


def test_a_cache_that_is_nan_from_the_start_gives_the_same_tokens():
    """Chunks, decodes, shared blocks and, on a GPU, padded rows of graphs: nothing that nobody wrote is read."""
    options = {"device": "cuda", "dtype": "bfloat16"} if ON_GPU else {"device": "cpu", "dtype": "float32"}
    options |= {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64, "block_size": 16}
    found = []
    for filling in (0.0, torch.nan):
        with LLM("tiny", **options) as llm, torch.inference_mode():
            runner = llm.engine.executor.runner
            assert (runner.graphs is not None) == ON_GPU
            for layer in runner.kv_cache.layers:
                layer.k.fill_(filling)
                layer.v.fill_(filling)
            asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, n=2)
            outputs = llm.generate([*PROMPTS, [9] * 40], asked, use_tqdm=False)
            found.append([sample.token_ids for output in outputs for sample in output.outputs])
    assert all(len(tokens) == 20 for tokens in found[0])
    assert found[0] == found[1]


def test_graphs_are_left_to_their_process_by_a_child_that_was_forked_off():
    class Recording:
        """Its end is torch's to warn of."""

    graphs, recording = Unrecorded(None, [1]), Recording()
    kept = weakref.ref(recording)
    graphs._graphs = {(1, 1): (recording, None)}
    graphs._process += 1
    del graphs, recording
    assert kept() is not None


@needs_gpu
def test_recorded_steps_give_the_same_tokens_and_give_their_memory_back():
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with LLM("tiny", dtype="bfloat16", device="cuda", max_num_seqs=32, enforce_eager=True) as llm:
        expected = tokens(llm)
    with LLM("tiny", dtype="bfloat16", device="cuda", max_num_seqs=32) as llm:
        assert llm.engine.executor.runner.graphs.sizes == graph_sizes(32)
        assert tokens(llm) == expected
    gc.collect()
    assert abs(before - torch.cuda.mem_get_info()[0]) < 0.01 * before
