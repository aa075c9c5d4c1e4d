"""A GPU's memory as sums: parts that make up the card, what settings would change, and advice that holds when taken."""

import re

import pytest

from refimpl.config import GIB
from refimpl.errors import OutOfMemoryError
from refimpl.executor.device_memory import DeviceMemory, Grows, Quantised, gib
from refimpl.executor.memory_advice import after_a_failure, check_room, check_weights, remedies

MIB = 2**20


def llama_8b(**changes):
    """Llama-3-8B in bfloat16 on a card of 24 GiB."""
    numbers = {
        "total": 24 * GIB,
        "taken": GIB // 2,
        "of_this_process": 0,
        "weights": 15 * GIB,
        "libraries": 300 * MIB,
        "activations": Grows(fixed=20 * MIB, each=150_000),
        "graph_pool": Grows(each=100_000),
        "graph_each": 3 * MIB,
        "vocab_size": 128_256,
        "block_bytes": 2 * MIB,
        "block_size": 16,
        "bytes_per_value": 2,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "max_model_len": 8192,
        "gpu_memory_utilization": 0.9,
        "graphs": True,
    }
    return DeviceMemory(**numbers | changes)


def test_the_parts_are_the_whole_card():
    memory = llama_8b(staging=100 * MIB)
    assert memory.num_blocks == llama_8b().num_blocks - 50
    *parts, whole = memory.parts(memory.num_blocks)
    assert whole.num_bytes == 24 * GIB == sum(part.num_bytes for part in parts)
    kept = parts[-1]
    assert kept.name == "kept free"
    assert 0.1 * 24 * GIB <= kept.num_bytes < 0.1 * 24 * GIB + memory.block_bytes + 1
    assert {part.name for part in parts} >= {"weights", "activations, peak", "sampler, at most", "CUDA graphs", "KV cache"}


def test_the_line_goes_through_both_measurements_and_begins_at_nothing_or_more():
    line = Grows.through(2048, 300 * MIB, 1024, 160 * MIB)
    assert (line.at(2048), line.at(1024), line.at(0)) == (300 * MIB, 160 * MIB, 20 * MIB)
    assert Grows.through(2048, 300, 1024, 100).at(0) == 0
    assert Grows.through(2048, 300, 1024, 400).at(1) == 300, "the allocator's pieces: no less with fewer"
    assert Grows.through(1, 70, 1, 70).at(1) == 70


def test_each_change_is_what_the_engine_would_make():
    memory = llama_8b()
    changes = {change.setting: change for change in memory.changes()}
    half = changes["max_num_batched_tokens=4096"]
    assert half.num_blocks - memory.num_blocks == pytest.approx(4096 * 150_000 / memory.block_bytes, abs=1)
    assert half.more_tokens == 16 * (half.num_blocks - memory.num_blocks)
    eager = changes["enforce_eager=True"].num_blocks - memory.num_blocks
    assert eager == pytest.approx((256 * 100_000 + 34 * 3 * MIB) / memory.block_bytes, abs=1)
    more = changes["gpu_memory_utilization=0.95"].num_blocks - memory.num_blocks
    assert more == pytest.approx(0.05 * 24 * GIB / memory.block_bytes, abs=1)
    assert changes["max_num_seqs=128"].num_blocks > memory.num_blocks
    assert abs(changes["block_size=32"].more_tokens) <= 32
    assert changes["max_model_len=4096"].num_blocks > memory.num_blocks, "each slot's tokens and table are half as long"
    assert "dtype of 16 bits" not in changes
    wide = llama_8b(bytes_per_value=4, total=80 * GIB, weights=30 * GIB, block_bytes=4 * MIB)
    assert {c.setting: c for c in wide.changes()}["dtype of 16 bits"].num_blocks > 2 * wide.num_blocks


def test_a_cache_that_is_large_enough_is_not_made_larger():
    memory = llama_8b(total=1000 * GIB, max_num_seqs=2, max_model_len=64)
    assert memory.num_blocks == 4 * 2 * 4
    assert {c.setting: c.more_tokens for c in memory.changes()}["gpu_memory_utilization=0.95"] == 0
    assert "more would serve nothing" in {part.name: part.note for part in memory.parts(32)}["KV cache"]


def test_nothing_is_said_of_other_settings_where_nothing_was_measured():
    memory = llama_8b(measured=False, activations=Grows())
    assert memory.changes() == ()
    notes = {part.name: part.note for part in memory.parts(10)}
    assert notes["activations, peak"] == "not measured: the cache's size is given"


def test_a_step_has_no_more_tokens_than_its_sequences():
    assert llama_8b(max_num_seqs=2, max_model_len=100).step_tokens == 200


# ---------------------------------------------------------------------- advice


def values(advice):
    """The settings that a text names, as options."""
    names = {"enforce_eager": "graphs"}
    found = re.findall(r"(gpu_memory_utilization|max_num_batched_tokens|max_num_seqs|max_model_len)=([\d.]+)", advice)
    options = [{names.get(name, name): float(value) if "." in value else int(value)} for name, value in found]
    return options + [{"graphs": False}] * ("enforce_eager=True" in advice)


