"""Every parameter in the engine, against a slow loop over transformers' logits; and the same whatever happens meanwhile."""

import itertools
import math
import random
from functools import cached_property

import msgspec
import pytest
import torch
from adjust_support import plain
from asserts import assert_close

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.kernels.philox import ROOT_PATH, Purpose, branch, uniform
from refimpl.models.tiny import tiny

V, EOS = 320, 256
PROMPTS = [[random.Random(i).randrange(V - 70) for _ in range(length)] for i, length in enumerate([1, 16, 17, 40, 3, 9])]
STOPS = (27, 34)


def hook(token_ids, logits):
    """Depends on the tokens, and on how many there are."""
    logits[int(token_ids[-1])] -= 5
    logits[len(token_ids) % V] += 8
    return logits


PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
ENDS = {"min_tokens": 6, "stop_token_ids": STOPS, "logit_bias": {EOS: 9.0, STOPS[0]: 6.0, 8: 3.0}}
WORDS = {"bad_words": ["a", "the", "\x1b"], "allowed_token_ids": tuple(range(0, V, 2))}
KINDS = [
    PENALTIES | {"ignore_eos": True},
    ENDS,
    WORDS | {"repetition_penalty": 0.7},
    {"logits_hook": hook},
    PENALTIES | ENDS | {"logits_hook": hook, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "bad_words": ["zz"]},
    {},
]


def params_of(number, temperature, **more):
    reads = {
        "logprobs": number % 3,
        "prompt_logprobs": number % 2,
        "return_logits": (0, 10, 45),
        "return_hidden_states": (3,),
    }
    kind = KINDS[number] | reads | {"seed": 1 + number, "max_tokens": 9} | more
    return SamplingParams(temperature=temperature, **kind)


# ---------------------------------------------------------------------- the oracle


class Forward:
    """What transformers says of a text, at each position."""

    def __init__(self, output):
        self.logits, self.hidden_states = output.logits[0], output.hidden_states[-1][0]

    @cached_property
    def logprobs(self):
        return self.logits.log_softmax(-1).tolist()

    @cached_property
    def order(self):
        """All ids, from the most probable one on."""
        return self.logits.argsort(dim=-1, descending=True, stable=True).tolist()


@pytest.fixture(scope="module")
def model():
    """The tiny model's weights in transformers' Llama, in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = tiny()
    c = checkpoint.config
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    )  # fmt: skip
    config = LlamaConfig(
        **{name: getattr(c, name) for name in names}, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    theirs = LlamaForCausalLM(config).double().eval()
    theirs.load_state_dict(dict(checkpoint.weights()), strict=True)
    known = {}

    @torch.inference_mode()
    def forward(token_ids):
        if (key := tuple(token_ids)) not in known:
            known[key] = Forward(theirs(torch.tensor([token_ids]), output_hidden_states=True))
        return known[key]

    return forward


def drawn(row, params, path, position):
    """The definition of a draw, in Python's floats."""
    if params.greedy:
        return max(range(V), key=lambda i: (row[i], -i))
    scaled = [x / params.temperature for x in row]
    weights = {i: math.exp(x - max(scaled)) for i, x in enumerate(scaled)}
    ranked = sorted((i for i in weights if weights[i] >= params.min_p), key=lambda i: (-weights[i], i))
    ranked = ranked[: params.top_k or None]
    total, head, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        head.append(i)
        mass += weights[i]
        if mass >= params.top_p * total and params.top_p < 1:
            break
    one = torch.tensor([path]), torch.tensor([position])
    threshold = uniform(torch.tensor([params.seed]), *one, Purpose.TARGET).item() * sum(weights[i] for i in head)
    mass = 0.0
    for i in sorted(head):
        mass += weights[i]
        if mass > threshold:
            return i
    return max(head)


def oracle(model, prompt, params, index=0):
    """The output of one sample, token by token, each from a forward pass of its own."""
    path = branch(ROOT_PATH, index)
    ways = {"a": [(97,)], "the": [tuple(b"the")], "\x1b": [(27,)], "zz": [tuple(b"zz")]}
    asked = {
        "bad_word_ids": [w for text in params.bad_words for way in ways[text] for w in (way, (32, *way))],
        "ending_ids": (*(() if params.ignore_eos else (EOS,)), *params.stop_token_ids),
        "logit_bias": tuple((params.logit_bias or {}).items()),
        **{name: getattr(params, name) for name in ("allowed_token_ids", "min_tokens", *PENALTIES)},
    }
    output = []
    while len(output) < params.max_tokens:
        row = plain(model([*prompt, *output]).logits[-1].tolist(), prompt, output, asked)
        if params.logits_hook:
            row = hook(torch.tensor([*prompt, *output]), torch.tensor(row, dtype=torch.float64)).tolist()
        output.append(drawn(row, params, path, len(prompt) + len(output)))
        if output[-1] in asked["ending_ids"]:
            break
    return output


