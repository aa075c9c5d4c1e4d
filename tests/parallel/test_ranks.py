"""Ranks as processes: the same tokens as one process, whatever a request asks and whatever happens to it.

In float64 on small random models: sums over ranks differ in the last digits alone, and the models' logits are wide.
"""

import os
import random
import signal
import socket
import subprocess
import sys

import pytest
from rank_processes import assert_nothing_is_left, ended_in_the_midst, is_alive

from refimpl import LLM, SamplingParams
from refimpl.errors import ConfigError
from refimpl.model_shares import all_reduce_bytes
from refimpl.models.tiny import tiny

SHRUNKEN_70B = tiny(num_attention_heads=64, num_key_value_heads=8, head_dim=4)
LENGTHS = [1, 17, 40, 3, 40]
PROMPTS = [random.Random(i).choices(range(256), k=length) for i, length in enumerate(LENGTHS)]
PROMPTS[4][:32] = PROMPTS[2][:32]
SMALL = {"dtype": "float64", "block_size": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 24}
SMALL |= {"max_model_len": 64}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, n=4, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_tokens=14, ignore_eos=True),
    SamplingParams(
        temperature=0, presence_penalty=1, repetition_penalty=1.3, bad_words=["a"], max_tokens=9, ignore_eos=True
    ),
    SamplingParams(temperature=1, seed=5, logprobs=2, max_tokens=12, ignore_eos=True),
]


def tokens_of(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def answers(llm, params=PARAMS):
    """Token ids of all samples; the books are right after it."""
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert all(sample.finish_reason == "length" for output in outputs for sample in output.outputs), outputs
    assert llm.engine.audit() == []
    return outputs


def opened(size, checkpoint=SHRUNKEN_70B, **options):
    return LLM(checkpoint, tensor_parallel_size=size, **(SMALL | options))


@pytest.fixture(scope="module")
def alone():
    with opened(1) as llm:
        yield llm


@pytest.fixture(scope="module")
def two():
    with opened(2) as llm:
        yield llm


def test_two_ranks_answer_as_one(alone, two):
    """Greedy and sampled, four samples of a prompt, penalties; the pool is so small that sequences give way."""
    wanted, found = answers(alone), answers(two)
    assert tokens_of(found) == tokens_of(wanted)
    assert sum(output.metrics.num_preemptions for output in found) > 0
    pairs = zip(wanted[4].outputs[0].logprobs, found[4].outputs[0].logprobs, strict=True)
    assert all(ours.keys() == theirs.keys() for ours, theirs in pairs)


def test_a_prefix_is_found_on_every_rank(alone, two):
    for llm in (alone, two):
        llm.engine.reset_prefix_cache()
    first = [llm.generate([PROMPTS[2]], PARAMS[0], use_tqdm=False)[0] for llm in (alone, two)]
    again = [llm.generate([PROMPTS[4]], PARAMS[0], use_tqdm=False)[0] for llm in (alone, two)]
    assert [output.num_cached_tokens for output in again] == [32, 32]
    for pair in (first, again):
        assert tokens_of(pair[:1]) == tokens_of(pair[1:])


def test_hooks_prompt_logprobs_and_hidden_states_come_from_rank_0(alone, two):
    def hook(token_ids, logits):
        return logits.index_fill(0, logits.argmax(), -1e9)

    params = SamplingParams(temperature=0, max_tokens=4, logits_hook=hook, prompt_logprobs=1, return_hidden_states=[2])
    ours, theirs = (llm.generate([PROMPTS[1]], params, use_tqdm=False)[0] for llm in (alone, two))
    assert tokens_of([ours]) == tokens_of([theirs])
    assert [list(one or ()) for one in ours.prompt_logprobs] == [list(one or ()) for one in theirs.prompt_logprobs]
    states = [output.outputs[0].hidden_states[2] for output in (ours, theirs)]
    assert abs(states[0] - states[1]).max() < 1e-5


def test_beams_and_forks_hold_on_two_ranks(alone, two):
    from refimpl import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6)
    found = [tokens_of(llm.beam_search([PROMPTS[1]], params, use_tqdm=False)) for llm in (alone, two)]
    assert found[0] == found[1]
    branches = []
    for llm in (alone, two):
        engine = llm.engine
        engine.add_request("trunk", PROMPTS[3], SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True))
        for _ in range(4):
            engine.step()
        engine.fork("trunk", "branch")
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        branches.append(done)
    assert branches[0] == branches[1]
    assert branches[0]["trunk"] != branches[0]["branch"]


