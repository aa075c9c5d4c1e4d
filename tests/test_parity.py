"""The embedded model against transformers on the same weights, token by token, in float32 on the CPU."""

import json
from importlib.resources import files

import pytest
import torch

from refimpl import LLM, BeamSearchParams, SamplingParams
from refimpl.beam_group import BeamGroup, StopIds

pytestmark = pytest.mark.timeout(900)  # under half a minute each alone; the machine may be shared
NEW_TOKENS = 64
MARGIN = 1e-3
"""Where transformers' two largest logits are closer than this, rounding decides which is the argmax: a tie."""
TIES_ALLOWED = 1
PAD = 0
"""<|endoftext|>, behind what generate() finished; none of the outputs has it."""


def workload():
    lines = files("refimpl").joinpath("bench/workloads/parity-20.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def reference(smollm2):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def outputs():
    """All 20 prompts in one batch: chunked prefills beside decodes, ragged lengths, greedy, 64 tokens each."""
    with LLM(dtype="float32", num_gpu_blocks_override=400, max_num_batched_tokens=512, max_num_seqs=20) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer.apply_chat_template(item["messages"]) if "messages" in item else tokenizer.encode(item["prompt"])
            for item in workload()
        ]
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        result = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.audit() == []
    return {item["name"]: output for item, output in zip(workload(), result, strict=True)}


def test_the_workload_is_varied():
    items = workload()
    assert len(items) == 20 == len({item["name"] for item in items})
    assert sum("messages" in item for item in items) >= 5
    assert any(not item.get("prompt", "").isascii() for item in items)


def test_greedy_tokens_equal_those_of_transformers(reference, outputs):
    """Each of our tokens is transformers' argmax after the same prefix; so greedy decoding there gives the same text."""
    ties = []
    assert len(outputs["raw-long"].prompt_token_ids) >= 1500
    for name, output in outputs.items():
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(generated) == NEW_TOKENS
        with torch.inference_mode():
            ids = torch.tensor([prompt + generated[:-1]])
            logits = reference(ids, logits_to_keep=NEW_TOKENS).logits[0]
        for position, (row, ours) in enumerate(zip(logits, generated, strict=True)):
            best, second = row.topk(2).values.tolist()
            if int(row.argmax()) != ours:
                assert best - second < MARGIN, f"{name}, token {position}: {ours}, transformers {int(row.argmax())}"
                ties.append((name, position, best - second))
                break
    assert len(ties) <= TIES_ALLOWED, ties


@pytest.mark.parametrize("name", ["chat-count", "raw-chinese", "code-python"])
def test_generate_gives_the_same_ids_and_text(reference, outputs, smollm2, name):
    """Against transformers' own generate(), stop and all."""
    from transformers import AutoTokenizer

    prompt = outputs[name].prompt_token_ids
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(prompt) :]
    with LLM(dtype="float32", num_gpu_blocks_override=32) as llm:
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=NEW_TOKENS), use_tqdm=False)
    assert output.outputs[0].token_ids == expected.tolist()
    text = AutoTokenizer.from_pretrained(smollm2).decode(expected, skip_special_tokens=True)
    assert output.outputs[0].text == text


def test_the_logits_agree_to_a_thousandth(reference, smollm2):
    """Not only the argmax: the whole distribution, at every position of a prompt."""
    from tests_support import full_logits

    from refimpl.loading.checkpoint import load_model, open_checkpoint

    model = load_model(open_checkpoint("smollm2"), "auto", torch.float32, torch.device("cpu"), seed=0)
    ids = list(range(1000, 1100))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
        ours = full_logits(model, ids)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


BEAM_TOKENS = 16


@pytest.fixture(scope="module")
def short_prompts(outputs):
    """The ten shortest, as (name, token ids)."""
    prompts = [(name, output.prompt_token_ids) for name, output in outputs.items()]
    return sorted(prompts, key=lambda item: len(item[1]))[:10]


