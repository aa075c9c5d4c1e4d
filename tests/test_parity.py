"""The embedded model against transformers on the same weights, token by token, in float32 on the CPU."""

import json
from importlib.resources import files

import pytest
import torch

from refimpl import LLM, SamplingParams

NEW_TOKENS = 64
MARGIN = 1e-3
"""Where transformers' two largest logits are closer than this, rounding decides which is the argmax: a tie."""
TIES_ALLOWED = 1


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
