"""Rotary scaling: every kind of the Llama family equals transformers, by its formula and token by token."""

import dataclasses
import math

import pytest
import torch
from checkpoint_files import LLAMA3_ROPE, PROMPT, edit_json, our_logits, random_llama, save_folder, their_logits, write_gguf

from refimpl import LLM, SamplingParams
from refimpl.config import RopeConfig
from refimpl.errors import CheckpointError, ConfigError, UnsupportedModelError
from refimpl.layers.rotary import RotaryEmbedding, inverse_frequencies
from refimpl.loading.checkpoint import load_model, open_checkpoint
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.gguf import GGUFCheckpoint
from refimpl.loading.hf_config import read_config, write_config
from refimpl.loading.rope_keys import read_rope
from refimpl.models.tiny import tiny

THETA = {"rope_theta": 10_000.0}
LINEAR = THETA | {"rope_type": "linear", "factor": 4.0}
DYNAMIC = THETA | {"rope_type": "dynamic", "factor": 4.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "yarn": YARN,
    "yarn, attention_factor": YARN | {"attention_factor": 0.8},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, mscale alone": YARN | {"mscale": 0.7},
    "yarn, betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, both borders on one dimension": YARN | {"original_max_position_embeddings": 8192, "rope_theta": 1e30},
    "yarn, factor from the contexts": YARN | {"factor": None},
    "yarn, the model's own context": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
    "llama3": LLAMA3_ROPE,
}
ENOUGH = {"max_position_embeddings": 256}


def their_rotary(rope, head_dim, positions=256):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(
        LlamaConfig(head_dim=head_dim, max_position_embeddings=positions, rope_parameters=dict(rope))
    )


