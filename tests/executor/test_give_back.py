"""An engine that cannot be built gives back what it had taken by then, though its exception is kept."""

import gc
import weakref

import pytest

from refimpl import LLM
from refimpl.cache.kv_cache import KVCache
from refimpl.errors import OutOfMemoryError
from refimpl.executor import local, memory_advice
from refimpl.models.llama import LlamaForCausalLM
from refimpl.models.tiny import tiny

OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 20, "device": "cpu"}


@pytest.fixture
def made(monkeypatch):
    """Weak references to every model and cache that is made."""
    made = []
    for kind in (LlamaForCausalLM, KVCache):

        def init(self, *args, _init=kind.__init__, **kwargs):
            _init(self, *args, **kwargs)
            made.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", init)
    return made


def refused(*args, **kwargs):
    raise RuntimeError("refused")


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("refimpl.executor.local.KVCache", 1),
        ("refimpl.executor.local.InputBatch", 2),
        ("refimpl.executor.local.choose_backend", 1),
        ("refimpl.engine.make_scheduler", 2),
        ("refimpl.engine.Recorder", 2),
    ],
)
def test_what_was_made_before_a_failure_is_given_back(monkeypatch, made, where, count):
    monkeypatch.setattr(where, refused)
    with pytest.raises(RuntimeError, match="refused") as kept:
        LLM("tiny", **OPTIONS)
    gc.collect()
    assert [reference() for reference in made] == [None] * count, kept


def test_weights_that_end_in_the_middle_of_loading_are_given_back(made):
    checkpoint = tiny()

    class Torn:
        name, config = "torn", checkpoint.config
        tokenizer, fingerprint = checkpoint.tokenizer, checkpoint.fingerprint

        def weights(self):
            yield next(checkpoint.weights())
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as kept:
        LLM(Torn(), **OPTIONS)
    gc.collect()
    assert [reference() for reference in made] == [None], kept


def test_a_cache_that_is_half_made_is_given_back_and_the_message_says_what_to_change(monkeypatch):
    layers, make = [], local.KVCache.__init__.__globals__["LayerKV"]

    def half(**tensors):
        if layers:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        layers.append(weakref.ref(tensors["k"]))
        return make(**tensors)

    monkeypatch.setattr("refimpl.cache.kv_cache.LayerKV", half)
    monkeypatch.setattr(local, "free_host_memory", lambda: 2**30)
    with pytest.raises(
        OutOfMemoryError, match=r"tiny: the machine ran out of memory while making the KV cache; 1\.00 GiB"
    ) as kept:
        LLM("tiny", **OPTIONS)
    assert "set num_gpu_blocks_override=" in str(kept.value)
    gc.collect()
    assert layers[0]() is None, kept


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "set cpu_kvcache_space=0.900 (GiB)"),
        ({"fixed": "num_gpu_blocks_override"}, "set num_gpu_blocks_override=921"),
        ({"fixed": "kv_cache_memory_bytes"}, f"set kv_cache_memory_bytes={2**30 * 9 // 10}"),
        ({"num_blocks": 100, "num_host_blocks": 10**9}, "there is room for swap_space=0.802 (GiB)"),
        ({"num_blocks": 0}, "Use a smaller model or dtype"),
    ],
    ids=str,
)
def test_the_advice_names_the_option_that_took_the_memory(options, said):
    advice = memory_advice.after_a_failure_on_a_cpu(
        "making the KV cache", free=2**30, block_bytes=2**20, **({"num_blocks": 10**6} | options)
    )
    assert said in advice


def test_no_thread_is_left_by_an_engine_that_was_not_built(monkeypatch):
    started = []
    monkeypatch.setattr(local, "ThreadPoolExecutor", lambda *args, **kwargs: started.append(args))
    monkeypatch.setattr("refimpl.executor.local.InputBatch", refused)
    with pytest.raises(RuntimeError, match="refused"):
        LLM("tiny", async_scheduling=True, **OPTIONS)
    assert started == []


def test_the_same_process_makes_an_engine_after_one_that_failed(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("refimpl.executor.local.InputBatch", refused)
        with pytest.raises(RuntimeError, match="refused"):
            LLM("tiny", **OPTIONS)
    with LLM("tiny", **OPTIONS) as llm:
        assert len(llm.generate([[1, 2, 3]], use_tqdm=False)) == 1
