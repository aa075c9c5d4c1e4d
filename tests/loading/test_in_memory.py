"""A transformers model in memory runs in the engine, without a detour through files."""

import pytest
import torch
from checkpoint_files import PROMPT, random_llama, their_logits
from llama3_layout import EOS, write_llama3

from refimpl import LLM, SamplingParams, TransformersCheckpoint
from refimpl.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from refimpl.loading.checkpoint import Checkpoint
from refimpl.loading.folder import FolderCheckpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_it_generates_what_transformers_generates(options):
    model = random_llama(**options)
    checkpoint = TransformersCheckpoint(model)
    assert isinstance(checkpoint, Checkpoint)
    with LLM(checkpoint, dtype="float32", num_gpu_blocks_override=8) as llm:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        generated = output.outputs[0].token_ids
        with torch.no_grad():
            model.model.norm.weight.zero_()  # the engine has a copy
        [again] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == generated
    reference = random_llama(**options)
    assert generated == their_logits(reference, PROMPT + generated[:-1])[len(PROMPT) - 1 :].argmax(-1).tolist()


def test_tokenizer_chat_template_and_ends_come_along(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_llama3(tmp_path / "m", "3.1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
    tokenizer.backend_tokenizer.enable_truncation(5)
    ours, folder = TransformersCheckpoint(model, tokenizer, name="mine"), FolderCheckpoint(tmp_path / "m")
    assert sorted(ours.config.eos_token_ids) == EOS["3.1"]
    assert (ours.name, ours.config.rope) == ("mine", folder.config.rope)
    assert ours.config.context_limit() == folder.config.context_limit()
    chat = [{"role": "user", "content": "Hello, who are you?"}]
    assert ours.tokenizer().apply_chat_template(chat) == folder.tokenizer().apply_chat_template(chat)
    assert ours.tokenizer().encode("one two three four five six") == folder.tokenizer().encode("one two three four five six")
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 5  # theirs is as it was


def test_fingerprints_tell_weights_apart():
    model = random_llama()
    before = TransformersCheckpoint(model).fingerprint()
    assert before == TransformersCheckpoint(random_llama()).fingerprint()
    with torch.no_grad():
        model.model.norm.weight[0] = 9
    assert TransformersCheckpoint(model).fingerprint() != before


def test_weights_that_are_elsewhere_are_refused():
    model = random_llama()
    model.model.layers[1].to("meta")
    with pytest.raises(
        ModelNotFoundError, match=r"9 tensors of the LlamaForCausalLM are not in memory \(model\.layers\.1\."
    ):
        TransformersCheckpoint(model)


def test_a_bare_model_is_refused_with_what_to_give_instead():
    with pytest.raises(ModelNotFoundError, match=r"give a transformers model as TransformersCheckpoint\(model\)"):
        LLM(random_llama())


def test_what_is_no_model_is_refused():
    for wrong in ("a path", torch.nn.Linear(1, 1), None):
        with pytest.raises(ModelNotFoundError, match="it must be a transformers model, in memory"):
            TransformersCheckpoint(wrong)
    with pytest.raises(ModelNotFoundError, match="tokenizer is a str; it must be a fast tokenizer"):
        TransformersCheckpoint(random_llama(), "a path")


def test_another_family_is_refused_by_name():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=300, n_positions=16))
    with pytest.raises(UnsupportedModelError, match=r"holds a GPT2LMHeadModel .*refimpl runs LlamaForCausalLM"):
        LLM(TransformersCheckpoint(model))


def test_a_model_that_is_quantised_in_place_is_refused():
    model = random_llama()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"of another type: lm_head\.weight is int8"):
        LLM(TransformersCheckpoint(model), num_gpu_blocks_override=8)