def test_a_step_sends_what_the_formula_says(two):
    traffic = two.engine.executor.ranks.traffic
    before = vars(traffic).copy()
    config = SHRUNKEN_70B.config
    two.engine.reset_prefix_cache()
    two.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
    sent = {name: count - before[name] for name, count in vars(traffic).items()}
    steps, tokens = 5, 17 + 4
    assert sent["all_reduces"] == steps * (2 * config.num_hidden_layers + 1)
    assert sent["all_reduce_bytes"] == all_reduce_bytes(config, tokens, 8)
    assert (sent["gathers"], sent["gather_bytes"]) == (steps, steps * 160 * 8)
    assert (sent["broadcasts"], sent["broadcast_bytes"]) == (steps, steps * 8)


def test_only_changes_go_to_the_other_ranks(two, monkeypatch):
    sizes = []
    send = two.engine.executor.watch.send
    monkeypatch.setattr(two.engine.executor.watch, "send", lambda data: (sizes.append(len(data)), send(data)))
    two.engine.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    two.generate([PROMPTS[0], PROMPTS[3]], params, use_tqdm=False)
    decodes = sizes[2:-1]  # after the step that admits, and the one in which the batch becomes one of decodes
    assert len(decodes) > 30
    assert max(decodes) < 40, "the step's number, the batch's version, and at times a block"


def test_memory_is_told_by_rank(alone, two):
    whole, share = alone.memory_report(), two.memory_report()
    assert "on each of 2 ranks" in share.device
    assert share.block_bytes * 2 == whole.block_bytes
    norms = 8 * 64 * (2 * 2 + 1)
    assert share.weight_bytes == (whole.weight_bytes - norms) // 2 + norms
    assert two.engine.read_blocks(0, [1]).k.shape == (1, 4, 4, 4), "rank 0's heads"


def test_ctrl_c_is_taken_between_steps_and_the_ranks_go_on(two, monkeypatch):
    runner, pressed = two.engine.executor.runner, []
    launch = runner.launch

    def launch_with_ctrl_c(scheduler_output):
        pressed.append(1)
        if len(pressed) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return launch(scheduler_output)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", launch_with_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            two.generate([PROMPTS[1]], PARAMS[0], use_tqdm=False)
    assert not two.engine.has_unfinished_requests()
    assert tokens_of(two.generate([PROMPTS[0]], PARAMS[0], use_tqdm=False))


def test_eight_ranks_hold_one_key_head_each(alone):
    with opened(8) as llm:
        assert llm.engine.executor.runner.model.share.num_key_value_heads == 1
        assert tokens_of(answers(llm)) == tokens_of(answers(alone))


SWAPPING = {"async_scheduling": True, "swap_space": 0.001, "preemption_mode": "swap"}


@pytest.fixture(scope="module")
def four():
    """Two key heads for four ranks; steps are planned ahead."""
    with opened(4, tiny(), **SWAPPING) as llm:
        yield llm


def test_overlap_and_swapped_sequences_hold_on_ranks_that_share_key_heads(four):
    """Who gives way goes to the host's memory and comes back."""
    with opened(1, tiny(), **SWAPPING) as llm:
        assert tokens_of(answers(four)) == tokens_of(answers(llm))
    assert "swap" in {one.mode for record in four.engine.events.records for one in record.preempted}


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive": True}


