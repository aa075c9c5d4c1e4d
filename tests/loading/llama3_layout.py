"""Checkpoints with the layout of Meta-Llama-3-Instruct and Llama-3.1-Instruct, 8B and 70B, shrunken: file for file, key
for key.

``python tests/loading/llama3_layout.py FOLDER [3.0|3.1] [8B|70B]`` writes one to look at, or to try a command line on. Its
vocabulary is trained on a few lines, its weights are random; names, files, special tokens, post-processor, end-of-text ids
and numbers of heads, shards and positions are as in the originals (of the 8B one, heads and positions are fewer too).
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

BASE = 300
"""Ordinary tokens (128,000 in the original); the special ones follow."""
SPECIAL = 256
VOCAB = BASE + SPECIAL
BEGIN, END, HEADER, HEADER_END, EOM, EOT = (BASE + offset for offset in (0, 1, 6, 7, 8, 9))
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES_70B = SIZES | {
    "num_hidden_layers": 4,
    "hidden_size": 512,  # heads of 8 dimensions, where the original has 128
    "intermediate_size": 768,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
EOS = {"3.0": [END, EOT], "3.1": [END, EOM, EOT]}


class Layout(NamedTuple):
    """What the 8B and the 70B one differ in."""

    sizes: dict[str, int]
    shards: int
    positions: dict[str, int]
    original_positions: int
    """Before the scaling of 3.1."""


LAYOUTS = {
    "8B": Layout(SIZES, 4, {"3.0": 256, "3.1": 1024}, 64),
    "70B": Layout(SIZES_70B, 30, {"3.0": 8192, "3.1": 131_072}, 8192),
}


def version_keys(version, layout):
    """The keys of config.json that 3.0 and 3.1 differ in."""
    positions = {"max_position_embeddings": layout.positions[version]}
    if version == "3.0":
        return positions | {"rope_scaling": None, "eos_token_id": EOT}
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": layout.original_positions,
        "rope_type": "llama3",
    }
    return positions | {"mlp_bias": False, "rope_scaling": scaling, "eos_token_id": EOS["3.1"]}


SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts a text before it merges (its tokenizer.json has the same expression)."""
CORPUS = [
    "The capital of France is Paris, and the river that runs through the city is the Seine.",
    "A cache keeps what was computed; the next token reads it instead of computing it again.",
    "In 2024 there were 128000 ordinary tokens, and 256 special ones after them.",
]
WHOLE_WORD = "Ġunmergeable"
"""In the vocabulary, though no merges lead there: what ``ignore_merges`` is for."""
TEMPLATES = {
    "3.0": (
        "{% for message in messages %}"
        "{% set turn = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim "
        "+ '<|eot_id|>' %}"
        "{{ bos_token + turn if loop.first else turn }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # As 3.1's in what it writes without tools: there is always a system turn, with dates before the given text.
    "3.1": (
        "{{- bos_token }}\n"
        "{%- if not date_string is defined %}\n    {%- set date_string = '26 Jul 2024' %}\n{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system = messages[0]['content'] | trim %}\n    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}\n"
        "{{- 'Cutting Knowledge Date: December 2023\n' }}\n{{- 'Today Date: ' + date_string + '\n\n' }}\n"
        "{{- system }}\n{{- '<|eot_id|>' }}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\n"
        "    {{- message['content'] | trim + '<|eot_id|>' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n"
    ),
}


def special_tokens(version):
    """The 256 special tokens in the order of their ids."""
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
    if version == "3.1":
        named |= {4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}
    numbers = iter(range(SPECIAL))
    return [f"<|{named.get(i) or f'reserved_special_token_{next(numbers)}'}|>" for i in range(SPECIAL)]


def make_tokenizer(version):
    """Byte-level BPE with ``ignore_merges``, and a post-processor that begins every text with ``<|begin_of_text|>``."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = split
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=BASE - 1, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    learnt = json.loads(trained.to_str())["model"]
    vocab = learnt["vocab"] | {WHOLE_WORD: BASE - 1}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[tuple(merge) for merge in learnt["merges"]], ignore_merges=True)
    )
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    made.add_special_tokens(special_tokens(version))
    begin = "<|begin_of_text|>"
    template = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, BEGIN)]
    )
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    assert made.get_vocab_size() == VOCAB
    return made


def tensors(sizes):
    """Every tensor by its name in the original, in bfloat16 as there; wide enough for differences to show."""
    generator = torch.Generator().manual_seed(3)
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    kv = sizes["num_key_value_heads"] * hidden // sizes["num_attention_heads"]

    def random(*shape):
        return (1.2 / hidden**0.5 * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    def norm():
        return 1 + random(hidden)

    named = {"model.embed_tokens.weight": random(VOCAB, hidden)}
    for i in range(sizes["num_hidden_layers"]):
        named |= {
            f"model.layers.{i}.input_layernorm.weight": norm(),
            f"model.layers.{i}.mlp.down_proj.weight": random(hidden, inner),
            f"model.layers.{i}.mlp.gate_proj.weight": random(inner, hidden),
            f"model.layers.{i}.mlp.up_proj.weight": random(inner, hidden),
            f"model.layers.{i}.post_attention_layernorm.weight": norm(),
            f"model.layers.{i}.self_attn.k_proj.weight": random(kv, hidden),
            f"model.layers.{i}.self_attn.o_proj.weight": random(hidden, hidden),
            f"model.layers.{i}.self_attn.q_proj.weight": random(hidden, hidden),
            f"model.layers.{i}.self_attn.v_proj.weight": random(kv, hidden),
        }
    return named | {"model.norm.weight": norm(), "lm_head.weight": random(VOCAB, hidden)}


def write_shards(folder, named, shards):
    """The tensors over several files, and the index that says where each is."""
    names, index = list(named), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: named[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in named.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_llama3(folder, version, size="8B"):
    """Write the whole folder; returns it."""
    layout = LAYOUTS[size]
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, tensors(layout.sizes), layout.shards)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3",
        "use_cache": True,
    }
    write_json(folder / "config.json", config | layout.sizes | version_keys(version, layout))
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3"}
    write_json(folder / "generation_config.json", {"bos_token_id": BEGIN, "eos_token_id": EOS[version]} | sampling)
    make_tokenizer(version).save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    listed = {str(BASE + i): {"content": token} | flags for i, token in enumerate(special_tokens(version))}
    ends = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    settings = {
        "added_tokens_decoder": listed,
        "chat_template": TEMPLATES[version],
        "clean_up_tokenization_spaces": True,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 1000000000000000019884624838656 if version == "3.0" else 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", settings | ends)
    write_json(folder / "special_tokens_map.json", ends)
    original = folder / "original"  # Meta's own files beside Hugging Face's
    original.mkdir()
    (original / "consolidated.00.pth").write_bytes(b"a pickle that nobody may open")
    (original / "tokenizer.model").write_bytes(b"aGVsbG8= 0\n")
    heads = {"n_heads": layout.sizes["num_attention_heads"], "n_kv_heads": layout.sizes["num_key_value_heads"]}
    write_json(original / "params.json", {"dim": layout.sizes["hidden_size"], "vocab_size": VOCAB} | heads)
    return folder


def change_tensor(folder, name, change):
    """Rewrite one tensor of a sharded folder."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    path = folder / index[name]
    shard = load_file(path)
    shard[name] = change(shard[name]).contiguous()
    save_file(shard, path, metadata={"format": "pt"})


if __name__ == "__main__":
    write_llama3(Path(sys.argv[1]), *(sys.argv[2:] or ["3.1"]))
