"""Drafts through the whole engine: what comes out is what comes out without them, whoever drafts, and however many."""

import numpy as np
import pytest
import torch

from refimpl import LLM, SamplingParams
from refimpl.errors import ConfigError, UnknownOptionError
from refimpl.models.tiny import tiny
from refimpl.speculative.costs import RoundCosts
from refimpl.speculative.lengths import AdaptiveLength
from refimpl.speculative.proposer import Drafts, Proposer

V = 24
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [1, 2, 3] * 5, [i % V for i in range(30)], [9] * 3]
TOKENS = 16


class Guesser(Proposer):
    """Drafts what it was told that a request will say, and mistakes at every third place."""

    name = "guesser"
    needs_token_ids = True

    def __init__(self, texts, wrong_every=3):
        self.texts, self.wrong_every = texts, wrong_every

    def propose(self, rows):
        K, drafts = rows.most, []
        for slot, length in zip(rows.slots_on_host.tolist(), rows.lengths.tolist(), strict=True):
            known = rows.token_ids[slot, :length].tolist()
            text = next((text for text in self.texts if text[:length] == known), known)
            ahead = (text[length : length + K] + [0] * K)[:K]
            drafts.append([(t + 1) % V if self.wrong_every and (length + i) % self.wrong_every == 0 else t
                           for i, t in enumerate(ahead)])  # fmt: skip
        return Drafts(torch.tensor(drafts), torch.from_numpy(rows.planned))


def engine(speculative, **options):
    defaults = {"dtype": "float64", "block_size": 4, "max_model_len": 96, "num_gpu_blocks_override": 80}
    return LLM(tiny(vocab_size=V), speculative_config=speculative, **defaults | options)


def generate(llm, params=None, prompts=PROMPTS, **one_for_all):
    params = params or [
        SamplingParams(**{"max_tokens": TOKENS, "seed": i, "ignore_eos": True, "temperature": 0, **one_for_all})
        for i in range(len(prompts))
    ]
    outputs = run(llm, prompts, params)
    scheduler = llm.engine.scheduler
    assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def run(llm, prompts, params):
    """All requests, named 0, 1, …; the books are right after each step."""
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add_request(str(i), prompt, one)
    found = {}
    while llm.engine.has_unfinished_requests():
        found |= {output.request_id: output for output in llm.engine.step()}
        assert llm.engine.audit() == []
    return [found[str(i)] for i in range(len(prompts))]


def drafts_of(llm):
    """(drafted, accepted) over the engine's life."""
    records = llm.engine.events.records
    return sum(len(d) for r in records for d in r.drafts), sum(sum(r.num_accepted) for r in records)


@pytest.fixture(scope="module")
def plain():
    """What comes without drafts, greedy, and with T = 0.8."""
    with engine(None) as llm:
        return {0: generate(llm), 0.8: generate(llm, temperature=0.8)}


def draft_model(K=3, **more):
    return {"method": "draft_model", "model": tiny(vocab_size=V), "num_speculative_tokens": K, "adaptive": False, **more}


def other_model(K=5, **more):
    small = tiny(vocab_size=V, seed=3, num_hidden_layers=1)
    return {"method": "draft_model", "model": small, "num_speculative_tokens": K, "adaptive": False, **more}


def ngram(K=4, **more):
    return {"method": "ngram", "num_speculative_tokens": K, "adaptive": False, "prompt_lookup_min": 1, **more}