@pytest.mark.parametrize(
    ("config", "overlap"), [(NGRAM, False), (DRAFT | {"model": tiny(seed=1)}, True)], ids=["n-grams", "a draft model"]
)
def test_drafts_are_the_same_on_every_rank(config, overlap):
    options = {"speculative_config": config | {"sampler": "coupled"}, "async_scheduling": overlap}
    with opened(1, tiny()) as plain, opened(2, tiny(), **options) as llm:
        assert tokens_of(answers(llm)) == tokens_of(answers(plain))
        draft = llm.engine.executor._local._drafter
        assert draft is None or draft.share.num_attention_heads == 2, "split as the target is"


def test_what_the_other_ranks_cannot_have_is_refused(smollm2):
    class Mine:
        name, config = "mine", SHRUNKEN_70B.config

        def weights(self):
            return SHRUNKEN_70B.weights()

        def tokenizer(self):
            return SHRUNKEN_70B.tokenizer()

        def fingerprint(self):
            return "mine"

    with pytest.raises(ConfigError, match=r"a Mine in this process.*save it to a folder"):
        LLM(Mine(), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="it can be 1, 3"):
        LLM("smollm2", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0; it must be a whole number, 1 or more"):
        LLM("tiny", tensor_parallel_size=0)


def test_ranks_that_torchrun_starts_find_each_other(monkeypatch):
    """As torchrun would start them: a number each, and where the first one is. This process is the first one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "REFIMPL_TOKEN": "ab" * 16,
    }.items():
        monkeypatch.setenv(name, str(value))
    command = [sys.executable, "-m", "refimpl.parallel.worker", "generate"]  # the command is rank 0's
    other = subprocess.Popen(command, env=dict(os.environ, RANK="1", LOCAL_RANK="1"), stderr=subprocess.PIPE, text=True)
    monkeypatch.setenv("RANK", "0")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM("tiny", dtype="float64", tensor_parallel_size=2) as llm:
        found = tokens_of(llm.generate([[1, 2]], params, use_tqdm=False))
    _, said = other.communicate(timeout=60)
    assert other.returncode == 0, said
    with LLM("tiny", dtype="float64") as llm:
        assert found == tokens_of(llm.generate([[1, 2]], params, use_tqdm=False))


def test_torchrun_needs_a_secret_and_the_right_number_of_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "REFIMPL_TOKEN"):
        monkeypatch.setenv(name, "3")
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but torchrun started 3 ranks"):
        LLM("tiny", tensor_parallel_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="at least 32 hexadecimal digits"):
        LLM("tiny", tensor_parallel_size=2)


def test_two_engines_at_once_do_not_meet_and_close_ends_the_ranks(two):
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM("tiny", tensor_parallel_size=2, dtype="float64") as other:
        watch, first = other.engine.executor.watch, two.engine.executor.watch
        assert not set(watch.process_ids) & set(first.process_ids)
        assert len(other.generate([[7, 8, 9]], params, use_tqdm=False)[0].outputs[0].token_ids) == 6
        assert len(two.generate([[7, 8, 9]], params, use_tqdm=False)[0].outputs[0].token_ids) == 6
    assert_nothing_is_left(watch)
    assert is_alive(first.process_ids[0])
    assert two.generate([[1]], params, use_tqdm=False)[0].outputs[0].finish_reason == "length"


# ---------------------------------------------------------------------- the end of the engines that were shared


def test_a_rank_that_is_killed_ends_requests_with_an_error_and_leaves_nothing(two):
    sample = ended_in_the_midst(two, "SIGKILL")
    assert sample.finish_reason == "error"
    assert "rank 1 was killed by SIGKILL" in sample.stop_reason


def test_a_rank_that_hangs_is_noticed_with_overlap_too(four):
    sample = ended_in_the_midst(four, "SIGSTOP")
    assert sample.finish_reason == "error"
    assert "rank 3 has said nothing for" in sample.stop_reason
