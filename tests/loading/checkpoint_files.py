"""Small checkpoints for tests: random Llamas of transformers' own, as folders and as GGUF files."""

import json

import gguf
import numpy as np
import torch
from family_models import random_model
from tests_support import full_logits

from refimpl.loading.checkpoint import load_model
from refimpl.loading.gguf import LAYER_NAMES, TOP_NAMES
from refimpl.tokenizer import byte_tokenizer

PROMPT = [5, 17, 300, 2, 91, 91, 44, 260, 7, 128, 33, 3, 250, 1, 19, 60, 300, 8, 8, 12]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GGUF_NAMES = {theirs: ours for ours, theirs in TOP_NAMES.items()}


def random_llama(dtype=torch.float32, **options):
    """transformers' Llama with seeded weights that are wide enough for differences to show."""
    return random_model("Llama", dtype, **options)


def save_folder(model, folder, **options):
    """The model as save_pretrained writes it, with a byte tokenizer."""
    model.save_pretrained(folder, **options)
    byte_tokenizer(320).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def edit_json(path, **changes):
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def our_logits(checkpoint, dtype=torch.float32, token_ids=PROMPT):
    """Logits of every position through refimpl's model."""
    with torch.inference_mode():
        return full_logits(load_model(checkpoint, "auto", dtype, torch.device("cpu"), 0), token_ids)


def their_logits(model, token_ids=PROMPT):
    """The same from transformers."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def gguf_name(name):
    """llama.cpp's name of a tensor."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    return next(f"blk.{layer}.{ours}.{kind}" for ours, theirs in LAYER_NAMES.items() if part == theirs)


def permute(weight, heads):
    """Rows of Q or K, or their biases, from halves to neighbouring pairs: llama.cpp's convert_hf_to_gguf."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model):
    """The tensors of a model as llama.cpp stores them, by its names, in float32."""
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values, in_pairs = parameter.float().numpy(), model.config.model_type in ("llama", "mistral")
        if "q_proj" in name and in_pairs:
            values = permute(values, model.config.num_attention_heads)
        if "k_proj" in name and in_pairs:
            values = permute(values, model.config.num_key_value_heads)
        tensors[gguf_name(name)] = np.ascontiguousarray(values)
    return tensors


def encoded(values, kind):
    """A matrix in a quantised type: quantised where the gguf package can, else random bytes of that type."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        generator = np.random.default_rng(values.size)
        return generator.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block * size), dtype=np.uint8)


def write_gguf(path, model, kind=gguf.GGMLQuantizationType.F32, metadata=(), extra_tensors=(), without=(), tensors=None):
    """The model as a GGUF file: matrices in ``kind``, norms in F32, a byte-level tokenizer.

    Returns what was written for each tensor, as gguf.dequantize reads it.
    """
    config = model.config
    kind_of_model = "llama" if config.model_type == "mistral" else config.model_type
    writer = gguf.GGUFWriter(path, kind_of_model)
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": config.head_dim,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    fields = {f"{kind_of_model}.{key}": value for key, value in fields.items()}
    floats = {
        f"{kind_of_model}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind_of_model}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    alphabet = byte_tokenizer(320).backend.get_vocab()
    tokens = [*sorted(alphabet, key=alphabet.get)[:-1], "he"]  # one merge: transformers wants a list of them
    fields |= {"tokenizer.ggml.bos_token_id": 257, "tokenizer.ggml.eos_token_id": 256}
    for key, value in (fields | floats | dict(metadata)).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        # None leaves a key out
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e"])
    writer.add_token_types([1] * 256 + [3] * 63 + [1])
    stored = {}
    for name, values in ((tensors or gguf_tensors(model)) | dict(extra_tensors)).items():
        if name in without:
            continue
        one = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        raw = encoded(values, one)
        writer.add_tensor(name, raw, raw_dtype=one)
        with np.errstate(all="ignore"):
            stored[name] = gguf.dequantize(raw, one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
