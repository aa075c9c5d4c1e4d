"""Mixed steps from numbers at a fixed place: the tokens of every row, and nothing of the rows that are empty."""

import os

import numpy as np
import pytest
import torch

from refimpl import LLM, SamplingParams
from refimpl.executor import mixed_graphs
from refimpl.executor.mixed_graphs import TOKENS, MixedGraphs, MixedStep, mixed_sizes, recorded_sets

ON_GPU = torch.cuda.is_available()
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = [[7] * 3, list(range(60, 79)), [9]]


def test_sizes_end_with_the_first_that_holds_a_step():
    assert mixed_sizes(10) == [64]
    assert mixed_sizes(64) == [64]
    assert mixed_sizes(100) == [64, 128]
    assert mixed_sizes(16_384) == TOKENS


def test_many_tokens_are_recorded_for_few_rows_and_for_all():
    assert recorded_sets([64, 128], 4) == [(4, [64, 128])]
    assert recorded_sets([64, 128, 192], 128) == [(128, [64, 128, 192])]
    assert recorded_sets([64, 128, 192, 256], 512) == [(128, [64, 128, 192, 256]), (512, [192, 256])]
    assert recorded_sets([64], 512) == [(128, [64])], "of 64 tokens there are no 129 rows"


class Unrecorded(MixedGraphs):
    """Computes what would be recorded, anew each time."""

    def __init__(self, step, sizes):
        self._process = os.getpid()
        self.step, self.sizes = step, sizes
        self.replayed, self._graphs = [], {}

    def replay(self, inputs):
        self.replayed.append((inputs.query_lens.tolist(), inputs.contexts.tolist()))
        return super().replay(inputs)

    def run(self, place):
        return self.step.forward(self.sizes[place])


@pytest.fixture(autouse=True)
def few_tiles(monkeypatch):
    """The interpreter takes its time for each, empty or not."""
    monkeypatch.setattr(mixed_graphs, "MOST_PROMPTS", 2)


def llm_with(sizes, backend="triton", **options):
    """An engine, and the steps with prompts that it computed as if they were recorded."""
    llm = LLM(
        "tiny", dtype="float32", device="cuda" if ON_GPU else "cpu", attention_backend=backend, enforce_eager=True,
        max_num_seqs=2, max_model_len=32, num_gpu_blocks_override=8, **options,
    )  # fmt: skip
    runner = llm.engine.executor.runner
    if sizes:
        with torch.inference_mode():
            step = MixedStep(runner.model, runner.kv_cache, runner.input_batch, runner.backend, 2, sizes[-1])
        runner.mixed_graphs = [Unrecorded(step, sizes)]
    return llm, runner.mixed_graphs[0] if sizes else None


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_mixed_steps_give_the_same_tokens():
    """Prompts whole and in chunks, beside decodes; of one, of a few and of many tokens; more of them than slots."""
    llm, _ = llm_with([], backend="torch")
    with llm:
        expected = tokens(llm)
    llm, graphs = llm_with([8, 20], max_num_batched_tokens=20)
    with llm:
        assert tokens(llm) == expected
    lens = [lens for lens, _ in graphs.replayed]
    assert [3, 17] in lens, "a chunk beside a whole prompt"
    assert [1, 2] in lens, "the rest of it beside a decode, in a smaller recording"


def test_what_no_recording_holds_is_not_served():
    llm, graphs = llm_with([16])
    with llm:
        inputs = type("Inputs", (), {})()
        for lens, served in (([2, 14], True), ([2, 15], False), ([1, 1, 3], False), ([5, 0], True)):
            inputs.query_lens = np.array(lens)
            assert graphs.serves(inputs) == served, lens
        graphs.step.most_rows = 8
        for lens, served in (([2, 2, 1], True), ([2, 2, 2], False)):
            inputs.query_lens = np.array(lens)
            assert graphs.serves(inputs) == served, f"{lens}: tiles are there for two prompts"


def test_empty_rows_tokens_and_tiles_write_nothing_and_read_nothing():
    llm, graphs = llm_with([16])
    with llm, torch.inference_mode():
        layers = llm.engine.executor.runner.kv_cache.layers
        for layer in layers:
            layer.k.fill_(torch.nan)
            layer.v.fill_(torch.nan)
        nothing = np.zeros(0, dtype=np.int64)
        graphs.step.write(16, nothing, nothing, nothing)
        graphs.step.forward(16)
        assert all(bool(layer.k.isnan().all() and layer.v.isnan().all()) for layer in layers)


@pytest.mark.skipif(not ON_GPU, reason="graphs are a GPU's")
def test_recorded_mixed_steps_give_the_same_tokens():
    options = {"dtype": "bfloat16", "device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 48}
    with LLM("tiny", enforce_eager=True, **options) as llm:
        expected = tokens(llm)
    with LLM("tiny", **options) as llm:
        assert [graphs.sizes for graphs in llm.engine.executor.runner.mixed_graphs] == [mixed_sizes(48)]
        assert tokens(llm) == expected
