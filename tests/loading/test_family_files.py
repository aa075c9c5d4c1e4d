"""What files say of each family: config.json there and back, GGUF files, random weights; and what is refused by name."""

import dataclasses
import json

import pytest
import torch
from checkpoint_files import PROMPT, edit_json, our_logits, save_folder, their_logits, write_gguf
from family_models import FULL, SLIDING, VARIANTS, WINDOW, random_model, variant
from tests_support import full_logits

from refimpl import LLM, SamplingParams, TransformersCheckpoint
from refimpl.errors import CheckpointError, UnsupportedModelError
from refimpl.loading.checkpoint import load_model, open_checkpoint
from refimpl.loading.dummy import STANDARD_DEVIATION, fill_with_random
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.gguf import GGUFCheckpoint
from refimpl.loading.hf_config import parse_config, read_config, write_config
from refimpl.models.registry import FAMILIES, build_model
from refimpl.quantization.choose import choose_method
from refimpl.quantization.method import weight_bytes

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", params=VARIANTS)
def model(request):
    return variant(request.param)


def test_a_saved_folder_gives_the_same_logits(model, tmp_path):
    folder = FolderCheckpoint(save_folder(model, tmp_path))
    assert folder.config == TransformersCheckpoint(model).config
    torch.testing.assert_close(our_logits(folder), their_logits(model), atol=1e-4, rtol=1e-4)


def test_a_configuration_that_is_written_is_read_again_by_us_and_by_transformers(model, tmp_path):
    from transformers import AutoConfig

    config = TransformersCheckpoint(model).config
    write_config(config, tmp_path)
    assert read_config(tmp_path) == config
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert type(theirs) is type(model.config)
    for name in ("head_dim", "sliding_window", "layer_types", "attention_bias", "mlp_bias", "num_key_value_heads"):
        assert getattr(theirs, name, None) == getattr(model.config, name, None), name


def test_numbers_of_weights_are_those_of_the_tensors(model):
    config = TransformersCheckpoint(model).config
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    held = sum(parameter.numel() for parameter in model.parameters()) * 2
    assert weight_bytes(config, choose_method(None, CPU), 2) == held


def test_random_weights_fill_biases_and_leave_norms_at_one(model):
    views = build_model(TransformersCheckpoint(model).config, torch.float32, CPU).checkpoint_views()
    assert views.keys() == {name for name, _ in model.named_parameters()}
    fill_with_random(views, 0)
    for name, view in views.items():
        if "norm" in name:
            assert (view == 1).all(), name
        else:
            assert 0.5 * STANDARD_DEVIATION < view.std() < 2 * STANDARD_DEVIATION, name


@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "qwen3-biases-window"])
def test_fp8_weights_go_with_biases_and_norms(name):
    """What FP8 rounds moves logits by a tenth or two of their spread; without biases they are much further off."""
    model = variant(name)
    ours = load_model(TransformersCheckpoint(model), "auto", torch.float32, CPU, 0, method=choose_method("fp8", CPU))
    with torch.inference_mode():
        got, right = full_logits(ours, PROMPT), their_logits(model)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".bias"):
                parameter.zero_()
        errors = [(got - theirs).square().mean().sqrt() for theirs in (right, their_logits(model))]
    assert errors[0] < 0.2 * right.std()
    assert errors[1] > 1.5 * errors[0]


# ---------------------------------------------------------------------- config.json


def read(tmp_path, model, **changes):
    model.config.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=[type(model).__name__], **changes)
    return read_config(tmp_path)


OLD_KEYS = {"layer_types": None}
"""Removed: files of before transformers 5 have ``max_window_layers`` instead."""


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_windows_by_layer(tmp_path, family):
    model = random_model(family, num_hidden_layers=4)
    sliding = OLD_KEYS | {"use_sliding_window": True, "sliding_window": 5}
    assert read(tmp_path, model, **sliding, max_window_layers=1).windows == (None, 5, 5, 5)
    assert read(tmp_path, model, **sliding, max_window_layers=4).windows == ()
    assert read(tmp_path, model, **sliding).windows == ()  # 28 layers without one
    assert read(tmp_path, model, **OLD_KEYS, use_sliding_window=False, sliding_window=5, max_window_layers=1).windows == ()
    kinds = [SLIDING, FULL, FULL, SLIDING]
    assert read(tmp_path, model, use_sliding_window=True, sliding_window=5, layer_types=kinds).windows == (5, None, None, 5)
    without = read(tmp_path, model, use_sliding_window=True, sliding_window=5, layer_types=[FULL] * 4)
    assert without.windows == ()
    assert not without.windowed


