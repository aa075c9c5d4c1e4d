"""Random small models of transformers' own, of every family that refimpl runs, and what they make of a text."""

import torch

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = 7
FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS = {
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 24}),
    "mistral-without-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biases-window": (
        "Qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, FULL, SLIDING],
            "num_hidden_layers": 3,
        },
    ),
}
"""By name: a family, and its options."""


def random_model(family="Llama", dtype=torch.float32, **options):
    """A model of transformers with seeded weights that are wide enough for differences to show."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**(SIZES | options))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    return model


def variant(name, dtype=torch.float32, **options):
    """One of VARIANTS."""
    family, own = VARIANTS[name]
    return random_model(family, dtype, **(own | options))


def their_greedy(model, token_ids, count):
    """The ``count`` tokens that transformers draws next, each from the whole text anew."""
    token_ids = list(token_ids)
    with torch.inference_mode():
        for _ in range(count):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[-count:]
