"""What is run to see what a GPU needs: on a card of numbers here, and what it comes to on a GPU where there is one."""

import gc
import logging

import pytest
import torch

from refimpl import LLM, EngineArgs, SamplingParams
from refimpl.config import GIB
from refimpl.errors import OutOfMemoryError, PartError
from refimpl.executor import gpu_memory
from refimpl.executor.cuda_graphs import graph_sizes
from refimpl.executor.model_runner import ModelRunner
from refimpl.loading.checkpoint import load_model, open_checkpoint
from refimpl.models.tiny import tiny

MIB = 2**20
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's own memory is measured")


class Card:
    """What torch.cuda says of a card, as numbers that a test sets."""

    def __init__(self):
        self.total, self.free, self.reserved, self.peak = 24 * GIB, 20 * GIB, GIB, 0


@pytest.fixture
def card(monkeypatch):
    card = Card()
    for name, answer in {
        "empty_cache": lambda: None,
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "mem_get_info": lambda device: (card.free, card.total),
        "memory_reserved": lambda device: card.reserved,
        "max_memory_reserved": lambda device: card.reserved + card.peak,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return card


@pytest.fixture(scope="module")
def model():
    return load_model(open_checkpoint("tiny"), "auto", torch.float32, CPU, seed=0)


ARGS = EngineArgs(model="tiny", dtype="float32", max_num_batched_tokens=100, max_num_seqs=4, max_model_len=40)


@pytest.fixture
def steps(monkeypatch, card):
    """The steps that are run; each takes 1,000 bytes a token, and those of over ``most`` tokens fail."""
    run, execute = [], ModelRunner.execute
    steps = type("Steps", (), {"run": run, "most": 10**9})()

    def recorded(runner, output):
        tokens = output.batch.num_tokens
        run.append(output.batch.num_new_tokens)
        if tokens > steps.most:
            raise torch.OutOfMemoryError("too much")
        card.peak = 1000 * tokens
        return execute(runner, output)

    monkeypatch.setattr(ModelRunner, "execute", recorded)
    return steps


def test_before_loading_everything_on_the_card_is_told_apart(card):
    sums = gpu_memory.before_loading(ARGS, tiny().config, torch.float32, CPU)
    assert (sums.total, sums.taken, sums.of_this_process) == (24 * GIB, 4 * GIB, GIB)
    assert sums.weights == 4 * tiny().config.num_parameters
    assert (sums.max_num_seqs, sums.max_model_len, sums.step_tokens) == (4, 40, 100)
    card.reserved += 10 * MIB
    assert gpu_memory.with_weights(sums, CPU).weights == 10 * MIB


def test_the_largest_step_is_run_with_as_many_prompts_as_the_budget_needs(model, steps):
    """Of a model for 40 tokens a step of 100 is two prompts and a half: one prompt alone would show less than half of it."""
    sums = gpu_memory.measured(
        gpu_memory.before_loading(ARGS, model.config, torch.float32, CPU), ARGS, model, torch.float32, CPU, [], []
    )
    assert steps.run == [(40, 40, 20), (40, 10)]
    assert sums.activation_bytes == 100_000
    assert sums.with_(max_num_batched_tokens=50).activation_bytes == 50_000
    assert sums.graph_bytes == 0


def test_a_step_that_does_not_fit_is_reckoned_from_one_that_does(model, steps):
    steps.most = 30
    sums = gpu_memory.measured(
        gpu_memory.before_loading(ARGS, model.config, torch.float32, CPU), ARGS, model, torch.float32, CPU, [], []
    )
    assert steps.run == [(40, 40, 20), (40, 10), (25,), (12,)]
    assert sums.activation_bytes == 100_000
    steps.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        gpu_memory.measured(sums, ARGS, model, torch.float32, CPU, [], [])


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_judged_by_the_largest_and_by_some_others(card, model, steps, monkeypatch, fails):
    """35 graphs: 256 rows, and 4 or 5 of the others; what the very first one takes, of libraries, is none of theirs."""
    recorded, sizes = [], graph_sizes(256)

    class Graphs:
        pool = None

        def __init__(self, step, sizes, pool=None):
            for size in sizes:
                self.record(size)

        def record(self, size):
            if fails and size == 256:
                raise torch.OutOfMemoryError("too much")
            card.free -= (50 if not recorded else 64 if size == 256 else 3) * MIB
            recorded.append(size)

        def release(self):
            pass

    monkeypatch.setattr(gpu_memory, "DecodeGraphs", Graphs)
    args = EngineArgs(model="tiny", dtype="float32", max_model_len=40)
    sums = gpu_memory.before_loading(args, model.config, torch.float32, CPU)
    sums = gpu_memory.measured(sums, args, model, torch.float32, CPU, sizes, [])
    assert recorded[0] == 2, "a product of several tokens asks a library, and its workspace stays"
    if fails:
        assert sums.left < 0, "no cache can be planned where the graphs found no room"
        assert sums.with_(graphs=False).left > 0
        return
    assert recorded[1] == 256
    assert 3 <= len(recorded[2:]) <= 5
    assert sum(recorded[2:]) / len(recorded[2:]) == pytest.approx(sum(sizes[:-1]) / 34, rel=0.25)
    assert sums.graph_bytes == (64 + 34 * 3) * MIB
    assert sums.libraries == (4 * GIB + 50 * MIB + 64 * MIB + 3 * len(recorded[2:]) * MIB) - sums.taken - sums.weights


def test_graphs_of_steps_with_prompts_are_the_larger_ones(card, model, steps, monkeypatch):
    """They are recorded first; what decodes take beside them grows with their rows, and the others are as many more."""
    took = {"mixed": 300, 4: 20}

    class Decodes:
        pool, kind = None, None

        def __init__(self, step, sizes, pool=None):
            for size in sizes:
                self.record(size)

        def record(self, size):
            card.free -= ((self.kind and took[self.kind]) or took.get(size, 3)) * MIB

        def release(self):
            pass

    class Mixed(Decodes):
        kind = "mixed"

    monkeypatch.setattr(gpu_memory, "DecodeGraphs", Decodes)
    monkeypatch.setattr(gpu_memory, "MixedGraphs", Mixed)
    monkeypatch.setattr(ModelRunner, "mixed_step", lambda *_: None)
    sums = gpu_memory.before_loading(ARGS, model.config, torch.float32, CPU)
    sums = gpu_memory.measured(sums, ARGS, model, torch.float32, CPU, [1, 2, 4], [64, 128])
    assert sums.num_graphs == 5
    assert sums.graph_bytes == (300 + 20 + 4 * 3) * MIB
    half = sums.with_(max_num_seqs=2)
    assert half.graph_bytes == (300 + 10 + 3 * 3) * MIB, "of decodes of two rows, one graph less"
    assert sums.with_(graphs=False).num_graphs == 0


# ---------------------------------------------------------------------- on a GPU


def free():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def on_gpu(**options):
    """A small model whose blocks are 256 KiB, so that a large cache is not too many of them."""
    model = tiny(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=8192,
    )  # fmt: skip
    return LLM(model, device="cuda", **{"dtype": "bfloat16", "max_num_seqs": 64} | options)


def generate(llm, count=64, length=200):
    prompts = [[1 + i % 200] * length for i in range(count)]
    return llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, top_p=0.9, seed=1), use_tqdm=False)


