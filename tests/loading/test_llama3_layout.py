"""A folder laid out as Llama 3's: shards, special tokens, chat template, several ends; equal to transformers."""

import fnmatch
import json
import shutil

import pytest
import torch
from checkpoint_files import edit_json, our_logits, their_logits
from llama3_layout import BEGIN, EOS, EOT, SIZES, VOCAB, change_tensor, special_tokens, write_llama3
from safetensors.torch import load_file, save_file

from refimpl import LLM, SamplingParams
from refimpl.errors import CheckpointError
from refimpl.loading.checkpoint import load_model
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.hub import UNWANTED_FROM_HUB, WANTED_FROM_HUB

PROMPT = "The capital of France is unmergeable, and 128000 tokens are 'd."
CHATS = [
    [{"role": "user", "content": "  Hello, who are you? \n"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "The river of Paris?"}],
    [
        {"role": "user", "content": "Say <|eot_id|> aloud."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Größe, 你好 🙂"},
    ],
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
VERSIONS = ["3.0", "3.1"]
INDEX = "model.safetensors.index.json"
LAST = "model-00004-of-00004.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Both versions, written once; never changed."""
    return {version: write_llama3(tmp_path_factory.mktemp("llama3") / version, version) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def folder(written, version):
    return written[version]


@pytest.fixture
def own(folder, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(folder, tmp_path / "own")


def theirs(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def their_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load(folder):
    return load_model(FolderCheckpoint(folder), "auto", torch.float32, torch.device("cpu"), 0)


def engine(folder):
    return LLM(folder, dtype="float32", num_gpu_blocks_override=32)


# ---------------------------------------------------------------------- it runs, and equals transformers


def test_logits_and_greedy_tokens_equal_those_of_transformers(folder):
    model = theirs(folder)
    with engine(folder) as llm:
        [output] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    ids, generated = output.prompt_token_ids, output.outputs[0].token_ids
    expected = their_logits(model, ids + generated)
    assert expected.std() > 0.5
    ours = our_logits(FolderCheckpoint(folder), token_ids=ids + generated)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert generated == expected[len(ids) - 1 : -1].argmax(-1).tolist()


def test_a_context_beyond_the_original_one_equals_transformers(written):
    """3.1 was trained on 8,192 tokens first (64 here) and stretched: the scaling counts most beyond them."""
    ids = [BEGIN, *(7 * i % 290 for i in range(300))]
    ours = our_logits(FolderCheckpoint(written["3.1"]), token_ids=ids)
    torch.testing.assert_close(ours, their_logits(theirs(written["3.1"]), ids), atol=2e-4, rtol=1e-4)
    assert not torch.allclose(ours[-1], our_logits(FolderCheckpoint(written["3.0"]), token_ids=ids[:256])[-1], atol=0.1)


def test_the_configuration_is_read_whole(folder, version):
    config = FolderCheckpoint(folder).config
    assert {key: getattr(config, key) for key in SIZES} == SIZES
    assert (config.head_dim, config.bos_token_id) == (16, BEGIN)
    assert sorted(config.eos_token_ids) == EOS[version]
    assert (config.rope.kind, config.rope.theta) == ("llama3" if version == "3.1" else "default", 500_000.0)
    assert config.context_limit() == (1024 if version == "3.1" else 256)


# ---------------------------------------------------------------------- its tokens


@pytest.mark.parametrize("text", [PROMPT, "", " unmergeable", "12345", "a<|eot_id|>b", "Größe 你好 🙂\r\n\n  x"])
def test_texts_encode_as_in_transformers(folder, text):
    ours, reference = FolderCheckpoint(folder).tokenizer(), their_tokenizer(folder)
    assert ours.encode(text) == reference(text).input_ids
    assert ours.decode(ours.encode(text)) == reference.decode(reference(text).input_ids, skip_special_tokens=True)


def test_a_whole_word_needs_no_merges(folder):
    tokenizer = FolderCheckpoint(folder).tokenizer()
    assert len(tokenizer.encode(" unmergeable", add_special_tokens=False)) == 1
    assert len(tokenizer.encode(" unmergeables", add_special_tokens=False)) > 3


def test_every_text_begins_once(folder):
    with engine(folder) as llm:
        one = SamplingParams(max_tokens=1)
        outputs = llm.generate([PROMPT, "Hi", "<|begin_of_text|>Hi"], one, use_tqdm=False)
        outputs += llm.chat(CHATS, one, use_tqdm=False)
    counts = [output.prompt_token_ids.count(BEGIN) for output in outputs]
    assert counts == [1, 1, 2, 1, 1, 1]  # who types it oneself has it twice, as in transformers
    assert all(output.prompt_token_ids[0] == BEGIN for output in outputs)


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("chat", CHATS, ids=["user", "system", "several"])
def test_chats_are_rendered_as_transformers_renders_them(folder, chat, generation):
    reference = their_tokenizer(folder)
    expected = reference.apply_chat_template(chat, add_generation_prompt=generation, return_dict=False)
    ours = FolderCheckpoint(folder).tokenizer().apply_chat_template(chat, generation)
    assert ours == expected
    assert (ours[-1] == EOT) != generation


@pytest.mark.parametrize(("version", "end"), [(v, end) for v in VERSIONS for end in EOS[v]])
def test_every_end_of_text_id_stops(own, version, end):
    with engine(own) as llm:
        [output] = llm.chat(CHATS[0], GREEDY, use_tqdm=False)
    first = output.outputs[0].token_ids[0]

    def swapped(head):
        order = torch.arange(VOCAB)
        order[[first, end]] = order[[end, first]]
        return head[order]

    change_tensor(own, "lm_head.weight", swapped)  # now the model's first token is the end
    with engine(own) as llm:
        [stops] = llm.chat(CHATS[0], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        [goes_on] = llm.chat(CHATS[0], GREEDY, use_tqdm=False)
    assert stops.outputs[0].token_ids == [end]
    assert (stops.outputs[0].finish_reason, stops.outputs[0].text) == ("stop", "")
    assert (len(goes_on.outputs[0].token_ids), goes_on.outputs[0].token_ids[0]) == (16, end)


def test_special_tokens_are_no_text(folder, version):
    tokenizer = FolderCheckpoint(folder).tokenizer()
    assert len(tokenizer.special_ids) == 256
    assert tokenizer.decode([BEGIN, EOT]) == ""
    assert tokenizer.decode([BEGIN, EOT], skip_special_tokens=False) == "<|begin_of_text|><|eot_id|>"
    assert tokenizer.token_text(EOS[version][1]) == special_tokens(version)[EOS[version][1] - BEGIN]


# ---------------------------------------------------------------------- its files


def test_metas_own_files_are_never_opened(own):
    before = our_logits(FolderCheckpoint(own), token_ids=[BEGIN, 1, 2])
    (own / "consolidated.00.pth").write_bytes(b"another one, beside the shards")
    (own / "original" / "consolidated.00.pth").chmod(0)
    assert torch.equal(our_logits(FolderCheckpoint(own), token_ids=[BEGIN, 1, 2]), before)
    assert FolderCheckpoint(own).fingerprint()
    pickles = ["original/consolidated.00.pth", "consolidated.00.pth", "pytorch_model.bin"]
    assert not [name for name in pickles for wanted in WANTED_FROM_HUB if fnmatch.fnmatch(name, wanted)]
    assert fnmatch.fnmatch("original/params.json", UNWANTED_FROM_HUB[0])


def test_pickles_alone_are_told(own):
    for path in own.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors; .*original/.*\.pth files cannot be read"):
        load(own)


def test_a_missing_shard_is_refused_by_name(own):
    (own / LAST).unlink()
    with pytest.raises(CheckpointError, match=f"has no {LAST}; download"):
        load(own)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.9.mlp.up_proj.weight"])
def test_an_index_that_names_an_absent_tensor_is_refused_by_name(own, name):
    """Whether the model needs it or not: the index and its files are not of one download."""
    shard = load_file(own / LAST)
    shard.pop(name, None)
    save_file(shard, own / LAST, metadata={"format": "pt"})
    edit_json(own / INDEX, weight_map=index_of(own) | {name: LAST})
    with pytest.raises(CheckpointError, match=rf"names {name} in {LAST}, which does not hold it; download"):
        load(own)


def index_of(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def test_a_tensor_in_two_shards_is_refused_by_name(own):
    shard = load_file(own / LAST)
    shard["model.embed_tokens.weight"] = torch.zeros(VOCAB, 64, dtype=torch.bfloat16)
    save_file(shard, own / LAST, metadata={"format": "pt"})
    said = rf"model\.embed_tokens\.weight is in model-00001-of-00004\.safetensors and again in {LAST}; download"
    with pytest.raises(CheckpointError, match=said):
        load(own)


def test_a_tensor_that_the_index_does_not_name_is_read_all_the_same(own):
    """As in transformers: the files count, the index says which."""
    index = index_of(own)
    del index["lm_head.weight"]
    edit_json(own / INDEX, weight_map=index)
    load(own)
