"""An attention backend of one's own: given as an object, checked, and the engine outlives its mistakes."""

import pytest
import torch

from refimpl import LLM, EngineArgs, SamplingParams
from refimpl.attention import (
    AttentionBackend,
    AttentionMetadata,
    Setting,
    TorchPagedAttention,
    backend_choice,
    choose_backend,
)
from refimpl.errors import ConfigError
from refimpl.executor.serving import who_serves
from refimpl.kernels import native

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


BLOCKS = 40
"""Given, so that on a GPU no step is run beforehand to see what it needs."""


def texts(**options):
    with LLM("tiny", dtype="float64", num_gpu_blocks_override=BLOCKS, **options) as llm:
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
    said = (
        r"attention_backend is .*; it must be one of auto, torch, native, triton, flash_attn, or an object \(not a class\) "
    )
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
    with LLM("tiny", dtype="float64", num_gpu_blocks_override=BLOCKS, attention_backend=own) as llm:
        [failed] = llm.generate("Hello", GREEDY, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        assert f"attention backend 'own': {said}" in failed.outputs[0].stop_reason
        own.wrong = None
        [right] = llm.generate("Hello", GREEDY, use_tqdm=False)
        assert right.outputs[0].text == texts()[0]
        assert llm.engine.audit() == []


def test_names_choose_the_backend_of_refimpl():
    assert {choose_backend(name, Setting(16, dtype=torch.float64)).name for name in ("auto", "torch")} == {"torch"}
    assert choose_backend(Own(), Setting(16)).name == "own"


# ---------------------------------------------------------------------- what auto comes to, and what is refused


@pytest.fixture
def gpu(monkeypatch):
    """Settings of a GPU that is not there: the choice asks for its capability alone."""
    pytest.importorskip("triton")

    def setting(capability, dtype=torch.bfloat16, **rest):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
        return Setting(**{"head_dim": 64, "device": torch.device("cuda", 0), "dtype": dtype, **rest})

    return setting


@pytest.mark.parametrize(
    ("capability", "options", "name", "reason"),
    [
        (90, {}, "triton", "sm_90: decodes by paged_attention, prefills by flash_attention"),
        (80, {"dtype": torch.float16, "block_size": 64}, "triton", "sm_80: decodes by"),
        (75, {"dtype": torch.float16}, "triton", "sm_75: decodes by vector arithmetic, prefills by torch on gathered pages"),
        (70, {"dtype": torch.float16}, "torch", "made for sm_75 and later, and this is sm_70"),
        (90, {"dtype": torch.float32}, "torch", "float32 finds no room in the registers"),
        (90, {"dtype": torch.float64}, "torch", "not in float64"),
        (90, {"block_size": 24}, "torch", "powers of two, and block_size is 24"),
        (90, {"head_dim": 320}, "torch", "up to 256 numbers, and head_dim is 320"),
    ],
)
def test_auto_chooses_by_device_dtype_and_sizes(gpu, capability, options, name, reason):
    choice = backend_choice("auto", gpu(capability, **options))
    assert choice.name == name
    assert reason in choice.reason


def test_auto_on_a_cpu_is_compiled_where_there_is_a_compiler_else_torch(monkeypatch):
    monkeypatch.setattr(native, "_made", lambda: (object(), ""))
    assert backend_choice("auto", Setting(64)) == ("native", native.WHY)
    told = "on a CPU, and the compiled operations know float32 and bfloat16"
    assert backend_choice("auto", Setting(64, dtype=torch.float64)) == ("torch", told)
    monkeypatch.setattr(native, "_made", lambda: (None, "there is no C++ compiler"))
    assert backend_choice("auto", Setting(64)) == ("torch", "on a CPU, and there is no C++ compiler")
    with pytest.raises(ConfigError, match=r"'native', but there is no C\+\+ compiler; use attention_backend='auto'"):
        choose_backend("native", Setting(64))


def test_auto_without_triton_is_torch(gpu, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert backend_choice("auto", gpu(90)) == ("torch", "triton is not installed (torch's CUDA builds bring it)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"dtype": torch.float64},
            "'triton', but the kernels compute in .* not in float64; or use attention_backend='torch'",
        ),
        ({"block_size": 12}, "'triton', but the kernels read blocks of powers of two, and block_size is 12; or use"),
    ],
)
def test_triton_says_what_it_cannot_serve(gpu, options, said):
    with pytest.raises(ConfigError, match=said):
        choose_backend("triton", gpu(90, **options))


