"""Training sees what the running engine sees: hidden states and a head's drafts, dense and through the paged cache."""

import dataclasses

import numpy as np
import pytest
import torch

from refimpl.attention.backend import AttentionMetadata
from refimpl.attention.torch_paged import TorchPagedAttention
from refimpl.cache.kv_cache import KVCache
from refimpl.loading.checkpoint import load_model
from refimpl.models.tiny import tiny
from refimpl.speculate.dense import DenseContext, frozen_target, run_target
from refimpl.speculate.drafters import HeadDrafter
from refimpl.speculate.self_text import Texts
from refimpl.speculative.head_files import load_head, read_head_config, save_head, shipped_head
from refimpl.speculative.head_model import HeadConfig, PagedContext

CPU = torch.device("cpu")
DTYPE = torch.float64
BLOCK = 4


def chats(*lengths):
    generator = np.random.default_rng(3)
    return Texts.of([(generator.integers(0, 320, length).tolist(), 2) for length in lengths])


def config_of(checkpoint, attends, vocabulary=40):
    c = checkpoint.config
    return HeadConfig(
        target=checkpoint.name, target_fingerprint=checkpoint.fingerprint(), hidden_size=c.hidden_size,
        vocab_size=c.vocab_size, draft_vocab_size=vocabulary, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, attends=attends,
        intermediate_size=48,
    )  # fmt: skip


def prefilled(model, token_ids):
    """The paged cache after a whole text, and its hidden states; blocks in an order of their own."""
    length = len(token_ids)
    blocks = torch.tensor([[5, 2, 7, 1, 6, 3][: -(-length // BLOCK)]])
    cache = KVCache(model.config, 8, BLOCK, DTYPE, CPU)
    positions = torch.arange(length)
    slots = blocks[0][positions // BLOCK] * BLOCK + positions % BLOCK
    backend = TorchPagedAttention(model.config.head_dim**-0.5)
    step = backend.begin_step(AttentionMetadata.of([length], [length], BLOCK, blocks, slots))
    hidden = model(torch.as_tensor(token_ids).long(), positions, cache.layers, step)

    def context(seen):
        metadata = AttentionMetadata.of([1], [seen], BLOCK, blocks, torch.zeros(1, dtype=torch.long))
        return PagedContext(model, cache.layers, backend.begin_step(metadata))

    return hidden, context


def tiny_with_windows():
    """The second layer's tokens attend to five."""
    plain = tiny()
    return dataclasses.replace(plain, config=dataclasses.replace(plain.config, windows=(None, 5)))


@pytest.mark.parametrize("checkpoint", [tiny(), tiny_with_windows()], ids=["plain", "windows"])
def test_dense_hidden_states_are_those_of_the_paged_cache(checkpoint):
    model = frozen_target(checkpoint, DTYPE, CPU)
    texts = chats(17, 9, 13)
    batch = run_target(model, texts, [2, 0, 1], np.zeros(39, dtype=bool), [])
    for row, text in enumerate([2, 0, 1]):
        hidden, _ = prefilled(model, texts[text])
        torch.testing.assert_close(batch.hidden[row, : len(texts[text])], hidden, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("checkpoint", "attends"),
    [*((tiny(), attends) for attends in [(1,), (0, None), (None,), (0, 1)]), (tiny_with_windows(), (0, 1))],
    ids=str,
)
def test_a_head_drafts_alike_in_training_and_over_the_paged_cache(checkpoint, attends, tmp_path):
    frozen, loaded = frozen_target(checkpoint, DTYPE, CPU), load_model(checkpoint, "auto", DTYPE, CPU, 0)
    vocabulary = torch.arange(40) * 7
    drafter = HeadDrafter(frozen, config_of(checkpoint, attends), vocabulary, 3, seed=1)
    drafter.settle()  # what the file keeps
    texts = chats(17, 11)
    batch = run_target(frozen, texts, [0, 1], np.zeros(28, dtype=bool), drafter.kept_layers)
    with torch.no_grad():
        states = list(drafter.states(batch, 3))
    save_head(drafter.head, tmp_path)
    head = load_head(tmp_path, loaded, checkpoint.name, checkpoint.fingerprint())
    for row in (0, 1):
        hidden, context = prefilled(loaded, texts[row])
        for t in (3, 6, 7):  # the last of a block, and the first of the next
            state = hidden[t : t + 1]
            for i in (1, 2, 3):
                token = torch.tensor([texts[row][t + i]]).long()
                state = head(state, token, torch.tensor([t + i]), context(t + 1))
                torch.testing.assert_close(state[0], states[i - 1][row, t], rtol=1e-8, atol=1e-8)
                whole = loaded.compute_logits(state)[0]
                drafted = head.full_logits(state)[0]
                torch.testing.assert_close(drafted[vocabulary], whole[vocabulary], rtol=1e-6, atol=1e-6)
                assert set(drafted.isneginf().nonzero().flatten().tolist()) == set(range(320)) - set(vocabulary.tolist())


def test_training_can_reach_every_weight_of_a_head():
    checkpoint = tiny()
    model = frozen_target(checkpoint, DTYPE, CPU)
    drafter = HeadDrafter(model, config_of(checkpoint, (0, None)), torch.arange(40), 2, seed=1)
    texts = chats(17, 11)
    batch = run_target(model, texts, [0, 1], np.zeros(28, dtype=bool), drafter.kept_layers)
    *_, last = drafter.states(batch, 2)
    drafter.logits(last.flatten(0, 1)).square().sum().backward()
    for name, weight in drafter.weights().items():
        assert weight.grad is not None, name
        assert bool((weight.grad != 0).any()), name
    assert model.embed_tokens.grad is None


def test_context_of_training_is_the_texts_own(tmp_path):
    """What stands in another text of the batch, or later in the same one, changes nothing."""
    checkpoint = tiny()
    model = frozen_target(checkpoint, DTYPE, CPU)
    drafter = HeadDrafter(model, config_of(checkpoint, (1,)), torch.arange(40), 1, seed=1)
    texts = chats(12, 12)
    changed = Texts.of([([*texts[0].tolist()[:8], 1, 1, 1, 1], 2), ([4] * 12, 2)])
    batches = [run_target(model, t, [0, 1], np.zeros(24, dtype=bool), drafter.kept_layers) for t in (texts, changed)]
    with torch.no_grad():
        one, other = (next(iter(drafter.states(batch, 1))) for batch in batches)
    torch.testing.assert_close(one[0, :7], other[0, :7])
    assert not torch.allclose(one[0, 7], other[0, 7])
    assert isinstance(DenseContext(model, batches[0]), DenseContext)


def test_config_on_disk_is_the_heads(tmp_path):
    checkpoint = tiny()
    model = frozen_target(checkpoint, DTYPE, CPU)
    config = config_of(checkpoint, (0, None))
    drafter = HeadDrafter(model, config, torch.arange(40), 1, seed=1)
    save_head(drafter.head, tmp_path)
    assert read_head_config(tmp_path) == config
    assert config.num_parameters == sum(weight.numel() for weight in drafter.weights().values())
    assert shipped_head("no such hash") is None
