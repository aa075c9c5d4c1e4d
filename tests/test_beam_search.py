"""Beam search in the engine: the hypotheses and scores of transformers, whatever the batch, the pool or the preemptions."""

import itertools

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from refimpl import LLM, BeamSearchParams, Engine, EngineArgs, SamplingParams, TransformersCheckpoint
from refimpl.beam_group import BeamGroup, StopIds
from refimpl.errors import RequestError, SamplingParamsError
from refimpl.scheduler import Scheduler
from refimpl.tokenizer.tokenizer import stand_in_tokenizer

EOS, MAX_TOKENS = 7, 10
FOUND = {}
TOKENIZER = stand_in_tokenizer(300)
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


def reference(model, prompt, width, stop=(), **options):
    """(token ids, score) of transformers' hypotheses, best first; found once."""
    key = (id(model), tuple(prompt), width, stop, *sorted(options.items()))
    if key not in FOUND:
        FOUND[key] = _reference(model, prompt, width, stop, **options)
    return FOUND[key]


def _reference(model, prompt, width, stop, **options):
    def holds_stop(ids):
        return any(text in TOKENIZER.decode(ids) for text in stop)

    def criterion(rows, _, **__):
        return torch.tensor([holds_stop(row[len(prompt) :]) for row in rows.tolist()])

    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        stopping_criteria=[criterion] if stop else [],
        **options,
    )
    outputs = [ids[len(prompt) :] for ids in found.sequences.tolist()]
    ends = [
        next((end for end in range(1, len(ids)) if ids[end - 1] == EOS or holds_stop(ids[:end])), len(ids))
        for ids in outputs
    ]
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
    engine = make_engine(model, async_scheduling=overlap)
    for length_penalty, early_stopping in itertools.product((1.0, 0.0, 2.0), (False, True, "never")):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        for prompt, output in zip(PROMPTS, search(engine, PROMPTS, width, **options), strict=True):
            assert_found(output, reference(model, prompt, width, **options))
            assert all(s.finish_reason == ("stop" if s.token_ids[-1] == EOS else "length") for s in output.outputs)
    engine.close()


def test_a_beam_of_one_is_greedy(model):
    engine = make_engine(model)
    most = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)
    for options in ({}, {"stop": (">\x1e",)}, {"stop_token_ids": (30,)}):
        [output] = search(engine, PROMPTS[:1], 1, early_stopping=True, **options)
        engine.add_request("greedy", PROMPTS[0], msgspec.structs.replace(most, **options))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        [found], [drawn] = output.outputs, outputs[0].outputs
        assert (found.token_ids, found.text) == (drawn.token_ids, drawn.text)
        assert (found.finish_reason, found.stop_reason) == (drawn.finish_reason, drawn.stop_reason)
        assert found.cumulative_logprob == pytest.approx(drawn.cumulative_logprob, abs=1e-5)
        assert (found.finish_reason == "stop") == bool(options)
    engine.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preemption_at_any_step_changes_nothing(model, mode):
    wanted = reference(model, PROMPTS[1], 3)
    for step in range(8):
        engine = make_engine(model, swap_space=0.01, preemption_mode=mode)
        [output] = search(engine, PROMPTS[1:2], 3, preempt=[(step, "0", mode)])
        assert_found(output, wanted)
        engine.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_search_that_is_preempted_again_and_again_is_the_undisturbed_one(model, mode, overlap):
    engine = make_engine(model, swap_space=0.01, preemption_mode=mode, async_scheduling=overlap)
    [output] = search(engine, PROMPTS[3:], 3, preempt=[(step, "0", mode) for step in range(200)])
    assert_found(output, reference(model, PROMPTS[3], 3))
    assert output.metrics.num_preemptions >= 3 * (MAX_TOKENS - 2)
    moved = sum(len(record.swapped_in) for record in engine.events.records)
    assert (moved > 0) == (mode == "swap")
    engine.close()