@pytest.mark.parametrize("wanted", [None, 8192])
@pytest.mark.parametrize("taken", [GIB // 2, 4 * GIB, 5 * GIB, 6 * GIB])
def test_every_setting_that_is_named_makes_room_alone_and_no_larger_one_does(taken, wanted):
    memory = llama_8b(taken=taken)
    least = memory.blocks_of(wanted) if wanted else 1
    if memory.num_blocks >= least:
        check_room(memory, "cuda:0", wanted)
        return
    with pytest.raises(OutOfMemoryError) as caught:
        check_room(memory, "cuda:0", wanted)
    said = str(caught.value)
    if "all of these together do" in said:
        [together] = re.findall("together do: (.*)", said)
        assert memory.with_(**{k: v for option in values(together) for k, v in option.items()}).num_blocks >= least
        return
    [alone] = re.findall("(?:Each of these alone makes|This makes) room: (.*)", said)
    advised = values(alone)
    assert advised
    for option in advised:
        changed = memory.with_(**option)
        needed = changed.blocks_of(option["max_model_len"]) if "max_model_len" in option else least
        assert changed.num_blocks >= needed, option
        [(name, value)] = option.items()
        step = {"gpu_memory_utilization": -0.01, "max_num_batched_tokens": 256, "max_num_seqs": 1, "max_model_len": 1}.get(
            name
        )
        if step is not None:
            beyond = memory.with_(**{name: value + step})
            needed = beyond.blocks_of(value + step) if name == "max_model_len" else least
            assert beyond.num_blocks < needed, f"{name} is advised further from its value than need be"


def test_the_sum_is_in_the_message():
    memory = llama_8b(taken=6 * GIB, of_this_process=5 * GIB)
    with pytest.raises(OutOfMemoryError) as caught:
        check_room(memory, "cuda:0", None)
    said = str(caught.value)
    assert said.startswith("0 bytes of cuda:0 are left for the KV cache; two blocks are the least, and take 4.00 MiB. ")
    assert "The card has 24.00 GiB, of which gpu_memory_utilization=0.9 allows 21.60 GiB: " in said
    for part in (
        "1.00 GiB are taken by others and by CUDA itself", "5.00 GiB are held by this process already (another engine,",
        "15.00 GiB are weights", "1.16 GiB are activations of 8,192 tokens", "35 CUDA graphs",
    ):  # fmt: skip
        assert part in said
    assert caught.value.numbers["block"] == 2 * MIB


def test_where_no_setting_alone_does_all_together_are_named_or_what_is_lacking():
    both = llama_8b(taken=GIB // 2, weights=21 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"No setting alone makes room; all of these together do: .*enforce_eager"):
        check_room(both, "cuda:0", 4096)
    with pytest.raises(
        OutOfMemoryError, match=r"No setting makes room: [\d.]+ GiB are lacking. Use a smaller model, .*free"
    ):
        check_room(llama_8b(taken=12 * GIB), "cuda:0", None)


def test_weights_are_judged_before_they_are_loaded():
    check_weights(llama_8b(), "llama", "bfloat16", "cuda:0")
    with pytest.raises(
        OutOfMemoryError, match=r"15.00 GiB for its weights in bfloat16; cuda:0 has 4.00 GiB of 24.00 GiB free"
    ):
        check_weights(llama_8b(taken=20 * GIB), "llama", "bfloat16", "cuda:0")
    wide = llama_8b(weights=30 * GIB, bytes_per_value=4)
    with pytest.raises(OutOfMemoryError, match=r"Use dtype=bfloat16 or float16 \(15.00 GiB\)"):
        check_weights(wide, "llama", "float32", "cuda:0")
    check_weights(llama_8b(gpu_memory_utilization=0.1, measured=False), "llama", "bfloat16", "cuda:0")
    share = llama_8b(gpu_memory_utilization=0.5)
    with pytest.raises(OutOfMemoryError, match=r"Set gpu_memory_utilization=0\.76") as caught:
        check_weights(share, "llama", "bfloat16", "cuda:0")
    [advised] = [option for option in values(str(caught.value)) if option != {"gpu_memory_utilization": 0.5}]
    assert share.with_(**advised).num_blocks >= 1


def test_a_second_engine_is_told_what_the_first_one_holds():
    first = llama_8b(total=80 * GIB, max_num_seqs=256)
    held = first.allowed - first.taken
    second = llama_8b(total=80 * GIB, taken=first.taken + held, of_this_process=held)
    with pytest.raises(OutOfMemoryError, match=r"71\.50 GiB of it by this process: close its other engine, or") as caught:
        check_weights(second, "llama", "bfloat16", "cuda:0")
    share = float(re.search(r"give that one gpu_memory_utilization=([\d.]+) at most", str(caught.value))[1])
    for_the_first = first.with_(gpu_memory_utilization=share)
    check_weights(second.with_(taken=for_the_first.allowed), "llama", "bfloat16", "cuda:0")
    assert for_the_first.num_blocks > 1000
    small = llama_8b(total=80 * GIB, taken=20 * GIB, of_this_process=19 * GIB)
    check_weights(small, "llama", "bfloat16", "cuda:0")
    assert small.num_blocks < first.num_blocks


def test_an_allocation_that_fails_after_all_names_a_value_that_fits():
    memory = llama_8b()
    said = after_a_failure(memory, "making the KV cache", "cuda:0", 20 * GIB, 9000, "num_gpu_blocks_override")
    blocks = int(re.search(r"num_gpu_blocks_override=(\d+) fits", said)[1])
    assert memory.weights + memory.libraries + memory.beside + (blocks + 1) * memory.block_bytes <= 20 * GIB
    said = after_a_failure(memory, "making the KV cache", "cuda:0", 20 * GIB, 9000, "kv_cache_memory_bytes")
    assert f"kv_cache_memory_bytes={(blocks + 1) * memory.block_bytes} fits" in said
    assert "smaller model" in after_a_failure(memory, "x", "cuda:0", GIB, 9, "num_gpu_blocks_override")
    said = after_a_failure(memory, "making the KV cache", "cuda:0", 20 * GIB, memory.num_blocks)
    share = float(re.search(r"gpu_memory_utilization=([\d.]+)", said)[1])
    assert share < 0.9
    assert memory.with_(gpu_memory_utilization=share).num_blocks * memory.block_bytes <= 20 * GIB
    assert "enforce_eager=True does without" in after_a_failure(memory, "recording CUDA graphs", "cuda:0", 20 * GIB, 900)


def test_bytes_are_told_in_what_suits_them():
    assert [gib(n) for n in (100, 3 * MIB, 3 * GIB)] == ["100 bytes", "3.00 MiB", "3.00 GiB"]


def test_remedies_are_none_where_there_is_room_for_nothing():
    assert remedies(llama_8b(weights=30 * GIB), 1) == []


FP8, AWQ = Quantised("fp8", 9 * GIB, 7 * GIB), Quantised("awq", 6 * GIB, 4 * GIB)
"""Llama-3-8B's layers in 8 or 4 bits beside its embeddings in bfloat16, roughly; and the layers alone."""


def test_fp8_is_advised_where_the_card_has_it_and_helps():
    tight = llama_8b(taken=8 * GIB, smaller=(FP8,))
    assert tight.num_blocks < 1
    assert "quantization=fp8" in remedies(tight, 100)
    assert tight.quantised(FP8).num_blocks >= 100
    assert "quantization=fp8" not in remedies(llama_8b(taken=8 * GIB), 100), "a card without it"
    assert "quantization=fp8" not in remedies(llama_8b(taken=16 * GIB, smaller=(FP8,)), 1), "it would not do"
    with pytest.raises(OutOfMemoryError, match=r"Use quantization=fp8 \(9\.00 GiB\)"):
        check_weights(llama_8b(taken=12 * GIB, smaller=(FP8,)), "llama", "bfloat16", "cuda:0")
    roomy = llama_8b(smaller=(FP8,))
    changes = {change.setting: change for change in roomy.changes()}
    assert changes["quantization=fp8"].num_blocks == roomy.quantised(FP8).num_blocks > roomy.num_blocks


def test_what_is_quantised_does_not_shrink_with_the_dtype():
    wide = llama_8b(bytes_per_value=4, weights=11 * GIB, weights_of_any_dtype=7 * GIB)
    assert wide.in_16_bits().weights == 9 * GIB
    plain = llama_8b(bytes_per_value=4, weights=30 * GIB, smaller=(Quantised("fp8", 11 * GIB, 7 * GIB),))
    assert plain.in_16_bits().weights == 15 * GIB
    [wide_fp8], [fp8] = plain.smaller, plain.in_16_bits().smaller
    assert plain.in_16_bits().quantised(fp8).weights == plain.quantised(wide_fp8).in_16_bits().weights == 9 * GIB
    assert plain.quantised(wide_fp8).smaller == (), "it is on: advised no more"


def test_of_the_methods_that_help_the_mildest_is_advised():
    both = (FP8, AWQ)
    assert "quantization=fp8" in remedies(llama_8b(taken=8 * GIB, smaller=both), 100)
    tight = llama_8b(taken=10 * GIB, smaller=both)
    assert tight.quantised(FP8).num_blocks < 100 <= tight.quantised(AWQ).num_blocks
    assert [one for one in remedies(tight, 100) if "quant" in one] == ["quantization=awq"]
    with pytest.raises(OutOfMemoryError, match=r"Use quantization=awq \(6\.00 GiB\)"):
        check_weights(llama_8b(taken=16 * GIB, smaller=both), "llama", "bfloat16", "cuda:0")
    settings = [change.setting for change in llama_8b(smaller=both).changes()]
    assert settings[-2:] == ["quantization=fp8", "quantization=awq"]
