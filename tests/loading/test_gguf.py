"""GGUF files: what they hold comes out right, and what is wrong with them is said."""

import struct

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import LLAMA3_ROPE, PROMPT, gguf_name, our_logits, permute, random_llama, their_logits, write_gguf

from refimpl import LLM, SamplingParams
from refimpl.errors import CheckpointError, ModelError, UnsupportedModelError
from refimpl.layers.rotary import inverse_frequencies
from refimpl.loading.checkpoint import load_model, open_checkpoint
from refimpl.loading.gguf import GGUFCheckpoint

TYPES = gguf.GGMLQuantizationType


def dequantised_types():
    """Every type that gguf.dequantize knows."""
    known = []
    for kind in TYPES:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            with np.errstate(all="ignore"):
                gguf.dequantize(np.zeros((1, size * (256 // block)), np.uint8), kind)
        except NotImplementedError:
            continue
        known.append(kind)
    return known


@pytest.fixture(scope="module")
def model():
    return random_llama()


@pytest.fixture(scope="module")
def wide_model():
    """Rows of 256: the block of the K types."""
    return random_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64)


@pytest.fixture(scope="module")
def good_file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny-f32.gguf"
    write_gguf(path, model)
    return path


def run_fully(path):
    """Everything that an engine reads of a model."""
    checkpoint = open_checkpoint(path)
    checkpoint.config  # noqa: B018
    checkpoint.tokenizer()
    load_model(checkpoint, "auto", torch.float32, torch.device("cpu"), 0)


# ---------------------------------------------------------------------- right files


def test_f32_weights_come_back_exactly_and_logits_equal_transformers(model, good_file):
    theirs = model.state_dict()
    ours = dict(GGUFCheckpoint(good_file).weights())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    torch.testing.assert_close(our_logits(GGUFCheckpoint(good_file)), their_logits(model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", dequantised_types(), ids=lambda kind: kind.name)
def test_every_type_that_gguf_dequantises_comes_back_exactly(wide_model, tmp_path, kind):
    stored = write_gguf(tmp_path / "model.gguf", wide_model, kind)
    seen = set()
    for name, tensor in GGUFCheckpoint(tmp_path / "model.gguf").weights():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = wide_model.config.num_attention_heads if "q_proj" in name else wide_model.config.num_key_value_heads
            values = permute(values, heads)
        np.testing.assert_array_equal(values, stored[gguf_name(name)], err_msg=name)
        assert tensor.dtype == torch.float32
        seen.add(gguf_name(name))
    assert seen == stored.keys()


def test_there_are_many_types():
    assert {TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1, TYPES.Q4_K, TYPES.Q6_K} <= set(
        dequantised_types()
    )


def test_a_type_that_gguf_cannot_dequantise_is_named(model, tmp_path):
    write_gguf(tmp_path / "model.gguf", model, extra_tensors={"odd.weight": np.zeros((2, 32), np.float32)})
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    at = content.index(b"odd.weight") + len("odd.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", content, at) == (TYPES.F32,)
    struct.pack_into("<I", content, at, TYPES.I32)
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"odd\.weight has type I32.*another quantisation"):
        dict(GGUFCheckpoint(tmp_path / "model.gguf").weights())


def test_tied_output_uses_the_embedding(tmp_path):
    tied = random_llama(tie_word_embeddings=True)
    write_gguf(tmp_path / "model.gguf", tied)
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    assert checkpoint.config.tie_word_embeddings
    torch.testing.assert_close(our_logits(checkpoint), their_logits(tied), atol=1e-4, rtol=1e-4)


def test_rope_divisors_stand_for_llama3_scaling(tmp_path):
    """llama.cpp stores what llama3 scaling comes to, as rope_freqs.weight."""
    scaled = random_llama(rope_parameters=LLAMA3_ROPE)
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 16, 2).float() / 16)
    divisors = (plain / scaled.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() == pytest.approx(8)
    write_gguf(tmp_path / "model.gguf", scaled, extra_tensors={"rope_freqs.weight": divisors})
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    ours = inverse_frequencies(checkpoint.config.rope, 16)
    torch.testing.assert_close(ours, scaled.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    torch.testing.assert_close(our_logits(checkpoint), their_logits(scaled), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("divisors", [[1.0] * 7, [0.0] * 8, [float("nan")] * 8], ids=["too few", "zero", "nan"])
def test_rope_divisors_that_cannot_be_are_refused(model, tmp_path, divisors):
    write_gguf(tmp_path / "model.gguf", model, extra_tensors={"rope_freqs.weight": np.array(divisors, np.float32)})
    with pytest.raises(CheckpointError, match="download it again"):
        GGUFCheckpoint(tmp_path / "model.gguf").config  # noqa: B018


def test_metadata_become_the_configuration(model, good_file):
    config = GGUFCheckpoint(good_file).config
    theirs = model.config
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert getattr(config, name) == getattr(theirs, name)
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (2, 16, 256)
    assert config.rms_norm_eps == np.float32(theirs.rms_norm_eps)
    assert (config.eos_token_ids, config.bos_token_id, config.tie_word_embeddings) == ((256,), 257, False)


def test_eos_and_eot_both_stop(model, tmp_path):
    write_gguf(tmp_path / "model.gguf", model, metadata={"tokenizer.ggml.eot_token_id": 300})
    assert GGUFCheckpoint(tmp_path / "model.gguf").config.eos_token_ids == (256, 300)
    logits = their_logits(model)[-1]
    first = int(logits.argmax())
    for metadata in ({"tokenizer.ggml.eot_token_id": first}, {"tokenizer.ggml.eos_token_id": first}):
        path = tmp_path / f"{next(iter(metadata))}.gguf"
        write_gguf(path, model, metadata=metadata)
        with LLM(path, dtype="float32", num_gpu_blocks_override=8) as llm:
            [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([first], "stop")


def test_a_gguf_file_runs_with_its_own_tokenizer(good_file):
    with LLM(str(good_file), dtype="float32", num_gpu_blocks_override=8) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer.encode("he said") == [319, *b" said"]
        assert tokenizer.encode("a<|user|>b") == [97, 258, 98]
        assert tokenizer.decode([104, 101, 195, 169]) == "heé"
        [output] = llm.generate("Hi", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert output.prompt_token_ids == [*b"Hi"]


def test_bos_is_added_where_the_file_says_so(model, tmp_path):
    write_gguf(tmp_path / "model.gguf", model, metadata={"tokenizer.ggml.add_bos_token": True})
    tokenizer = GGUFCheckpoint(tmp_path / "model.gguf").tokenizer()
    assert tokenizer.encode("hi") == [257, 104, 105]
    assert tokenizer.encode("hi", add_special_tokens=False) == [104, 105]


def test_fingerprint_tells_files_apart(good_file, tmp_path):
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(good_file.read_bytes())
    assert GGUFCheckpoint(copy).fingerprint() == GGUFCheckpoint(good_file).fingerprint()
    copy.write_bytes(good_file.read_bytes()[:-1] + b"\x01")
    assert GGUFCheckpoint(copy).fingerprint() != GGUFCheckpoint(good_file).fingerprint()


# ---------------------------------------------------------------------- other models


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, r"scaling\.type = 'longrope'; refimpl knows none, linear and yarn"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.yarn_ext_factor": 0.5},
            r"yarn_ext_factor = 0\.5; refimpl knows 1",
        ),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16 dimensions"),
        ({"split.count": 3}, r"one of 3 parts.*llama-gguf-split --merge"),
    ],
)
def test_variants_that_refimpl_does_not_have_are_named(model, tmp_path, metadata, message):
    write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        GGUFCheckpoint(tmp_path / "model.gguf").config  # noqa: B018


@pytest.mark.parametrize("metadata", [{"llama.rope.scaling.type": "none"}, {"llama.expert_count": 0}])
def test_keys_that_change_nothing_are_taken(model, tmp_path, metadata):
    write_gguf(tmp_path / "model.gguf", model, metadata=metadata)
    assert GGUFCheckpoint(tmp_path / "model.gguf").config.hidden_size == 64


def test_another_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'gemma3'; refimpl runs llama, qwen2, qwen3"):
        run_fully(tmp_path / "model.gguf")


# ---------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04" + b"\0" * 60, b"{}"], ids=["empty", "short", "zip", "json"])
def test_what_is_no_gguf_file_is_told(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no GGUF file.*give its folder"):
        run_fully(path)


@pytest.mark.parametrize("per_mille", [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 50, 100, 300, 600, 900, 999])
def test_a_file_that_is_cut_short_is_told(good_file, tmp_path, per_mille):
    content = good_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: max(5, int(len(content) * per_mille / 1000))])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is damaged or cut short.*download it again"):
        run_fully(path)


def test_a_cut_at_any_byte_of_the_header_is_told(good_file, tmp_path):
    content = good_file.read_bytes()
    table_ends = content.index(b"output_norm.weight") + 100
    path = tmp_path / "cut.gguf"
    for length in [*range(5, 1200), *range(1200, table_ends, 23)]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="damaged or cut short"):
            GGUFCheckpoint(path)


@pytest.mark.parametrize("offset", [4, 8, 16])
def test_absurd_versions_and_counts_are_told(good_file, tmp_path, offset):
    content = bytearray(good_file.read_bytes())
    struct.pack_into("<I" if offset == 4 else "<Q", content, offset, 2**31 if offset == 4 else 2**62)
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="claims GGUF version"):
        run_fully(tmp_path / "model.gguf")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [2**62, 2**33, 10_000_000])
