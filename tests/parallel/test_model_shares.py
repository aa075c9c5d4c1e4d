"""A rank's share of a model: which heads, rows and columns, how many bytes; and that the shares compute the whole."""

import dataclasses

import pytest
import torch
from asserts import assert_close, assert_same
from thread_ranks import on_ranks

from refimpl.attention.backend import AttentionMetadata
from refimpl.attention.torch_paged import TorchPagedAttention
from refimpl.cache.kv_cache import KVCache
from refimpl.errors import ConfigError
from refimpl.loading.checkpoint import load_model, open_checkpoint
from refimpl.loading.dummy import ShapeCheckpoint
from refimpl.model_shares import all_reduce_bytes, check_size, first_kv_head, held_tokens, share_of, sizes_that_fit
from refimpl.models.tiny import tiny
from refimpl.quantization.fp8 import Fp8
from refimpl.quantization.method import weight_bytes
from refimpl.quantization.plain import PLAIN
from refimpl.ranks import ALONE
from refimpl.simulate.models import find_model
from refimpl.speculative.head_files import load_head, save_head
from refimpl.speculative.head_model import DraftHead, HeadConfig

CPU = torch.device("cpu")
SHRUNKEN_70B = tiny(num_attention_heads=64, num_key_value_heads=8, head_dim=4, intermediate_size=128)
IDS = torch.tensor([5, 319, 77, 0, 160, 161, 80])


def forward(model):
    """Hidden states and logits of one prompt."""
    cache = KVCache(model.share, 4, 4, model.embed_tokens.dtype, CPU)
    count = len(IDS)
    positions = torch.arange(count)
    metadata = AttentionMetadata.of([count], [count], 4, torch.tensor([[1, 2]], dtype=torch.int32), positions + 4)
    attention = TorchPagedAttention(model.config.head_dim**-0.5).begin_step(metadata)
    hidden = model(IDS, positions, cache.layers, attention)
    return hidden, model.compute_logits(hidden)


def on_each(size, checkpoint, load_format="auto", method=PLAIN, dtype=torch.float64):
    def work(ranks):
        model = load_model(checkpoint, load_format, dtype, CPU, 0, method=method, ranks=ranks)
        ranks.calls.clear()
        return model, *forward(model), list(ranks.calls)

    with torch.inference_mode():
        return on_ranks(size, work)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_shares_of_a_shrunken_70b_compute_the_whole(size):
    with torch.inference_mode():
        wanted = forward(load_model(SHRUNKEN_70B, "auto", torch.float64, CPU, 0))
    for model, hidden, logits, _ in on_each(size, SHRUNKEN_70B):
        assert model.layers[0].attention.num_heads == 64 // size
        assert_close(hidden, wanted[0], 1e-9, 1e-9, "hidden states")
        assert_close(logits, wanted[1], 1e-9, 1e-9, "logits")


