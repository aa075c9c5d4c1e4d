"""What memory_report says: bytes and blocks that add up, waste bounded by a block, and the contiguous cache beside it."""

import pytest

from refimpl import LLM, MemoryReport, SamplingParams
from refimpl.cache import KVCacheManager, PrefixCache
from refimpl.errors import RefimplError
from refimpl.executor.device import resolve_device
from refimpl.memory_report import CacheUsage, MemoryPart, SettingChange

OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 50, "block_size": 4, "max_model_len": 40}


def add(engine, request_id, prompt, **params):
    engine.add_request(request_id, prompt, SamplingParams(temperature=0, ignore_eos=True, **params))


def test_the_report_counts_blocks_and_bytes_of_what_runs():
    with LLM("tiny", **OPTIONS) as llm:
        config = llm.engine.model_config
        empty = llm.memory_report()
        assert empty.block_bytes == 4 * config.kv_bytes_per_token(4)
        assert empty.weight_bytes == 4 * config.num_parameters
        assert empty.pool_bytes == 50 * empty.block_bytes
        assert (empty.usage.used_blocks, empty.usage.free_blocks, empty.usage.waste) == (0, 50, 0.0)
        add(llm.engine, "a", [1] * 9, max_tokens=20)
        add(llm.engine, "b", [2] * 4, max_tokens=20)
        llm.engine.step()
        usage = llm.memory_report().usage
        assert (usage.num_sequences, usage.used_blocks, usage.filled_slots, usage.wasted_slots) == (2, 4, 13, 3)
        assert llm.memory_report().contiguous_bytes == 2 * 10 * empty.block_bytes
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            usage = llm.memory_report().usage
            assert usage.used_blocks + usage.cached_blocks + usage.free_blocks == 50
            assert usage.wasted_slots <= 3 * usage.num_sequences
        assert llm.memory_report().usage.cached_blocks > 0


def test_shared_blocks_are_counted_once():
    with LLM("tiny", **OPTIONS) as llm:
        add(llm.engine, "a", [1] * 10, max_tokens=9, n=3)
        llm.engine.step()
        usage = llm.memory_report().usage
        assert (usage.num_sequences, usage.used_blocks, usage.filled_slots, usage.shared_slots) == (3, 3, 10, 20)
        llm.engine.step()  # each writes into a last block of its own
        usage = llm.memory_report().usage
        assert (usage.used_blocks, usage.filled_slots, usage.shared_slots) == (5, 2 * 4 + 3 * 3, 2 * 2 * 4)


def test_the_report_is_a_table_for_people():
    with LLM("tiny", **OPTIONS) as llm:
        add(llm.engine, "a", [1] * 9, max_tokens=20)
        llm.engine.step()
        lines = str(llm.memory_report()).splitlines()
        assert lines[0].split() == [str(resolve_device("auto")) + ",", "float32", "MiB"]
        notes = {line[:22].strip(): line[32:].strip() for line in lines[1:]}
        assert notes["KV cache, reserved"] == "50 blocks of 4 tokens"
        assert notes["used"] == "3 blocks, 1 sequences"
        assert notes["wasted inside"] == "25.0% of the used slots"
        assert notes["the same, contiguous"] == "40 tokens reserved a sequence"
        assert notes["would fit in the pool"] == "16 sequences of 9 tokens; contiguous, 5"


def test_the_waste_outside_is_shown_where_there_is_any():
    with LLM("tiny", **OPTIONS | {"num_gpu_blocks_override": 53}, kv_cache_manager="contiguous") as llm:
        add(llm.engine, "a", [1] * 9, max_tokens=20)
        llm.engine.step()
        usage = llm.memory_report().usage
        assert (usage.used_blocks, usage.stranded_blocks, usage.wasted_slots) == (10, 3, 31)
        assert "wasted outside" in str(llm.memory_report())


def test_the_70b_of_the_textbooks_in_numbers():
    """Llama-3-70B in 16 bits: a block is 5 MiB, 64 reservations of 4,096 are 80 GiB, where 500 tokens take 160 MiB each."""
    usage = CacheUsage(16, 64 * 256, 64, 64 * 32, 0, 64 * 224, 64 * 500, 0, 0)
    report = MemoryReport("eight GPUs", 0, 5 * 1024**2, 4_096, usage)
    assert report.pool_bytes == report.contiguous_bytes == 80 * 1024**3
    assert report.sequences_that_fit(500) == (512, 64)
    assert report.usage.waste == pytest.approx(12 / 512)


def test_where_a_gpus_memory_goes_and_what_settings_would_change_are_tables_below():
    usage = CacheUsage(16, 100, 0, 0, 0, 100, 0, 0, 0)
    parts = (
        MemoryPart("weights", 3 * 2**30, ""),
        MemoryPart("CUDA graphs", 2**20, "35"),
        MemoryPart("the whole", 2**32, ""),
    )
    changes = (SettingChange("max_num_seqs=128", 140, 640), SettingChange("block_size=32", 49, -32))
    lines = str(MemoryReport("cuda:0, bfloat16", 0, 2**20, 4_096, usage, parts, changes)).splitlines()
    [first] = [number for number, line in enumerate(lines) if line.split() == ["where", "the", "memory", "goes", "MiB"]]
    assert [line.split() for line in lines[first + 1 : first + 4]] == [
        ["weights", "3,072.0"], ["CUDA", "graphs", "1.0", "35"], ["the", "whole", "4,096.0"]
    ]  # fmt: skip
    assert [line.split() for line in lines[-3:]] == [
        ["with", "another", "setting"],
        ["max_num_seqs=128", "140", "blocks", "+640", "tokens"],
        ["block_size=32", "49", "blocks", "-32", "tokens"],
    ]


def test_a_closed_engine_has_no_report():
    llm = LLM("tiny", **OPTIONS)
    llm.close()
    with pytest.raises(RefimplError, match="closed"):
        llm.memory_report()


def test_usage_of_a_cache_that_shares_counts_each_block_by_who_filled_most_of_it():
    kv = KVCacheManager(8, 4, PrefixCache())
    kv.admit(0, 6)
    kv.fork(0, 1)
    usage = kv.usage({0: 6, 1: 5})  # the second has computed less of the last block
    assert (usage.used_blocks, usage.filled_slots, usage.shared_slots) == (2, 6, 5)