@pytest.mark.parametrize("key", [b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"])
def test_absurd_array_lengths_neither_hang_nor_fill_the_memory(good_file, tmp_path, key, count):
    content = bytearray(good_file.read_bytes())
    struct.pack_into("<Q", content, content.index(key) + len(key) + 4 + 4, count)
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="download it again"):
        run_fully(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2**31),
        ("block_count", 3),
        ("block_count", 0),
        ("embedding_length", 2**20),
        ("feed_forward_length", 2**22),
        ("context_length", 2**32 - 1),
        ("attention.head_count", 0),
        ("attention.head_count", 3),
        ("attention.head_count_kv", 0),
        ("attention.key_length", 15),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("rope.freq_base", 0.0),
        ("attention.head_count", "four"),
    ],
)
@pytest.mark.timeout(120)
def test_absurd_numbers_are_refused_before_anything_is_allocated(model, tmp_path, key, value):
    write_gguf(tmp_path / "model.gguf", model, metadata={f"llama.{key}": value})
    with pytest.raises(CheckpointError, match="download it again"):
        run_fully(tmp_path / "model.gguf")


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count", "attention.head_count"])
def test_a_missing_number_is_named(model, tmp_path, key):
    write_gguf(tmp_path / "model.gguf", model, metadata={f"llama.{key}": None})
    with pytest.raises(CheckpointError, match=rf"llama\.{key} = None"):
        run_fully(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("token_embd.weight", "token_embd.weight"),
        ("blk.1.attn_q.weight", "blk.1.attn_q.weight"),
        ("blk.0.ffn_down.weight", r"missing: model\.layers\.0\.mlp\.down_proj\.weight"),
        ("output_norm.weight", r"missing: model\.norm\.weight"),
    ],
)
def test_a_missing_tensor_is_named(model, tmp_path, name, shown):
    write_gguf(tmp_path / "model.gguf", model, without=[name])
    with pytest.raises(CheckpointError, match=shown):
        run_fully(tmp_path / "model.gguf")