def cos_and_sin(rope, head_dim, dtype, positions=256):
    table = RotaryEmbedding(rope, head_dim, positions, dtype, torch.device("cpu"))
    return table.cos, table.sin


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("rope", KINDS.values(), ids=KINDS)
def test_frequencies_and_tables_equal_those_of_transformers(rope, head_dim):
    ours, theirs = read_rope(ENOUGH | {"rope_parameters": rope}, "here"), their_rotary(rope, head_dim)
    torch.testing.assert_close(inverse_frequencies(ours, head_dim), theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    cos, sin = theirs(torch.zeros(1), torch.arange(256)[None])
    got_cos, got_sin = cos_and_sin(ours, head_dim, torch.float32)
    torch.testing.assert_close(got_cos, cos[0, :, : head_dim // 2], rtol=0, atol=5e-5)  # angles up to 256 in float32
    torch.testing.assert_close(got_sin, sin[0, :, : head_dim // 2], rtol=0, atol=5e-5)
    angles = torch.arange(256).double()[:, None] * theirs.inv_freq.double()
    wide, _ = cos_and_sin(ours, head_dim, torch.float64)
    torch.testing.assert_close(wide, angles.cos() * theirs.attention_scaling, rtol=0, atol=5e-5)


def test_each_kind_changes_something():
    plain = inverse_frequencies(RopeConfig(), 64)
    found = [inverse_frequencies(read_rope(ENOUGH | {"rope_parameters": rope}, ""), 64) for rope in (LINEAR, YARN)]
    assert all((frequencies <= plain).all() and (frequencies < plain).any() for frequencies in found)
    torch.testing.assert_close(found[0], plain / 4)
    assert found[1][0] == plain[0]  # the fastest is left
    assert found[1][-1] == pytest.approx(plain[-1].item() / 4)


@pytest.mark.parametrize("rope", [LINEAR, DYNAMIC, YARN, LLAMA3_ROPE], ids=["linear", "dynamic", "yarn", "llama3"])
def test_a_model_generates_what_transformers_generates(rope, tmp_path):
    model = random_llama(rope_parameters=dict(rope), max_position_embeddings=64)
    save_folder(model, tmp_path)
    torch.testing.assert_close(our_logits(FolderCheckpoint(tmp_path)), their_logits(model), atol=1e-4, rtol=1e-4)
    with LLM(tmp_path, dtype="float32", num_gpu_blocks_override=8) as llm:
        [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    generated = output.outputs[0].token_ids
    for end in range(len(generated)):  # a prefix at a time: its length is what dynamic scaling hangs on
        logits = their_logits(model, PROMPT + generated[:end])[-1]
        assert generated[end] == logits.argmax().item(), f"token {end}"


# ---------------------------------------------------------------------- how long a context may be


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (THETA | {"rope_type": "default"}, 100),
        (LINEAR, 400),
        (LINEAR | {"factor": 2.5}, 250),
        (DYNAMIC, 100),
        (YARN, 256),
        (LLAMA3_ROPE, 100),
    ],
    ids=str,
)
def test_the_context_is_stretched_as_vllm_derives_it(rope, limit, tmp_path):
    save_folder(random_llama(rope_parameters=dict(rope), max_position_embeddings=100), tmp_path)
    with LLM(tmp_path, num_gpu_blocks_override=40) as llm:
        assert llm.engine.scheduler.config.max_model_len == limit
        [output] = llm.generate([[1] * (limit - 1)], SamplingParams(max_tokens=5), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1
    with pytest.raises(ConfigError, match=rf"max_model_len is {500}, but the model's positions end at"):
        LLM(tmp_path, num_gpu_blocks_override=40, max_model_len=500)


def test_dynamic_scaling_beyond_its_window_is_that_of_transformers_at_max_model_len(tmp_path):
    """transformers changes the base with each token; here it is that of the longest text which the engine may see."""
    model = random_llama(rope_parameters=dict(DYNAMIC), max_position_embeddings=16)
    save_folder(model, tmp_path)
    checkpoint, text = open_checkpoint(tmp_path), PROMPT + PROMPT[:12]
    stretched = load_model(checkpoint, "auto", torch.float32, torch.device("cpu"), 0, max_model_len=len(text))
    theirs = their_rotary(DYNAMIC, 16, positions=16)
    cos, _ = theirs(torch.zeros(1), torch.arange(len(text))[None])
    torch.testing.assert_close(stretched.rotary.cos[: len(text)], cos[0, :, :8], rtol=0, atol=1e-5)
    with LLM(tmp_path, dtype="float32", num_gpu_blocks_override=8, max_model_len=len(text)) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        [output] = llm.generate([text[:-1]], params, use_tqdm=False)
    [token] = output.outputs[0].token_ids
    with torch.inference_mode():  # all of the text, so that transformers works with its length
        assert token == their_logits(model, text)[-2].argmax().item()


def test_dynamic_scaling_at_its_full_length_is_vllms():
    """vLLM's DynamicNTKScalingRotaryEmbedding works out one base for ``factor`` times the window."""
    rope = RopeConfig(10_000.0, "dynamic", 4.0, original_max_position_embeddings=16).for_context(64)
    base = 10_000.0 * (4.0 * 64 / 16 - 3.0) ** (16 / 14)
    torch.testing.assert_close(inverse_frequencies(rope, 16), 1 / base ** (torch.arange(0, 16, 2) / 16))
    assert rope.context_limit(16, asked=64) == 64


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("rope", KINDS.values(), ids=KINDS)
def test_old_keys_say_the_same(rope, name):
    new = read_rope(ENOUGH | {"rope_parameters": rope}, "here")
    old = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")} | {name: rope["rope_type"]}
    assert read_rope(ENOUGH | {"rope_theta": rope["rope_theta"], "rope_scaling": old}, "here") == new


@pytest.mark.parametrize("rope", KINDS.values(), ids=KINDS)
def test_a_written_scaling_is_read_back_here_and_in_transformers(rope, tmp_path):
    config = dataclasses.replace(
        tiny().config, rope=read_rope({"max_position_embeddings": 2048, "rope_parameters": rope}, "")
    )
    write_config(config, tmp_path)
    assert read_config(tmp_path) == config
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(inverse_frequencies(config.rope, 16), theirs.inv_freq, rtol=1e-6, atol=0)
    assert config.rope.attention_factor == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("value", ["2.0", "big", True, [2], math.inf, math.nan, {}])
@pytest.mark.parametrize(
    ("rope", "key"),
    [
        (LINEAR, "factor"),
        (DYNAMIC, "factor"),
        (YARN, "factor"),
        (YARN, "attention_factor"),
        (YARN, "beta_fast"),
        (YARN, "original_max_position_embeddings"),
        (LLAMA3_ROPE, "low_freq_factor"),
        (LINEAR, "rope_theta"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["rope_type"],
)
def test_a_value_that_is_no_number_is_refused_by_name(rope, key, value):
    with pytest.raises(CheckpointError, match=rf"^here has {key} .*, not a finite number; correct it"):
        read_rope(ENOUGH | {"rope_parameters": rope | {key: value}}, "here")


@pytest.mark.parametrize("rope", [LINEAR, DYNAMIC, YARN, LLAMA3_ROPE], ids=lambda rope: rope["rope_type"])
def test_a_factor_that_is_missing_or_under_one_is_refused(rope):
    without = {key: value for key, value in rope.items() if key != "factor"}
    with pytest.raises(CheckpointError, match="lacks 'factor' for its rotary scaling"):
        read_rope(ENOUGH | {"rope_parameters": without}, "here")
    for factor in (0.5, 0, -2):
        with pytest.raises(CheckpointError, match=rf"factor of {factor}, under 1"):
            read_rope(ENOUGH | {"rope_parameters": rope | {"factor": factor}}, "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (YARN | {"beta_fast": 1.0}, "beta_fast 1.0, not above beta_slow 1.0"),
        (YARN | {"truncate": "no"}, "truncate 'no', not true or false"),
        (LLAMA3_ROPE | {"high_freq_factor": 1.0}, "high_freq_factor 1.0, not above low_freq_factor 1.0"),
        (YARN | {"attention_factor": -1.0}, "not above 0 and finite"),
        (YARN | {"beta_slow": -1.0}, "not above 0 and finite"),
        (YARN | {"original_max_position_embeddings": -4}, "not above 0 and finite"),
        (YARN | {"rope_theta": 0.5}, "rope_theta above 1"),
        (LINEAR | {"factor": 1e9}, "to more than 16777216 tokens"),
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_together_are_refused(changes, said, tmp_path):
    write_config(tiny().config, tmp_path)
    edit_json(tmp_path / "config.json", rope_parameters=changes)
    with pytest.raises(CheckpointError, match=said):
        read_config(tmp_path)


def test_an_unknown_kind_names_the_known_ones():
    for kind in ("longrope", "su", "mrope", "proportional", 7):
        with pytest.raises(UnsupportedModelError, match=rf"{kind!r}; refimpl knows default, linear, dynamic, yarn, llama3"):
            read_rope(ENOUGH | {"rope_parameters": {"rope_type": kind, "factor": 2.0}}, "here")


# ---------------------------------------------------------------------- GGUF

SCALING = "llama.rope.scaling."


def test_gguf_linear_scaling_equals_transformers(tmp_path):
    model = random_llama(rope_parameters=dict(LINEAR), max_position_embeddings=64)
    for name, metadata in (
        ("new", {SCALING + "type": "linear", SCALING + "factor": 4.0}),
        ("old", {"llama.rope.scale_linear": 4.0}),
    ):
        write_gguf(tmp_path / name, model, metadata=metadata)
        checkpoint = GGUFCheckpoint(tmp_path / name)
        assert checkpoint.config.rope == RopeConfig(10_000.0, "linear", 4.0)
        assert checkpoint.config.context_limit() == 256
        torch.testing.assert_close(our_logits(checkpoint), their_logits(model), atol=1e-4, rtol=1e-4)


def test_gguf_yarn_scaling_equals_transformers(tmp_path):
    """llama.cpp multiplies its attn_factor by the paper's; transformers' attention_factor is the product."""
    paper = 0.1 * math.log(4) + 1
    model = random_llama(
        rope_parameters=YARN | {"attention_factor": 0.75 * paper, "beta_fast": 16.0}, max_position_embeddings=64
    )
    metadata = {
        SCALING + "type": "yarn",
        SCALING + "factor": 4.0,
        SCALING + "original_context_length": 64,
        SCALING + "attn_factor": 0.75,
        SCALING + "yarn_beta_fast": 16.0,
    }
    write_gguf(tmp_path / "m.gguf", model, metadata=metadata)
    checkpoint = GGUFCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.config.context_limit() == 256
    torch.testing.assert_close(our_logits(checkpoint), their_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({SCALING + "type": "linear"}, "llama.rope.scaling.factor = None"),
        ({SCALING + "type": "linear", SCALING + "factor": 0.5}, "factor of 0.5, under 1"),
        ({SCALING + "type": "yarn", SCALING + "factor": "4"}, "llama.rope.scaling.factor = '4'"),
        ({"llama.rope.scale_linear": 0.25}, "factor of 0.25, under 1"),
    ],
    ids=str,
)
def test_gguf_scalings_that_cannot_be_are_refused(metadata, said, tmp_path):
    write_gguf(tmp_path / "m.gguf", random_llama(), metadata=metadata)
    with pytest.raises(CheckpointError, match=said):
        GGUFCheckpoint(tmp_path / "m.gguf").config  # noqa: B018
