"""Beam search in the engine: the hypotheses and scores of transformers, whatever the batch, the pool or the preemptions."""

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from refimpl import LLM, BeamSearchParams, Engine, EngineArgs, SamplingParams, TransformersCheckpoint
from refimpl.beam_group import BeamGroup, StopIds
from refimpl.errors import RequestError, SamplingParamsError

EOS, MAX_TOKENS = 7, 10
PROMPTS = [[11 + 7 * i + 3 * k for k in range(length)] for i, length in enumerate((5, 9, 4, 14))]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).double().eval()


def reference(model, prompt, width, **options):
    """(token ids, score) of transformers' hypotheses, best first."""
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    outputs = [ids[len(prompt) :] for ids in found.sequences.tolist()]
    ends = [ids.index(EOS) + 1 if EOS in ids else len(ids) for ids in outputs]
    return [(ids[:end], score) for ids, end, score in zip(outputs, ends, found.sequences_scores.tolist(), strict=True)]


def make_engine(model, **options):
    args = {"dtype": "float64", "max_num_seqs": 8, "block_size": 4, "num_gpu_blocks_override": 200} | options
    return Engine(EngineArgs(model=TransformersCheckpoint(model), **args))


def search(engine, prompts, width, preempt=(), **options):
    """The outputs of one search a prompt; the books are audited after each step, and all blocks come back."""
    for step, request_id, mode in preempt:
        engine.scheduler.preempt_at(step, request_id, mode)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS, **options))
    outputs = {}
    for _ in range(2000):
        if not engine.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in engine.step()}
        assert engine.audit() == []
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    return [outputs[str(number)] for number in range(len(prompts))]


def assert_found(output, wanted):
    assert [sample.token_ids for sample in output.outputs] == [ids for ids, _ in wanted]
    assert [sample.score for sample in output.outputs] == pytest.approx([score for _, score in wanted], abs=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_hypotheses_and_scores_are_those_of_transformers(model, width, overlap):
    for length_penalty, early_stopping in itertools.product((1.0, 0.0, 2.0), (False, True, "never")):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        engine = make_engine(model, async_scheduling=overlap)
        for prompt, output in zip(PROMPTS, search(engine, PROMPTS, width, **options), strict=True):
            assert_found(output, reference(model, prompt, width, **options))
            assert all(s.finish_reason == ("stop" if s.token_ids[-1] == EOS else "length") for s in output.outputs)
        engine.close()


def test_a_beam_of_one_is_greedy(model):
    engine = make_engine(model)
    [output] = search(engine, PROMPTS[:1], 1)
    engine.add_request("greedy", PROMPTS[0], SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0))
    while engine.has_unfinished_requests():
        [greedy] = engine.step()
    assert output.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert output.outputs[0].cumulative_logprob == pytest.approx(greedy.outputs[0].cumulative_logprob, abs=1e-5)
    engine.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preemption_at_any_step_changes_nothing(model, mode):
    wanted = reference(model, PROMPTS[1], 3)
    for step in range(8):
        engine = make_engine(model, swap_space=0.01, preemption_mode=mode)
        [output] = search(engine, PROMPTS[1:2], 3, preempt=[(step, "0", mode)])
        assert_found(output, wanted)
        engine.close()


@pytest.mark.parametrize("options", [{"enable_kv_cache": False}, {"kv_cache_manager": "contiguous"}, {"max_num_seqs": 3}])
def test_beams_that_cannot_share_or_find_no_slot_compute_their_own(model, options):
    engine = make_engine(model, max_model_len=40, **options)
    for prompt, output in zip(PROMPTS, search(engine, PROMPTS, 3), strict=True):
        assert_found(output, reference(model, prompt, 3))
    engine.close()


@pytest.mark.parametrize("num_blocks", [15, 17, 22])
def test_a_pool_that_is_short_of_all_beams_changes_nothing_where_one_search_fits(model, num_blocks):
    engine = make_engine(model, num_gpu_blocks_override=num_blocks)
    for prompt, output in zip(PROMPTS, search(engine, PROMPTS, 3), strict=True):
        assert_found(output, reference(model, prompt, 3))
    engine.close()