KINDS = {"ngram": ngram, "draft = target": draft_model, "another draft": other_model}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [1, 2, 5])
def test_greedy_tokens_are_those_without_drafts(plain, kind, K, overlap):
    with engine(KINDS[kind](K), async_scheduling=overlap) as llm:
        assert generate(llm) == plain[0]
        assert generate(llm) == plain[0], "with the prompts found in the prefix cache"
        assert drafts_of(llm)[0] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_tokens_are_the_same_where_the_pool_is_too_small(plain, kind, overlap):
    with engine(KINDS[kind](3), num_gpu_blocks_override=24, async_scheduling=overlap, watermark=0) as llm:
        assert generate(llm) == plain[0]
        assert any(record.preempted for record in llm.engine.events.records)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_tokens_are_the_same_when_preempted_at_any_step(plain, mode, overlap):
    options = {"swap_space": 0.001, "preemption_mode": mode} if mode == "swap" else {}
    with engine(draft_model(2), async_scheduling=overlap, **options) as llm:
        for step in range(3, 12):
            llm.engine.scheduler.preempt_at(step, str(step % 4), mode)
        assert generate(llm) == plain[0]
        assert sum(len(record.preempted) for record in llm.engine.events.records) >= 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_sequence_that_is_computed_again_a_token_at_a_time_has_no_drafts_until_it_draws(plain, kind, overlap):
    options = {"long_prefill_token_threshold": 1, "enable_prefix_caching": False, "async_scheduling": overlap}
    with engine(KINDS[kind](2), **options) as llm:
        llm.engine.scheduler.preempt_at(33, "2")
        assert generate(llm) == plain[0]
        assert sum(len(record.preempted) for record in llm.engine.events.records) == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [draft_model, other_model])
def test_coupled_tokens_are_those_without_drafts_at_any_temperature(plain, kind, overlap):
    with engine(kind(3, sampler="coupled"), async_scheduling=overlap) as llm:
        assert generate(llm, temperature=0.8) == plain[0.8]
        assert generate(llm) == plain[0]


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
def test_a_draft_that_is_the_target_is_always_accepted(K, temperature):
    with engine(draft_model(K)) as llm:
        generate(llm, temperature=temperature, max_tokens=60, prompts=PROMPTS[:2])
        drafted, accepted = drafts_of(llm)
        assert drafted == accepted > 50


def test_the_draft_cache_has_no_gap():
    """Every key of the draft model, where it is the target, equals the target's."""
    with engine(draft_model(3), enable_prefix_caching=False) as llm:
        proposer = llm.engine.executor.runner.speculation.proposer
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS):
            llm.engine.add_request(str(i), prompt, params)
        compared = 0
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            for sequence in llm.engine.scheduler.running:
                lag = int(proposer.lag[sequence.slot])
                have = len(sequence.token_ids) - lag
                assert lag <= 2 or have <= 0, "caught up with in every round"
                table = list(llm.engine.scheduler.kv.table(sequence.sequence_id))
                cache = llm.engine.executor.kv_cache
                ours, theirs = cache.read(1, table), proposer.kv_cache.read(1, table)
                if have > 0:
                    for one, other in ((ours.k, theirs.k), (ours.v, theirs.v)):
                        torch.testing.assert_close(one.flatten(0, 1)[:have], other.flatten(0, 1)[:have], rtol=0, atol=1e-9)
                    compared += 1
        assert compared > 20


def test_drafts_that_are_half_right_are_accepted_up_to_the_first_mistake(plain):
    texts = [prompt + tokens for prompt, [tokens] in zip(PROMPTS, plain[0], strict=True)]
    with engine({"method": Guesser(texts), "num_speculative_tokens": 5, "adaptive": False}) as llm:
        assert generate(llm) == plain[0]
        drafted, accepted = drafts_of(llm)
        assert 0.3 < accepted / drafted < 0.7
        assert len([record for record in llm.engine.events.records if record.sequence_ids]) < TOKENS / 1.8