# ---------------------------------------------------------------------- the engine


def make(**options):
    args = {"max_num_seqs": 16, "max_model_len": 64, "num_gpu_blocks_override": 400} | options
    return Engine(EngineArgs(model="tiny", dtype="float64", **args))


def serve(engine, requests, preempt=()):
    """Finished outputs by number; the cache's books are audited after each step. ``preempt``: (step from now, number)."""
    engine.reset_prefix_cache()
    for step, number in preempt:
        engine.scheduler.preempt_at(engine.scheduler.step + step, str(number))
    for number, params in requests.items():
        engine.add_request(str(number), PROMPTS[number], params)
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output
        assert engine.audit() == []
    assert sorted(finished) == sorted(requests)
    return finished


def run(requests, **options):
    """The same in an engine of its own."""
    engine = make(**options)
    finished = serve(engine, requests)
    engine.close()
    return finished


def all_params(temperature, **more):
    return {number: params_of(number, temperature, **more) for number in range(len(PROMPTS))}


def tokens_of(finished):
    return {number: [sample.token_ids for sample in output.outputs] for number, output in finished.items()}


def check_readings(model, number, output, params):
    """Log-probabilities, logits and hidden states against transformers' forward over prompt and output."""
    prompt = PROMPTS[number]
    for sample in output.outputs:
        text = prompt + sample.token_ids
        forward = model(text)
        assert len(sample.logprobs) == len(sample.token_ids)
        for position, entry in enumerate(sample.logprobs, start=len(prompt)):
            check_entry(entry, text, position, forward, params.logprobs)
        total = sum(forward.logprobs[p - 1][text[p]] for p in range(len(prompt), len(text)))
        assert sample.cumulative_logprob == pytest.approx(total, abs=1e-5)
        computed = len(text) - 1
        assert sorted(sample.logits) == [p for p in params.return_logits if p < computed]
        assert sorted(sample.hidden_states) == [p for p in params.return_hidden_states if p < computed]
        for position, row in sample.logits.items():
            assert row.dtype == "float32"
            assert_close(torch.from_numpy(row), forward.logits[position], rtol=1e-5, atol=1e-5)
        for position, row in sample.hidden_states.items():
            assert_close(torch.from_numpy(row), forward.hidden_states[position], rtol=1e-5, atol=1e-5)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        check_entry(entry, prompt, position, model(prompt), params.prompt_logprobs)


def check_entry(entry, text, position, forward, count):
    """One dict of Logprob: the token itself first, and the ``count`` most probable ones."""
    order = forward.order[position - 1]
    assert next(iter(entry)) == text[position]
    assert set(entry) == {text[position], *order[:count]}
    for i, found in entry.items():
        assert abs(found.logprob - forward.logprobs[position - 1][i]) < 1e-5
        assert order[found.rank - 1] == i
        assert isinstance(found.decoded_token, str)


@pytest.fixture(scope="module")
def expected(model):
    """By temperature and number, what the oracle says."""
    return {
        t: {number: [oracle(model, PROMPTS[number], params_of(number, t))] for number in range(len(PROMPTS))}
        for t in (0.0, 1.0)
    }


