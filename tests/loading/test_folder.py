"""Checkpoint folders in Hugging Face's layout."""

import dataclasses

import pytest
import torch
from checkpoint_files import LLAMA3_ROPE, PROMPT, edit_json, our_logits, random_llama, save_folder, their_logits
from safetensors.torch import load_file, save_file

from refimpl import LLM, SamplingParams
from refimpl.config import ModelConfig, RopeConfig
from refimpl.errors import CheckpointError, ModelNotFoundError, OutOfMemoryError, UnsupportedModelError
from refimpl.layers.rotary import inverse_frequencies
from refimpl.loading.checkpoint import load_model, open_checkpoint
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.hf_config import read_config, write_config
from refimpl.models.tiny import tiny

VARIANTS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3_ROPE},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64},
    "multi-query": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
}


@pytest.fixture(scope="module")
def model():
    return random_llama()


@pytest.fixture
def folder(model, tmp_path):
    return save_folder(model, tmp_path)


@pytest.fixture
def sharded(model, tmp_path):
    save_folder(model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return tmp_path


def load(folder):
    return load_model(FolderCheckpoint(folder), "auto", torch.float32, torch.device("cpu"), 0)


# ---------------------------------------------------------------------- right folders


class WideNorm(torch.nn.Module):
    """transformers' RMSNorm without its detour through float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class WideRotary(torch.nn.Module):
    """transformers' rotary embedding with angles in float64."""

    def __init__(self, rotary):
        super().__init__()
        self.inv_freq, self.attention_scaling = rotary.inv_freq.double(), rotary.attention_scaling

    def forward(self, x, position_ids):
        angles = (position_ids[..., None] * self.inv_freq).repeat(1, 1, 2)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def in_float64(model):
    """The same model computed in float64 throughout."""
    frequencies = model.model.rotary_emb
    model.double().set_attn_implementation("sdpa")
    model.model.rotary_emb = WideRotary(frequencies)
    model.model.norm = WideNorm(model.model.norm)
    for layer in model.model.layers:
        layer.input_layernorm = WideNorm(layer.input_layernorm)
        layer.post_attention_layernorm = WideNorm(layer.post_attention_layernorm)
    return model


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_what_save_pretrained_writes_gives_the_logits_of_transformers(tmp_path, options):
    theirs = random_llama(**options)
    save_folder(theirs, tmp_path)
    expected = their_logits(theirs)
    assert expected.std() > 0.5
    checkpoint = FolderCheckpoint(tmp_path)
    torch.testing.assert_close(our_logits(checkpoint), expected, atol=1e-4, rtol=1e-4)
    wide = their_logits(in_float64(theirs))
    torch.testing.assert_close(our_logits(checkpoint, torch.float64), wide, atol=1e-9, rtol=1e-9)


def test_a_sharded_checkpoint_is_the_same_model(model, sharded):
    torch.testing.assert_close(our_logits(FolderCheckpoint(sharded)), their_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_to_the_dtype_asked_for(tmp_path, dtype):
    save_folder(random_llama(dtype=torch.bfloat16), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert stored.dtype == torch.bfloat16
    loaded = load_model(FolderCheckpoint(tmp_path), "auto", dtype, torch.device("cpu"), 0)
    assert loaded.embed_tokens.dtype == dtype
    assert torch.equal(loaded.embed_tokens, stored.to(dtype))


def test_a_folder_generates_what_transformers_generates(model, folder):
    with LLM(folder, dtype="float32", num_gpu_blocks_override=8) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [output] = llm.generate([PROMPT], params, use_tqdm=False)
    generated = output.outputs[0].token_ids
    logits = their_logits(model, PROMPT + generated[:-1])[len(PROMPT) - 1 :]
    assert generated == logits.argmax(-1).tolist()


def test_one_file_counts_before_an_index(model, sharded):
    """As in transformers: a folder may hold both."""
    random = {name: tensor.clone() for name, tensor in random_llama().state_dict().items()}
    random["model.norm.weight"].fill_(3.0)
    save_file(random, sharded / "model.safetensors")
    assert load(sharded).norm.weight[0] == 3.0


def test_tensors_that_old_checkpoints_carry_are_passed_over(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    load(folder)


def test_a_stored_head_beside_tied_embeddings_is_passed_over(tmp_path):
    save_folder(random_llama(tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)


def test_fingerprint_tells_weights_apart(folder):
    before = FolderCheckpoint(folder).fingerprint()
    assert before == FolderCheckpoint(folder).fingerprint()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = 9
    save_file(tensors, folder / "model.safetensors")
    assert FolderCheckpoint(folder).fingerprint() != before


def test_the_current_folder_has_a_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert open_checkpoint(".").name == folder.name


# ---------------------------------------------------------------------- files that are not right


def test_a_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=rf"has no {victim.name}; download"):
        load(sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_that_names_files_outside_the_folder_is_refused(sharded, name):
    edit_json(sharded / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
    with pytest.raises(CheckpointError, match="names files outside its folder"):
        load(sharded)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_unreadable_index_is_told(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read.*download it again"):
        load(sharded)


def test_an_index_of_nothing_lacks_every_tensor(sharded):
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight, .* and 17 more"):
        load(sharded)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, 1000, 5000, 100_000, -1])
def test_a_file_that_is_cut_short_is_told(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged.*download it again"):
        load(folder)


@pytest.mark.parametrize("content", [b"\xff" * 64, b"\x00" * 64, b"not safetensors at all", b"\x10" + b"\0" * 7 + b"{" * 16])
def test_a_file_that_is_no_safetensors_file_is_told(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or no safetensors file"):
        load(folder)


def test_missing_extra_misshapen_and_integer_tensors_are_each_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 63)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "missing: model.norm.weight;" in message
    assert "not in this architecture: model.layers.0.self_attn.q_proj.bias;" in message
    assert "misshapen: model.layers.1.mlp.up_proj.weight is [96, 63], its configuration makes it [96, 64];" in message
    assert "of another type: lm_head.weight is int8, not a float type of 16 bits or more" in message
    assert "\n" not in message


def test_long_lists_are_cut(folder):
    save_file({}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="and 17 more"):
        load(folder)


def test_pickled_weights_are_refused_with_the_way_out(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"\.bin files.*a pickle can run code.*safe_serialization=True"):
        load(folder)


def test_a_folder_without_weights_says_so(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors; .*load_format=dummy"):
        load(folder)


@pytest.mark.parametrize(
    "model",
    ["/no/such/folder", "nothing here", "org/missing.gguf", "a/b/c", "", "~nosuchuser/x/y", "x" * 5000, "a\0b"],
    ids=lambda model: ascii(model[:20]),
)
def test_a_path_that_is_not_there_is_told(model):
    with pytest.raises(ModelNotFoundError, match=r"no model at .*--model tiny needs no download") as caught:
        open_checkpoint(model)
    assert isinstance(caught.value, FileNotFoundError)


def test_an_object_that_is_no_checkpoint_is_told():
    with pytest.raises(ModelNotFoundError, match=r"model is a int.*lacks name, config, weights, tokenizer, fingerprint"):
        open_checkpoint(3)
    assert open_checkpoint(tiny()).name == "tiny"


def test_a_model_too_large_for_the_machine_is_told():
    config = dataclasses.replace(tiny().config, vocab_size=2**24, hidden_size=2**20)
    huge = dataclasses.replace(tiny(), config=config)
    with pytest.raises(OutOfMemoryError, match=r"tiny needs 131076\.5 GiB for its weights"):
        load_model(huge, "auto", torch.float32, torch.device("cpu"), 0)


# ---------------------------------------------------------------------- config.json


def test_a_missing_config_is_told(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json; give a checkpoint folder"):
        read_config(folder)


@pytest.mark.parametrize("content", ["", "{", "not json", "\ufeff{}", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_invalid_json_is_told(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read as JSON.*download it again"):
        read_config(folder)


def test_bytes_that_are_no_text_are_told(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_config(folder)


def test_a_list_is_no_config(folder):
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds a list, not an object"):
        read_config(folder)


REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(folder, key):
    edit_json(folder / "config.json", **{key: None})
    with pytest.raises(CheckpointError, match=rf"config\.json lacks '{key}'"):
        read_config(folder)


@pytest.mark.parametrize("value", ["wide", [64], {}, float("inf"), float("nan")])
@pytest.mark.parametrize("key", REQUIRED)
def test_a_value_of_the_wrong_kind_is_told(folder, key, value):
    edit_json(folder / "config.json", **{key: value})
    with pytest.raises(CheckpointError, match=r"config\.json .*(correct it|download it again)"):
        read_config(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"max_position_embeddings": 10**10},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        {"head_dim": 15},
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": 1e300},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e300}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}},
        {"rope_parameters": "default"},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        {"rope_parameters": LLAMA3_ROPE | {"factor": "eight"}},
        {"rope_parameters": LLAMA3_ROPE | {"factor": 0}},
        {"eos_token_id": "end"},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(folder, changes):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "holds a Gemma3ForCausalLM .*refimpl runs LlamaForCausalLM"),
        ({"architectures": None}, "holds a model of no named architecture"),
        ({"architectures": 5}, "holds a model of no named architecture"),
        ({"architectures": [{}]}, r"holds a \{\}"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"quantised \(aqlm\); .* its 16-bit safetensors, or a GGUF"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "'longrope'; refimpl knows default, linear, dynamic, yarn, llama3",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "su", "factor": 2}}, "'su'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, r"rotates 0\.5 of each head"),
        ({"partial_rotary_factor": 0.25}, r"rotates 0\.25 of each head"),
    ],
    ids=str,
)
def test_what_refimpl_does_not_have_is_named(folder, changes, message):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(folder)


def test_both_spellings_of_rope_give_the_same(folder):
    edit_json(folder / "config.json", rope_parameters=LLAMA3_ROPE)
    new = read_config(folder).rope
    old_keys = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=500_000.0, rope_scaling=old_keys)
    assert read_config(folder).rope == new
    edit_json(folder / "config.json", rope_scaling=old_keys | {"type": "llama3", "rope_type": "llama3"})
    assert read_config(folder).rope == new
    assert new == RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 64)


def test_without_rope_keys_theta_is_ten_thousand(folder):
    edit_json(folder / "config.json", rope_parameters=None, rope_scaling=None)
    assert read_config(folder).rope == RopeConfig(10_000.0)
    edit_json(folder / "config.json", rope_theta=77.0)
    assert read_config(folder).rope == RopeConfig(77.0)
    edit_json(folder / "config.json", rope_scaling={"type": None})
    assert read_config(folder).rope == RopeConfig(77.0)


def test_silu_and_swish_are_one(folder):
    edit_json(folder / "config.json", hidden_act="swish")
    assert read_config(folder).hidden_size == 64


def test_eos_ids_of_both_files_stop(folder):
    edit_json(folder / "config.json", eos_token_id=[256, 300])
    edit_json(folder / "generation_config.json", eos_token_id=[300, 301])
    assert read_config(folder).eos_token_ids == (256, 300, 301)
    edit_json(folder / "config.json", eos_token_id=None)
    assert read_config(folder).eos_token_ids == (300, 301)
    (folder / "generation_config.json").unlink()
    assert read_config(folder).eos_token_ids == ()


def test_head_dim_and_kv_heads_have_defaults(folder):
    edit_json(folder / "config.json", head_dim=None, num_key_value_heads=None)
    config = read_config(folder)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    edit_json(folder / "config.json", head_dim=8)
    assert read_config(folder).head_dim == 8


@pytest.mark.parametrize("original", [64, 256, 8192])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_llama3_frequencies_equal_those_of_transformers(head_dim, original):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LLAMA3_ROPE | {"original_max_position_embeddings": original}
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope))
    ours = inverse_frequencies(RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, original), head_dim)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)


def test_the_context_of_llama3_scaling_is_found_where_transformers_finds_it(folder):
    without = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    edit_json(folder / "config.json", rope_parameters=without)
    assert read_config(folder).rope.original_max_position_embeddings == 256  # the model's own
    edit_json(folder / "config.json", original_max_position_embeddings=128)
    assert read_config(folder).rope.original_max_position_embeddings == 128


CONFIGS = {
    "tiny": tiny().config,
    "several ends": dataclasses.replace(tiny().config, eos_token_ids=(256, 300), bos_token_id=0),
    "no ends": dataclasses.replace(tiny().config, eos_token_ids=(), tie_word_embeddings=True),
    "llama3": dataclasses.replace(tiny().config, rope=RopeConfig(500_000.0, "llama3", 8.0, 1.5, 4.0, 64)),
    "divisors": dataclasses.replace(tiny().config, rope=RopeConfig(1e5, frequency_divisors=(1.0, 1.1) * 4)),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_written_configuration_is_read_back(tmp_path, config: ModelConfig):
    write_config(config, tmp_path)
    assert read_config(tmp_path) == config


def test_transformers_reads_what_we_write(tmp_path):
    from transformers import AutoConfig, GenerationConfig

    write_config(CONFIGS["llama3"], tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (theirs.model_type, theirs.head_dim, theirs.num_key_value_heads) == ("llama", 16, 2)
    assert theirs.rope_parameters["factor"] == 8.0
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 256


# ---------------------------------------------------------------------- random weights


def dummy(folder, seed=0):
    return load_model(FolderCheckpoint(folder), "dummy", torch.float32, torch.device("cpu"), seed)


def config_only(folder):
    folder.mkdir(exist_ok=True)
    write_config(tiny().config, folder)
    return folder


def test_dummy_weights_are_a_function_of_the_seed(tmp_path):
    folder = config_only(tmp_path)
    first, second, other = dummy(folder), dummy(folder), dummy(folder, seed=1)
    assert torch.equal(first.embed_tokens, second.embed_tokens)
    assert not torch.equal(first.embed_tokens, other.embed_tokens)
    assert first.embed_tokens.std() == pytest.approx(0.02, rel=0.05)
    for layer in first.layers:
        assert (layer.input_norm.weight == 1).all()
        assert (layer.post_attention_norm.weight == 1).all()
    assert (first.norm.weight == 1).all()


def test_every_dummy_matrix_is_filled(tmp_path):
    from refimpl.loading.dummy import fill_with_random
    from refimpl.models.registry import build_model

    model = build_model(tiny().config, torch.float32, torch.device("cpu"))
    views = model.checkpoint_views()
    for view in views.values():
        view.fill_(float("nan"))
    fill_with_random(views, 0)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert len({float(view.sum()) for name, view in views.items() if "norm" not in name}) == len(views) - 5


def test_a_config_alone_runs_with_dummy_weights(tmp_path):
    """What a benchmark of a model that is not at hand needs: token ids in and out, and texts as bytes."""
    folder = config_only(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder, load_format="dummy", dtype="float32", num_gpu_blocks_override=8) as llm:
        by_ids, by_text = llm.generate([[72, 105], "Hi"], params, use_tqdm=False)
        assert len(by_ids.outputs[0].token_ids) == 4
        assert by_text.prompt_token_ids == [72, 105]
        assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert FolderCheckpoint(folder).fingerprint()


def test_a_config_alone_does_not_run_without_dummy(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors; .*load_format=dummy"):
        LLM(config_only(tmp_path), num_gpu_blocks_override=8)


def test_a_config_with_a_tokenizer_keeps_its_tokenizer(folder):
    (folder / "model.safetensors").unlink()
    checkpoint = FolderCheckpoint(folder)
    assert checkpoint.tokenizer().encode("<|user|>") == [258]
    assert checkpoint.fingerprint()


def test_weights_without_a_tokenizer_are_told(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be read .*needs a tokenizer\.json"):
        LLM(folder, num_gpu_blocks_override=8)
