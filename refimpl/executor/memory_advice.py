"""What to do when memory is short: which setting to change, and to what value. Each value is computed; all work alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from refimpl.config import GIB
from refimpl.errors import OutOfMemoryError
from refimpl.executor.device_memory import DeviceMemory, Grows, gib

TOKENS = 256
"""``max_num_batched_tokens`` is advised in multiples of this, where it is larger."""


def check_room(memory: DeviceMemory, device: str, wanted_tokens: int | None) -> None:
    """See that the cache holds the context asked for, or, where none was, one block.

    Args:
        memory: all sums.
        device: its name.
        wanted_tokens: an explicit ``max_model_len``.

    Raises:
        OutOfMemoryError: it does not; the message has the sum, and every setting that alone would do.

    """
    least = memory.blocks_of(wanted_tokens) if wanted_tokens else 1
    if memory.num_blocks >= least:
        return
    need = (least + 1) * memory.block_bytes
    what = f"a context of {wanted_tokens:,} tokens takes" if wanted_tokens else "two blocks are the least, and take"
    raise OutOfMemoryError(
        f"{gib(max(0, memory.left))} of {device} are left for the KV cache; {what} {gib(need)}. {told(memory)} "
        f"{_advice(memory, least, bool(wanted_tokens))}",
        available=memory.left,
        needed=need,
        block=memory.block_bytes,
    )


def told(memory: DeviceMemory) -> str:
    """The sum as a sentence."""
    parts = [
        (memory.taken - memory.of_this_process, "are taken by others and by CUDA itself"),
        (memory.of_this_process, "are held by this process already (another engine, tensors)"),
        (memory.weights, "are weights"),
        (memory.libraries, "are kernels and libraries"),
        (memory.activation_bytes, f"are activations of {memory.step_tokens:,} tokens"),
        (memory.sampler_bytes, f"are the sampler's for {memory.max_num_seqs:,} sequences"),
        (memory.batch_bytes, "are the batch's"),
        (memory.staging, "are for swapped blocks on their way"),
        (memory.graph_bytes, f"are {memory.num_graphs} CUDA graphs"),
    ]
    listed = "; ".join(f"{gib(count)} {what}" for count, what in parts if count)
    share = f"gpu_memory_utilization={memory.gpu_memory_utilization:g} allows {gib(memory.allowed)}"
    return f"The card has {gib(memory.total)}, of which {share}: {listed}."


def remedies(memory: DeviceMemory, least: int, shorten: bool = False) -> list[str]:
    """Settings each of which alone gives the cache ``least`` blocks; ``shorten``: a shorter context would do as well."""
    found: list[str] = []
    share = least_share(memory, least)
    if share is not None:
        found.append(f"gpu_memory_utilization={share:g}")
    tokens = _largest(_token_budgets(memory), lambda n: memory.with_(max_num_batched_tokens=n), least)
    if tokens is not None:
        found.append(f"max_num_batched_tokens={tokens}")
    rows = _largest(range(memory.max_num_seqs - 1, 0, -1), lambda n: memory.with_(max_num_seqs=n), least)
    if rows is not None:
        found.append(f"max_num_seqs={rows}")
    if shorten:
        length = _longest_context(memory)
        if length is not None:
            found.append(f"max_model_len={length}")
    if memory.graphs and memory.with_(graphs=False).num_blocks >= least:
        found.append("enforce_eager=True")
    if memory.bytes_per_value > 2 and memory.in_16_bits().num_blocks >= least:
        found.append("dtype=bfloat16 or float16")
    fitting = (other.method for other in memory.smaller if memory.quantised(other).num_blocks >= least)
    found += [f"quantization={method}" for method in fitting][:1]
    return found


def least_share(memory: DeviceMemory, least: int) -> float | None:
    """The least ``gpu_memory_utilization``, in hundredths, that gives the cache so many blocks; None if even 1 is less."""
    need = memory.held + memory.beside + (least + 1) * memory.block_bytes
    hundredths = math.ceil(100 * need / memory.total)
    for share in (hundredths / 100, (hundredths + 1) / 100):
        if share <= 1 and memory.with_(gpu_memory_utilization=share).num_blocks >= least:
            return share
    return None


def _advice(memory: DeviceMemory, least: int, shorten: bool) -> str:
    """What to change: one thing where one does, else what there is to be had."""
    found = remedies(memory, least, shorten)
    if found:
        alone = "This makes room" if len(found) == 1 else "Each of these alone makes room"
        return f"{alone}: {', '.join(found)}"
    thrifty = memory.with_(graphs=False, gpu_memory_utilization=1.0, max_num_seqs=1, max_num_batched_tokens=1)
    thrifty = thrifty.with_(max_num_batched_tokens=min(TOKENS, memory.max_num_batched_tokens))
    if thrifty.num_blocks >= least:
        return (
            "No setting alone makes room; all of these together do: gpu_memory_utilization=1, max_num_seqs=1, "
            f"max_num_batched_tokens={thrifty.max_num_batched_tokens}, enforce_eager=True"
        )
    lacking = (least - thrifty.num_blocks) * memory.block_bytes
    return (
        f"No setting makes room: {gib(lacking)} are lacking. Use a smaller model, a larger GPU{_from_others(memory, least)}"
    )


def _from_others(memory: DeviceMemory, least: int) -> str:
    """What others would have to give up, as the end of a sentence; empty where an empty card would not do either."""
    own = memory.held - memory.taken + memory.beside + (least + 1) * memory.block_bytes
    if memory.allowed < own:
        return ""
    share = math.floor(100 * (memory.allowed - own) / memory.total) / 100
    said = f", or free some of the {gib(memory.taken)} that were taken before"
    if memory.of_this_process:
        said += (
            f", {gib(memory.of_this_process)} of it by this process: close its other engine, or give that one "
            f"gpu_memory_utilization={share:g} at most"
        )
    return said


def _token_budgets(memory: DeviceMemory) -> Iterator[int]:
    """Smaller budgets, the largest first, down to what a step of decodes needs."""
    top = min(memory.step_tokens, memory.max_num_batched_tokens) - 1
    yield from range(top // TOKENS * TOKENS, max(memory.max_num_seqs, TOKENS) - 1, -TOKENS)
    if memory.max_num_seqs < min(TOKENS, top + 1):
        yield memory.max_num_seqs


def _largest(counts: Iterable[int], changed: Callable[[int], DeviceMemory], least: int) -> int | None:
    return next((count for count in counts if changed(count).num_blocks >= least), None)


def _longest_context(memory: DeviceMemory) -> int | None:
    """The longest context for which the cache holds one; a shorter one also makes the batch smaller."""
    low, high = 0, memory.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        shorter = memory.with_(max_model_len=middle)
        low, high = (middle, high) if shorter.num_blocks >= shorter.blocks_of(middle) else (low, middle - 1)
    return low if low >= 2 else None


def check_weights(memory: DeviceMemory, name: str, dtype: str, device: str) -> None:
    """Before the loading: see that the weights fit what is free, and the share that may be used.

    What a step takes is only guessed by then: the guess goes into the advice, and does not decide. Where options give the
    cache's size, the share does not count.

    Raises:
        OutOfMemoryError: they do not; minutes of loading would end in nothing.

    """
    free = memory.total - memory.taken
    needed = memory.weights
    if needed <= free and (not memory.measured or memory.with_(activations=Grows()).num_blocks >= 1):
        return
    said = f"{name} takes {gib(needed)} for its weights in {dtype}; {device} has {gib(free)} of {gib(memory.total)} free. "
    found = [] if needed > free else remedies(memory, 1)
    if needed > free and memory.bytes_per_value > 2 and memory.in_16_bits().weights <= free:
        found = [f"dtype=bfloat16 or float16 ({gib(memory.in_16_bits().weights)})"]
    elif needed > free:
        found = [f"quantization={one.method} ({gib(one.weights)})" for one in memory.smaller if one.weights <= free]
    if needed > free:
        said += f"It needs {gib(needed - free)} more. "
        advice = f"Use {found[0]}" if found else f"Use a smaller model or a larger GPU{_from_others(memory, 1)}"
    else:
        said += f"{told(memory)} "
        advice = f"Set {', or '.join(found)}" if found else _advice(memory, 1, shorten=False)
    raise OutOfMemoryError(said + advice, needed=needed, free=free)


def after_a_failure(
    memory: DeviceMemory, stage: str, device: str, free: int, num_blocks: int, fixed: str | None = None
) -> str:
    """What to do after an allocation failed while the engine was made, although the sums had come out.

    Args:
        memory: the sums.
        stage: what was being made, as "making the KV cache".
        device: its name.
        free: bytes that are free once everything of the engine's is given back.
        num_blocks: of the cache that was to be made; 0 before that is known.
        fixed: the option that gave the cache's size, if one did.

    """
    cache = (num_blocks + 1) * memory.block_bytes if num_blocks else 0
    wanted = f" of {num_blocks:,} blocks ({gib(cache)})" if num_blocks else ""
    said = f"{device} ran out of memory while {stage}{wanted}; {gib(free)} are free without this engine. "
    room = free - memory.weights - memory.libraries - memory.beside
    blocks = room // memory.block_bytes - 1
    if fixed is not None:
        if blocks < 1:
            return f"{said}No cache fits beside the weights: use a smaller model or dtype, or free what others hold"
        return f"{said}{fixed}={blocks if fixed == 'num_gpu_blocks_override' else (blocks + 1) * memory.block_bytes} fits"
    graphs = "enforce_eager=True does without CUDA graphs; or " if memory.graphs and "graphs" in stage else ""
    lacking = max(cache - room, memory.total // 20)
    share = math.floor(100 * (memory.allowed - lacking) / memory.total) / 100
    return f"{said}Others took memory meanwhile, or it is in pieces: {graphs}set gpu_memory_utilization={max(share, 0.01):g}"


def after_a_failure_on_a_cpu(
    stage: str, free: int, block_bytes: int, num_blocks: int, num_host_blocks: int = 0, fixed: str | None = None
) -> str:
    """The same on a CPU; ``num_blocks`` of a cache and ``num_host_blocks`` of its swap space were being made, if any."""
    said = f"the machine ran out of memory while {stage}; {gib(free)} are free. "
    cache, swap, usable = num_blocks * block_bytes, num_host_blocks * block_bytes, free * 9 // 10
    if not cache:
        return f"{said}Use a smaller model or dtype"
    if swap and cache < usable:
        return f"{said}Beside the cache of {gib(cache)} there is room for swap_space={(usable - cache) / GIB:.3f} (GiB)"
    sizes = {"num_gpu_blocks_override": usable // block_bytes, "kv_cache_memory_bytes": usable}
    fits = f"{fixed}={sizes[fixed]}" if fixed is not None else f"cpu_kvcache_space={usable / GIB:.3f} (GiB)"
    return f"{said}The cache was to have {gib(cache)}: set {fits}"