def test_a_misshapen_q_and_an_extra_bias_are_named(model, tmp_path):
    extra = {"blk.0.attn_q.weight": np.zeros((63, 64), np.float32), "blk.1.attn_q.bias": np.zeros(64, np.float32)}
    write_gguf(tmp_path / "model.gguf", model, extra_tensors=extra)
    with pytest.raises(CheckpointError) as caught:
        run_fully(tmp_path / "model.gguf")
    # The first layer says whether there are biases.
    assert "not in this architecture: model.layers.1.self_attn.q_proj.bias" in str(caught.value)
    assert "model.layers.0.self_attn.q_proj.weight is [63, 64], its configuration makes it [64, 64]" in str(caught.value)


def test_no_damaged_byte_ends_in_another_error(good_file, tmp_path):
    """A file with a byte of its header changed is read, or refused with an error of ours, quickly."""
    content = good_file.read_bytes()
    header = content.index(b"output_norm.weight") + 40
    generator = np.random.default_rng(0)
    path = tmp_path / "model.gguf"
    refused = 0
    for at in generator.integers(4, header, 200):
        damaged = bytearray(content)
        damaged[at] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged)
        try:
            checkpoint = GGUFCheckpoint(path)
            checkpoint.config  # noqa: B018
            load_model(checkpoint, "auto", torch.float32, torch.device("cpu"), 0)
        except ModelError:
            refused += 1
    assert refused > 25


def test_a_damaged_vocabulary_is_told(good_file, tmp_path):
    content = good_file.read_bytes().replace(b"<|user|>", b"<|us\xff\xfe|>")
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be read.*another GGUF file"):
        run_fully(tmp_path / "model.gguf")


def test_a_folder_of_gguf_files_is_told_to_name_one(good_file):
    with pytest.raises(CheckpointError, match=r"has no config\.json, but GGUF files.*tiny-f32\.gguf"):
        open_checkpoint(good_file.parent).config  # noqa: B018