@pytest.fixture(scope="module")
def searched(short_prompts):
    """Searches in the engine: by width and stop strings, the hypotheses of each prompt as (token ids, score), best first."""
    with LLM(dtype="float32", num_gpu_blocks_override=400, max_num_seqs=40, max_num_batched_tokens=512) as llm:

        def search(width, stop=()):
            params = BeamSearchParams(beam_width=width, max_tokens=BEAM_TOKENS, stop=stop)
            found = llm.beam_search([prompt for _, prompt in short_prompts], params, use_tqdm=False)
            assert llm.engine.audit() == []
            return [[(sample.token_ids, sample.score) for sample in output.outputs] for output in found]

        yield search


def beams_of_transformers(model, prompts, width, **options):
    """The same from generate(), all prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=mask,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=BEAM_TOKENS,
            do_sample=False,
            pad_token_id=PAD,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    rows = [[token for token in row[longest:] if token != PAD] for row in found.sequences.tolist()]
    pairs = list(zip(rows, found.sequences_scores.tolist(), strict=True))
    return [pairs[i : i + width] for i in range(0, len(pairs), width)]


def smallest_margin(model, prompt, width):
    """The closest that two continuations came in a search whose log-probabilities are transformers'."""
    eos = model.generation_config.eos_token_id
    stop_ids = frozenset(eos if isinstance(eos, list) else [eos])
    group = BeamGroup(BeamSearchParams(beam_width=width, max_tokens=BEAM_TOKENS), BEAM_TOKENS, StopIds(stop_ids), 0)
    texts, sums, smallest = [list(prompt)], torch.zeros(1), float("inf")
    while texts:
        with torch.inference_mode():
            logprobs = model(torch.tensor(texts), logits_to_keep=1).logits[:, 0].log_softmax(-1)
        best = (logprobs + sums[:, None]).flatten().topk(group.num_candidates + 1).values
        smallest = min(smallest, float((best[:-1] - best[1:]).min()))
        top = logprobs.topk(group.num_candidates)
        going = group.advance(
            [list(zip(*row, strict=True)) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        )
        texts, sums = [[*texts[c.beam], c.token_id] for c in going], torch.tensor([c.logprob for c in going])
    return smallest


def test_beam_search_finds_the_hypotheses_and_scores_of_transformers(reference, searched, short_prompts, outputs):
    """Rounding may decide between continuations that are a thousandth apart, and then finds others from there on."""
    ties, unlike_greedy = [], 0
    for width in (2, 4):
        theirs = beams_of_transformers(reference, [prompt for _, prompt in short_prompts], width)
        for (name, prompt), ours, expected in zip(short_prompts, searched(width), theirs, strict=True):
            if [ids for ids, _ in ours] != [ids for ids, _ in expected]:
                ties.append((name, width))
                assert smallest_margin(reference, prompt, width) < MARGIN, f"{name}, {width} beams: {ours}, {expected}"
                continue
            assert [score for _, score in ours] == pytest.approx([score for _, score in expected], abs=MARGIN)
            best = ours[0][0]
            unlike_greedy += width == 4 and best != outputs[name].outputs[0].token_ids[: len(best)]
    assert len(ties) <= TIES_ALLOWED, ties
    assert unlike_greedy >= 7


def test_beams_end_with_stop_strings_where_those_of_transformers_do(reference, searched, short_prompts, smollm2):
    from transformers import AutoTokenizer

    decode, stop = AutoTokenizer.from_pretrained(smollm2).decode, (".", ", and")
    longest = max(len(prompt) for _, prompt in short_prompts)

    def stopped(ids):
        return any(text in decode(ids) for text in stop)

    def criterion(rows, _, **__):
        return torch.tensor([stopped(row[longest:]) for row in rows.tolist()])

    def cut(ids):
        """Behind what is finished, generate() puts the end-of-sequence token."""
        return next((ids[:end] for end in range(1, len(ids)) if stopped(ids[:end])), ids)

    theirs = beams_of_transformers(reference, [prompt for _, prompt in short_prompts], 2, stopping_criteria=[criterion])
    ours = searched(2, stop)
    same = sum([ids for ids, _ in a] == [cut(ids) for ids, _ in b] for a, b in zip(ours, theirs, strict=True))
    assert same >= len(ours) - TIES_ALLOWED
    assert sum(len(ids) < BEAM_TOKENS for beams in ours for ids, _ in beams) >= 5
