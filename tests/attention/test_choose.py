"""An attention backend of one's own: given as an object, checked, and the engine outlives its mistakes."""

import pytest
import torch

from refimpl import LLM, EngineArgs, SamplingParams
from refimpl.attention import AttentionBackend, AttentionMetadata, Setting, TorchPagedAttention, choose_backend
from refimpl.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["Hello", "A longer prompt, of more than one block of the cache"]


class Own:
    """The torch backend, but for what a test changes."""

    name = "own"

    def __init__(self, wrong=None):
        self.inner, self.wrong, self.steps = TorchPagedAttention(16**-0.5), wrong, []

    def begin_step(self, metadata):
        assert isinstance(metadata, AttentionMetadata)
        self.steps.append(list(metadata.query_lens))
        return self.wrong(self.inner.begin_step(metadata)) if self.wrong else self.inner.begin_step(metadata)


def texts(**options):
    with LLM("tiny", dtype="float64", **options) as llm:
        return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_an_object_computes_every_layer_of_every_step():
    own = Own()
    assert isinstance(own, AttentionBackend)
    assert texts(attention_backend=own) == texts()
    assert own.steps == [[5, 52]] + [[1, 1]] * 5


@pytest.mark.parametrize(
    "wrong", ["flash", "", None, 3, Own, object(), type("Unnamed", (), {"begin_step": print})(), torch.zeros(2), ["torch"]]
)
def test_what_is_no_backend_is_refused_at_construction(wrong):
    said = r"attention_backend is .*; it must be one of auto, torch, triton, flash_attn, or an object \(not a class\) with "
    with pytest.raises(ConfigError, match=said):
        EngineArgs(model="tiny", attention_backend=wrong)


class Wrong:
    """A step whose attention is not what was asked for."""

    def __init__(self, change):
        self.change = change

    def __call__(self, step):
        self.write, self.inner = step.write, step
        return self

    def attend(self, layer_kv, query):
        return self.change(self.inner.attend(layer_kv, query))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda step: None, "begin_step returned a NoneType without write and attend; return an object with write"),
        (Wrong(lambda attended: attended[:1]), r"attend returned [1, 4, 16] in float64; it must be [5, 4, 16] in float64"),
        (
            Wrong(lambda attended: attended.float()),
            r"attend returned [5, 4, 16] in float32; it must be [5, 4, 16] in float64",
        ),
        (Wrong(lambda attended: None), r"attend returned a NoneType; it must be [5, 4, 16] in float64"),
    ],
    ids=["no step", "rows", "dtype", "nothing"],
)
def test_a_wrong_answer_ends_the_request_with_a_sentence_and_the_engine_goes_on(wrong, said, caplog):
    own = Own(wrong)
    with LLM("tiny", dtype="float64", attention_backend=own) as llm:
        [failed] = llm.generate("Hello", GREEDY, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        assert f"attention backend 'own': {said}" in failed.outputs[0].stop_reason
        own.wrong = None
        [right] = llm.generate("Hello", GREEDY, use_tqdm=False)
        assert right.outputs[0].text == texts()[0]
        assert llm.engine.audit() == []


def test_names_choose_the_backend_of_refimpl():
    assert {choose_backend(name, Setting(16)).name for name in ("auto", "torch")} == {"torch"}
    assert choose_backend(Own(), Setting(16)).name == "own"