ASKS = {
    "stop token": {"stop_token_ids": [7, 11], "max_tokens": 30},
    "stop string": {"stop": ["k", "g h"], "max_tokens": 30},
    "length": {"max_tokens": 7},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "temperature": 0.9},
    "bad words": {"bad_words": ["a", "b c"], "temperature": 0.9},
    "min_tokens": {"stop_token_ids": list(range(12)), "min_tokens": 9, "temperature": 1.0},
    "logit_bias": {"logit_bias": {3: 4.0, 5: -100.0}},
    "filters": {"temperature": 1.2, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "samples": {"n": 3, "temperature": 1.0},
    "allowed": {"allowed_token_ids": [1, 2, 3, 4, 5], "temperature": 1.0},
    "tiny temperature": {"temperature": 1e-5},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("asked", ASKS)
def test_what_a_request_asks_for_holds_inside_an_accepted_run(asked, overlap):
    """A guesser that is mostly right, and coupled: the same tokens, reasons and log-probabilities as without drafts."""

    def told(llm):
        params = [
            SamplingParams(**{"max_tokens": TOKENS, "temperature": 0, "seed": i, "logprobs": 2} | ASKS[asked])
            for i in range(4)
        ]
        outputs = run(llm, PROMPTS, params)
        return [
            (s.token_ids, s.text, s.finish_reason, s.stop_reason, [sorted(one) for one in s.logprobs], s.cumulative_logprob)
            for output in outputs
            for s in output.outputs
        ]

    with engine(None) as llm:
        wanted = told(llm)
    texts = [PROMPTS[i // (len(wanted) // 4)] + one[0] for i, one in enumerate(wanted)]
    guesser = Guesser([*texts, *([*text, 3, 4, 5, 6, 7] for text in texts)], wrong_every=4)
    with engine({"method": guesser, "num_speculative_tokens": 4, "adaptive": False}, async_scheduling=overlap) as llm:
        got = told(llm)
        assert drafts_of(llm)[1] > 0
    for one, other in zip(got, wanted, strict=True):
        assert one[:5] == other[:5]
        assert one[5] == pytest.approx(other[5], abs=1e-9)


def test_a_stop_token_in_an_accepted_run_ends_it_there():
    """Accepted [a, STOP, b, c]: out come [a, STOP]; and a stop beyond the limit gives length (F24)."""
    with engine(None) as llm:
        [[tokens]] = generate(llm, prompts=[PROMPTS[1]], max_tokens=12)
    stop = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    place = tokens.index(stop)
    speculative = {"method": Guesser([PROMPTS[1] + tokens], 0), "num_speculative_tokens": 6, "adaptive": False}
    with engine(speculative) as llm:
        for most, reason in ((12, "stop"), (place, "length"), (place + 1, "stop")):
            params = SamplingParams(max_tokens=most, temperature=0, stop_token_ids=[stop])
            [output] = run(llm, [PROMPTS[1]], [params])
            assert output.outputs[0].token_ids == tokens[: min(most, place + 1)]
            assert output.outputs[0].finish_reason == reason


@pytest.mark.parametrize("overlap", [False, True])
def test_slots_are_taken_by_position_where_the_last_block_is_nearly_full(plain, overlap):
    """Blocks of 4, a length of 3 modulo 4, K = 4, and a table with gaps (F25).

    With overlap steps are planned that have no rows, since all drafts of the last one might be accepted.
    """
    options = {"block_allocator": "lowest_first", "enable_prefix_caching": False, "async_scheduling": overlap}
    with engine(other_model(4), **options) as llm:
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS):
            llm.engine.add_request(f"short {i}", [1] * 6, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
            llm.engine.add_request(str(i), prompt, params)
        found = {}
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                found[output.request_id] = output.outputs[0].token_ids
        assert [[found[str(i)]] for i in range(4)] == plain[0]
        assert any(record.returned for record in llm.engine.events.records), "slots of refused drafts went back"


class Broken(Proposer):
    name = "broken"

    def __init__(self, how):
        self.how = how

    def propose(self, rows):
        S, K = len(rows.planned), rows.most
        if self.how == "raises":
            raise ZeroDivisionError("no")
        if self.how == "ids outside":
            return Drafts(torch.full((S, K), 10**6), torch.full((S,), K))
        if self.how == "negative":
            return Drafts(torch.full((S, K), -5), torch.full((S,), K))
        if self.how == "too many":
            return Drafts(torch.zeros(S, K + 3, dtype=torch.int64), torch.full((S,), K + 3))
        if self.how == "NaN law":
            return Drafts(torch.zeros(S, K, dtype=torch.int64), torch.full((S,), K), torch.full((S, K, V), torch.nan))
        return Drafts(torch.zeros(S, 0, dtype=torch.int64), torch.zeros(S, dtype=torch.int64))


@pytest.mark.parametrize("how", ["raises", "ids outside", "negative", "too many", "NaN law", "nothing"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_broken_proposer_changes_no_token(plain, how, overlap):
    speculative = {"method": Broken(how), "num_speculative_tokens": 3, "adaptive": False}
    with engine(speculative, async_scheduling=overlap) as llm:
        assert generate(llm) == plain[0]
        if how == "raises":
            assert (
                "goes on without drafted tokens: the proposer broken failed: ZeroDivisionError('no')"
                in llm.engine.explain("0")
            )


def test_a_draft_model_of_a_shorter_context_stops_drafting_and_says_so():
    short = tiny(vocab_size=V, max_position_embeddings=32)
    with engine(None) as llm:
        wanted = generate(llm, max_tokens=50, prompts=PROMPTS[:1])
    with engine(draft_model(3, model=short)) as llm:
        assert generate(llm, max_tokens=50, prompts=PROMPTS[:1]) == wanted
        assert "reads at most 32 tokens" in llm.engine.explain("0")


def test_requests_that_read_logits_have_no_drafts():
    with engine(draft_model(3)) as llm:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, return_logits=[8, 9])
        [output] = run(llm, [PROMPTS[0]], [params])
        assert sorted(output.outputs[0].logits) == [8, 9]
        assert np.argmax(output.outputs[0].logits[8]) == output.outputs[0].token_ids[9 - 7]
        assert drafts_of(llm) == (0, 0)


def test_the_number_adapts_to_what_is_accepted():
    with engine({"method": "draft_model", "model": tiny(vocab_size=V), "num_speculative_tokens": 8}) as llm:
        costs = RoundCosts({1: 1.0}, {2: 1.0, 9: 1.0}, {1: dict.fromkeys((1, 2, 3, 5, 8), 0.5)})
        length = llm.engine.scheduler.drafting.length = AdaptiveLength(8, costs)
        generate(llm, max_tokens=60)
        assert length.choose(1) == (8, 1), "everything is accepted, and costs half a step"
        for _ in range(100):
            length.observe(length.choose(1)[0], 0)
        assert length.choose(1) == (0, 0), "nothing is"


class Sparing(Guesser):
    """Drafts right, and fewer than it may: ``most`` for the first row, none for the others."""

    def __init__(self, texts, most):
        super().__init__(texts, wrong_every=0)
        self.most = most

    def propose(self, rows):
        drafts = super().propose(rows)
        num = torch.zeros_like(drafts.num)
        num[0] = min(self.most, int(drafts.num[0]))
        return Drafts(drafts.token_ids, num)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_fewer_drafts_than_planned_are_checked_alone(plain, most):
    """All rows have fewer than the table of drafts is wide."""
    texts = [prompt + tokens for prompt, [tokens] in zip(PROMPTS, plain[0], strict=True)]
    with engine({"method": Sparing(texts, most), "num_speculative_tokens": 4, "adaptive": False}) as llm:
        assert generate(llm) == plain[0]
        drafted, accepted = drafts_of(llm)
        assert drafted == accepted
        assert (drafted > 0) == (most > 0)


BAD = {
    "method": {"method": "magic"},
    "num_speculative_tokens": {"method": "ngram", "num_speculative_tokens": 0},
    "it must be a whole number, 1 to 15": {"method": "ngram", "num_speculative_tokens": 99},
    "needs model": {"method": "draft_model"},
    "prompt_lookup_min is 7": {"method": "ngram", "prompt_lookup_min": 7, "prompt_lookup_max": 3},
    "sampler is 'x'": {"method": "ngram", "sampler": "x"},
    "synthetic_acceptance": {"method": "ngram", "synthetic_acceptance": 1.5},
    "adaptive": {"method": "ngram", "adaptive": 1},
    "must be a dict": 5,
    "no JSON": "{method",
    "drafts must be of the same vocabulary": {"method": "draft_model", "model": tiny(vocab_size=30)},
}


@pytest.mark.parametrize("said", BAD)
def test_bad_options_are_refused_with_what_is_allowed(said):
    with pytest.raises(ConfigError, match=said):
        engine(BAD[said])


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownOptionError, match="num_speculative_tokens"):
        engine({"method": "ngram", "num_speculativ_tokens": 3})


@pytest.mark.parametrize("options", [{"scheduler": "static"}, {"enable_kv_cache": False}])
def test_baselines_have_no_drafts(options):
    with pytest.raises(ConfigError, match="speculative_config is for the continuous scheduler"):
        engine(ngram(), **options)