def test_sizes_that_a_file_leaves_out_are_those_of_the_family(tmp_path):
    """As transformers takes them: a head of Qwen3 has 128 numbers whatever the hidden size, Mistral a window of 4,096."""
    qwen3 = random_model("Qwen3", num_attention_heads=32, num_key_value_heads=32, hidden_size=32)
    config = read(tmp_path, qwen3, head_dim=None, num_key_value_heads=None)
    assert (config.head_dim, config.num_key_value_heads) == (128, 32)
    mistral = random_model("Mistral", num_attention_heads=8)
    raw = mistral.config.to_dict() | {"architectures": ["MistralForCausalLM"]}
    del raw["sliding_window"], raw["num_key_value_heads"]
    config = parse_config(raw, {}, "config.json")
    assert (config.windows, config.num_key_value_heads) == ((4096, 4096), 8)


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("Llama", {"attention_bias": 1}, CheckpointError, "attention_bias 1, not true or false"),
        ("Llama", {"mlp_bias": "yes"}, CheckpointError, "mlp_bias 'yes', not true or false"),
        ("Mistral", {"attention_bias": True}, UnsupportedModelError, "has attention_bias; Mistral has no biases"),
        ("Mistral", {"mlp_bias": True}, UnsupportedModelError, "has mlp_bias; Mistral has no biases"),
        ("Mistral", {"sliding_window": 0}, CheckpointError, "sliding_window 0, not a whole number above 0"),
        ("Mistral", {"sliding_window": 4.5}, CheckpointError, r"sliding_window 4\.5, not a whole number"),
        ("Mistral", {"layer_types": [SLIDING, FULL]}, UnsupportedModelError, "Mistral's layers are all alike"),
        ("Qwen2", {"mlp_bias": True}, UnsupportedModelError, "has mlp_bias; Qwen2 has biases on Q, K and V alone"),
        ("Qwen3", {"mlp_bias": True}, UnsupportedModelError, "has mlp_bias; Qwen3"),
        ("Qwen2", {"layer_types": [SLIDING, FULL]}, CheckpointError, "but no window: use_sliding_window is False"),
        ("Qwen2", {"layer_types": [FULL]}, CheckpointError, "not one for each of its 2 layers"),
        ("Qwen3", {"layer_types": [FULL, "chunked_attention"]}, UnsupportedModelError, "of type 'chunked_attention'"),
        ("Qwen3", {"use_sliding_window": "on"}, CheckpointError, "use_sliding_window 'on', not true or false"),
        ("Qwen2", {"hidden_act": "gelu"}, UnsupportedModelError, "the activation 'gelu'; refimpl's models have silu"),
        ("Qwen2", {"max_window_layers": "x", "layer_types": None}, CheckpointError, "a value of the wrong kind"),
        ("Qwen2", {"rope_parameters": {"rope_type": "longrope"}}, UnsupportedModelError, "'longrope'; refimpl knows"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_named(tmp_path, family, changes, error, message):
    with pytest.raises(error, match=message):
        read(tmp_path, random_model(family), **changes)


def test_every_family_is_told_where_another_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=rf"holds a Gemma3ForCausalLM .*refimpl runs {', '.join(FAMILIES)}"):
        parse_config({"architectures": ["Gemma3ForCausalLM"]}, {}, "config.json")


def test_a_context_no_longer_than_a_window_has_none():
    config = TransformersCheckpoint(variant("qwen2-window")).config
    assert config.for_context(WINDOW).windows == ()
    assert config.for_context(WINDOW + 1).windows == (None, WINDOW, WINDOW)
    assert config.window(0) is None
    assert dataclasses.replace(config, windows=()).window(2) is None


# ---------------------------------------------------------------------- GGUF

IN_GGUF = ["llama-biases", "mistral-without-window", "qwen2", "qwen3"]
"""Variants of which llama.cpp's files can say everything."""


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_gives_the_same_logits(tmp_path, name):
    model = variant(name)
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    theirs = model.state_dict()
    for tensor_name, tensor in checkpoint.weights():
        assert torch.equal(tensor, theirs[tensor_name]), tensor_name
    torch.testing.assert_close(our_logits(checkpoint), their_logits(model), atol=1e-4, rtol=1e-4)
    expected = "LlamaForCausalLM" if "mistral" in name else type(model).__name__
    assert checkpoint.config.architecture == expected


@pytest.mark.parametrize("name", ["mistral-without-window", "qwen2", "qwen3"])
def test_a_gguf_file_brings_its_tokenizer_into_the_engine(tmp_path, name):
    write_gguf(tmp_path / "model.gguf", variant(name))
    with LLM(tmp_path / "model.gguf", dtype="float32", num_gpu_blocks_override=8) as llm:
        [output] = llm.generate(["hello"], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_a_gguf_file_of_mistral_that_names_its_window_has_it(tmp_path):
    model = variant("mistral")
    write_gguf(tmp_path / "model.gguf", model, metadata={"llama.attention.sliding_window": WINDOW})
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    assert (checkpoint.config.architecture, checkpoint.config.windows) == ("MistralForCausalLM", (WINDOW, WINDOW))
    torch.testing.assert_close(our_logits(checkpoint), their_logits(model), atol=1e-4, rtol=1e-4)


def test_a_gguf_file_that_leaves_the_layers_of_a_window_open_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", variant("qwen2"), metadata={"qwen2.attention.sliding_window": WINDOW})
    with pytest.raises(UnsupportedModelError, match=r"qwen2\.attention\.sliding_window = 7, but does not say in"):
        GGUFCheckpoint(tmp_path / "model.gguf").config  # noqa: B018


@pytest.mark.parametrize(
    ("name", "missing"), [("qwen2", "blk.0.attn_k.bias"), ("qwen3", "blk.1.attn_q_norm.weight")], ids=["bias", "norm"]
)
def test_a_gguf_file_that_lacks_what_its_family_has_is_refused(tmp_path, name, missing):
    write_gguf(tmp_path / "model.gguf", variant(name), without=[missing])
    with pytest.raises(CheckpointError, match=r"missing: model\.layers"):
        load_model(GGUFCheckpoint(tmp_path / "model.gguf"), "auto", torch.float32, CPU, 0)


# ---------------------------------------------------------------------- the rest of the engine


def test_a_chat_template_in_the_folder_is_used(tmp_path):
    save_folder(variant("qwen3"), tmp_path)
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
    content = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    tokenizer = FolderCheckpoint(tmp_path).tokenizer()
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(rendered) == "[user] Hi\n[assistant]"