def test_fewer_key_heads_than_ranks_are_copied():
    checkpoint = tiny(num_attention_heads=4, num_key_value_heads=2)
    with torch.inference_mode():
        wanted = forward(load_model(checkpoint, "auto", torch.float64, CPU, 0))[1]
    found = on_each(4, checkpoint)
    assert [first_kv_head(checkpoint.config, rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    for model, _, logits, _ in found:
        assert (model.share.num_attention_heads, model.share.num_key_value_heads) == (1, 1)
        assert_close(logits, wanted, 1e-9, 1e-9, "logits")


@pytest.mark.parametrize("size", [2, 4])
def test_biases_go_with_their_outputs_and_count_once(size):
    """Those of Q, K and V with the heads; those behind a sum over ranks are added after it. Norms of heads are whole."""
    given = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True}
    checkpoint = dataclasses.replace(tiny(), config=dataclasses.replace(tiny().config, **given))
    with torch.inference_mode():
        whole = load_model(checkpoint, "dummy", torch.float64, CPU, 0)
        wanted = forward(whole)[0]
    assert float(whole.layers[0].attention.o_bias.abs().min()) > 0
    for _, hidden, _, _ in on_each(size, checkpoint, load_format="dummy"):
        assert_close(hidden, wanted, 1e-9, 1e-9, "hidden states")


@pytest.mark.parametrize("vocab_size", [5, 321, 333])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_no_token_are_no_logits(vocab_size, tied):
    checkpoint = tiny(vocab_size=vocab_size)
    config = dataclasses.replace(checkpoint.config, tie_word_embeddings=tied)
    checkpoint = dataclasses.replace(checkpoint, config=config)
    ids = torch.arange(0, vocab_size, max(1, vocab_size // 7))

    def work(ranks):
        model = load_model(checkpoint, "dummy", torch.float64, CPU, 0, ranks=ranks)
        x = model.vocabulary.embed(model.embed_tokens, ids, torch.float64)
        return x, model.compute_logits(x)

    with torch.inference_mode():
        wanted = on_ranks(1, lambda _: work(ALONE))[0]
        for x, logits in on_ranks(4, work):
            assert logits.shape == (len(ids), vocab_size)
            assert_same(x, wanted[0], "embedding")
            assert_close(logits, wanted[1], 1e-9, 1e-12, "logits")
    spans = [held_tokens(vocab_size, rank, 4) for rank in range(4)]
    assert [token for span in spans for token in span] == list(range(vocab_size))


def test_random_weights_are_the_same_model_on_any_number_of_ranks():
    wanted = load_model(SHRUNKEN_70B, "dummy", torch.bfloat16, CPU, 3)
    shares = on_ranks(2, lambda ranks: load_model(SHRUNKEN_70B, "dummy", torch.bfloat16, CPU, 3, ranks=ranks))
    assert_same(torch.cat([one.embed_tokens for one in shares])[:320], wanted.embed_tokens.data, "embedding")
    with torch.inference_mode():
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
        parts = [one.layers[1].mlp.down_proj(one.layers[1].mlp.gate_up_proj(x)[:, :64]) for one in shares]
        assert all(part.shape == (3, 64) for part in parts)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_fp8_matrices_are_split_before_they_are_quantised(load_format):
    """Outputs keep their scales; inputs that are split get scales of their own, so sums agree up to FP8's rounding."""
    with torch.inference_mode():
        whole = load_model(SHRUNKEN_70B, load_format, torch.bfloat16, CPU, 0, method=Fp8())
        shares = on_ranks(
            2, lambda ranks: load_model(SHRUNKEN_70B, load_format, torch.bfloat16, CPU, 0, method=Fp8(), ranks=ranks)
        )
    gate_up = [one.layers[0].mlp.gate_up_proj for one in shares]
    assert_same(torch.cat([one.scales[:64] for one in gate_up]), whole.layers[0].mlp.gate_up_proj.scales[:128], "gate")
    first = whole.layers[0].attention.qkv_proj
    queries = torch.cat([one.layers[0].attention.qkv_proj.weight[:128].float() for one in shares])
    assert_same(queries, first.weight[:256].float(), "queries")
    columns = torch.cat(
        [one.layers[0].mlp.down_proj.weight.float() * one.layers[0].mlp.down_proj.scales[:, None] for one in shares], 1
    )
    down = whole.layers[0].mlp.down_proj
    assert_close(columns, down.weight.float() * down.scales[:, None], 0.13, 1e-3, "down")


def test_collectives_of_a_step_are_two_a_layer_and_one():
    [(model, _, _, calls), _] = on_each(2, SHRUNKEN_70B)
    reduces = [count for kind, count in calls if kind == "all_reduce"]
    assert len(reduces) == 2 * model.config.num_hidden_layers + 1
    assert sum(reduces) == all_reduce_bytes(model.config, len(IDS), 8)
    assert [kind for kind, _ in calls if kind != "all_reduce"] == ["all_gather"]


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
@pytest.mark.parametrize("method", [PLAIN, Fp8()])
def test_a_rank_holds_its_part_of_the_bytes(name, method):
    config = find_model(name)
    whole, norms = weight_bytes(config, method, 2), 2 * (2 * config.num_hidden_layers + 1) * config.hidden_size
    for size in (2, 4, 8):
        share = weight_bytes(share_of(config, size), method, 2)
        # Norms are on every rank, as are the scales of the output channels whose inputs are split.
        scales = 4 * 2 * config.hidden_size * config.num_hidden_layers if method.name else 0
        assert share == (whole - norms - scales) // size + norms + scales
        assert share_of(config, size).kv_bytes_per_token(2) * size == config.kv_bytes_per_token(2)


def test_a_rank_loads_its_slices_alone(monkeypatch):
    copied = []
    real = torch.Tensor.copy_

    def counting(self, source, *rest):
        if isinstance(source, torch.Tensor):
            copied.append(source.numel())
        return real(self, source, *rest)

    def work(ranks):
        return load_model(SHRUNKEN_70B, "auto", torch.float64, CPU, 0, ranks=ranks)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    work(ALONE)
    alone, norms = sum(copied), (2 * 2 + 1) * 64
    copied.clear()
    on_ranks(4, work)
    assert sum(copied) == alone + 3 * norms


def test_sizes_that_do_not_divide_are_refused_with_those_that_do(smollm2):
    config = open_checkpoint("smollm2").config
    assert sizes_that_fit(config) == [1, 3]
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size is 2, but of smollm2 9 query heads cannot .*; it can be 1, 3"
    ):
        check_size(config, 2, "smollm2")
    assert sizes_that_fit(find_model("llama-3-70b")) == [1, 2, 4, 8, 16, 32, 64]
    odd = tiny(num_attention_heads=8, num_key_value_heads=8, intermediate_size=130).config
    with pytest.raises(ConfigError, match="130 columns of its feed-forward layer cannot"):
        check_size(odd, 4, "odd")
    six = tiny(num_attention_heads=12, num_key_value_heads=6, intermediate_size=132).config
    with pytest.raises(ConfigError, match="6 key/value heads can be neither dealt out nor copied"):
        check_size(six, 4, "six")
    assert ShapeCheckpoint("x", six).config is six


class Elementwise:
    """A context whose attention treats every head alone."""

    def attend(self, layer, query, positions):
        return query.tanh() * (1 + positions[:, None, None])


@pytest.mark.parametrize("drafted", [10, 320])
def test_a_draft_head_drafts_the_same_on_ranks(tmp_path, drafted):
    """Each rank has the query heads of its keys; frequent tokens' rows of the output head are gathered."""
    checkpoint, generator = tiny(), torch.Generator().manual_seed(4)
    sizes = {
        name: getattr(checkpoint.config, name) for name in HeadConfig.__struct_fields__ if hasattr(checkpoint.config, name)
    }
    config = HeadConfig(
        **sizes | {"intermediate_size": 48},
        target="tiny",
        target_fingerprint="x",
        draft_vocab_size=drafted,
        attends=(1, None),
    )
    model = load_model(checkpoint, "auto", torch.float64, CPU, 0)
    head = DraftHead(config, model, torch.arange(drafted) * (320 // drafted))
    for weight in head.own_weights().values():
        weight.data.normal_(0.0, 0.2, generator=generator)
    save_head(head, tmp_path)
    state = torch.randn(3, 64, generator=generator, dtype=torch.float64)

    def work(ranks):
        target = load_model(checkpoint, "auto", torch.float64, CPU, 0, ranks=ranks)
        loaded = load_head(tmp_path, target, "tiny", "x")
        assert sum(weight.numel() for weight in loaded.parameters()) == config.num_held(ranks.size)
        found = loaded(state, torch.tensor([3, 200, 319]), torch.arange(3), Elementwise())
        return loaded.blocks[0].q_proj.weight.shape[0], found, loaded.full_logits(found)

    with torch.inference_mode():
        _, wanted, wanted_logits = work(ALONE)
        for rows, found, logits in on_ranks(2, work):
            assert rows == 2 * 16
            assert_close(found, wanted, 1e-9, 1e-9, "state")
            assert_close(logits[:, ::32], wanted_logits[:, ::32], 1e-9, 1e-9, "logits")
