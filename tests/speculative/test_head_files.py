"""A head on disk: what is refused, and what is only warned of."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from refimpl import LLM, SamplingParams
from refimpl.errors import CheckpointError, ConfigError, OutOfMemoryError
from refimpl.models.tiny import tiny
from refimpl.speculate.dense import frozen_target
from refimpl.speculative.head_files import CONFIG, VOCABULARY, WEIGHTS, load_head, save_head
from refimpl.speculative.head_model import DraftHead, HeadConfig

CPU = torch.device("cpu")


def target(**sizes):
    return frozen_target(tiny(**sizes), torch.float32, CPU)


@pytest.fixture
def folder(tmp_path):
    model = target()
    config = HeadConfig(
        target="tiny", target_fingerprint="abc", hidden_size=64, vocab_size=320, draft_vocab_size=10, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, attends=(1,), intermediate_size=16,
    )  # fmt: skip
    head = DraftHead(config, model, torch.arange(10) * 2)
    for weight in head.own_weights().values():
        weight.data.normal_()
    save_head(head, tmp_path)
    return tmp_path


def load(folder, model, fingerprint="abc"):
    return load_head(folder, model, "some model", fingerprint)


def test_it_holds_the_heads_weights_in_8_bits_and_none_of_the_target(folder):
    tensors = load_file(folder / WEIGHTS)
    vocabulary = tensors.pop(VOCABULARY)
    assert vocabulary.tolist() == list(range(0, 20, 2))
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith(".scale")}
    assert {(tensor.dim(), tensor.dtype) for tensor in tensors.values()} == {(2, torch.int8), (1, torch.float16)}
    assert all(len(scale) == len(tensors[name.removesuffix(".scale")]) for name, scale in scales.items())
    assert sum(tensor.numel() for tensor in tensors.values()) == load(folder, target()).config.num_parameters


@pytest.mark.parametrize("sizes", [{"hidden_size": 32}, {"vocab_size": 300}, {"num_key_value_heads": 4}])
def test_a_target_of_other_sizes_is_refused(folder, sizes):
    [(name, size)] = sizes.items()
    with pytest.raises(ConfigError, match=f"{name} .*some model has {size}.*refimpl speculate train"):
        load(folder, target(**sizes))


def test_a_target_without_the_layer_that_it_attends_to_is_refused(folder):
    with pytest.raises(ConfigError, match="attends to layers \\(1,\\) of its target; some model has 1"):
        load(folder, target(num_hidden_layers=1))


def test_other_weights_of_the_same_sizes_are_warned_of(folder, caplog):
    with caplog.at_level(logging.WARNING):
        load(folder, target(), fingerprint="other")
    assert "trained for other weights" in caplog.text
    caplog.clear()
    load(folder, target())
    assert caplog.text == ""


def test_missing_and_damaged_files_are_named(folder):
    (folder / WEIGHTS).write_bytes(b"none")
    with pytest.raises(CheckpointError, match=WEIGHTS):
        load(folder, target())
    (folder / CONFIG).write_text('{"target": 1}')
    with pytest.raises(CheckpointError, match="no configuration of a draft head"):
        load(folder, target())
    (folder / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"no readable config\.json"):
        load(folder, target())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm"), "norm are missing, extra or misshapen"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "extra are missing"),
        (lambda tensors: tensors.update(norm=torch.ones(3)), "norm are missing"),
        (lambda tensors: tensors.pop(VOCABULARY), "does not name 10 tokens"),
        (lambda tensors: tensors.update(vocabulary=torch.arange(10).flip(0)), "out of order or range"),
        (lambda tensors: tensors.update(vocabulary=torch.arange(10) + 311), "out of order or range"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(folder, change, message):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        load(folder, target())


def test_releasing_a_head_leaves_its_target(folder):
    model = target()
    head = load(folder, model)
    head.release()
    assert model.embed_tokens.untyped_storage().nbytes() > 0
    assert model.compute_logits(torch.ones(1, 64)).shape == (1, 320)


def test_its_weights_are_counted_before_loading_and_in_the_report(folder, monkeypatch):
    head = load(folder, target())
    alone = 4 * tiny().config.num_parameters
    drafts = {"method": "head", "model": str(folder), "num_speculative_tokens": 2, "adaptive": False}
    with LLM(tiny(), dtype="float32", speculative_config=drafts, max_model_len=64) as llm:
        assert llm.memory_report().weight_bytes == alone + 4 * head.config.num_held(1)
        assert llm.memory_report().block_bytes == 8192, "its keys and values are the target's"
        [output] = llm.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: alone)
    with pytest.raises(OutOfMemoryError, match=r"and its draft head has 0\.00 .*dtype=bfloat16 takes") as caught:
        LLM(tiny(), dtype="float32", speculative_config=drafts)
    assert caught.value.numbers["needed"] == alone + 4 * head.config.num_held(1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_it_drafts_in_every_dtype(folder, dtype):
    drafts = {"method": "head", "model": str(folder), "num_speculative_tokens": 2, "adaptive": False}
    found = []
    for speculative in (None, drafts):
        with LLM(tiny(), dtype=dtype, speculative_config=speculative, max_model_len=64, num_gpu_blocks_override=16) as llm:
            params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            [output] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
            assert output.outputs[0].finish_reason == "length", output.outputs[0].stop_reason
            found.append(output.outputs[0].token_ids)
            drafted = sum(len(row) for record in llm.engine.events.records for row in record.drafts)
    assert drafted
    if dtype in ("float32", "float64"):  # in 16 bits three rows may round a tie otherwise than one
        assert found[0] == found[1]


def test_a_head_that_is_not_there_is_told_before_the_target_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("refimpl.executor.local.load_model", lambda *_: pytest.fail("loaded"))
    with pytest.raises(CheckpointError, match="refimpl speculate train"):
        LLM(tiny(), speculative_config={"method": "head", "model": str(tmp_path), "num_speculative_tokens": 2})