TEMPERATURES = [0.0, 1.0]
SMALL = {"max_num_batched_tokens": 16, "block_size": 8}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_all_parameters_are_what_the_slow_loop_says(model, expected, temperature):
    finished = run(all_params(temperature))
    assert tokens_of(finished) == expected[temperature]
    for number, output in finished.items():
        check_readings(model, number, output, params_of(number, temperature))
    lengths = {len(samples[0]) for samples in expected[temperature].values()}
    assert len(lengths) > 1, "some end at a stop"
    assert min(len(expected[temperature][number][0]) for number in (1, 4)) >= 6


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"async_scheduling": True},
        SMALL,
        SMALL | {"async_scheduling": True},
        {"enable_kv_cache": False},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"scheduler": "static", "max_num_seqs": 3},
        {"kv_cache_manager": "contiguous"},
        {"num_gpu_blocks_override": 26, "block_size": 2, "max_model_len": 52, "async_scheduling": True},
    ],
    ids=str,
)
def test_how_they_are_computed_changes_nothing(model, expected, options, temperature):
    finished = run(all_params(temperature), **options)
    assert tokens_of(finished) == expected[temperature]
    for number, output in finished.items():
        check_readings(model, number, output, params_of(number, temperature))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preemption_at_any_step_changes_nothing(model, expected, overlap):
    """F12: what is computed again after it is neither counted as prompt, nor told twice, nor lost."""
    preempted, engine = 0, make(async_scheduling=overlap, **SMALL)
    for step in range(int(overlap), 13, 2):
        finished = serve(engine, all_params(1.0), preempt=[(step, number) for number in range(len(PROMPTS))])
        assert tokens_of(finished) == expected[1.0], step
        for number, output in finished.items():
            check_readings(model, number, output, params_of(number, 1.0))
        preempted += sum(output.metrics.num_preemptions for output in finished.values())
    assert preempted > 10
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_penalised_stream_is_the_same_preempted_at_each_step_in_turn(model, overlap):
    params = SamplingParams(seed=1, temperature=1, presence_penalty=1, max_tokens=8, ignore_eos=True)
    stream, engine = [oracle(model, PROMPTS[1], params)], make(async_scheduling=overlap, **SMALL)
    for step in range(10):
        finished = serve(engine, {1: params}, preempt=[(step, 1)])
        assert tokens_of(finished)[1] == stream, step
    bare = serve(engine, {1: msgspec.structs.replace(params, presence_penalty=0)})
    assert tokens_of(bare)[1] != stream, "the penalty shows"
    engine.close()


@pytest.mark.parametrize(
    "options", [{}, {"enable_kv_cache": False}, SMALL | {"async_scheduling": True}, {"max_num_seqs": 1}]
)
def test_samples_of_one_prompt_share_what_is_read_of_it(model, options):
    finished = run({number: params_of(number, 1.0, n=3) for number in (3, 4, 5)}, **options)
    for number, output in finished.items():
        params = params_of(number, 1.0)
        assert [sample.token_ids for sample in output.outputs] == [
            oracle(model, PROMPTS[number], params, index) for index in range(3)
        ]
        check_readings(model, number, output, params)


def test_deltas_carry_what_is_new(model):
    engine = Engine(EngineArgs(model="tiny", dtype="float64", max_model_len=64))
    for number in (0, 3, 5):
        engine.add_request(str(number), PROMPTS[number], params_of(number, 1.0, output_kind="delta"))
    deltas = {number: [] for number in (0, 3, 5)}
    while engine.has_unfinished_requests():
        for output in engine.step():
            deltas[int(output.request_id)].append(output)
    engine.close()
    for number, outputs in deltas.items():
        samples = [output.outputs[0] for output in outputs]
        assert all(len(sample.logprobs) == len(sample.token_ids) <= 1 for sample in samples)
        assert [output.prompt_logprobs is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)
        positions = list(itertools.chain.from_iterable(sample.logits for sample in samples))
        assert len(positions) == len(set(positions))
        joined = msgspec.structs.replace(
            samples[-1],
            token_ids=[i for sample in samples for i in sample.token_ids],
            logprobs=[entry for sample in samples for entry in sample.logprobs],
            logits={p: row for sample in samples for p, row in sample.logits.items()},
            hidden_states={p: row for sample in samples for p, row in sample.hidden_states.items()},
        )
        check_readings(model, number, msgspec.structs.replace(outputs[0], outputs=[joined]), params_of(number, 1.0))


def test_a_fork_that_reads_its_prompt_computes_it(model):
    engine = Engine(EngineArgs(model="tiny", dtype="float64", max_model_len=64))
    engine.add_request("parent", PROMPTS[2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.fork("parent", "child", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1))
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    child = finished["child"]
    engine.close()
    assert len(child.prompt_token_ids) > len(PROMPTS[2])
    forward = model(child.prompt_token_ids)
    for position, entry in enumerate(child.prompt_logprobs[1:], start=1):
        check_entry(entry, child.prompt_token_ids, position, forward, 1)
    parent = PROMPTS[2] + finished["parent"].outputs[0].token_ids
    whole = child.prompt_token_ids + child.outputs[0].token_ids
    assert whole == parent[: len(whole)]
