"""How far bfloat16 is from float64, layer by layer: no further here than in transformers, whose own error is the measure.

On a GPU the attention, norms, rotary embedding and SwiGLU of refimpl's side are the Triton kernels.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from refimpl import TransformersCheckpoint
from refimpl.attention import AttentionMetadata, Setting, choose_backend
from refimpl.cache.kv_cache import KVCache
from refimpl.kernels.by_triton import by_triton
from refimpl.loading.checkpoint import load_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 16
WORSE = 1.25
"""How many times transformers' own error is allowed: roundings fall differently, and are not to be more."""


def random_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_theta=10_000.0,
        initializer_range=0.06,
    )
    return LlamaForCausalLM(config)


def theirs(model, token_ids):
    """Hidden states of transformers: one tensor ``[L, H]`` after each layer, the last one normed."""
    with torch.inference_mode():
        found = model(torch.tensor([token_ids], device=DEVICE), output_hidden_states=True).hidden_states
    return [hidden[0].double() for hidden in found[1:]]


def ours(model, token_ids, step_lens):
    """The same of refimpl, in steps of so many tokens over a paged cache."""
    config, dtype = model.config, model.embed_tokens.dtype
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = KVCache(config, num_blocks, BLOCK_SIZE, dtype, DEVICE)
    backend = choose_backend("auto", Setting(config.head_dim, DEVICE, dtype, BLOCK_SIZE))
    assert (backend.name == "triton") == by_triton(model.embed_tokens) == (DEVICE.type == "cuda")
    # A norm returns the normed sum, and the sum: what the layer before it made, with its residual.
    found = [[] for _ in model.layers]
    norms = [layer.input_norm for layer in list(model.layers)[1:]]
    hooks = [
        norm.register_forward_hook(lambda _module, _args, out, kept=kept: kept.append(out[1].double()))
        for norm, kept in zip(norms, found, strict=False)
    ]
    begin = 0
    with torch.inference_mode():
        for count in step_lens:
            positions = torch.arange(begin, begin + count, device=DEVICE)
            metadata = AttentionMetadata.of(
                query_lens=[count],
                context_lens=[begin + count],
                block_size=BLOCK_SIZE,
                block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=DEVICE)[None],
                slot_mapping=positions + BLOCK_SIZE,
            )
            ids = torch.tensor(token_ids[begin : begin + count], device=DEVICE)
            found[-1].append(model(ids, positions, cache.layers, backend.begin_step(metadata)).double())
            begin += count
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept) for kept in found]


def errors(found, exact):
    """Relative L2 error of a token's hidden states, root mean square over the tokens, layer by layer.

    Over all tokens at once it would be the rounding of one number: from a middle layer on, a single one of the first token
    holds 98% of the embedded model's squared norm.
    """
    relative = [(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(found, exact, strict=True)]
    return [float(of_tokens.square().mean().sqrt()) for of_tokens in relative]


def cast(model, dtype, reference):
    """The model in another dtype, but for the frequencies of its rotary embedding: .to() would round them too, and no
    checkpoint that is loaded in bfloat16 has them so."""
    model = copy.deepcopy(model).to(device=DEVICE, dtype=dtype).eval()
    model.model.rotary_emb.inv_freq = reference.model.rotary_emb.inv_freq.to(DEVICE, copy=True)
    return model


def compared(reference, token_ids, step_lens):
    """Errors of refimpl and of transformers in bfloat16, layer by layer; the weights are bfloat16's in float64 too."""
    rounded = cast(reference, torch.bfloat16, reference)
    exact = theirs(cast(rounded, torch.float64, reference), token_ids)
    model = load_model(TransformersCheckpoint(rounded), "auto", torch.bfloat16, DEVICE, seed=0)
    assert sum(step_lens) == len(token_ids)
    return errors(ours(model, token_ids, step_lens), exact), errors(theirs(rounded, token_ids), exact)


@pytest.mark.parametrize("step_lens", [[160], [100, 37, *[1] * 23]], ids=["a prompt", "chunks and decodes"])
def test_bfloat16_is_no_further_from_float64_than_transformers(step_lens):
    token_ids = torch.randint(0, 512, (160,), generator=torch.Generator().manual_seed(1)).tolist()
    own, measure = compared(random_llama(), token_ids, step_lens)
    assert all(1e-4 < error < 0.1 for error in measure), "bfloat16 keeps 8 bits"
    ratios = [a / b for a, b in zip(own, measure, strict=True)]
    assert max(ratios) <= WORSE, ratios


def test_bfloat16_of_the_embedded_model_is_no_further_from_float64_than_transformers(smollm2):
    """All of it on a GPU; its first layers on a CPU, for which float64 is slow."""
    layers = {} if DEVICE.type == "cuda" else {"num_hidden_layers": 4}
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, **layers)
    own, measure = compared(reference, list(range(1000, 1024)), [20, *[1] * 4])
    ratios = [a / b for a, b in zip(own, measure, strict=True)]
    assert max(ratios) <= WORSE, ratios