def test_a_search_that_outgrows_the_pool_ends_with_its_best_so_far_and_says_so(model):
    engine = make_engine(model, num_gpu_blocks_override=6, enable_prefix_caching=False)
    engine.add_request("other", [9, 8, 7], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    [output] = search(engine, [PROMPTS[1]], 4, ignore_eos=True)
    assert len(output.outputs) == 4
    assert {sample.finish_reason for sample in output.outputs} == {"length"}
    assert all(0 < len(sample.token_ids) < MAX_TOKENS for sample in output.outputs)
    assert "too small for the beams" in output.outputs[0].stop_reason
    scores = [sample.score for sample in output.outputs]
    assert scores == sorted(scores, reverse=True)
    engine.close()


def test_searches_and_samples_run_side_by_side(model):
    engine = make_engine(model)
    engine.add_request("sample", PROMPTS[2], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    outputs = search(engine, PROMPTS[:2], 3)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert_found(output, reference(model, prompt, 3))
    engine.close()


def test_beams_share_all_blocks_but_what_they_wrote_themselves(model):
    engine = make_engine(model, enable_prefix_caching=False)
    engine.add_request("0", PROMPTS[3], BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True))
    physical, logical = [], []
    while engine.has_unfinished_requests():
        engine.step()
        tables = engine.scheduler.snapshot().tables.values()
        logical.append(sum(map(len, tables)))
        physical.append(len(set().union(*tables)))
    assert max(logical) >= 16
    assert sum(physical) < 0.6 * sum(logical)
    engine.close()


def test_an_aborted_search_gives_everything_back(model):
    engine = make_engine(model)
    engine.add_request("0", PROMPTS[0], BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS))
    for _ in range(4):
        engine.step()
    engine.abort("0")
    assert not engine.has_unfinished_requests()
    assert engine.audit() == []
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    engine.close()


def test_llm_beam_search_returns_texts_best_first():
    with LLM("tiny") as llm:
        [one, other] = llm.beam_search(["Hello", "you"], BeamSearchParams(beam_width=3, max_tokens=6), use_tqdm=False)
        assert [len(output.outputs) for output in (one, other)] == [3, 3]
        assert [sample.index for sample in one.outputs] == [0, 1, 2]
        ids = one.outputs[0].token_ids
        assert one.outputs[0].text == llm.get_tokenizer().decode(ids)
        assert len(one.metrics.token_times[0]) == len(ids)
        assert "is admitted to slot 0" in llm.engine.explain(one.request_id)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 2.5}, "beam_width is 2.5"),
        ({"beam_width": True}, "beam_width is True"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty is nan"),
        ({"beam_width": 2, "early_stopping": "maybe"}, "early_stopping is 'maybe'"),
        ({"beam_width": 2, "stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_wrong_parameters_are_refused(wrong, told):
    with pytest.raises(SamplingParamsError, match=told):
        BeamSearchParams(**wrong)


def test_what_an_engine_cannot_search_is_refused_and_it_goes_on(model):
    engine = make_engine(model, max_num_seqs=3)
    with pytest.raises(SamplingParamsError, match="max_num_seqs = 3"):
        engine.add_request("0", PROMPTS[0], BeamSearchParams(beam_width=4))
    engine.add_request("0", PROMPTS[0], BeamSearchParams(beam_width=2))
    with pytest.raises(RequestError, match="forks by itself"):
        engine.fork("0", "1")
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    static = make_engine(model, scheduler="static")
    with pytest.raises(SamplingParamsError, match="continuous"):
        static.add_request("0", PROMPTS[0], BeamSearchParams(beam_width=2))
    static.close()


def test_one_step_of_a_search_by_hand():
    group = BeamGroup(BeamSearchParams(beam_width=2, max_tokens=3), 3, StopIds(frozenset({EOS})), 0)
    going = group.advance([[(5, -0.1), (6, -0.2), (EOS, -0.3), (8, -4.0)]])
    assert [(c.beam, c.token_id) for c in going] == [(0, 5), (0, 6)]
    assert group.finished == []  # the one that ended is not among the first two
    going = group.advance([[(EOS, -0.5), (9, -1.0)], [(9, -0.1), (5, -0.7)]])
    assert [(c.beam, c.token_id) for c in going] == [(1, 9), (1, 5)]
    assert [(h.token_ids, h.reason) for h in group.finished] == [((5, EOS), "stop")]
    assert group.finished[0].score == pytest.approx(-0.6 / 2)
