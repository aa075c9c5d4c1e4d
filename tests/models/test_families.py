"""Every family beside transformers: logits, and greedy tokens through everything that an engine does with a cache."""

import functools
import itertools
import random

import pytest
import torch
from asserts import assert_close
from family_models import VARIANTS, WINDOW, their_greedy, variant
from tests_support import full_logits

from refimpl import Engine, EngineArgs, SamplingParams, TransformersCheckpoint
from refimpl.loading.checkpoint import load_model

LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 30]
PROMPTS = [random.Random(length).choices(range(256), k=length) for length in LENGTHS]
PROMPTS[2] = PROMPTS[4][:WINDOW]  # a prefix of the longest
PROMPTS[1] = (PROMPTS[1][:2] * 3)[: WINDOW - 1]  # repeats itself, for n-grams to be found
MAX_TOKENS = 6
HARDEST = ["llama-biases", "mistral", "qwen3-biases-window"]
"""Variants that have everything between them; the others run through fewer settings."""
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_transformers(name):
    """Of every position of texts about as long as the window, and of one several times as long."""
    model = variant(name)
    ours = load_model(TransformersCheckpoint(model), "auto", torch.float32, CPU, 0)
    for prompt in PROMPTS:
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
            assert_close(full_logits(ours, prompt, block_size=4), theirs, rtol=1e-4, atol=1e-4, what=f"{name} {len(prompt)}")


@pytest.mark.parametrize("name", ["mistral", "qwen2-window"])
def test_a_window_as_long_as_the_text_changes_nothing_and_a_shorter_one_does(name):
    whole = load_model(TransformersCheckpoint(variant(name, sliding_window=30)), "auto", torch.float64, CPU, 0)
    for window, same in ((30, 30), (29, 29), (5, 5)):
        other = load_model(TransformersCheckpoint(variant(name, sliding_window=window)), "auto", torch.float64, CPU, 0)
        with torch.inference_mode():
            differs = ((full_logits(whole, PROMPTS[4]) - full_logits(other, PROMPTS[4])).abs() > 1e-9).any(1)
        assert differs.tolist() == [False] * same + [True] * (30 - same)


SWAP = {"swap_space": 0.001, "preemption_mode": "swap"}
SETTINGS = {
    "chunked": {"max_num_batched_tokens": 6, "max_num_seqs": 3, "enable_prefix_caching": False},
    "preempted": {"preempt": True, "max_num_batched_tokens": 16},
    "swapped": {"preempt": True, **SWAP},
    "overlapped": {"async_scheduling": True, "block_size": 16},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
}


def run(checkpoint, preempt=False, **options):
    """Token ids by prompt, each prompt sent twice, and the engine when it is done; audited at each step."""
    args = {"block_size": 4, "max_num_seqs": 16, "max_model_len": 64, "num_gpu_blocks_override": 120} | options
    engine = Engine(EngineArgs(model=checkpoint, dtype="float64", **args))
    for number in range(2 * len(PROMPTS)) if preempt else ():
        engine.scheduler.preempt_at(2 + number, str(number), options.get("preemption_mode", "recompute"))
    tokens = {}
    for repeat in range(2):
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
            engine.add_request(str(number + repeat * len(PROMPTS)), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens[int(output.request_id)] = output.outputs[0].token_ids
            assert engine.audit() == []
    engine.close()
    return [tokens[number] for number in sorted(tokens)], engine


@functools.cache
def case(name):
    """A model in float64, and what transformers draws after each prompt."""
    model = variant(name, torch.float64)
    return TransformersCheckpoint(model), [their_greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]


SIMPLER = [name for name in VARIANTS if name not in HARDEST]


@pytest.mark.parametrize(
    ("name", "setting"), [*itertools.product(HARDEST, SETTINGS), *((name, "preempted") for name in SIMPLER)]
)
def test_greedy_tokens_are_transformers_whatever_the_engine_does(name, setting):
    """Prompts of all lengths in one batch, and again: then the prefix cache has them."""
    checkpoint, expected = case(name)
    tokens, engine = run(checkpoint, **SETTINGS[setting])
    assert tokens == expected * 2
    assert (engine.prefix_cache_stats.hits > 0) == SETTINGS[setting].get("enable_prefix_caching", True)


# ---------------------------------------------------------------------- who drafts


def test_a_draft_model_of_another_family_changes_no_token():
    """Families differ, the vocabulary does not; and a model that drafts for itself is always right."""
    checkpoint, expected = case("qwen3-biases-window")
    accepted = []
    for drafter in (case("mistral")[0], checkpoint):
        speculative = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3, "adaptive": False}
        tokens, engine = run(checkpoint, speculative_config=speculative)
        assert tokens == expected * 2
        accepted.append(sum(sum(record.num_accepted or ()) for record in engine.events.records))
    assert accepted[1] > accepted[0]
