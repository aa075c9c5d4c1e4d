"""Flags that people copy: each changes what the engine does, seen through the server."""

import pytest
from server_support import LiveServer, until

BODY = {"prompt": "ab" * 40, "max_tokens": 24, "ignore_eos": True, "seed": 1}


@pytest.fixture
def served():
    made = []

    def served(**engine):
        made.append(LiveServer(**engine))
        return made[-1]

    yield served
    for server in made:
        until(server.idle)
        server.close()


def test_limits_of_a_step_and_the_size_of_blocks(served):
    server = served(max_num_batched_tokens=32, max_num_seqs=2, block_size=8)
    assert server.complete(**BODY, n=4).status_code == 200
    engine = server.llm.engine
    batches = [record.num_new_tokens for record in engine.events.records]
    assert max(map(sum, batches)) == 32  # the prompt of 80 comes in chunks
    assert max(map(len, batches)) == 2
    assert engine.scheduler.kv.block_size == 8


def test_prefix_caching_on_and_off(served):
    for on in (True, False):
        server = served(enable_prefix_caching=on)
        cached = [server.complete(**BODY).json()["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        assert (cached[1] > 0) == on


def test_speculation_drafts_and_says_the_same(served):
    plain, drafting = (
        served(),
        served(speculative_config={"num_speculative_tokens": 3, "adaptive": False, "sampler": "coupled"}),
    )
    body = {**BODY, "temperature": 0, "logit_bias": {"97": 30, "98": 30}}
    assert drafting.complete(**body).json()["choices"] == plain.complete(**body).json()["choices"]
    assert sum(bool(record.drafts) for record in drafting.llm.engine.events.records) > 0


def test_swap_space_is_used_when_memory_is_short(served):
    server = served(num_gpu_blocks_override=16, max_model_len=200, swap_space=0.01, preemption_mode="swap", watermark=0.0)
    assert server.complete(**{**BODY, "max_tokens": 100}, n=4).status_code == 200
    assert any(record.swapped_out for record in server.llm.engine.events.records)


def test_quantised_weights(served):
    plain, small = served(), served(quantization="fp8")
    sizes = [server.llm.engine.memory_report().weight_bytes for server in (plain, small)]
    assert sizes[1] < sizes[0]
    assert small.complete(**BODY).status_code == 200