def with_a_swapped_sample(model, num_blocks, max_tokens, preempt, overlap):
    """A search in a pool in which nothing is left but what a swapped sample of another request holds; and that one."""
    options = {"async_scheduling": overlap, "swap_space": 0.01, "preemption_mode": "swap", "enable_prefix_caching": False}
    engine = make_engine(model, num_gpu_blocks_override=num_blocks, **options)
    for step, mode in preempt:
        engine.scheduler.preempt_at(step, "0", mode)
    engine.add_request("0", PROMPTS[1], BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS))
    engine.add_request("pair", PROMPTS[3], SamplingParams(n=2, seed=1, max_tokens=max_tokens, ignore_eos=True))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        assert engine.audit() == []
    dropped = [d for record in engine.events.records for d in record.decisions if d.kind == "dropped_swap"]
    engine.close()
    return outputs["0"], [sample.token_ids for sample in outputs["pair"].outputs], dropped


@pytest.mark.parametrize(
    ("overlap", "num_blocks", "max_tokens", "preempt"),
    [
        pytest.param(False, 10, 4, [], id="a beam needs one more block"),
        pytest.param(False, 12, 5, [(5, "recompute")], id="a beam that comes back finds no room"),
        pytest.param(True, 10, 5, [], id="a beam needs one more block, with overlap"),
        pytest.param(True, 11, 5, [(5, "recompute")], id="a beam that comes back finds no room, with overlap"),
    ],
)
def test_a_search_takes_what_swapped_sequences_hold_before_it_gives_up(
    model, monkeypatch, overlap, num_blocks, max_tokens, preempt
):
    _, undisturbed, none = with_a_swapped_sample(model, 200, max_tokens, [], overlap)
    assert none == []
    output, pair, dropped = with_a_swapped_sample(model, num_blocks, max_tokens, preempt, overlap)
    assert_found(output, reference(model, PROMPTS[1], 3))
    assert len(dropped) == 1
    assert pair == undisturbed
    monkeypatch.setattr(Scheduler, "_drop_held", lambda *_, **__: False)
    output, pair, _ = with_a_swapped_sample(model, num_blocks, max_tokens, preempt, overlap)
    assert "too small for the beams" in output.outputs[0].stop_reason, "nothing else was left"
    assert pair == undisturbed


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


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("num_blocks", "older"), [(8, 13), (9, 17), (10, 3)])
def test_beams_that_gave_way_with_tokens_in_flight_wait_for_no_beam_behind_them(model, num_blocks, older, mode):
    """An older request takes their blocks while some have proposed what comes next, and others have not."""
    options = {"swap_space": 0.001, "preemption_mode": mode} if mode == "swap" else {}
    engine = make_engine(
        model,
        num_gpu_blocks_override=num_blocks,
        block_size=4,
        max_model_len=4 * num_blocks,
        watermark=0,
        async_scheduling=True,
        **options,
    )
    engine.add_request("older", [1] * older, SamplingParams(max_tokens=16, ignore_eos=True, n=2))
    engine.step()
    engine.add_request("search", PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS))
    for _ in range(300):
        outputs = {output.request_id: output for output in engine.step() if output.finished}
        assert engine.audit() == []
        if "search" in outputs:
            break
    assert_found(outputs["search"], reference(model, PROMPTS[0], 3))
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


STOPS = [("5", "Z"), ("\x1a", "k", "7"), ("[\x7f", "QP", "\x08"), ("\x1aq", "}", "\u05b2"), ("[", "Z", "5", "\x1a")]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hypothesis_ends_with_the_token_that_completes_a_stop_string(model, overlap):
    engine = make_engine(model, async_scheduling=overlap)
    stopped = []
    for stop, early_stopping in zip(STOPS, itertools.cycle((False, True))):
        outputs = search(engine, PROMPTS, 3, stop=stop, early_stopping=early_stopping)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert_found(output, reference(model, prompt, 3, stop, early_stopping=early_stopping))
            for sample in output.outputs:
                whole = TOKENIZER.decode(sample.token_ids)
                found = [text for text in stop if text in whole]
                first = min(found, key=lambda text, whole=whole: whole.find(text) + len(text), default=None)
                if first is not None:
                    assert (sample.finish_reason, sample.stop_reason) == ("stop", first)
                    assert sample.text == whole.partition(first)[0]
                    stopped.append(first)
                else:
                    assert sample.stop_reason is None
    assert len(stopped) >= 15
    assert len(set(stopped)) >= 4
    engine.close()