@needs_gpu
def test_an_engine_gives_the_card_back_whether_it_was_used_or_half_built(monkeypatch):
    torch.zeros(1, device="cuda")
    with on_gpu(kv_cache_memory_bytes=GIB) as llm:  # what CUDA and libraries keep for good is taken here
        generate(llm)
    before = free()

    def given_back():
        return abs(free() - before) < min(0.01 * before, 64 * MIB)

    with on_gpu(kv_cache_memory_bytes=4 * GIB) as llm:
        generate(llm)
        assert before - free() > 4 * GIB
    assert given_back()

    def refused(*args, **kwargs):
        raise RuntimeError("no batch")

    with monkeypatch.context() as patch:
        patch.setattr("refimpl.executor.local.InputBatch", refused)
        with pytest.raises(RuntimeError, match="no batch") as kept:
            on_gpu(kv_cache_memory_bytes=4 * GIB)
    assert given_back(), kept
    with pytest.raises(OutOfMemoryError, match="ran out of memory while making the KV cache of") as kept:
        on_gpu(kv_cache_memory_bytes=torch.cuda.mem_get_info()[1] * 2)
    assert given_back(), kept


@needs_gpu
def test_a_backend_that_answers_wrongly_is_found_before_the_first_request_and_leaves_nothing():
    class Wrong:
        name = "wrong"

        def begin_step(self, metadata):
            return None

    torch.zeros(1, device="cuda")
    before = free()
    with pytest.raises(PartError, match="without write and attend") as kept:
        on_gpu(attention_backend=Wrong())
    assert abs(free() - before) < 0.01 * before, kept


@needs_gpu
def test_the_parts_of_the_report_are_what_the_card_says():
    with on_gpu() as llm:
        report = llm.memory_report()
        parts = {part.name: part.num_bytes for part in report.parts}
        *rest, whole = report.parts
        assert whole.num_bytes == sum(part.num_bytes for part in rest) == torch.cuda.mem_get_info()[1]
        later = ("activations, peak", "sampler, at most", "kept free", "the whole card")
        held = sum(count for name, count in parts.items() if name not in later)
        assert abs(whole.num_bytes - free() - held) < 0.01 * whole.num_bytes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        generate(llm)
        most = parts["activations, peak"] + parts["sampler, at most"]
        assert torch.cuda.max_memory_reserved() - before <= most + 64 * MIB
        assert {change.setting for change in report.changes} >= {"enforce_eager=True", "max_num_seqs=32"}


@needs_gpu
def test_a_second_engine_sees_what_the_first_one_holds(caplog):
    _, total = torch.cuda.mem_get_info()
    with on_gpu(kv_cache_memory_bytes=total // 2) as first:
        with pytest.raises(OutOfMemoryError, match="held by this process already") as caught:
            on_gpu(gpu_memory_utilization=0.3)
        assert "gpu_memory_utilization=" in str(caught.value)
        with caplog.at_level(logging.INFO, logger="refimpl"), on_gpu(gpu_memory_utilization=0.9) as second:
            assert len(generate(second, 2)) == len(generate(first, 2)) == 2
            parts = {part.name: part.num_bytes for part in second.memory_report().parts}
            assert parts["held by this process"] >= total // 2