def test_triton_on_a_cpu_wants_the_interpreter(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="'triton', but the device is a CPU: set TRITON_INTERPRET=1 before Python starts"):
        choose_backend("triton", Setting(64))


def test_the_choice_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(native, "_made", lambda: (None, "there is no C++ compiler"))
    with caplog.at_level("INFO", logger="refimpl"), LLM("tiny", device="cpu"):
        pass
    told = [record.getMessage() for record in caplog.records if "attention" in record.getMessage()]
    why, sampling = "on a CPU, and there is no C++ compiler", "on a CPU torch's operations are the fastest"
    [line] = told
    assert line.split(": ", 1)[1] == (
        f"decode attention, prefill attention: torch, on gathered pages ({why}); norms, rotary embedding, SwiGLU: "
        f"torch ({why}); sampling: torch ({sampling}); "
        f"steps of decodes, steps with prompts: kernel by kernel, no CUDA graphs (the device is a CPU)"
    )


def served(backend, setting, enforce_eager=False):
    args = EngineArgs(attention_backend=backend, enforce_eager=enforce_eager, max_num_batched_tokens=2_000)
    return {one.operation: one[1:] for one in who_serves(args, setting)}


def test_every_operation_is_told_with_who_serves_it_on_a_gpu(gpu):
    found = served("auto", gpu(90))
    assert found == {
        "decode attention": ("kernel paged_attention", "sm_90"),
        "prefill attention": ("kernel flash_attention", "sm_90"),
        "norms, rotary embedding, SwiGLU": ("Triton kernels", "sm_90"),
        "sampling": ("Triton kernels", "sm_90"),
        "steps of decodes": (
            "35 CUDA graphs, for up to 256 sequences", "a step of decodes needs nothing from the host",
        ),
        "steps with prompts": (
            "46 CUDA graphs, for up to 2,048 tokens", "the host cuts the prompts into tiles beforehand",
        ),
    }  # fmt: skip
    assert served("auto", gpu(90), enforce_eager=True)["steps of decodes"][1] == "enforce_eager=True"


def test_on_a_t4_prefills_are_torchs_and_decodes_are_not(gpu):
    found = served("auto", gpu(75, torch.float16))
    why = "sm_75: Triton has products on tensor cores from sm_80 on"
    assert found["decode attention"] == ("kernel paged_attention", f"{why}; by vector arithmetic")
    assert found["prefill attention"] == ("torch, on gathered pages", why)
    assert found["sampling"] == ("Triton kernels", "sm_75")
    assert found["steps of decodes"][0].startswith("35 CUDA graphs")
    assert found["steps with prompts"] == ("kernel by kernel, no CUDA graphs", "their attention is planned on the host")


@pytest.mark.parametrize(
    ("capability", "options", "attention", "rest"),
    [
        (90, {"dtype": torch.float64}, "not in float64", "not in float64"),
        (90, {"dtype": torch.float32}, "float32 finds no room", "sm_90"),
        (90, {"head_dim": 320}, "head_dim is 320", "sm_90"),
        (90, {"block_size": 24}, "block_size is 24", "sm_90"),
        (70, {"dtype": torch.float16}, "this is sm_70", "this is sm_70"),
    ],
)
def test_what_stays_with_torch_is_told_with_the_reason(gpu, capability, options, attention, rest):
    found = served("auto", gpu(capability, **options))
    assert found["decode attention"][0] == found["prefill attention"][0] == "torch, on gathered pages"
    assert attention in found["decode attention"][1]
    assert rest in found["sampling"][1]
    assert (found["sampling"][0] == "torch") == (rest != "sm_90")
    assert found["steps of decodes"] == (
        "kernel by kernel, no CUDA graphs", "the attention backend torch plans each step on the host",
    )  # fmt: skip


def test_without_triton_all_stays_with_torch(gpu, monkeypatch):
    setting = gpu(90)
    for module in ("importlib.util", "refimpl.kernels.by_triton"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    assert {why for _, why in list(served("auto", setting).values())[:4]} == {
        "triton is not installed (torch's CUDA builds bring it)"
    }


def test_a_backend_of_ones_own_is_named_and_may_be_recorded(gpu):
    own = Own()
    assert served(own, gpu(90))["decode attention"] == ("own", "an object of your own")
    assert served(own, gpu(90))["steps of decodes"][0] == "kernel by kernel, no CUDA graphs"
    own.decodes_on_device = True
    assert served(own, gpu(90))["steps of decodes"][0].startswith("35 CUDA graphs")