def test_a_stop_string_or_the_text_of_a_stop_id_is_kept_where_that_is_asked_for(model):
    engine = make_engine(model)
    for stop in ({"stop": "Z"}, {"stop_token_ids": [ord("Z")]}):
        [cut] = search(engine, PROMPTS[2:3], 2, early_stopping=True, **stop)
        [kept] = search(engine, PROMPTS[2:3], 2, early_stopping=True, include_stop_str_in_output=True, **stop)
        assert any(sample.finish_reason == "stop" for sample in cut.outputs)
        for sample, longer in zip(cut.outputs, kept.outputs, strict=True):
            stopped = sample.finish_reason == "stop"
            assert sample.token_ids == longer.token_ids
            assert longer.text == sample.text + "Z" * stopped
            reason = ("Z" if "stop" in stop else ord("Z")) if stopped else None
            assert sample.stop_reason == longer.stop_reason == reason
    engine.close()


def test_a_search_ends_where_all_that_it_looks_at_ends(model):
    """Every character is a stop string: each beam is finished with its first whole character."""
    engine = make_engine(model)
    [output] = search(engine, PROMPTS[2:3], 2, stop=[chr(code) for code in range(1, 0x800)] + ["\ufffd"])
    assert [sample.text for sample in output.outputs] == ["", ""]
    assert max(len(sample.token_ids) for sample in output.outputs) <= 4
    assert {sample.finish_reason for sample in output.outputs} == {"stop"}
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
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping is 1"),
        ({"beam_width": 2, "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"beam_width": 2, "stop": ["a", ""]}, r"stop is \['a', ''\]; it must be a text or a list of texts"),
        ({"beam_width": 2, "stop": 3}, "stop is 3"),
        ({"beam_width": 2, "stops": "a"}, "unknown sampling parameter 'stops'; did you mean stop"),
        ({"max_tokens": 2}, "BeamSearchParams needs beam_width"),
    ],
)
def test_wrong_parameters_are_refused(wrong, told):
    with pytest.raises(SamplingParamsError, match=told):
        BeamSearchParams(**wrong)


def test_what_an_engine_cannot_search_is_refused_and_it_goes_on(model):
    engine = make_engine(model, max_num_seqs=3)
    with pytest.raises(SamplingParamsError, match="max_num_seqs = 3"):
        engine.add_request("0", PROMPTS[0], BeamSearchParams(beam_width=4, stop="Z"))
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


def test_where_stop_strings_leave_fewer_beams_fewer_go_on_and_become_more_again():
    class EndsWith(StopIds):
        def ends(self, continuation):
            return super().ends(continuation) or continuation.token_id in (5, 6, 8)

    group = BeamGroup(BeamSearchParams(beam_width=2, max_tokens=9), 9, EndsWith(frozenset()), 0)
    going = group.advance([[(5, -0.1), (9, -0.2), (6, -0.3), (8, -0.4)]])
    assert [(c.beam, c.token_id) for c in going] == [(0, 9)]
    assert [h.token_ids for h in group.finished] == [(5,)]
    going = group.advance([[(1, -0.01), (2, -0.02), (3, -9.0), (4, -9.5)]])
    assert [(c.beam, c.token_id) for c in going] == [(0, 1), (0, 2)]
    going = group.advance([[(5, -0.01), (6, -0.02), (8, -5.0), (7, -6.0)], [(8, -0.03), (5, -0.04), (1, -7.0), (2, -8.0)]])
    assert going == []
    assert group.done
    assert [h.token_ids for h in group.finished] == [(9, 1, 5), (9, 1, 6)]
